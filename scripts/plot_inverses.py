#!/usr/bin/env python
"""Draws how the input follows from the output: relu with a tiny slope, and silu, whose last bit names the branch.

python scripts/plot_inverses.py docs/pictures/inverses.png
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure

LOW, HIGH = "#e69f00", "#0072b2"
MINIMUM = -1.2784645
"""The y at which silu has its least value."""
SHOWN_SLOPE = 0.05


def draw(path: Path) -> None:
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    relu, silu = figure.subplots(1, 2)
    y = torch.linspace(-4, 2, 601)
    low, high = y[y <= 0], y[y >= 0]
    relu.plot(low, SHOWN_SLOPE * low, color=LOW, linewidth=2, label="y < 0: z = 2⁻⁴⁸ · y (drawn steeper)")
    relu.plot(high, high, color=HIGH, linewidth=2, label="y ≥ 0: z = y")
    relu.set_title("ReLU: the sign of z names the branch")
    low, high = y[y <= MINIMUM], y[y >= MINIMUM]
    silu.plot(low, F.silu(low), color=LOW, linewidth=2, label="left of the minimum: last bit of z is 1")
    silu.plot(high, F.silu(high), color=HIGH, linewidth=2, label="right of it: last bit of z is 0")
    z = -0.15
    silu.axhline(z, color="#999999", linestyle="--", linewidth=1)
    for branch, colour in ((low, LOW), (high, HIGH)):
        where = branch[(F.silu(branch) - z).abs().argmin()]
        silu.plot([where], [z], "o", color=colour)
    silu.text(2, z - 0.02, "one z, two y", ha="right", va="top", fontsize=9, color="#666666")
    silu.set_ylim(-0.35, 0.75)
    silu.set_title("SiLU: the last bit of z names the branch")
    for axes in (relu, silu):
        axes.set_xlabel("y, what the norm computes")
        axes.set_ylabel("z, what is kept")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(loc="upper left", frameon=False, fontsize=9)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("picture", type=Path)
    draw(parser.parse_args().picture)


if __name__ == "__main__":
    main()
