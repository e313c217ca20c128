#!/usr/bin/env python
"""Trains a small segmentation net twice, native and converted by `inplace_abn.convert`, and compares the two.

Both start from the same weights and see the same batches. They take turns. They learn to read handwritten digits that
are pasted over photographs, both of which scikit-learn brings. With --data they learn from a folder instead. With
several nets or dtypes, each pair is compared. The script writes to --out: result.json, demo.png, and the weights of the
last converted net, which a native net can load.

Several processes train with synchronised statistics: torchrun --nproc-per-node 2 scripts/demo.py
"""

import argparse
import copy
import json
import math
import os
import platform
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from segmentation.data import IGNORE, STRIDE, DataError, DigitScenes, FolderData, SegmentationData, seeded_generator
from segmentation.net import ACTIVATIONS, LEARNING_RATES, NETS
from segmentation.progress import Progress, duration
from segmentation.report import Comparison, Run, conclusion, mean_iou, save_picture, seeds, table
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import inplace_abn
from inplace_abn.memory import MemoryReport, measure

# torchrun sets these variables.
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
REHEARSED_STEPS = 4


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    def count(text: str) -> int:
        if (value := int(text)) < 1:
            raise argparse.ArgumentTypeError("must be at least 1")
        return value

    def rate(text: str) -> float:
        if not 0 < (value := float(text)) < math.inf:
            raise argparse.ArgumentTypeError("must be above 0, and finite")
        return value

    def device(text: str) -> torch.device:
        try:
            # A tensor on the meta device has no values, so it could not be trained there.
            torch.ones(1, device=text).item()
        except (RuntimeError, AssertionError) as error:
            raise argparse.ArgumentTypeError(f"cannot be used: {str(error).splitlines()[0]}") from error
        return torch.device(text)

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--net", choices=NETS, nargs="+", default=["unet"], help="default %(default)s")
    add("--dtype", choices=["fp32", "bf16"], nargs="+", default=["fp32"], help="bf16 autocasts (default %(default)s)")
    add("--activation", choices=ACTIVATIONS, default="silu", help="of the U-Net (default %(default)s)")
    add("--steps", type=count, default=500, help="of each net and seed (default %(default)s)")
    add("--seeds", type=count, default=2, help="how many times both are trained (default %(default)s)")
    add("--batch-size", type=count, default=16, help="images per step, over all processes (default %(default)s)")
    add("--size", type=count, default=64, help=f"side of the images, a multiple of {STRIDE} (default %(default)s)")
    add("--lr", type=rate, help=f"highest learning rate of the one-cycle schedule (default {LEARNING_RATES})")
    add("--device", type=device, help="default: cuda if there is one, else cpu")
    add("--data", type=Path, metavar="DIR", help="a folder with images/ and masks/ of equal stems")
    add("--classes", type=count, help=f"number of classes in --data, background included ({IGNORE} is ignored)")
    add("--out", type=Path, metavar="DIR", default=Path("runs/demo"), help="default %(default)s")
    args = parser.parse_args(argv)
    if args.size % STRIDE:
        parser.error(f"--size {args.size} is not a multiple of {STRIDE}")
    if (args.data is None) != (args.classes is None):
        parser.error("--data and --classes go together")
    if args.classes is not None and args.classes > IGNORE:
        parser.error(f"--classes {args.classes} exceeds {IGNORE}")
    if args.batch_size % WORLD:
        parser.error(f"--batch-size {args.batch_size} does not divide among {WORLD} processes")
    if args.batch_size // WORLD * (args.size // STRIDE) ** 2 < 2:
        parser.error(
            f"--batch-size {args.batch_size} of --size {args.size}: a norm needs more than one value per channel"
        )
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out {args.out}: {error.strerror}")
    if not os.access(args.out, os.W_OK):
        parser.error(f"--out {args.out}: cannot be written to")
    args.device = args.device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return args


class Trainee(nn.Module):
    """A net with its loss, its optimiser and its schedule. A call computes the loss. The losses and times of all steps
    are recorded."""

    def __init__(self, net: nn.Module, autocasts: bool, lr: float, steps: int, class_weights: Tensor) -> None:
        super().__init__()
        self.net, self.autocasts = net, autocasts
        self.register_buffer("class_weights", class_weights, persistent=False)
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=lr)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, lr, total_steps=steps)
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast(images.device.type, torch.bfloat16, enabled=self.autocasts):
            logits = self.net(images)
        total = F.cross_entropy(logits.float(), labels, self.class_weights, ignore_index=IGNORE, reduction="sum")
        # reduction="mean" would be NaN for a batch without a labelled pixel.
        return total / self.class_weights[labels[labels != IGNORE]].sum().clamp(min=1)

    def update(self, parallel: nn.Module, images: Tensor, labels: Tensor) -> None:
        """Runs one step. ``parallel`` is this module, or the DistributedDataParallel that wraps it."""
        began = time.perf_counter()
        self.optimizer.zero_grad(set_to_none=True)
        loss = parallel(images, labels)
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())
        self.seconds.append(time.perf_counter() - began)
        self.schedule.step()

    @torch.no_grad()
    def miou(self, data: SegmentationData) -> float:
        """The mean intersection over union of those classes that occur in the validation images or in their
        predictions."""
        classes = len(data.class_names)
        confusion = torch.zeros(classes, classes, dtype=torch.long)
        self.eval()
        for index in range(data.val_batches):
            images, labels = data.val_batch(index)
            prediction = self.net(images.to(self.class_weights.device)).argmax(dim=1).cpu()
            known = labels != IGNORE
            pairs = labels[known] * classes + prediction[known]
            confusion += torch.bincount(pairs, minlength=classes**2).view(classes, classes)
        self.train()
        return mean_iou(confusion)


