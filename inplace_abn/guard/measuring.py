"""The measurements of the guard (`inplace_abn.guard`), and the calls in which it can measure."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from inplace_abn import _torch, reference
from inplace_abn.activations import IDENTITY
from inplace_abn.guard import recovery
from inplace_abn.guard.figures import THRESHOLDS, packed
from inplace_abn.guard.recovery import Errors
from inplace_abn.kernels import ops
from inplace_abn.settings import Operands, Settings, running_statistics

_KINDS = (Tensor, nn.Parameter)


def uses_own_statistics(module: Any) -> bool:
    """Whether a call normalises by the statistics of its input, and not by running ones.

    As in torch, an InstanceNorm whose ``track_running_stats`` is False does so, even if it has running statistics.
    """
    given_up = module.per_instance and not module.track_running_stats
    return bool(module.training or given_up or None in running_statistics(module))


def is_measurable(module: Any, x: Tensor, residual: Tensor | None) -> bool:
    """Whether `is_suitable` is true and no tracer, transform or capture is watching."""
    if _torch.transforms_active() or _torch.is_captured() or not is_suitable(module, x, residual):
        return False
    # Selective checkpointing makes calls out of place. It would also count the measurement's ops among those that it
    # computes again.
    if _torch.count_dispatch_modes() > 0 and _torch.is_checkpointed_selectively():
        return False
    return not _torch.is_capturing(x)


def is_suitable(module: Any, x: Tensor, residual: Tensor | None, empty: bool = False) -> bool:
    """Whether the ops take these tensors.

    ``empty`` says that x may have too few values for statistics, as a rank's share of a batch may.
    """
    if type(x) not in _KINDS or x.layout is not torch.strided:
        return False
    dtype, device, shape = x.dtype, x.device, x.shape
    if dtype not in THRESHOLDS or not ops.run_on(device) or len(shape) < 2 or x.is_neg():
        return False
    channels = shape[1]
    if channels != module.num_features:
        return False
    buffers, training = running_statistics(module), uses_own_statistics(module)
    statistics = channels * shape[0] // module.shared if module.per_instance else channels
    if not empty and x.numel() <= (statistics if training else 0):
        return False
    if residual is not None and (
        type(residual) not in _KINDS
        or (residual.shape, residual.dtype, residual.device) != (shape, dtype, device)
        or residual.is_neg()
    ):
        return False
    for t in (*module.scale_and_offset(), *buffers):
        if t is not None and (t.dim() != 1 or t.size(0) != channels or t.device != device):
            return False
        # float64 combines with no other dtype.
        if t is not None and t.dtype is not dtype and (t.dtype is not torch.float32 or dtype is torch.float64):
            return False
    return True


def measure(module: Any, x: Tensor, residual: Tensor | None, activation: tuple[str, float] | None = None) -> Tensor:
    """What `figures.packed` returns, on x's device. The host does not wait for it.

    ``activation`` is what follows, if the module does not know it.
    """
    name, param = (module.activation, module.activation_param) if activation is None else activation
    return observe(module, x).figures(name, param, residual)


class Observation(NamedTuple):
    """What a measurement needs of a call. It is taken before the call's x is overwritten."""

    x: Tensor
    """A sample of the call's x."""
    channels: int
    mean: Tensor
    var: Tensor
    weight: Tensor | None
    bias: Tensor | None
    settings: Settings
    """Those of the call. If samples have their own statistics, the channels of all samples are channels of the x here.
    """

    def figures(self, activation: str, param: float, residual: Tensor | None) -> Tensor:
        """What `figures.packed` returns, for the activation and the residual that follow. The host does not wait.

        It can be called once only, because it overwrites x.
        """
        settings, weight, bias = self.settings.activating((activation, param)), self.weight, self.bias
        with torch.no_grad(), _torch.unwatched():
            added = None if residual is None else recovery.sample(residual, settings.per_instance)
            if settings.per_instance:
                samples = self.mean.numel() // self.channels
                weight, bias = (reference.repeated(t, samples) for t in (weight, bias))
            errors = recovery.measured(self.x, self.mean, self.var, Operands(weight, bias, added), settings)
            of_weight, of_dx = (t.unflatten(-1, (-1, self.channels)) for t in errors)
            # The worst sample of each channel counts. Errors of dx are shares of what all samples have.
            return packed(Errors(of_weight.amax(0), of_dx.sum(1)), self.weight, self.bias, settings)


def observe(module: Any, x: Tensor) -> Observation:
    """What a measurement needs of a call."""
    running, training = running_statistics(module), uses_own_statistics(module)
    with torch.no_grad(), _torch.unwatched():
        shared = module.shared if training else 0
        found = ops.run(ops.statistics, [], x, shared) if training else running
        mean, var = cast("tuple[Tensor, Tensor]", found)
        if shared > 0:
            mean, var = (t.view(len(x), -1)[recovery.looked_at(x)].flatten() for t in (mean, var))
        sample = recovery.sample(x, shared > 0)
    settings = Settings(*IDENTITY, module.eps, int(module.signed_weight), training, None, shared)
    return Observation(sample, x.shape[1], mean, var, module.weight, module.bias, settings)
