"""Tables in Markdown and the chart."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

from benchmark.contenders import CHECKPOINT, COMPILE, EAGER, FLOOR, NO_CUDNN, OURS, PEER
from benchmark.steps import CONTENDERS as NET_CONTENDERS
from benchmark.steps import EAGER_NATIVE
from benchmark.summary import SPEEDUP_ROWS, bars, geometric_mean, grouped, middle, pick, times_faster
from benchmark.timing import PHASES

# Before pyplot, which would look for a display.
matplotlib.use("Agg")
import matplotlib.pyplot as plt

LABELS = {PEER: "peer (separate process)"}
COLOURS = {
    OURS: "tab:blue",
    EAGER: "tab:orange",
    NO_CUDNN: "tab:brown",
    COMPILE: "tab:green",
    CHECKPOINT: "tab:purple",
    PEER: "tab:gray",
}
HEADROOM = 1.25
"""Of the highest bar in this process; bars of other processes are cut off there."""


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def number(value: float | None, suffix: str = "") -> str:
    """Three significant digits, never in exponents."""
    if value is None:
        return "-"
    digits = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
    return f"{value:.{3 if abs(value) < 1 else digits}f}{suffix}"


def spread(quartiles: Sequence[float], suffix: str = "") -> str:
    """The median, and the quartiles around it if they are known."""
    if len(quartiles) == 1:
        return number(quartiles[0], suffix)
    return f"{number(quartiles[1], suffix)} ({number(quartiles[0])}-{number(quartiles[2])})"


def dimensions(shape: Sequence[int]) -> str:
    return "x".join(str(size) for size in shape)


def heading(run: dict[str, Any]) -> str:
    """What was measured on, and with which malloc."""
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
    lines.append(f"load average {run['load_before']} before, {run['load_after']} after")
    if "peer" in run:
        version, torch_version = run["peer"]["package"]["version"], run["peer"]["torch"]
        lines.append(f"peer: inplace-abn {version}, torch {torch_version}, in a separate process")
    lines += [f"left out: {what}" for what in run["skipped"]]
    return "\n".join(f"- {line}" for line in lines)


def ops_table(run: dict[str, Any]) -> str:
    """Each contender of each case: medians and quartiles of milliseconds, and of the ratios of the sums."""
    if not run["ops"]:
        return ""
    rows = []
    noted: dict[str, list[str]] = {}
    for record in run["ops"]:
        what = [record["group"], dimensions(record["shape"]), record["dtype"], record["layout"], record["activation"]]
        for name, timing in record["timings"].items():
            ratios = [timing.get(ratio, {}).get("both") for ratio in ("speedup", "of_floor")]
            rows.append(
                [
                    *what,
                    LABELS.get(name, name),
                    *(spread(timing["ms"][phase]) for phase in PHASES),
                    *("-" if ratio is None else spread(ratio, "x") for ratio in ratios),
                ]
            )
        for note in record["notes"]:
            noted.setdefault(note, []).append(" ".join(what))
    notes = [f"- {note}: " + (cases[0] if len(cases) == 1 else f"{len(cases)} cases") for note, cases in noted.items()]
    header = ["group", "shape", "dtype", "layout", "activation", "contender"]
    header += [f"{phase} ms" for phase in PHASES] + ["faster than eager", "of the floor"]
    return "\n".join([table(header, rows), *([""] if notes else []), *notes])


def replays_table(run: dict[str, Any]) -> str:
    """Forward and backward as a CUDA graph, in microseconds; two copies are in each."""
    records = [record for record in run["ops"] if "replay_ms" in record]
    if not records:
        return ""
    names = list(dict.fromkeys(name for record in records for name in record["replay_ms"]))
    rows = []
    for record in records:
        cells = [record["replay_ms"].get(name) for name in names]
        rows.append(
            [
                dimensions(record["shape"]),
                record["dtype"],
                record["layout"],
                record["activation"],
                *("-" if cell is None else spread([1e3 * ms for ms in cell]) for cell in cells),
            ]
        )
    return table(["shape", "dtype", "layout", "activation", *(f"{name} µs" for name in names)], rows)


def means_table(run: dict[str, Any]) -> str:
    """For each group, dtype, layout and activation geometric means over the shapes: of the floor, and speed-ups."""
    groups = grouped(run["ops"], "group", "dtype", "layout", "activation")
    if not groups:
        return ""
    names = [name for name in (EAGER, *SPEEDUP_ROWS) if times_faster(run["ops"], name)]
    header = ["group", "dtype", "layout", "activation", "shapes"]
    header += [f"{phase} / floor" for phase in PHASES] + [f"{LABELS.get(name, name)} / in-place" for name in names]
    rows = []
    for setting, records in groups.items():
        means = [geometric_mean(pick(records, OURS, "of_floor", phase)) for phase in PHASES]
        means += [geometric_mean(times_faster(records, name)) for name in names]
        rows.append([*setting, str(len(records)), *map(number, means)])
    return table(header, rows)


def scaling_table(run: dict[str, Any]) -> str:
    if not run["scaling"]:
        return ""
    few, many = run["scaling"][0]["threads"]
    rows = []
    for record in run["scaling"]:
        speedups = [spread(record["speedup"][name][phase], "x") for name in (OURS, FLOOR) for phase in PHASES]
        rows.append([dimensions(record["shape"]), record["dtype"], record["layout"], *speedups])
    header = ["shape", "dtype", "layout", *(f"{name} {phase}" for name in (OURS, FLOOR) for phase in PHASES)]
    return f"{few} to {many} threads:\n\n" + table(header, rows)


def overhead_table(run: dict[str, Any]) -> str:
    if "overhead" not in run:
        return ""
    calls = run["overhead"]["calls"]
    rows = [[name, spread(call["us"]), number(call.get("instructions"))] for name, call in calls.items()]
    shape = dimensions(run["overhead"]["shape"])
    return table([f"forward and backward on {shape}", "µs", "instructions"], rows)


def share(value: float, of: float | None) -> str:
    return "" if not of else f" ({value / of:.0%})"


def nets_tables(run: dict[str, Any]) -> str:
    """Training steps: memory, time and the largest batch with a column for each contender, and why others failed."""
    nets = run["nets"]
    names = [name for name in NET_CONTENDERS if any(name in (*net["contenders"], *net["notes"]) for net in nets)]
    if not names:
        return ""

    def memory(got: dict[str, Any], eager: dict[str, Any]) -> str:
        cells = (f"{got[key] / 2**20:.1f}{share(got[key], eager.get(key))}" for key in ("held", "peak"))
        return " / ".join(cells)

    def time(got: dict[str, Any], eager: dict[str, Any]) -> str:
        ratio = f", {spread(got['ratio'], 'x')}" if "ratio" in got and got is not eager else ""
        return number(middle(got["ms"])) + ratio

    def batch(got: dict[str, Any], eager: dict[str, Any]) -> str:
        return str(got["largest_batch"]) if "largest_batch" in got else "-"

    parts = {
        "MiB held after forward / at peak, beyond what is held between steps (of eager native's)": memory,
        "ms per step, and in how many times eager native's time (quartiles)": time,
    }
    for budget in {net["budget"] for net in nets} - {None}:
        parts[f"largest batch within {budget / 2**30:g} GiB"] = batch
    texts = []
    for title, cell in parts.items():
        rows = []
        for net in nets:
            eager = net["contenders"].get(EAGER_NATIVE, {})
            cells = [cell(got, eager) if (got := net["contenders"].get(name)) else "-" for name in names]
            rows.append([net_name(net), *cells])
        texts.append(f"{title}:\n\n{table(['net', *names], rows)}")
    notes = [f"- {net_name(net)}, {name}: {note}" for net in nets for name, note in net["notes"].items()]
    return "\n\n".join([*texts, *(["\n".join(notes)] if notes else [])])


def net_name(net: dict[str, Any]) -> str:
    return f"{net['net']}, {net['dtype']} {net['layout']}, {net['batch']}x3x{net['size']}x{net['size']}"


def summary_table(rows: Sequence[dict[str, Any]]) -> str:
    cells = [[r["name"], r["malloc"], number(r["value"]), str(r["cases"]), r["target"] or "-"] for r in rows]
    return table(["geometric mean", "malloc", "measured", "cases", "target"], cells)


def full_report(result: dict[str, Any]) -> str:
    """Everything, as printed."""
    parts = []
    for run in result["runs"]:
        parts.append(f"## malloc {run['malloc']['mode']}" if "gpu" not in run["machine"] else "## CUDA")
        parts.append(heading(run))
        sections = (ops_table, means_table, replays_table, scaling_table, overhead_table, nets_tables)
        parts += [text for text in (section(run) for section in sections) if text]
    if result["summary"]:
        parts += ["## Summary", summary_table(result["summary"])]
    return "\n\n".join(parts)


def save_chart(path: Path, runs: Sequence[dict[str, Any]]) -> bool:
    """Writes a PNG: per run and phase a panel of bars, time over the floor's by setting and contender, and the floor
    as a line; logarithmic. False if no case has a floor."""
    drawn = [(run, settings) for run in runs if (settings := bars(run))]
    if not drawn:
        return False
    figure, axes = plt.subplots(
        len(drawn), len(PHASES), figsize=(24, 5 * len(drawn)), squeeze=False, layout="constrained", sharey="row"
    )
    for row, (run, settings) in zip(axes, drawn, strict=True):
        names = [name for name in COLOURS if any(name in contenders for contenders in settings.values())]
        own = [t[p] for c in settings.values() for name, t in c.items() if name != PEER for p in PHASES]
        top = HEADROOM * max(own)
        width = 0.8 / len(names)
        for axis, phase in zip(row, PHASES, strict=True):
            for i, name in enumerate(names):
                offsets = [j + (i - (len(names) - 1) / 2) * width for j in range(len(settings))]
                heights = [contenders.get(name, {}).get(phase, 0.0) for contenders in settings.values()]
                axis.bar(
                    offsets, [min(h, top) for h in heights], width, label=LABELS.get(name, name), color=COLOURS[name]
                )
                for x, height in zip(offsets, heights, strict=True):
                    if height:
                        axis.text(x, min(height, top), number(height), ha="center", va="bottom", fontsize=7)
            axis.axhline(1, color="black", linewidth=1.2, label="floor")
            axis.set_xticks(range(len(settings)), list(settings), fontsize=8)
            where = "CUDA" if "gpu" in run["machine"] else f"malloc {run['malloc']['mode']}"
            axis.set_title("forward + backward" if phase == "both" else phase)
            axis.set_yscale("log")
            axis.set_ylim(0.5, 1.2 * top)
        row[0].set_ylabel(f"{where}\ntime / floor")
    axes[0][0].legend(fontsize=8, ncols=3)
    figure.savefig(path, dpi=80)
    plt.close(figure)
    return True
