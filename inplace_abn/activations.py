"""The table of activations: everything that Python knows about each.

Inverses are in ``include/inplace_abn/activation.h``. For compilers, those with tags are in ``compiling/inverses.py``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IDENTITY = ("identity", 0.0)
"""What follows a norm without an activation: its name and parameter."""
DEFAULT_PARAM = 0.01
"""The default of ``activation_param`` of all functions and modules."""
OF_ROUNDED = 1.0
"""What ops take for the parameter of an activation that has none, if its y was rounded before it was activated."""


class Activation(NamedTuple):
    code: int
    """Its number in ``activation.h``."""
    apply: Callable[[Tensor, float, bool], Tensor]
    """z as a function of y, the parameter, and whether y may be overwritten."""
    slope: Callable[[Tensor, float], Tensor]
    """act'(y) as a function of y and the parameter."""
    dead: Callable[[Tensor], Tensor] | None = None
    """Where dy is zero whatever dz is, even infinity or NaN."""
    special: tuple[float, ...] = ()
    """The y next to which z hardly determines y, or the slope: minima, and jumps of the slope."""
    zeros: Literal["", "negative", "positive"] = ""
    """The sign of the tiny numbers that replace zeros in training; empty if zeros stay zeros."""
    straight: bool = False
    """Whether it is made of straight lines."""
    costly: bool = False
    """Whether its inverse takes so long that compilers call the kernels' op for it."""
    op: str = ""
    """The name of torch's op."""
    approximate: str = ""
    """The value of that op's argument ``approximate``; empty if it has none."""
    module: Callable[[float], nn.Module] | None = None
    """Makes torch's module with the parameter."""
    param: str = ""
    """The name of the parameter, in torch's op and in its module; empty if there is none."""
    valid: Callable[[float], bool] = lambda _: True
    """Whether the parameter may have a value."""
    bound: str = ""
    """The same in words."""
    gains: Callable[[float], bool] = lambda _: True
    """Whether torch keeps the input of the activation, and not its result, and the result determines the input."""
    alike_from: float = math.inf
    """The parameter from which on it does not matter for recovery."""
    typical: tuple[float, ...] = (0.0,)
    """The parameters that models have most often."""


def _leaky_relu(y: Tensor, param: float, inplace: bool) -> Tensor:
    return F.relu(y, inplace) if param == 0 else F.leaky_relu(y, param, inplace)


def _silu_slope(y: Tensor, param: float) -> Tensor:
    sigmoid = torch.sigmoid(y)
    return sigmoid * (1 + y * (1 - sigmoid))


TANH_SCALE, TANH_CUBIC = math.sqrt(8 / math.pi), 0.044715
"""The constants of gelu_tanh, which is y * sigmoid(scale * (y + cubic * y^3))."""


def _gelu_slope(y: Tensor, param: float) -> Tensor:
    return 0.5 * torch.erfc(-math.sqrt(0.5) * y) + y * torch.exp(-0.5 * y * y) / math.sqrt(2 * math.pi)


def _gelu_tanh_slope(y: Tensor, param: float) -> Tensor:
    scale, cubic = TANH_SCALE, TANH_SCALE * TANH_CUBIC
    sigmoid = torch.sigmoid(y * (scale + cubic * y * y))
    return sigmoid * (1 + y * (1 - sigmoid) * (scale + 3 * cubic * y * y))


def _mish_slope(y: Tensor, param: float) -> Tensor:
    tanh = torch.tanh(F.softplus(y))
    return tanh + y * (1 - tanh) * (1 + tanh) * torch.sigmoid(y)


def _gelu(approximate: str) -> Callable[[Tensor, float, bool], Tensor]:
    def apply(y: Tensor, _: float, inplace: bool) -> Tensor:
        return torch.ops.aten.gelu_(y, approximate=approximate) if inplace else F.gelu(y, approximate=approximate)

    return apply


ACTIVATIONS: dict[str, Activation] = {
    "identity": Activation(
        0, lambda y, _, __: y, lambda y, _: torch.ones_like(y), straight=True, gains=lambda _: False
    ),
    "leaky_relu": Activation(
        1,
        _leaky_relu,
        lambda y, param: torch.where(y > 0, torch.ones_like(y), param),
        straight=True,
        op="leaky_relu",
        module=lambda param: nn.LeakyReLU(param),
        param="negative_slope",
        valid=lambda param: 0 <= param < math.inf,
        bound="slope >= 0",
        gains=lambda param: param > 0,
        alike_from=2.0**-12,
        typical=(0.01,),
    ),
    "elu": Activation(
        2,
        lambda y, param, inplace: F.elu(y, param, inplace),
        lambda y, param: torch.where(y > 0, 1.0, param * torch.exp(torch.clamp_max(y, 0))),
        costly=True,
        op="elu",
        module=lambda param: nn.ELU(param),
        param="alpha",
        valid=lambda param: 0 < param < math.inf,
        bound="alpha > 0",
        # The slope is z + alpha, so a large alpha costs its digits.
        gains=lambda param: param <= 1,
        typical=(1.0,),
    ),
    "relu": Activation(
        3,
        lambda y, _, inplace: F.relu(y, inplace),
        lambda y, _: torch.ones_like(y),
        dead=lambda y: y <= 0,
        zeros="negative",
        straight=True,
        op="relu",
        module=lambda _: nn.ReLU(),
        gains=lambda _: False,
    ),
    "silu": Activation(
        4,
        lambda y, _, inplace: F.silu(y, inplace),
        _silu_slope,
        special=(-1.278464542761074,),
        costly=True,
        op="silu",
        module=lambda _: nn.SiLU(),
    ),
    "hardswish": Activation(
        5,
        lambda y, _, inplace: F.hardswish(y, inplace),
        lambda y, _: torch.where(y < 3, (2 * y + 3) / 6, 1.0),
        dead=lambda y: y <= -3,
        special=(-1.5, 3.0),
        zeros="positive",
        costly=True,
        op="hardswish",
        module=lambda _: nn.Hardswish(),
    ),
    "gelu": Activation(
        6,
        _gelu("none"),
        _gelu_slope,
        special=(-0.7517915246935645,),
        zeros="positive",
        costly=True,
        op="gelu",
        approximate="none",
        module=lambda _: nn.GELU(),
    ),
    "gelu_tanh": Activation(
        7,
        _gelu("tanh"),
        _gelu_tanh_slope,
        special=(-0.7524614220710163,),
        zeros="positive",
        costly=True,
        op="gelu",
        approximate="tanh",
        module=lambda _: nn.GELU("tanh"),
    ),
    "mish": Activation(
        8,
        lambda y, _, inplace: F.mish(y, inplace),
        _mish_slope,
        special=(-1.192431214515495,),
        costly=True,
        op="mish",
        module=lambda _: nn.Mish(),
    ),
}
ACTIVATIONS["none"] = ACTIVATIONS["identity"]

