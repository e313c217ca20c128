"""The activations of ``include/inplace_abn/activation.h`` for compilers. The comments there describe the tags.

z with its tag is computed in plain torch. y is computed from z in plain torch only where that is a multiplication.
Other inverses call the kernels in one op, because backward reads y more than once, and compilers compute what they fuse
as often as it is read.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from inplace_abn.activations import TANH_CUBIC, TANH_SCALE, activate, bits, find, is_relu, relu_slope
from inplace_abn.kernels import ops

_library = torch.library.Library("inplace_abn", "FRAGMENT")
# The op takes any strides. Without flexible_layout compilers would copy z into the strides that it had before they
# chose others.
_library.define("untagged(Tensor z, str activation, float param) -> Tensor", tags=(torch.Tag.flexible_layout,))

UNTAGGED = torch.ops.inplace_abn.untagged.default

_library.impl(
    UNTAGGED,
    lambda z, activation, param: ops.run(ops.inverse, [], z, find(activation).code, param),
    "CompositeExplicitAutograd",
)
torch.library.register_fake(
    UNTAGGED, lambda z, *_: torch.empty_like(z, dtype=torch.promote_types(z.dtype, torch.float32)), lib=_library
)


def tagged(y: Tensor, activation: str, param: float, dtype: torch.dtype) -> Tensor:
    """z of y with its tag, rounded to ``dtype``. y is in the dtype of the arithmetic: float64, or otherwise float32."""
    if is_relu(activation, param):
        # -inf becomes zero. No other y does, because compilers do not keep the sign of a zero.
        trace = (y * relu_slope(dtype)).abs()
        if dtype == torch.float16:
            trace = torch.where(y < torch.finfo(dtype).min, 0.0, trace)
        trace = torch.where(y == -math.inf, 0.0, -trace.clamp_min(_LEAST_TRACE.get(dtype, torch.finfo(dtype).tiny)))
        return torch.where(y <= _LARGEST_ZERO.get(dtype, 0.0), trace, y).to(dtype)
    if activation == "leaky_relu":
        return torch.where(y > 0, y, -(y * param).abs()).to(dtype)
    if activation == "elu":
        curved = -(param * torch.expm1(y.clamp_max(0))).abs()
        curved = torch.where(y == -math.inf, _elu_of_minus_infinity(param, dtype), curved)
        return torch.where(y > 0, y, curved).to(dtype)
    if activation == "hardswish":
        parabola = y * (torch.where(y < 3, y + 3, 6.0) / 6)
        return _with_flat(torch.where(y <= -3, _flat(y, dtype), parabola), y, activation, dtype)
    if activation in ("silu", "mish"):
        return _with_low_bit(y * _gate(y, activation), y < 0, y < find(activation).special[0], dtype)
    if activation in ("gelu", "gelu_tanh"):
        flat_below = -4.5 if dtype == torch.float16 else -12.0 if activation == "gelu" else -9.0
        curved = y * _gate(y.clamp_min(flat_below), activation)
        return _with_flat(torch.where(y < flat_below, _flat(y, dtype), curved), y, activation, dtype)
    # It has no tags.
    return activate(y, activation, param).to(dtype)


def untagged(z: Tensor, activation: str, param: float) -> Tensor:
    """y of a z that `tagged` returned, in the dtype of the arithmetic."""
    if find(activation).costly:
        y: Tensor = UNTAGGED(z, activation, param)
        return y
    value = z.to(torch.promote_types(z.dtype, torch.float32))
    if activation in ("identity", "none"):
        return value
    if not is_relu(activation, param):
        return torch.where(value < 0, value * (1 / param), value)
    return torch.where(value < 0, value * (1 / relu_slope(z.dtype)), torch.where(value == 0, -math.inf, value))


_LEAST_TRACE = {torch.float16: 2.0**-24}
_LARGEST_ZERO = {torch.float16: 2.0**-25, torch.bfloat16: 2.0**-134}
"""The largest y that is rounded to zero."""


def _elu_of_minus_infinity(alpha: float, dtype: torch.dtype) -> float:
    """The number next to -alpha as it is stored; in more than 16 bits the one after that."""

    def spacing(v: float) -> float:
        return math.ldexp(torch.finfo(dtype).eps, math.frexp(v)[1] - 1)

    v = round(alpha / spacing(alpha)) * spacing(alpha)
    for _ in range(1 if dtype.itemsize == 2 else 2):
        v += spacing(v)
    return -v


def _with_low_bit(z: Tensor, where: Tensor, bit: Tensor, dtype: torch.dtype) -> Tensor:
    """z in ``dtype``; where the first mask is true, a number whose lowest bit is the second mask, in 16 bits the one
    next to z."""
    dropped = {torch.bfloat16: 16, torch.float16: 13}.get(dtype, 0)
    unit = 1 << dropped
    # Numbers below float16's normal ones have the spacing of those that come next.
    base = torch.where(z.abs() < 2.0**-14, 2.0**-14, 0.0) if dtype == torch.float16 else 0.0
    whole = bits(z.abs() + base)
    low = bit.to(whole.dtype) << dropped
    if dropped:
        whole = whole + (unit - low)
    # The result is no view of other memory, because nobody could write to such a view.
    tagged = ((whole & ~(2 * unit - 1)) | low).view(z.dtype) - base
    return torch.where(where, torch.copysign(tagged, z), z).to(dtype)


def _gate(y: Tensor, activation: str) -> Tensor:
    """z / y."""
    if activation == "gelu":
        return _mass_below(y)
    if activation == "mish":
        e = torch.exp(y.clamp_max(20))
        n = e * (e + 2)
        return n / (n + 2)
    return torch.sigmoid(y if activation == "silu" else y * (TANH_SCALE + TANH_SCALE * TANH_CUBIC * y * y))


def _mass_below(y: Tensor) -> Tensor:
    """The standard normal distribution function, for y >= -13. On the CPU compilers have no quick erfc."""
    if y.dtype == torch.float64:
        return 0.5 * torch.erfc(-math.sqrt(0.5) * y)
    x = y.abs().clamp_max(13)
    p, q = (functools.reduce(lambda t, c: t * x + c, coefficients) for coefficients in NORMAL_TAIL)
    tail = torch.exp(-0.5 * x * x) * p / q
    return torch.where(y < 0, tail, 1 - tail)


NORMAL_TAIL: tuple[tuple[Any, ...], ...] = (
    (-6.447454575e-09, 0.003365038376, 0.03532799512, 0.1670219378, 0.4154312874, 0.5),
    (0.008433957828, 0.08857840752, 0.4267284878, 1.133594852, 1.628747221, 1.0),
)
"""The polynomials of the mass beyond x, as in ``fits.h``, from the highest power on."""


def _flat(y: Tensor, dtype: torch.dtype) -> Tensor:
    """The values of the flat part: tiny numbers, which are zeros to the next layer."""
    return torch.where(y == -math.inf, math.nan, (y * -relu_slope(dtype)).clamp_max(_flat_tagged(dtype) / 2))


def _with_flat(value: Tensor, y: Tensor, activation: str, dtype: torch.dtype) -> Tensor:
    tagged_below = y < find(activation).special[0]
    return _with_low_bit(value, (y < 0) | (value < _flat_tagged(dtype)), tagged_below, dtype)


def _flat_tagged(dtype: torch.dtype) -> float:
    """The bound below which positive values carry the bit."""
    return 0.5 if dtype == torch.float16 else 2.0**-8
