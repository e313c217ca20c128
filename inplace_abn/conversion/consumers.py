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


class Keeper(NamedTuple):
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

    def dtype_for(self, t: Tensor) -> torch.dtype:
        """The dtype of what the function gets instead of the tensor, if autocast gives it a copy."""
        device = t.device.type
        if not (self.narrow or self.wide) or not torch.is_autocast_enabled(device) or t.dtype == torch.float64:
            return t.dtype
        if self.narrow:
            return torch.get_autocast_dtype(device)
        return torch.float32 if self.wide == device else t.dtype


_UNARY = Keeper(("input",), ("input",))
_PRODUCT = Keeper(("input", "other"), ("input", "other"), factors=True)
_MM = Keeper(("input", "mat2"), ("input", "mat2"), factors=True, narrow=True)

_KEEPERS: list[tuple[Keeper, tuple[Any, ...]]] = [
    # The gradient of the weight is a product with the input. A convolution keeps both, whatever needs a gradient.
    (
        Keeper(("input", "weight"), ("input",), narrow=True),
        (F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d),
    ),
    (Keeper(("input", "weight"), ("input", "weight"), factors=True, narrow=True), (F.linear,)),
    (_PRODUCT._replace(narrow=True), (torch.matmul, Tensor.matmul, Tensor.__matmul__)),
    (_MM, (torch.mm, Tensor.mm, torch.bmm, Tensor.bmm)),
    (_PRODUCT, (torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__, torch.multiply, Tensor.multiply)),
    # The slope depends on the input.
    (Keeper(("input", "weight"), ("input",), narrow=True), (F.prelu, Tensor.prelu)),
    (Keeper(("input", "min_val", "max_val", "inplace"), ("input",)), (F.hardtanh,)),
    (Keeper(("input", "inplace"), ("input",)), (F.relu6, F.hardsigmoid, F.selu)),
    (Keeper(("input", "alpha", "inplace"), ("input",)), (F.celu,)),
    (Keeper(("input", "threshold", "value", "inplace"), ("input",)), (F.threshold,)),
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

KEEPING: dict[Any, Keeper] = {function: keeper for keeper, functions in _KEEPERS for function in functions}


def kept(keeper: Keeper, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The arguments that autograd keeps for the backward pass of this call."""
    if not torch.is_grad_enabled():
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
        if isinstance(t, Tensor) and needed and keeper.dtype_for(t) == t.dtype:
            found.append(t)
    return found
