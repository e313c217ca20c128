"""Loads the compiled module, which registers the ops, and tells torch what they return when nothing is computed.

==================  ==========================================================================================
``check``           raises what the forward ops would, before a collective
``statistics``      mean and biased variance of x per channel
``combine``         merges the statistics of several shares of a batch, updates the running statistics
``forward``         z = act(gamma * (x - mean) / sqrt(var + eps) + beta + residual), written over x
``local_forward``   ``statistics`` and ``forward`` in one
``backward_reduce`` **overwrites** y_act with xhat and dy_act with dy, returns the sums over dy and xhat * dy; its
                    overload ``out`` writes both to buffers of the caller's, which may be y_act and dy_act themselves
``backward``        dx = gamma / sqrt(var + eps) * (dy - mean_dy - xhat * mean_xhat_dy), written over dy; its overload
                    ``out`` writes to a buffer of the caller's, which may be xhat or dy
``local_backward``  ``backward_reduce`` and ``backward`` in one, writing dx, dweight, dbias and the residual's
                    gradient (which is dy) to buffers of the caller's, those of them that are wanted; ``xhat`` is
                    memory, perhaps y_act itself, with which a costly activation is inverted once instead of twice
==================  ==========================================================================================

Activations have shape (batch, channel, \\*) and dtype float64, float32, bfloat16 or float16, in any strides;
contiguous and channels-last ones are walked without a copy. Statistics are float32 for 16-bit activations, otherwise of
their dtype; parameters are of either. Ops raise ValueError or TypeError before they write anything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from inplace_abn import _torch

_REBUILD = "pip install --no-build-isolation --force-reinstall --no-deps inplace-abn"
_BUILD_SOURCE = "pip install --no-build-isolation -e ."

__all__ = [
    "backend",
    "backward",
    "backward_out",
    "backward_reduce",
    "backward_reduce_out",
    "check",
    "combine",
    "forward",
    "local_backward",
    "local_forward",
    "run",
    "statistics",
]

try:
    from inplace_abn import _backend as backend
except ImportError as error:
    if any(Path(__file__).parent.glob("_backend*.so")) or any(Path(__file__).parent.glob("_backend*.pyd")):
        raise ImportError(
            f"inplace_abn's compiled module cannot be loaded under torch {torch.__version__}; most likely it was built "
            f"for another torch or Python. Build it again: `{_REBUILD}` (in a source tree: `{_BUILD_SOURCE}`). "
            f"The loader said: {error}"
        ) from error
    raise ImportError(
        f"inplace_abn's compiled module does not exist in {Path(__file__).parent}: this source tree was never built. "
        f"Build it: `{_BUILD_SOURCE}`"
    ) from error


statistics = torch.ops.inplace_abn.statistics.default
combine = torch.ops.inplace_abn.combine.default
forward = torch.ops.inplace_abn.forward.default
local_forward = torch.ops.inplace_abn.local_forward.default
backward_reduce = torch.ops.inplace_abn.backward_reduce.default
backward_reduce_out = torch.ops.inplace_abn.backward_reduce.out
backward = torch.ops.inplace_abn.backward.default
backward_out = torch.ops.inplace_abn.backward.out
local_backward = torch.ops.inplace_abn.local_backward.default
check = torch.ops.inplace_abn.check.default


def run(op: Any, written: Sequence[Tensor], *args: Any, **kwargs: Any) -> Any:
    """Calls an op below autograd, which has no part in it, and tells autograd what it wrote."""
    if torch.compiler.is_compiling() or _torch.transforms_active():
        with torch.no_grad():
            return op(*args, **kwargs)
    with _torch.BelowAutograd():
        result = op(*args, **kwargs)
    torch.autograd.graph.increment_version(written)
    return result


def _two_statistics(x: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    return x.new_empty((x.shape[1],), dtype=dtype), x.new_empty((x.shape[1],), dtype=dtype)


def _combined(gathered: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    channels = (gathered.shape[1] - 1) // 2
    return gathered.new_empty((channels,)), gathered.new_empty((channels,)), gathered.new_empty(())


def _nothing(*_: object, **__: object) -> None:
    return None


_FAKES: dict[str, Callable[..., Any]] = {
    "statistics": _two_statistics,
    "combine": _combined,
    "forward": _nothing,
    "local_forward": _two_statistics,
    "backward_reduce": _two_statistics,
    "backward_reduce.out": _two_statistics,
    "backward": _nothing,
    "backward.out": _nothing,
    "local_backward": _nothing,
    "check": _nothing,
}

for _name, _fake in _FAKES.items():
    torch.library.register_fake(f"inplace_abn::{_name}", _fake)
