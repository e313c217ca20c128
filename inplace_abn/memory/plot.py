"""The timeline of a memory report as a picture."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from inplace_abn.conversion.plan import readable

if TYPE_CHECKING:
    from inplace_abn.memory.report import MemoryReport

_NATIVE, _IN_PLACE = (0.84, 0.37, 0.0), (0.0, 0.45, 0.70)
"""Colours that are told apart without red and green."""


def check_plot(path: str) -> None:
    """Whether `save_plot` can write a picture of that name, found out by doing so with nothing in it.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: it has no format that the file's name tells.
        OSError: the file cannot be written.
    """
    figure = _figure()
    formats = figure.canvas.get_supported_filetypes()
    kind = os.path.splitext(path)[1].removeprefix(".").lower() or "png"
    if kind not in formats:
        raise ValueError(f"expected a picture in one of the formats {', '.join(sorted(formats))}, got {path!r}")
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
    """Writes the timeline of the report as a picture, in the format that the file's name tells.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: it has no format that the file's name tells.
        OSError: the file cannot be written.
    """
    figure = _figure()
    axes = figure.add_subplot()
    for name, usage, colour in (("native", report.before, _NATIVE), ("in place", report.after, _IN_PLACE)):
        if usage is not None:
            # Time as a share of the step, so that both are comparable.
            end = usage.timeline[-1][0] if usage.timeline else 1.0
            axes.fill_between(
                [time / end for time, _ in usage.timeline],
                [size / 2**20 for _, size in usage.timeline],
                step="post",
                facecolor=(*colour, 0.2),
                edgecolor=colour,
                linewidth=1.5,
                label=f"{name}: peak {readable(usage.peak)}, {readable(usage.held)} held for backward",
            )
            axes.axvline(usage.backward_start / end, color=colour, linestyle="--", linewidth=1)
    axes.set(xlabel="share of the training step's time; dashed: backward begins", ylabel="MiB allocated", title=title)
    axes.set_xlim(0, 1)
    # Room for the legend above the curves.
    axes.set_ylim(0, 1.3 * max(usage.peak for usage in (report.before, report.after) if usage is not None) / 2**20)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper left", frameon=False)
    figure.savefig(path, dpi=150)
