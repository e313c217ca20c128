"""The tables in Markdown, and the chart."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmark.cases import SMALL
from benchmark.contenders import CHECKPOINT, COMPILE, EAGER, NO_CUDNN, OURS, PEER
from benchmark.steps import CONTENDERS as NET_CONTENDERS
from benchmark.steps import EAGER_NATIVE
from benchmark.timing import PHASES

RIVALS = (EAGER, COMPILE, CHECKPOINT, PEER, NO_CUDNN)
DRAWN = {
    EAGER: ("BatchNorm + activation (eager)", "#999999"),
    COMPILE: ("the same by torch.compile", "#e69f00"),
    CHECKPOINT: ("the same by checkpointing", "#56b4e9"),
    OURS: ("inplace_abn", "#0072b2"),
}
"""The contenders of the chart, with their labels and colours."""
TOP = 2.4
"""Higher bars of the chart are cut off here. Their labels say how high they are."""
Record = dict[str, Any]


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table, or an empty string if there are no rows."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) if len(lines) > 2 else ""


def number(value: float | None, suffix: str = "") -> str:
    """``value`` with about three significant digits, never with an exponent."""
    if value is None:
        return "-"
    digits = 3 if abs(value) < 1 else 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
    return f"{value:.{digits}f}{suffix}"


def spread(quartiles: Sequence[float] | None, suffix: str = "") -> str:
    """The median, and the quartiles around it."""
    if quartiles is None:
        return "-"
    return f"{number(quartiles[1], suffix)} ({number(quartiles[0])}-{number(quartiles[2])})"


def of_floor(records: Iterable[Record]) -> list[float]:
    """The median ratio of our time to the floor's, forward and backward together, for each case that has both."""
    timings = [r["timings"].get(OURS, {}) for r in records]
    return [timing["of_floor"]["both"][1] for timing in timings if "of_floor" in timing]


def times_faster(records: Iterable[Record], than: str) -> list[float]:
    """The median time of the contender ``than`` over ours, forward and backward together, for each case that has
    both."""
    both = [r["timings"] for r in records if OURS in r["timings"] and than in r["timings"]]
    return [t[than]["ms"]["both"][1] / t[OURS]["ms"]["both"][1] for t in both]


def grouped(records: Iterable[Record], *keys: str) -> dict[tuple[str, ...], list[Record]]:
    """The records by their values of ``keys``, in the order in which these values first occur."""
    groups: dict[tuple[str, ...], list[Record]] = {}
    for r in records:
        groups.setdefault(tuple(r[key] for key in keys), []).append(r)
    return groups


def mean(values: Sequence[float]) -> float | None:
    return statistics.geometric_mean(values) if values else None


