"""Blocks with layer norms and RMS norms of all kinds, and what their layer did."""

import copy

import torch
from layer_norms import ChannelsFirstNorm, LayerNorm2d, RMSNormOfGemma, RMSNormOfLlama
from torch import nn

from inplace_abn import guard, report

SIZE = 16
CHANNELS_FIRST = (LayerNorm2d, ChannelsFirstNorm)


def spread(norm):
    """Gives a norm a weight and a bias that are different everywhere."""
    with torch.no_grad():
        for i, p in enumerate(norm.parameters()):
            p.copy_((1 - i) + 0.3 * torch.randn(p.shape))
    return norm


NORMS = {
    "layer norm": lambda: spread(nn.LayerNorm(SIZE)),
    "without bias": lambda: spread(nn.LayerNorm(SIZE, bias=False)),
    "without parameters": lambda: nn.LayerNorm(SIZE, elementwise_affine=False),
    "rms norm": lambda: spread(nn.RMSNorm(SIZE)),
    "rms norm with eps": lambda: spread(nn.RMSNorm(SIZE, eps=1e-3)),
    "rms norm without weight": lambda: nn.RMSNorm(SIZE, elementwise_affine=False),
    "llama": lambda: RMSNormOfLlama(SIZE),
    "gemma": lambda: RMSNormOfGemma(SIZE),
    "layer norm 2d": lambda: spread(LayerNorm2d(SIZE)),
    "by hand": lambda: ChannelsFirstNorm(SIZE),
}
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


class Block(nn.Module):
    """A residual stream, a norm of it, and what keeps the norm's output. ``run(block, x)`` is the forward pass."""

    def __init__(self, norm, run=None):
        super().__init__()
        kind = nn.Conv2d if isinstance(norm, CHANNELS_FIRST) else nn.Linear
        size = (SIZE, SIZE, 1) if kind is nn.Conv2d else (SIZE, SIZE)
        self.first, self.norm, self.last, self.run = kind(*size), norm, kind(*size), run
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        x = self.first(x) + x
        return x + self.last(self.norm(x)) if self.run is None else self.run(self, x)


def inputs(norm, dtype=torch.float32):
    shape = (2, SIZE, 5, 3) if isinstance(norm, CHANNELS_FIRST) else (2, 15, SIZE)
    return (torch.randn(shape) * 1.7 + 0.4).to(dtype)


def layer_of(model):
    (layer,) = report(model).layers
    return layer


def stepped(model, x=None):
    model(inputs(model.norm) if x is None else x).float().square().sum().backward()
    guard.generations.advance()
    return model


def dropped(m, x):
    return m.last(m.drop(m.norm(x)))


def averaged(m, x):
    return m.last(m.norm(x).mean(1))


def errors(model, converted, x):
    """The errors of the gradients of both, relative to float64."""
    found = []
    for net in (copy.deepcopy(model).double(), model, converted):
        net.zero_grad()
        given = x.to(next(net.parameters()).dtype, copy=True).requires_grad_()
        z = net(given)
        z.backward((x + 1).to(z.dtype))
        found.append((given.grad, *(p.grad for p in net.norm.parameters())))
    right, *others = found
    return [[float((t.double() - r).norm() / r.norm()) for t, r in zip(each, right, strict=True)] for each in others]
