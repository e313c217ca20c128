"""Geometric means over groups of cases, from what the workers measured."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from benchmark.cases import CORE, SMALL
from benchmark.contenders import CHECKPOINT, COMPILE, EAGER, FLOOR, NO_CUDNN, OURS, PEER
from benchmark.steps import EAGER_CONVERTED, EAGER_NATIVE
from benchmark.timing import PHASES

LARGE = 64 << 20
SPEEDUP_ROWS = (COMPILE, CHECKPOINT, PEER, NO_CUDNN)

Record = dict[str, Any]
Row = dict[str, Any]


def middle(quartiles: Sequence[float]) -> float:
    """The median of three quartiles, or the one number there is."""
    return quartiles[len(quartiles) // 2]


def geometric_mean(values: Iterable[float]) -> float | None:
    """None of nothing."""
    logarithms = [math.log(value) for value in values]
    return math.exp(statistics.fmean(logarithms)) if logarithms else None


def pick(records: Iterable[Record], contender: str, ratio: str, phase: str) -> list[float]:
    """The medians of a contender's ``ratio``, "speedup" or "of_floor", in the cases that have it."""
    timings = [record["timings"].get(contender, {}) for record in records]
    return [middle(timing[ratio][phase]) for timing in timings if ratio in timing]


def times_faster(records: Iterable[Record], than: str) -> list[float]:
    """How many times the time of ours ``than`` takes, forward and backward, by medians."""
    both = [r["timings"] for r in records if OURS in r["timings"] and than in r["timings"]]
    return [middle(t[than]["ms"]["both"]) / middle(t[OURS]["ms"]["both"]) for t in both]


def grouped(records: Iterable[Record], *keys: str) -> dict[tuple[str, ...], list[Record]]:
    """By what they have under ``keys``, in the order in which that first occurs."""
    groups: dict[tuple[str, ...], list[Record]] = {}
    for record in records:
        groups.setdefault(tuple(record[key] for key in keys), []).append(record)
    return groups


def bf16_of_fp32(records: Iterable[Record]) -> list[float]:
    """Our time in bf16 over our time in fp32, forward and backward, for each tensor timed in both."""
    ours: dict[str, dict[tuple[object, ...], float]] = {"fp32": {}, "bf16": {}}
    for r in records:
        if OURS in r["timings"] and r["dtype"] in ours:
            tensor = tuple(r["shape"]), r["layout"], r["activation"]
            ours[r["dtype"]][tensor] = middle(r["timings"][OURS]["ms"]["both"])
    return [ours["bf16"][tensor] / full for tensor, full in ours["fp32"].items() if tensor in ours["bf16"]]


def _row(name: str, values: Sequence[float], target: str = "", value: float | None = None) -> Row:
    return {
        "name": name,
        "value": geometric_mean(values) if value is None else value,
        "cases": len(values),
        "target": target,
    }


def cpu_rows(run: Record) -> list[Row]:
    warmed = run["malloc"]["mode"] == "warmed"
    core = [r for r in run["ops"] if r["group"] == CORE]
    silus, others = ([r for r in core if (r["activation"] == "silu") is silu] for silu in (True, False))
    silu, fp32 = ([r for r in records if r["dtype"] == "fp32"] for records in (silus, others))
    speedups = pick(run["ops"], OURS, "speedup", "both")
    scaling = {c: [middle(record["speedup"][c]["both"]) for record in run["scaling"]] for c in (OURS, FLOOR)}
    threads = run["machine"]["threads"]
    return [
        _row("forward / floor, fp32", pick(fp32, OURS, "of_floor", "forward"), "≤ 1.1"),
        _row("backward / floor, fp32", pick(fp32, OURS, "of_floor", "backward"), "≤ 1.2"),
        _row("bf16 / fp32, forward + backward", bf16_of_fp32(others), "≤ 0.75"),
        _row("bf16 / fp32, forward + backward, silu", bf16_of_fp32(silus)),
        _row("eager / in-place, fp32", pick(fp32, OURS, "speedup", "both"), "≥ 2.5" if warmed else "≥ 5"),
        _row("eager / in-place, silu, fp32", pick(silu, OURS, "speedup", "both"), "≥ 3"),
        _row("least eager / in-place of all cases", speedups, "≥ 1", min(speedups, default=None)),
        *(
            _row(f"{name} / in-place, fp32", times_faster(fp32, name), "≥ 8" if name == PEER else "")
            for name in SPEEDUP_ROWS
        ),
        _row(f"1 thread / {threads} threads", scaling[OURS], "≥ 1.8" if threads == 2 else ""),
        _row(f"1 thread / {threads} threads, floor", scaling[FLOOR]),
    ]


