"""Measures memory and time of public models, native and converted, and checks their gradients.

    python scripts/zoo.py                    # all models of the installed packages, as a table
    python scripts/zoo.py --write            # the same, written to docs/zoo.md
    python scripts/zoo.py --readme           # larger inputs, without gradients: README.md's table, written there
    python scripts/zoo.py --comparison       # beside checkpointing and torch.compile: the tables of docs/comparison.md

With parts of models' names, or in bfloat16, tables are printed only:

    python scripts/zoo.py resnet50 dla34
    python scripts/zoo.py --readme --dtype bfloat16

models.py says which packages to install. All runs on the CPU. The converted model is measured as initialised and with
norms as `trained.as_trained` leaves them, in the comparison as trained only; natively it makes no difference. When
steps are timed, all take turns.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import os
import statistics
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import generated
import torch
from benchmark import steps as course
from benchmark.timing import no_garbage_collection
from models import ZOO, Entry, named
from torch import Tensor, nn

from inplace_abn import Report, Verification, convert, report, verify
from inplace_abn.conversion.table import readable
from inplace_abn.trial import trainable

COLUMNS = (
    *("model", "gradients", "in place", "held", "converted, initialised", "converted, trained", "held in bf16"),
    *("converted in bf16", "peak", "peak, initialised", "peak, trained", "step"),
)

README = generated.ROOT / "README.md"
PAGE = generated.ROOT / "docs/zoo.md"
COMPARISON = generated.ROOT / "docs/comparison.md"
README_COLUMNS = (
    *("", "model", "held, MiB", "as initialised", "as trained"),
    *("peak, MiB", "as initialised", "as trained", "time of a step"),
)

MEASURED_STEPS = 5
"""Norms are measured in the first, second, third and fifth step, and then not before the ninth."""


class Shown(NamedTuple):
    """A row of the table of README.md."""

    family: str
    shape: tuple[int, ...]
    """The input's, for which activations take more memory than parameters."""


README_MODELS = {
    "timm resnet50": Shown("CNN", (8, 3, 224, 224)),
    "timm efficientnet_b0": Shown("CNN", (8, 3, 224, 224)),
    "smp Unet": Shown("segmentation", (8, 3, 256, 256)),
    "HF SegFormer": Shown("segmentation", (2, 3, 512, 512)),
    "ultralytics yolo11n": Shown("detection", (8, 3, 320, 320)),
    "nnU-Net PlainConvUNet 3d": Shown("medical", (2, 1, 64, 64, 64)),
    "timm vit_small_patch16_224": Shown("transformer", (8, 3, 224, 224)),
    "timm convnext_tiny": Shown("transformer", (8, 3, 224, 224)),
    "diffusers UNet2DModel, attention": Shown("diffusion", (8, 3, 32, 32)),
}
CHECKPOINTED_MODELS = {name: README_MODELS[name].shape for name in ("timm resnet50", "timm efficientnet_b0")}
COMPILED_MODELS = {
    **dict.fromkeys(
        (
            *("torchvision:resnet18", "torchvision:efficientnet_b0", "smp:Unet-resnet18", "timm:resnet50"),
            *("smp:DeepLabV3Plus-resnet18", "ultralytics:yolo11n"),
        ),
        (8, 3, 128, 128),
    ),
    **dict.fromkeys(
        (f"timm:{name}" for name in ("vit_small_patch16_224", "convnext_tiny", "swin_tiny_patch4_window7_224")),
        (4, 3, 224, 224),
    ),
}
"""Names as `models.named` takes them, and the shapes of inputs. Compiling takes minutes for each."""


class Table(NamedTuple):
    """A table of a page, between markers of its name."""

    page: Path
    name: str
    columns: tuple[str, ...]
    entries: Mapping[str, Entry]
    cells: Callable[[str], tuple[str, ...]]
    """Measures one of the entries."""


def verdict(found: Verification) -> str:
    if found:
        return f"equal, {max(found.gradient_errors.values()):.0e}"
    name, error = found.worst
    return f"DIFFER: {error:.1e} {name}"


def training(net: nn.Module, x: Tensor, dtype: torch.dtype = torch.float32) -> course.Training:
    """Its steps autocast to ``dtype`` and leave all parameters as they are."""
    return course.Training(net, net.train(), torch.optim.SGD(net.parameters(), lr=0.0), x, dtype)


def time_shares(trainings: dict[str, course.Training], steps: int) -> dict[str, float]:
    """The time of a step of each training, in that of the first one. It is the median over the steps."""
    for each in trainings.values():
        for _ in range(course.WARM_UP):
            each.step()
    notes: dict[str, str] = {}
    times = course.time_steps(trainings, steps, notes)
    if notes:
        raise RuntimeError(str(notes))
    first = next(iter(times.values()))
    return {name: statistics.median(b / a for a, b in zip(first, ms, strict=True)) for name, ms in times.items()}


