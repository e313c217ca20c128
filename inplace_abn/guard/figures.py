"""The figures by which the guard of recovery judges, and how large they may be."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from inplace_abn.guard.recovery import Errors
from inplace_abn.settings import Settings


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

FIGURES_PER_RANK = 4
"""The number of figures of a rank."""


class Figures(NamedTuple):
    """The figures of a measurement, as numbers."""

    x: float
    """`recovery.Errors.x`."""
    weight: float
    """The largest of `recovery.Errors.weight`, or 0 where there is no weight."""
    channel: int
    least: float
    """The smallest magnitude of a signed weight, in units of eps; infinite if there is none.

    Below 1 the scale would be eps.
    """

    @property
    def unknown(self) -> bool:
        """Whether the batch had infinities or NaN."""
        return math.isnan(self.x) or math.isnan(self.weight) or math.isnan(self.least)

    def trusted(self, before: bool, threshold: Threshold) -> bool:
        """Whether the layer is trusted now.

        ``before`` says whether it was trusted until now. Unknown figures change nothing.
        """
        if self.unknown:
            return before
        room = 1.0 if before else HYSTERESIS
        return room * self.x <= threshold.x and room * self.weight <= threshold.weight and self.least >= room


def packed(errors: Errors, weight: Tensor | None, settings: Settings) -> Tensor:
    """`Figures` in one tensor."""
    if weight is None:
        zero = torch.zeros_like(errors.x)
        return torch.stack([errors.x, zero, zero, zero + math.inf])
    # Sums of y * dy, of which dweight is made, would overflow.
    worst, channel = torch.where(weight.detach().abs() > _LARGEST_WEIGHT, math.inf, errors.weight).max(dim=0)
    least = torch.full_like(worst, math.inf)
    if settings.signed_weight:
        # The division is in the weight's dtype, in which the kernels and the guard compare.
        least = (weight.detach().abs().min() / settings.eps).double()
    return torch.stack([errors.x, worst, channel.double(), least])


def no_figures(device: torch.device) -> Tensor:
    """The packed figures of a rank that has not measured. They are never the worst, and their channel is -1."""
    # A tensor of numbers of the host would be copied to the device, for which the host waits.
    zero = torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack([zero, zero, zero - 1, zero + math.inf])


def are_known(gathered: Tensor) -> bool:
    """Whether any rank has measured, by all ranks' figures of shape (ranks, 4). Waits for the device."""
    return bool((gathered[:, 2] >= 0).any())


def worst(gathered: Tensor) -> Tensor:
    """The worst figures of all ranks, packed. ``gathered`` has shape (ranks, 4)."""
    x, weight, channel, least = gathered.double().unbind(dim=1)
    largest, rank = weight.max(dim=0)
    # An index would be read by the host.
    channel = channel.gather(0, rank.unsqueeze(0)).squeeze(0)
    return torch.stack([x.max(), largest, channel.clamp_min(0), least.min()])


def unpacked(packed: Tensor) -> Figures:
    """The figures as numbers. Waits for the device."""
    x, weight, channel, least = packed.tolist()
    return Figures(x, weight, int(channel), least)


def fetched(packed: Tensor) -> tuple[Tensor, torch.Event | None]:
    """A copy on the host, and the event at which it is complete. The event is None if the figures are on the host."""
    if packed.is_cpu:
        return packed, None
    host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=packed.is_cuda)
    host.copy_(packed, non_blocking=True)
    event = torch.Event(packed.device)
    # The copy is on the stream of its own device, which need not be the current one.
    event.record(torch.accelerator.current_stream(packed.device))
    return host, event


def described(figures: Figures, threshold: Threshold) -> str:
    """The figures and their thresholds, for messages."""
    text = f"error of dx {figures.x:.2g}, of dweight {figures.weight:.2g} in channel {figures.channel}, "
    text += f"trusted up to {threshold.x:.2g} and {threshold.weight:.2g}"
    return text + (f"; a weight is {figures.least:.2g} eps" if figures.least < HYSTERESIS else "")
