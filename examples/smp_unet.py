#!/usr/bin/env python
"""Trains a U-Net of segmentation-models-pytorch on synthetic shapes, native and converted.

    pip install segmentation-models-pytorch
    python examples/smp_unet.py

Nothing is downloaded, so the encoder has random weights. With ``encoder_weights="imagenet"`` in `network`, weights are
loaded before the net is converted. Conversion keeps them. Any encoder whose norms are BatchNorms will do.

It prints:

    30 of 30 norms in place
    native: 39.6 MiB held, 86.1 MiB at the peak of a step
      loss 2.471 at first, 0.224 at last; mean IoU 0.882
    converted: 26.1 MiB held, 80.5 MiB at the peak of a step
      loss 2.471 at first, 0.226 at last; mean IoU 0.883
"""

from __future__ import annotations

import argparse
import copy

import torch
from torch import Tensor, nn

import inplace_abn
from inplace_abn.memory import memory_report


def network(encoder: str) -> nn.Module:
    import segmentation_models_pytorch as smp

    model: nn.Module = smp.Unet(encoder, encoder_weights=None, classes=3)
    return model


def shapes(batch: int, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Images (batch, 3, size, size) of a disc and a square in noise, and labels (batch, size, size).

    Labels are 1 in the disc, 2 in the square, and 0 elsewhere.
    """
    rows, columns = torch.meshgrid(*[torch.linspace(-1, 1, size)] * 2, indexing="ij")
    centres = 1.2 * torch.rand(batch, 4, 1, 1, generator=generator) - 0.6
    disc = (rows - centres[:, 0]).square() + (columns - centres[:, 1]).square() < 0.1
    square = torch.maximum((rows - centres[:, 2]).abs(), (columns - centres[:, 3]).abs()) < 0.25
    labels = torch.where(square, 2, disc.long())
    colors = torch.tensor([[0.0, 0.0, 0.0], [1.0, 0.5, 0.0], [0.0, 0.5, 1.0]])
    noise = torch.randn(batch, 3, size, size, generator=generator)
    return colors[labels].movedim(-1, 1) + noise, labels


def train(model: nn.Module, steps: int, batch: int, size: int) -> list[float]:
    from segmentation_models_pytorch.losses import DiceLoss

    generator = torch.Generator().manual_seed(0)
    dice, cross_entropy = DiceLoss("multiclass"), nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model.train()
    losses = []
    for _ in range(steps):
        images, labels = shapes(batch, size, generator)
        outputs = model(images)
        loss = dice(outputs, labels) + cross_entropy(outputs, labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def intersection_over_union(model: nn.Module, size: int) -> float:
    """The intersection over union on 32 new images, as the mean over the three classes."""
    images, labels = shapes(32, size, torch.Generator().manual_seed(1))
    predicted = model.eval()(images).argmax(1)
    found = []
    for label in range(3):
        intersection, union = ((predicted == label) & (labels == label)), ((predicted == label) | (labels == label))
        found.append(int(intersection.sum()) / int(union.sum()))
    return sum(found) / len(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--encoder", default="resnet18")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--size", type=int, default=64, help="of the images, a multiple of 32")
    args = parser.parse_args()
    torch.manual_seed(0)
    native = network(args.encoder)
    images, _ = shapes(args.batch, args.size, torch.Generator().manual_seed(0))
    report = memory_report(native, images)
    converted = inplace_abn.convert(copy.deepcopy(native))
    print(f"{len(report.norms.in_place)} of {len(report.norms.layers)} norms in place")
    results = (("native", native, report.before), ("converted", converted, report.after))
    for name, model, usage in results:
        print(f"{name}: {usage.held / 2**20:.1f} MiB held, {usage.peak / 2**20:.1f} MiB at the peak of a step")
        losses = train(model, args.steps, args.batch, args.size)
        iou = intersection_over_union(model, args.size)
        print(f"  loss {losses[0]:.3f} at first, {losses[-1]:.3f} at last; mean IoU {iou:.3f}")


if __name__ == "__main__":
    main()
