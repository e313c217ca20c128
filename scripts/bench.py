#!/usr/bin/env python
"""Times in-place batch norm and activation against torch's own, and against the least time that the bytes take.

Prints tables in Markdown and writes them to --out, as bench.md, bench.json and bench.png. All contenders of a case take
turns in one process (benchmark/timing.py says how they are timed); the public package, if --peer-python names an
interpreter that has it, is timed in its own. Every run is a fresh process, because malloc is set when a process starts.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from benchmark import malloc, report
from benchmark.cases import DTYPES, GROUPS, LAYOUTS, Setting, parse_shape
from benchmark.contenders import ACTIVATIONS, CONTENDERS, PEER
from benchmark.nets import NETS, recipe
from benchmark.summary import summarise
from benchmark.worker import Worker

CPU_SETTINGS = ["fp32:contiguous", "fp32:channels_last", "bf16:contiguous", "bf16:channels_last"]
CUDA_SETTINGS = ["bf16:channels_last", "fp32:contiguous"]
QUICK_SECONDS = 40
"""Time limit of a quick run, in which a case or net that has begun is finished."""


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="contenders: " + "; ".join(f"{name}: {what}" for name, what in CONTENDERS.items()),
    )
    parser.add_argument("--device", default="cpu", help="cpu, or cuda with an index if there are several")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--quick", action="store_true", help="few shapes, one small net, under a minute")
    parser.add_argument("--malloc", choices=[*malloc.MODES, "both"], help="both on CPU, default on CUDA")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS), metavar="NAME")
    parser.add_argument("--groups", nargs="*", choices=GROUPS, metavar="NAME", help=f"of shapes: {', '.join(GROUPS)}")
    parser.add_argument("--shapes", nargs="+", type=parse_shape, metavar="NxCxHxW", help="instead of the groups' own")
    parser.add_argument(
        "--activations", nargs="+", choices=ACTIVATIONS, metavar="NAME", help="instead of the groups' own"
    )
    parser.add_argument(
        "--settings",
        nargs="+",
        metavar="DTYPE:LAYOUT",
        help=f"of {', '.join(DTYPES)} and {', '.join(LAYOUTS)}; by default {' '.join(CPU_SETTINGS)}, on CUDA "
        f"{' '.join(CUDA_SETTINGS)}",
    )
    parser.add_argument("--seconds", type=float, help="to go on sampling a case (default 2, quick 0.3)")
    parser.add_argument("--min-rounds", type=int, help="least samples of a case (default 7, quick 3)")
    parser.add_argument("--time-limit", type=float, help="seconds after which no further case is begun")
    parser.add_argument("--peer-python", metavar="PATH", help="an interpreter that has the public inplace_abn package")
    parser.add_argument("--scaling", action="store_true", help="also time one thread against --threads")
    parser.add_argument("--overhead", type=int, metavar="ROUNDS", help="of the call overhead's timing, 0 for none")
    parser.add_argument(
        "--callgrind", action="store_true", help="also count the instructions of a call; needs valgrind, takes minutes"
    )
    parser.add_argument(
        "--nets",
        nargs="*",
        metavar="NAME",
        help=f"training steps, native and converted, of {', '.join(NETS)}, or of public models where their package is "
        "installed: torchvision:resnet18, timm:resnet50, smp:Unet-resnet18, ultralytics:yolo11n",
    )
    parser.add_argument(
        "--eager-nets", action="store_true", help="do not compile nets, which on a CPU takes minutes for each; as quick"
    )
    parser.add_argument("--net-batch", type=int, help="instead of the nets' own")
    parser.add_argument("--net-size", type=int, help="of an image, instead of the nets' own; a multiple of 32")
    parser.add_argument("--steps", type=int, help="training steps to time (default 10, quick 3)")
    parser.add_argument("--memory-budget", type=float, metavar="GIB", help="find the largest batch that fits")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), help="folder of the results")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    on_cuda = torch.device(args.device).type == "cuda"
    if on_cuda and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device")
    if on_cuda and args.scaling:
        parser.error("--scaling is about the threads of a CPU")
    if on_cuda and args.malloc not in (None, "default"):
        parser.error("--malloc is about the memory of a CPU")
    fill_in_defaults(args, on_cuda)
    try:
        for text in args.settings:
            Setting.parse(text)
        for name in args.nets:
            recipe(name)
    except ValueError as error:
        parser.error(str(error))
    return args


def fill_in_defaults(args: argparse.Namespace, on_cuda: bool) -> None:
    """What is not given depends on the device and on --quick."""
    settings = CUDA_SETTINGS if on_cuda else CPU_SETTINGS[:3] if args.quick else CPU_SETTINGS
    defaults: dict[str, Any] = {
        "malloc": "default" if on_cuda else "both",
        "settings": settings,
        "groups": ["core", "small"] if args.quick else list(GROUPS),
        "seconds": 0.3 if args.quick else 2.0,
        "min_rounds": 3 if args.quick else 7,
        "time_limit": QUICK_SECONDS if args.quick else None,
        "overhead": 3 if args.quick else 15,
        "nets": ["resnet50"] if args.quick else list(NETS),
        "steps": 3 if args.quick else 10,
    }
    args.eager_nets |= args.quick
    for name, value in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.peer_python is None:
        args.contenders = [name for name in args.contenders if name != PEER]


def run_in_fresh_process(arguments: Sequence[str], mode: str, time_limit: float | None) -> dict[str, Any]:
    """What a worker measures under this malloc."""
    with tempfile.TemporaryDirectory() as scratch:
        answer = Path(scratch, "answer.json")
        command = [sys.executable, str(Path(__file__).resolve()), *arguments, "--malloc", mode, "--worker", str(answer)]
        if time_limit is not None:
            command += ["--time-limit", str(time_limit)]
        # Without this the profiler writes a line on standard error each time that it starts or stops.
        environment = {"KINETO_LOG_LEVEL": "6"} | malloc.environment(mode)
        done = subprocess.run(command, env=environment)
        if done.returncode != 0:
            raise SystemExit(f"the run with malloc {mode} failed")
        measured: dict[str, Any] = json.loads(answer.read_text())
        return measured


def main(arguments: Sequence[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    args = parse_arguments(arguments)
    if args.worker:
        args.worker.write_text(json.dumps(Worker(args).run()))
        return
    modes = malloc.MODES if args.malloc == "both" else (args.malloc,)
    share = args.time_limit and args.time_limit / len(modes)
    runs = [run_in_fresh_process(arguments, mode, share) for mode in modes]
    result = {"arguments": list(arguments), "runs": runs, "summary": summarise(runs)}
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "bench.json").write_text(json.dumps(result, indent=1))
    text = report.full_report(result)
    (args.out / "bench.md").write_text(text + "\n")
    print(text)
    report.save_chart(args.out / "bench.png", runs)


if __name__ == "__main__":
    main()
