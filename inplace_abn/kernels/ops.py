"""Loads the kernels, which register the ops, and registers the fakes, for calls that are only traced.

==================  ==========================================================================================
``check``           raises the errors of the forward ops; for calls with a collective, before the collective
``statistics``      mean and biased variance of x per channel
``combine``         merges the statistics of several shares of a batch, and updates the running statistics
``forward``         writes z = act(gamma * (x - mean) / sqrt(var + eps) + beta + residual) over x; its overload
                    ``out`` writes z to a buffer of the caller's
``local_forward``   ``statistics`` and ``forward`` in one, with the same overload
``backward_reduce`` **overwrites** y_act with xhat and dy_act with dy, and returns the sums of dy and xhat * dy; its
                    overload ``out`` writes both to buffers of the caller's, which may be y_act and dy_act themselves
``backward``        writes dx = gamma / sqrt(var + eps) * (dy - mean_dy - xhat * mean_xhat_dy) over dy; its overload
                    ``out`` writes dx to a buffer of the caller's, which may be xhat or dy
``local_backward``  ``backward_reduce`` and ``backward`` in one; writes each of dx, dweight, dbias and the residual's
                    gradient (which is dy) for which the caller gives a buffer; with the optional buffer ``xhat``,
                    which may be y_act itself, a costly activation is inverted once instead of twice
``rows_backward``   writes the gradients of a norm that normalises each row of a contiguous matrix, from its output y
                    or from xhat: dx = rstd * (g - mean(g) - xhat * mean(g * xhat)) with g = dy * weight, without
                    mean(g) unless ``centred``; ``dx`` may be y or dy. For dweight, weights are at least eps
``inverse``         y with act(y) = z, in the dtype of statistics
``has_left``        whether a weight on the CPU, or its bias, is beyond its bounds, and its channel has no row
==================  ==========================================================================================

``scale`` says what xhat is multiplied by (`settings.Settings.scale`). Of channels that have a row in ``rows``, int64 of
shape (channel,) with -1 elsewhere, the forward ops write xhat to ``verbatim``, of shape (batch, rows, \\*), and the
backward ops take it from there.

Activations have shape (batch, channel, \\*) and dtype float64, float32, bfloat16 or float16, in any strides. Contiguous
and channels-last ones are read without a copy. Statistics are float32 for 16-bit activations, and otherwise have the
activations' dtype. Parameters have the dtype of the activations or of the statistics. With ``shared``, an argument of
``statistics``, ``local_forward`` and ``local_backward``, each sample has its own statistics, which so many neighbouring
channels have in common. Vectors then have shape (batch * channel,), sample after sample. Ops raise ValueError or
TypeError before they write anything. They bump the version counters of what they have written.

Callers that go below autograd (`torch._C._AutoDispatchBelowADInplaceOrView`) must bump versions themselves, with
`torch.autograd.graph.increment_version`. They get errors as ValueError or RuntimeError, depending on torch's release.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from inplace_abn import _torch
from inplace_abn.kernels import fakes

_BUILD_SOURCE = "pip install --no-build-isolation -e ."

_FOLDER = Path(__file__).parents[1]
_kernels = _FOLDER / "_kernels.so"
if not _kernels.exists():
    raise ImportError(
        f"inplace_abn's compiled modules do not exist in {_FOLDER}: this source tree was never built. "
        f"Build it: `{_BUILD_SOURCE}`"
    )
try:
    torch.ops.load_library(str(_kernels))
except OSError as _error:
    raise ImportError(
        f"inplace_abn's kernels cannot be loaded under torch {torch.__version__}; they were built for another "
        f"platform, or for a later torch. Build them again from their source tree: `{_BUILD_SOURCE}`. "
        f"The loader said: {_error}"
    ) from _error

_has_cuda_kernels = _torch.has_kernel("inplace_abn::forward", "CUDA")
with_cuda: bool = _has_cuda_kernels and torch.version.hip is None
"""Whether the kernels were built for CUDA, too. Tensors of ROCm claim to be on CUDA."""


def run_on(device: torch.device) -> bool:
    """Whether there are kernels for the device."""
    return device.type == "cpu" or (with_cuda and device.type == "cuda")


def why_not_on(device: torch.device | str) -> str:
    """What to do where there are no kernels for the device."""
    if torch.device(device).type != "cuda":
        remedy = "there are kernels for the CPU and CUDA only"
    elif torch.version.hip is not None:
        remedy = "there are none for ROCm"
    else:
        remedy = (
            "this build has those for the CPU only: install the wheel with CUDA, or build the package where nvcc is"
        )
    return f"inplace_abn: no kernels for {device}, {remedy}. ABN, and models after convert, run torch's own ops there"


statistics: Callable[..., Any] = torch.ops.inplace_abn.statistics.default
combine: Callable[..., Any] = torch.ops.inplace_abn.combine.default
forward: Callable[..., Any] = torch.ops.inplace_abn.forward.default
forward_out: Callable[..., Any] = torch.ops.inplace_abn.forward.out
local_forward: Callable[..., Any] = torch.ops.inplace_abn.local_forward.default
local_forward_out: Callable[..., Any] = torch.ops.inplace_abn.local_forward.out
backward_reduce: Callable[..., Any] = torch.ops.inplace_abn.backward_reduce.default
backward_reduce_out: Callable[..., Any] = torch.ops.inplace_abn.backward_reduce.out
backward: Callable[..., Any] = torch.ops.inplace_abn.backward.default
backward_out: Callable[..., Any] = torch.ops.inplace_abn.backward.out
local_backward: Callable[..., Any] = torch.ops.inplace_abn.local_backward.default
rows_backward: Callable[..., Any] = torch.ops.inplace_abn.rows_backward.default
inverse: Callable[..., Any] = torch.ops.inplace_abn.inverse.default
check: Callable[..., Any] = torch.ops.inplace_abn.check.default


def is_refusal(raised: Exception) -> bool:
    """Whether an op has refused a call, before it wrote anything."""
    return str(raised).startswith("inplace_abn::")


def as_python_error(raised: Exception) -> Exception:
    """A kernel's error as an exception of the right class. Other exceptions are returned as they are.

    The class of a kernel's exception does not reach Python in every release of torch. The message does, so its words
    decide (``checks.h``).
    """
    message = str(raised)
    if not is_refusal(raised):
        return raised
    if "dtype" in message:
        return TypeError(message)
    return RuntimeError(message) if "it overlaps" in message else ValueError(message)


def run(op: Any, written: Sequence[Tensor], *args: Any, **kwargs: Any) -> Any:
    """Calls an op below autograd, and bumps the versions of the tensors that it has ``written``."""
    if torch.compiler.is_compiling() or _torch.transforms_active():
        with torch.no_grad():
            return op(*args, **kwargs)
    try:
        with _torch.BelowAutograd():
            result = _torch.builtin_of(op)(*args, **kwargs)
    except (ValueError, RuntimeError) as raised:
        raise as_python_error(raised) from None
    increment_version(written)
    return result


_library = torch.library.Library("inplace_abn", "IMPL")


def _refuse(library: torch.library.Library, op: Any) -> None:
    """Makes calls of ``op`` with tensors on CUDA say what to install, where torch says that it could not run the op."""

    def refuse(*_: Any, **__: Any) -> None:
        raise ValueError(why_not_on("cuda"))

    library.impl(op, refuse, "CUDA")


def _bump_versions(library: torch.library.Library, op: Any) -> None:
    """Makes calls of ``op`` other than by `run` bump the versions of what its schema says is written."""
    arguments = list(enumerate(_torch.schema_of(op).arguments))
    mutated = [(i, a) for i, a in arguments if a.alias_info is not None and a.alias_info.is_write]
    positions = [i for i, a in mutated if not a.kwarg_only]
    names = [a.name for _, a in mutated]

    def call(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            result = op.redispatch(keyset & _torch.BELOW_AUTOGRAD, *args, **kwargs)
        except (ValueError, RuntimeError) as raised:
            raise as_python_error(raised) from None
        # An optional argument may be left out, or be given by its name.
        written = (*(args[i] for i in positions if i < len(args)), *map(kwargs.get, names))
        increment_version([t for t in written if t is not None])
        return result

    library.impl(op, call, "ADInplaceOrView", with_keyset=True)


NAMES = [name for name, value in vars().items() if isinstance(value, _torch.OpOverload)]
"""What the ops are called here."""

for _op in map(globals().__getitem__, NAMES):
    torch.library.register_fake(_op, fakes.fake(_op))
    _bump_versions(_library, _op)
    if not _has_cuda_kernels:
        _refuse(_library, _op)

has_left: Callable[..., Any] = torch.ops.inplace_abn.has_left.default
