"""A small residual U-Net whose every normalisation is one norm + activation unit on a fresh convolution output."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import inplace_abn
from inplace_abn.activations import TYPICAL, native

NORMS = ("native", "inplace", "inplace-sync")
ACTIVATION_PARAMS = dict(TYPICAL)
"""The activations to choose from, with the default of `--activation-param` for each."""

NormFactory = Callable[[int], nn.Module]


class NativeABN(nn.BatchNorm2d):
    """`nn.BatchNorm2d` and an activation, with the state dict names of one in-place unit."""

    def __init__(self, channels: int, activation: str, param: float) -> None:
        super().__init__(channels)
        self.activation = native(activation, param, inplace=True)

    def forward(self, input: Tensor) -> Tensor:
        return self.activation(super().forward(input))


def make_norm(kind: str, channels: int, activation: str, param: float) -> nn.Module:
    """Norm + activation on [N, channels, H, W]. The in-place kinds overwrite their input: nothing else may hold it."""
    if kind == "native":
        return NativeABN(channels, activation, param)
    unit = inplace_abn.InPlaceABNSync if kind == "inplace-sync" else inplace_abn.InPlaceABN
    return unit(channels, activation=activation, activation_param=param)


def conv_abn(inputs: int, outputs: int, norm: NormFactory, stride: int = 1) -> nn.Sequential:
    """3x3 convolution, norm and activation: [N, inputs, H, W] to [N, outputs, H / stride, W / stride]."""
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False), norm(outputs))


class Residual(nn.Module):
    """`x + conv(abn(conv(x)))`, [N, channels, H, W] in and out. The unit overwrites a convolution's output, not `x`."""

    def __init__(self, channels: int, norm: NormFactory) -> None:
        super().__init__()
        self.inner = conv_abn(channels, channels, norm)
        self.outer = nn.Conv2d(channels, channels, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(self.inner(x))


class UNet(nn.Module):
    """Images [N, 3, H, W] to logits [N, classes, H, W]; H and W are multiples of 16."""

    def __init__(self, classes: int, norm: NormFactory, widths: tuple[int, ...] = (24, 48, 96, 128)) -> None:
        super().__init__()
        inputs = (3, *widths[:-1])
        self.encoder = nn.ModuleList(
            nn.Sequential(conv_abn(i, o, norm, stride=2), Residual(o, norm))
            for i, o in zip(inputs, widths, strict=True)
        )
        self.decoder = nn.ModuleList(
            nn.Sequential(conv_abn(deep + skip, skip, norm), conv_abn(skip, skip, norm))
            for deep, skip in zip(widths[:0:-1], widths[-2::-1], strict=True)
        )
        self.head = nn.Conv2d(widths[0], classes, 3, padding=1)

    def forward(self, images: Tensor) -> Tensor:
        x, skips = images, []
        for stage in self.encoder:
            x = stage(x)
            skips.append(x)
        for stage, skip in zip(self.decoder, skips[-2::-1], strict=True):
            x = stage(torch.cat([upsample(x), skip], dim=1))
        return upsample(self.head(x))


def upsample(x: Tensor) -> Tensor:
    return F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)


def build_net(classes: int, norm: str, activation: str, param: float) -> UNet:
    return UNet(classes, lambda channels: make_norm(norm, channels, activation, param))
