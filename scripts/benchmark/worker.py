"""Makes all measurements of one process and returns them as a JSON object."""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmark import machine, nets, overhead, peer, steps
from benchmark.cases import CORE, Case, Setting, make_cases
from benchmark.contenders import COMPILE, EAGER, FLOOR, NO_CUDNN, OURS, PEER, make_iterations, with_threads
from benchmark.timing import FLOOR_TRANSFERS, PHASES, Iteration, by_phase, interleaved, reason
from inplace_abn import guard

BLOCKS_IN_USE = 12
"""More tensors than are alive at any time while an operation is timed."""


class Worker:
    """Measures what the arguments of bench.py ask for, until its time is up."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.device = torch.device(args.device)
        self.bandwidth: float | None = None
        if self.device.type == "cuda":
            # Some of torch's functions need a device with an index.
            self.device = torch.device("cuda", self.device.index or 0)
            torch.cuda.set_device(self.device)
            self.bandwidth = machine.copy_bandwidth(self.device)
        self.settings = [Setting(*text.split(":")) for text in args.settings]
        self.deadline = time.perf_counter() + (args.time_limit or math.inf)
        self.skipped: list[str] = []
        self.compiled: set[str] = set()

    def run(self) -> dict[str, Any]:
        args = self.args
        torch.set_num_threads(args.threads)
        torch.manual_seed(0)
        on_cuda = self.device.type == "cuda"
        cases = make_cases(args.groups, self.settings, args.activations, args.shapes, on_cuda, args.quick)
        if args.malloc == "warmed":
            machine.warm(BLOCKS_IN_USE * max((case.nbytes for case in cases), default=0))
        result: dict[str, Any] = {
            "malloc": {
                "mode": args.malloc,
                "setting": machine.MODES[args.malloc],
                "page_faults_64MiB": machine.page_faults(),
            },
            "machine": machine.describe(self.device, args.threads),
            "load_before": os.getloadavg()[0],
            "copy_bandwidth": self.bandwidth,
        }
        if args.overhead:
            result["overhead"] = overhead.call_overhead(str(self.device), args.threads, args.overhead, args.callgrind)
        # Nearly all steps of training run without a measurement of the guard, so operations are timed without it.
        with guard.paused():
            result["ops"] = [self.time_op(case) for case in cases if self.has_time(" ".join(map(str, case)))]
            if args.peer_python and PEER in args.contenders and self.has_time(f"the same by {args.peer_python}"):
                self.add_peer(result)
            result["scaling"] = list(self.time_scaling(cases)) if args.scaling else []
        result["nets"] = list(self.measure_nets())
        return result | {"load_after": os.getloadavg()[0], "skipped": self.skipped}

    def has_time(self, what: str) -> bool:
        if time.perf_counter() < self.deadline:
            print(what, file=sys.stderr, flush=True)
            return True
        self.skipped.append(what)
        return False

    def interleaved(self, iterations: dict[str, Iteration], case: Case) -> dict[str, Tensor]:
        x, dz = case.random(self.device), case.random(self.device)
        return interleaved(iterations, x, dz, self.args.seconds, self.args.min_rounds)

    def time_op(self, case: Case) -> dict[str, Any]:
        # On CUDA the floor is computed from the bandwidth. Elsewhere there is no cuDNN.
        left_out = [PEER, NO_CUDNN if self.bandwidth is None else FLOOR]
        notes = []
        if self.args.quick and COMPILE in self.args.contenders and case.activation in self.compiled:
            left_out.append(COMPILE)
            notes.append(f"{COMPILE} left out: a quick run compiles once per activation")
        self.compiled.add(case.activation)
        names = [name for name in self.args.contenders if name not in left_out]
        iterations, failed = make_iterations(names, case, self.device)
        collected = self.interleaved(iterations, case)
        if self.bandwidth is not None and FLOOR in self.args.contenders:
            floor = 1e3 * case.nbytes / self.bandwidth * torch.tensor(FLOOR_TRANSFERS, dtype=torch.float64)
            collected[FLOOR] = floor.expand_as(next(iter(collected.values())))
        return case.record() | {"timings": compare(collected), "notes": notes + failed}

    def add_peer(self, result: dict[str, Any]) -> None:
        """Adds the times of the public package for the same cases, from the interpreter that has it."""
        records = result["ops"]
        cases = [Case(*(record[field] for field in Case._fields)) for record in records]
        settings = {"device": str(self.device), "threads": self.args.threads}
        settings |= {"seconds": self.args.seconds / 4, "min_rounds": self.args.min_rounds}
        try:
            answer = peer.ask(self.args.peer_python, cases, **settings)
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
            # Rounds of two processes do not form pairs. These are ratios of medians, without quartiles.
            timings, mine = record["timings"], {phase: timing["ms"][phase][1] for phase in PHASES}
            timings[PEER] = {"ms": timing["ms"]}
            if EAGER in timings:
                timings[PEER]["speedup"] = {p: [timings[EAGER]["ms"][p][1] / mine[p]] for p in PHASES}
            if FLOOR in timings:
                timings[PEER]["of_floor"] = {p: [mine[p] / timings[FLOOR]["ms"][p][1]] for p in PHASES}

    def time_scaling(self, cases: Sequence[Case]) -> Iterator[dict[str, Any]]:
        """Times ours and the floor on one thread and on all threads, for the first activation of each tensor."""
        threads = (1, self.args.threads)
        tensors: dict[tuple[Any, ...], Case] = {}
        for case in cases:
            if case.group == CORE:
                tensors.setdefault((case.shape, case.dtype, case.layout), case)
        for case in tensors.values():
            if not self.has_time(f"scaling {' '.join(map(str, case))}"):
                continue
            iterations, _ = make_iterations((OURS, FLOOR), case, self.device)
            counted = {f"{n} @{t}": with_threads(body, t) for n, body in iterations.items() for t in threads}
            got = self.interleaved(counted, case)
            speedups = {name: by_phase(got[f"{name} @1"] / got[f"{name} @{threads[1]}"]) for name in iterations}
            yield case.record() | {"threads": list(threads), "speedup": speedups}

    def measure_nets(self) -> Iterator[dict[str, Any]]:
        args = self.args
        budget = None if args.memory_budget is None else int(args.memory_budget * 2**30)
        names = [name for name, how in steps.CONTENDERS.items() if not (how.compiled and args.eager_nets)]
        for net in args.nets:
            recipe = nets.recipe(net)
            batch, size = recipe.quick if args.quick else getattr(recipe, self.device.type)
            batch, size = args.net_batch or batch, args.net_size or size
            for setting in self.settings[:1] if args.quick else self.settings:
                what = f"net {net} {setting}"
                if not self.has_time(what):
                    continue
                try:
                    torch.manual_seed(0)
                    course = steps.Course(recipe.make(), setting, size, self.device)
                except Exception as error:
                    self.skipped.append(f"{what}: {reason(error)}")
                    continue

                def has_time(name: str, what: str = what) -> bool:
                    return self.has_time(f"{what}, {name}")

                measured = steps.measure_net(course, batch, args.steps, budget, names, has_time)
                described = {"net": net, **setting._asdict(), "batch": batch, "size": size, "budget": budget}
                yield described | measured


def compare(collected: dict[str, Tensor]) -> dict[str, Any]:
    """For each contender the quartiles of its time, of eager's time over it, and of its ratio to the floor's time."""
    timings: dict[str, Any] = {}
    for name, mine in collected.items():
        timings[name] = {"ms": by_phase(mine), "samples": len(mine)}
        if EAGER in collected:
            timings[name]["speedup"] = by_phase(collected[EAGER] / mine)
        if FLOOR in collected:
            timings[name]["of_floor"] = by_phase(mine / collected[FLOOR])
    return timings
