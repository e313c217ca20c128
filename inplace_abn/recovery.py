"""Recovery: how exactly backward recovers xhat and the activation's slope from the rounded z.

z is rounded, so the recovered xhat, (inverse(z) - residual - beta) / gamma, has an error. The error is large where the
activation saturates, where |beta| is much larger than |gamma|, where gamma is nearly zero, and next to minima. Its
effect on the gradients depends on dz, and is largest where dz follows xhat. Two figures measure this effect, relative
to an exact backward:

- ``x``, of the whole layer: the error of dx, relative to gamma / sqrt(var + eps) * dy, each as the root mean square
  over all channels. Channels enter with their scale, as in dx. Four dz are considered, and the largest error counts:
  xhat, slope * xhat, and both times sqrt(var + eps), because dz may follow x instead of xhat.
- ``weight``, of each channel: the error of dweight that the worst dz causes, relative to |xhat| |dy|. The worst channel
  counts, because an average would hide a channel whose weight is driven the wrong way.

Both figures come from the ops that training runs. `measured` uses values of the current batch. `predicted` uses a
normal distribution, where there are no data. Source of the scheme: arXiv 1712.02616.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from inplace_abn import ops, reference
from inplace_abn.activations import Activation, find
from inplace_abn.settings import Settings

_SAMPLE = 1 << 17
"""About the number of values that `sample` takes of a larger batch."""
_NODES = 1024
_REACH = 4.7
"""A prediction covers this many standard deviations. One value in 400,000 lies beyond, and a channel of a large batch
has about as many. Errors of a saturated activation grow faster than the density falls, so a wider range would count
values that no batch has."""
_DENSITY = 1e4
"""How much denser the values of a prediction lie next to minima and jumps, where few values cause most of the error."""
_MEAN, _VAR = 0.37, 1.7
"""Mean and variance of the input for predictions. With 0 and 1, y would often be a number that a 16-bit dtype holds
exactly, and its rounding would not show."""


class Errors(NamedTuple):
    """Relative errors that recovering xhat from z causes; float64."""

    x: Tensor
    """The error of dx over the layer; of shape ()."""
    weight: Tensor
    """The error of each channel's dweight; of shape (channel,)."""

    def worst(self) -> Tensor:
        """The larger of the layer's figure and its worst channel's; of shape ()."""
        return torch.maximum(self.x, self.weight.max())


