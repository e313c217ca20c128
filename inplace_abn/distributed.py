"""The collectives of synchronised batch norm. They are functional ones, which torch.compile can trace."""

from __future__ import annotations

import sys
import warnings
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from inplace_abn import _torch


def _level_of_caller() -> int:
    """The number of frames up to the first function that belongs neither to this package nor to torch."""
    level, frame = 0, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in ("inplace_abn", "torch"):
        level, frame = level + 1, frame.f_back
    return level


@cache
def warn_not_initialised() -> None:
    warnings.warn(
        "inplace_abn_sync: torch.distributed is not initialised, so statistics are those of this process alone",
        stacklevel=_level_of_caller(),
    )


def participating_group(group: ProcessGroup | None) -> ProcessGroup | None:
    """The group to synchronise with (``group``, or the default one), or None where statistics are local."""
    if not dist.is_available() or not dist.is_initialized():
        if not torch.compiler.is_compiling():
            warn_not_initialised()
        return None
    group = dist.group.WORLD if group is None else group
    return group if dist.get_rank(group) >= 0 and dist.get_world_size(group) > 1 else None


@_torch.read_while_tracing
def _place_in_gloo(device: str, name: str) -> tuple[int, int] | None:
    """This process's rank in a group of gloo that gathers from GPUs, and the number of ranks; None for other groups.

    torch's functional gathering has gloo read memory of the GPU, which ends the process. Its sum copies to the host.
    """
    if device != "cuda":
        return None
    group = _torch.process_group(name)
    return (dist.get_rank(group), dist.get_world_size(group)) if dist.get_backend(group) == "gloo" else None


def all_gather(t: Tensor, group: Any) -> Tensor:
    """(ranks, n) from every rank's ``t`` of shape (n,). ``group`` is a process group or its name."""
    from torch.distributed import _functional_collectives as functional

    place = _place_in_gloo(t.device.type, group if isinstance(group, str) else group.group_name)
    if place is not None:
        rank, ranks = place
        return all_reduce(torch.nn.functional.pad(t.unsqueeze(0), (0, 0, rank, ranks - rank - 1)), group)
    # torch 2.13 renamed the function, and warns about the old name.
    gather = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor
    gathered: Tensor = functional.wait_tensor(gather(t.unsqueeze(0), 0, group))
    return gathered


def all_reduce(t: Tensor, group: Any) -> Tensor:
    """The sum of every rank's ``t``. ``group`` is a process group or its name."""
    from torch.distributed import _functional_collectives as functional

    reduced: Tensor = functional.wait_tensor(functional.all_reduce(t, "sum", group))
    return reduced


def means(sum_dy: Tensor, sum_xhat_dy: Tensor, count: int, group: ProcessGroup) -> tuple[Tensor, ...]:
    """The sums over all ranks, divided by the number of values per channel, of which this rank has ``count``."""
    sums = all_reduce(torch.cat([sum_dy, sum_xhat_dy, sum_dy.new_full((1,), count)]), group)
    return (sums[:-1] / sums[-1]).view(2, -1).unbind()


class AllReduce(torch.autograd.Function):
    """`all_reduce` that autograd can differentiate, to any order."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return all_reduce(t, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return AllReduce.apply(gradient, ctx.group), None
