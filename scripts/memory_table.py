#!/usr/bin/env python
"""Prints how many activation-sized blocks the forward pass leaves allocated per unit, native and in place, by the
allocator's own events. Markdown on standard output.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from inplace_abn import InPlaceABN
from inplace_abn.activations import activate

CHANNELS = 8
SHAPE = (4, CHANNELS, 128, 128)
Norm = Callable[[str], nn.Module]


class Native(nn.BatchNorm2d):
    """BatchNorm, residual and in-place activation."""

    def __init__(self, activation: str) -> None:
        super().__init__(CHANNELS)
        self.activation = activation

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        y = super().forward(x)
        return activate(y if residual is None else y + residual, self.activation, 0.01, inplace=True)


def in_place(activation: str) -> nn.Module:
    return InPlaceABN(CHANNELS, activation=activation, signed_weight=True)


class Unit(nn.Module):
    """Convolution, normalisation, activation."""

    def __init__(self, norm: Norm, activation: str) -> None:
        super().__init__()
        self.conv = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False)
        self.norm = norm(activation)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return self.norm(self.conv(x), residual)


class ResidualBlock(nn.Module):
    """Two units; the block's input is added before the second activation."""

    def __init__(self, norm: Norm, activation: str) -> None:
        super().__init__()
        self.first, self.second = Unit(norm, activation), Unit(norm, activation)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x), x)


def held_after_forward(net: nn.Module, x: Tensor) -> float:
    """In units of x's size."""
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        z = net(x)
    events = profile.profiler.kineto_results.events()  # type: ignore[union-attr]
    held = sum(event.nbytes() for event in events if event.name() == "[memory]")
    del z
    return held / x.nbytes


def per_block(block: Callable[[Norm, str], nn.Module], norm: Norm, activation: str) -> float:
    x = torch.randn(SHAPE)
    short, long = (held_after_forward(nn.Sequential(*[block(norm, activation) for _ in range(n)]), x) for n in (3, 7))
    return (long - short) / 4


def main() -> None:
    print("| block | activation | native | in place |\n| --- | --- | --- | --- |")
    for name, block in {"conv + norm + activation": Unit, "residual block of two": ResidualBlock}.items():
        for activation in ("leaky_relu", "relu", "silu", "hardswish"):
            native, ours = (per_block(block, norm, activation) for norm in (Native, in_place))
            print(f"| {name} | {activation} | {native:.2f} | {ours:.2f} |")


if __name__ == "__main__":
    main()
