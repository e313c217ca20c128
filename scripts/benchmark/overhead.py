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
import copy
import torch
import torch.nn.functional as F
from torch import nn
from inplace_abn import InPlaceABN, convert
from inplace_abn.autograd import nodes
from inplace_abn.guard.generations import advance

node = nodes.cpp
leaf = torch.randn({shape}, device="{device}", requires_grad=True)
dz = torch.randn({shape}, device="{device}")

class Sum(nn.Module):
    def __init__(self):
        super().__init__()
        self.bn = nn.BatchNorm2d({channels})

    def forward(self, x):
        return F.relu(self.bn(x) + x, inplace=True)

def layer():
    return nn.BatchNorm2d({channels}), nn.LeakyReLU(0.01, inplace=True)

on = torch.device("{device}")
neither = nn.Identity()
in_place = InPlaceABN({channels}).to(on)
kept = InPlaceABN({channels}, overwrite_input=False).to(on)
native = nn.Sequential(*layer()).to(on)
native_sum = Sum().to(on)
native_four = nn.Sequential(*layer(), *layer(), *layer(), *layer()).to(on)
converted, converted_sum, converted_four = (convert(net) for net in torch.nn.ModuleList(
    [nn.Sequential(*layer()), Sum(), nn.Sequential(*layer(), *layer(), *layer(), *layer())]).to(on))

def read(*layers):
    return nn.Sequential(*layers, nn.Linear({width}, {width}, bias=False)).to(on)

native_group = nn.Sequential(nn.GroupNorm(2, {channels}), nn.SiLU()).to(on)
native_rows, native_gelu = read(nn.LayerNorm({width})), read(nn.GELU())
converted_group, converted_rows, converted_gelu = (
    convert(copy.deepcopy(net)) for net in (native_group, native_rows, native_gelu)
)
each = (in_place, kept, converted, converted_sum, converted_four, converted_group, converted_rows, converted_gelu)

def run(module, *args):
    module(leaf.clone(), *args).backward(dz)
    # Each call is of a step of its own, as in training.
    advance()

def without_node(module):
    nodes.cpp = None
    run(module)
    nodes.cpp = node

# The guard measures often in the first hundred steps. What follows a norm is expected from the step after the one in
# which it was seen.
for _ in range(40):
    for module in each:
        run(module)
"""
UNMEASURED = """
from inplace_abn import set_guard

for module in each:
    set_guard(module, interval=1 << 20)
# The distances between measurements double: the next one comes after 512 calls.
for _ in range(300):
    for module in each:
        run(module)
"""
STATEMENTS = {
    "in-place": "run(in_place)",
    "in-place, Python": "without_node(in_place)",
    "beside its input": "run(kept)",
    "beside its input, residual": "run(kept, leaf)",
    "converted": "run(converted)",
    "converted, Python": "without_node(converted)",
    "eager": "run(native)",
    "converted, sum": "run(converted_sum)",
    "eager, sum": "run(native_sum)",
    "converted, four layers": "run(converted_four)",
    "eager, four layers": "run(native_four)",
    "converted, group norm": "run(converted_group)",
    "eager, group norm": "run(native_group)",
    "converted, layer norm": "run(converted_rows)",
    "eager, layer norm": "run(native_rows)",
    "converted, GELU": "run(converted_gelu)",
    "eager, GELU": "run(native_gelu)",
    "neither": "run(neither)",
}
"""The statements to time. Each copies the leaf, because a leaf may not be overwritten. "neither" has the copy alone.
"Python" uses the node in Python, as where there is no C++ node for the torch. A linear layer follows a layer norm and
GELU, because something has to keep their results."""

UNCOUNTED = {"beside its input", "beside its input, residual"}
"""Their instructions are not counted, because each takes a minute or two."""


def call_overhead(device: str, threads: int, rounds: int, callgrind: bool) -> dict[str, Any]:
    """Quartiles of the microseconds per call. ``callgrind`` adds the instructions of a call, and of an unmeasured one.

    The statements take turns. One call in a hundred is measured by the guard.
    """
    setup = SETUP.format(shape=SHAPE, channels=SHAPE[1], width=SHAPE[-1], device=device)
    timers = {name: Timer(stmt, setup, num_threads=threads) for name, stmt in STATEMENTS.items()}
    with no_garbage_collection():
        # The first round warms up.
        turns = [{name: 1e6 * timer.timeit(200).median for name, timer in timers.items()} for _ in range(rounds + 1)]
    calls: dict[str, Any] = {name: {"us": quartiles([turn[name] for turn in turns[1:]])} for name in timers}
    if callgrind:
        # torch starts the first "python" on the path, which must be this one.
        os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        for name in (name for name in timers if name not in UNCOUNTED):
            calls[name]["instructions"] = timers[name].collect_callgrind(number=100).counts(denoise=True) / 100
            unmeasured = Timer(STATEMENTS[name], setup + UNMEASURED, num_threads=threads).collect_callgrind(number=100)
            calls[name]["unmeasured"] = unmeasured.counts(denoise=True) / 100
    return {"shape": list(SHAPE), "calls": calls}
