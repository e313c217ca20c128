#!/usr/bin/env python
"""MONAI's UNet with instance norm in place, trained on a synthetic volume, as it is and converted.

Its activation is PReLU unless another one is asked for, of which a step holds input and output, since its slopes are
learned: two tensors of what were three. With ``--act leakyrelu``, as in MONAI's BasicUNet and DynUNet, one is left of
two.

    python examples/monai_unet.py --act leakyrelu
"""

from __future__ import annotations

import argparse
import copy

import torch
from nnunet import patches
from torch import nn

from inplace_abn import analyze, convert
from inplace_abn.conversion.plan import readable
from inplace_abn.memory import measure

# nnU-Net imports everything in this folder when it looks for a trainer, so MONAI is imported where it is needed.


def network(activation: str) -> nn.Module:
    from monai.networks.nets import UNet

    return UNet(3, 1, 2, channels=(8, 16, 32, 64), strides=(2, 2, 2), num_res_units=2, act=activation)


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
    plan = analyze(native, x)
    converted = convert(copy.deepcopy(native), plan)
    print(f"{len(plan.convertible)} of {len(plan.layers)} norms in place")
    for name, model in (("native", native), ("in place", converted)):
        held = measure(model, x).held
        losses = train(model, args.steps, args.size)
        print(f"{name}: a step holds {readable(held)}; loss {losses[0]:.4f} at first, {losses[-1]:.4f} at last")


if __name__ == "__main__":
    main()
