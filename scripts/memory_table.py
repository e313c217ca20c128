#!/usr/bin/env python
"""Prints how many activation-sized blocks the forward pass of a unit leaves allocated, native and converted.

The numbers come from the allocator's own events. The table is Markdown on standard output.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from inplace_abn import convert
from inplace_abn.activations import TYPICAL, native
from inplace_abn.memory import measure

CHANNELS = 8


class Unit(nn.Module):
    """Convolution, norm and activation. With ``residual`` there are two of each, and the input is added before the
    second activation."""

    def __init__(self, activation: str, residual: bool) -> None:
        super().__init__()
        self.inner = Unit(activation, False) if residual else nn.Identity()
        self.residual = residual
        self.conv = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(CHANNELS)
        self.activation = native(activation, dict(TYPICAL)[activation], True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(self.inner(x)))
        return self.activation(y + x if self.residual else y)


def main() -> None:
    x = torch.randn(4, CHANNELS, 128, 128)
    print("| block | activation | native | in place |\n| --- | --- | --- | --- |")
    for name, residual in {"conv + norm + activation": False, "residual block of two": True}.items():
        for activation in ("leaky_relu", "relu", "silu", "hardswish"):
            # The net of seven units holds more than the net of three. The difference is the memory of four units.
            shorter, longer = (nn.Sequential(*[Unit(activation, residual) for _ in range(n)]) for n in (3, 7))
            held = [measure(longer, x).held - measure(shorter, x).held]
            held += [measure(convert(longer), x).held - measure(convert(shorter), x).held]
            print(f"| {name} | {activation} | {' | '.join(f'{blocks / 4 / x.nbytes:.2f}' for blocks in held)} |")


if __name__ == "__main__":
    main()
