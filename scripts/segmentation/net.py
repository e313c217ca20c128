"""Two small nets of torch's own layers, in which activations take far more memory than weights."""

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


class Attention(nn.Module):
    """A block of a transformer, [N, tokens, WIDTH] in and out."""

    WIDTH, HEADS = 96, 4

    def __init__(self) -> None:
        super().__init__()
        width = self.WIDTH
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        queries, keys, values = self.qkv(self.norm1(x)).unflatten(2, (3, self.HEADS, -1)).permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(queries, keys, values)
        x = x + self.out(found.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    """Maps images [N, 3, H, W] to logits [N, classes, H / 2, W / 2]. H and W are multiples of 16."""

    PATCH, DEPTH = 4, 4

    def __init__(self, classes: int) -> None:
        super().__init__()
        width = Attention.WIDTH
        self.patches = nn.Conv2d(3, width, self.PATCH, self.PATCH)
        # The zeros beyond the border tell where a patch lies, in images of any size.
        self.position = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.blocks = nn.Sequential(*(Attention() for _ in range(self.DEPTH)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes * (self.PATCH // 2) ** 2)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images)
        x = x + self.position(x)
        tokens = self.blocks(x.flatten(2).transpose(1, 2))
        logits = self.head(self.norm(tokens)).transpose(1, 2).unflatten(2, x.shape[2:])
        return F.pixel_shuffle(logits, self.PATCH // 2)


NETS: dict[str, Callable[[int, str], nn.Module]] = {"unet": UNet, "vit": lambda classes, activation: ViT(classes)}
"""The nets by name; made for a number of classes and, for the U-Net, an activation."""
LEARNING_RATES = {"unet": 5e-3, "vit": 1e-3}
