"""A net with one norm, whose forward pass a test gives."""

import torch
from foreign_nets import conv
from torch import nn

from inplace_abn import analyze


class OneNorm(nn.Module):
    """A convolution, a norm, an activation and another convolution. ``run(net, x)`` says how they are wired."""

    def __init__(self, run, activation=None, norm=None, inputs=3, channels=4):
        super().__init__()
        self.conv, self.last = conv(inputs, channels), conv(channels, channels)
        self.bn = nn.BatchNorm2d(channels) if norm is None else norm
        self.act = nn.ReLU() if activation is None else activation
        self.run = run

    def forward(self, x):
        return self.run(self, x)


def images():
    return torch.randn(2, 3, 8, 8)


def plain(m, x):
    return m.last(m.act(m.bn(m.conv(x))))


def activated_twice(m, x):
    y = m.bn(m.conv(x))
    return m.last(m.act(y)) + y


def multiplied(m, x):
    y = m.bn(m.conv(x))
    y *= 2
    return m.last(y)


def without_grad(m, x):
    with torch.no_grad():
        y = m.act(m.bn(m.conv(x)))
    return m.last(y)


def layer_of(run, norm=None):
    """What `analyze` says of the net's norm."""
    (layer,) = analyze(OneNorm(run, norm=norm), images()).layers
    return layer
