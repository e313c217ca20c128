"""The ops for calls that are traced instead of computed.

One function serves all ops. It checks arguments as the kernels do, by their names in the op's schema, and returns
tensors without values. The names of results tell what they are, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from inplace_abn import _torch


def _stats_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _check_shape(name: str, t: Tensor, fits: Any, expected: object) -> None:
    torch._check_value(fits, lambda: f"inplace_abn: expected {name} of shape {expected}, got {tuple(t.shape)}")


def _check_dtype(name: str, t: Tensor, *expected: torch.dtype) -> None:
    if t.dtype not in expected:
        wanted = " or ".join(map(str, expected))
        raise TypeError(f"inplace_abn: expected {name} of dtype {wanted}, got {t.dtype}")


def _check(name: str, t: Tensor, x: Tensor, shape: Sequence[int] | None, dtypes: Sequence[torch.dtype]) -> None:
    if shape is not None:
        _check_shape(name, t, t.dim() == len(shape), tuple(shape))
        for size, wanted in zip(t.shape, shape, strict=True):
            _check_shape(name, t, size == wanted, tuple(shape))
    _check_dtype(name, t, *dtypes)
    if t.device != x.device:
        raise ValueError(f"inplace_abn: expected {name} on {x.device}, got {t.device}")


def _activations(name: str, t: Tensor, _: Tensor | None) -> Tensor:
    _check_shape(name, t, t.dim() >= 2, "(batch, channel, *)")
    _check_dtype(name, t, torch.float64, torch.float32, torch.bfloat16, torch.float16)
    return t


def _gathered(name: str, t: Tensor, running: Tensor | None) -> Tensor:
    """An empty x with these statistics."""
    _check_shape(name, t, t.dim() == 2 and t.shape[1] % 2 == 1, "(parts, 2 * channels + 1)")
    _check_dtype(name, t, torch.float64, torch.float32)
    return t.new_empty((0, (t.shape[1] - 1) // 2), dtype=t.dtype if running is None else running.dtype)


def _statistic(x: Tensor, size: int) -> Tensor:
    return x.new_empty((size,), dtype=_stats_dtype(x.dtype))


FIRST: dict[str, Callable[[str, Tensor, Tensor | None], Tensor]] = {
    **dict.fromkeys(("x", "y_act", "xhat", "z", "y"), _activations),
    "gathered": _gathered,
}
"""What an op's first argument must be, by its name. Returns the x that others are compared with."""
OTHERS: dict[str, Callable[[Tensor, int], tuple[Sequence[int] | None, Sequence[torch.dtype]]] | None] = {
    **dict.fromkeys(("dy_act", "residual", "z", "xhat", "dy", "dx", "dresidual"), lambda x, _: (x.shape, (x.dtype,))),
    **dict.fromkeys(
        ("mean", "var", "weight", "bias", "running_mean", "running_var", "mean_dy", "mean_xhat_dy", "dweight", "dbias"),
        lambda x, size: ((size,), (_stats_dtype(x.dtype), x.dtype)),
    ),
    "rstd": lambda x, _: (x.shape[:1], (_stats_dtype(x.dtype),)),
    "momentum_tensor": lambda *_: (None, (torch.float64,)),
    "rows": lambda x, _: (x.shape[1:2], (torch.int64,)),
    "verbatim": lambda x, _: (None, (x.dtype,)),
    **dict.fromkeys(("momentum", "eps", "scale", "activation", "activation_param")),
    **dict.fromkeys(("invertible", "training", "shared", "centred", "is_xhat")),
}
"""The shape and the dtypes that another argument may have, by its name. ``size`` is that of vectors. None for numbers:
a compiler may not know their values."""
RESULTS: dict[str, Callable[[Tensor, int], Tensor]] = {
    **dict.fromkeys(("mean", "var", "sum_dy", "sum_xhat_dy"), _statistic),
    "count": lambda x, _: x.new_empty((), dtype=_stats_dtype(x.dtype)),
    "y": lambda x, _: torch.empty_like(x, dtype=_stats_dtype(x.dtype)),
}
_PAIRS = (("running_mean", "running_var"), ("mean_dy", "mean_xhat_dy"), ("rows", "verbatim"))
_NEEDS = (
    ("dweight", "weight", "dweight was asked for without a weight"),
    ("dbias", "bias", "dbias was asked for without a bias"),
    ("xhat", "dx", "memory for xhat was given, but no dx was asked for"),
)


def fake(op: Any) -> Callable[..., Any]:
    """The fake of an op."""
    schema = _torch.schema_of(op)
    names = [argument.name for argument in schema.arguments]
    results = [RESULTS[result.name] for result in schema.returns]

    def call(*args: Any, **kwargs: Any) -> Any:
        given = dict.fromkeys(names) | dict(zip(names, args, strict=False)) | kwargs
        x = FIRST[names[0]](names[0], given[names[0]], given.get("running_mean"))
        for pair in _PAIRS:
            present = [name for name in pair if given.get(name) is not None]
            if len(present) == 1:
                raise ValueError(f"inplace_abn: expected {' and '.join(pair)} both or neither, got only {present[0]}")
        size = x.shape[0] * x.shape[1] if given.get("shared") else x.shape[1]
        for name in names[1:]:
            expected, t = OTHERS[name], given[name]
            if expected is not None and t is not None:
                # Users know a momentum that is a tensor by the name of the number.
                _check(name.removesuffix("_tensor"), t, x, *expected(x, size))
        for name, other, message in _NEEDS:
            if given.get(name) is not None and other in given and given[other] is None:
                raise ValueError(f"inplace_abn: {message}")
        made = tuple(make(x, size) for make in results)
        return made[0] if len(made) == 1 else made or None

    return call
