"""A small residual U-Net of torch's own layers, in which activations take far more memory than weights."""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "leaky_relu": lambda: nn.LeakyReLU(0.01, inplace=True),
    "relu": lambda: nn.ReLU(inplace=True),
    "silu": lambda: nn.SiLU(inplace=True),
}
WIDTHS = (16, 32, 64, 96)


def conv_norm(inputs: int, outputs: int, kernel: int = 3, stride: int = 1) -> list[nn.Module]:
    """Convolution and norm, which map [N, inputs, H, W] to [N, outputs, H / stride, W / stride]."""
    return [nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(outputs)]


class Residual(nn.Module):
    """A residual block of two convolutions, [N, channels, H, W] in and out."""

    def __init__(self, channels: int, activation: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.body = nn.Sequential(*conv_norm(channels, channels), activation(), *conv_norm(channels, channels))
        self.activation = activation()

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.body(x) + x)


class UNet(nn.Module):
    """Maps images [N, 3, H, W] to logits [N, classes, H / 2, W / 2]. H and W are multiples of 16."""

    def __init__(self, classes: int, activation: str) -> None:
        super().__init__()
        act = ACTIVATIONS[activation]
        inputs = (3, *WIDTHS[:-1])
        self.encoder = nn.ModuleList(
            nn.Sequential(*conv_norm(i, o, stride=2), act(), Residual(o, act), Residual(o, act))
            for i, o in zip(inputs, WIDTHS, strict=True)
        )
        pairs = list(zip(WIDTHS[:0:-1], WIDTHS[-2::-1], strict=True))
        self.reduce = nn.ModuleList(nn.Sequential(*conv_norm(deep, skip, kernel=1), act()) for deep, skip in pairs)
        self.decoder = nn.ModuleList(Residual(skip, act) for _, skip in pairs)
        self.head = nn.Conv2d(WIDTHS[0], classes, 3, padding=1)

    def forward(self, images: Tensor) -> Tensor:
        x, skips = images, []
        for stage in self.encoder:
            x = stage(x)
            skips.append(x)
        for reduce, stage, skip in zip(self.reduce, self.decoder, skips[-2::-1], strict=True):
            x = stage(F.interpolate(reduce(x), scale_factor=2) + skip)
        return self.head(x)
