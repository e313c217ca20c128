#!/usr/bin/env python
"""Trains on two processes with synchronised statistics, as one process would train with the whole batch.

    torchrun --nproc-per-node 2 examples/torchrun_sync.py
    python examples/torchrun_sync.py     # starts the processes itself

The example needs no other package. There are two ways to synchronise: build a net of `InPlaceABNSync`, or convert a net
with BatchNorms with ``sync=True``. Do either before DistributedDataParallel wraps the net. Do not call
``torch.nn.SyncBatchNorm.convert_sync_batchnorm``, which replaces converted norms by torch's own norms. Ranks may have
batches of different sizes, as in this example. Divide each loss by the size of the whole batch.

The example computes in float64 and prints the losses of the first and last step beside those of one process:

    InPlaceABNSync: losses 1.340137, 0.926270; of one process 1.340137, 0.926270
      largest relative difference: losses 2.3e-16, running statistics 1.7e-15
    convert(sync=True): losses 1.340137, 0.926270; of one process 1.340137, 0.926270
      largest relative difference: losses 2.3e-16, running statistics 2.7e-15
    not synchronised: losses 1.330567, 0.495440; of one process 1.340137, 0.926270
      largest relative difference: losses 4.7e-01, running statistics 5.8e-01
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import inplace_abn


def network(norm: Callable[[int], nn.Module]) -> nn.Module:
    layers = [nn.Conv2d(3, 16, 3, padding=1, bias=False), norm(16)]
    layers += [nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False), norm(32)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 4)).double()


def built(synchronised: bool) -> nn.Module:
    norm = inplace_abn.InPlaceABNSync if synchronised else inplace_abn.InPlaceABN
    return network(lambda channels: norm(channels, activation="silu"))


def standard(synchronised: bool = False) -> nn.Module:
    return network(lambda channels: nn.Sequential(nn.BatchNorm2d(channels), nn.SiLU()))


def converted(synchronised: bool) -> nn.Module:
    return inplace_abn.convert(standard(), sync=synchronised)


def batch(step: int, size: int) -> tuple[Tensor, Tensor]:
    """The whole batch, with images from dark to bright. The statistics of a share differ from those of the batch."""
    generator = torch.Generator().manual_seed(step)
    images = torch.randn(size, 3, 16, 16, generator=generator, dtype=torch.float64)
    labels = torch.arange(size) % 4
    return images + (labels + torch.linspace(-2, 2, size)).view(-1, 1, 1, 1), labels


def train(model: nn.Module, steps: int, size: int, shares: list[int] | None = None) -> list[float]:
    """Trains and returns the losses of the whole batch.

    With ``shares``, the batch sizes of all ranks, this rank trains with its own share of each batch.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for step in range(steps):
        images, labels = batch(step, size)
        if shares is not None:
            images, labels = images.split(shares)[dist.get_rank()], labels.split(shares)[dist.get_rank()]
        loss = F.cross_entropy(model(images), labels, reduction="sum") / size
        optimizer.zero_grad(set_to_none=True)
        # DistributedDataParallel divides the sum of the gradients by the number of ranks. The loss needs the sum.
        (loss if shares is None else loss * len(shares)).backward()
        optimizer.step()
        total = loss.detach()
        if shares is not None:
            dist.all_reduce(total)
        losses.append(total.item())
    return losses


def work(args: argparse.Namespace) -> None:
    """The work of each rank."""
    torch.set_num_threads(1)
    shares = [args.batch // (dist.get_world_size() + 1)] * dist.get_world_size()
    shares[0] += args.batch - sum(shares)
    nets = {"InPlaceABNSync": built, "convert(sync=True)": converted, "not synchronised": standard}
    trained = {}
    for name, make in nets.items():
        torch.manual_seed(0)
        model, alone = make(True), make(False)
        alone.load_state_dict(model.state_dict())
        trained[name] = model, alone, train(DistributedDataParallel(model), args.steps, args.batch, shares)
    # A rank that leaves early would break the connections of the other ranks.
    dist.barrier()
    is_first = dist.get_rank() == 0
    dist.destroy_process_group()
    # All ranks do this, although one of them prints it. The threads of gloo free the last tensors a little later than
    # the collectives return, and a process that ends meanwhile is aborted.
    for name, (model, alone, losses) in trained.items():
        expected = train(alone, args.steps, args.batch)
        statistics = zip(model.named_buffers(), alone.buffers(), strict=True)
        errors = [((a - b).norm() / b.norm()).item() for (key, a), b in statistics if "running" in key]
        error = max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))
        if is_first:
            ends = f"{losses[0]:.6f}, {losses[-1]:.6f}; of one process {expected[0]:.6f}, {expected[-1]:.6f}"
            print(f"{name}: losses {ends}")
            print(f"  largest relative difference: losses {error:.1e}, running statistics {max(errors):.1e}")


def start(rank: int, args: argparse.Namespace, store: str) -> None:
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=args.processes)
    work(args)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=12, help="images of all processes together")
    parser.add_argument("--processes", type=int, default=2, help="how many to start without torchrun")
    args = parser.parse_args()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        work(args)
    else:
        with tempfile.TemporaryDirectory() as folder:
            multiprocessing.spawn(start, (args, f"file://{folder}/store"), nprocs=args.processes)


if __name__ == "__main__":
    main()
