"""Nets like those that people train, written out of torch's own modules, and public ones by name.

Images are [N, 3, H, W], with H and W multiples of 32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
import zoo
from torch import Tensor, nn

from benchmark.contenders import ACTIVATIONS

RELU = partial(nn.ReLU, inplace=True)
LEAKY_RELU = partial(nn.LeakyReLU, ACTIVATIONS["leaky_relu"], inplace=True)
# In place, torch's SiLU keeps a copy of what it overwrites.
SILU = nn.SiLU
Activation = Callable[[], nn.Module]


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


class Bottleneck(nn.Module):
    """ResNet's block of three convolutions; the skip is added before the last activation."""

    def __init__(self, inputs: int, width: int, activation: Activation, stride: int, dilation: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.reduce = conv_norm(inputs, width, activation, kernel=1)
        self.spatial = conv_norm(width, width, activation, stride=stride, dilation=dilation)
        self.expand = conv_norm(width, outputs, None, kernel=1)
        fits = stride == 1 and inputs == outputs
        self.skip = nn.Identity() if fits else conv_norm(inputs, outputs, None, kernel=1, stride=stride)
        self.activation = activation()

    def forward(self, x: Tensor) -> Tensor:
        h = self.expand(self.spatial(self.reduce(x)))
        h += self.skip(x)
        return self.activation(h)


class ResNetStages(nn.Module):
    """ResNet-50 without its classifier: the outputs of the first and of the last stage."""

    def __init__(self, activation: Activation, dilate_last: bool = False) -> None:
        super().__init__()
        self.stem = nn.Sequential(conv_norm(3, 64, activation, kernel=7, stride=2), nn.MaxPool2d(3, 2, 1))
        self.stages = nn.ModuleList()
        inputs = 64
        for i, (width, blocks) in enumerate([(64, 3), (128, 4), (256, 6), (512, 3)]):
            dilation = 2 if dilate_last and i == 3 else 1
            stride = 1 if i == 0 or dilation > 1 else 2
            stage = [Bottleneck(inputs, width, activation, stride, dilation)]
            inputs = 4 * width
            stage += [Bottleneck(inputs, width, activation, 1, dilation) for _ in range(blocks - 1)]
            self.stages.append(nn.Sequential(*stage))

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        x = low = self.stages[0](self.stem(images))
        for stage in self.stages[1:]:
            x = stage(x)
        return low, x


class ResNet50(nn.Module):
    """Logits [N, classes]."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.features = ResNetStages(RELU)
        self.classifier = nn.Linear(2048, classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(self.features(images)[1].mean((2, 3)))


class PyramidPooling(nn.Module):
    """DeepLab's atrous spatial pyramid pooling."""

    def __init__(self, inputs: int, outputs: int, activation: Activation) -> None:
        super().__init__()
        self.branches = nn.ModuleList([conv_norm(inputs, outputs, activation, kernel=1)])
        for dilation in (6, 12, 18):
            self.branches.append(conv_norm(inputs, outputs, activation, dilation=dilation))
        self.whole = conv_norm(inputs, outputs, activation, kernel=1)
        self.project = conv_norm(5 * outputs, outputs, activation, kernel=1)

    def forward(self, x: Tensor) -> Tensor:
        whole = self.whole(x.mean((2, 3), keepdim=True)).expand(-1, -1, *x.shape[2:])
        return self.project(torch.cat([*(branch(x) for branch in self.branches), whole], dim=1))


class DeepLab(nn.Module):
    """DeepLabV3+ on a ResNet-50 of stride 16; logits [N, classes, H, W]. N is at least 2."""

    def __init__(self, classes: int, activation: Activation = LEAKY_RELU) -> None:
        super().__init__()
        self.features = ResNetStages(activation, dilate_last=True)
        self.pyramid = PyramidPooling(2048, 256, activation)
        self.low = conv_norm(256, 48, activation, kernel=1)
        self.decoder = nn.Sequential(
            conv_norm(304, 256, activation),
            conv_norm(256, 256, activation),
            nn.Conv2d(256, classes, 1),
        )

    def forward(self, images: Tensor) -> Tensor:
        low, high = self.features(images)
        high = resize(self.pyramid(high), low)
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


class EfficientNet(nn.Module):
    """EfficientNet-B0 without its dropout and stochastic depth; logits [N, classes]."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [conv_norm(3, 32, SILU, stride=2)]
        inputs = 32
        for expansion, outputs, repeats, stride, kernel in (
            (1, 16, 1, 1, 3),
            (6, 24, 2, 2, 3),
            (6, 40, 2, 2, 5),
            (6, 80, 3, 2, 3),
            (6, 112, 3, 1, 5),
            (6, 192, 4, 2, 5),
            (6, 320, 1, 1, 3),
        ):
            for i in range(repeats):
                layers.append(InvertedResidual(inputs, outputs, expansion, stride if i == 0 else 1, kernel))
                inputs = outputs
        layers.append(conv_norm(inputs, 1280, SILU, kernel=1))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(1280, classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(self.features(images).mean((2, 3)))


class UNet(nn.Module):
    """Pairs of convolutions, down by pooling and up by interpolation; logits [N, classes, H, W]."""

    def __init__(self, classes: int, widths: tuple[int, ...] = (64, 128, 256, 512, 1024)) -> None:
        super().__init__()

        def pair(inputs: int, outputs: int) -> nn.Sequential:
            return nn.Sequential(conv_norm(inputs, outputs, RELU), conv_norm(outputs, outputs, RELU))

        self.encoder = nn.ModuleList(pair(i, o) for i, o in zip((3, *widths[:-1]), widths, strict=True))
        self.decoder = nn.ModuleList(
            pair(deep + skip, skip) for deep, skip in zip(widths[:0:-1], widths[-2::-1], strict=True)
        )
        self.head = nn.Conv2d(widths[0], classes, 1)

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


def resize(x: Tensor, like: Tensor) -> Tensor:
    """To ``like``'s height and width."""
    return F.interpolate(x, size=like.shape[2:], mode="bilinear", align_corners=False)


@dataclass(frozen=True)
class Recipe:
    """What makes a net, and (batch size, image size) that fit a machine with a CPU, a short run there, and a GPU."""

    make: Callable[[], nn.Module]
    cpu: tuple[int, int] = (8, 128)
    quick: tuple[int, int] = (2, 64)
    cuda: tuple[int, int] = (64, 224)


NETS = {
    "resnet50": Recipe(partial(ResNet50, 1000), cpu=(16, 128), quick=(4, 64), cuda=(128, 224)),
    "deeplab": Recipe(partial(DeepLab, 21), cpu=(2, 192), cuda=(16, 512)),
    "efficientnet": Recipe(partial(EfficientNet, 1000), cpu=(16, 128), quick=(4, 64), cuda=(128, 224)),
    "unet": Recipe(partial(UNet, 2), cpu=(2, 192), cuda=(16, 256)),
}


def recipe(name: str) -> Recipe:
    """Of a net of `NETS`, or of one that `zoo.named` knows. Raises ValueError if neither has it."""
    if ":" in name:
        return Recipe(zoo.named(name).build)
    if name not in NETS:
        raise ValueError(f"expected one of {', '.join(NETS)}, or a public model such as timm:resnet50, got {name!r}")
    return NETS[name]
