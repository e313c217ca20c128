"""Loads the kernels, which registers the ops, and tells torch what they return when nothing is computed.

==================  ==========================================================================================
``check``           raises what the forward ops would, before a collective
``statistics``      mean and biased variance of x per channel
``combine``         merges the statistics of several shares of a batch, updates the running statistics
``forward``         z = act(gamma * (x - mean) / sqrt(var + eps) + beta + residual), written over x; its overload
                    ``out`` writes it to a buffer of the caller's
``local_forward``   ``statistics`` and ``forward`` in one, with the same overload
``backward_reduce`` **overwrites** y_act with xhat and dy_act with dy, returns the sums over dy and xhat * dy; its
                    overload ``out`` writes both to buffers of the caller's, which may be y_act and dy_act themselves
``backward``        dx = gamma / sqrt(var + eps) * (dy - mean_dy - xhat * mean_xhat_dy), written over dy; its overload
                    ``out`` writes to a buffer of the caller's, which may be xhat or dy
``local_backward``  ``backward_reduce`` and ``backward`` in one, writing dx, dweight, dbias and the residual's
                    gradient (which is dy) to buffers of the caller's, those of them that are wanted; ``xhat`` is
                    memory, perhaps y_act itself, with which a costly activation is inverted once instead of twice
``inverse``         y with act(y) = z, in the dtype of statistics
==================  ==========================================================================================

Activations have shape (batch, channel, \\*) and dtype float64, float32, bfloat16 or float16, in any strides;
contiguous and channels-last ones are walked without a copy. Statistics are float32 for 16-bit activations, otherwise of
their dtype; parameters are of either. With ``per_instance``, which ``statistics``, ``local_forward`` and
``local_backward`` take, each sample has statistics of its own, and vectors are of shape (batch * channel,), with the
channels of one sample after another's. Ops raise ValueError or TypeError before they write anything, and bump the
version counters of what they have written.

Callers that go below autograd (`torch._C._AutoDispatchBelowADInplaceOrView`) bump versions themselves, with
`torch.autograd.graph.increment_version`. Errors are a ValueError or a RuntimeError there, depending on torch's release.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from inplace_abn import _torch

_BUILD_SOURCE = "pip install --no-build-isolation -e ."

__all__ = [
    "backward",
    "backward_out",
    "backward_reduce",
    "backward_reduce_out",
    "check",
    "combine",
    "forward",
    "forward_out",
    "inverse",
    "local_backward",
    "local_forward",
    "local_forward_out",
    "run",
    "statistics",
    "translated",
    "with_cuda",
]

_FOLDER = Path(__file__).parent
_NEVER_BUILT = (
    f"inplace_abn's compiled modules do not exist in {_FOLDER}: this source tree was never built. "
    f"Build it: `{_BUILD_SOURCE}`"
)

_kernels = _FOLDER / "_kernels.so"
if not _kernels.exists():
    raise ImportError(_NEVER_BUILT)
try:
    torch.ops.load_library(str(_kernels))
except OSError as error:
    raise ImportError(
        f"inplace_abn's kernels cannot be loaded under torch {torch.__version__}; they were built for another "
        f"platform, or for a later torch. Build them again from their source tree: `{_BUILD_SOURCE}`. "
        f"The loader said: {error}"
    ) from error

with_cuda: bool = _torch.has_kernel("inplace_abn::forward", "CUDA")
"""Whether the kernels are there for CUDA, too."""

statistics = torch.ops.inplace_abn.statistics.default
combine = torch.ops.inplace_abn.combine.default
forward = torch.ops.inplace_abn.forward.default
forward_out = torch.ops.inplace_abn.forward.out
local_forward = torch.ops.inplace_abn.local_forward.default
local_forward_out = torch.ops.inplace_abn.local_forward.out
backward_reduce = torch.ops.inplace_abn.backward_reduce.default
backward_reduce_out = torch.ops.inplace_abn.backward_reduce.out
backward = torch.ops.inplace_abn.backward.default
backward_out = torch.ops.inplace_abn.backward.out
local_backward = torch.ops.inplace_abn.local_backward.default
inverse = torch.ops.inplace_abn.inverse.default
check = torch.ops.inplace_abn.check.default


def translated(raised: Exception) -> Exception:
    """The kernels' complaint as what it is; anything else as it was raised. The class of an exception does not survive
    the way from there in every release of torch, the words do (``checks.h``)."""
    message = str(raised)
    if not message.startswith("inplace_abn::"):
        return raised
    if "dtype" in message:
        return TypeError(message)
    return RuntimeError(message) if "it overlaps" in message else ValueError(message)


def run(op: Any, written: Sequence[Tensor], *args: Any, **kwargs: Any) -> Any:
    """Calls an op below autograd, which has no part in it, and tells autograd what it wrote."""
    if torch.compiler.is_compiling() or _torch.transforms_active():
        with torch.no_grad():
            return op(*args, **kwargs)
    try:
        with _torch.BelowAutograd():
            result = op(*args, **kwargs)
    except (ValueError, RuntimeError) as raised:
        raise translated(raised) from None
    increment_version(written)
    return result


_library = torch.library.Library("inplace_abn", "IMPL")


def _bump_versions(library: torch.library.Library, op: Any) -> None:
    """Has calls of ``op`` from elsewhere bump the version counters of what its schema says is written."""
    arguments = list(enumerate(_torch.schema_of(op).arguments))
    mutated = [(i, a) for i, a in arguments if a.alias_info is not None and a.alias_info.is_write]
    positions = [i for i, a in mutated if not a.kwarg_only]
    names = [a.name for _, a in mutated if a.kwarg_only]

    def call(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            result = op.redispatch(keyset & _torch.BELOW_AUTOGRAD, *args, **kwargs)
        except (ValueError, RuntimeError) as raised:
            raise translated(raised) from None
        written = (*map(args.__getitem__, positions), *map(kwargs.get, names))
        increment_version([t for t in written if t is not None])
        return result

    library.impl(op, call, "ADInplaceOrView", with_keyset=True)


for _op in (
    statistics,
    combine,
    forward,
    forward_out,
    local_forward,
    local_forward_out,
    backward_reduce,
    backward_reduce_out,
    backward,
    backward_out,
    local_backward,
    inverse,
    check,
):
    _bump_versions(_library, _op)


# What the kernels check of shapes, dtypes and devices, for calls that are traced instead of computed.


def _stats_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _check_shape(name: str, t: Tensor, expected: Sequence[int]) -> None:
    torch._check_value(
        t.dim() == len(expected),
        lambda: f"inplace_abn: expected {name} of shape {tuple(expected)}, got {tuple(t.shape)}",
    )
    for size, wanted in zip(t.shape, expected, strict=True):
        torch._check_value(
            size == wanted, lambda: f"inplace_abn: expected {name} of shape {tuple(expected)}, got {tuple(t.shape)}"
        )


def _check_dtype(name: str, t: Tensor, *expected: torch.dtype) -> None:
    torch._check_type(
        t.dtype in expected,
        lambda: f"inplace_abn: expected {name} of dtype {' or '.join(map(str, expected))}, got {t.dtype}",
    )


def _check_device(name: str, t: Tensor, like: Tensor) -> None:
    torch._check_value(
        t.device == like.device, lambda: f"inplace_abn: expected {name} on {like.device}, got {t.device}"
    )


def _check_activations(name: str, t: Tensor) -> None:
    torch._check_value(
        t.dim() >= 2, lambda: f"inplace_abn: expected {name} of shape (batch, channel, *), got {tuple(t.shape)}"
    )
    _check_dtype(name, t, torch.float64, torch.float32, torch.bfloat16, torch.float16)


def _check_like(x: Tensor, **tensors: Tensor | None) -> None:
    for name, t in tensors.items():
        if t is not None:
            _check_shape(name, t, x.shape)
            _check_dtype(name, t, x.dtype)
            _check_device(name, t, x)


def _vector_size(x: Tensor, per_instance: bool) -> int:
    return x.shape[0] * x.shape[1] if per_instance else x.shape[1]


def _check_channels(x: Tensor, per_instance: bool = False, **tensors: Tensor | None) -> None:
    for name, t in tensors.items():
        if t is not None:
            _check_shape(name, t, (_vector_size(x, per_instance),))
            _check_dtype(name, t, _stats_dtype(x.dtype), x.dtype)
            _check_device(name, t, x)


def _check_both_or_neither(**tensors: Tensor | None) -> None:
    given = [name for name, t in tensors.items() if t is not None]
    torch._check_value(
        len(given) != 1, lambda: f"inplace_abn: expected {' and '.join(tensors)} both or neither, got only {given[0]}"
    )


def _check_running(
    x: Tensor, running_mean: Tensor | None, running_var: Tensor | None, per_instance: bool = False
) -> None:
    _check_both_or_neither(running_mean=running_mean, running_var=running_var)
    _check_channels(x, per_instance, running_mean=running_mean, running_var=running_var)


def _check_momentum(x: Tensor, momentum: Tensor | None) -> None:
    if momentum is not None:
        _check_dtype("momentum", momentum, torch.float64)
        _check_device("momentum", momentum, x)


def _channel_statistics(x: Tensor, per_instance: bool = False) -> tuple[Tensor, Tensor]:
    shape, dtype = (_vector_size(x, per_instance),), _stats_dtype(x.dtype)
    return x.new_empty(shape, dtype=dtype), x.new_empty(shape, dtype=dtype)


def _statistics(x: Tensor, per_instance: bool = False) -> tuple[Tensor, Tensor]:
    _check_activations("x", x)
    return _channel_statistics(x, per_instance)


def _combine(
    gathered: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    momentum_tensor: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    torch._check_value(
        gathered.dim() == 2,
        lambda: f"inplace_abn: expected gathered of shape (parts, 2 * channels + 1), got {tuple(gathered.shape)}",
    )
    torch._check_value(
        gathered.shape[1] % 2 == 1,
        lambda: f"inplace_abn: expected gathered of shape (parts, 2 * channels + 1), got {tuple(gathered.shape)}",
    )
    _check_dtype("gathered", gathered, torch.float64, torch.float32)
    channels = (gathered.shape[1] - 1) // 2
    like = gathered.new_empty((0, channels), dtype=gathered.dtype if running_mean is None else running_mean.dtype)
    _check_running(like, running_mean, running_var)
    _check_momentum(gathered, momentum_tensor)
    return gathered.new_empty((channels,)), gathered.new_empty((channels,)), gathered.new_empty(())


def _check(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
) -> None:
    _check_activations("x", x)
    _check_channels(x, weight=weight, bias=bias)
    _check_like(x, residual=residual)
    _check_running(x, running_mean, running_var)


def _forward(
    x: Tensor,
    mean: Tensor,
    var: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    *_: object,
    z: Tensor | None = None,
) -> None:
    _check_activations("x", x)
    _check_channels(x, mean=mean, var=var, weight=weight, bias=bias)
    _check_like(x, residual=residual, z=z)


def _local_forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    momentum_tensor: Tensor | None,
    eps: float,
    signed_weight: bool,
    activation: int,
    activation_param: float,
    invertible: bool,
    per_instance: bool = False,
    *,
    z: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    _check_activations("x", x)
    _check_channels(x, per_instance, weight=weight, bias=bias)
    _check_like(x, residual=residual, z=z)
    _check_running(x, running_mean, running_var, per_instance)
    _check_momentum(x, momentum_tensor)
    return _channel_statistics(x, per_instance)


def _backward_reduce(
    y_act: Tensor,
    dy_act: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    *_: object,
    xhat: Tensor | None = None,
    dy: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    _check_activations("y_act", y_act)
    _check_like(y_act, dy_act=dy_act, residual=residual, xhat=xhat, dy=dy)
    _check_channels(y_act, weight=weight, bias=bias)
    return _channel_statistics(y_act)


def _backward(
    xhat: Tensor,
    dy: Tensor,
    var: Tensor,
    weight: Tensor | None,
    eps: float,
    signed_weight: bool,
    mean_dy: Tensor | None,
    mean_xhat_dy: Tensor | None,
    *,
    dx: Tensor | None = None,
) -> None:
    _check_activations("xhat", xhat)
    _check_like(xhat, dy=dy, dx=dx)
    _check_both_or_neither(mean_dy=mean_dy, mean_xhat_dy=mean_xhat_dy)
    _check_channels(xhat, var=var, weight=weight, mean_dy=mean_dy, mean_xhat_dy=mean_xhat_dy)


def _local_backward(
    y_act: Tensor,
    dy_act: Tensor,
    var: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    eps: float,
    signed_weight: bool,
    activation: int,
    activation_param: float,
    training: bool,
    per_instance: bool = False,
    *,
    dx: Tensor | None = None,
    dweight: Tensor | None = None,
    dbias: Tensor | None = None,
    dresidual: Tensor | None = None,
    xhat: Tensor | None = None,
) -> None:
    _check_activations("y_act", y_act)
    _check_like(y_act, dy_act=dy_act, residual=residual, dx=dx, dresidual=dresidual, xhat=xhat)
    _check_channels(y_act, per_instance, var=var, weight=weight, bias=bias, dweight=dweight, dbias=dbias)
    torch._check_value(
        dweight is None or weight is not None, lambda: "inplace_abn: dweight was asked for without a weight"
    )
    torch._check_value(
        xhat is None or dx is not None, lambda: "inplace_abn: memory for xhat was given, but no dx was asked for"
    )


def _inverse(z: Tensor, activation: int, activation_param: float) -> Tensor:
    _check_activations("z", z)
    return torch.empty_like(z, dtype=_stats_dtype(z.dtype))


_FAKES: dict[str, Callable[..., Any]] = {
    "statistics": _statistics,
    "combine": _combine,
    "forward": _forward,
    "forward.out": _forward,
    "local_forward": _local_forward,
    "local_forward.out": _local_forward,
    "backward_reduce": _backward_reduce,
    "backward_reduce.out": _backward_reduce,
    "backward": _backward,
    "backward.out": _backward,
    "local_backward": _local_backward,
    "inverse": _inverse,
    "check": _check,
}

for _name, _fake in _FAKES.items():
    torch.library.register_fake(f"inplace_abn::{_name}", _fake)
