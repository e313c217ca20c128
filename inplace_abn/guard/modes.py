"""What the guard (`inplace_abn.guard`) knows of a layer: what it does in which generation, and who wrote to its weight.

Everything is known by the dtype of what is kept, and by what follows, because recovery depends on these.
"""

from __future__ import annotations

import weakref
from collections.abc import Container
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from inplace_abn.guard.figures import Table, fetched, unpacked
from inplace_abn.settings import Channels, parameters

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


@dataclass(slots=True, eq=False)
class Mode:
    """What a layer does where one thing follows, and is kept in one dtype."""

    dtype: torch.dtype
    follows: Follows
    decisions: list[Decision]
    generation: int = -1
    """The latest generation that was decided about."""
    settled_at: int = -1
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
        self.settled_at = -1
        if decision == last:
            return
        if last.since == self.generation:
            self.decisions.pop()
        self.decisions = [*self.decisions[1 - _REMEMBERED :], decision._replace(since=self.generation)]

    def goes_on(self, generation: int) -> bool:
        """Whether the last decision holds in a new generation in which nothing is measured or judged.

        If so, the generation has begun.
        """
        last = self.decisions[-1]
        if last.measures or self.figures or self.measured_at < 0:
            return False
        self.generation = self.settled_at = generation
        return True

    def begin(self, generation: int, measures: bool) -> None:
        """Decides about a generation."""
        self.generation = generation
        self.change(measures=measures)

    def keep(self, figures: Tensor, waited: bool) -> None:
        """Keeps the figures of a call, and drops those of earlier generations."""
        if self.measured_at != self.generation:
            if self.measured_at >= 0:
                self.gap = min(2 * self.gap, 1 << 30)
            self.measured_at, self.calls, self.figures = self.generation, 0, []
        self.calls += 1
        self.figures.append((figures, None) if waited else fetched(figures))

    def take(self) -> list[Table]:
        """The figures that were kept and not taken yet. Waits for the device."""
        self._wait()
        found, self.figures = self.figures, []
        return [unpacked(figures) for figures, _ in found]

    def renew(self) -> None:
        """Forgets what was measured, in the middle of a generation."""
        self.measured_at, self.figures = -1, []
        self.change(trusted=True, measures=True)

    def _wait(self) -> None:
        for _, event in self.figures:
            if event is not None:
                event.synchronize()

    def __getstate__(self) -> tuple[None, dict[str, Any]]:
        """Another process counts generations of its own. Events cannot be copied."""
        self._wait()
        figures = [(figures, None) for figures, _ in self.figures]
        last = self.decisions[-1]._replace(since=-1)
        changed: dict[str, Any] = {"generation": -1, "settled_at": -1, "decisions": [last], "figures": figures}
        return None, {name: getattr(self, name) for name in self.__slots__} | changed


@dataclass(slots=True, eq=False)
class State:
    """What the guard knows of a layer."""

    modes: dict[tuple[torch.dtype, Follows], Mode] = field(default_factory=dict)
    writes: Writes = field(default_factory=lambda: Writes())
    given_up: tuple[int, str] | None = None
    """The generation in which a converted norm was given up, and why: its output is read or written to."""
    noticed: bool = False
    """Whether that is why."""

    def mode(self, dtype: torch.dtype, follows: Follows) -> Mode:
        return self.modes.setdefault((dtype, follows), Mode(dtype, follows, [Decision()]))


class Writes:
    """Notices who writes to a layer's weight and bias: an optimizer in its step, or somebody else.

    Parameters are compared by identity and by their versions, which do not show writes to ``.data``.
    """

    __slots__ = ("__weakref__", "_bias", "_found", "_version", "_weight", "count", "counted_at")

    def __init__(self, count: int = 0, found: bool = False) -> None:
        self.count: int = count
        """The number of times that somebody else wrote."""
        self.counted_at: int = 0
        """The generation of the last one."""
        self._weight: Tensor | None = None
        self._bias: Tensor | None = None
        self._version: int | None = None
        """The sum of both versions; None while it is not known what it should be."""
        self._found = found
        _watchers.add(weakref.ref(self, _watchers.discard))

    def watches(self, ids: Container[int]) -> bool:
        return id(self._weight) in ids or id(self._bias) in ids

    def are_begun(self) -> bool:
        """Whether the parameters of a layer are known."""
        return self._weight is not None

    def are_expected(self, module: Any) -> bool:
        """Whether nobody wrote since the layer's last call, or since the last step of an optimizer."""
        weight, bias = _kept(module)
        if weight is None or self._weight is None:
            return weight is self._weight
        # A tensor that replaces one of them need not have a version.
        if weight is not self._weight or bias is not self._bias:
            return False
        return (weight._version if bias is None else weight._version + bias._version) == self._version

    def take(self, module: Any) -> bool:
        """Whether somebody else wrote. From now on the present values are the expected ones."""
        weight, bias = _kept(module)
        found = self._found or (
            self._weight is not None
            and (weight is not self._weight or bias is not self._bias or self._version not in (None, self._sum()))
        )
        self._found, self._weight, self._bias = False, weight, bias
        self._version = self._sum()
        return found

    def _sum(self) -> int:
        weight, bias = self._weight, self._bias
        return (0 if weight is None else weight._version) + (0 if bias is None else bias._version)

    def before_step(self) -> None:
        if self._version is not None:
            self._found = self._found or self._version != self._sum()
            self._version = None

    def after_step(self) -> None:
        if not self._found:
            self._version = self._sum()

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy watches its own parameters from its first call on, before which anybody may write to them."""
        return Writes, (self.count, True)


def _kept(module: Any) -> tuple[Tensor | None, Tensor | None]:
    """The weight and the bias of a layer; None for one that is made for each call."""
    held = module._parameters
    if "weight" in held and "bias" in held:
        return held["weight"], held["bias"]
    if module.is_parametrized():
        return None, None
    weight, bias = parameters(module)
    return None if weight is None or not weight.is_leaf else weight, None if bias is None or not bias.is_leaf else bias


_watchers: set[weakref.ref[Writes]] = set()


def watchers(optimizer: Any) -> list[Writes]:
    """Those who watch parameters of an optimizer."""
    ids = {id(t) for group in optimizer.param_groups for t in group["params"]} if _watchers else ()
    # Another thread may add one.
    found = [reference() for reference in tuple(_watchers)]
    return [writes for writes in found if writes is not None and writes.watches(ids)]
