"""The demo's results: a table, and a picture of memory and losses."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from torch import Tensor

from inplace_abn.conversion.table import readable
from inplace_abn.memory import MemoryReport, draw_timeline
from inplace_abn.memory.plot import CONVERTED, NATIVE

WARM_UP_STEPS = 5
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


def mean_iou(confusion: Tensor) -> float:
    """The mean intersection over union of those classes that are labels or predictions of any pixel; NaN if there are
    none.

    ``confusion`` [classes, classes] counts pixels by (label, prediction).
    """
    hits = confusion.diagonal()
    union = confusion.sum(0) + confusion.sum(1) - hits
    return (hits[union > 0] / union[union > 0]).mean().item()


def table(runs: Sequence[Run], memory: MemoryReport) -> str:
    """A Markdown table of both nets and of their differences."""
    assert memory.after is not None
    rows = [("", f"mIoU, {seeds(len(runs) // 2)}", "held for backward", "peak of a step", "time of a step")]
    figures = []
    for norm, usage in zip(COLOURS, (memory.before, memory.after), strict=True):
        of = [run for run in runs if run.norm == norm]
        mious = [run.miou for run in of]
        ms = 1e3 * statistics.median(t for run in of for t in run.seconds[WARM_UP_STEPS:] or run.seconds)
        rows.append((norm, spread(mious), readable(usage.held), readable(usage.peak), f"{ms:.0f} ms"))
        figures.append((mious, usage.held, usage.peak, ms))
    (mious, *native), (others, *converted) = figures
    ratios = [f"{new / old - 1:+.0%}" for old, new in zip(native, converted, strict=True)]
    rows.append(("difference", spread([b - a for a, b in zip(mious, others, strict=True)], "+"), *ratios))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [f"| {row[0]:<{widths[0]}} | {' | '.join(map(str.rjust, row[1:], widths[1:]))} |" for row in rows]
    rule = "|".join("-" * (width + 1) + ("-:"[i > 0]) for i, width in enumerate(widths))
    return "\n".join([lines[0], f"|{rule}|", *lines[1:]])


def seeds(count: int) -> str:
    return f"{count} seed" if count == 1 else f"{count} seeds"


def spread(values: Sequence[float], sign: str = "") -> str:
    """Mean and standard deviation of ``values``."""
    mean = f"{statistics.mean(values):{sign}.3f}"
    return f"{mean} ± {statistics.stdev(values):.3f}" if len(values) > 1 else mean


def save_picture(path: Path, runs: Sequence[Run], memory: MemoryReport) -> None:
    """Writes a PNG with the memory over a step of both nets, and with the smoothed losses of all runs."""
    figure = Figure(figsize=(12, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    draw_timeline(left, memory)
    left.set_title("memory over one training step")
    window = max(1, len(runs[0].losses) // 40)
    for run in runs:
        # The losses of the converted net are drawn thin, over those of the native net.
        converted = run.norm == "converted"
        label = f"{run.norm}, {seeds(len(runs) // 2)}" if run.seed == 0 else None
        losses = np.convolve(run.losses, np.ones(window) / window, mode="valid")
        right.plot(
            np.arange(len(losses)) + window,
            losses,
            color=COLOURS[run.norm],
            linewidth=1 if converted else 3,
            alpha=1 if converted else 0.4,
            label=label,
        )
    right.set(
        title="losses" if window == 1 else f"losses, means of {window} steps", xlabel="step", ylabel="cross entropy"
    )
    right.set_ylim(bottom=0)
    right.legend()
    figure.savefig(path, dpi=120)
