"""The table of activations: everything that Python knows about each. Their inverses are in
``include/inplace_abn/activation.h``."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Activation(NamedTuple):
    code: int
    """Its number in ``activation.h``."""
    apply: Callable[[Tensor, float, bool], Tensor]
    """z of y, the parameter, and whether y may be overwritten."""
    slope: Callable[[Tensor, float], Tensor]
    """act'(y) of y and the parameter."""
    dead: Callable[[Tensor], Tensor] | None = None
    """Where the gradient is zero whatever arrives, infinity and NaN included."""
    special: tuple[float, ...] = ()
    """The y next to which z tells little of y, or of the slope: minima, and jumps of the slope."""


def _leaky_relu(y: Tensor, param: float, inplace: bool) -> Tensor:
    return F.relu(y, inplace) if param == 0 else F.leaky_relu(y, param, inplace)


def _silu_slope(y: Tensor, param: float) -> Tensor:
    sigmoid = torch.sigmoid(y)
    return sigmoid * (1 + y * (1 - sigmoid))


def _not_positive(y: Tensor) -> Tensor:
    return y <= 0


ACTIVATIONS: dict[str, Activation] = {
    "identity": Activation(0, lambda y, _, __: y, lambda y, _: torch.ones_like(y)),
    "leaky_relu": Activation(1, _leaky_relu, lambda y, param: torch.where(y > 0, torch.ones_like(y), param)),
    "elu": Activation(
        2,
        lambda y, param, inplace: F.elu(y, param, inplace),
        lambda y, param: torch.where(y > 0, 1.0, param * torch.exp(torch.clamp_max(y, 0))),
    ),
    "relu": Activation(
        3, lambda y, _, inplace: F.relu(y, inplace), lambda y, _: torch.ones_like(y), dead=_not_positive
    ),
    "silu": Activation(4, lambda y, _, inplace: F.silu(y, inplace), _silu_slope, special=(-1.278464542761074,)),
    "hardswish": Activation(
        5,
        lambda y, _, inplace: F.hardswish(y, inplace),
        lambda y, _: torch.where(y < 3, (2 * y + 3) / 6, 1.0),
        dead=lambda y: y <= -3,
        special=(-1.5, 3.0),
    ),
}
ACTIVATIONS["none"] = ACTIVATIONS["identity"]

_NAMES = {activation.code: name for name, activation in ACTIVATIONS.items() if name != "none"}


def find(activation: str) -> Activation:
    """The table's entry. Raises ValueError for an unknown activation."""
    found = ACTIVATIONS.get(activation)
    if found is None:
        raise ValueError(f"inplace_abn: expected activation to be one of {sorted(ACTIVATIONS)}, got {activation!r}")
    return found


def name_of(code: int) -> str:
    return _NAMES[code]


def check_activation(activation: str, activation_param: float) -> None:
    """Raises ValueError for an unknown activation, a negative slope or an alpha that is not positive."""
    find(activation)
    if activation == "leaky_relu" and not 0 <= activation_param < math.inf:
        raise ValueError(f"inplace_abn: expected a finite leaky_relu slope >= 0, got {activation_param}")
    if activation == "elu" and not 0 < activation_param < math.inf:
        raise ValueError(f"inplace_abn: expected a finite elu alpha > 0, got {activation_param}")


def activate(y: Tensor, activation: str, param: float, inplace: bool = False) -> Tensor:
    """act(y). ``param`` is leaky_relu's slope or elu's alpha."""
    return find(activation).apply(y, param, inplace)


def activation_backward(y: Tensor, dz: Tensor, activation: str, param: float) -> Tensor:
    """dy = dz * act'(y)."""
    name = "relu" if activation == "leaky_relu" and param == 0 else activation
    entry = find(name)
    dy = dz * entry.slope(y, param)
    return dy if entry.dead is None else torch.where(entry.dead(y), 0.0, dy)


def exactly(y: Tensor, activation: str, param: float) -> Tensor:
    """act(y) to y's precision: torch's kernel of hardswish for CUDA multiplies doubles by a sixth of float's precision,
    too."""
    return y * (y + 3).clamp(0, 6) / 6 if activation == "hardswish" else activate(y, activation, param)


def is_relu(activation: str, param: float) -> bool:
    return activation == "relu" or (activation == "leaky_relu" and param == 0)


def can_be_taken_back(activation: str, param: float, dtype: torch.dtype) -> bool:
    """Whether y is known within a rounding once it was activated for backward. In float16 negative values lose bits."""
    if dtype == torch.float16:
        return False
    return is_relu(activation, param) or (activation == "leaky_relu" and param >= 2.0**-12)


def take_back(z: Tensor, activation: str, param: float) -> None:
    """Writes y over z, where that `can_be_taken_back`."""
    F.leaky_relu_(z, 1.0 / (relu_slope(z.dtype) if is_relu(activation, param) else param))


def relu_slope(dtype: torch.dtype) -> float:
    """What relu's negative values are multiplied by for backward: as in ``activation.h``."""
    return {torch.float64: 2.0**-300, torch.float16: 2.0**-15}.get(dtype, 2.0**-48)
