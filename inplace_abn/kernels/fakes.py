"""The ops for calls that are traced instead of computed: they return tensors without values.

One function serves all ops. The names of arguments and of results, in an op's schema, tell what they are. Wrong
arguments are found when the traced call runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from inplace_abn import _torch


def _stats_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _statistic(x: Tensor, size: int) -> Tensor:
    return x.new_empty((size,), dtype=_stats_dtype(x.dtype))


RESULTS: dict[str, Callable[[Tensor, int], Tensor]] = {
    **dict.fromkeys(("mean", "var", "sum_dy", "sum_xhat_dy"), _statistic),
    "count": lambda x, _: x.new_empty((), dtype=_stats_dtype(x.dtype)),
    "y": lambda x, _: torch.empty_like(x, dtype=_stats_dtype(x.dtype)),
}
"""How to make a result, by its name, from an op's first argument and the size of vectors."""


def fake(op: Any) -> Callable[..., Any]:
    """The fake of an op."""
    schema = _torch.schema_of(op)
    names = [argument.name for argument in schema.arguments]
    results = [RESULTS[result.name] for result in schema.returns]

    def call(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs
        x = given[names[0]]
        if names[0] == "gathered":
            # Means, variances and a count, of each part.
            running = given.get("running_mean")
            x = x.new_empty((0, (x.shape[1] - 1) // 2), dtype=x.dtype if running is None else running.dtype)
        size = x.shape[0] * x.shape[1] if given.get("shared") else x.shape[1]
        made = tuple(make(x, size) for make in results)
        return made[0] if len(made) == 1 else made or None

    return call