def shape_in_words(shape: Iterable[int]) -> str:
    return "x".join(map(str, shape))


class Memory(NamedTuple):
    """The memory of training steps, in bytes above what was allocated before each."""

    held: int
    """What is held for backward in a step after those in which norms are measured."""
    first: int
    """The most at any moment of the first steps, in which norms are measured."""
    later: int
    """The most at any moment of a later step."""

    @property
    def peak(self) -> int:
        """The most at any moment of any step."""
        return max(self.first, self.later)


def memory(training: course.Training, steps: int = MEASURED_STEPS) -> Memory:
    """Measures so many steps and a later one."""
    # What is freed in a later step would be subtracted from its peak.
    with no_garbage_collection():
        peaks = [peak_of_step(training) for _ in range(steps)]
    later = course.memory(training)
    return Memory(later["held"], max(peaks), later["peak"])


def peak_of_step(training: course.Training) -> int:
    """Takes a step. Unlike `inplace_abn.memory.measure` it takes no other step before, and norms may be measured."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    training.optimizer.zero_grad()
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(profile_memory=True, acc_events=True, activities=activities) as profile:
        training.loss().backward()
    training.optimizer.step()
    events = profile.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    return max(itertools.accumulate(size for _, size in changes), default=0)


class Found(NamedTuple):
    """What was measured of a model in a dtype."""

    native: Memory
    initialised: Memory
    """Of the converted model with norms as initialised."""
    trained: Memory
    """Of the converted model with norms as trained."""
    time: float | None
    """The time of a step after ``convert``, in the original's; with norms as trained."""


def found_in(
    initialised: nn.Module, trained: nn.Module, x: Tensor, steps: int, dtype: torch.dtype = torch.float32
) -> tuple[Found, list[Report]]:
    """What is found of a model, and what its norms did as initialised and as trained."""
    # Natively all steps are the same, whatever the weights are.
    native = memory(training(trainable(initialised), x, dtype), 1)
    nets = [convert(trainable(model)) for model in (initialised, trained)]
    first, second = (memory(training(net, x, dtype)) for net in nets)
    time = None
    if steps:
        contenders = {"native": trainable(trained), "converted": convert(trainable(trained))}
        time = time_shares({name: training(net, x, dtype) for name, net in contenders.items()}, steps)["converted"]
    return Found(native, first, second, time), [report(net) for net in nets]


def differing(cells: Iterable[str]) -> str:
    """The cells with strokes between them; a single one if they are equal."""
    return " / ".join(dict.fromkeys(cells))


def row(
    name: str, initialised: nn.Module, trained: nn.Module, x: Tensor, verified: bool = True, steps: int = 0
) -> tuple[str, ...]:
    """The cells of `COLUMNS` for a model, which is given with norms as initialised and as trained."""
    # Two images are enough for the norms, which need more than one value per channel. More would be slow in float64.
    equal = verdict(verify(trained, convert(copy.deepcopy(trained)), x[:2])) if verified else "-"
    found, norms = found_in(initialised, trained, x, steps)
    converted = (found.initialised, found.trained)
    narrow, _ = found_in(initialised, trained, x, 0, torch.bfloat16)
    return (
        f"{name}, {shape_in_words(x.shape)}",
        equal,
        f"{differing(str(len(each.in_place)) for each in norms)} of {len(norms[1].layers)}",
        readable(found.native.held),
        *(f"{each.held / found.native.held:.3f}" for each in converted),
        readable(narrow.native.held),
        f"{narrow.trained.held / narrow.native.held:.3f}",
        readable(found.native.peak),
        *(f"{each.first / found.native.peak:.3f} / {each.later / found.native.peak:.3f}" for each in converted),
        "-" if found.time is None else f"{found.time:.2f}",
    )


def entry_row(name: str, entry: Entry, batch: int, verified: bool, steps: int) -> tuple[str, ...]:
    """The cells of `COLUMNS` for a model of the zoo, or the reason why it cannot be made."""
    try:
        models = [entry.build(trained) for trained in (False, True)]
    except ImportError as error:
        return (name, f"{entry.package} cannot be imported: {error}", *[""] * (len(COLUMNS) - 2))
    return row(name, models[0], models[1], torch.randn(batch, *entry.shape), verified, steps)


def measured(name: str, dtype: torch.dtype, steps: int) -> Found:
    initialised, trained = (ZOO[name].build(trained) for trained in (False, True))
    return found_in(initialised, trained, torch.randn(README_MODELS[name].shape), steps, dtype)[0]


def mebibytes(size: int) -> str:
    return f"{size / 2**20:.0f}"


def change(native: int, converted: int) -> str:
    return f"**{converted / native - 1:+.0%}**"


