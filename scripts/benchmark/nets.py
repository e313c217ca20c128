"""Nets like those that people train, written with torch's own modules, and public nets by name.

Images are [N, 3, H, W]. H and W are multiples of 32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
import zoo
from torch import Tensor, nn

from benchmark.contenders import ACTIVATIONS

Activation = Callable[[], nn.Module]
RELU = partial(nn.ReLU, inplace=True)
LEAKY_RELU = partial(nn.LeakyReLU, ACTIVATIONS["leaky_relu"], inplace=True)
# Torch's SiLU in place would save a copy of its input.
SILU = nn.SiLU


def conv_norm(
    inputs: int,
    outputs: int,
    activation: Activation | None,
    kernel: int = 3,
    stride: int = 1,
    groups: int = 1,
    dilation: int = 1,
) -> nn.Sequential:
    """Convolution, norm, and activation if there is one."""
    padding = dilation * (kernel // 2)
    conv = nn.Conv2d(inputs, outputs, kernel, stride, padding, groups=groups, dilation=dilation, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), *([activation()] if activation else []))


def resize(x: Tensor, like: Tensor) -> Tensor:
    """Resizes ``x`` to the height and width of ``like``."""
    return F.interpolate(x, size=like.shape[2:], mode="bilinear", align_corners=False)


def classifier(features: nn.Module, channels: int) -> nn.Module:
    """``features`` with a linear layer on top. The output is logits [N, 1000]."""
    return nn.Sequential(features, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000))


class Bottleneck(nn.Module):
    """ResNet's block of three convolutions. The skip is added before the last activation."""

    def __init__(self, inputs: int, width: int, activation: Activation, stride: int, dilation: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.body = nn.Sequential(
            conv_norm(inputs, width, activation, kernel=1),
            conv_norm(width, width, activation, stride=stride, dilation=dilation),
            conv_norm(width, outputs, None, kernel=1),
        )
        fits = stride == 1 and inputs == outputs
        self.skip = nn.Identity() if fits else conv_norm(inputs, outputs, None, kernel=1, stride=stride)
        self.activation = activation()

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        h += self.skip(x)
        return self.activation(h)


def resnet_stages(activation: Activation, dilate_last: bool = False) -> nn.Sequential:
    """The four stages of ResNet-50, without its classifier. The stem belongs to the first stage."""
    stages: list[nn.Module] = []
    layers: list[nn.Module] = [conv_norm(3, 64, activation, kernel=7, stride=2), nn.MaxPool2d(3, 2, 1)]
    inputs = 64
    for i, (width, blocks) in enumerate([(64, 3), (128, 4), (256, 6), (512, 3)]):
        dilation = 2 if dilate_last and i == 3 else 1
        for j in range(blocks):
            stride = 2 if i > 0 and j == 0 and dilation == 1 else 1
            layers.append(Bottleneck(inputs, width, activation, stride, dilation))
            inputs = 4 * width
        stages.append(nn.Sequential(*layers))
        layers = []
    return nn.Sequential(*stages)


class PyramidPooling(nn.Module):
    """DeepLab's atrous spatial pyramid pooling."""

    def __init__(self, inputs: int, outputs: int, activation: Activation) -> None:
        super().__init__()
        kernels = [{"kernel": 1}, *({"dilation": dilation} for dilation in (6, 12, 18))]
        self.branches = nn.ModuleList(conv_norm(inputs, outputs, activation, **kernel) for kernel in kernels)
        self.whole = conv_norm(inputs, outputs, activation, kernel=1)
        self.project = conv_norm(5 * outputs, outputs, activation, kernel=1)

    def forward(self, x: Tensor) -> Tensor:
        whole = self.whole(x.mean((2, 3), keepdim=True)).expand(-1, -1, *x.shape[2:])
        return self.project(torch.cat([*(branch(x) for branch in self.branches), whole], dim=1))


class DeepLab(nn.Module):
    """DeepLabV3+ on a ResNet-50 of stride 16; logits [N, 21, H, W]. N is at least 2."""

    def __init__(self, activation: Activation = LEAKY_RELU) -> None:
        super().__init__()
        self.first, *stages = resnet_stages(activation, dilate_last=True)
        self.pyramid = nn.Sequential(*stages, PyramidPooling(2048, 256, activation))
        self.low = conv_norm(256, 48, activation, kernel=1)
        self.decoder = nn.Sequential(
            conv_norm(304, 256, activation), conv_norm(256, 256, activation), nn.Conv2d(256, 21, 1)
        )

    def forward(self, images: Tensor) -> Tensor:
        low = self.first(images)
        high = resize(self.pyramid(low), low)
        return resize(self.decoder(torch.cat([self.low(low), high], dim=1)), images)


class InvertedResidual(nn.Module):
    """EfficientNet's block: expansion, depthwise convolution, squeeze and excitation, linear projection, skip."""

    def __init__(self, inputs: int, outputs: int, expansion: int, stride: int, kernel: int) -> None:
        super().__init__()
        hidden = expansion * inputs
        self.expand = nn.Identity() if expansion == 1 else conv_norm(inputs, hidden, SILU, kernel=1)
        self.depthwise = conv_norm(hidden, hidden, SILU, kernel, stride, groups=hidden)
        self.squeeze = nn.Conv2d(hidden, max(1, inputs // 4), 1)
        self.excite = nn.Conv2d(max(1, inputs // 4), hidden, 1)
        self.project = conv_norm(hidden, outputs, None, kernel=1)
        self.skips = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        h = self.depthwise(self.expand(x))
        scale = torch.sigmoid(self.excite(F.silu(self.squeeze(h.mean((2, 3), keepdim=True)))))
        h = self.project(h * scale)
        return h + x if self.skips else h


STAGES = (
    *((1, 16, 1, 1, 3), (6, 24, 2, 2, 3), (6, 40, 2, 2, 5), (6, 80, 3, 2, 3)),
    *((6, 112, 3, 1, 5), (6, 192, 4, 2, 5), (6, 320, 1, 1, 3)),
)
"""The stages of EfficientNet-B0: expansion, output channels, blocks, stride of the first block, kernel."""


def efficientnet() -> nn.Module:
    """EfficientNet-B0 without its dropout and stochastic depth."""
    layers: list[nn.Module] = [conv_norm(3, 32, SILU, stride=2)]
    inputs = 32
    for expansion, outputs, blocks, stride, kernel in STAGES:
        for i in range(blocks):
            layers.append(InvertedResidual(inputs, outputs, expansion, stride if i == 0 else 1, kernel))
            inputs = outputs
    return classifier(nn.Sequential(*layers, conv_norm(inputs, 1280, SILU, kernel=1)), 1280)


class UNet(nn.Module):
    """A U-Net of pairs of convolutions, with pooling downwards and interpolation upwards; logits [N, 2, H, W]."""

    def __init__(self, widths: tuple[int, ...] = (64, 128, 256, 512, 1024)) -> None:
        super().__init__()

        def pair(inputs: int, outputs: int) -> nn.Sequential:
            return nn.Sequential(conv_norm(inputs, outputs, RELU), conv_norm(outputs, outputs, RELU))

        self.encoder = nn.ModuleList(map(pair, (3, *widths), widths))
        self.decoder = nn.ModuleList(
            pair(deep + skip, skip) for deep, skip in zip(widths[:0:-1], widths[-2::-1], strict=True)
        )
        self.head = nn.Conv2d(widths[0], 2, 1)

    def forward(self, images: Tensor) -> Tensor:
        x = self.encoder[0](images)
        skips = []
        for stage in self.encoder[1:]:
            skips.append(x)
            x = stage(F.max_pool2d(x, 2))
        for stage in self.decoder:
            skip = skips.pop()
            x = stage(torch.cat([skip, resize(x, skip)], dim=1))
        return self.head(x)


class Recipe(NamedTuple):
    """The factory of a net, and (batch size, image size) for a CPU, for a quick run, and for a GPU."""

    make: Callable[[], nn.Module]
    cpu: tuple[int, int] = (8, 128)
    quick: tuple[int, int] = (2, 64)
    cuda: tuple[int, int] = (64, 224)


NETS = {
    "resnet50": Recipe(lambda: classifier(resnet_stages(RELU), 2048), cpu=(16, 128), quick=(4, 64), cuda=(128, 224)),
    "deeplab": Recipe(DeepLab, cpu=(2, 192), cuda=(16, 512)),
    "efficientnet": Recipe(efficientnet, cpu=(16, 128), quick=(4, 64), cuda=(128, 224)),
    "unet": Recipe(UNet, cpu=(2, 192), cuda=(16, 256)),
}


def recipe(name: str) -> Recipe:
    """The recipe of a net of `NETS`, or of a public net that `zoo.named` knows. Raises ValueError for other names."""
    if ":" in name:
        return Recipe(zoo.named(name).build)
    if name not in NETS:
        raise ValueError(f"expected one of {', '.join(NETS)}, or a public model such as timm:resnet50, got {name!r}")
    return NETS[name]
