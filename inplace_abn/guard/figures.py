"""The figures by which the guard of recovery judges, how large they may be, and which channels are saved for that."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from inplace_abn.activations import find
from inplace_abn.guard.recovery import Errors
from inplace_abn.settings import MAGNITUDE, Channels, Settings


class Threshold(NamedTuple):
    """Errors above which trust is lost."""

    x: float
    """For the error of dx over the layer."""
    weight: float
    """For the error of the worst channel's dweight."""


THRESHOLDS = {
    torch.bfloat16: Threshold(6 * 2.0**-8, 2.0**-4),
    torch.float16: Threshold(2.0**-6, 2.0**-4),
    torch.float32: Threshold(2.0**-14, 2.0**-10),
    torch.float64: Threshold(2.0**-30, 2.0**-20),
}
"""For dx these are 6, 32, 2**10 and 2**23 unit roundoffs. Typical parameters give 0.5 to 2 unit roundoffs. Next to the
minimum of silu and hardswish errors grow as roundoff to the power of 3/4, and reach 4.5 in bfloat16, 12 in float16 and
200 in float32 (``scripts/fidelity.py``).

dweight has more room for two reasons. Its figure is that of the worst dz, and that of a real dz is smaller by the root
of the number of values that are summed. Among many channels there is also always one whose gamma is small.
"""
HYSTERESIS = 4.0
_LARGEST_WEIGHT = 2.0**40
MOST, MOST_AGAIN = 3 / 4, 1 / 2
"""The largest share of channels that are saved. A layer with more is torch's, until there are no more than the second
share."""
_LEAST = 4.0
"""The smallest magnitude of a weight, in units of eps, by which xhat is recovered."""
_REACH = {torch.float16: 8.0}
"""The largest |gamma| + |beta| of a channel that is saved. In float16 tags are a share of y instead of zeros."""
_LEAST_GROWTH = 2.25
"""How much an error may grow at least before it is measured again."""
_MOST_NEAR = 8.0
"""By how much a weight may shrink at most next to a minimum."""


class Table(NamedTuple):
    """The figures of each channel, on the host; float64."""

    weight: Tensor
    """`recovery.Errors.weight`, or 0 where there is no weight; of shape (channel,), as those below."""
    dx: Tensor
    """`recovery.Errors.dx`; of shape (combination, channel)."""
    least: Tensor
    """The magnitude of a signed weight, in units of eps; infinite if there is none."""
    silent: Tensor
    """`recovery.Errors.silent`, as 0 or 1."""
    size: Tensor
    """The magnitude of gamma; 1 if there is no weight."""
    bias: Tensor
    """0 if there is none."""

    @property
    def unknown(self) -> bool:
        """Whether the batch had infinities or NaN."""
        # Not bool(), which is seen as a wait for a device.
        return any(t.isnan().any().tolist() for t in self)

    @property
    def is_useful(self) -> bool:
        """Whether the batch says something of some channel, besides what its weight says."""
        return not self.unknown and any(each == 0 for each in self.silent.tolist())


def packed(errors: Errors, weight: Tensor | None, bias: Tensor | None, settings: Settings) -> Tensor:
    """The figures of each channel in one tensor; float64 of shape (row, channel).

    The rows are ``weight`` and all of ``dx`` of `Errors`, and ``least``, ``silent``, ``size`` and ``bias`` of `Table`.
    Errors of dweight are 0 where there is no weight.
    """
    of_weight, least = errors.weight, torch.full_like(errors.weight, math.inf)
    gamma = torch.ones_like(of_weight)
    if weight is None:
        of_weight = torch.zeros_like(of_weight)
    else:
        # Sums of y * dy, of which dweight is made, would overflow.
        size = weight.detach().abs()
        of_weight = of_weight.masked_fill(size > _LARGEST_WEIGHT, math.inf)
        if settings.scale != MAGNITUDE:
            # The division is in the weight's dtype, in which the kernels and the guard compare.
            least = (size / settings.eps).double()
        gamma = size.double() + settings.eps * (settings.scale == MAGNITUDE)
    beta = torch.zeros_like(gamma) if bias is None else bias.detach().double()
    return torch.stack([of_weight, *errors.dx, least, errors.silent.double(), gamma, beta])


def unpacked(packed: Tensor) -> Table:
    """The figures on the host. Waits for the device."""
    weight, *dx, least, silent, size, bias = packed.cpu()
    return Table(weight, torch.stack(dx), least, silent, size, bias)


def worst(found: Sequence[Table]) -> Table | None:
    """The worst figures of each channel in several calls; None without a call."""
    if len(found) < 2:
        return next(iter(found), None)
    weight, dx, least, silent = (torch.stack(each) for each in list(zip(*found, strict=True))[:4])
    return found[-1]._replace(weight=weight.amax(0), dx=dx.amax(0), least=least.amin(0), silent=silent.amin(0))


