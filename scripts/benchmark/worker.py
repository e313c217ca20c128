"""Everything that is measured in one process, as JSON has it."""

from __future__ import annotations

import argparse
import math
import os
import platform
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

import inplace_abn
from benchmark import cuda, malloc, nets, overhead, peer
from benchmark.cases import CORE, Case, Setting, make_cases
from benchmark.contenders import COMPILE, EAGER, FLOOR, NO_CUDNN, OURS, PEER, make_iterations, scaling_iterations
from benchmark.notes import reason
from benchmark.steps import CONTENDERS as NET_CONTENDERS
from benchmark.steps import Course, measure_net
from benchmark.timing import PHASES, Sample, interleaved, phase_quartiles, ratio_quartiles
from inplace_abn import guard

GRAPH_BYTES = 8 << 20
"""Up to which size replays of captured graphs are timed too."""
BLOCKS_IN_USE = 12
"""More tensors than are alive at any time while an operation is timed."""


def describe_machine(device: torch.device, threads: int) -> dict[str, Any]:
    info = Path("/proc/cpuinfo")
    models = [line for line in info.read_text().splitlines() if "model name" in line] if info.exists() else []
    machine = {
        "cpu": models[0].partition(":")[2].strip() if models else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": threads,
        "torch": torch.__version__,
        "inplace_abn": inplace_abn.__version__,
        "python": platform.python_version(),
        "capability": torch.backends.cpu.get_cpu_capability(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        machine |= {
            "gpu": properties.name,
            "gpu_memory": properties.total_memory,
            "l2": properties.L2_cache_size,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
        }
    return machine


class Worker:
    """Measures what the arguments of bench.py ask for, until its time is up."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.device = torch.device(args.device)
        if self.device.type == "cuda":
            # Some of torch's functions want an index.
            self.device = torch.device("cuda", self.device.index or 0)
            torch.cuda.set_device(self.device)
        self.settings = [Setting.parse(text) for text in args.settings]
        self.deadline = time.perf_counter() + args.time_limit if args.time_limit else math.inf
        self.skipped: list[str] = []
        self.bandwidth: float | None = None
        self.compiled: set[str] = set()

    def run(self) -> dict[str, Any]:
        torch.set_num_threads(self.args.threads)
        torch.manual_seed(0)
        on_cuda = self.device.type == "cuda"
        cases = make_cases(
            self.args.groups, self.settings, self.args.activations, self.args.shapes, on_cuda, self.args.quick
        )
        if self.args.malloc == "warmed" and not on_cuda:
            malloc.warm(BLOCKS_IN_USE * max((case.nbytes for case in cases), default=0))
        if on_cuda:
            self.bandwidth = cuda.copy_bandwidth(self.device)
        result: dict[str, Any] = {
            "malloc": {
                "mode": self.args.malloc,
                "setting": malloc.describe(self.args.malloc),
                "page_faults_64MiB": malloc.page_faults(),
            },
            "machine": describe_machine(self.device, self.args.threads),
            "load_before": _load(),
            "copy_bandwidth": self.bandwidth,
        }
        if self.args.overhead:
            result["overhead"] = overhead.call_overhead(
                self.args.device, self.args.threads, self.args.overhead, self.args.callgrind
            )
        # As nearly all steps are; those of nets are as they come.
        with guard.paused():
            result["ops"] = list(self.time_ops(cases))
            self.add_peer(result)
            result["scaling"] = list(self.time_scaling(cases)) if self.args.scaling else []
        result["nets"] = list(self.measure_nets())
        return result | {"load_after": _load(), "skipped": self.skipped}

    def has_time(self, what: str) -> bool:
        if time.perf_counter() < self.deadline:
            print(what, file=sys.stderr, flush=True)
            return True
        self.skipped.append(what)
        return False

    def contenders(self, case: Case) -> tuple[list[str], list[str]]:
        """Their names, and notes on those that are left out."""
        names = [name for name in self.args.contenders if name != PEER]
        if self.device.type == "cuda":
            # There the floor follows from the bandwidth.
            names = [name for name in names if name != FLOOR]
        else:
            names = [name for name in names if name != NO_CUDNN]
        if self.args.quick and COMPILE in names and case.activation in self.compiled:
            names.remove(COMPILE)
            return names, [f"{COMPILE} left out: a quick run compiles once per activation"]
        self.compiled.add(case.activation)
        return names, []

    def time_ops(self, cases: Sequence[Case]) -> Iterable[dict[str, Any]]:
        for case in cases:
            if not self.has_time(f"{case.group} {case.shape} {case.setting} {case.activation}"):
                continue
            names, notes = self.contenders(case)
            iterations, more_notes = make_iterations(names, case, self.device)
            x, dz = case.random(self.device), case.random(self.device)
            collected = interleaved(iterations, x, dz, self.args.seconds, self.args.min_rounds)
            if self.bandwidth is not None and FLOOR in self.args.contenders:
                count = len(next(iter(collected.values())))
                collected[FLOOR] = [cuda.floor_ms(case.nbytes, self.bandwidth)] * count
            record = case.record() | {"timings": compare(collected), "notes": notes + more_notes}
            if self.device.type == "cuda" and case.nbytes <= GRAPH_BYTES:
                record["replay_ms"], more_notes = cuda.replays(iterations, x, dz)
                record["notes"] += more_notes
            yield record

    def add_peer(self, result: dict[str, Any]) -> None:
        """Adds what the interpreter with the public package says of the same cases."""
        if not (self.args.peer_python and PEER in self.args.contenders):
            return
        records = result["ops"]
        if not self.has_time(f"the same by {self.args.peer_python}"):
            return
        cases = [Case.from_record(record) for record in records]
        try:
            answer = peer.ask(
                self.args.peer_python,
                cases,
                self.args.device,
                self.args.threads,
                self.args.seconds / 4,
                self.args.min_rounds,
            )
        except (OSError, RuntimeError) as error:
            self.skipped.append(f"peer: {error}")
            return
        result["peer"] = {"torch": answer["torch"], "package": answer["package"], "separate_process": True}
        for record, timing in zip(records, answer["timings"], strict=True):
            if "error" in timing:
                record["notes"].append(f"{PEER} left out: {timing['error']}")
                continue
            if timing["activation"] != record["activation"]:
                record["notes"].append(f"{PEER} has {timing['activation']} instead")
            record["timings"][PEER] = {"ms": timing["ms"]} | ratios_of_medians(timing["ms"], record["timings"])

    def time_scaling(self, cases: Sequence[Case]) -> Iterable[dict[str, Any]]:
        """Ours and the floor on one thread and on all, for the first activation of each tensor."""
        counts = (1, self.args.threads)
        seen: set[tuple[object, ...]] = set()
        for case in cases:
            tensor = (case.shape, case.setting)
            if case.group != CORE or tensor in seen or not self.has_time(f"scaling {case.shape} {case.setting}"):
                continue
            seen.add(tensor)
            iterations = scaling_iterations(case, self.device, counts)
            x, dz = case.random(self.device), case.random(self.device)
            collected = interleaved(iterations, x, dz, self.args.seconds, self.args.min_rounds)
            speedups = {
                name: ratio_quartiles(collected[f"{name} @{counts[0]}"], collected[f"{name} @{counts[1]}"])
                for name in (OURS, FLOOR)
            }
            yield case.record() | {"threads": list(counts), "speedup": speedups}

    def measure_nets(self) -> Iterable[dict[str, Any]]:
        budget = None if self.args.memory_budget is None else int(self.args.memory_budget * 2**30)
        names = [name for name, how in NET_CONTENDERS.items() if not (how.compiled and self.args.eager_nets)]
        for net in self.args.nets:
            recipe = nets.recipe(net)
            kind = "cuda" if self.device.type == "cuda" else "quick" if self.args.quick else "cpu"
            batch, size = getattr(recipe, kind)
            batch, size = self.args.net_batch or batch, self.args.net_size or size
            for setting in self.settings[:1] if self.args.quick else self.settings:
                what = f"net {net} {setting}"
                if not self.has_time(what):
                    continue
                try:
                    torch.manual_seed(0)
                    course = Course(recipe.make(), setting, size, self.device)
                except Exception as error:
                    self.skipped.append(f"{what}: {reason(error)}")
                    continue
                measured = measure_net(
                    course,
                    batch,
                    self.args.steps,
                    budget,
                    names,
                    lambda name, what=what: self.has_time(f"{what}, {name}"),  # type: ignore[misc]
                )
                described = {"net": net, "dtype": setting.dtype, "layout": setting.layout}
                yield described | {"batch": batch, "size": size, "budget": budget} | measured


def compare(collected: dict[str, list[Sample]]) -> dict[str, Any]:
    """For each contender quartiles of its time, of how many times faster than eager it is, and of how many times the
    floor it takes."""
    timings: dict[str, Any] = {}
    for name, mine in collected.items():
        timings[name] = {"ms": phase_quartiles(mine), "samples": len(mine)}
        if EAGER in collected:
            timings[name]["speedup"] = ratio_quartiles(collected[EAGER], mine)
        if FLOOR in collected:
            timings[name]["of_floor"] = ratio_quartiles(mine, collected[FLOOR])
    return timings


def ratios_of_medians(ms: dict[str, list[float]], timings: dict[str, Any]) -> dict[str, Any]:
    """`compare`'s ratios of what was timed in another process: one number each, without a spread."""
    ratios: dict[str, Any] = {}
    if EAGER in timings:
        ratios["speedup"] = {phase: [timings[EAGER]["ms"][phase][1] / ms[phase][1]] for phase in PHASES}
    if FLOOR in timings:
        ratios["of_floor"] = {phase: [ms[phase][1] / timings[FLOOR]["ms"][phase][1]] for phase in PHASES}
    return ratios


def _load() -> float | None:
    """How many processes wanted a core in the last minute."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None
