"""What a layer does in which generation (`inplace_abn.guard`).

Everything is known by the dtype of what is kept, by what follows, and by whether the layer trains, because recovery
depends on these: in evaluation dx has other errors, and running statistics may be far from those of a batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from inplace_abn.guard.figures import Table, fetched, unpacked
from inplace_abn.guard.writes import Writes
from inplace_abn.settings import Channels

CALLS = 8
"""The largest number of calls that are measured in a generation. Without optimizer steps a generation never ends."""
_REMEMBERED = 8
"""The number of decisions that are remembered for recomputations."""


Follows = tuple[Any, ...]
"""What follows a converted norm: an activation, its parameter, and whether a sum comes before. Empty for a layer that
knows what follows."""


class Decision(NamedTuple):
    """What a layer does in all calls of a generation, and in their recomputations."""

    since: int = -1
    """The first generation in which it was valid."""
    trusted: bool = True
    """Whether the layer is in place."""
    measures: bool = False
    """Whether calls are measured. The first measurement of a layer changes the decision."""
    verbatim: Channels = Channels()
    """The channels whose xhat is saved for backward, because z does not determine it."""
    bounds: Tensor | None = None
    """`figures.bounds`; None before a measurement."""


@dataclass(slots=True, eq=False)
class Mode:
    """What a layer does where one thing follows, and is kept in one dtype, in training or in evaluation."""

    dtype: torch.dtype
    follows: Follows
    training: bool
    decisions: list[Decision]
    generation: int = -1
    """The latest generation that was decided about."""
    decided_at: int = -1
    """The generation whose calls are not measured, or not any more."""
    measured_at: int = -1
    gap: int = 1
    """The generations to the next measurement, if the guard's interval is not shorter. It doubles, because weights
    change most at the beginning."""
    calls: int = 0
    """The calls that were measured in the generation ``measured_at``."""
    why: str = ""
    """Why the layer is not in place, in words."""
    figures: list[tuple[Tensor, torch.Event | None]] = field(default_factory=list)
    """What was measured and not judged yet, with the event at which it is on the host."""

    def at(self, generation: int) -> Decision:
        """The decision that was valid in a generation."""
        return next((d for d in reversed(self.decisions) if d.since <= generation), self.decisions[0])

    def change(self, **changes: Any) -> None:
        """Changes the decision, from this generation on."""
        last = self.decisions[-1]
        decision = last._replace(**changes)
        self.decided_at = -1
        if decision.bounds is last.bounds and decision[:-1] == last[:-1]:
            return
        if last.since == self.generation:
            self.decisions.pop()
        self.decisions = [*self.decisions[1 - _REMEMBERED :], decision._replace(since=self.generation)]

    def continues(self, generation: int) -> bool:
        """Whether the last decision holds in a new generation in which nothing is measured or judged.

        If so, the generation has begun.
        """
        last = self.decisions[-1]
        if last.measures or self.figures or self.measured_at < 0:
            return False
        self.generation = self.decided_at = generation
        return True

    def enter(self, generation: int, measures: bool) -> None:
        """Decides about a generation."""
        self.generation = generation
        self.change(measures=measures)

    def record(self, figures: Tensor, waited: bool) -> None:
        """Keeps the figures of a call, and drops those of earlier generations."""
        if self.measured_at != self.generation:
            if self.measured_at >= 0:
                self.gap = min(2 * self.gap, 1 << 30)
            self.measured_at, self.calls, self.figures = self.generation, 0, []
        self.calls += 1
        self.figures.append((figures, None) if waited else fetched(figures))

    def collected(self) -> list[Table]:
        """The figures that were kept and not taken yet. Waits for the device."""
        self._wait()
        found, self.figures = self.figures, []
        return [unpacked(figures) for figures, _ in found]

    def renew(self, weight: Tensor | None) -> None:
        """Forgets what was measured, in the middle of a generation. A weight of another length has other channels."""
        self.measured_at, self.figures = -1, []
        saved = self.decisions[-1].verbatim
        if weight is not None and weight.numel() != saved.size:
            saved = Channels()
        self.change(trusted=True, measures=True, verbatim=saved, bounds=None)

    def _wait(self) -> None:
        for _, event in self.figures:
            if event is not None:
                event.synchronize()

    def __getstate__(self) -> tuple[None, dict[str, Any]]:
        """Another process counts generations of its own. Events cannot be copied."""
        self._wait()
        figures = [(figures, None) for figures, _ in self.figures]
        last = self.decisions[-1]._replace(since=-1)
        changed: dict[str, Any] = {"generation": -1, "decided_at": -1, "decisions": [last], "figures": figures}
        return None, {name: getattr(self, name) for name in self.__slots__} | changed


@dataclass(slots=True, eq=False)
class State:
    """What the guard knows of a layer."""

    modes: dict[tuple[torch.dtype, Follows, bool], Mode] = field(default_factory=dict)
    writes: Writes = field(default_factory=Writes)
    given_up: tuple[int, str] | None = None
    """The generation in which a converted norm was given up, and why: its output is read or written to."""
    noticed: bool = False
    """Whether that is why."""

    def mode(self, dtype: torch.dtype, follows: Follows, training: bool) -> Mode:
        return self.modes.setdefault((dtype, follows, training), Mode(dtype, follows, training, [Decision()]))
