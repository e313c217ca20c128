"""A net that is converted and then compiled, and what a step with it holds."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

from inplace_abn import convert

ACTIVATIONS = {
    "relu": nn.ReLU(),
    "relu in place": nn.ReLU(inplace=True),
    "functional relu": lambda y: F.relu(y),
    "leaky_relu": nn.LeakyReLU(0.2),
    "leaky_relu of slope 0": nn.LeakyReLU(0.0),
    "elu": nn.ELU(),
    "silu": nn.SiLU(inplace=True),
    "hardswish": nn.Hardswish(),
    "gelu": nn.GELU(),
    "gelu tanh": nn.GELU("tanh"),
    "mish": nn.Mish(),
    "identity": nn.Identity(),
}
PLANE = 4 * 9 * 10
"""The number of values of a channel in the batches of the tests. A tensor with fewer values is no activation."""


class ChainAndBlocks(nn.Module):
    """A chain, and two residual blocks. The other branch of the first block is a norm, too. All share one
    activation."""

    blocks = 4

    def __init__(self, activation):
        super().__init__()
        self.convs = nn.ModuleList(
            nn.Conv2d(3 if i == 0 else 8, 8, 3, padding=1, bias=False) for i in range(self.blocks)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(self.blocks))
        self.last = nn.Conv2d(8, 4, 1)
        self.activation = activation
        for norm in self.norms:
            nn.init.uniform_(norm.weight, 0.5, 1.5)
            nn.init.normal_(norm.bias, std=0.3)
            with torch.no_grad():
                norm.weight[0] *= -1

    def block(self, i, x):
        return self.norms[i](self.convs[i](x))

    def forward(self, x):
        a = self.activation(self.block(0, x))
        b = self.activation(self.block(1, a) + self.block(2, a))
        return self.last(self.activation(self.block(3, b) + b))


class ChainAndBlock(ChainAndBlocks):
    """A chain and a residual block, which are compiled in half the time."""

    blocks = 2

    def forward(self, x):
        a = self.activation(self.block(0, x))
        return self.last(self.activation(self.block(1, a) + a))


def made(activation="relu", device="cpu", kind=ChainAndBlock):
    torch.manual_seed(3)
    return kind(ACTIVATIONS[activation]).to(device, torch.float64)


def batch(device="cpu", shape=(4, 3, 9, 10)):
    torch.manual_seed(4)
    return torch.randn(shape, dtype=torch.float64, device=device)


def held(function, x):
    """Bytes of activations that autograd keeps. x needs a gradient as in `compiled_nets.step`, or a compiled function
    would be compiled once more."""
    sizes = {}

    def pack(t):
        storage = t.untyped_storage()
        if storage.nbytes() >= PLANE * t.element_size():
            sizes[storage._cdata] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = function(x.clone().requires_grad_())
    del y
    return sum(sizes.values())


def compiled_pair(native, backend="aot_eager", **options):
    """Returns a converted copy, and the same copy compiled."""
    module = convert(copy.deepcopy(native))
    return module, torch.compile(module, backend=backend, fullgraph=True, **options)
