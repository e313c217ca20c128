"""What a call does, beside its tensors."""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor
from torch.distributed import ProcessGroup

from inplace_abn import activations


class Settings(NamedTuple):
    activation: str
    activation_param: float
    eps: float
    signed_weight: bool
    training: bool
    group: ProcessGroup | None
    per_instance: bool = False
    """Whether each sample has statistics of its own. Vectors then have the channels of one sample after another's."""

    def activating(self, activation: tuple[str, float]) -> Settings:
        """These with another activation and its parameter."""
        return self._replace(activation=activation[0], activation_param=activation[1])

    def arithmetic(self) -> tuple[float, bool, int, float]:
        """The arguments that every op has in common."""
        return self.eps, self.signed_weight, activations.find(self.activation).code, self.activation_param


def check_hyperparameters(eps: float, momentum: float | Tensor | None) -> None:
    """Raises ValueError for an eps that is not positive or a momentum that is not finite."""
    if not 0 < eps < math.inf:
        raise ValueError(f"inplace_abn: expected a finite eps > 0, got {eps}")
    if not isinstance(momentum, Tensor) and momentum is not None and not -math.inf < momentum < math.inf:
        raise ValueError(f"inplace_abn: expected a finite momentum, got {momentum}")
