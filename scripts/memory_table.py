#!/usr/bin/env python
"""Measures how many activation-sized blocks the forward pass of a unit leaves allocated, native and converted.

The numbers come from the allocator's own events, in a step after those in which norms are measured. Converted units are
measured with norms as initialised and as `trained.as_trained` leaves them. The table is printed, and written to
docs/comparison.md.
"""

from __future__ import annotations

import copy

import generated
import torch
from benchmark.contenders import native
from torch import Tensor, nn
from trained import as_trained
from zoo import COMPARISON, memory, training

from inplace_abn import convert

CHANNELS = 64
UNITS, FIRST = 11, 3


class Unit(nn.Module):
    """Convolution, norm and activation."""

    def __init__(self, activation: str) -> None:
        super().__init__()
        self.conv = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(CHANNELS)
        self.activation = native(activation, True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.activation(self.norm(self.conv(x)))
        return y


class BasicBlock(nn.Module):
    """Convolution, norm and activation twice. The input is added before the second activation."""

    def __init__(self, activation: str) -> None:
        super().__init__()
        self.first, self.second = Unit(activation), Unit(activation)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second.norm(self.second.conv(self.first(x)))
        z: Tensor = self.second.activation(y + x)
        return z


def held(net: nn.Sequential, x: Tensor, converted: bool) -> float:
    """The activations that a unit of a net holds. The whole net holds more than its first units do, and the difference
    is the memory of the other ones."""
    parts = [copy.deepcopy(part) for part in (net, net[:FIRST])]
    whole, first = (memory(training(convert(part), x)) if converted else memory(training(part, x), 1) for part in parts)
    return (whole.held - first.held) / (len(net) - FIRST) / x.nbytes


def main() -> None:
    x = torch.randn(4, CHANNELS, 32, 32)
    made_by = generated.made_by()
    lines = [generated.table_head(("block", "activation", "native", "in place", "in place, as trained"))]
    print(*lines)
    for name, unit in {"conv + norm + activation": Unit, "residual block of two": BasicBlock}.items():
        for activation in ("leaky_relu", "relu", "silu", "hardswish"):
            torch.manual_seed(0)
            net = nn.Sequential(*[unit(activation) for _ in range(UNITS)])
            blocks = [held(net, x, False), held(net, x, True), held(as_trained(net), x, True)]
            lines.append(generated.table_line((name, activation, *(f"{each:.2f}" for each in blocks))))
            print(lines[-1], flush=True)
    generated.write(COMPARISON, "blocks", lines, made_by)


if __name__ == "__main__":
    main()