def fetched(packed: Tensor) -> tuple[Tensor, torch.Event | None]:
    """A copy on the host, and the event at which it is complete. The event is None if the figures are on the host."""
    if packed.is_cpu:
        return packed, None
    host = torch.empty(packed.shape, dtype=packed.dtype, device="cpu", pin_memory=packed.is_cuda)
    host.copy_(packed, non_blocking=True)
    event = torch.Event(packed.device)
    # The copy is on the stream of its own device, which need not be the current one.
    event.record(torch.accelerator.current_stream(packed.device))
    return host, event


def described(table: Table, ill: int, threshold: Threshold) -> str:
    """The figures and their thresholds, for messages."""
    worst, channel = (t.item() for t in table.weight.max(dim=0))
    text = f"error of dx {table.dx.sum(dim=1).max().sqrt().item():.2g}, of dweight {worst:.2g} in channel {channel}, "
    text += f"trusted up to {threshold.x:.2g} and {threshold.weight:.2g}"
    return f"{text}; {ill} of {table.weight.numel()} channels are ill"


class Choice(NamedTuple):
    """What is decided by the figures of a layer."""

    trusted: bool
    """Whether the layer may be in place."""
    channels: Channels
    """The channels whose xhat it then saves."""


def chosen(table: Table, before: Channels, trusted: bool, threshold: Threshold, dtype: torch.dtype) -> Choice:
    """What a layer saves with inputs of this dtype, by the largest figures of a generation.

    A channel is ill if its figures are above the threshold, and well again below a quarter of it. A silent one stays
    what it is, and may have the error of a rounding of y.

    Args:
        before, trusted: what was saved until now, and whether the layer was in place.
    """
    size = table.weight.numel()
    was = torch.zeros(size, dtype=torch.bool, device="cpu")
    was[list(before.numbers)] = True
    room = torch.where(was, HYSTERESIS, 1.0)
    ill = (room * table.weight > threshold.weight) | (table.least < _LEAST * room)
    ill |= (table.silent > 0) & (was | (_rounding(table, dtype) > threshold.weight) | (not trusted))
    if HYSTERESIS * _error(table, ill) > threshold.x:
        ill |= was
    largest = threshold.x if trusted else threshold.x / HYSTERESIS
    if _error(table, ill) > largest:
        ill[_causes(table, ill, largest / HYSTERESIS)] = True
    numbers = ill.nonzero().flatten().tolist()
    is_in_reach = dtype not in _REACH or not (_reach(table)[ill] > _REACH[dtype]).any().item()
    is_trusted = len(numbers) <= (MOST if trusted else MOST_AGAIN) * size and is_in_reach
    return Choice(is_trusted, Channels(numbers, size))


def bounds(table: Table, threshold: Threshold, dtype: torch.dtype, activation: str) -> Tensor:
    """The weights and biases for which a measurement holds; float64 of shape (4, channel), on the host: the least and
    the largest magnitude of gamma, and the least and the largest bias.

    Beyond them an error could be `HYSTERESIS` times as large as is trusted. One that is not there now is taken for a
    rounding of y. xhat has the error of y, divided by the weight; that of y grows with the bias, with one over the
    distance from a minimum, and exponentially in a tail.
    """
    size, bias, reach = table.size, table.bias, _reach(table)
    error = table.weight.maximum(_rounding(table, dtype))
    growth = HYSTERESIS * threshold.weight / error
    # Each of the channels may add the same to the squared error of dx.
    room = (HYSTERESIS**2 - 1) * threshold.x**2 / size.numel()
    growth = growth.minimum(((table.dx + room) / table.dx).amin(0).sqrt()).clamp_min(_LEAST_GROWTH)
    # What is left is for the weight and the bias together.
    factor = growth.sqrt()
    largest = (factor * size).maximum(HYSTERESIS * reach)
    # In float16 small y have fewer digits, so that nothing is a line.
    if find(activation).straight and dtype != torch.float16:
        return torch.stack([size / factor, torch.full_like(size, math.inf), -largest, largest])
    special = torch.tensor(find(activation).special or (math.inf,), dtype=bias.dtype, device=bias.device)
    distance = (bias.unsqueeze(-1) - special).abs().amin(-1)
    # Next to a minimum the error of y grows as the weight shrinks, too.
    factor = torch.where(distance > 3 * size, factor, factor.clamp_max(_MOST_NEAR))
    shift = (2 * size).maximum(distance / 2).minimum(growth.log() / 2)
    lowest, highest = (bias - shift).maximum(-largest), (bias + shift).minimum(largest)
    return torch.stack([size / factor, size + growth.log() / 10, lowest, highest])


def _rounding(table: Table, dtype: torch.dtype) -> Tensor:
    """The error of xhat if y is rounded to this dtype where |xhat| is 1."""
    return torch.finfo(dtype).eps / 2 * _reach(table) / table.size


def _reach(table: Table) -> Tensor:
    """The largest magnitude of y where |xhat| is 1."""
    return table.size + table.bias.abs()


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
