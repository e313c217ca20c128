#!/usr/bin/env python
"""Draws the time of norm and activation in different implementations, from the table of means of `scripts/bench.py`.

python scripts/plot_speed.py scripts/results/cpu-2026-11-21/bench.md docs/pictures/speed.png
"""

from __future__ import annotations

import argparse
import math
import statistics
from pathlib import Path

from matplotlib.figure import Figure

GROUPS = {
    ("leaky_relu", "fp32"): "leaky ReLU\nfloat32",
    ("leaky_relu", "bf16"): "leaky ReLU\nbfloat16",
    ("silu", "fp32"): "SiLU\nfloat32",
    ("silu", "bf16"): "SiLU\nbfloat16",
}
EAGER = "eager / in-place"
CONTENDERS = {
    EAGER: ("BatchNorm + activation (eager)", "#999999"),
    "compile / in-place": ("the same by torch.compile", "#e69f00"),
    "checkpoint / in-place": ("the same by checkpointing", "#56b4e9"),
    "": ("inplace_abn", "#0072b2"),
}
"""Columns of the table, with their labels and colours. The empty name stands for our own time, the unit of the
table."""
TOP = 2.4
"""Higher bars are cut off here. Their labels say how high they are."""


def means(text: str, mode: str) -> dict[tuple[str, str], list[dict[str, float]]]:
    """The rows of large tensors by activation and dtype. Each row maps names of columns to values.

    Raises:
        ValueError: ``text`` has no table of means for ``mode``.
    """
    _, found, section = text.partition(f"## malloc {mode}\n")
    lines = iter(section.splitlines())
    header = next((line for line in lines if line.startswith("| group |") and "/ in-place" in line), None)
    if not found or header is None:
        raise ValueError(f"expected a table of means below '## malloc {mode}'")
    names = [cell.strip() for cell in header.strip("|").split("|")]
    result: dict[tuple[str, str], list[dict[str, float]]] = {}
    for line in lines:
        if not line.startswith("|"):
            break
        row = dict(zip(names, (cell.strip() for cell in line.strip("|").split("|")), strict=True))
        if row["group"] == "core":
            numbers = {key: float(value) for key, value in row.items() if "/ in-place" in key and value != "-"}
            result.setdefault((row["activation"], row["dtype"]), []).append(numbers)
    return result


def relative(rows: list[dict[str, float]], contender: str) -> float:
    """The time of ``contender`` over eager's, the geometric mean of the rows."""
    logarithms = [math.log((row[contender] if contender else 1.0) / row[EAGER]) for row in rows]
    return math.exp(statistics.fmean(logarithms))


def draw(table: dict[tuple[str, str], list[dict[str, float]]], path: Path) -> None:
    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.add_subplot()
    width = 0.8 / len(CONTENDERS)
    for i, (contender, (label, colour)) in enumerate(CONTENDERS.items()):
        places = [j + (i - (len(CONTENDERS) - 1) / 2) * width for j in range(len(GROUPS))]
        heights = [relative(table[group], contender) for group in GROUPS]
        axes.bar(places, [min(height, TOP) for height in heights], 0.92 * width, label=label, color=colour)
        for place, height in zip(places, heights, strict=True):
            text = f"{height:.1f} ↑" if height > TOP else f"{height:.2f}"
            axes.text(place, min(height, TOP) + 0.03, text, ha="center", va="bottom", fontsize=9)
    axes.set_xticks(range(len(GROUPS)), list(GROUPS.values()))
    axes.set_ylabel("time of forward + backward\n(eager = 1, lower is better)")
    axes.set_ylim(0, TOP + 0.2)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=len(CONTENDERS), frameon=False, fontsize=9)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("report", type=Path, help="a bench.md")
    parser.add_argument("picture", type=Path)
    parser.add_argument(
        "--malloc",
        default="warmed",
        choices=["default", "warmed"],
        help="where malloc reuses what is free, or does not",
    )
    args = parser.parse_args()
    draw(means(args.report.read_text(encoding="utf-8"), args.malloc), args.picture)


if __name__ == "__main__":
    main()
