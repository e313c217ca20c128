"""Ownership of memory: backward may overwrite a tensor only if nobody else can see it.

References are counted: to a gradient from Python, to a gradient from C++, to the storage of a gradient, and to the
storage of a saved output.

References from Python include those of the interpreter's own frames, whose number depends on Python's release. So a
stand-in is passed through the same kinds of calls each time. If its count is not the one at import, a debugger, a
profiler or a compiler holds references, and nothing is reused.

Which counts mean that nobody else holds the memory depends on torch's release. They are counted once, on graphs whose
holders are known. In any doubt nothing is reused.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from sys import getrefcount
from typing import Any

import torch
from torch import Tensor

from inplace_abn import _torch

Counts = tuple[int, int, int]
"""References to a gradient: from Python, from C++, and to its storage."""

_sole_gradient: Counts | None = None
_sole_output: int | None = None
_calibrated = False
_lock = threading.Lock()
_last = threading.local()


class _StandIn:
    """Passes an argument on in the way `torch.autograd.function.BackwardCFunction.apply` passes gradients on."""

    def apply(self, *args: object) -> int:
        function = _references
        return function(self, *args)


def _references(ctx: object, stand_in: object) -> int:
    return getrefcount(stand_in)


_stand_in = _StandIn()


def references_of_frames() -> int:
    """The number of Python references to an object that is passed to a backward and that nobody else holds.

    ``map`` makes the call from C, as autograd's engine does.
    """
    return next(map(_stand_in.apply, (object(),)))


_frames = references_of_frames()
"""The result of `references_of_frames` at import, when no debugger or tracer is expected to hold frames."""


def _has_one_owner(t: Tensor) -> bool:
    """Whether the memory can have a single owner.

    It cannot if torch did not allocate it, if it is a lazy copy, or if other processes share it. A tensor without
    memory, whose values are all zero, has no owner.
    """
    if type(t) is not Tensor or _torch.transforms_active() or not _torch.is_plain(t):
        return False
    return t.untyped_storage().resizable() and not _torch.is_shared(t) and not _torch.is_lazy_copy(t)


def counts(t: Tensor, references: int) -> Counts | None:
    """The counts of a tensor with ``references`` from Python; None if its memory cannot have a single owner."""
    return (references, _torch.use_count(t), _torch.storage_use_count(t)) if _has_one_owner(t) else None


def owns_gradient(dz: Tensor, references: int) -> bool:
    """Whether the calling backward is the only holder of the gradient that it was given.

    ``references`` is ``sys.getrefcount(dz)`` in the frame of that backward.
    """
    seen = counts(dz, references) if references_of_frames() == _frames else None
    _last.gradient = seen
    return seen is not None and seen == _sole_gradient


def owns_output(z: Tensor) -> bool:
    """Whether the calling backward is the only holder of the output that it saved, and will not need the output again.

    Unpacking makes a new tensor. So only the count of the storage can show other holders.
    """
    seen = _torch.storage_use_count(z) if _has_one_owner(z) else None
    _last.output = seen
    return seen is not None and seen == _sole_output and not _torch.keeps_graph()


def last_counts() -> tuple[Counts | None, int | None]:
    """The counts that the calling thread's last backward saw: of its gradient, and of its output's storage."""
    return getattr(_last, "gradient", None), getattr(_last, "output", None)


def set_sole_holders(gradient: Counts | None, output: int | None) -> None:
    """Sets the counts at which backward is the only holder of a gradient, and of a saved output.

    Until they are set, nothing is reused.
    """
    global _sole_gradient, _sole_output
    _sole_gradient, _sole_output = gradient, output


def calibrate(count: Callable[[], None]) -> None:
    """Runs ``count``, which must set the counts of sole holders, unless it has run before.

    ``count`` runs in a thread of its own, where no mode, hook or transform is active. It runs when the first graph is
    built, and not at import: a process that is forked after autograd's threads have started cannot run backward. While
    a tool monitors all threads ``count`` is put off, because the tool may hold what is counted.
    """
    global _calibrated
    if _calibrated:
        return
    with _lock:
        if _calibrated or _is_monitored():
            return
        with _torch.uncompiled_autograd():
            thread = threading.Thread(target=_unwatched, args=(count,))
            thread.start()
            thread.join()
            _wait_for_the_end_of(thread)
        _calibrated = True


def _wait_for_the_end_of(thread: threading.Thread) -> None:
    """Waits until the system has ended the thread, which is later than its end in Python.

    In between torch frees what it keeps for the thread, and needs the interpreter for that. torch 2.12 aborts the
    process if the interpreter ends meanwhile.
    """
    running = Path(f"/proc/self/task/{thread.native_id}")
    for _ in range(1000):
        if not running.exists():
            break
        time.sleep(0.001)


def _is_monitored() -> bool:
    monitoring = getattr(sys, "monitoring", None)
    return monitoring is not None and any(monitoring.get_tool(tool) is not None for tool in range(6))


def _unwatched(count: Callable[[], None]) -> None:
    sys.settrace(None)
    sys.setprofile(None)
    count()


def sole_holders(
    overwritten: Callable[[Tensor], Tensor], last_counts: Callable[[], tuple[Any, Any]], seen_by_python: bool
) -> tuple[Any, Any]:
    """The counts of a gradient, and of an output, that have no other holder; None where another holder would not show.

    Args:
        overwritten: gives a tensor a node of the in-place op.
        last_counts: returns the counts that the node's backward saw.
        seen_by_python: whether a hook looks at the gradient before backward.
    """

    def look(hook: Callable[[Tensor], None] | None = None, keep: bool = False, share: bool = False) -> tuple[Any, Any]:
        # ``other`` is made first. So its backward comes last, and its gradient is alive meanwhile.
        other = torch.ones(2, 1, device="cpu", requires_grad=True) * 1.0
        z = overwritten(torch.ones(2, 1, device="cpu", requires_grad=True) * 1.0)
        if hook is not None:
            z.register_hook(hook)
        kept = z if keep else None
        loss = ((z + other) * 2.0 if share else z * 2.0).sum()
        del z
        loss.backward()
        del kept
        return last_counts()

    held: list[Tensor] = []
    # A debugger or tracer can only add to a count, so the smallest count is right.
    looks = [look(hook=(lambda gradient: None) if seen_by_python else None) for _ in range(3)]
    gradient, output = (
        min((seen for seen in axis if seen is not None), default=None) for axis in zip(*looks, strict=True)
    )
    kept, _ = look(hook=held.append)
    shared, _ = look(share=True)
    _, kept_output = look(keep=True)
    one_more = gradient is not None and kept == (gradient[0] + 1, *gradient[1:])
    return gradient if one_more and gradient != shared else None, None if output == kept_output else output
