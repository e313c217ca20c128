"""Times each kernel by itself, for thirteen tensors, and compares it with a copy.

A kernel's bytes are what its op must read and write, once each. Bytes over time, over the same of a copy that was
measured in the same run, is its share of the bandwidth. Before each call the cache is filled with other memory. Rows
are appended to ``--out`` as soon as they are measured: profile.jsonl, and the table profile.md.

``--device emulated`` runs the kernels' sources on the CPU (tests/emulation) on a small part of each tensor. Its times
mean nothing. It shows that every kernel is known here. ``--plan`` prints how the launches divide these tensors on an
H100, by running few blocks of each on the emulated device.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.profiler_util import FunctionEvent

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests/helpers")]

from benchmark.cases import DTYPES, LAYOUTS  # noqa: E402
from benchmark.machine import copy_bandwidth  # noqa: E402
from gpu_smoke import Ops, device_ops  # noqa: E402

from inplace_abn.activations import find  # noqa: E402


class Shape(NamedTuple):
    """A tensor of a net: what it is, its shape, dtype and layout."""

    what: str
    shape: tuple[int, ...]
    dtype: str
    layout: str


SHAPES = (
    Shape("ResNet-50, stem", (64, 64, 112, 112), "bf16", "channels_last"),
    Shape("ResNet-50, stage 1", (64, 256, 56, 56), "bf16", "channels_last"),
    Shape("ResNet-50, stage 3", (64, 1024, 14, 14), "bf16", "channels_last"),
    Shape("ResNet-50, stage 4", (64, 2048, 7, 7), "bf16", "channels_last"),
    Shape("U-Net, top", (16, 32, 256, 256), "bf16", "channels_last"),
    Shape("odd channels", (64, 19, 129, 129), "bf16", "channels_last"),
    Shape("ResNet-50, stage 1", (64, 256, 56, 56), "bf16", "contiguous"),
    Shape("ResNet-50, stage 2", (64, 512, 28, 28), "bf16", "contiguous"),
    Shape("odd planes", (64, 256, 57, 57), "bf16", "contiguous"),
    Shape("ResNet-50, stage 4", (64, 2048, 7, 7), "bf16", "contiguous"),
    Shape("ResNet-50, stage 1", (32, 256, 56, 56), "fp32", "contiguous"),
    Shape("ResNet-50, stage 1", (32, 256, 56, 56), "fp32", "channels_last"),
    Shape("small", (8, 64, 16, 16), "fp32", "contiguous"),
)


class Pass(NamedTuple):
    """A kernel of an op: a name that its own has, and how many tensors of the size of x it moves, None for few
    bytes."""

    name: str
    transfers: float | None

    def is_of(self, kernel: str) -> bool:
        return re.search(rf"(?<!\w){self.name}(?!\w)", kernel) is not None


MULTIPROCESSORS = 132
"""Of an H100."""
SMALL = tuple(Pass(name, None) for name in ("finish_kernel", "combine_kernel", "merge_kernel", "share_kernel"))
"""What may follow any of an op's passes."""


class Call(NamedTuple):
    """A call of an op, and the passes of which it consists."""

    name: str
    run: Callable[[], Any]
    passes: tuple[Pass, ...]


