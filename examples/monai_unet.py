#!/usr/bin/env python
"""Trains MONAI's UNet, whose norms are instance norms, on synthetic volumes, native and converted.

    pip install monai
    python examples/monai_unet.py --act leakyrelu

MONAI's UNet has PReLU by default. PReLU has no inverse where its slope becomes zero, so its input is kept. With
``--act leakyrelu``, the activation of MONAI's BasicUNet and DynUNet, only the result is kept.

It prints:

    13 of 13 norms in place
    native: 5.9 MiB held, 14.4 MiB at the peak of a step
      loss 1.4400 at first, 0.9072 at last
    converted: 2.8 MiB held, 11.4 MiB at the peak of a step
      loss 1.4400 at first, 0.9072 at last
"""

from __future__ import annotations

import argparse
import copy

import torch
from torch import Tensor, nn

import inplace_abn
from inplace_abn.memory import memory_report


def network(activation: str) -> nn.Module:
    from monai.networks.nets import UNet

    model: nn.Module = UNet(3, 1, 2, channels=(8, 16, 32, 64), strides=(2, 2, 2), num_res_units=2, act=activation)
    return model


def patches(batch: int, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Volumes of a ball in noise, (batch, 1, size, size, size), and labels (batch, size, size, size), 1 in the ball."""
    places = torch.stack(torch.meshgrid(*[torch.linspace(-1, 1, size)] * 3, indexing="ij"))
    centres = torch.rand(batch, 3, 1, 1, 1, generator=generator) - 0.5
    inside = (places - centres).square().sum(dim=1) < 0.16
    noise = torch.randn(batch, size, size, size, generator=generator)
    return (noise + 1.5 * inside)[:, None], inside.long()


def train(model: nn.Module, steps: int, size: int) -> list[float]:
    from monai.losses import DiceCELoss

    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loss_of = DiceCELoss(to_onehot_y=True, softmax=True)
    losses = []
    for _ in range(steps):
        x, labels = patches(2, size, generator)
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(model(x), labels[:, None])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--act", default="prelu", choices=["prelu", "relu", "leakyrelu", "elu", "swish"])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--size", type=int, default=32, help="of a patch, a multiple of 8")
    args = parser.parse_args()
    torch.manual_seed(0)
    native = network(args.act)
    x, _ = patches(2, args.size, torch.Generator().manual_seed(0))
    report = memory_report(native, x)
    converted = inplace_abn.convert(copy.deepcopy(native))
    print(f"{len(report.norms.in_place)} of {len(report.norms.layers)} norms in place")
    results = (("native", native, report.before), ("converted", converted, report.after))
    for name, model, usage in results:
        print(f"{name}: {usage.held / 2**20:.1f} MiB held, {usage.peak / 2**20:.1f} MiB at the peak of a step")
        losses = train(model, args.steps, args.size)
        print(f"  loss {losses[0]:.4f} at first, {losses[-1]:.4f} at last")


if __name__ == "__main__":
    main()
