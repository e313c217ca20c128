"""The overhead of a call, forward and backward: its time on a tensor so small that the computation takes none."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from torch.utils.benchmark import Timer

from benchmark.timing import no_garbage_collection, quartiles

SHAPE = (2, 8, 4, 4)
SETUP = """
import torch
import torch.nn.functional as F
from torch import nn
from inplace_abn import InPlaceABN, convert, functions

node = functions._node
leaf = torch.randn({shape}, device="{device}", requires_grad=True)
dz = torch.randn({shape}, device="{device}")
in_place = InPlaceABN({channels}).to("{device}")
kept = InPlaceABN({channels}, keep_input=True).to("{device}")
native = nn.BatchNorm2d({channels}).to("{device}")
converted = convert(nn.Sequential(nn.BatchNorm2d({channels}), nn.LeakyReLU(0.01, inplace=True)).to("{device}"))
# The guard measures the first calls; what follows a norm is expected from the step after the one that it was seen in.
for _ in range(10):
    for module in (in_place, kept, converted):
        module(leaf.clone()).backward(dz)
torch.optim.SGD(converted.parameters(), 0.0).step()
converted(leaf.clone()).backward(dz)
"""
STATEMENTS = {
    "in-place": "in_place(leaf.clone()).backward(dz)",
    "in-place, Python": "functions._node = None; in_place(leaf.clone()).backward(dz); functions._node = node",
    "keep_input": "kept(leaf.clone()).backward(dz)",
    "converted": "converted(leaf.clone()).backward(dz)",
    "eager": "F.leaky_relu_(native(leaf.clone()), 0.01).backward(dz)",
    "neither": "leaf.clone().backward(dz)",
}
"""The statements to time. Each copies the leaf, because a leaf may not be overwritten. "neither" has the copy alone.
"Python" uses the node in Python, as a package that was built without the C++ node does."""


def call_overhead(device: str, threads: int, rounds: int, callgrind: bool) -> dict[str, Any]:
    """Quartiles of the microseconds per call, and with ``callgrind`` the instructions per call. The statements take
    turns."""
    setup = SETUP.format(shape=SHAPE, channels=SHAPE[1], device=device)
    timers = {name: Timer(stmt, setup, num_threads=threads) for name, stmt in STATEMENTS.items()}
    with no_garbage_collection():
        # The first round warms up.
        turns = [{name: 1e6 * timer.timeit(200).median for name, timer in timers.items()} for _ in range(rounds + 1)]
    calls: dict[str, Any] = {name: {"us": quartiles([turn[name] for turn in turns[1:]])} for name in timers}
    if callgrind:
        # torch starts the first "python" on the path, which must be this one.
        os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        for name, timer in timers.items():
            calls[name]["instructions"] = timer.collect_callgrind(number=100).counts(denoise=True) / 100
    return {"shape": list(SHAPE), "calls": calls}