def calls(run: Ops, x: Tensor, dz: Tensor, residual: Tensor) -> list[Call]:
    """The calls of a training step, local and synchronised. They leave the tensors as they are."""
    channels, wide = x.shape[1], torch.float32
    weight, bias = (torch.ones(channels, device=x.device, dtype=wide) for _ in range(2))
    mean, var = run["statistics"](x)
    rows = [torch.randn_like(x).permute(0, *range(2, x.dim()), 1).reshape(-1, channels).contiguous() for _ in range(2)]
    rstd = torch.ones(len(rows[0]), device=x.device, dtype=wide)
    out, xhat, z_leaky, z_silu = (torch.empty_like(x) for _ in range(4))
    leaky, relu, silu = (
        (1e-5, False, find(name).code, param) for name, param in (("leaky_relu", 0.2), ("relu", 0.0), ("silu", 0.0))
    )
    once = x.element_size() == 2

    def forward(z: Tensor, arithmetic: tuple[Any, ...], added: Tensor | None = None) -> Callable[[], Any]:
        return lambda: run["forward_out"](x, mean, var, weight, bias, added, *arithmetic, True, z=z)

    def backward(z: Tensor, arithmetic: tuple[Any, ...], **outputs: Tensor) -> Callable[[], Any]:
        return lambda: run["local_backward"](z, dz, var, weight, bias, None, *arithmetic, True, **outputs)

    return [
        Call("statistics", lambda: run["statistics"](x), (Pass("Statistics", 1),)),
        Call("forward, leaky_relu", forward(z_leaky, leaky), (Pass("Transform", 2),)),
        Call("forward, silu", forward(z_silu, silu), (Pass("Transform", 2),)),
        Call("forward, sum and relu", forward(out, relu, residual), (Pass("Transform", 3),)),
        Call(
            "backward, leaky_relu",
            backward(z_leaky, leaky, dx=out),
            (Pass("Reduce", 2), Pass("InvertAndCombine", 3)),
        ),
        Call(
            "backward, silu",
            backward(z_silu, silu, dx=out, xhat=xhat),
            (Pass("Reduce", 4 if once else 2), Pass("InvertAndCombine", 3)),
        ),
        Call(
            "backward of sync, first step",
            lambda: run["backward_reduce_out"](z_leaky, dz, weight, bias, None, *leaky, xhat=xhat, dy=out),
            (Pass("Reduce", 4),),
        ),
        Call(
            "backward of sync, last step",
            lambda: run["backward_out"](xhat, dz, var, weight, 1e-5, False, mean, mean, dx=out),
            (Pass("Combine", 3),),
        ),
        Call(
            "backward of rows",
            lambda: run["rows_backward"](*rows, rstd, weight, bias, 1e-5, True, False, dx=rows[1]),
            (Pass("row_gradient_kernel", 3),),
        ),
        Call(
            "inverse, silu",
            lambda: run["inverse"](z_silu, *silu[2:]),
            (Pass("invert", 1 + wide.itemsize / x.element_size()),),
        ),
    ]


Launch = tuple[str, float]
"""A kernel's name and its seconds."""
Timer = Callable[[Sequence[Call], int], list[list[Launch]]]
"""The launches of each call. The first one is made so many times, then the next one, and so on."""
Row = dict[str, Any]


def on_cuda(device: torch.device) -> Timer:
    def launches(timed: Sequence[Call], times: int) -> list[list[Launch]]:
        # A fill of more than the cache stands between two calls. It is what tells their kernels apart, too.
        filler = torch.empty(4 * torch.cuda.get_device_properties(device).L2_cache_size, dtype=torch.uint8).to(device)
        for call in timed:
            call.run()
        torch.cuda.synchronize(device)
        activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities) as profile:
            for call in timed:
                for _ in range(times):
                    filler.fill_(1)
                    call.run()
            torch.cuda.synchronize(device)
        return grouped(profile.events())

    return launches


def grouped(events: Sequence[FunctionEvent]) -> list[list[Launch]]:
    """The kernels of this package between two of others, in the order of their start."""
    on_device = [e for e in events if e.device_type == torch.autograd.DeviceType.CUDA]
    groups: list[list[Launch]] = [[]]
    for event in sorted(on_device, key=lambda event: event.time_range.start):
        if "inplace_abn" in event.name:
            groups[-1].append((event.name, 1e-6 * event.time_range.elapsed_us()))
        elif groups[-1]:
            groups.append([])
    return [group for group in groups if group]


def on_emulator() -> Timer:
    from emulation import emulated

    emulator = emulated.load()

    def launches(timed: Sequence[Call], times: int) -> list[list[Launch]]:
        groups = []
        for call in timed:
            for _ in range(times):
                emulator.set()
                begun = time.perf_counter()
                call.run()
                seconds = time.perf_counter() - begun
                launched = emulator.launched()
                groups.append([(launch.kernel, seconds / len(launched)) for launch in launched])
        return groups

    return launches


def plan() -> int:
    """Prints a table of the launches of all calls. Waves are blocks over those that the device holds at a time."""
    from emulation import emulated

    emulator = emulated.load()
    print("| tensor | call | kernel | blocks | waves | full | MiB moved |\n" + "| --- " * 7 + "|")
    for shape in SHAPES:
        memory_format, dtype = LAYOUTS[shape.layout], DTYPES[shape.dtype]
        tensors = [torch.zeros(shape.shape, dtype=dtype).contiguous(memory_format=memory_format) for _ in range(3)]
        emulator.set(sample=1)
        for call in calls(emulator.ops, *tensors):
            emulator.set(sample=1)
            call.run()
            for launch in emulator.launched():
                known = next(one for one in (*SMALL, *call.passes) if one.is_of(launch.kernel))
                if known.transfers is None:
                    continue
                waves = launch.blocks / (MULTIPROCESSORS * (launch.held or 1))
                moved = known.transfers * tensors[0].nbytes / 2**20
                cells = [f"{shape.what}, {shape.dtype} {shape.layout}", call.name, known.name, str(launch.blocks)]
                full = f"{waves / math.ceil(waves):.0%}" if launch.held else "-"
                print(f"| {' | '.join(cells)} | {f'{waves:.2f}' if launch.held else '-'} | {full} | {moved:.0f} |")
    return 0


