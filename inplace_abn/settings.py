"""What a call does, beside its tensors."""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor
from torch.distributed import ProcessGroup

from inplace_abn.ops import backend

_ACTIVATIONS: dict[str, int] = {name: int(value) for name, value in backend.Activation.__members__.items()}
_ACTIVATIONS["none"] = _ACTIVATIONS["identity"]


class Settings(NamedTuple):
    activation: str
    activation_param: float
    eps: float
    signed_weight: bool
    training: bool
    group: ProcessGroup | None

    def arithmetic(self) -> tuple[float, bool, int, float]:
        """The arguments that every op has in common."""
        return self.eps, self.signed_weight, code_of(self.activation), self.activation_param


def code_of(activation: str) -> int:
    """The activation's number in the compiled module. Raises ValueError for an unknown one."""
    code = _ACTIVATIONS.get(activation)
    if code is None:
        raise ValueError(f"inplace_abn: expected activation to be one of {sorted(_ACTIVATIONS)}, got {activation!r}")
    return code


def name_of(code: int) -> str:
    return backend.Activation(code).name


def check_activation(activation: str, activation_param: float) -> None:
    """Raises ValueError for an unknown activation, a negative slope or an alpha that is not positive."""
    code_of(activation)
    if activation == "leaky_relu" and not 0 <= activation_param < math.inf:
        raise ValueError(f"inplace_abn: expected a finite leaky_relu slope >= 0, got {activation_param}")
    if activation == "elu" and not 0 < activation_param < math.inf:
        raise ValueError(f"inplace_abn: expected a finite elu alpha > 0, got {activation_param}")


def check_hyperparameters(eps: float, momentum: float | Tensor | None) -> None:
    """Raises ValueError for an eps that is not positive or a momentum that is not finite."""
    if not 0 < eps < math.inf:
        raise ValueError(f"inplace_abn: expected a finite eps > 0, got {eps}")
    if not isinstance(momentum, Tensor) and momentum is not None and not -math.inf < momentum < math.inf:
        raise ValueError(f"inplace_abn: expected a finite momentum, got {momentum}")