def batch(args: argparse.Namespace, data: SegmentationData, seed: int, step: int) -> tuple[Tensor, Tensor]:
    """This process's share of a step's images and labels, drawn from (seed, step, rank)."""
    images, labels = data.train_batch(args.batch_size // WORLD, seeded_generator(seed, step, RANK))
    return images.to(args.device), labels.to(args.device)


def nets_of(args: argparse.Namespace, name: str, dtype: str, data: SegmentationData, seed: int) -> dict[str, Trainee]:
    """A native net and its converted copy."""
    torch.manual_seed(seed)
    native = NETS[name](len(data.class_names), args.activation).to(args.device)
    converted = inplace_abn.convert(copy.deepcopy(native), sync=WORLD > 1)
    options = dtype == "bf16", args.lr or LEARNING_RATES[name], args.steps, data.class_weights.to(args.device)
    return {"native": Trainee(native, *options), "converted": Trainee(converted, *options)}


def turns(args: argparse.Namespace, nets: dict[str, Trainee], data: SegmentationData, seed: int) -> Iterator[int]:
    """Trains a native net and its converted copy in turns, with the same batches. Yields each step after it."""
    pairs = [(net, DistributedDataParallel(net) if WORLD > 1 else net) for net in nets.values()]
    for step in range(args.steps):
        images, labels = batch(args, data, seed, step)
        # The second net finds the batch in the processor's caches, so the order alternates.
        for net, parallel in pairs[:: 1 if step % 2 else -1]:
            net.update(parallel, images, labels)
        yield step


def rehearse(args: argparse.Namespace, name: str, dtype: str, data: SegmentationData) -> float:
    """The seconds of a step of both nets, the fastest of a few. What fails with these settings does so here, before
    other nets have been trained for long."""
    nets = nets_of(args, name, dtype, data, 0)
    for _ in islice(turns(args, nets, data, 0), REHEARSED_STEPS):
        pass
    return min(a + b for a, b in zip(nets["native"].seconds, nets["converted"].seconds, strict=True))


def compare(
    args: argparse.Namespace, name: str, dtype: str, data: SegmentationData, progress: Progress, expected: float
) -> tuple[Comparison, nn.Module]:
    """Trains a net from all seeds, and returns its last converted copy, too. Other processes return no runs.
    ``expected`` is what `rehearse` returned."""
    runs: list[Run] = []
    # What a net holds depends on its weights, so it is measured before training, and after it with one more batch.
    first = memory(args, data, nets_of(args, name, dtype, data, 0), 0)
    for seed in range(args.seeds):
        nets = nets_of(args, name, dtype, data, seed)
        title = f"{name}, {dtype}, seed {seed}"
        for step in turns(args, nets, data, seed):
            losses = ", ".join(f"{net.losses[-1]:.3f} {norm}" for norm, net in nets.items())
            progress.step(expected, f"{title}, step {step + 1} of {args.steps}: loss {losses}")
        if RANK == 0:
            runs += [Run(seed, norm, net.miou(data), net.losses, net.seconds) for norm, net in nets.items()]
            progress.write(f"{title}: mIoU {runs[-2].miou:.3f} native, {runs[-1].miou:.3f} converted")
    last = memory(args, data, nets, args.steps)
    return Comparison(name, dtype, runs, first, last), nets["converted"].net


def memory(args: argparse.Namespace, data: SegmentationData, nets: dict[str, Trainee], step: int) -> MemoryReport:
    return MemoryReport(*(measure(net, *batch(args, data, 0, step)) for net in nets.values()))


def run(args: argparse.Namespace) -> None:
    if WORLD > 1:
        if args.device.type == "cuda":
            args.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(args.device)
        dist.init_process_group("nccl" if args.device.type == "cuda" else "gloo")
    data = FolderData(args.data, args.size, args.classes) if args.data else DigitScenes(args.size)
    began = time.perf_counter()
    pairs = [(net, dtype) for net in args.net for dtype in args.dtype]
    count = args.seeds * args.steps
    if RANK == 0:
        names, dtypes = " and ".join(args.net), " and ".join(args.dtype)
        steps = f"{args.steps} steps of {args.batch_size} images of {args.size}x{args.size}, from {seeds(args.seeds)}"
        print(f"{names} in {dtypes}, native and converted, on {args.device}: {steps}", flush=True)
    expected = [rehearse(args, *pair, data) for pair in pairs]
    with closing(Progress(count * len(pairs), count * sum(expected), RANK == 0)) as progress:
        progress.write(f"about {duration(progress.left)}, by the first steps")
        results = [compare(args, *pair, data, progress, each) for pair, each in zip(pairs, expected, strict=True)]
    if RANK > 0:
        return
    comparisons = [comparison for comparison, _ in results]
    kept = int | float | list | None
    settings = {name: value if isinstance(value, kept) else str(value) for name, value in vars(args).items()}
    result = {
        "settings": settings | {"processes": WORLD, "threads": torch.get_num_threads()},
        "torch": torch.__version__,
        "platform": platform.platform(),
        "seconds": time.perf_counter() - began,
        "comparisons": [asdict(comparison) for comparison in comparisons],
    }
    (args.out / "result.json").write_text(json.dumps(result) + "\n")
    torch.save(results[-1][1].state_dict(), args.out / "weights.pt")
    save_picture(args.out / "demo.png", comparisons)
    for each in comparisons:
        title = [f"{each.net}, {each.dtype}"] if len(comparisons) > 1 else []
        print(*title, table(each), conclusion(each), sep="\n\n", end="\n\n")
    print(f"{result['seconds']:.0f} s; written to {args.out}: demo.png, result.json, weights.pt")


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    try:
        run(args)
    except DataError as error:
        raise SystemExit(str(error)) from error
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
