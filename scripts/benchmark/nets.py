"""Nets like those that people train, written out, with the normalisation left open.

``norm(channels, activation)`` makes a module that is called with its input and, optionally, a residual to add before
the activation. Images are [N, 3, H, W], with H and W multiples of 32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Norm = Callable[[int, str], nn.Module]


class ConvNorm(nn.Module):
    """Convolution, norm, activation."""

    def __init__(
        self,
        norm: Norm,
        inputs: int,
        outputs: int,
        activation: str,
        kernel: int = 3,
        stride: int = 1,
        groups: int = 1,
        dilation: int = 1,
    ) -> None:
        super().__init__()
        padding = dilation * (kernel // 2)
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, padding, groups=groups, dilation=dilation, bias=False)
        self.norm = norm(outputs, activation)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return self.norm(self.conv(x), residual)


class Bottleneck(nn.Module):
    """ResNet's block of three convolutions; the skip is added before the last activation."""

    def __init__(self, norm: Norm, inputs: int, width: int, activation: str, stride: int, dilation: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.reduce = ConvNorm(norm, inputs, width, activation, kernel=1)
        self.spatial = ConvNorm(norm, width, width, activation, stride=stride, dilation=dilation)
        self.expand = ConvNorm(norm, width, outputs, activation, kernel=1)
        fits = stride == 1 and inputs == outputs
        self.skip = nn.Identity() if fits else ConvNorm(norm, inputs, outputs, "identity", kernel=1, stride=stride)

    def forward(self, x: Tensor) -> Tensor:
        return self.expand(self.spatial(self.reduce(x)), self.skip(x))


class ResNetStages(nn.Module):
    """ResNet-50 without its classifier: the outputs of the first and of the last stage."""

    def __init__(self, norm: Norm, activation: str, dilate_last: bool = False) -> None:
        super().__init__()
        self.stem = nn.Sequential(ConvNorm(norm, 3, 64, activation, kernel=7, stride=2), nn.MaxPool2d(3, 2, 1))
        self.stages = nn.ModuleList()
        inputs = 64
        for i, (width, blocks) in enumerate([(64, 3), (128, 4), (256, 6), (512, 3)]):
            dilation = 2 if dilate_last and i == 3 else 1
            stride = 1 if i == 0 or dilation > 1 else 2
            stage = [Bottleneck(norm, inputs, width, activation, stride, dilation)]
            inputs = 4 * width
            stage += [Bottleneck(norm, inputs, width, activation, 1, dilation) for _ in range(blocks - 1)]
            self.stages.append(nn.Sequential(*stage))

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        x = low = self.stages[0](self.stem(images))
        for stage in self.stages[1:]:
            x = stage(x)
        return low, x


class ResNet50(nn.Module):
    """Logits [N, classes]."""

    def __init__(self, norm: Norm, classes: int) -> None:
        super().__init__()
        self.features = ResNetStages(norm, "relu")
        self.classifier = nn.Linear(2048, classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(self.features(images)[1].mean((2, 3)))


class PyramidPooling(nn.Module):
    """DeepLab's atrous spatial pyramid pooling."""

    def __init__(self, norm: Norm, inputs: int, outputs: int, activation: str) -> None:
        super().__init__()
        self.branches = nn.ModuleList([ConvNorm(norm, inputs, outputs, activation, kernel=1)])
        for dilation in (6, 12, 18):
            self.branches.append(ConvNorm(norm, inputs, outputs, activation, dilation=dilation))
        self.whole = ConvNorm(norm, inputs, outputs, activation, kernel=1)
        self.project = ConvNorm(norm, 5 * outputs, outputs, activation, kernel=1)

    def forward(self, x: Tensor) -> Tensor:
        whole = self.whole(x.mean((2, 3), keepdim=True)).expand(-1, -1, *x.shape[2:])
        return self.project(torch.cat([*(branch(x) for branch in self.branches), whole], dim=1))


class DeepLab(nn.Module):
    """DeepLabV3+ on a ResNet-50 of stride 16; logits [N, classes, H, W]. N is at least 2."""

    def __init__(self, norm: Norm, classes: int, activation: str = "leaky_relu") -> None:
        super().__init__()
        self.features = ResNetStages(norm, activation, dilate_last=True)
        self.pyramid = PyramidPooling(norm, 2048, 256, activation)
        self.low = ConvNorm(norm, 256, 48, activation, kernel=1)
        self.decoder = nn.Sequential(
            ConvNorm(norm, 304, 256, activation),
            ConvNorm(norm, 256, 256, activation),
            nn.Conv2d(256, classes, 1),
        )

    def forward(self, images: Tensor) -> Tensor:
        low, high = self.features(images)
        high = resize(self.pyramid(high), low)
        return resize(self.decoder(torch.cat([self.low(low), high], dim=1)), images)


class InvertedResidual(nn.Module):
    """EfficientNet's block: expansion, depthwise convolution, squeeze and excitation, linear projection, skip."""

    def __init__(self, norm: Norm, inputs: int, outputs: int, expansion: int, stride: int, kernel: int) -> None:
        super().__init__()
        hidden = expansion * inputs
        self.expand = nn.Identity() if expansion == 1 else ConvNorm(norm, inputs, hidden, "silu", kernel=1)
        self.depthwise = ConvNorm(norm, hidden, hidden, "silu", kernel, stride, groups=hidden)
        self.squeeze = nn.Conv2d(hidden, max(1, inputs // 4), 1)
        self.excite = nn.Conv2d(max(1, inputs // 4), hidden, 1)
        self.project = ConvNorm(norm, hidden, outputs, "identity", kernel=1)
        self.skips = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        h = self.depthwise(self.expand(x))
        scale = torch.sigmoid(self.excite(F.silu(self.squeeze(h.mean((2, 3), keepdim=True)))))
        return self.project(h * scale, x if self.skips else None)


class EfficientNet(nn.Module):
    """EfficientNet-B0 without its dropout and stochastic depth; logits [N, classes]."""

    def __init__(self, norm: Norm, classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [ConvNorm(norm, 3, 32, "silu", stride=2)]
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
                layers.append(InvertedResidual(norm, inputs, outputs, expansion, stride if i == 0 else 1, kernel))
                inputs = outputs
        layers.append(ConvNorm(norm, inputs, 1280, "silu", kernel=1))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(1280, classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(self.features(images).mean((2, 3)))


class UNet(nn.Module):
    """Pairs of convolutions, down by pooling and up by interpolation; logits [N, classes, H, W]."""

    def __init__(self, norm: Norm, classes: int, widths: tuple[int, ...] = (64, 128, 256, 512, 1024)) -> None:
        super().__init__()

        def pair(inputs: int, outputs: int) -> nn.Sequential:
            return nn.Sequential(ConvNorm(norm, inputs, outputs, "relu"), ConvNorm(norm, outputs, outputs, "relu"))

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
    """A net, and (batch size, image size) that fit a machine with a CPU, a short run there, and a GPU."""

    make: Callable[[Norm, int], nn.Module]
    classes: int
    per_pixel: bool
    cpu: tuple[int, int]
    quick: tuple[int, int]
    cuda: tuple[int, int]

    def labels(self, batch: int, size: int, device: torch.device) -> Tensor:
        shape = (batch, size, size) if self.per_pixel else (batch,)
        return torch.randint(self.classes, shape, device=device)


NETS = {
    "resnet50": Recipe(ResNet50, 1000, False, cpu=(16, 128), quick=(4, 64), cuda=(128, 224)),
    "deeplab": Recipe(DeepLab, 21, True, cpu=(2, 192), quick=(2, 64), cuda=(16, 512)),
    "efficientnet": Recipe(EfficientNet, 1000, False, cpu=(16, 128), quick=(4, 64), cuda=(128, 224)),
    "unet": Recipe(UNet, 2, True, cpu=(2, 192), quick=(2, 64), cuda=(16, 256)),
}
