"""Generations: the steps that all optimizers of the process have taken. `inplace_abn.guard` says what they decide."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from inplace_abn import checkpoints
from inplace_abn.guard.writes import watchers

current: int = 0
"""The number of steps that optimizers of this process have taken."""


def _before_step(optimizer: Any, *_: Any) -> None:
    for writes in watchers(optimizer):
        writes.before_step()


def advance(optimizer: Any = None, *_: Any) -> None:
    global current
    current += 1
    for writes in () if optimizer is None else watchers(optimizer):
        writes.after_step()


register_optimizer_step_pre_hook(_before_step)
register_optimizer_step_post_hook(advance)

changed_at: int = -1
"""The last generation after which a module may do something else than it did before."""


_changed: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
"""The modules that do something else from the next generation on, and were in no watched step since, and that
generation."""


def mark_changed(module: Any = None) -> None:
    """Something was measured, or seen, that a module does differently in the next generation."""
    global changed_at
    changed_at = current
    if module is not None:
        _changed[module] = current


def mark_watched(module: Any) -> None:
    """A module is called in a watched step."""
    if _changed and _changed.get(module, current) < current:
        del _changed[module]


def are_changed(modules: Iterable[Any]) -> bool:
    """Whether one of the modules does something else than in the last watched step in which it was called.

    A module that is not called for an interval of its guard is forgotten.
    """
    for module in modules if _changed else ():
        since = _changed.get(module)
        if since is not None:
            if not has_passed(since, module.guard_interval or 1):
                return True
            del _changed[module]
    return False


def now() -> int:
    """The generation of a call."""
    return checkpoints.of_forward_pass("generation", current)


_paused = 0


def is_paused() -> bool:
    return _paused > 0


@contextmanager
def paused() -> Iterator[None]:
    """Pauses the guard: modes stay as they are, and nothing is measured."""
    global _paused
    _paused += 1
    try:
        yield
    finally:
        _paused -= 1


def has_passed(since: int, interval: int) -> bool:
    """Whether a multiple of the interval has come since that generation. A generation that is still to come is from
    another process, and counts as passed."""
    return since > current or current // interval > since // interval
