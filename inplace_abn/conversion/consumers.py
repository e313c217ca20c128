"""The functions that keep what they are given for backward, whatever made it.

If one of them follows a norm, the norm keeps its output, which costs nothing, and its input is free. torch's norm would
keep the input as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class _Keeper(NamedTuple):
    """How a function names its first arguments, and which of them it keeps."""

    names: tuple[str, ...]
    kept: tuple[str, ...]
    """The arguments that it keeps."""
    factors: bool = False
    """Whether it keeps each of the two only if the other one needs a gradient, because they are multiplied."""
    narrow: bool = False
    """Whether autocast makes it compute in 16 bits."""
    wide: str = ""
    """The kind of devices on which autocast makes it compute in float32."""


_UNARY = _Keeper(("input",), ("input",))
_PRODUCT = _Keeper(("input", "other"), ("input", "other"), factors=True)
_MM = _Keeper(("input", "mat2"), ("input", "mat2"), factors=True, narrow=True)

_KEEPERS: list[tuple[_Keeper, tuple[Any, ...]]] = [
    # The gradient of the weight is a product with the input. A convolution keeps both, whatever needs a gradient.
    (
        _Keeper(("input", "weight"), ("input",), narrow=True),
        (F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d),
    ),
    (_Keeper(("input", "weight"), ("input", "weight"), factors=True, narrow=True), (F.linear,)),
    (_PRODUCT._replace(narrow=True), (torch.matmul, Tensor.matmul, Tensor.__matmul__)),
    (_MM, (torch.mm, Tensor.mm, torch.bmm, Tensor.bmm)),
    (_PRODUCT, (torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__, torch.multiply, Tensor.multiply)),
    # The slope depends on the input.
    (_Keeper(("input", "weight"), ("input",), narrow=True), (F.prelu, Tensor.prelu)),
    (_Keeper(("input", "min_val", "max_val", "inplace"), ("input",)), (F.hardtanh,)),
    (_Keeper(("input", "inplace"), ("input",)), (F.relu6, F.hardsigmoid, F.selu)),
    (_Keeper(("input", "alpha", "inplace"), ("input",)), (F.celu,)),
    (_Keeper(("input", "threshold", "value", "inplace"), ("input",)), (F.threshold,)),
    (_UNARY, (F.logsigmoid, F.softsign, F.hardshrink, F.softshrink, F.glu)),
    (_UNARY._replace(wide="cuda"), (F.softplus,)),
    (_UNARY, (torch.abs, Tensor.abs, torch.square, Tensor.square, torch.sin, Tensor.sin, torch.cos, Tensor.cos)),
    (_UNARY, (torch.clamp, Tensor.clamp)),
    # The gradient is scattered into the input's shape, or compared with the input.
    (_UNARY, (torch.max_pool1d, torch.max_pool2d, F.max_pool1d, F.max_pool2d, F.avg_pool1d, F.avg_pool2d)),
    (_UNARY, (F.adaptive_max_pool1d, F.adaptive_max_pool2d)),
    (_UNARY._replace(wide="cpu"), (torch.max_pool3d, F.max_pool3d, F.avg_pool3d)),
    # Another norm. RMSNorm keeps a copy of 16 bits in 32.
    (_UNARY._replace(wide="cuda"), (F.layer_norm, F.group_norm)),
    (_UNARY, (F.batch_norm, F.instance_norm)),
]

KEEPING: dict[Any, _Keeper] = {function: keeper for keeper, functions in _KEEPERS for function in functions}


def kept(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The arguments that autograd keeps for the backward pass of this call."""
    keeper = KEEPING.get(function)
    if keeper is None or not torch.is_grad_enabled():
        return []
    # Arguments beyond those with a name do not matter.
    values = dict(zip(keeper.names, args, strict=False))
    for name, value in kwargs.items():
        values[keeper.names[0] if name == "self" else name] = value
    if values.get("inplace"):
        return []
    found: list[Tensor] = []
    for i, name in enumerate(keeper.kept):
        t, other = values.get(name), values.get(keeper.kept[i - 1])
        needed = not keeper.factors or (isinstance(other, Tensor) and other.requires_grad)
        if isinstance(t, Tensor) and needed and not _is_cast(t, keeper):
            found.append(t)
    return found


def dtype_for(function: Any, t: Tensor) -> torch.dtype:
    """The dtype in which the function gets the tensor: that of 16 bits if autocast gives it a copy."""
    keeper = KEEPING.get(function)
    if keeper is None or not keeper.narrow or not torch.is_autocast_enabled(t.device.type):
        return t.dtype
    return torch.get_autocast_dtype(t.device.type)


def _is_cast(t: Tensor, keeper: _Keeper) -> bool:
    """Whether autocast gives the function a copy in another dtype, which is kept instead."""
    device = t.device.type
    if not torch.is_autocast_enabled(device) or t.dtype == torch.float64:
        return False
    if keeper.narrow:
        return t.dtype != torch.get_autocast_dtype(device)
    return keeper.wide == device and t.dtype != torch.float32
