"""The tensors that operations are timed on."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
CORE, SMALL = "core", "small"
GROUPS = {
    CORE: ((16, 64, 112, 112), (16, 256, 56, 56), (16, 1024, 14, 14), (2, 256, 128, 128)),
    SMALL: ((2, 8, 4, 4), (4, 16, 8, 8), (8, 32, 16, 16), (2, 3, 128, 128)),
}
"""Shapes (batch, channel, height, width)."""
CUDA_BATCH_FACTOR = 8
"""On CUDA the batch of every group but `SMALL` is multiplied by this number."""


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


def make_cases(
    groups: Iterable[str],
    settings: Iterable[Setting],
    activations: Iterable[str],
    shapes: Iterable[tuple[int, ...]] | None = None,
    cuda: bool = False,
    quick: bool = False,
) -> list[Case]:
    """The cases of ``groups``, or those of ``shapes``, each in every setting. A quick run takes one shape of each
    group. On CUDA the batches of large tensors of a group are larger."""
    settings, activations = list(settings), list(activations)
    part = slice(2, 3) if quick else slice(None)
    tensors = {CORE: tuple(shapes)} if shapes else {name: GROUPS[name][part] for name in groups}
    cases = []
    for group, chosen in tensors.items():
        for batch, *rest in chosen:
            if cuda and group != SMALL and not shapes:
                batch *= CUDA_BATCH_FACTOR
            cases += [Case(group, (batch, *rest), *setting, name) for name in activations for setting in settings]
    return cases
