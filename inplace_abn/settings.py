"""The arguments of a call besides x."""

from __future__ import annotations

import math
import os
from array import array
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from inplace_abn import activations
from inplace_abn.reference import AT_LEAST_EPS as AT_LEAST_EPS
from inplace_abn.reference import MAGNITUDE as MAGNITUDE
from inplace_abn.reference import WEIGHT as WEIGHT
from inplace_abn.reference import repeated

DISABLED: bool = os.environ.get("INPLACE_ABN_DISABLE") == "1"
"""Whether every call is out of place, for debugging."""


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

    def require_grad(self, x: Tensor) -> bool:
        """Whether a call of x needs a graph."""
        if torch.is_grad_enabled():
            for t in (x, self.weight, self.bias, self.residual):
                if isinstance(t, Tensor) and t.requires_grad:
                    return True
        return False

    def of_samples(self, x: Tensor) -> Operands:
        """The operands with running statistics for each sample of x; itself if there are none."""
        if self.running_mean is None or self.running_var is None or x.dim() == 0:
            return self
        mean, var = repeated(self.running_mean, len(x)), repeated(self.running_var, len(x))
        return self._replace(running_mean=mean, running_var=var)

    def take_means(self, each: Operands) -> None:
        """Sets the running statistics to the means over samples. An empty batch leaves them unchanged."""
        for own, of_each in ((self.running_mean, each.running_mean), (self.running_var, each.running_var)):
            if own is not None and of_each is not None and of_each.numel() > 0:
                with torch.no_grad():
                    own.copy_(of_each.view(-1, len(own)).mean(dim=0))


class Channels:
    """Some of the channels of a layer, in ascending order, and tensors that say which, made once for each device."""

    __slots__ = ("_places", "numbers", "size")

    def __init__(self, numbers: Iterable[int] = (), size: int = 0) -> None:
        self.numbers: tuple[int, ...] = tuple(numbers)
        self.size: int = size
        """The number of channels that the layer has."""
        self._places: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def __len__(self) -> int:
        return len(self.numbers)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Channels) and self.numbers == other.numbers

    def __hash__(self) -> int:
        return hash(self.numbers)

    def __reduce__(self) -> tuple[Any, ...]:
        return Channels, (self.numbers, self.size)

    def places(self, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
        """Where each channel of the layer is among them, or -1, int64 of shape (size,); and their numbers, int64 of
        shape (len(self),). None if there are none."""
        if not self.numbers:
            return None, None
        found = self._places.get(device)
        if found is None:
            # Backward may save them in a later call.
            with torch.inference_mode(False):
                # torch.tensor would copy the numbers one by one.
                indices = torch.frombuffer(array("q", self.numbers), dtype=torch.int64)
                rows = torch.full((self.size,), -1, dtype=torch.int64, device="cpu")
                rows[indices] = torch.arange(len(self.numbers), device="cpu")
                found = self._places[device] = _moved(rows, device), _moved(indices, device)
        return found

    def rows(self, device: torch.device) -> Tensor | None:
        """The first of `places`."""
        return self.places(device)[0]


def _moved(t: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device, for which the host does not wait."""
    return (t.pin_memory() if device.type == "cuda" else t).to(device, non_blocking=True)


class ChannelSlots(NamedTuple):
    """Channels for compiled code. They may change without a new program, as far as there is room."""

    rows: Tensor
    """The first of `Channels.places`."""
    channels: Tensor
    """The second, and any numbers where there is room left."""


WHOLE = -1
"""The value of `Settings.shared` if a tensor is one channel, as for an activation without a norm."""


class Settings(NamedTuple):
    """How a call computes."""

    activation: str
    activation_param: float
    eps: float
    scale: int
    """`MAGNITUDE`, `AT_LEAST_EPS` or `WEIGHT`."""
    training: bool
    group: ProcessGroup | None
    shared: int = 0
    """How many neighbouring channels of a sample share statistics; 0 if statistics are of the batch; `WHOLE`.

    The vectors that ops take and return then hold the channels of all samples, sample after sample.
    """
    name: str = ""
    """The layer's, for messages; empty if it is not known."""
    verbatim: Channels | None = None
    """The channels whose xhat is saved for backward, because z does not determine it. None means none: compilers
    may refuse a default that is no constant."""
    rows: str = ""
    """The norm of rows: "layer" or "rms" (`reference`); empty for norms over batch and space."""

    @property
    def per_instance(self) -> bool:
        """Whether each sample has its own statistics."""
        return self.shared > 0

    def activating(self, activation: tuple[str, float]) -> Settings:
        """The settings with another activation and its parameter."""
        return Settings._make((*activation, *self[2:]))

    def saved(self, device: torch.device) -> tuple[Tensor | None, int]:
        """`Channels.rows` of the channels of ``verbatim``, and how many they are."""
        channels = self.verbatim
        return (channels.rows(device), len(channels)) if channels else (None, 0)

    def arithmetic(self) -> tuple[float, int, int, float]:
        """The arguments that every op has in common."""
        return self.eps, self.scale, activations.find(self.activation).code, self.activation_param


class Names(NamedTuple):
    """The names of a norm's attributes, and what its class was registered to compute
    (`inplace_abn.conversion.formulas.register_norm`)."""

    weight: str = "weight"
    bias: str = "bias"
    eps: str = ""
    """Empty for the usual names."""
    kind: str = ""
    """"layer" or "rms"; empty for a class that was not registered."""
    offset: float = 0.0


NAMES: dict[type, Names] = {}
"""Those of registered classes."""


def names_of(kind: type) -> Names:
    """The names of a class, or of the registered class that it is made of."""
    return next((NAMES[base] for base in kind.__mro__ if base in NAMES), _DEFAULT)


_DEFAULT = Names()


def parameters(module: Any) -> tuple[Tensor | None, Tensor | None]:
    """The weight and the bias of a norm at this moment; None for what it has not.

    Wrappers replace parameters by plain tensors (FSDP, pruning) or compute them whenever they are read (parametrize).
    """
    weight, bias = names_of(type(module))[:2] if NAMES else ("weight", "bias")
    held, own = module._parameters, module.__dict__
    if weight in held and bias in held and weight not in own and bias not in own:
        return held[weight], held[bias]
    return _present(module, weight), _present(module, bias)


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
