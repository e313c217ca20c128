#!/usr/bin/env python
"""Times batch norm and activation in place against torch's own, and against the least time that moving the bytes takes.

Prints tables in Markdown, and writes bench.md, bench.json and bench.png to --out; the first two after each measurement.
All contenders of a case take turns in one process (benchmark/timing.py says how they are timed). Every run is a fresh
process, because malloc reads its settings when a process starts. --peer adds the public package, from a folder that
these commands fill:

    pip install "setuptools-scm<8"
    pip install --no-deps --no-build-isolation --target FOLDER inplace-abn
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import models
import torch
from benchmark import machine, report
from benchmark.cases import DTYPES, GROUPS, LAYOUTS, shape_of
from benchmark.contenders import ACTIVATIONS, COMPILE, CONTENDERS
from benchmark.worker import Worker

SETTINGS = [f"{dtype}:{layout}" for dtype in DTYPES for layout in LAYOUTS]
CPU_SETTINGS = ["fp32:contiguous", "fp32:channels_last", "bf16:contiguous", "bf16:channels_last"]
CUDA_SETTINGS = ["bf16:channels_last", "fp32:contiguous"]
DEFAULTS: dict[str, tuple[Any, Any]] = {
    # Compiling takes longer than a quick run may.
    "contenders": (list(CONTENDERS), [name for name in CONTENDERS if name != COMPILE]),
    "seconds": (2.0, 0.3),
    "min_rounds": (7, 3),
    # A case that has begun before the limit is finished.
    "time_limit": (None, 40),
    "overhead": (15, 3),
    "nets": ([], ["demo:relu"]),
    "net_batch": ([8], [2]),
    "steps": (10, 3),
}
"""The default of each option, in a full run and in a quick run."""


def net_name(text: str) -> str:
    try:
        models.named(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    contenders = "; ".join(f"{name}: {what}" for name, what in CONTENDERS.items())
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=f"contenders: {contenders}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--device", default="cpu", help="cpu, or cuda with an index if there are several")
    add("--threads", type=int, default=torch.get_num_threads())
    add("--quick", action="store_true", help="few shapes, one small net, nothing compiled, under a minute")
    add("--malloc", choices=[*machine.MODES, "both"], help="both on CPU, default on CUDA")
    add("--contenders", nargs="+", choices=CONTENDERS, metavar="NAME", help="by default all")
    add("--peer", type=Path, metavar="FOLDER", help="where the public inplace_abn package is installed")
    add("--groups", nargs="*", choices=GROUPS, default=list(GROUPS), metavar="NAME", help=f"of {', '.join(GROUPS)}")
    add("--shapes", nargs="+", type=shape_of, metavar="NxCxHxW", help="instead of the groups")
    add("--activations", nargs="+", choices=ACTIVATIONS, default=["leaky_relu", "silu"], metavar="NAME")
    settings = f"by default {' '.join(CPU_SETTINGS)}, on CUDA {' '.join(CUDA_SETTINGS)}"
    add("--settings", nargs="+", choices=SETTINGS, metavar="DTYPE:LAYOUT", help=settings)
    add("--seconds", type=float, help="to go on sampling a case (default 2, quick 0.3)")
    add("--time-limit", type=float, help="seconds after which no further case is begun")
    add("--overhead", type=int, metavar="ROUNDS", help="of the call overhead's timing, 0 for none")
    add("--callgrind", action="store_true", help="count the instructions of a call; needs valgrind, takes minutes")
    nets = "torchvision:resnet18, timm:resnet50, smp:Unet-resnet18, ultralytics:yolo11n, demo:relu"
    add("--nets", nargs="*", type=net_name, metavar="NAME", help=f"whose packages are installed, such as {nets}")
    weights = "of the nets' norms: as initialised, or as training leaves them (scripts/trained.py; the default)"
    add("--weights", nargs="+", choices=["initialised", "trained"], default=["trained"], help=weights)
    add("--eager-nets", action="store_true", help="do not compile nets, which on a CPU takes minutes for each")
    add("--net-batch", type=int, nargs="+", help="images per step (default 8, quick 2)")
    batch_memory = "also find the largest batch of each eager net that trains within so much memory (CUDA only)"
    add("--batch-memory", type=float, default=0.0, metavar="GIB", help=batch_memory)
    add("--net-size", type=int, default=128, help="of an image (default %(default)s)")
    add("--steps", type=int, help="training steps to time (default 10, quick 3)")
    add("--out", type=Path, default=Path("runs/bench"), help="folder of the results")
    add("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    on_cuda = torch.device(args.device).type == "cuda"
    if on_cuda and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device")
    if on_cuda and args.malloc not in (None, "default"):
        parser.error("--malloc is about the memory of a CPU")
    if args.peer is not None and not (args.peer / "inplace_abn").is_dir():
        parser.error(f"--peer {args.peer} has no folder inplace_abn")
    settings_here = CUDA_SETTINGS if on_cuda else CPU_SETTINGS[:3] if args.quick else CPU_SETTINGS
    by_device = {"malloc": "default" if on_cuda else "both", "settings": settings_here}
    for name, value in (by_device | {name: values[args.quick] for name, values in DEFAULTS.items()}).items():
        if getattr(args, name, None) is None:
            setattr(args, name, value)
    args.eager_nets |= args.quick
    return args


def run_in_fresh_process(arguments: Sequence[str], mode: str, time_limit: float | None) -> Iterator[dict[str, Any]]:
    """Measures in a new process whose malloc is set for ``mode``. Gives all results so far, after each measurement."""
    command = [sys.executable, str(Path(__file__).resolve()), *arguments, "--malloc", mode, "--worker"]
    if time_limit is not None:
        command += ["--time-limit", str(time_limit)]
    # Without this variable the profiler writes a line to standard error each time that it starts or stops.
    environment = {"KINETO_LOG_LEVEL": "6"} | machine.environment(mode)
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        # Packages may print lines of their own.
        yield from (json.loads(line) for line in process.stdout if line.startswith('{"malloc"'))
    if process.returncode != 0:
        raise SystemExit(f"the run with malloc {mode} failed")


def main(arguments: Sequence[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    args = parse_arguments(arguments)
    if args.worker:
        for result in Worker(args).run():
            print("\n" + json.dumps(result), flush=True)
        return
    modes = list(machine.MODES) if args.malloc == "both" else [args.malloc]
    share = args.time_limit and args.time_limit / len(modes)
    runs: list[dict[str, Any]] = []
    args.out.mkdir(parents=True, exist_ok=True)
    text = ""
    for mode in modes:
        done = list(runs)
        for run in run_in_fresh_process(arguments, mode, share):
            runs = [*done, run]
            text = write(args.out, {"arguments": list(arguments), "runs": runs})
    print(text)
    report.save_chart(args.out / "bench.png", runs[-1])


def write(out: Path, result: dict[str, Any]) -> str:
    """Writes bench.json and bench.md, and returns the text of the latter."""
    (out / "bench.json").write_text(json.dumps(result, indent=1))
    text = report.full_report(result)
    (out / "bench.md").write_text(text + "\n")
    return text


if __name__ == "__main__":
    main()
