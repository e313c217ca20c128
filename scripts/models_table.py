#!/usr/bin/env python
"""Measures memory and time of a training step of public models, native and converted, for the table of README.md.

    python scripts/models_table.py                # prints the table, and writes it into README.md
    python scripts/models_table.py --steps 0      # leaves out the times

The models are those of `scripts/zoo.py`, which says what to install. They have random weights, and run in float32 on
the CPU. The native and the converted model take turns.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import zoo

from inplace_abn.conversion.table import readable
from inplace_abn.memory import memory_report

README = Path(__file__).parents[1] / "README.md"
MARKERS = ("<!-- models -->\n", "<!-- /models -->")
COLUMNS = ("model", "input", "held: native → in place", "peak: native → in place", "time of a step")
NETS = {
    "timm resnet50": (8, 3, 224, 224),
    "timm efficientnet_b0": (8, 3, 224, 224),
    "ultralytics yolo11n": (8, 3, 320, 320),
    "smp Unet": (8, 3, 256, 256),
    "smp DeepLabV3Plus": (8, 3, 256, 256),
    "nnU-Net PlainConvUNet 3d": (2, 1, 64, 64, 64),
    "HF UperNet": (8, 3, 256, 256),
}
"""Names in `zoo.ZOO`, and shapes of inputs for which activations take more memory than parameters."""
NATIVE, CONVERTED = "native", "converted"


def measured(name: str, steps: int) -> dict[str, Any]:
    """Bytes held and at peak, native and converted. With ``steps`` also the converted net's time of a step, in the
    native net's."""
    torch.manual_seed(0)
    net, x = zoo.ZOO[name].build(), torch.randn(NETS[name])
    memory = memory_report(net, x)
    assert memory.after is not None
    usages = ((NATIVE, memory.before), (CONVERTED, memory.after))
    result: dict[str, Any] = {label: {"held": usage.held, "peak": usage.peak} for label, usage in usages}
    if steps:
        result["time"] = zoo.time_share(net, x, steps)
    return result


def row(name: str, result: dict[str, Any]) -> str:
    """A row of the table."""
    cells = [name, "x".join(map(str, NETS[name]))]
    for key in ("held", "peak"):
        before, after = (result[label][key] for label in (NATIVE, CONVERTED))
        cells.append(f"{readable(before)} → {readable(after)}, **-{1 - after / before:.0%}**")
    return zoo.line([*cells, f"{result['time']:.2f} of native" if "time" in result else "-"])


def written(text: str, table: str) -> str:
    """``text`` with the table between the markers.

    Raises:
        ValueError: ``text`` does not have each marker exactly once.
    """
    if any(text.count(marker) != 1 for marker in MARKERS):
        raise ValueError(f"expected one {MARKERS[0].strip()} and one {MARKERS[1]} in {README.name}")
    before, rest = text.split(MARKERS[0])
    return before + MARKERS[0] + table + MARKERS[1] + rest.split(MARKERS[1])[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=12, help="that are timed; 0 for memory only")
    args = parser.parse_args()
    lines = [zoo.line(COLUMNS), zoo.line(["---"] * len(COLUMNS))]
    print(*lines, sep="\n", flush=True)
    for name in NETS:
        lines.append(row(name, measured(name, args.steps)))
        print(lines[-1], flush=True)
    given = f"float32, CPU, {zoo.threads_in_words()}"
    lines += ["", f"{given}, {zoo.versions(zoo.ZOO[name] for name in NETS)}."]
    print(*lines[-2:], sep="\n")
    README.write_text(written(README.read_text(encoding="utf-8"), "\n".join(lines) + "\n"), encoding="utf-8")


if __name__ == "__main__":
    main()
