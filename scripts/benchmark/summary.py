"""Geometric means over groups of cases, from what the workers measured."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from benchmark.cases import CORE, SMALL
from benchmark.contenders import CHECKPOINT, COMPILE, EAGER, FLOOR, NO_CUDNN, OURS, PEER
from benchmark.steps import EAGER_CONVERTED, EAGER_NATIVE
from benchmark.timing import PHASES

LARGE = 64 << 20
SPEEDUP_ROWS = (COMPILE, CHECKPOINT, PEER, NO_CUDNN)

Record = dict[str, Any]
Row = dict[str, Any]
Where = Callable[[Record], bool]


def middle(quartiles: Sequence[float]) -> float:
    """The median of three quartiles, or the one number there is."""
    return quartiles[len(quartiles) // 2]


def geometric_mean(values: Iterable[float]) -> float | None:
    """None of nothing."""
    logarithms = [math.log(value) for value in values]
    return math.exp(statistics.fmean(logarithms)) if logarithms else None


def pick(records: Iterable[Record], contender: str, ratio: str, phase: str, where: Where) -> list[float]:
    """The medians of a contender's ``ratio``, "speedup" or "of_floor", in the cases that have it."""
    timings = [record["timings"].get(contender, {}) for record in records if where(record)]
    return [middle(timing[ratio][phase]) for timing in timings if ratio in timing]


def times_faster(records: Iterable[Record], than: str, where: Where) -> list[float]:
    """How many times the time of ours ``than`` takes, forward and backward, by medians."""
    both = [r["timings"] for r in records if where(r) and OURS in r["timings"] and than in r["timings"]]
    return [middle(t[than]["ms"]["both"]) / middle(t[OURS]["ms"]["both"]) for t in both]


def bf16_of_fp32(records: Sequence[Record], where: Where) -> list[float]:
    """Our time in bf16 over our time in fp32, forward and backward, for each tensor timed in both."""

    def key(record: Record) -> tuple[object, ...]:
        return tuple(record["shape"]), record["layout"], record["activation"]

    def ours(dtype: str) -> dict[tuple[object, ...], float]:
        chosen = [r for r in records if where(r) and r["dtype"] == dtype and OURS in r["timings"]]
        return {key(r): middle(r["timings"][OURS]["ms"]["both"]) for r in chosen}

    full, half = ours("fp32"), ours("bf16")
    return [half[k] / full[k] for k in full if k in half]


def _row(name: str, values: Sequence[float], target: str = "", value: float | None = None) -> Row:
    return {
        "name": name,
        "value": geometric_mean(values) if value is None else value,
        "cases": len(values),
        "target": target,
    }


def cpu_rows(run: Record) -> list[Row]:
    ops = run["ops"]
    warmed = run["malloc"]["mode"] == "warmed"

    def core_silu(record: Record) -> bool:
        return bool(record["group"] == CORE and record["activation"] == "silu")

    def core_others(record: Record) -> bool:
        return bool(record["group"] == CORE and record["activation"] != "silu")

    def core(record: Record) -> bool:
        return core_others(record) and record["dtype"] == "fp32"

    def silu(record: Record) -> bool:
        return core_silu(record) and record["dtype"] == "fp32"

    speedups = pick(ops, OURS, "speedup", "both", lambda _: True)
    slowest = min(speedups, default=None)
    scaling = {c: [middle(record["speedup"][c]["both"]) for record in run["scaling"]] for c in (OURS, FLOOR)}
    threads = run["machine"]["threads"]
    rows = [
        _row("forward / floor, fp32", pick(ops, OURS, "of_floor", "forward", core), "≤ 1.1"),
        _row("backward / floor, fp32", pick(ops, OURS, "of_floor", "backward", core), "≤ 1.2"),
        _row("bf16 / fp32, forward + backward", bf16_of_fp32(ops, core_others), "≤ 0.75"),
        _row("bf16 / fp32, forward + backward, silu", bf16_of_fp32(ops, core_silu)),
        _row("eager / in-place, fp32", pick(ops, OURS, "speedup", "both", core), "≥ 2.5" if warmed else "≥ 5"),
        _row("eager / in-place, silu, fp32", pick(ops, OURS, "speedup", "both", silu), "≥ 3"),
        _row("least eager / in-place of all cases", speedups, "≥ 1", slowest),
    ]
    for name in SPEEDUP_ROWS:
        values = times_faster(ops, name, core)
        rows.append(_row(f"{name} / in-place, fp32", values, "≥ 8" if name == PEER else ""))
    if run["scaling"]:
        rows.append(_row(f"1 thread / {threads} threads", scaling[OURS], "≥ 1.8" if threads == 2 else ""))
        rows.append(_row(f"1 thread / {threads} threads, floor", scaling[FLOOR]))
    return rows


