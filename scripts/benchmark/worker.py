"""Makes all measurements of one process, as a JSON object that grows with each of them."""

from __future__ import annotations

import argparse
import itertools
import math
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import models
import torch
from torch import Tensor

from benchmark import machine, overhead, steps
from benchmark.cases import Case, Setting, make_cases
from benchmark.contenders import EAGER, FLOOR, NO_CUDNN, PEER, load_peer, make_iterations
from benchmark.timing import FLOOR_TRANSFERS, by_phase, interleaved, reason
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
        self.peer = None if args.peer is None else load_peer(args.peer)
        # On CUDA the floor is computed from the bandwidth. Elsewhere there is no cuDNN.
        left_out = {NO_CUDNN if self.bandwidth is None else FLOOR} | ({PEER} if self.peer is None else set())
        self.contenders = [name for name in args.contenders if name not in left_out]
        self.deadline = time.perf_counter() + (args.time_limit or math.inf)
        self.skipped: list[str] = []

    def run(self) -> Iterator[dict[str, Any]]:
        """All results so far, after each measurement."""
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
            "peer": getattr(self.peer, "__version__", None),
        }
        if args.overhead:
            result["overhead"] = overhead.call_overhead(str(self.device), args.threads, args.overhead, args.callgrind)
        ops: list[dict[str, Any]] = []
        nets: list[dict[str, Any]] = []

        def so_far() -> dict[str, Any]:
            return result | {"ops": ops, "nets": nets, "load_after": os.getloadavg()[0], "skipped": self.skipped}

        for case in cases:
            if self.has_time(" ".join(map(str, case))):
                # Nearly all steps of training run without a measurement of the guard, so operations are timed without.
                with guard.paused():
                    ops.append(self.time_op(case))
                yield so_far()
        for net in self.measure_nets():
            nets.append(net)
            yield so_far()
        yield so_far()

    def has_time(self, what: str) -> bool:
        if time.perf_counter() < self.deadline:
            print(what, file=sys.stderr, flush=True)
            return True
        self.skipped.append(what)
        return False

    def time_op(self, case: Case) -> dict[str, Any]:
        iterations, notes = make_iterations(self.contenders, case, self.device, self.peer)
        x, dz = case.random(self.device), case.random(self.device)
        collected = interleaved(iterations, x, dz, self.args.seconds, self.args.min_rounds)
        if self.bandwidth is not None and FLOOR in self.args.contenders:
            floor = 1e3 * case.nbytes / self.bandwidth * torch.tensor(FLOOR_TRANSFERS, dtype=torch.float64)
            collected[FLOOR] = floor.expand_as(next(iter(collected.values())))
        return case._asdict() | {"timings": compare(collected), "notes": notes}

    def measure_nets(self) -> Iterator[dict[str, Any]]:
        args = self.args
        names = [name for name, how in steps.CONTENDERS.items() if not (how.compiled and args.eager_nets)]
        for net, setting, weights in itertools.product(args.nets, self.settings, args.weights):
            what = f"net {net} {setting} {weights}"
            if not self.has_time(what):
                continue
            try:
                course = steps.Course(
                    models.named(net).build(weights == "trained"), setting, args.net_size, self.device
                )
            except Exception as error:
                self.skipped.append(f"{what}: {reason(error)}")
                continue

            def has_time(name: str, what: str = what) -> bool:
                return self.has_time(f"{what}, {name}")

            for batch in args.net_batch:
                measured = steps.measure_net(course, batch, args.steps, names, has_time, args.batch_memory)
                what_it_is = {"net": net, "weights": weights, **setting._asdict(), "batch": batch}
                yield what_it_is | {"size": args.net_size} | measured


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
