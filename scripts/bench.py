#!/usr/bin/env python
"""Times batch norm and activation in place against torch's own, and against the least time that moving the bytes takes.

Prints tables in Markdown, and writes bench.md, bench.json and bench.png to --out. All contenders of a case take turns
in one process (benchmark/timing.py says how they are timed). If --peer-python names an interpreter that has the public
package, that package is timed in a process of its own. Every run is a fresh process, because malloc reads its settings
when a process starts.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from benchmark import machine, report
from benchmark.cases import DTYPES, GROUPS, LAYOUTS, shape_of
from benchmark.contenders import ACTIVATIONS, CONTENDERS
from benchmark.nets import NETS, recipe
from benchmark.worker import Worker

SETTINGS = [f"{dtype}:{layout}" for dtype in DTYPES for layout in LAYOUTS]
CPU_SETTINGS = ["fp32:contiguous", "fp32:channels_last", "bf16:contiguous", "bf16:channels_last"]
CUDA_SETTINGS = ["bf16:channels_last", "fp32:contiguous"]
DEFAULTS: dict[str, tuple[Any, Any]] = {
    "groups": (list(GROUPS), ["core", "small"]),
    "seconds": (2.0, 0.3),
    "min_rounds": (7, 3),
    # A case that has begun before the limit is finished.
    "time_limit": (None, 40),
    "overhead": (15, 3),
    "nets": (list(NETS), ["resnet50"]),
    "steps": (10, 3),
}
"""The default of each option, in a full run and in a quick run."""


def net_name(text: str) -> str:
    try:
        recipe(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    contenders = "; ".join(f"{name}: {what}" for name, what in CONTENDERS.items())
    parser = argparse.ArgumentParser(description=__doc__, epilog=f"contenders: {contenders}")
    add = parser.add_argument
    add("--device", default="cpu", help="cpu, or cuda with an index if there are several")
    add("--threads", type=int, default=torch.get_num_threads())
    add("--quick", action="store_true", help="few shapes, one small net that is not compiled, under a minute")
    add("--malloc", choices=[*machine.MODES, "both"], help="both on CPU, default on CUDA")
    add("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS), metavar="NAME")
    add("--groups", nargs="*", choices=GROUPS, metavar="NAME", help=f"of shapes: {', '.join(GROUPS)}")
    add("--shapes", nargs="+", type=shape_of, metavar="NxCxHxW", help="instead of the groups' own")
    add("--activations", nargs="+", choices=ACTIVATIONS, metavar="NAME", help="instead of the groups' own")
    settings = f"by default {' '.join(CPU_SETTINGS)}, on CUDA {' '.join(CUDA_SETTINGS)}"
    add("--settings", nargs="+", choices=SETTINGS, metavar="DTYPE:LAYOUT", help=settings)
    add("--seconds", type=float, help="to go on sampling a case (default 2, quick 0.3)")
    add("--time-limit", type=float, help="seconds after which no further case is begun")
    add("--peer-python", metavar="PATH", help="an interpreter that has the public inplace_abn package")
    add("--scaling", action="store_true", help="also time one thread against --threads")
    add("--overhead", type=int, metavar="ROUNDS", help="of the call overhead's timing, 0 for none")
    add("--callgrind", action="store_true", help="count the instructions of a call; needs valgrind, takes minutes")
    public = "public ones where their package is installed: torchvision:resnet18, timm:resnet50, smp:Unet-resnet18"
    add("--nets", nargs="*", type=net_name, metavar="NAME", help=f"{', '.join(NETS)}, or {public}, ultralytics:yolo11n")
    add("--eager-nets", action="store_true", help="do not compile nets, which on a CPU takes minutes for each")
    add("--net-batch", type=int, help="instead of the nets' own")
    add("--net-size", type=int, help="of an image, instead of the nets' own; a multiple of 32")
    add("--steps", type=int, help="training steps to time (default 10, quick 3)")
    add("--memory-budget", type=float, metavar="GIB", help="find the largest batch that fits")
    add("--out", type=Path, default=Path("runs/bench"), help="folder of the results")
    add("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    on_cuda = torch.device(args.device).type == "cuda"
    if on_cuda and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device")
    if on_cuda and args.scaling:
        parser.error("--scaling is about the threads of a CPU")
    if on_cuda and args.malloc not in (None, "default"):
        parser.error("--malloc is about the memory of a CPU")
    settings_here = CUDA_SETTINGS if on_cuda else CPU_SETTINGS[:3] if args.quick else CPU_SETTINGS
    by_device = {"malloc": "default" if on_cuda else "both", "settings": settings_here}
    for name, value in (by_device | {name: values[args.quick] for name, values in DEFAULTS.items()}).items():
        if getattr(args, name, None) is None:
            setattr(args, name, value)
    args.eager_nets |= args.quick
    return args


def run_in_fresh_process(arguments: Sequence[str], mode: str, time_limit: float | None) -> dict[str, Any]:
    """Measures in a new process whose malloc is set for ``mode``."""
    command = [sys.executable, str(Path(__file__).resolve()), *arguments, "--malloc", mode, "--worker"]
    if time_limit is not None:
        command += ["--time-limit", str(time_limit)]
    # Without this variable the profiler writes a line to standard error each time that it starts or stops.
    environment = {"KINETO_LOG_LEVEL": "6"} | machine.environment(mode)
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise SystemExit(f"the run with malloc {mode} failed")
    measured: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return measured


def main(arguments: Sequence[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    args = parse_arguments(arguments)
    if args.worker:
        print("\n" + json.dumps(Worker(args).run()))
        return
    modes = list(machine.MODES) if args.malloc == "both" else [args.malloc]
    share = args.time_limit and args.time_limit / len(modes)
    runs = [run_in_fresh_process(arguments, mode, share) for mode in modes]
    result = {"arguments": list(arguments), "runs": runs}
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "bench.json").write_text(json.dumps(result, indent=1))
    text = report.full_report(result)
    (args.out / "bench.md").write_text(text + "\n")
    print(text)
    report.save_chart(args.out / "bench.png", runs)


if __name__ == "__main__":
    main()
