"""Small nets like those that people train, whose norm is a parameter.

``norm(channels, activation)`` makes a module. The module is called with its input and, optionally, with a residual to
add before the activation.
"""

import torch
from torch import nn

from inplace_abn import InPlaceABN
from inplace_abn.activations import activate


class NativeNorm(nn.BatchNorm2d):
    """BatchNorm, residual and activation by torch's own functions."""

    def __init__(self, channels, activation):
        super().__init__(channels)
        self.activation = activation

    def forward(self, x, residual=None):
        y = super().forward(x)
        return activate(y if residual is None else y + residual, self.activation, 0.01, inplace=True)


def inplace_norm(channels, activation):
    return InPlaceABN(channels, activation=activation, signed_weight=True)


class ConvNorm(nn.Module):
    def __init__(self, norm, inputs, outputs, activation, kernel=3, stride=1, groups=1):
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
        self.norm = norm(outputs, activation)

    def forward(self, x, residual=None):
        return self.norm(self.conv(x), residual)


class ResidualBlock(nn.Module):
    """Two convolutions. The skip is added before the last activation."""

    def __init__(self, norm, channels, activation):
        super().__init__()
        self.first = ConvNorm(norm, channels, channels, activation)
        self.second = ConvNorm(norm, channels, channels, activation)

    def forward(self, x):
        return self.second(self.first(x), x)


class InvertedResidual(nn.Module):
    """Expansion, depthwise convolution, squeeze and excitation, linear projection, skip."""

    def __init__(self, norm, channels, activation, expansion=4):
        super().__init__()
        hidden = expansion * channels
        self.expand = ConvNorm(norm, channels, hidden, activation, kernel=1)
        self.depthwise = ConvNorm(norm, hidden, hidden, activation, groups=hidden)
        self.squeeze = nn.Conv2d(hidden, channels, 1)
        self.excite = nn.Conv2d(channels, hidden, 1)
        self.project = ConvNorm(norm, hidden, channels, "identity", kernel=1)

    def forward(self, x):
        h = self.depthwise(self.expand(x))
        scale = torch.sigmoid(self.excite(nn.functional.silu(self.squeeze(h.mean((2, 3), keepdim=True)))))
        return self.project(h * scale) + x


class Classifier(nn.Module):
    """Stem, blocks, classifier."""

    def __init__(self, norm, activation, block, channels=8, blocks=3, classes=5):
        super().__init__()
        self.stem = ConvNorm(norm, 3, channels, activation)
        self.blocks = nn.Sequential(*[block(norm, channels, activation) for _ in range(blocks)])
        self.classifier = nn.Linear(channels, classes)

    def forward(self, x):
        return self.classifier(self.blocks(self.stem(x)).mean((2, 3)))


class Segmenter(nn.Module):
    """Encoder and decoder joined by a concatenation, one class per pixel."""

    def __init__(self, norm, activation, channels=8, classes=5):
        super().__init__()
        self.stem = ConvNorm(norm, 3, channels, activation)
        self.down = ConvNorm(norm, channels, 2 * channels, activation, stride=2)
        self.bottom = ResidualBlock(norm, 2 * channels, activation)
        self.up = ConvNorm(norm, 3 * channels, channels, activation)
        self.classifier = nn.Conv2d(channels, classes, 1)

    def forward(self, x):
        fine = self.stem(x)
        coarse = nn.functional.interpolate(self.bottom(self.down(fine)), scale_factor=2.0)
        return self.classifier(self.up(torch.cat([fine, coarse], dim=1))).mean((2, 3))


def resnet(norm, activation):
    return Classifier(norm, activation, ResidualBlock)


def efficientnet(norm, activation):
    return Classifier(norm, activation, InvertedResidual)


def segmenter(norm, activation):
    return Segmenter(norm, activation)