def cuda_rows(run: Record) -> list[Row]:
    rows = []
    for (dtype, layout), records in grouped(run["ops"], "dtype", "layout").items():
        setting = f"{dtype} {layout}"
        relu = [r for r in records if r["activation"] == "relu"]
        large = [r for r in records if r["nbytes"] >= LARGE]
        target = "≥ 2" if (dtype, layout) in (("bf16", "channels_last"), ("fp32", "contiguous")) else ""
        rows.append(_row(f"eager / in-place, relu, {setting}", pick(relu, OURS, "speedup", "both"), target))
        for name in SPEEDUP_ROWS:
            target = "> 1" if name == COMPILE else ""
            rows.append(_row(f"{name} / in-place, {setting}", times_faster(records, name), target))
        for phase in PHASES:
            share = [1 / ratio for ratio in pick(large, OURS, "of_floor", phase)]
            rows.append(_row(f"share of copy bandwidth, ≥ 64 MiB, {phase}, {setting}", share, "≥ 0.85"))
    for net in run["nets"]:
        ours, eager = (net["contenders"].get(name) for name in (EAGER_CONVERTED, EAGER_NATIVE))
        if not ours or not eager:
            continue
        name = f"{net['net']} {net['dtype']} {net['layout']}, converted / native"
        targets = ("≤ 1", "≤ 0.6") if net["net"] == "resnet50" else ("", "")
        rows.append(_row(f"step of {name}", [middle(ours["ratio"])], targets[0]))
        rows.append(_row(f"activations of {name}", [ours["held"] / eager["held"]], targets[1]))
    return rows


def overhead_rows(run: Record) -> list[Row]:
    """Net of what surrounds a call."""
    calls = run.get("overhead", {}).get("calls")
    if not calls:
        return []
    shape = "x".join(str(size) for size in run["overhead"]["shape"])
    figures = {"time": {name: middle(call["us"]) for name, call in calls.items()}}
    if "instructions" in calls[OURS]:
        figures["instructions"] = {name: call["instructions"] for name, call in calls.items()}
    rows = []
    for what, of in figures.items():
        for name, target in ((OURS, "≤ 1"), (f"{OURS}, Python", "≤ 1.6")):
            value = (of[name] - of["neither"]) / (of[EAGER] - of["neither"])
            rows.append(_row(f"{what} of a call on {shape}, {name} / eager", [value]) | {"target": target})
    return rows


def summarise(runs: Sequence[Record]) -> list[Row]:
    """One row per mean of something, with the malloc of its run."""
    rows = []
    for run in runs:
        chosen = cuda_rows(run) if "gpu" in run["machine"] else cpu_rows(run)
        chosen = [row for row in chosen + overhead_rows(run) if row["value"] is not None]
        rows += [row | {"malloc": run["malloc"]["mode"]} for row in chosen]
    return rows


def bars(run: Record) -> dict[str, dict[str, dict[str, float]]]:
    """Setting, then contender, then phase: the geometric mean of the time over the floor's, over those cases that all
    the contenders of the setting took part in. Without small tensors, whose time is that of a call."""
    result: dict[str, dict[str, dict[str, float]]] = {}
    ops = [r for r in run["ops"] if r["group"] != SMALL and all("of_floor" in t for t in r["timings"].values())]
    for setting, records in grouped(ops, "activation", "dtype", "layout").items():
        names = list(dict.fromkeys(name for r in records for name in r["timings"]))
        cases = [r for r in records if len(r["timings"]) == len(names)]
        if cases:
            result["\n".join(setting)] = {
                name: {p: geometric_mean(pick(cases, name, "of_floor", p)) or 0.0 for p in PHASES} for name in names
            }
    return result