def cuda_rows(run: Record) -> list[Row]:
    ops, nets = run["ops"], run["nets"]
    rows = []
    for dtype, layout in dict.fromkeys((record["dtype"], record["layout"]) for record in ops):

        def here(record: Record, dtype: str = dtype, layout: str = layout) -> bool:
            return (record["dtype"], record["layout"]) == (dtype, layout)

        def relu(record: Record, here: Where = here) -> bool:
            return here(record) and record["activation"] == "relu"

        def large(record: Record, here: Where = here) -> bool:
            return here(record) and record["nbytes"] >= LARGE

        setting = f"{dtype} {layout}"
        target = "≥ 2" if (dtype, layout) in (("bf16", "channels_last"), ("fp32", "contiguous")) else ""
        rows.append(_row(f"eager / in-place, relu, {setting}", pick(ops, OURS, "speedup", "both", relu), target))
        for name in SPEEDUP_ROWS:
            values = times_faster(ops, name, here)
            rows.append(_row(f"{name} / in-place, {setting}", values, "> 1" if name == COMPILE else ""))
        for phase in PHASES:
            share = [1 / ratio for ratio in pick(ops, OURS, "of_floor", phase, large)]
            rows.append(_row(f"share of copy bandwidth, ≥ 64 MiB, {phase}, {setting}", share, "≥ 0.85"))
    for net in nets:
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


def by_setting(run: Record) -> list[Row]:
    """For each group, dtype, layout and activation geometric means over the shapes: of the floor, and speed-ups."""
    rows = []
    ops = run["ops"]
    for key in dict.fromkeys(tuple(r[k] for k in ("group", "dtype", "layout", "activation")) for r in ops):

        def here(record: Record, key: tuple[str, ...] = key) -> bool:
            return tuple(record[k] for k in ("group", "dtype", "layout", "activation")) == key

        rows.append(
            dict(zip(("group", "dtype", "layout", "activation"), key, strict=True))
            | {
                "shapes": sum(map(here, ops)),
                "of_floor": {p: geometric_mean(pick(ops, OURS, "of_floor", p, here)) for p in PHASES},
                "faster_than": {name: geometric_mean(times_faster(ops, name, here)) for name in (EAGER, *SPEEDUP_ROWS)},
            }
        )
    return rows


def bars(run: Record) -> dict[str, dict[str, dict[str, float]]]:
    """Setting, then contender, then phase: the geometric mean of the time over the floor's, over those cases that all
    the contenders of the setting took part in. Without small tensors, whose time is that of a call."""
    result: dict[str, dict[str, dict[str, float]]] = {}
    ops = [r for r in run["ops"] if r["group"] != SMALL and all("of_floor" in t for t in r["timings"].values())]
    for setting in dict.fromkeys((r["activation"], r["dtype"], r["layout"]) for r in ops):
        cases = [r for r in ops if (r["activation"], r["dtype"], r["layout"]) == setting]
        names = list(dict.fromkeys(name for r in cases for name in r["timings"]))
        cases = [r for r in cases if len(r["timings"]) == len(names)]
        if not cases:
            continue
        result["\n".join(setting)] = {
            name: {p: geometric_mean(pick(cases, name, "of_floor", p, lambda _: True)) or 0.0 for p in PHASES}
            for name in names
        }
    return result
