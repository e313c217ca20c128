"""The tensors that operations are timed on, by group. Needs torch alone, for it is also read by other interpreters."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
CORE = "core"
SMALL = "small"
CUDA_BATCH_FACTOR = 8
"""How many times the batch of a group other than `SMALL` is on CUDA."""


@dataclass(frozen=True)
class Group:
    """Shapes (batch, channel, height, width) and the activations they are timed with."""

    shapes: tuple[tuple[int, int, int, int], ...]
    activations: tuple[str, ...]


GROUPS = {
    CORE: Group(
        ((16, 64, 112, 112), (16, 256, 56, 56), (16, 1024, 14, 14), (2, 256, 128, 128)), ("leaky_relu", "relu", "silu")
    ),
    SMALL: Group(((2, 8, 4, 4), (4, 16, 8, 8), (8, 32, 16, 16), (2, 3, 128, 128)), ("leaky_relu",)),
    "resnet50": Group(((8, 64, 112, 112), (8, 256, 56, 56), (8, 128, 28, 28), (8, 2048, 7, 7)), ("relu",)),
    "deeplab": Group(((2, 64, 256, 256), (2, 256, 128, 128), (2, 1024, 32, 32), (2, 256, 32, 32)), ("leaky_relu",)),
    "efficientnet": Group(((8, 96, 112, 112), (8, 144, 56, 56), (8, 480, 14, 14), (8, 1152, 7, 7)), ("silu",)),
    "unet": Group(((2, 64, 256, 256), (2, 128, 128, 128), (2, 256, 64, 64), (2, 1024, 16, 16)), ("relu",)),
}
QUICK_SHAPES = {CORE: ((16, 1024, 14, 14), (2, 256, 128, 128)), SMALL: ((2, 8, 4, 4),)}


@dataclass(frozen=True)
class Setting:
    """A dtype and a memory layout, written as in ``bf16:channels_last``."""

    dtype: str
    layout: str

    @classmethod
    def parse(cls, text: str) -> Setting:
        dtype, _, layout = text.partition(":")
        if dtype not in DTYPES or layout not in LAYOUTS:
            raise ValueError(f"expected one of {list(DTYPES)}, a colon and one of {list(LAYOUTS)}, got {text!r}")
        return cls(dtype, layout)

    def __str__(self) -> str:
        return f"{self.dtype}:{self.layout}"


def parse_shape(text: str) -> tuple[int, ...]:
    """(batch, channel, height, width), written as in ``16x64x112x112``."""
    shape = tuple(int(size) for size in text.split("x"))
    if len(shape) != 4 or min(shape) < 1:
        raise ValueError(f"expected four sizes joined by x, got {text!r}")
    return shape


@dataclass(frozen=True)
class Case:
    """One tensor and activation to time normalisation on."""

    group: str
    shape: tuple[int, ...]
    setting: Setting
    activation: str

    @property
    def channels(self) -> int:
        return self.shape[1]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.setting.dtype].itemsize

    def random(self, device: torch.device) -> Tensor:
        values = torch.randn(self.shape, device=device).to(DTYPES[self.setting.dtype])
        return values.contiguous(memory_format=LAYOUTS[self.setting.layout])

    def record(self) -> dict[str, object]:
        """As JSON has it."""
        return {
            "group": self.group,
            "shape": list(self.shape),
            "dtype": self.setting.dtype,
            "layout": self.setting.layout,
            "activation": self.activation,
            "nbytes": self.nbytes,
        }

    @classmethod
    def from_record(cls, record: dict[str, object]) -> Case:
        setting = Setting(str(record["dtype"]), str(record["layout"]))
        return cls(str(record["group"]), tuple(record["shape"]), setting, str(record["activation"]))  # type: ignore[arg-type]


def make_cases(
    groups: Iterable[str],
    settings: Iterable[Setting],
    activations: Iterable[str] | None = None,
    shapes: Iterable[tuple[int, ...]] | None = None,
    cuda: bool = False,
    quick: bool = False,
) -> list[Case]:
    """The cases of ``groups``, each in every setting; ``activations`` and ``shapes`` replace those of the groups.

    ``quick`` leaves few shapes, and of activations a group's first, on CUDA also relu, and silu in the first setting.
    """
    settings = list(settings)
    cases = []
    for name in groups:
        group = GROUPS[name]
        chosen = shapes or (QUICK_SHAPES.get(name, group.shapes[:1]) if quick else group.shapes)
        for batch, *rest in chosen:
            if cuda and name != SMALL and shapes is None:
                batch *= CUDA_BATCH_FACTOR
            for i, activation in enumerate(activations or group.activations):
                full = not quick or i == 0 or (cuda and activation == "relu")
                kept = settings if full else settings[: activation == "silu"]
                cases += [Case(name, (batch, *rest), setting, activation) for setting in kept]
    return cases
