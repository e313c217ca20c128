"""The demo's results: a picture of predictions, and tables of one run and of several."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from torch import Tensor

from .data import denormalise

# Before pyplot, which would look for a display.
matplotlib.use("Agg")
import matplotlib.pyplot as plt


def save_predictions(path: Path, samples: Sequence[tuple[Tensor, Tensor, Tensor]], class_names: Sequence[str]) -> None:
    """Writes a PNG with one row (input, label, prediction) per sample.

    A sample is a normalised fp32 image [3, H, W] with its int64 label and prediction, both [H, W]. Pixels without a
    label are white.
    """
    colours = plt.get_cmap("tab20", len(class_names)).with_extremes(over="white")
    figure, axes = plt.subplots(len(samples), 3, figsize=(7.5, 1.9 * len(samples)), squeeze=False, layout="constrained")
    for row, (image, label, prediction) in zip(axes, samples, strict=True):
        row[0].imshow(denormalise(image.float()).permute(1, 2, 0).numpy())
        for axis, classes in zip(row[1:], (label, prediction), strict=True):
            drawn = axis.imshow(
                classes.numpy(), cmap=colours, vmin=-0.5, vmax=len(class_names) - 0.5, interpolation="nearest"
            )
    for axis, title in zip(axes[0], ("input", "label", "prediction"), strict=True):
        axis.set_title(title)
    for axis in axes.flat:
        axis.set_axis_off()
    bar = figure.colorbar(drawn, ax=axes, shrink=0.6, ticks=range(len(class_names)))
    bar.ax.set_yticklabels(class_names)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def number(value: float | None, digits: int, suffix: str = "") -> str:
    return "-" if value is None else f"{value:.{digits}f}{suffix}"


def run_summary(result: dict[str, Any]) -> str:
    """The lines printed at the end of a run, from the contents of its result.json."""
    rows = [f"  {name:>12}  {number(iou, 3)}" for name, iou in result["iou"].items()]
    return "\n".join(
        [
            "IoU of the validation images:",
            *rows,
            f"  {'mean':>12}  {number(result['miou'], 3)}",
            f"peak memory of one step: {number(result['peak_mb'], 1)} MB",
            f"time per step: {number(result['step_ms'], 1)} ms ({number(result['images_per_s'], 1)} images/s)",
        ]
    )


def comparison_table(results: Sequence[dict[str, Any]]) -> str:
    """A Markdown table of several result.json files; memory and time are also given relative to the first."""
    lines = [
        "| norm | activation | AMP | layout | ranks | mIoU | peak MB | vs first | ms / step | vs first | images/s |",
        "|---|---|---|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for result in results:
        args = result["args"]
        cells = [
            args["norm"],
            args["activation"],
            args["amp"] or "off",
            "channels last" if args["channels_last"] else "contiguous",
            str(result["world_size"]),
            number(result["miou"], 3),
            number(result["peak_mb"], 1),
            relative(result["peak_mb"], results[0]["peak_mb"]),
            number(result["step_ms"], 1),
            relative(result["step_ms"], results[0]["step_ms"]),
            number(result["images_per_s"], 1),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def relative(value: float | None, base: float | None) -> str:
    return f"{100 * (value / base - 1):+.0f}%" if value is not None and base else "-"
