"""A net with one norm, whose forward pass a test gives."""

import torch
from torch import nn

from inplace_abn import analyze


class Net(nn.Module):
    """A convolution, a BatchNorm and another convolution. ``forward`` says how they are wired."""

    def __init__(self, forward, norm=None):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.bn = nn.BatchNorm2d(4) if norm is None else norm
        self.relu = nn.ReLU()
        self.last = nn.Conv2d(4, 4, 1)
        self.run = forward

    def forward(self, x):
        return self.run(self, x)


def images():
    return torch.randn(2, 3, 8, 8)


def plain(m, x):
    return m.last(m.relu(m.bn(m.conv(x))))


def layer_of(forward, norm=None):
    """What `analyze` says of the net's norm."""
    (layer,) = analyze(Net(forward, norm), images()).layers
    return layer
