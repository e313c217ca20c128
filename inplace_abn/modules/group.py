"""Process groups of the ranks that take part in synchronised batch norm."""

from __future__ import annotations

from typing import cast

import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from inplace_abn.guard import Guarded

_world: ProcessGroup | None = None
_groups: dict[frozenset[int], ProcessGroup] = {}


def active_group(active: bool) -> ProcessGroup:
    """The group of all ranks that call this with ``active=True``; every rank of the default group must call it.

    Groups are made once per set of ranks and forgotten with the default group they belong to. On a rank that is not
    active, modules that use the group keep local statistics.

    Args:
        active: whether this rank takes part.

    Raises:
        RuntimeError: torch.distributed is not initialised.
    """
    global _world
    if not dist.is_initialized():
        raise RuntimeError("inplace_abn: active_group needs torch.distributed.init_process_group to be called before")
    if _world is not dist.group.WORLD:
        _groups.clear()
        _world = dist.group.WORLD
    answers: list[bool] = [False] * dist.get_world_size()
    dist.all_gather_object(answers, bool(active))
    ranks = frozenset(rank for rank, answer in enumerate(answers) if answer)
    if ranks not in _groups:
        group = dist.new_group(ranks=sorted(ranks)) if ranks else dist.GroupMember.NON_GROUP_MEMBER
        _groups[ranks] = cast(ProcessGroup, group)
    return _groups[ranks]


def set_active_group(network: nn.Module, group: ProcessGroup | None) -> None:
    """Makes every synchronised norm in ``network`` synchronise with ``group`` (None: the default group)."""
    for module in network.modules():
        set_group = getattr(module, "set_group", None) if isinstance(module, Guarded) else None
        if set_group is not None:
            set_group(group)
