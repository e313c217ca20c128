"""Nets that take another way at each call: a converted net has the results of the original."""

import copy
import random

import numpy as np
import pytest
import torch
from foreign_nets import BatchNormAct2d, spread
from torch import nn

from inplace_abn import convert

CHANNELS = 4
ACTIVATIONS = [
    nn.ReLU,
    lambda: nn.ReLU(inplace=True),
    nn.SiLU,
    lambda: nn.SiLU(inplace=True),
    nn.Hardswish,
    nn.ELU,
    lambda: nn.LeakyReLU(0.2, inplace=True),
    nn.ReLU6,
    nn.GELU,
]
OUT_OF_PLACE = [nn.ReLU, nn.SiLU, nn.Hardswish, nn.ELU, nn.LeakyReLU, nn.ReLU6, nn.GELU]


class WaywardNet(nn.Module):
    """Blocks that take another way at each call, by numpy, Python, a schedule or values. Norms are nested and hooked,
    and activations are shared."""

    def __init__(self, seed, blocks=6):
        super().__init__()
        choose = random.Random(seed)
        self.stem = nn.Conv2d(3, CHANNELS, 3, padding=1)
        self.shared = choose.choice(OUT_OF_PLACE)()
        self.alpha, self.calls, self.seen = 1.0, 0, []
        self.blocks = nn.ModuleList()
        self.program = []
        for _ in range(blocks):
            norm = choose.choice([nn.BatchNorm2d, nn.BatchNorm2d, lambda c: BatchNormAct2d(c, nn.SiLU)])(CHANNELS)
            body = nn.Sequential(nn.Sequential(nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1), nn.Sequential(norm)))
            if choose.random() < 0.2:
                norm.register_forward_hook(lambda module, args, y: self.seen.append(y.shape))
            if choose.random() < 0.2:
                norm.register_forward_hook(lambda module, args, y: self.seen.append(y.detach().mean().item()))
            if choose.random() < 0.1:
                norm.register_full_backward_hook(lambda module, grads, gradients: None)
            way = choose.choice(["numpy", "python", "schedule", "value", "loop", "drop", "optional", "grad mode"])
            # A tensor that is activated in place twice is refused in backward, in part by torch itself.
            again = isinstance(norm, BatchNormAct2d) or way in ("loop", "grad mode")
            self.blocks.append(nn.ModuleList([body, choose.choice(OUT_OF_PLACE if again else ACTIVATIONS)()]))
            self.program.append((way, choose.random() < 0.4, choose.random() < 0.4))

    def forward(self, x, mask=None):
        self.calls += 1
        x = self.stem(x)
        for (body, own), (way, residual, shared) in zip(self.blocks, self.program, strict=True):
            activation = self.shared if shared else own
            y = body(x)
            if way == "numpy" and np.random.rand() < 0.5:  # noqa: NPY002
                y = y * (np.random.rand() * self.alpha)  # noqa: NPY002
            if way == "python" and random.random() < 0.5:
                y = y + x
            if way == "schedule" and self.calls % 3 == 0:
                y = torch.cat([y, y], 1)[:, ::2]
            if way == "value" and y.detach().abs().mean().item() > 0.8:
                y = y - y.mean((2, 3), keepdim=True)
            if way == "loop":
                for _ in range(self.calls % 3):
                    y = activation(y)
            if way == "drop" and self.training and random.random() < 0.3:
                continue
            if way == "optional" and mask is not None:
                y = y * mask
            if way == "grad mode" and torch.is_grad_enabled():
                y = torch.tanh(y)
            y = y + x if residual else y
            x = activation(y)
        return x


@pytest.mark.parametrize("seed", range(12))
def test_a_converted_net_that_takes_another_way_each_time_is_the_original(seed):
    torch.manual_seed(seed)
    net = spread(WaywardNet(seed), seed).double()
    batches = [torch.randn(2, 3, 12, 12, dtype=torch.float64) for _ in range(5)]
    results = []
    for model in (net, convert(copy.deepcopy(net))):
        optimizer, found = torch.optim.SGD(model.parameters(), lr=1e-3), []
        for i, x in enumerate(batches):
            for seeded in (random.seed, torch.manual_seed, np.random.seed):
                seeded(i)
            model.alpha = 0.0 if i == 4 else 1.0
            optimizer.zero_grad()
            z = model(x, mask=x[:, :1] if i % 2 else None)
            z.square().mean().backward()
            found += [z.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
            optimizer.step()
        results.append([*found, *(b.double() for b in model.buffers()), *model.parameters()])
    scale = max(float(t.detach().abs().max()) for t in results[0])
    for ours, others in zip(*results, strict=True):
        assert (ours - others).abs().max() < 1e-6 * scale
