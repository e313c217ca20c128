"""Whose memory it is: backward may overwrite a tensor only if nobody else can see it.

Counted are the references to a gradient from Python and from C++, and those to the storage of a gradient and of a saved
output. References from Python include those of the interpreter's own frames, whose number depends on its release, on
debuggers and on compilers; so a stand-in is handed through the same kinds of call each time, and only what the gradient
has more than it counts. What the counts amount to where nobody else holds the memory depends on torch's release; it is
observed once, on graphs whose holders are known. In any doubt nothing is reused.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from sys import getrefcount
from typing import Any

import torch
from torch import Tensor

from inplace_abn import _torch

Counts = tuple[int, int, int]
"""Of a gradient: references from Python beyond a stand-in's, from C++, and to its storage."""

_sole_gradients: frozenset[Counts] = frozenset()
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
    """The references that an object has which is handed to a backward and held by nobody else. The call comes from
    compiled code, as the engine's does."""
    return next(map(_stand_in.apply, (object(),)))


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

    ``references`` is ``sys.getrefcount(dz)`` in the frame that was given it, less `references_of_frames`.
    """
    seen = counts(dz, references)
    _observed.gradient = seen
    return seen in _sole_gradients


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


def set_sole_holders(gradients: frozenset[Counts], output: int | None) -> None:
    """The counts that leave backward alone with a gradient, and with a saved output. Until they are set, nothing is
    reused."""
    global _sole_gradients, _sole_output
    _sole_gradients, _sole_output = gradients, output


def is_calibrated() -> bool:
    return _calibrated


def calibrate(observe: Callable[[], None]) -> None:
    """Runs ``observe``, which is to set sole holders, if this is the first call.

    It runs in a thread of its own, where no mode, hook or transform is in force, and when the first graph is built:
    importing must not start autograd's threads, after which forked processes could not run backward.
    """
    global _calibrated
    with _lock:
        if not _calibrated:
            with _torch.uncompiled_autograd():
                thread = threading.Thread(target=observe)
                thread.start()
                thread.join()
            _calibrated = True


def sole_holders(
    overwritten: Callable[[Tensor], Tensor], observed: Callable[[], tuple[Any, Any]]
) -> tuple[frozenset[Any], Any]:
    """What is observed of gradients, and of an output, that have no other holder and look like none that have one.

    ``overwritten`` gives a tensor a node of the in-place op, ``observed`` tells what its backward saw.
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
    unseen, output = look()
    seen, _ = look(hook=lambda gradient: None)
    kept, _ = look(hook=held.append)
    shared, _ = look(share=True)
    _, kept_output = look(keep=True)
    return frozenset({unseen, seen} - {kept, shared, None}), None if output == kept_output else output