def sample(t: Tensor, per_instance: bool = False) -> Tensor:
    """A copy of some values of ``t``, which has shape (batch, channel, \\*).

    The values are spread over batch and space, and have shape (1, channel, n). With ``per_instance`` they are spread
    over space, and have shape (1, batch * channel, n).
    """
    values = t.detach().flatten(2) if t.dim() > 2 else t.detach().unsqueeze(2)
    batch, channels, size = values.shape
    if per_instance:
        step = max(1, size // max(1, _SAMPLE // max(1, batch * channels)))
        return values[:, :, ::step].reshape(1, batch * channels, -1).clone(memory_format=torch.contiguous_format)
    step = max(1, batch * size // max(1, _SAMPLE // max(1, channels)))
    # With a common divisor the values could all lie in one column of the images, or at one place of all images.
    while math.gcd(step, size) > 1:
        step += 1
    places = torch.arange(0, batch * size, step, device=t.device)
    found = values[places // max(1, size), :, places % max(1, size)]
    return found.t().unsqueeze(0).clone(memory_format=torch.contiguous_format)


def measured(
    x: Tensor,
    mean: Tensor,
    var: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    settings: Settings,
) -> Errors:
    """The errors of recovering xhat on these values.

    The figures are on x's device, and the host does not wait for them.

    Args:
        x: inputs of shape (batch, channel, \\*), dtype float64, float32, bfloat16 or float16. Overwritten.
        mean: (channel,), the mean that x's batch is normalised with; float32, or float64 for a float64 x.
        var: like mean.
        weight: (channel,) or None.
        bias: (channel,) or None.
        residual: of x's shape and dtype, or None.
        settings: of the layer.

    Raises:
        ValueError: a wrong shape.
        TypeError: a dtype that is not supported or does not combine with x's.

    Source: arXiv 1712.02616.
    """
    return _errors(_moments(x, mean, var, weight, bias, residual, settings, None))


class _Moments(NamedTuple):
    """Mean squares of each channel; of shape (channel,)."""

    x_error: Tensor
    x: Tensor
    steep_error: Tensor
    steep: Tensor
    weight_error: Tensor
    slope: Tensor
    spread: Tensor
    """The variance of x, plus eps."""


def _errors(moments: _Moments) -> Errors:
    errors = torch.stack([moments.x_error, moments.steep_error])
    sizes = torch.stack([moments.x, moments.steep])
    # A channel of large variance has a small share in dx, unless its dz is larger by the same factor.
    layer = [_ratio((errors * share).sum(dim=1), (sizes * share).sum(dim=1)).max() for share in (1.0, moments.spread)]
    return Errors(torch.sqrt(torch.maximum(*layer)), torch.sqrt(_ratio(moments.weight_error, moments.slope)))


def _ratio(error: Tensor, size: Tensor) -> Tensor:
    """error / size. It is 0 where there is no error, and infinite where only the recovered values are not finite."""
    error = torch.where(error.isnan() & size.isfinite(), math.inf, error)
    return torch.where(error == 0, 0.0, error / size)


def _moments(
    x: Tensor,
    mean: Tensor,
    var: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    settings: Settings,
    density: Tensor | None,
) -> _Moments:
    """The moments behind `Errors`. Overwrites x.

    ``density`` is the share of each value in the averages, with a sum of 1, of a shape that broadcasts against x. With
    None all values have the same share.
    """
    entry = find(settings.activation)
    if settings.activation == "leaky_relu" and settings.activation_param == 0:
        entry = find("relu")
    inv_std = torch.rsqrt(var.double() + settings.eps)
    gamma = torch.ones_like(inv_std)
    if weight is not None:
        gamma = reference.gamma(weight.detach().double(), settings.eps, settings.signed_weight)
    xhat = (x.double() - reference.per_channel(mean.double(), x)) * reference.per_channel(inv_std, x)
    y = xhat * reference.per_channel(gamma, x)
    if bias is not None:
        y += reference.per_channel(bias.detach().double(), x)
    affine = y
    if residual is not None:
        y = y + residual
    slope, torchs = (_slope(entry, t, settings.activation_param) for t in (y, y.to(x.dtype).double()))
    ops.run(ops.forward, [x], x, mean, var, weight, bias, residual, *settings.arithmetic(), True)
    recovered_xhat, recovered = _recovered(x, weight, bias, residual, settings)
    # Where the slope jumps, the rounding of y decides on which side it lies, in torch as well. The nearer slope counts.
    slope = torch.where((recovered - torchs).abs() < (recovered - slope).abs(), torchs, slope)

    def average(t: Tensor) -> Tensor:
        return reference.channel_mean(t) if density is None else reference.channel_sum(t * density)

    def seen(t: Tensor) -> Tensor:
        return reference.per_channel(t, x)

    # dx is the sum of dy, a multiple of y and a constant. It rounds once more, in the precision of the arithmetic.
    unit = torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps / 2
    rounding = unit**2 / 3 * average(affine.square()) / gamma.square()
    # A slope that is too small for the dtype counts as zero, and must not make the relative error large.
    least = torch.finfo(x.dtype).smallest_normal ** 2
    scale = (gamma * inv_std).square()

    def of_dx(dz: Tensor) -> tuple[Tensor, Tensor]:
        dy = slope * dz
        error = recovered * dz - dy
        added = torch.zeros_like(scale)
        if settings.training:
            projection, recovered_projection = average(xhat * dy), average(recovered_xhat * recovered * dz)
            error -= seen(average(error)) + recovered_xhat * seen(recovered_projection) - xhat * seen(projection)
            added = rounding * projection.square()
        size = average(dy.square()) + least * average(dz.square())
        return (average(error.square()) + added) * scale, size * scale

    return _Moments(
        *of_dx(xhat),
        *of_dx(slope * xhat),
        average((recovered_xhat * recovered - xhat * slope).square()),
        average(slope.square()) + least,
        var.double() + settings.eps,
    )


def _slope(entry: Activation, y: Tensor, param: float) -> Tensor:
    slope = entry.slope(y, param)
    return slope if entry.dead is None else torch.where(entry.dead(y), 0.0, slope)


def _recovered(
    z: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, settings: Settings
) -> tuple[Tensor, Tensor]:
    """xhat and the slope as backward has them before it rounds to z's dtype; float64 of z's shape.

    Each value is passed as a channel of its own. Then the op's sums, which are at least float32, are the slope and its
    product with xhat. Where the slope is zero, the xhat that the op stores is taken.
    """

    def of_each(t: Tensor | None) -> Tensor | None:
        return None if t is None else reference.per_channel(t.detach(), z).expand_as(z).reshape(-1)

    values = z.reshape(1, -1)
    xhat, dy = torch.empty_like(values), torch.ones_like(values)
    slope, product = ops.run(
        ops.backward_reduce_out,
        [xhat, dy],
        values,
        dy,
        of_each(weight),
        of_each(bias),
        None if residual is None else residual.reshape(1, -1),
        *settings.arithmetic(),
        xhat=xhat,
        dy=dy,
    )
    slope, product = slope.double().view(z.shape), product.double().view(z.shape)
    return torch.where(slope == 0, xhat.double().view(z.shape), product / slope), slope


def _normal(centres: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Values of a standard normal distribution, and the share of each, of shape (1, channels or 1, values).

    The values lie densely at the ``centres`` of each channel, which are given in ascending order.
    """
    if not centres:
        values = torch.linspace(-_REACH, _REACH, _NODES, dtype=torch.float64).view(1, 1, -1)
        density = torch.exp(-values.square() / 2)
        return values, density / density.sum()
    places = [centre.double().clamp(-_REACH, _REACH).view(1, -1, 1) for centre in centres]
    ends = [torch.full_like(places[0], -_REACH)]
    ends += [(left + right) / 2 for left, right in pairwise(places)]
    ends += [torch.full_like(places[0], _REACH)]
    steps = torch.linspace(0, 1, _NODES // len(places), dtype=torch.float64).view(1, 1, -1)
    found: list[Tensor] = []
    counts: list[Tensor] = []
    for centre, (start, end) in zip(places, pairwise(ends), strict=True):
        # The argument of sinh has equal steps, so the values are dense at the centre.
        low, high = (torch.asinh((t - centre) * _DENSITY) for t in (start, end))
        argument = low + (high - low) * steps
        found.append(centre + torch.sinh(argument) / _DENSITY)
        counts.append(torch.exp(-found[-1].square() / 2) * torch.cosh(argument) * (high - low))
    values, density = torch.cat(found, dim=2), torch.cat(counts, dim=2)
    return values, density / density.sum(dim=2, keepdim=True)


def predicted(
    weight: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype,
    activation: str,
    activation_param: float = 0.01,
    eps: float = 1e-5,
    signed_weight: bool = True,
) -> Errors:
    """The expected errors if xhat is normally distributed and there is no residual.

    This is an estimate: outliers and a residual make the errors larger.

    Args:
        weight: (channel,) or None, on any device.
        bias: (channel,) or None.
        dtype: of the activations in training (that of autocast, if it is used).
        activation, activation_param, eps, signed_weight: as for `inplace_abn.inplace_abn`.

    Returns:
        The figures, on the CPU; of one channel if there is neither weight nor bias. All channels are taken to have the
        same variance, which determines their share in dx.

    Raises:
        ValueError: an unknown activation.

    Source of the scheme: arXiv 1712.02616.
    """
    special = find(activation).special
    statistics = torch.float64 if dtype == torch.float64 else torch.float32
    given = [t.detach().to("cpu", statistics) for t in (weight, bias) if t is not None]
    channels = len(given[0]) if given else 1
    scale = given[0] if weight is not None else torch.ones(channels, dtype=statistics)
    shift = given[-1] if bias is not None else torch.zeros(channels, dtype=statistics)
    # Channels with the same parameters are computed once. In a new model all channels have the same parameters.
    pairs, channel_of = torch.stack([scale, shift]).unique(dim=1, return_inverse=True)
    settings = Settings(activation, activation_param, eps, signed_weight or weight is None, True, None)
    parts = []
    for scales, shifts in zip(*(t.split(_SAMPLE // _NODES) for t in pairs), strict=True):
        gamma = reference.gamma(scales, eps, settings.signed_weight)
        centres = [(y - shifts) / gamma for y in special]
        values, density = _normal(torch.stack(centres).sort(dim=0).values.unbind() if centres else ())
        x = (_MEAN + math.sqrt(_VAR + eps) * values).to(dtype).expand(1, len(scales), -1).contiguous()
        mean, var = torch.full_like(scales, _MEAN), torch.full_like(scales, _VAR)
        parts.append(_moments(x, mean, var, scales, shifts, None, settings, density))
    return _errors(_Moments(*(torch.cat(moments)[channel_of] for moments in zip(*parts, strict=True))))
