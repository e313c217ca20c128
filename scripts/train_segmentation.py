#!/usr/bin/env python
"""Trains a small U-Net with native or in-place batch normalisation, and reports mIoU, memory and speed.

By default it learns to read handwritten digits pasted over photographs, both bundled with scikit-learn. Runs on one
process, or on several: torchrun --nproc-per-node 2 scripts/train_segmentation.py --norm inplace-sync
"""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from segmentation.data import IGNORE, STRIDE, DataError, DigitScenes, FolderData, SegmentationData, seeded_generator
from segmentation.measure import class_iou, confusion_matrix, mean_iou, peak_memory
from segmentation.net import ACTIVATION_PARAMS, NORMS, build_net, make_norm
from segmentation.report import run_summary, save_predictions
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

WARM_UP_STEPS = 5
PICTURED = 6
# A checkpoint continues exactly only under the settings that it was made with.
RESUME_SETTINGS = (
    *("norm", "activation", "activation_param", "amp", "channels_last"),
    *("classes", "size", "steps", "batch_size", "lr", "seed"),
)


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    def count(text: str) -> int:
        if (value := int(text)) < 1:
            raise argparse.ArgumentTypeError("must be at least 1")
        return value

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--norm", choices=NORMS, default="inplace")
    add("--activation", choices=ACTIVATION_PARAMS, default="leaky_relu")
    add("--activation-param", type=float, help="slope of leaky_relu (default 0.01) or alpha of elu (default 1)")
    add("--amp", choices=["bf16"], help="autocast to bfloat16")
    add("--channels-last", action="store_true")
    add("--device", type=torch.device, help="default: cuda if there is one, else cpu")
    add("--data", type=Path, metavar="DIR", help="a folder with images/ and masks/ of equal stems")
    add("--classes", type=count, help="number of classes in --data, background included (255 in a mask is ignored)")
    add("--size", type=count, default=96, help=f"side of the training images, a multiple of {STRIDE} (default 96)")
    add("--steps", type=count, default=1100, help="default 1100")
    add("--batch-size", type=count, default=8, help="images per step, over all ranks (default 8)")
    add("--lr", type=float, default=1e-3, help="highest learning rate of the one-cycle schedule (default 1e-3)")
    add("--seed", type=int, default=0)
    add("--out", type=Path, metavar="DIR", help="default: runs/<norm>-<activation>")
    add("--checkpoint-every", type=count, default=100, metavar="STEPS")
    add("--resume", type=Path, metavar="FILE", help="a checkpoint.pt, made with the same settings, to continue")
    args = parser.parse_args(argv)
    if args.size % STRIDE:
        parser.error(f"--size {args.size} is not a multiple of {STRIDE}")
    if args.seed < 0:
        parser.error(f"--seed {args.seed} is negative")
    if (args.data is None) != (args.classes is None):
        parser.error("--data and --classes go together")
    if args.classes is not None and args.classes > IGNORE:
        parser.error(f"--classes {args.classes} exceeds {IGNORE}")
    if args.activation_param is None:
        args.activation_param = ACTIVATION_PARAMS[args.activation]
    try:
        make_norm("inplace", 1, args.activation, args.activation_param)
    except ValueError as error:
        parser.error(f"--activation-param: {error}")
    args.out = args.out or Path("runs", f"{args.norm}-{args.activation}")
    args.device = args.device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return args


