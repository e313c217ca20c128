"""Activations of ``include/inplace_abn/activation.h`` in plain torch, for compilers: z with the tag that backward
reads, and y of such a z. The comments there say what the tags are."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from inplace_abn.activations import TANH_CUBIC, TANH_SCALE, find, is_relu, relu_slope
from inplace_abn.fits import FITS, Fit

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
    if activation == "hardswish":
        parabola = y * (torch.where(y < 3, y + 3, 6.0) / 6)
        return _with_flat(torch.where(y <= -3, _flat(y, dtype), parabola), y, -1.5, dtype)
    if activation in FITS:
        y_min, flat_below = FITS[activation].y_min, _flat_below(activation, dtype)
        if flat_below is None:
            return _with_low_bit((y * _gate(y, activation)).to(dtype), y < 0, y < y_min)
        curved = y * _gate(y.clamp_min(flat_below), activation)
        return _with_flat(torch.where(y < flat_below, _flat(y, dtype), curved), y, y_min, dtype)
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
    if activation == "hardswish":
        return torch.where(_is_flat(z, value), value * (-1 / relu_slope(z.dtype)), _hardswish_inverse(z, value))
    if activation in FITS:
        y = _curve_inverse(value, torch.signbit(value) & _low_bit(z), FITS[activation])
        y = _refined(value, y, activation) if z.dtype == torch.float64 else y
        if _flat_below(activation, z.dtype) is None:
            return y
        return torch.where(_is_flat(z, value), value * (-1 / relu_slope(z.dtype)), y)
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


def _gate(y: Tensor, activation: str) -> Tensor:
    """z / y."""
    if activation == "gelu":
        return 0.5 * torch.erfc(-math.sqrt(0.5) * y)
    if activation == "mish":
        e = torch.exp(y.clamp_max(20))
        n = e * (e + 2)
        return n / (n + 2)
    return torch.sigmoid(y if activation == "silu" else y * (TANH_SCALE + TANH_SCALE * TANH_CUBIC * y * y))


def _flat_below(activation: str, dtype: torch.dtype) -> float | None:
    """From where on z would underflow."""
    if activation not in ("gelu", "gelu_tanh"):
        return None
    return -4.5 if dtype == torch.float16 else -12.0 if activation == "gelu" else -9.0


def _curve_inverse(z: Tensor, left: Tensor, fit: Fit) -> Tensor:
    possible = z.clamp_min(fit.z_min)
    bounded = possible.clamp_max(fit.linear)
    tiny = torch.finfo(z.dtype).tiny
    depth = torch.log((possible * (1 / fit.z_min)).clamp_min(tiny)).abs()
    root = torch.sqrt(torch.where(left, depth, (bounded - fit.z_min).clamp_min(0.0)))
    t = root - torch.where(left, 0.0, fit.centre)

    def polynomial(part: int) -> Tensor:
        result = torch.where(left, fit.left[part][-1], fit.right[part][-1])
        for on_left, on_right in zip(fit.left[part][-2::-1], fit.right[part][-2::-1], strict=True):
            result = result * t + torch.where(left, on_left, on_right)
        return result

    ratio = polynomial(0) / polynomial(1)
    return torch.where(possible > fit.linear, possible, torch.where(left, ratio, possible * ratio))


def _refined(z: Tensor, y: Tensor, activation: str) -> Tensor:
    """Steps of Newton's method on y - z / gate(y), but next to the minimum, where the slope vanishes."""
    for _ in range(3):
        gate = _gate(y, activation).clamp_min(torch.finfo(z.dtype).tiny)
        relative = find(activation).slope(y, 0.0) / gate
        y = y - torch.where(relative.abs() > 1e-6, (y - z / gate) / relative, 0.0)
    return y


def _flat(y: Tensor, dtype: torch.dtype) -> Tensor:
    """What is zero to the next layer."""
    return (y * -relu_slope(dtype)).clamp_max(_flat_tagged(dtype) / 2)


def _with_flat(value: Tensor, y: Tensor, y_min: float, dtype: torch.dtype) -> Tensor:
    return _with_low_bit(value.to(dtype), (y < 0) | (value < _flat_tagged(dtype)), y < y_min)


def _is_flat(z: Tensor, value: Tensor) -> Tensor:
    return ~torch.signbit(value) & _low_bit(z) & (value < _flat_tagged(z.dtype))


def _flat_tagged(dtype: torch.dtype) -> float:
    """Positive values below it carry the bit."""
    return 0.5 if dtype == torch.float16 else 2.0**-8


def _hardswish_inverse(z: Tensor, value: Tensor) -> Tensor:
    on_range = value.clamp(-0.375, 3.0)
    root = torch.sqrt(9 + 24 * on_range)
    upper = 12 * on_range / (3 + root)
    on_parabola = torch.where(torch.signbit(value) & _low_bit(z), -3 - upper, upper)
    return torch.where(value >= 3, value, on_parabola)
