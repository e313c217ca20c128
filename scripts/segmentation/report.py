"""The demo's results: a table, and a picture of memory and losses."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from inplace_abn.conversion.table import readable
from inplace_abn.memory import MemoryReport, draw_timeline
from inplace_abn.memory.plot import CONVERTED, NATIVE

WARM_UP_STEPS = 5
ENOUGH_STEPS = 300
"""In fewer steps the nets learn too little to be compared."""
COLOURS = {"native": NATIVE, "converted": CONVERTED}


@dataclass(frozen=True)
class Run:
    """One net, trained from one seed."""

    seed: int
    norm: str
    miou: float
    losses: list[float]
    seconds: list[float]
    """The seconds of each step."""


@dataclass(frozen=True)
class Comparison:
    """A net and its converted copy, trained from some seeds."""

    net: str
    dtype: str
    runs: list[Run]
    """The native and the converted net of each seed."""
    first: MemoryReport
    """Of a step before training."""
    memory: MemoryReport
    """Of a step after it."""

    def mious(self, norm: str) -> list[float]:
        return [run.miou for run in self.runs if run.norm == norm]


def mean_iou(confusion: Tensor) -> float:
    """The mean intersection over union of those classes that are labels or predictions of any pixel; NaN if there are
    none.

    ``confusion`` [classes, classes] counts pixels by (label, prediction).
    """
    hits = confusion.diagonal()
    union = confusion.sum(0) + confusion.sum(1) - hits
    return (hits[union > 0] / union[union > 0]).mean().item()


def table(comparison: Comparison) -> str:
    """A Markdown table of both nets and of their differences."""
    runs, memory, first = comparison.runs, comparison.memory, comparison.first
    assert memory.after is not None
    assert first.after is not None
    names = "held, initialised", "held, trained", "peak, first step", "peak, trained", "time of a step"
    rows = [("", f"mIoU, {seeds(len(runs) // 2)}", *names)]
    figures = []
    usages = (first.before, memory.before), (first.after, memory.after)
    for norm, (early, late) in zip(COLOURS, usages, strict=True):
        of, mious = [run for run in runs if run.norm == norm], comparison.mious(norm)
        ms = 1e3 * statistics.median(t for run in of for t in run.seconds[WARM_UP_STEPS:] or run.seconds)
        sizes = early.held, late.held, early.first_peak, late.peak
        rows.append((norm, spread(mious), *map(readable, sizes), f"{ms:.0f} ms"))
        figures.append((mious, *sizes, ms))
    (mious, *native), (others, *converted) = figures
    ratios = [f"{new / old - 1:+.0%}" for old, new in zip(native, converted, strict=True)]
    rows.append(("difference", spread([b - a for a, b in zip(mious, others, strict=True)], "+"), *ratios))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [f"| {row[0]:<{widths[0]}} | {' | '.join(map(str.rjust, row[1:], widths[1:]))} |" for row in rows]
    rule = "|".join("-" * (width + 1) + ("-:"[i > 0]) for i, width in enumerate(widths))
    return "\n".join([lines[0], f"|{rule}|", *lines[1:]])


def conclusion(comparison: Comparison) -> str:
    """What the numbers tell, in a sentence or two."""
    if len(comparison.runs[0].losses) < ENOUGH_STEPS:
        return (
            "This was a smoke test: in so few steps the nets have learned next to nothing, so the mIoU compares "
            "nothing, and weights are nearly as initialised. Training without --steps takes some minutes."
        )
    native, converted = comparison.mious("native"), comparison.mious("converted")
    differences = [b - a for a, b in zip(native, converted, strict=True)]
    if len(differences) < 2:
        return f"From the same seed, the converted net's mIoU differs by {differences[0]:+.4f}."
    between = statistics.stdev(native)
    share = f", {abs(statistics.mean(differences)) / between:.2f} of that" if between else ""
    return (
        f"Seeds alone move the native net's mIoU by {between:.4f} (standard deviation). From the same seed, the "
        f"converted net's differs by {statistics.mean(differences):+.4f} ± {statistics.stdev(differences):.4f}{share}."
    )


def seeds(count: int) -> str:
    return f"{count} seed" if count == 1 else f"{count} seeds"


def spread(values: Sequence[float], sign: str = "") -> str:
    """Mean and standard deviation of ``values``."""
    mean = f"{statistics.mean(values):{sign}.3f}"
    return f"{mean} ± {statistics.stdev(values):.3f}" if len(values) > 1 else mean


def save_picture(path: Path, comparisons: Sequence[Comparison]) -> None:
    """Writes a PNG. A row for each comparison has the memory over a step of both nets, and the smoothed losses of all
    runs."""
    figure = Figure(figsize=(12, 4.5 * len(comparisons)), layout="constrained")
    rows = figure.subplots(len(comparisons), 2, squeeze=False)
    for (left, right), comparison in zip(rows, comparisons, strict=True):
        name = f"{comparison.net}, {comparison.dtype}: "
        draw_timeline(left, comparison.memory)
        left.set_title(f"{name}memory over one training step")
        _draw_losses(right, comparison.runs, name)
    figure.savefig(path, dpi=120)


def _draw_losses(axes: Axes, runs: Sequence[Run], name: str) -> None:
    window = max(1, len(runs[0].losses) // 40)
    for run in runs:
        # The losses of the converted net are drawn thin, over those of the native net.
        converted = run.norm == "converted"
        axes.plot(
            np.arange(len(run.losses) - window + 1) + window,
            np.convolve(run.losses, np.ones(window) / window, mode="valid"),
            color=COLOURS[run.norm],
            linewidth=1 if converted else 3,
            alpha=1 if converted else 0.4,
            label=f"{run.norm}, {seeds(len(runs) // 2)}" if run.seed == 0 else None,
        )
    means = "" if window == 1 else f", means of {window} steps"
    axes.set(title=f"{name}losses{means}", xlabel="step", ylabel="cross entropy")
    axes.set_ylim(bottom=0)
    axes.legend()
