#!/usr/bin/env python
"""Trains a timm net on handwritten digits, native and converted, from the same initial weights, for a few seeds.

    pip install timm scikit-learn matplotlib
    python examples/timm_finetune.py --png losses.png

Nothing is downloaded, so the weights are random. With ``pretrained=True`` in `network` the example fine-tunes.
Conversion keeps all parameters, so weights may be loaded before or after it. Native and converted nets see the same
batches. Their losses drift apart slowly, because the two nets round differently. Compare their difference with the
difference between seeds.

timm sets the weights of the last norm of each ResNet block to zero. Such a norm saves its input, as torch's norm does,
until its weights have grown. A pretrained ResNet therefore holds less memory than this one.

It prints:

    resnet10t: 7 of 14 layers in place
    native: 13.5 MiB held, 32.0 MiB at the peak of a step
    converted: 8.8 MiB held, 27.3 MiB at the peak of a step
    seed 0: first loss 2.341; mean of the last five: native 0.133, converted 0.129
    seed 1: first loss 2.430; mean of the last five: native 0.166, converted 0.166
    seed 2: first loss 2.302; mean of the last five: native 0.102, converted 0.102

A vision transformer, by ``--model vit_tiny_patch16_224``, has layer norms and GELUs:

    vit_tiny_patch16_224: 37 of 37 layers in place
    native: 296.2 MiB held, 301.4 MiB at the peak of a step
    converted: 185.0 MiB held, 194.1 MiB at the peak of a step
"""

from __future__ import annotations

import argparse
import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import inplace_abn
from inplace_abn.memory import memory_report


def network(name: str, size: int) -> nn.Module:
    import timm

    # A transformer is made for one size of images, which it cuts into patches. Convolutional nets take any size.
    options = {"img_size": size, "patch_size": 4} if "vit" in name else {}
    model: nn.Module = timm.create_model(name, pretrained=False, num_classes=10, **options)
    return model


def digits(size: int) -> tuple[Tensor, Tensor]:
    """The 1,797 images of scikit-learn's digits, (1797, 3, size, size), with values from 0 to 1, and their labels."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images = torch.from_numpy(data.images).float()[:, None] / 16
    return F.interpolate(images, size=(size, size), mode="bilinear").expand(-1, 3, -1, -1), torch.from_numpy(
        data.target
    )


def train(model: nn.Module, images: Tensor, labels: Tensor, steps: int, batch: int, seed: int) -> list[float]:
    torch.manual_seed(seed)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(steps):
        chosen = torch.randint(len(images), (batch,))
        loss = F.cross_entropy(model(images[chosen]), labels[chosen])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def draw(curves: dict[str, list[list[float]]], path: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for color, (name, runs) in zip(("C0", "C1"), curves.items(), strict=True):
        for seed, losses in enumerate(runs):
            axes.plot(losses, color=color, alpha=0.7, label=name if seed == 0 else None)
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.legend()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", default="resnet10t", help="any of timm's")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--size", type=int, default=32, help="height and width of the images")
    parser.add_argument("--png", help="where to draw the losses")
    args = parser.parse_args()
    images, labels = digits(args.size)
    curves: dict[str, list[list[float]]] = {"native": [], "converted": []}
    for seed in range(args.seeds):
        torch.manual_seed(seed)
        native = network(args.model, args.size)
        converted = inplace_abn.convert(copy.deepcopy(native))
        if seed == 0:
            report = memory_report(native, images[: args.batch])
            print(f"{args.model}: {len(report.norms.in_place)} of {len(report.norms.layers)} layers in place")
            for name, usage in (("native", report.before), ("converted", report.after)):
                print(f"{name}: {usage.held / 2**20:.1f} MiB held, {usage.peak / 2**20:.1f} MiB at the peak of a step")
        for name, model in (("native", native), ("converted", converted)):
            curves[name].append(train(model, images, labels, args.steps, args.batch, seed))
        first, last = curves["native"][seed][0], [sum(runs[seed][-5:]) / 5 for runs in curves.values()]
        print(
            f"seed {seed}: first loss {first:.3f}; mean of the last five: native {last[0]:.3f}, converted {last[1]:.3f}"
        )
    if args.png:
        draw(curves, args.png)


if __name__ == "__main__":
    main()
