"""Whose memory it is: backward may overwrite a tensor only if nobody else can see it.

Looked at are the references to the tensor from Python and from C++, and those to its storage: of a gradient in C++'s
backward, or just before the engine hands it to Python's, so that no interpreter's frames count among them; of the saved
output when backward has unpacked it. What they amount to where nobody else holds the memory depends on torch's release,
so it is observed once, on graphs whose holders are known, instead of being written down here. In any doubt nothing is
reused.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from inplace_abn.ops import backend

# Whether the graph will be kept (retain_graph), inside backward.
_keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph

_Holders = tuple[int, int, int]
_Wiring = Callable[..., Tensor]
_sole_gradients: frozenset[_Holders] = frozenset()
_sole_output: int | None = None
_observed: dict[str, Any] | None = None


def is_hooked(ctx: Any) -> bool:
    """Whether the output that was saved goes through hooks, which may keep it or hand it out again."""
    return ctx._raw_saved_tensors[0].unpack_hook is not None


def owns_gradient(dz: Tensor) -> bool:
    """Whether only the calling backward holds the gradient it was given."""
    holders = backend.gradient_holders(dz)
    if _observed is not None:
        _observed["gradient"] = holders
    return holders in _sole_gradients


def owns_output(z: Tensor) -> bool:
    """Whether only the calling backward holds the output that it saved, and will not need it again.

    Unpacking makes a tensor of its own, so it is the storage that others could hold.
    """
    holders = backend.holders(z)
    storage = None if holders is None else holders[2]
    if _observed is not None:
        _observed["output"] = storage
    return storage is not None and storage == _sole_output and not _keeps_graph()


def calibrate(inplace_abn: _Wiring, overwritten: _Wiring) -> None:
    """Observes the holders of gradients and outputs in known graphs, made by C++'s function and by Python's.

    Reuse stays off where a gradient that a hook keeps, or an output that is kept, looks like one that nobody keeps.
    It is done in a thread of its own, where no mode, hook or transform is in force under which this was imported.
    """
    thread = threading.Thread(target=_calibrate, args=(inplace_abn, overwritten))
    thread.start()
    thread.join()


def _calibrate(inplace_abn: _Wiring, overwritten: _Wiring) -> None:
    global _observed, _sole_gradients, _sole_output
    gradients, output = _sole_holders(lambda x: inplace_abn(x, None, None, None, None), backend.last_observed)
    backend.set_sole_holders(list(gradients), output)
    observed: dict[str, Any] = {}
    _observed = observed
    try:
        _sole_gradients, _sole_output = _sole_holders(overwritten, lambda: (observed["gradient"], observed["output"]))
    finally:
        _observed = None


def _sole_holders(wire: _Wiring, observed: Callable[[], tuple[Any, Any]]) -> tuple[frozenset[_Holders], int | None]:
    def holders(hook: Callable[[Tensor], None] | None = None, keep_output: bool = False) -> tuple[Any, Any]:
        x = torch.ones(2, 1, device="cpu", requires_grad=True)
        z = wire(x * 1.0)
        if hook is not None:
            z.register_hook(hook)
        kept = z if keep_output else None
        loss = (z * 2.0).sum()
        del z
        loss.backward()
        del kept
        return observed()

    kept: list[Tensor] = []
    unseen, output = holders()
    seen, _ = holders(hook=lambda gradient: None)
    kept_gradient, _ = holders(hook=kept.append)
    _, kept_output = holders(keep_output=True)
    return frozenset({unseen, seen} - {kept_gradient, None}), None if output == kept_output else output
