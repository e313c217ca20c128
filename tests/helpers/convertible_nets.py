"""Nets that can be converted, by name, and their inputs."""

import pytest
import torch
import torch.nn.functional as F
from foreign_nets import CalledActivation, ResNet, conv, hugging_face, mobilenet, spread, timm_net
from torch import nn


def images(size=32):
    return torch.randn(2, 3, size, size)


def chain(blocks):
    return nn.Sequential(
        *[m for _ in range(blocks) for m in (conv(4, 4), nn.BatchNorm2d(4), nn.ReLU(inplace=True))], conv(4, 4)
    )


class Siblings(nn.Module):
    """Two norms of one input. Each by itself saves nothing. Both together save their input."""

    def __init__(self, kind=nn.BatchNorm2d):
        super().__init__()
        self.conv, self.last = conv(4, 4), conv(8, 4)
        self.first, self.second = nn.BatchNorm2d(4), kind(4)

    def forward(self, x):
        x = self.conv(x)
        return self.last(torch.cat([F.relu(self.first(x)), F.relu(self.second(x))], 1))


def inception():
    activations = [F.relu, lambda y: F.relu(y, inplace=True), lambda y: F.silu(y), lambda y: y.relu_()]
    blocks = [CalledActivation(3 if i == 0 else 8, 8, activation) for i, activation in enumerate(activations)]
    return nn.Sequential(*blocks, nn.Conv2d(8, 4, 1))


NETS = {
    "resnet": ResNet,
    "mobilenet relu6 in place": lambda: mobilenet(lambda: nn.ReLU6(inplace=True)),
    "mobilenet relu6": lambda: mobilenet(nn.ReLU6),
    "mobilenet hardswish": lambda: mobilenet(lambda: nn.Hardswish(inplace=True)),
    "mobilenet silu": lambda: mobilenet(nn.SiLU),
    "inception": inception,
    "timm silu": timm_net,
    "timm relu": lambda: timm_net(nn.ReLU),
}
HELD = {
    "resnet": 0.58,
    "mobilenet relu6 in place": 0.96,
    "mobilenet relu6": 0.66,
    "mobilenet hardswish": 0.35,
    "mobilenet silu": 0.35,
    "inception": 0.45,
    "timm silu": 0.43,
    "timm relu": 0.59,
    "resnet basic": 0.6,
    "resnet bottleneck": 0.6,
    "upernet": 0.67,
    "segformer": 0.96,
    "regnet x": 0.53,
    "regnet y": 0.56,
    "mobilenet_v2": 0.72,
}
"""What the converted net holds for backward, in what the original holds."""
ALL = [*HELD]


def make(name):
    torch.manual_seed(0)
    if name not in NETS:
        pytest.importorskip("transformers")
    return spread(NETS[name]() if name in NETS else hugging_face()[name]())
