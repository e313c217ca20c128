#!/usr/bin/env python
"""Trains YOLO11n of ultralytics on a small synthetic data set. A callback of the trainer converts the model.

    pip install ultralytics pillow
    python examples/ultralytics_yolo.py

The model is made from its yaml file, and nothing is downloaded. The callback runs after the trainer has made its
averaged copy of the model (EMA), so that copy is not converted. Validation and checkpoints use the copy, so they do not
need this package. The callback works on one device only: with several devices DistributedDataParallel has already
wrapped the model. ultralytics has a license of its own, AGPL-3.0.

Both runs start from the same weights and see the same batches. The example prints:

    native: 37.3 MiB held, 38.8 MiB at the peak of a step
    converted: 16.6 MiB held, 19.1 MiB at the peak of a step
    loss of native: 118.870 at first, 109.476 at last
    loss of converted: 118.870 at first, 109.255 at last
    norms while training: 81 InPlaceBatchNorm2d; of the checkpoint: 81 BatchNorm2d
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

import inplace_abn
from inplace_abn.memory import memory_report


def write_data(folder: Path, count: int, size: int) -> Path:
    """Writes a data set for ultralytics, images of a bright square on noise with its box. Returns its yaml file."""
    from PIL import Image

    generator = torch.Generator().manual_seed(0)
    for split in ("train", "val"):
        for kind in ("images", "labels"):
            (folder / kind / split).mkdir(parents=True)
        for i in range(count):
            pixels = torch.randint(0, 128, (size, size, 3), generator=generator, dtype=torch.uint8)
            side = int(torch.randint(size // 4, size // 2, (), generator=generator))
            top, left = torch.randint(0, size - side, (2,), generator=generator).tolist()
            pixels[top : top + side, left : left + side] += 100
            Image.fromarray(pixels.numpy()).save(folder / "images" / split / f"{i}.png")
            box = [(left + side / 2) / size, (top + side / 2) / size, side / size, side / size]
            (folder / "labels" / split / f"{i}.txt").write_text(" ".join(map(str, [0, *box])))
    data = folder / "data.yaml"
    data.write_text(f"path: {folder}\ntrain: images/train\nval: images/val\nnames:\n  0: square\n")
    return data


def convert_model(trainer: Any) -> None:
    """The callback for ``on_pretrain_routine_end``."""
    inplace_abn.convert(trainer.model)


def train(
    data: Path, folder: Path, converted: bool, args: argparse.Namespace
) -> tuple[nn.Module, nn.Module, list[float]]:
    """Returns the trained model, the model of the checkpoint, and the losses."""
    from ultralytics import YOLO

    losses = []
    yolo = YOLO("yolo11n.yaml")
    if converted:
        yolo.add_callback("on_pretrain_routine_end", convert_model)
    yolo.add_callback("on_train_batch_end", lambda trainer: losses.append(trainer.loss.item()))
    yolo.train(
        data=str(data),
        epochs=args.epochs,
        imgsz=args.size,
        batch=args.batch,
        device="cpu",
        workers=0,
        seed=0,
        amp=False,
        plots=False,
        verbose=False,
        project=str(folder),
        name="converted" if converted else "native",
    )
    return yolo.trainer.model, yolo.model, losses


def norms(model: nn.Module) -> str:
    """The number of norms of each class, in words."""
    found = [type(m).__name__ for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    return ", ".join(f"{found.count(kind)} {kind}" for kind in sorted(set(found)))


def main() -> None:
    from ultralytics import YOLO

    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--images", type=int, default=32, help="for training, and as many for validation")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--size", type=int, default=96, help="of the images, a multiple of 32")
    args = parser.parse_args()
    images = torch.randn(args.batch, 3, args.size, args.size)
    native = YOLO("yolo11n.yaml").model
    report = memory_report(native, images)
    for name, usage in (("native", report.before), ("converted", report.after)):
        print(f"{name}: {usage.held / 2**20:.1f} MiB held, {usage.peak / 2**20:.1f} MiB at the peak of a step")
    with tempfile.TemporaryDirectory() as path:
        data = write_data(Path(path) / "data", args.images, args.size)
        _, _, natives = train(data, Path(path), False, args)
        trained, loaded, ours = train(data, Path(path), True, args)
    print(f"loss of native: {natives[0]:.3f} at first, {natives[-1]:.3f} at last")
    print(f"loss of converted: {ours[0]:.3f} at first, {ours[-1]:.3f} at last")
    print(f"norms while training: {norms(trained)}; of the checkpoint: {norms(loaded)}")


if __name__ == "__main__":
    main()
