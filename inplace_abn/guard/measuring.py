"""The measurements of the guard (`inplace_abn.guard`): of norms of channels, and of norms of rows."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from inplace_abn import _torch, checkpoints, reference
from inplace_abn.activations import IDENTITY
from inplace_abn.guard import recovery
from inplace_abn.guard.figures import THRESHOLDS, packed
from inplace_abn.guard.recovery import PIECE, SAMPLE, Errors
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
    if checkpoints.are_selective():
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
            of_weight, of_dx, silent = (t.unflatten(-1, (-1, self.channels)) for t in errors)
            # The worst sample of each channel counts. Errors of dx are shares of what all samples have.
            errors = Errors(of_weight.amax(0), of_dx.sum(1), silent.all(0))
            return packed(errors, self.weight, self.bias, settings)


def measure(
    module: Any,
    x: Tensor,
    residual: Tensor | None,
    activation: tuple[str, float] | None = None,
    statistics: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """What `figures.packed` returns, on x's device. The host does not wait for it.

    Args:
        activation: what follows, if the module does not know it.
        statistics: the mean and the variance of the call; None if they are x's own, or the running ones.
    """
    training = uses_own_statistics(module)
    with torch.no_grad(), _torch.unwatched():
        shared = module.shared if training else 0
        if statistics is None:
            found = ops.run(ops.statistics, [], x, shared) if training else running_statistics(module)
            statistics = cast("tuple[Tensor, Tensor]", found)
        mean, var = statistics
        if shared > 0:
            mean, var = (t.view(len(x), -1)[recovery.sampled_images(x)].flatten() for t in statistics)
        sample = recovery.sample(x, shared > 0)
    settings = Settings(*IDENTITY, module.eps, int(module.signed_weight), training, None, shared)
    observation = Observation(sample, x.shape[1], mean, var, module.weight, module.bias, settings)
    name, param = (module.activation, module.activation_param) if activation is None else activation
    return observation.figures(name, param, residual)


# Norms of rows (`inplace_abn.reference`) are measured in the same way, with these differences. A row is what shares
# statistics, and a channel is a value of each row. Nothing but the output is recovered, because no activation is
# inverted. And xhat comes from x by the formula, so the figures also tell whether the output is that of the norm.


@torch.no_grad()
def figures_of_rows(x: Tensor, y: Tensor, weight: Tensor | None, bias: Tensor | None, settings: Settings) -> Tensor:
    """What `guard.figures.packed` returns, on x's device. The host does not wait for it.

    Args:
        x, y: the call's input, and the output as it is kept; of shape (\\*, channel).
        weight, bias: what y was computed with.
    """
    places, channels, (x, y) = _places(x), x.shape[-1], (t.flatten(0, -2) for t in (x, y))
    gamma = x.new_ones(channels, dtype=torch.float64) if weight is None else weight.double()
    sums, is_unknown = gamma.new_zeros(8, channels), torch.zeros((), dtype=torch.bool, device=x.device)
    piece = PIECE if x.is_cpu else SAMPLE
    for rows in places.split(max(1, piece // channels)):
        own = x[rows].double()
        is_unknown |= ~own.isfinite().all()
        recovered = reference.recovered_rows(y[rows], weight, bias, None, None, y.dtype).double()
        rstd = reference.inverse_std_of_rows(own, settings.rows, settings.eps)
        xhat = reference.standardised_rows(own, rstd, settings.rows, slice(None))
        sums += _sums(xhat, recovered, rstd, gamma)
    errors, sizes, off, size = sums.split((4, 2, 1, 1))
    errors, sizes = errors.view(2, 2, -1), sizes.sum(dim=-1).view(2, 1, 1)
    of_dx, of_weight = (torch.where(t == 0, 0.0, t / of_all) for t, of_all in ((errors, sizes), (off[0], size.mean())))
    of_dx = of_dx.nan_to_num(math.inf, math.inf).masked_fill(is_unknown, math.nan).flatten(0, 1)
    # Where eps is most of the variance, xhat is small as a whole.
    of_weight = of_weight.sqrt().nan_to_num(math.inf, math.inf)
    # A weight next to zero says nothing of xhat, whatever xhat is in these rows.
    is_lost = gamma.abs() < max(torch.finfo(y.dtype).tiny, reference.LEAST_WEIGHT)
    silent = recovery.is_silent(size[0] / max(1, len(places)), of_weight)
    return packed(Errors(of_weight.masked_fill(is_lost, math.inf), of_dx, silent), weight, bias, settings)


def _sums(xhat: Tensor, recovered: Tensor, rstd: Tensor, gamma: Tensor) -> Tensor:
    """Sums over the rows, of shape (8, channel): the squared errors of dx for each share and dy, the squares of the
    gradients of xhat for each share, and the squares of the errors of xhat and of xhat."""
    # A row of large variance has a small share in dx, unless its dy is larger by the same factor.
    shares = rstd.square(), torch.ones_like(rstd)
    # For dy that follow xhat, and y.
    gradients = torch.stack([gamma * xhat, gamma.abs() * xhat])
    error = recovered * (gradients * recovered).mean(dim=-1, keepdim=True)
    error.sub_(xhat * (gradients * xhat).mean(dim=-1, keepdim=True)).square_()
    sizes = gradients[:1].square_()
    of_dx = [(t * share).sum(dim=-2) for t in (error, sizes) for share in shares]
    return torch.cat([*of_dx, *((t.square().sum(dim=0, keepdim=True)) for t in (recovered - xhat, xhat))])


def _places(x: Tensor) -> Tensor:
    """Some of the rows, which do not all lie at one place of each sample."""
    count, size = x[..., 0].numel(), x.shape[-2]
    step = max(1, count * x.shape[-1] // SAMPLE)
    while step > 1 and math.gcd(step, size) > 1:
        step += 1
    return torch.arange(0, count, step, device=x.device)
