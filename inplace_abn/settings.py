"""The arguments of a call besides x."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed import ProcessGroup

from inplace_abn import activations


class Operands(NamedTuple):
    """The tensors of a call besides x, and the momentum. Running statistics are updated.

    Shapes and dtypes are those of `inplace_abn.functions.inplace_abn`.
    """

    weight: Tensor | None
    bias: Tensor | None
    residual: Tensor | None = None
    running_mean: Tensor | None = None
    running_var: Tensor | None = None
    momentum: float | Tensor = 0.0

    def tensors(self) -> tuple[Tensor | None, ...]:
        """All tensors of the call besides x, as most ops take them."""
        return self[:5]

    def of_graph(self) -> tuple[Tensor | None, ...]:
        """Those that may need a gradient: weight, bias and residual."""
        return self[:3]

    def momentum_arguments(self) -> tuple[float, Tensor | None]:
        """The momentum as the ops take it: as a number, or as a tensor if only the device knows it."""
        return (0.0, self.momentum) if isinstance(self.momentum, Tensor) else (self.momentum, None)


class Settings(NamedTuple):
    """How a call computes."""

    activation: str
    activation_param: float
    eps: float
    signed_weight: bool
    training: bool
    group: ProcessGroup | None
    shared: int = 0
    """How many neighbouring channels of a sample share statistics; 0 if statistics are of the batch.

    The vectors that ops take and return then hold the channels of all samples, sample after sample.
    """
    name: str = ""
    """The layer's, for messages; empty if it is not known."""
    verbatim: tuple[int, ...] = ()
    """Channels whose xhat is saved for backward, because z does not determine it. Samples have their own statistics."""
    rows: str = ""
    """The norm of rows: "layer" or "rms" (`reference`); empty for norms over batch and space."""

    @property
    def per_instance(self) -> bool:
        """Whether each sample has its own statistics."""
        return self.shared > 0

    def activating(self, activation: tuple[str, float]) -> Settings:
        """The settings with another activation and its parameter."""
        return Settings._make((*activation, *self[2:]))

    def arithmetic(self) -> tuple[float, bool, int, float]:
        """The arguments that every op has in common."""
        return self.eps, self.signed_weight, activations.find(self.activation).code, self.activation_param


def parameters(module: Any) -> tuple[Tensor | None, Tensor | None]:
    """The weight and the bias of a norm at this moment; None for what it has not.

    Wrappers replace parameters by plain tensors (FSDP, pruning) or compute them whenever they are read (parametrize).
    """
    held, own = module._parameters, module.__dict__
    if "weight" in held and "bias" in held and "weight" not in own and "bias" not in own:
        return held["weight"], held["bias"]
    return _present(module, "weight"), _present(module, "bias")


def running_statistics(module: Any) -> tuple[Tensor | None, Tensor | None]:
    """The running mean and the running variance of a norm at this moment; None for what it has not."""
    held, own = module._buffers, module.__dict__
    if "running_mean" in held and "running_var" in held and "running_mean" not in own and "running_var" not in own:
        return held["running_mean"], held["running_var"]
    return _present(module, "running_mean"), _present(module, "running_var")


def counted_batches(module: Any) -> Tensor | None:
    """The counter of batches of a norm at this moment; None if it has none."""
    batches: Tensor | None = _present(module, "num_batches_tracked")
    return batches


def _present(module: Any, name: str) -> Any:
    """An attribute of a module; None if it has none of that name. For those ``getattr`` takes microseconds."""
    if hasattr(type(module), name):
        return getattr(module, name)
    places = module.__dict__, module._parameters, module._buffers
    return next((held[name] for held in places if name in held), None)


def check_hyperparameters(eps: float, momentum: float | Tensor | None) -> None:
    """Raises ValueError for an eps that is not positive or a momentum that is not finite."""
    if not 0 < eps < math.inf:
        raise ValueError(f"inplace_abn: expected a finite eps > 0, got {eps}")
    if not isinstance(momentum, Tensor) and momentum is not None and not -math.inf < momentum < math.inf:
        raise ValueError(f"inplace_abn: expected a finite momentum, got {momentum}")