class Trainer:
    """The net with its optimiser and schedule. Every random draw is made from (seed, step, rank), so that a checkpoint
    needs no generator's state."""

    def __init__(self, args: argparse.Namespace, data: SegmentationData) -> None:
        self.args = args
        self.data = data
        self.rank, self.world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        if args.batch_size % self.world:
            raise DataError(f"--batch-size {args.batch_size} does not divide among {self.world} ranks")
        torch.manual_seed(args.seed)
        net = build_net(len(data.class_names), args.norm, args.activation, args.activation_param)
        self.layout = torch.channels_last if args.channels_last else torch.contiguous_format
        self.net = net.to(args.device, memory_format=self.layout)
        self.parallel = DistributedDataParallel(self.net) if dist.is_initialized() else self.net
        self.class_weights = data.class_weights.to(args.device)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=args.lr)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, args.lr, total_steps=args.steps)
        self.losses: list[float] = []
        self.step_times: list[float] = []

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """This rank's share of the images and labels of a step, on the device."""
        generator = seeded_generator(self.args.seed, step, self.rank)
        images, labels = self.data.train_batch(self.args.batch_size // self.world, generator)
        return images.to(self.args.device, memory_format=self.layout), labels.to(self.args.device)

    def forward(self, net: torch.nn.Module, images: Tensor) -> Tensor:
        with torch.autocast(self.args.device.type, torch.bfloat16, enabled=self.args.amp == "bf16"):
            logits: Tensor = net(images)
        return logits.float()

    def update(self, images: Tensor, labels: Tensor) -> Tensor:
        """One step of the optimiser; returns this rank's loss, a detached fp32 scalar."""
        self.net.train()
        self.optimizer.zero_grad(set_to_none=True)
        logits = self.forward(self.parallel, images)
        total = F.cross_entropy(logits, labels, self.class_weights, ignore_index=IGNORE, reduction="sum")
        # Not reduction="mean": that is NaN for a batch without a single labelled pixel.
        loss = total / self.class_weights[labels[labels != IGNORE]].sum().clamp(min=1)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def train(self) -> None:
        start = len(self.losses)
        bar = tqdm(total=self.args.steps, initial=start, desc=self.args.norm, unit="step", disable=self.rank > 0)
        with bar:
            for step in range(start, self.args.steps):
                images, labels = self.batch(step)
                began = time.perf_counter()
                loss = self.update(images, labels)
                self.losses.append(self.mean_over_ranks(loss))
                self.step_times.append(time.perf_counter() - began)
                self.schedule.step()
                bar.set_postfix(loss=f"{self.losses[-1]:.3f}", images_per_s=f"{self.images_per_s():.0f}")
                bar.update()
                if (step + 1) % self.args.checkpoint_every == 0 or step + 1 == self.args.steps:
                    self.save(self.args.out / "checkpoint.pt")

    def mean_over_ranks(self, loss: Tensor) -> float:
        if self.world > 1:
            dist.all_reduce(loss)
        return loss.item() / self.world

    def step_seconds(self) -> float:
        return statistics.median(self.step_times[WARM_UP_STEPS:] or self.step_times)

    def images_per_s(self) -> float:
        return self.args.batch_size / self.step_seconds()

    @torch.no_grad()
    def evaluate(self) -> tuple[list[float | None], list[tuple[Tensor, Tensor, Tensor]]]:
        """IoU by class over all ranks, and this rank's first images with label and prediction, on the CPU."""
        self.net.eval()
        classes = len(self.data.class_names)
        confusion = torch.zeros(classes, classes, dtype=torch.long, device=self.args.device)
        samples: list[tuple[Tensor, Tensor, Tensor]] = []
        for index in range(self.rank, self.data.val_batches, self.world):
            images, labels = self.data.val_batch(index)
            logits = self.forward(self.net, images.to(self.args.device, memory_format=self.layout))
            prediction = logits.argmax(dim=1)
            confusion += confusion_matrix(prediction, labels.to(self.args.device), classes)
            samples.extend(zip(images, labels, prediction.cpu(), strict=True))
            del samples[PICTURED:]
        if self.world > 1:
            dist.all_reduce(confusion)
        return class_iou(confusion), samples

    def settings(self) -> dict[str, Any]:
        return {name: getattr(self.args, name) for name in RESUME_SETTINGS} | {"ranks": self.world}

    def save(self, path: Path) -> None:
        if self.rank > 0:
            return
        state = {
            "settings": self.settings(),
            "net": self.net.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "losses": self.losses,
            "step_times": self.step_times,
        }
        # Written beside and renamed, so that a run killed here leaves the previous checkpoint whole.
        torch.save(state, path.with_suffix(".tmp"))
        path.with_suffix(".tmp").replace(path)

    def load(self, path: Path) -> None:
        try:
            state = torch.load(path, map_location=self.args.device, weights_only=True)
            settings = dict(state)["settings"]
        except Exception as error:
            # A file of another kind can raise anything here, from OSError to EOFError and KeyError.
            raise DataError(f"{path}: not a checkpoint of this script ({type(error).__name__})") from error
        for name, value in self.settings().items():
            if settings.get(name) != value:
                raise DataError(f"{path}: was made with {name} {settings.get(name)}, not {value}")
        self.net.load_state_dict(state["net"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.losses, self.step_times = state["losses"], state["step_times"]


def run(args: argparse.Namespace) -> None:
    if "WORLD_SIZE" in os.environ:
        if args.device.type == "cuda":
            args.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(args.device)
        dist.init_process_group("nccl" if args.device.type == "cuda" else "gloo")
    data = FolderData(args.data, args.size, args.classes) if args.data else DigitScenes(args.size)
    trainer = Trainer(args, data)
    if args.resume:
        trainer.load(args.resume)
    args.out.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    trainer.train()
    iou, samples = trainer.evaluate()
    seconds = time.perf_counter() - began
    # Last, because it takes one more step.
    images, labels = trainer.batch(args.steps)
    trainer.optimizer.zero_grad(set_to_none=True)
    peak = peak_memory(lambda: trainer.update(images, labels), args.device)
    if trainer.rank > 0:
        return
    result = {
        "args": {k: v if isinstance(v, int | float | None) else str(v) for k, v in vars(args).items()},
        "world_size": trainer.world,
        "iou": dict(zip(data.class_names, iou, strict=True)),
        "miou": mean_iou(iou),
        "peak_mb": peak / 1e6,
        "step_ms": 1e3 * trainer.step_seconds(),
        "images_per_s": trainer.images_per_s(),
        "train_and_validate_s": seconds,
        "losses": trainer.losses,
        "torch": torch.__version__,
        "platform": platform.platform(),
        "threads": torch.get_num_threads(),
    }
    (args.out / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    save_predictions(args.out / "predictions.png", samples, data.class_names)
    print(run_summary(result))
    print(f"written to {args.out}: result.json, predictions.png, checkpoint.pt")


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
