"""Activations of ``include/inplace_abn/activation.h`` in plain torch, for compilers: z with the tag that backward
reads, and y of such a z. The comments there say what the tags are."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from inplace_abn.activations import is_relu, relu_slope

_SILU_Y_MIN, _SILU_Z_MIN = -1.278464542761073795109, -0.278464542761073795109
_SILU_LINEAR = 16.5
_SILU_RIGHT = (
    (
        *(_SILU_Y_MIN / _SILU_Z_MIN - 1, 1.421279771, -6.898257018, 5.393788729),
        *(-2.018399442, 0.4121394733, -0.04446465469, 0.001995855829),
    ),
    (1.0, 3.425958432, 1.810002694, -2.036858452, 0.6847381629, 0.2338370767, -0.1685507621, 0.05301717945),
)
_SILU_LEFT = (
    (
        *(_SILU_Y_MIN, -1.38495864, -0.7860682847, -0.5171114352),
        *(-0.2587693651, -0.1000689545, -0.0407343991, -0.01659320357),
    ),
    (1.0, -0.1674627701, 0.3756572495, -0.01221117955, 0.03883811447, 0.01662759059, -4.306202744e-07, 2.207227856e-09),
)
"""Numerator and denominator of ``FineSiluFit``, on either side of the minimum."""

_BITS = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
}


def tagged(y: Tensor, activation: str, param: float, dtype: torch.dtype) -> Tensor:
    """z of y, rounded to ``dtype``.

    Args:
        y: of any shape, in the dtype of the arithmetic: float64 for float64, otherwise float32.
        activation, param: as in `inplace_abn.activations`.
        dtype: of the result.
    """
    if is_relu(activation, param):
        trace = torch.where(y < torch.finfo(dtype).min, 0.0, y * relu_slope(dtype))
        return torch.where(y > 0, y, -trace.abs()).to(dtype)
    if activation == "leaky_relu":
        return torch.where(y > 0, y, -(y * param).abs()).to(dtype)
    if activation == "elu":
        return torch.where(y > 0, y, -(param * torch.expm1(y.clamp_max(0))).abs()).to(dtype)
    if activation == "silu":
        z = (y * torch.sigmoid(y)).to(dtype)
        return _with_low_bit(z, y < 0, y < _SILU_Y_MIN)
    if activation == "hardswish":
        threshold = _hardswish_tagged(dtype)
        parabola = y * (torch.where(y < 3, y + 3, 6.0) / 6)
        flat = (y * -relu_slope(dtype)).clamp_max(threshold / 2)
        value = torch.where(y <= -3, flat, parabola)
        return _with_low_bit(value.to(dtype), (y < 0) | (value < threshold), y < -1.5)
    assert activation in ("identity", "none"), activation
    return y.to(dtype)


def untagged(z: Tensor, activation: str, param: float) -> Tensor:
    """y of what `tagged` returned, in the dtype of the arithmetic."""
    value = z.to(torch.promote_types(z.dtype, torch.float32))
    if is_relu(activation, param):
        return torch.where(torch.signbit(value), value * (1 / relu_slope(z.dtype)), value)
    if activation == "leaky_relu":
        return torch.where(torch.signbit(value), value * (1 / param), value)
    if activation == "elu":
        return _elu_inverse(value, param, z.dtype)
    if activation == "silu":
        y = _silu_inverse(value, torch.signbit(value) & _low_bit(z))
        return _silu_refined(value, y) if z.dtype == torch.float64 else y
    if activation == "hardswish":
        return _hardswish_inverse(z, value)
    assert activation in ("identity", "none"), activation
    return value


def _with_low_bit(z: Tensor, where: Tensor, bit: Tensor) -> Tensor:
    """z with its lowest bit cleared where the first mask is, and set where the second one is, too."""
    bits = _BITS[z.dtype]
    # No view of other memory, which nobody could write to.
    return torch.where(where, ((z.view(bits) & ~1) | bit.to(bits)).view(z.dtype), z)


def _low_bit(z: Tensor) -> Tensor:
    # Of the magnitude, which has the same: a compiler would see through z itself to the bits that it was made of, and
    # keep a mask of them.
    return (z.abs().view(_BITS[z.dtype]) & 1) != 0


def _elu_inverse(value: Tensor, alpha: float, dtype: torch.dtype) -> Tensor:
    info = torch.finfo(dtype)
    exponent = math.frexp(alpha)[1]
    # A power of two is the least number of its exponent, and the numbers below it lie twice as densely.
    below = exponent - 1 if math.frexp(alpha)[0] == 0.5 else exponent
    saturated = math.log(math.ldexp(0.5, below) * info.eps / 2 / alpha) - 0.5
    floor = -1 + torch.finfo(value.dtype).eps / 2
    ratio = value * (1 / alpha)
    log = torch.log1p(ratio.clamp(floor, 0.0))
    return torch.where(torch.signbit(value), torch.where(ratio < floor, saturated, log), value)


def _silu_inverse(z: Tensor, left: Tensor) -> Tensor:
    possible = z.clamp_min(_SILU_Z_MIN)
    bounded = possible.clamp_max(_SILU_LINEAR)
    tiny = torch.finfo(z.dtype).tiny
    depth = torch.log((possible * (1 / _SILU_Z_MIN)).clamp_min(tiny)).abs()
    t = torch.sqrt(torch.where(left, depth, (bounded - _SILU_Z_MIN).clamp_min(0.0)))

    def polynomial(part: int) -> Tensor:
        result = torch.where(left, _SILU_LEFT[part][-1], _SILU_RIGHT[part][-1])
        for on_left, on_right in zip(_SILU_LEFT[part][-2::-1], _SILU_RIGHT[part][-2::-1], strict=True):
            result = result * t + torch.where(left, on_left, on_right)
        return result

    p, q = polynomial(0), polynomial(1)
    ratio = p / q
    return torch.where(left, ratio, possible * (1 + ratio))


def _silu_refined(z: Tensor, y: Tensor) -> Tensor:
    """A step of Halley's method on y * sigmoid(y) - z, but next to the minimum, where the slope vanishes."""
    y = torch.where(z > _SILU_LINEAR, z, y)
    e = torch.exp(-y.abs()).clamp_min(torch.finfo(z.dtype).tiny)
    d = 1 + e
    a, b = torch.where(y < 0, e, 1.0), torch.where(y < 0, 1.0, e)
    f, slope, bend = y * a - z * d, d + y * b, 2 * d + y * (b - a)
    change = 2 * f * slope * d / (f * b * bend - 2 * a * slope.square())
    return y + torch.where(slope.abs() < 1e-6 * d, 0.0, change)


def _hardswish_tagged(dtype: torch.dtype) -> float:
    """Positive values below it carry the bit."""
    return 0.5 if dtype == torch.float16 else 2.0**-8


def _hardswish_inverse(z: Tensor, value: Tensor) -> Tensor:
    bit, negative = _low_bit(z), torch.signbit(value)
    flat = ~negative & bit & (value < _hardswish_tagged(z.dtype))
    on_range = value.clamp(-0.375, 3.0)
    root = torch.sqrt(9 + 24 * on_range)
    upper = 12 * on_range / (3 + root)
    on_parabola = torch.where(negative & bit, -3 - upper, upper)
    unbounded = torch.where(value >= 3, value, on_parabola)
    return torch.where(flat, value * (-1 / relu_slope(z.dtype)), unbounded)
