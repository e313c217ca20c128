"""The timeline of a memory report as a picture."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from inplace_abn.conversion.plan import readable

if TYPE_CHECKING:
    from inplace_abn.memory.report import MemoryReport


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
    draw_timeline(axes, report)
    axes.set_title(title)
    figure.savefig(path, dpi=150)


def draw_timeline(axes: Any, report: MemoryReport) -> None:
    """Draws the timeline of the report into axes of matplotlib."""
    for name, usage, colour in (("native", report.before, "tab:red"), ("converted", report.after, "tab:blue")):
        if usage is not None:
            # Time as a share of the step, so that both are comparable.
            end = usage.timeline[-1][0] if usage.timeline else 1.0
            times = [time / end for time, _ in usage.timeline]
            sizes = [size / 2**20 for _, size in usage.timeline]
            label = f"{name}: {readable(usage.held)} held, {readable(usage.peak)} peak"
            axes.step(times, sizes, where="post", color=colour, label=label)
            axes.fill_between(times, sizes, step="post", color=colour, alpha=0.15, linewidth=0)
            axes.axvline(usage.backward_start / end, color=colour, linestyle=":", linewidth=1)
    axes.set(xlabel="share of a training step (dotted: backward starts)", ylabel="MiB allocated")
    # The legend stands above the curves.
    axes.set_ylim(
        0, 1.25 * max(usage.peak for usage in (report.before, report.after) if usage is not None) / 2**20 or 1
    )
    axes.legend(loc="upper center")
