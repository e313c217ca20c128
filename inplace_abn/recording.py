"""What is recorded of one forward pass: which storages each op reads and writes, and which autograd keeps.

A recording names storages instead of tensors, because views, reshapes and splits hide who owns memory. A storage's
number is never used twice. `recorder` makes recordings.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Seen:
    """What is known of a tensor, without holding the tensor."""

    storage: int
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    whole: bool
    """Whether the tensor covers its whole storage, and each element once."""


@dataclass(frozen=True)
class Op:
    """An op below autograd. Ops that only make a view are left out."""

    name: str
    """The op's name, without namespace and overload."""
    module: str
    """The innermost module that was being called."""
    tensors: tuple[Seen, ...]
    values: dict[str, Any]
    """Arguments that are no tensors, by name, with defaults."""
    reads: frozenset[int]
    writes: frozenset[int]
    results: tuple[Seen, ...]
    differentiable: bool
    """Whether autograd would record it. It would not under no_grad, and so not inside of a custom autograd Function."""

    def touches(self, storage: int) -> bool:
        return storage in self.reads or storage in self.writes

    def __str__(self) -> str:
        return f"{self.name} in {self.module}" if self.module else self.name


@dataclass
class Call:
    """A call of a module: its ops are ``ops[start:stop]`` of the recording."""

    module: str
    start: int
    stop: int = -1
    input: Seen | None = None
    source: str = ""
    """The module that returned the very tensor object that this one was called with."""
    custom_function: str = ""
    """The custom autograd Function that made the input."""
    protected: bool = False
    """Whether autograd forbids to write the input: a leaf that requires grad, or one of several views."""
    by_keyword: bool = False


@dataclass(frozen=True)
class Save:
    """A tensor that autograd keeps for backward."""

    storage: int
    before: int
    """Number of ops that had run."""
    modules: tuple[str, ...]
    """Modules that were being called, the innermost last."""
    held: bool = True
    """Whether the graph of the result holds the tensor. It does not in branches that lead nowhere."""


@dataclass(frozen=True)
class Watch:
    """Something that sees a tensor or its gradient without an op."""

    storage: int
    before: int
    """Number of ops that had run."""
    kind: str
    """"gradient" (a hook on it), "node" (its grad_fn was asked for), "function" (a custom autograd Function made a view
    of it), "memory" (its values were given away) or "truth" (it was converted to bool)."""
    what: str
    """A description in words."""


@dataclass
class Recording:
    """What happened in one forward pass."""

    training: bool = True
    ops: list[Op] = field(default_factory=list)
    calls: dict[str, list[Call]] = field(default_factory=dict)
    saves: list[Save] = field(default_factory=list)
    watches: list[Watch] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    """Bytes of each storage."""
    inputs: set[int] = field(default_factory=set)
    outputs: set[int] = field(default_factory=set)
    state: set[int] = field(default_factory=set)
    """Storages of parameters and buffers."""
    alive: set[int] = field(default_factory=set)
    """Storages that something other than autograd still holds after the pass."""

    def touching(self, storage: int, after: int) -> list[int]:
        """Numbers of the ops beyond ``after`` that read or write the storage."""
        return [i for i in range(after + 1, len(self.ops)) if self.ops[i].touches(storage)]

    def watched(self, storage: int, after: int, until: int | None = None) -> list[Watch]:
        """The watches of the storage after op ``after``, and before op ``until``."""
        return [
            w
            for w in self.watches
            if w.storage == storage and w.before > after and (until is None or w.before <= until)
        ]

    def is_held(self, storage: int) -> bool:
        """Whether autograd keeps the storage after the pass."""
        return any(save.storage == storage and save.held for save in self.saves)

    def saved_by(self, save: Save) -> str:
        """The op that saved the tensor, in words.

        An op saves its inputs before it runs, and its results after it has run.
        """
        following = self.ops[save.before] if save.before < len(self.ops) else None
        if following is not None and following.touches(save.storage) and following.module == save.modules[-1]:
            return str(following)
        previous = self.ops[save.before - 1] if save.before else None
        if previous is not None and any(r.storage == save.storage for r in previous.results):
            return str(previous)
        return f"a function in {save.modules[-1] or 'the model'}"

    def producer(self, storage: int) -> Op | None:
        """The op that first had the storage as its result."""
        for op in self.ops:
            if any(result.storage == storage for result in op.results):
                return op
        return None
