"""Whose memory it is: backward may overwrite a tensor only if nobody else can see it.

Looked at are the references to the tensor from Python, from C++, and from C++ to its storage. What they amount to for a
tensor that only backward holds depends on torch's and Python's release, so it is observed once, on graphs whose holders
are known, instead of being written down here. In any doubt nothing is reused.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from inplace_abn.ops import backend

# Whether the graph will be kept (retain_graph), inside backward.
_keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph

_Holders = tuple[int, int, int]
_sole_gradient: _Holders | None = None
_sole_output: _Holders | None = None
_observed: dict[str, _Holders] | None = None


def is_hooked(ctx: Any) -> bool:
    """Whether the output that was saved goes through hooks, which may keep it or hand it out again."""
    return ctx._raw_saved_tensors[0].unpack_hook is not None


def owns_gradient(dz: Tensor) -> bool:
    """Whether only the calling backward holds the gradient it was given."""
    if _observed is not None:
        _observed["gradient"] = backend.holders(dz)
    return backend.is_sole_owner(dz, _sole_gradient)


def owns_output(z: Tensor) -> bool:
    """Whether only the calling backward holds the output that it saved, and will not need it again."""
    if _observed is not None:
        _observed["output"] = backend.holders(z)
    return backend.is_sole_owner(z, _sole_output) and not _keeps_graph()


def calibrate(inplace_abn: Callable[..., Tensor]) -> None:
    """Observes the holders of gradients and outputs in known graphs.

    Reuse stays off where a gradient that a hook keeps, or an output that is kept, looks like one that nobody keeps.
    It is done in a thread of its own, where no mode, hook or transform is in force under which this was imported.
    """
    thread = threading.Thread(target=_calibrate, args=(inplace_abn,))
    thread.start()
    thread.join()


def _calibrate(inplace_abn: Callable[..., Tensor]) -> None:
    global _observed, _sole_gradient, _sole_output

    def holders(keep_gradient: bool, keep_output: bool) -> tuple[_Holders, _Holders]:
        kept: list[Any] = []
        x = torch.ones(2, 1, device="cpu", requires_grad=True)
        z = inplace_abn(x * 1.0, None, None, None, None)
        if keep_gradient:
            z.register_hook(kept.append)
        if keep_output:
            kept.append(z)
        loss = (z * 2.0).sum()
        del z
        loss.backward()
        return observed["gradient"], observed["output"]

    # A debugger that looks at a frame's locals holds them.
    sys.settrace(None)
    observed: dict[str, _Holders] = {}
    _observed = observed
    try:
        gradient, output = holders(False, False)
        kept_gradient, _ = holders(True, False)
        _, kept_output = holders(False, True)
        again = holders(False, False)
    finally:
        _observed = None
    if gradient == again[0] != kept_gradient and 0 not in gradient:
        _sole_gradient = gradient
    if output == again[1] != kept_output and 0 not in output:
        _sole_output = output
