"""Who writes to a layer's weight and bias: an optimizer in its step, or somebody else."""

from __future__ import annotations

import weakref
from collections.abc import Container
from typing import Any

from torch import Tensor

from inplace_abn.settings import parameters


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

    def are_entered(self) -> bool:
        """Whether the parameters of a layer are known."""
        return self._weight is not None

    def is_unchanged(self, module: Any) -> bool:
        """Whether nobody wrote since the layer's last call, or since the last step of an optimizer."""
        weight, bias = _kept(module)
        if weight is None or self._weight is None:
            return weight is self._weight
        # A tensor that replaces one of them need not have a version.
        if weight is not self._weight or bias is not self._bias:
            return False
        return (weight._version if bias is None else weight._version + bias._version) == self._version

    def updated(self, module: Any) -> bool:
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
