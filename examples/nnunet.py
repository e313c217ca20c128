#!/usr/bin/env python
"""Defines a trainer for nnU-Net whose network is converted, and trains that network native and converted.

    pip install nnunetv2
    nnUNet_extTrainer=examples nnUNetv2_train DATASET 3d_fullres 0 -tr nnUNetTrainerInPlace

The trainer takes the data and plans of nnUNetTrainer and loads its checkpoints. nnU-Net converts before it compiles,
where it does, and before DistributedDataParallel wraps. To find the trainer, nnU-Net imports all files of the folder
that ``nnUNet_extTrainer`` names. A folder with a copy of this file will do.

    pip install dynamic-network-architectures
    python examples/nnunet.py

trains nnU-Net's 3-D network on synthetic volumes, without nnunetv2. It prints:

    14 of 14 norms in place
    native: 26.4 MiB held, 34.4 MiB at the peak of a step
      loss 1.2085 at first, 0.2110 at last
    converted: 15.8 MiB held, 25.9 MiB at the peak of a step
      loss 1.2085 at first, 0.2110 at last
"""

from __future__ import annotations

import argparse
import copy
import importlib.util

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import inplace_abn
from inplace_abn.memory import memory_report

if importlib.util.find_spec("nnunetv2") is not None:
    from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer
    from nnunetv2.utilities.plans_handling.plans_handler import ConfigurationManager, PlansManager

    class nnUNetTrainerInPlace(nnUNetTrainer):
        @staticmethod
        def build_network_architecture(
            plans_manager: PlansManager,
            configuration_manager: ConfigurationManager,
            num_input_channels: int,
            num_output_channels: int,
            enable_deep_supervision: bool = True,
        ) -> nn.Module:
            network = nnUNetTrainer.build_network_architecture(
                plans_manager, configuration_manager, num_input_channels, num_output_channels, enable_deep_supervision
            )
            return inplace_abn.convert(network)


def network(width: int) -> nn.Module:
    """The network that nnU-Net plans for 3-D patches, except for its width and depth."""
    from dynamic_network_architectures.architectures.unet import PlainConvUNet

    model: nn.Module = PlainConvUNet(
        input_channels=1,
        n_stages=4,
        features_per_stage=[width, 2 * width, 4 * width, 8 * width],
        conv_op=nn.Conv3d,
        kernel_sizes=3,
        strides=[1, 2, 2, 2],
        n_conv_per_stage=2,
        num_classes=2,
        n_conv_per_stage_decoder=2,
        conv_bias=True,
        norm_op=nn.InstanceNorm3d,
        norm_op_kwargs={"eps": 1e-5, "affine": True},
        nonlin=nn.LeakyReLU,
        nonlin_kwargs={"inplace": True},
        deep_supervision=True,
    )
    return model.apply(PlainConvUNet.initialize)


def patches(batch: int, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Volumes of a ball in noise, (batch, 1, size, size, size), and labels (batch, size, size, size), 1 in the ball."""
    places = torch.stack(torch.meshgrid(*[torch.linspace(-1, 1, size)] * 3, indexing="ij"))
    centres = torch.rand(batch, 3, 1, 1, 1, generator=generator) - 0.5
    inside = (places - centres).square().sum(dim=1) < 0.16
    noise = torch.randn(batch, size, size, size, generator=generator)
    return (noise + 1.5 * inside)[:, None], inside.long()


def loss_of(outputs: list[Tensor], labels: Tensor) -> Tensor:
    """The sum of the cross-entropies of the outputs of all depths. Each weighs half as much as the one before it."""
    losses = []
    for depth, output in enumerate(outputs):
        scaled = F.interpolate(labels[:, None].float(), output.shape[2:])[:, 0].long()
        losses.append(F.cross_entropy(output, scaled) / 2**depth)
    return torch.stack(losses).sum()


def train(model: nn.Module, steps: int, size: int) -> list[float]:
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.99, nesterov=True, weight_decay=3e-5)
    losses = []
    for _ in range(steps):
        x, labels = patches(2, size, generator)
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(model(x), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 12)
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--size", type=int, default=32, help="of a patch, a multiple of 8")
    parser.add_argument("--width", type=int, default=8, help="channels of the first stage")
    args = parser.parse_args()
    torch.manual_seed(0)
    native = network(args.width)
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