def passes_of(call: Call, launches: Sequence[Launch]) -> dict[Pass, float]:
    """The seconds of each pass of a call.

    Raises:
        ValueError: a kernel is none of the call's, or a pass has no kernel.
    """
    seconds: dict[Pass, float] = {}
    for name, duration in launches:
        # Small kernels have the name of the op that they finish in their own, and so come first.
        known = next((one for one in (*SMALL, *call.passes) if one.is_of(name)), None)
        if known is None:
            raise ValueError(f"{call.name} has a kernel that is unknown here: {name}")
        seconds[known] = seconds.get(known, 0.0) + duration
    missing = [one.name for one in call.passes if one not in seconds]
    if missing:
        raise ValueError(f"{call.name}: no kernel has {', '.join(missing)}, but there were {launches}")
    return seconds


def measured(shape: Shape, x: Tensor, timed: Sequence[Call], timer: Timer, times: int, copy: float | None) -> list[Row]:
    """A row for each pass of each call. ``copy`` is the bandwidth of a copy."""
    rows: list[Row] = []
    groups = timer(timed, times)
    if len(groups) != times * len(timed):
        raise ValueError(f"{shape}: {times * len(timed)} calls made {len(groups)} groups of kernels")
    for i, call in enumerate(timed):
        samples = [passes_of(call, group) for group in groups[i * times : (i + 1) * times]]
        for one in samples[0]:
            seconds = statistics.median(sample[one] for sample in samples)
            known = one.transfers is not None and copy is not None
            of_copy = one.transfers * x.nbytes / seconds / copy if known else None
            row = {"MiB": x.nbytes / 2**20, "call": call.name, "kernel": one.name, "transfers": one.transfers}
            rows.append({**shape._asdict(), **row, "microseconds": 1e6 * seconds, "of_copy": of_copy})
    return rows


def line(row: Row) -> str:
    sizes = "x".join(map(str, row["shape"]))
    cells = [f"{row['what']}, {sizes}, {row['dtype']} {row['layout']}", row["call"], row["kernel"]]
    of_copy = "-" if row["of_copy"] is None else f"{row['of_copy']:.0%}"
    return f"| {' | '.join(cells)} | {row['transfers'] or '-'} | {row['microseconds']:.1f} | {of_copy} |"


def profile(device_name: str, times: int, out: Path) -> int:
    run, device = device_ops(device_name)
    emulates = device_name == "emulated"
    timer, copy = (on_emulator(), None) if emulates else (on_cuda(device), copy_bandwidth(device))
    out.mkdir(parents=True, exist_ok=True)
    told = "emulated: times mean nothing" if copy is None else f"a copy moves {copy / 1e12:.3g} TB/s"
    head = f"{told}\n\n| tensor | call | kernel | transfers | µs | bandwidth, of a copy's |\n" + "| --- " * 6 + "|\n"
    (out / "profile.md").write_text(head)
    failed = 0
    for shape in SHAPES:
        # The emulator would take hours for all of it.
        sizes = tuple(min(most, size) for most, size in zip((2, 19, 9, 9), shape.shape, strict=True))
        sizes = sizes if emulates else shape.shape
        x, dz, residual = (
            torch.randn(sizes, device=device).to(DTYPES[shape.dtype], memory_format=LAYOUTS[shape.layout])
            for _ in range(3)
        )
        try:
            rows = measured(shape, x, calls(run, x, dz, residual), timer, times, copy)
        except (ValueError, RuntimeError) as error:
            failed += 1
            print(f"{shape}: FAILS, {error}", flush=True)
            continue
        with (out / "profile.jsonl").open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        with (out / "profile.md").open("a") as file:
            file.writelines(line(row) + "\n" for row in rows)
        print(*map(line, rows), sep="\n", flush=True)
    print(f"profile: {len(SHAPES) - failed} of {len(SHAPES)} tensors, {told}")
    return 1 if failed else 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--times", type=int, default=11, help="how often each op is called")
    parser.add_argument("--out", type=Path, default=Path("runs/profile"))
    parser.add_argument("--plan", action="store_true", help="print how launches divide the tensors, without a GPU")
    args = parser.parse_args(arguments)
    return plan() if args.plan else profile(args.device, args.times, args.out)


if __name__ == "__main__":
    sys.exit(main())
