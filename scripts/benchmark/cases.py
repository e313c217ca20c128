"""The tensors that operations are timed on, by group.

This module imports torch alone, because the interpreter that has the public package imports it, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
CORE, SMALL = "core", "small"
CUDA_BATCH_FACTOR = 8
"""On CUDA the batch of every group but `SMALL` is multiplied by this number."""


class Group(NamedTuple):
    """Shapes (batch, channel, height, width) and the activations they are timed with."""

    shapes: tuple[tuple[int, ...], ...]
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
QUICK = {
    CORE: Group(((16, 1024, 14, 14), (2, 256, 128, 128)), ("leaky_relu", "silu")),
    SMALL: Group(((2, 8, 4, 4),), ("leaky_relu",)),
}
"""The groups of a quick run. The first activation is timed in all settings, the others in the first setting only."""


class Setting(NamedTuple):
    """A dtype and a memory layout, written as in ``bf16:channels_last``."""

    dtype: str
    layout: str

    def __str__(self) -> str:
        return ":".join(self)


def shape_of(text: str) -> tuple[int, ...]:
    """(batch, channel, height, width), written as in ``16x64x112x112``. Raises ValueError for anything else."""
    shape = tuple(int(size) for size in text.split("x"))
    if len(shape) != 4 or min(shape) < 1:
        raise ValueError(f"expected four sizes joined by x, got {text!r}")
    return shape


class Case(NamedTuple):
    """One tensor and activation to time normalisation on."""

    group: str
    shape: tuple[int, ...]
    dtype: str
    layout: str
    activation: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    def random(self, device: torch.device) -> Tensor:
        values = torch.randn(self.shape, device=device).to(DTYPES[self.dtype])
        return values.contiguous(memory_format=LAYOUTS[self.layout])

    def record(self) -> dict[str, Any]:
        """The case as a JSON object."""
        return self._asdict() | {"nbytes": self.nbytes}


def make_cases(
    groups: Iterable[str],
    settings: Iterable[Setting],
    activations: Iterable[str] | None = None,
    shapes: Iterable[tuple[int, ...]] | None = None,
    cuda: bool = False,
    quick: bool = False,
) -> list[Case]:
    """The cases of ``groups``, each in every setting; ``activations`` and ``shapes`` replace those of the groups."""
    settings = list(settings)
    cases = []
    for name in groups:
        group = QUICK.get(name, GROUPS[name]) if quick else GROUPS[name]
        for batch, *rest in shapes or group.shapes:
            if cuda and name != SMALL and shapes is None:
                batch *= CUDA_BATCH_FACTOR
            for i, activation in enumerate(activations or group.activations):
                kept = settings[:1] if quick and i else settings
                cases += [Case(name, (batch, *rest), *setting, activation) for setting in kept]
    return cases