TYPICAL = [(name, param) for name, entry in ACTIVATIONS.items() for param in entry.typical if name != "none"]
"""All activations, with the parameters that models have most often."""

_OPS = {(entry.op, entry.approximate): name for name, entry in ACTIVATIONS.items() if entry.op}
_NAMES = {activation.code: name for name, activation in ACTIVATIONS.items() if name != "none"}


def find(activation: str) -> Activation:
    """The table's entry. Raises ValueError for an unknown activation."""
    found = ACTIVATIONS.get(activation)
    if found is None:
        raise ValueError(f"inplace_abn: expected activation to be one of {sorted(ACTIVATIONS)}, got {activation!r}")
    return found


def activation_of_op(op: str, approximate: str = "") -> str | None:
    """The activation that torch's op of this name computes with this argument; None if there is none."""
    return _OPS.get((op, approximate))


def of_rounded(activation: tuple[str, float], dtype: torch.dtype) -> tuple[str, float]:
    """An activation and its parameter for the ops where y was rounded to ``dtype`` before it was activated.

    Then backward gives back that y, if no other one has the same z. In 16 bits the difference would have a direction.
    """
    name, _ = activation
    return (name, OF_ROUNDED) if dtype.itemsize == 2 and find(name).special else activation


def name_of(code: int) -> str:
    return _NAMES[code]


def _is_valid(activation: str, param: float) -> bool:
    """Whether an activation exists and takes this parameter. One that has none takes 0, and the default of all
    functions; internally `OF_ROUNDED`. The identity takes any."""
    entry = ACTIVATIONS.get(activation)
    if entry is None or not entry.valid(param):
        return False
    others = (0.0, DEFAULT_PARAM, OF_ROUNDED) if entry.special else (0.0, DEFAULT_PARAM)
    return bool(entry.param) or not entry.op or param in others


# Compilers do not trace a cache.
is_valid = functools.lru_cache(maxsize=256)(_is_valid)


def check_activation(activation: str, activation_param: float) -> None:
    """Raises ValueError for an unknown activation, and for a parameter that it does not take."""
    entry = find(activation)
    if not entry.valid(activation_param):
        raise ValueError(f"inplace_abn: expected a finite {activation} {entry.bound}, got {activation_param}")
    if not _is_valid(activation, activation_param) or (entry.special and activation_param == OF_ROUNDED):
        others = " or ".join(name for name, other in ACTIVATIONS.items() if other.param)
        raise ValueError(
            f"inplace_abn: {activation} has no parameter, got activation_param={activation_param}. Leave it out, or "
            f"use {others}"
        )


def is_relu(activation: str, param: float) -> bool:
    return activation == "relu" or (activation == "leaky_relu" and param == 0)


def in_effect(activation: str, param: float) -> Activation:
    """The entry of the activation; that of relu for a leaky_relu of slope 0."""
    return find("relu" if is_relu(activation, param) else activation)


def gains(activation: str, param: float, dtype: torch.dtype | None = None) -> bool:
    """`Activation.gains`. In float16 a flat tail's tags grow to a quarter with the input, unless a norm limits it."""
    entry = find(activation)
    return entry.gains(param) and (dtype != torch.float16 or entry.zeros == "")


def activate(y: Tensor, activation: str, param: float, inplace: bool = False) -> Tensor:
    """act(y). ``param`` is leaky_relu's slope or elu's alpha."""
    return find(activation).apply(y, param, inplace)


def activation_backward(y: Tensor, dz: Tensor, activation: str, param: float) -> Tensor:
    """dy = dz * act'(y)."""
    entry = in_effect(activation, param)
    dy = dz * entry.slope(y, param)
    return dy if entry.dead is None else torch.where(entry.dead(y), 0.0, dy)


def relu_slope(dtype: torch.dtype) -> float:
    """The factor of relu's negative values, for backward. It is the same as in ``activation.h``."""
    return {torch.float64: 2.0**-300, torch.float16: 2.0**-15}.get(dtype, 2.0**-48)


def bits(t: Tensor) -> Tensor:
    """The bits of each value, as an integer; a view."""
    return t.view({8: torch.int64, 4: torch.int32, 2: torch.int16}[t.element_size()])