def readme_row(name: str, found: Found) -> tuple[str, ...]:
    """The cells of `README_COLUMNS` for what was measured."""

    def sizes(native: int, *converted: int) -> list[str]:
        return [mebibytes(native), *(f"{mebibytes(each)}, {change(native, each)}" for each in converted)]

    native, initialised, trained, time = found
    family, shape = README_MODELS[name]
    return (
        *(family, f"{name}, {shape_in_words(shape)}"),
        *sizes(native.held, initialised.held, trained.held),
        *sizes(native.peak, initialised.peak, trained.peak),
        "-" if time is None else f"{time:.2f}",
    )


def compared(
    entry: Entry, shape: tuple[int, ...], contenders: Mapping[str, course.Contender], steps: int
) -> tuple[str, ...]:
    """For each contender, MiB held / at the peak, and the time of a step in that of the first one. Norms are as
    trained. The peak of a compiled net is that of a step after compiling; in those the guard does not measure."""
    torch._dynamo.reset()
    net = entry.build()
    x = torch.randn(shape)
    trainings: dict[str, course.Training] = {}
    found: dict[str, Memory] = {}
    for name, contender in contenders.items():
        trainings[name] = each = training(contender.prepared(trainable(net)), x)
        # A compiled net is in the modes that the guard has chosen in these steps.
        found[name] = memory(each, MEASURED_STEPS if contender.converted else 1)
        if contender.compiled:
            each.call = contender.compile(each.net)
            for _ in range(course.WARM_UP):
                each.step()
            compiled = course.memory(each)
            found[name] = Memory(compiled["held"], compiled["peak"], compiled["peak"])
    shares = time_shares(trainings, steps) if steps else {}
    # That of the first one is 1.
    shares.pop(next(iter(contenders)), None)
    times = {name: f", {share:.2f}" for name, share in shares.items()}
    return tuple(
        f"{mebibytes(each.held)} / {mebibytes(each.peak)}{times.get(name, '')}" for name, each in found.items()
    )


def tables(args: argparse.Namespace) -> list[Table]:
    """The tables that the arguments ask for."""
    if args.readme:
        entries = {name: ZOO[name] for name in README_MODELS}
        dtype = getattr(torch, args.dtype)
        cells = lambda name: readme_row(name, measured(name, dtype, args.steps))  # noqa: E731
        return [Table(README, "models", README_COLUMNS, entries, cells)]
    if not args.comparison:
        cells = lambda name: entry_row(name, ZOO[name], args.batch, not args.no_verify, args.steps)  # noqa: E731
        return [Table(PAGE, "models", COLUMNS, ZOO, cells)]

    def comparison(
        name: str,
        entries: Mapping[str, Entry],
        shapes: Mapping[str, tuple[int, ...]],
        contenders: Mapping[str, course.Contender],
    ) -> Table:
        def cells(net: str) -> tuple[str, ...]:
            found = compared(entries[net], shapes[net], contenders, args.steps)
            return (f"{net.replace(':', ' ')}, {shape_in_words(shapes[net])}", *found)

        return Table(COMPARISON, name, ("net", *contenders), entries, cells)

    checkpointed = {name: ZOO[name] for name in CHECKPOINTED_MODELS}
    compiled = {name: named(name) for name in COMPILED_MODELS}
    return [
        comparison("checkpointing", checkpointed, CHECKPOINTED_MODELS, course.CHECKPOINTED),
        comparison("compiling", compiled, COMPILED_MODELS, course.CONTENDERS),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("names", nargs="*", help="parts of models' names; all without any")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--no-verify", action="store_true", help="compare no gradients")
    parser.add_argument("--steps", type=int, default=12, help="that are timed; 0 for none")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--write", action="store_true", help="write the table to docs/zoo.md")
    which.add_argument("--readme", action="store_true", help="measure the table of README.md, and write it there")
    comparison = "measure the nets of docs/comparison.md, and write them there; compiling takes minutes for each"
    which.add_argument("--comparison", action="store_true", help=comparison)
    dtypes = ("float32", "bfloat16")
    parser.add_argument("--dtype", choices=dtypes, default="float32", help="of autocast, with --readme")
    args = parser.parse_args()
    dtype = getattr(torch, args.dtype)
    if dtype != torch.float32 and not args.readme:
        parser.error("--dtype is for --readme")
    is_written = (args.write or args.readme or args.comparison) and not args.names and dtype == torch.float32
    for table in tables(args):
        chosen = [name for name in table.entries if not args.names or any(part in name for part in args.names)]
        if not chosen:
            continue
        # The commit is the one that is measured, whatever happens to the tree meanwhile.
        made_by = generated.made_by((table.entries[name].distribution for name in chosen), dtype)
        lines = [generated.table_head(table.columns)]
        print(*lines, sep="\n", flush=True)
        for name in chosen:
            lines.append(generated.table_line(table.cells(name)))
            print(lines[-1], flush=True)
            # What is there after hours stays there if the run ends early. The line then says so.
            if is_written:
                left = len(chosen) + 1 - len(lines)
                generated.write(table.page, table.name, lines, made_by + f" {left} rows are missing." * bool(left))
        print(f"\n{made_by}\n")


if __name__ == "__main__":
    main()
