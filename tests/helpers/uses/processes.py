"""Several processes."""

import copy

import torch
from torch import nn

from uses.base import STEPS, USES, images, made, mixed, rows, sgd, use


def train_on_ranks(wrap, kind=mixed, data=images):
    from torch.distributed.tensor import DTensor

    def whole(tensors):
        return [t.full_tensor() if isinstance(t, DTensor) else t.detach().clone() for t in tensors]

    model, found = wrap(kind()), []
    optimizer = sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(data(step)).square().mean().backward()
        found += whole(p.grad for p in model.parameters() if p.grad is not None)
        optimizer.step()
        found += whole(p.detach() for p in model.parameters()) + whole(model.buffers())
    return found


def of_this_rank(step):
    return images(10 * step + torch.distributed.get_rank())


def fsdp1(convert, use_orig_params):
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    norms = {nn.BatchNorm2d, nn.LayerNorm, nn.GroupNorm, nn.Linear}
    found, options = [], {"use_orig_params": use_orig_params, "device_id": torch.device("cpu")}
    for kinds in (set(), {nn.Sequential}, norms):

        def wrap(model, kinds=kinds):
            return FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy(kinds), **options)

        found += train_on_ranks(lambda model, wrap=wrap: wrap(convert(model)), data=of_this_rank)
        found += train_on_ranks(lambda model, wrap=wrap: convert(wrap(model)), data=of_this_rank)
    return found


def fsdp2(convert):
    from torch.distributed.fsdp import fully_shard

    def wrap(model):
        for child in convert(model).children():
            fully_shard(child)
        return fully_shard(model)

    return train_on_ranks(wrap, data=of_this_rank)


def tensor_parallel(convert):
    from torch.distributed.tensor import Replicate, Shard, init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

    plan = {
        "0": SequenceParallel(),
        "1": ColwiseParallel(input_layouts=Shard(1)),
        "3": RowwiseParallel(output_layouts=Shard(1)),
        "4": SequenceParallel(),
        "5": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    layers = nn.LayerNorm(6), nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6), nn.RMSNorm(6), nn.Linear(6, 4)
    mesh = init_device_mesh("cpu", (2,))
    return train_on_ranks(
        lambda model: parallelize_module(convert(model), mesh, plan),
        lambda: made(nn.Sequential, *copy.deepcopy(layers)),
        lambda step: rows(step, 3, 4, 6),
    )


use("FSDP1 with `use_orig_params=False`")(lambda convert: fsdp1(convert, False))
use("FSDP1 with `use_orig_params=True`")(lambda convert: fsdp1(convert, True))
use("FSDP2 (`fully_shard`)")(fsdp2)
use("tensor and sequence parallel (`parallelize_module`)")(tensor_parallel)
ON_RANKS = [name for name in USES if "FSDP" in name or "parallelize" in name]
