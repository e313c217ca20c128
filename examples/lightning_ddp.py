#!/usr/bin/env python
"""Trains with Lightning and DistributedDataParallel on two CPU processes, with statistics of the whole batch.

    pip install lightning
    python examples/lightning_ddp.py

Convert the net with ``sync=True`` before the trainer gets it, and leave out ``Trainer(sync_batchnorm=True)``. With that
option Lightning calls `torch.nn.SyncBatchNorm.convert_sync_batchnorm`, which replaces all BatchNorms by torch's
SyncBatchNorm, the converted ones included. SyncBatchNorm saves no memory, and it needs a GPU. The last line of the
output shows this replacement.

The example compares the training of the two processes with that of one process that gets the whole batch, in float64.
It prints:

    20 steps on 2 processes
    largest relative difference: weights 6.3e-15, running statistics 6.2e-15
    norms: InPlaceBatchNorm2d; with sync_batchnorm=True they would be SyncBatchNorm
"""

from __future__ import annotations

import argparse
import copy
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import inplace_abn

if TYPE_CHECKING:
    from lightning import LightningModule


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.SiLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 4),
    )


def classifier(net: nn.Module, data: TensorDataset, batch: int) -> LightningModule:
    from lightning import LightningModule

    class Classifier(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
            images, labels = batch
            return F.cross_entropy(self.net(images), labels)

        def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
            # Lightning's own sampler always shuffles. The reference run does not shuffle.
            return DataLoader(data, batch, sampler=DistributedSampler(data, shuffle=False))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

    return Classifier()


def images(count: int) -> TensorDataset:
    """Images of four brightnesses in turn. The statistics of one process differ from those of the whole batch."""
    labels = torch.arange(count) % 4
    noise = torch.randn(count, 3, 16, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return TensorDataset(noise + labels.view(-1, 1, 1, 1), labels)


def main() -> None:
    from lightning import Trainer

    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=8, help="images of each process")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    native = network().double()
    net = inplace_abn.convert(copy.deepcopy(native), sync=True)
    data = images(2 * args.batch * args.steps)
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        use_distributed_sampler=False,
        precision="64-true",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(classifier(net, data, args.batch))
    if not trainer.is_global_zero:
        return
    optimizer = torch.optim.SGD(native.parameters(), lr=0.05, momentum=0.9)
    for batch, labels in DataLoader(data, batch_size=2 * args.batch):
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(native(batch), labels).backward()
        optimizer.step()
    print(f"{trainer.global_step} steps on {trainer.world_size} processes")
    ours, theirs = net.state_dict(), native.state_dict()
    errors = {k: ((ours[k] - t).norm() / t.norm()).item() for k, t in theirs.items() if t.is_floating_point()}
    of_buffers = max(error for key, error in errors.items() if "running" in key)
    of_weights = max(error for key, error in errors.items() if "running" not in key)
    print(f"largest relative difference: weights {of_weights:.1e}, running statistics {of_buffers:.1e}")
    torchs = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(net))
    print(f"norms: {type(net[1]).__name__}; with sync_batchnorm=True they would be {type(torchs[1]).__name__}")


if __name__ == "__main__":
    main()
