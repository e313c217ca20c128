"""Chooses the channels whose xhat a layer saves as it is, because its output does not determine it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from inplace_abn import _torch
from inplace_abn.guard.figures import HYSTERESIS, Table, Threshold
from inplace_abn.kernels import ops
from inplace_abn.settings import Channels

_MOST, _MOST_AGAIN = 3 / 4, 1 / 2
"""The largest share of channels that are saved. A layer with more is torch's, until there are no more than the second
share."""
_LEAST = 4.0
"""The smallest magnitude of a weight, in units of eps, by which xhat is recovered."""


_REACH = {torch.float16: 8.0}
"""The largest |gamma| + |beta| of a channel that is saved. In float16 tags are a share of y instead of zeros."""


class Choice(NamedTuple):
    """What is decided by the figures of a layer."""

    trusted: bool
    """Whether the layer may be in place."""
    channels: Channels
    """The channels whose xhat it then saves."""


def chosen(table: Table, before: Channels, trusted: bool, threshold: Threshold, dtype: torch.dtype) -> Choice:
    """What a layer saves with inputs of this dtype, by the largest figures of a generation.

    A channel is ill if its figures are above the threshold, and well again below a quarter of it.

    Args:
        before, trusted: what was saved until now, and whether the layer was in place.
    """
    size = table.weight.numel()
    was = torch.zeros(size, dtype=torch.bool, device="cpu")
    was[list(before.numbers)] = True
    room = torch.where(was, HYSTERESIS, 1.0)
    ill = (room * table.weight > threshold.weight) | (table.least < _LEAST * room)
    if HYSTERESIS * _error(table, ill) > threshold.x:
        ill |= was
    largest = threshold.x if trusted else threshold.x / HYSTERESIS
    if _error(table, ill) > largest:
        ill[_causes(table, ill, largest / HYSTERESIS)] = True
    numbers = ill.nonzero().flatten().tolist()
    is_trusted = len(numbers) <= (_MOST if trusted else _MOST_AGAIN) * size and _is_in_reach(table.reach[ill], dtype)
    return Choice(is_trusted, Channels(numbers, size))


def _is_in_reach(reach: Tensor, dtype: torch.dtype) -> bool:
    return dtype not in _REACH or not (reach > _REACH[dtype]).any().item()


def _error(table: Table, ill: Tensor) -> float:
    """The error of dx over the layer if xhat of these channels is known."""
    error: float = table.dx[:, ~ill].sum(dim=1).max().sqrt().item()
    return error


def _causes(table: Table, ill: Tensor, largest: float) -> Tensor:
    """The fewest of the other channels that must be known, too, for the error to be small enough."""
    well = (~ill).nonzero().flatten()
    well = well[table.dx[:, well].amax(dim=0).argsort(descending=True)]
    # What remains after the first, the first two ... of them.
    remaining = table.dx[:, well].flip(1).cumsum(dim=1).flip(1)[:, 1:].amax(dim=0)
    remaining = torch.cat([remaining, remaining.new_zeros(1)])
    enough = (remaining <= largest**2).nonzero().flatten().tolist()
    return well[: enough[0] + 1] if enough else well


def lost(module: Any, saved: Channels, dtype: torch.dtype | None) -> Choice | None:
    """What to do if a weight on the CPU is nearly zero and its channel is not saved; None if none is.

    Whatever has written to the weight, its channel would be lost in this very call.
    """
    weight, bias = module.scale_and_offset()
    if type(weight) not in (nn.Parameter, Tensor) or not weight.is_cpu:
        return None
    if _torch.transforms_active() or _torch.tracing_state() is not None:
        return None
    with torch.no_grad(), _torch.unwatched():
        if not ops.run(ops.has_lost, [], weight, module.least_weight, saved.rows(weight.device)):
            return None
        near = ~(weight.abs() >= module.least_weight)
        channels = Channels(sorted({*saved.numbers, *near.nonzero().flatten().tolist()}), weight.numel())
        is_in_reach = dtype is None or bias is None or _is_in_reach(bias[near].abs(), dtype)
    return Choice(len(channels) <= _MOST * channels.size and is_in_reach, channels)
