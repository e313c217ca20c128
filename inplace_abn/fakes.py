"""The ops for calls that are traced instead of computed.

They check shapes, dtypes and devices as the kernels do, and return tensors without values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


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


FAKES: dict[str, Callable[..., Any]] = {
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
"""The fakes, by the op's name and overload."""
