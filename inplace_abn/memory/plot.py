"""The timeline of a memory report as a picture."""

from __future__ import annotations

import os
from typing import Any

from inplace_abn.conversion.table import readable
from inplace_abn.memory.report import MemoryReport
from inplace_abn.memory.step import Usage

NATIVE, CONVERTED = (0.84, 0.37, 0.0), (0.0, 0.45, 0.70)
"""Colours that can be distinguished without seeing red and green."""


def check_plot(path: str) -> None:
    """Raises if `save_plot` cannot write a picture to ``path``. An existing file stays as it is.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: matplotlib has no format for the file's suffix.
        OSError: the file cannot be written.
    """
    figure = _figure()
    formats = figure.canvas.get_supported_filetypes()
    kind = os.path.splitext(path)[1].removeprefix(".").lower() or "png"
    if kind not in formats:
        raise ValueError(
            f"inplace_abn.memory: expected a picture in one of the formats {', '.join(sorted(formats))}, got {path!r}"
        )
    existed = os.path.exists(path)
    with open(path, "ab"):
        pass
    if not existed:
        os.remove(path)


def _figure() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("inplace_abn.memory: a plot needs matplotlib: pip install 'inplace-abn[demo]'") from error
    return Figure(figsize=(9, 4.5), layout="constrained")


def save_plot(report: MemoryReport, path: str, title: str = "") -> None:
    """Writes the timeline of the report as a picture, in the format that the file's suffix names.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: matplotlib has no format for the file's suffix.
        OSError: the file cannot be written.
    """
    figure = _figure()
    axes = figure.add_subplot()
    draw_timeline(axes, report)
    axes.set_title(title)
    figure.savefig(path, dpi=150)


def draw_timeline(axes: Any, report: MemoryReport) -> None:
    """Draws the timeline of the report into axes of matplotlib."""
    for name, usage, colour in (("native", report.before, NATIVE), ("converted", report.after, CONVERTED)):
        if usage is not None:
            axes.fill_between(
                _places(usage),
                [size / 2**20 for _, size in usage.timeline],
                step="post",
                facecolor=(*colour, 0.2),
                edgecolor=colour,
                linewidth=1.5,
                label=f"{name}: {readable(usage.held)} held for backward, peak {readable(usage.peak)}",
            )
    axes.axvline(1, ymax=0.8, color="black", linestyle="--", linewidth=1)
    axes.set(xlabel="allocations, in their order", ylabel="MiB allocated")
    axes.set_xticks([0.5, 1.5], ["forward", "backward"])
    axes.tick_params(axis="x", length=0)
    axes.set_xlim(0, 2)
    # Room for the legend above the curves.
    axes.set_ylim(0, 1.3 * max(usage.peak for usage in (report.before, report.after) if usage is not None) / 2**20 or 1)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper left", frameon=False)


def _places(usage: Usage) -> list[float]:
    """The places of the timeline's events: from 0 to 1 in forward, and from 1 to 2 in backward, evenly spaced.

    So pictures of native and converted models are comparable, and the machine's other work does not show.
    """
    forward = sum(time <= usage.backward_start for time, _ in usage.timeline)
    backward = len(usage.timeline) - forward
    return [i / forward for i in range(forward)] + [1 + i / backward for i in range(backward)]
