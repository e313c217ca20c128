"""Whose memory it is: backward may overwrite a tensor only if nobody else can see it.

Counted are the references to a gradient from Python and from C++, and those to the storage of a gradient and of a saved
output. References from Python include those of the interpreter's own frames, whose number depends on its release. So a
stand-in is handed through the same kinds of call each time; if it counts another number than when this was imported, a
debugger, a profiler or a compiler has a hand in it, and nothing is concluded. What the counts amount to where nobody
else holds the memory depends on torch's release; it is observed once, on graphs whose holders are known. In any doubt
nothing is reused.
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
"""Of a gradient: references from Python, from C++, and to its storage."""

_sole_gradient: Counts | None = None
_sole_output: int | None = None
_calibrated = False
_lock = threading.Lock()
_observed = threading.local()


class _StandIn:
    """Passes an argument on as `torch.autograd.function.BackwardCFunction.apply` passes gradients on."""

    def apply(self, *args: object) -> int:
        function = _references
        return function(self, *args)


def _references(ctx: object, stand_in: object) -> int:
    return getrefcount(stand_in)


_stand_in = _StandIn()


def references_of_frames() -> int:
    """The number of references to an object that is handed to a backward and that nobody else holds. ``map`` makes the
    call from C, as autograd's engine does."""
    return next(map(_stand_in.apply, (object(),)))


_frames = references_of_frames()
"""That number, of this interpreter, without a debugger or tracer that holds frames."""


def _has_one_owner(t: Tensor) -> bool:
    """Whether the memory can have one: not if torch did not allocate it itself, if it is a lazy copy, if other
    processes share it, or if there is none, because all is zero."""
    if type(t) is not Tensor or t.layout is not torch.strided or _torch.transforms_active():
        return False
    storage = t.untyped_storage()
    own = storage.resizable() and not (t.is_cpu and storage.is_shared())
    return own and not (t.is_neg() or t.is_conj() or _torch.is_lazy_copy(t) or _torch.is_zero_tensor(t))


def counts(t: Tensor, references: int) -> Counts | None:
    """The counts of a tensor that has ``references`` from Python; None where its memory cannot have one owner."""
    return (references, _torch.use_count(t), _torch.storage_use_count(t)) if _has_one_owner(t) else None


def owns_gradient(dz: Tensor, references: int) -> bool:
    """Whether only the calling backward holds the gradient it was given.

    ``references`` is ``sys.getrefcount(dz)`` in the frame that was given it.
    """
    seen = counts(dz, references) if references_of_frames() == _frames else None
    _observed.gradient = seen
    return seen is not None and seen == _sole_gradient


def owns_output(z: Tensor) -> bool:
    """Whether only the calling backward holds the output that it saved, and will not need it again.

    Unpacking makes a tensor of its own, so it is the storage that others could hold.
    """
    seen = _torch.storage_use_count(z) if _has_one_owner(z) else None
    _observed.output = seen
    return seen is not None and seen == _sole_output and not _torch.keeps_graph()


def last_observed() -> tuple[Counts | None, int | None]:
    """What the calling thread's last backward saw of its gradient and of its output."""
    return getattr(_observed, "gradient", None), getattr(_observed, "output", None)


def set_sole_holders(gradient: Counts | None, output: int | None) -> None:
    """The counts that leave backward alone with a gradient, and with a saved output. Until they are set, nothing is
    reused."""
    global _sole_gradient, _sole_output
    _sole_gradient, _sole_output = gradient, output


def is_calibrated() -> bool:
    return _calibrated


def calibrate(observe: Callable[[], None]) -> None:
    """Runs ``observe``, which is to set sole holders, if it was not run before.

    It runs in a thread of its own, where no mode, hook or transform is in force, and when the first graph is built:
    importing must not start autograd's threads, after which forked processes could not run backward. While a tool
    monitors all threads it is put off, because such a tool may hold what is counted.
    """
    global _calibrated
    with _lock:
        if _calibrated or _is_monitored():
            return
        with _torch.uncompiled_autograd():
            thread = threading.Thread(target=_unwatched, args=(observe,))
            thread.start()
            thread.join()
            _wait_for_the_end_of(thread)
        _calibrated = True


def _wait_for_the_end_of(thread: threading.Thread) -> None:
    """Python forgets a thread before the system does. In between torch gives back what it keeps for the thread, and
    needs the interpreter for that; torch 2.12 aborts a process whose interpreter ends meanwhile."""
    running = Path(f"/proc/self/task/{thread.native_id}")
    for _ in range(1000):
        if not running.exists():
            break
        time.sleep(0.001)


def _is_monitored() -> bool:
    monitoring = getattr(sys, "monitoring", None)
    return monitoring is not None and any(monitoring.get_tool(tool) is not None for tool in range(6))


def _unwatched(observe: Callable[[], None]) -> None:
    sys.settrace(None)
    sys.setprofile(None)
    observe()


def sole_holders(
    overwritten: Callable[[Tensor], Tensor], observed: Callable[[], tuple[Any, Any]], seen_by_python: bool
) -> tuple[Any, Any]:
    """What is observed of a gradient, and of an output, that have no other holder; None where that looks like one that
    has.

    ``overwritten`` gives a tensor a node of the in-place op, ``observed`` tells what its backward saw.
    ``seen_by_python``: whether a hook has looked at the gradient before.
    """

    def look(hook: Callable[[Tensor], None] | None = None, keep: bool = False, share: bool = False) -> tuple[Any, Any]:
        # Made first, so that its own backward comes last, and its gradient waits meanwhile.
        other = torch.ones(2, 1, device="cpu", requires_grad=True) * 1.0
        z = overwritten(torch.ones(2, 1, device="cpu", requires_grad=True) * 1.0)
        if hook is not None:
            z.register_hook(hook)
        kept = z if keep else None
        loss = ((z + other) * 2.0 if share else z * 2.0).sum()
        del z
        loss.backward()
        del kept
        return observed()

    held: list[Tensor] = []
    # A debugger or tracer can only add to a count, so the least is right.
    looks = [look(hook=(lambda gradient: None) if seen_by_python else None) for _ in range(3)]
    gradient, output = (
        min((seen for seen in axis if seen is not None), default=None) for axis in zip(*looks, strict=True)
    )
    kept, _ = look(hook=held.append)
    shared, _ = look(share=True)
    _, kept_output = look(keep=True)
    one_more = gradient is not None and kept == (gradient[0] + 1, *gradient[1:])
    return gradient if one_more and gradient != shared else None, None if output == kept_output else output
