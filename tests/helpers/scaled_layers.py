"""Linear layers whose output is multiplied by a vector."""

import torch
from torch import nn

from inplace_abn import report

SIZE = 12


class Net(nn.Module):
    """Linear layers and vectors. ``run(net, x)`` is the forward pass."""

    def __init__(self, run):
        super().__init__()
        self.fc1, self.fc2, self.last = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)
        self.gamma, self.other = (nn.Parameter(torch.linspace(0.1, 1, SIZE)) for _ in range(2))
        self.drop, self.run = nn.Dropout(0.0), run

    def forward(self, x):
        return self.run(self, x)


def tokens():
    return torch.randn(2, 7, SIZE, requires_grad=True)


def scales(model):
    """The names of the layers whose output is scaled without being kept."""
    return [layer.name for layer in report(model).layers if layer.follows == "mul by a vector" and layer.in_place]


def times(m, x):
    return x + m.fc1(x) * m.gamma


def permuted(m, x):
    return x + (m.fc1(x).permute(2, 0, 1) * m.gamma.reshape(-1, 1, 1)).permute(1, 2, 0)


def twice(m, x):
    x = x + m.fc1(x) * m.gamma
    return x + m.fc2(m.last(x)) * m.other


def one_layer_twice(m, x):
    x = x + m.fc1(x) * m.gamma
    return x + m.fc1(x) * m.other


def hooked(u):
    # The forward pass of a reentrant checkpoint has no gradients.
    if u.requires_grad:
        u.register_hook(lambda g: 3 * g)