def dimensions(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


def heading(run: Record) -> str:
    """A list of the machine, its software and its load, the setting of malloc, and what was left out."""
    machine = run["machine"]
    lines = [
        f"{machine['cpu']}, {machine['cores']} cores ({machine['capability']}), {machine['threads']} threads, "
        f"torch {machine['torch']}, inplace_abn {machine['inplace_abn']}, Python {machine['python']}"
    ]
    if "gpu" in machine:
        lines.append(
            f"{machine['gpu']}, {machine['gpu_memory'] / 2**30:.0f} GiB, CUDA {machine['cuda']}, "
            f"cuDNN {machine['cudnn']}; the floor moves its bytes at a copy's {run['copy_bandwidth'] / 1e12:.2f} TB/s"
        )
    else:
        lines.append(f"malloc {run['malloc']['setting']} ({run['malloc']['page_faults_64MiB']} page faults per 64 MiB)")
    lines.append(f"load average {run['load_before']:.2f} before, {run['load_after']:.2f} after")
    if run["peer"]:
        lines.append(f"peer: the public package, {run['peer']}")
    lines += [f"left out: {what}" for what in run["skipped"]]
    return "\n".join(f"- {line}" for line in lines)


def ops_table(run: Record) -> str:
    """A row for each contender of each case. Cells are medians and quartiles of milliseconds, and of the ratios of
    forward plus backward."""
    rows = []
    noted: dict[str, list[str]] = {}
    for r in run["ops"]:
        what = [r["group"], dimensions(r["shape"]), r["dtype"], r["layout"], r["activation"]]
        for name, timing in r["timings"].items():
            ratios = [timing.get(ratio, {}).get("both") for ratio in ("speedup", "of_floor")]
            cells = [spread(timing["ms"][phase]) for phase in PHASES] + [spread(ratio, "x") for ratio in ratios]
            rows.append([*what, name, *cells])
        for note in r["notes"]:
            noted.setdefault(note, []).append(" ".join(what))
    notes = [f"- {note}: " + (cases[0] if len(cases) == 1 else f"{len(cases)} cases") for note, cases in noted.items()]
    header = ["group", "shape", "dtype", "layout", "activation", "contender"]
    header += [f"{phase} ms" for phase in PHASES] + ["faster than eager", "of the floor"]
    return "\n".join([table(header, rows), *([""] if notes else []), *notes])


def means_table(runs: Sequence[Record]) -> str:
    """A row for each group, activation, dtype and layout. A cell has a number for each run: the geometric mean over the
    shapes of our time over the floor's, or of a rival's time over ours, or the least such ratio of eager's."""
    names = [name for name in RIVALS if any(times_faster(run["ops"], name) for run in runs)]
    keys = ("group", "activation", "dtype", "layout")
    of_runs = [grouped(run["ops"], *keys) for run in runs]

    def cell(setting: tuple[str, ...], of: Callable[[Sequence[Record]], float | None]) -> str:
        return " / ".join(number(of(records.get(setting, ()))) for records in of_runs)

    header = [*keys, "in-place / floor", *(f"{name} / in-place" for name in names), f"least {EAGER} / in-place"]
    figures = [lambda records: mean(of_floor(records))]
    figures += [lambda records, name=name: mean(times_faster(records, name)) for name in names]
    figures += [lambda records: min(times_faster(records, EAGER), default=None)]
    rows = [[*setting, *(cell(setting, figure) for figure in figures)] for setting in dict.fromkeys(chain(*of_runs))]
    modes = " / ".join(run["malloc"]["mode"] for run in runs)
    return f"Means over the shapes, malloc {modes}:\n\n{table(header, rows)}" if rows else ""


def overhead_table(run: Record) -> str:
    if "overhead" not in run:
        return ""
    calls = run["overhead"]["calls"]
    counts = {name: (c["us"][1], c.get("instructions"), c.get("unmeasured")) for name, c in calls.items()}

    def net(name: str, column: int) -> str:
        """A statement's cost beyond that of "neither", over the same difference of eager's statement of its kind."""
        kind = name[name.find(",") :] if "," in name else ""
        rival = EAGER + kind if EAGER + kind in counts else EAGER
        mine, eager, neither = (counts[n][column] for n in (name, rival, "neither"))
        return number(None if mine is None or name == "neither" else (mine - neither) / (eager - neither))

    header = [f"forward and backward on {dimensions(run['overhead']['shape'])}", "µs", "instructions"]
    header += [f"{what} net of neither / eager's" for what in ("µs", "instructions", "the same, of calls not measured")]
    rows = [[n, spread(calls[n]["us"]), number(counts[n][1]), *(net(n, i) for i in range(3))] for n in calls]
    return table(header, rows)


def net_name(net: Record) -> str:
    return (
        f"{net['net']} {net['weights']}, {net['dtype']} {net['layout']}, {net['batch']}x3x{net['size']}x{net['size']}"
    )


def nets_tables(run: Record) -> str:
    """Tables of memory and time of training steps. There is a column for each contender, and a note on each that
    failed."""
    nets = run["nets"]
    names = [name for name in NET_CONTENDERS if any(name in (*net["contenders"], *net["notes"]) for net in nets)]

    def memory(got: Record, eager: Record) -> str:
        cells = {key: f"{got[key] / 2**20:.1f}" for key in ("held", "peak")}
        return " / ".join(f"{cell} ({got[key] / eager[key]:.0%})" if eager else cell for key, cell in cells.items())

    def time(got: Record, eager: Record) -> str:
        ratio = f", {spread(got['ratio'], 'x')}" if "ratio" in got and got is not eager else ""
        return number(got["ms"][1]) + ratio

    def batch(got: Record, eager: Record) -> str:
        share = f" ({got['largest'] / eager['largest']:.2f}x)" if got.get("largest") and eager.get("largest") else ""
        return str(got.get("largest", "-")) + share

    parts = {
        "MiB held after forward / at peak, beyond what is held between steps (of eager native's)": memory,
        "ms per step, and in how many times eager native's time (quartiles)": time,
    }
    if any("largest" in got for net in nets for got in net["contenders"].values()):
        parts["Images of the largest batch within the memory of --batch-memory"] = batch
    texts = []
    for title, cell in parts.items():
        rows = []
        for net in nets:
            eager = net["contenders"].get(EAGER_NATIVE, {})
            cells = [cell(got, eager) if (got := net["contenders"].get(name)) else "-" for name in names]
            rows.append([net_name(net), *cells])
        texts.append(f"{title}:\n\n{table(['net', *names], rows)}")
    notes = [f"- {net_name(net)}, {name}: {note}" for net in nets for name, note in net["notes"].items()]
    return "\n\n".join([*texts, *(["\n".join(notes)] if notes else [])]) if names else ""


def full_report(result: Record) -> str:
    """All sections of all runs."""
    sections = (heading, ops_table, overhead_table, nets_tables)
    parts = []
    for run in result["runs"]:
        parts.append(f"## malloc {run['malloc']['mode']}" if "gpu" not in run["machine"] else "## CUDA")
        parts += [section(run) for section in sections]
    parts.append(means_table(result["runs"]))
    return "\n\n".join(filter(None, parts))


def bars(run: Record) -> dict[str, dict[str, float]]:
    """The heights of the bars, by activation and dtype, then by contender: the time over eager's, the geometric mean
    over shapes and layouts. Small tensors are left out, because their time is the overhead of a call."""
    large = [r for r in run["ops"] if r["group"] != SMALL and times_faster([r], EAGER)]
    result = {}
    for setting, records in grouped(large, "activation", "dtype").items():
        eager = statistics.geometric_mean(times_faster(records, EAGER))
        times = {name: times_faster(records, name) for name in DRAWN}
        result["\n".join(setting)] = {
            name: statistics.geometric_mean(values) / eager for name, values in times.items() if values
        }
    return result


def save_chart(path: Path, run: Record) -> None:
    """Writes a PNG with the bars of a run. Writes nothing if there are none."""
    settings = bars(run)
    if not settings:
        return
    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.add_subplot()
    names = [name for name in DRAWN if any(name in heights for heights in settings.values())]
    width = 0.8 / len(names)
    top = min(TOP, max(height for heights in settings.values() for height in heights.values()))
    for i, name in enumerate(names):
        label, colour = DRAWN[name]
        bar = {j: heights[name] for j, heights in enumerate(settings.values()) if name in heights}
        places = [j + (i - (len(names) - 1) / 2) * width for j in bar]
        drawn = axes.bar(places, [min(x, top) for x in bar.values()], 0.92 * width, label=label, color=colour)
        labels = [f"{height:.1f} ↑" if height > top else f"{height:.2f}" for height in bar.values()]
        axes.bar_label(drawn, labels, padding=2, fontsize=9)
    axes.set_xticks(range(len(settings)), list(settings))
    axes.set_ylabel("time of forward + backward\n(eager = 1, lower is better)")
    axes.set_ylim(0, 1.1 * top)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=len(names), frameon=False, fontsize=9)
    figure.savefig(path, dpi=150)
