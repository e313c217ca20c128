"""Recovery: how exactly backward recovers xhat and the activation's slope from the rounded z.

z is rounded, so the recovered xhat, (inverse(z) - residual - beta) / gamma, has an error. The error is large where the
activation saturates, where |beta| is much larger than |gamma|, where gamma is nearly zero, and next to minima. Its
effect on the gradients depends on dz, and is largest where dz follows xhat. Two figures measure this effect, relative
to an exact backward:

- ``x``, of the whole layer: the error of dx, relative to gamma / sqrt(var + eps) * dy, each as the root mean square
  over all channels. Channels enter with their scale, as in dx. Four dz are considered, and the largest error counts:
  xhat, slope * xhat, and both times sqrt(var + eps), because dz may follow x instead of xhat. Where channels share
  statistics, an error of xhat in one of them is multiplied by what all of them have in dy.
- ``weight``, of each channel: the error of dweight that the worst dz causes, relative to |xhat| |dy|. The worst channel
  counts, because an average would hide a channel whose weight is driven the wrong way.

Both figures come from the ops that training runs. Source of the scheme: arXiv 1712.02616.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from inplace_abn import reference
from inplace_abn.activations import activation_backward
from inplace_abn.kernels import ops
from inplace_abn.settings import Operands, Settings

SAMPLE = 1 << 17
"""About the number of values that `sample` takes of a larger batch."""


class Errors(NamedTuple):
    """Relative errors that recovering xhat from z causes; float64."""

    x: Tensor
    """The error of dx over the layer; of shape ()."""
    weight: Tensor
    """The error of each channel's dweight; of shape (channel,)."""


def sample(t: Tensor, per_instance: bool = False) -> Tensor:
    """A copy of some values of ``t``, which has shape (batch, channel, \\*).

    The values are spread over batch and space, and have shape (1, channel, n). With ``per_instance`` they are spread
    over space, and have shape (1, batch * channel, n).
    """
    values = t.detach().flatten(2) if t.dim() > 2 else t.detach().unsqueeze(2)
    batch, channels, size = values.shape
    if per_instance:
        step = max(1, size // max(1, SAMPLE // max(1, batch * channels)))
        return values[:, :, ::step].reshape(1, batch * channels, -1).clone(memory_format=torch.contiguous_format)
    step = max(1, batch * size // max(1, SAMPLE // max(1, channels)))
    # With a common divisor the values could all lie in one column of the images, or at one place of all images.
    while math.gcd(step, size) > 1:
        step += 1
    places = torch.arange(0, batch * size, step, device=t.device)
    found = values[places // max(1, size), :, places % max(1, size)]
    return found.t().unsqueeze(0).clone(memory_format=torch.contiguous_format)


def measured(x: Tensor, mean: Tensor, var: Tensor, operands: Operands, settings: Settings) -> Errors:
    """The errors of recovering xhat on these values, which are overwritten.

    The figures are on x's device, and the host does not wait for them. ``mean`` and ``var`` are those that x's batch is
    normalised with. Channels of ``settings.verbatim`` are those of x, and have nothing to recover. Shapes, dtypes and
    errors are those of the ops.
    """
    weight, bias, residual = operands.of_graph()
    inv_std = torch.rsqrt(var.double() + settings.eps)
    gamma = torch.ones_like(inv_std)
    if weight is not None:
        gamma = reference.gamma(weight.detach().double(), settings.eps, settings.signed_weight)
    xhat = reference.standardised(x.double(), mean.double(), var.double(), settings.eps)
    y = xhat * reference.per_channel(gamma, x)
    if bias is not None:
        y += reference.per_channel(bias.detach().double(), x)
    affine = y
    if residual is not None:
        y = y + residual
    both, activation = torch.stack([y, y.to(x.dtype).double()]), (settings.activation, settings.activation_param)
    slope, torch_slope = activation_backward(both, y.new_ones(()), *activation).unbind()
    ops.run(ops.forward, [x], x, mean, var, weight, bias, residual, *settings.arithmetic(), True)
    recovered_xhat, recovered = _recovered(x, operands, settings)
    if settings.verbatim:
        channels = reference.indices(settings.verbatim, x.device)
        recovered_xhat[:, channels] = xhat[:, channels].to(x.dtype).double()
        # dx is then a multiple of xhat, and not of y.
        affine = affine.index_fill(1, channels, 0.0)
    # Where the slope jumps, the rounding of y decides on which side it lies, in torch as well. The nearer slope counts.
    slope = torch.where((recovered - torch_slope).abs() < (recovered - slope).abs(), torch_slope, slope)

    # Each row is a channel. All tensors here are of these values, for each dz that is considered.
    xhat, affine, slope, recovered_xhat, recovered = (
        t.transpose(0, 1).flatten(1) for t in (xhat, affine, slope, recovered_xhat, recovered)
    )
    # A loss has dz follow z. Where channels share statistics, the signs of their weights matter, too.
    following = [xhat] if settings.shared < 2 else [xhat, xhat * gamma.sign().unsqueeze(-1)]
    dz = torch.stack([t for each in following for t in (each, slope * each)])

    # dx is the sum of dy, a multiple of y and a constant. It rounds once more, in the precision of the arithmetic.
    unit = torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps / 2
    rounding = unit**2 / 3 * affine.square().mean(dim=-1) / gamma.square()
    # A slope that is too small for the dtype counts as zero, and must not make the relative error large.
    least = torch.finfo(x.dtype).smallest_normal ** 2
    variance, gamma = var.double() + settings.eps, gamma.unsqueeze(-1)
    dy, recovered_dy = slope * dz, recovered * dz
    error = gamma * (recovered_dy - dy)
    added = torch.zeros_like(variance)
    if settings.training:
        projection = _of_statistics(gamma * (xhat * dy), settings)
        recovered_projection = _of_statistics(gamma * (recovered_xhat * recovered_dy), settings)
        error = error - _of_statistics(error, settings) - recovered_xhat * recovered_projection + xhat * projection
        added = rounding * projection.squeeze(-1).square()
    errors = error.square().mean(dim=-1) + added
    sizes = gamma.square().squeeze(-1) * (dy.square() + least * dz.square()).mean(dim=-1)
    # A channel of large variance has a small share in dx, unless its dz is larger by the same factor.
    shares = torch.stack([inv_std.square(), torch.ones_like(variance)])
    # Of shape (2, dz, share). A product of matrices would not be deterministic on every device.
    layer = (torch.stack([errors, sizes]).unsqueeze(2) * shares).sum(dim=-1)
    error = (recovered_xhat * recovered - xhat * slope).square().mean(dim=-1)
    size = slope.square().mean(dim=-1) + least
    return Errors(torch.sqrt(_ratio(layer[0], layer[1]).max()), torch.sqrt(_ratio(error, size)))


def _of_statistics(t: Tensor, settings: Settings) -> Tensor:
    """The means over what has one mean and variance, of ``t`` of shape (dz, channel, values); (dz, channel, 1)."""
    means = t.mean(dim=-1, keepdim=True)
    return reference.of_group(means.transpose(0, 1), settings.shared).transpose(0, 1)


def _ratio(error: Tensor, size: Tensor) -> Tensor:
    """error / size. It is 0 where there is no error, and infinite where only the recovered values are not finite."""
    error = torch.where(error.isnan() & size.isfinite(), math.inf, error)
    return torch.where(error == 0, 0.0, error / size)


def _recovered(z: Tensor, operands: Operands, settings: Settings) -> tuple[Tensor, Tensor]:
    """xhat and the slope as backward has them before it rounds to z's dtype; float64 of z's shape.

    Each value is passed as a channel of its own. Then the op's sums, which are at least float32, are the slope and its
    product with xhat. Where the slope is zero, the xhat that the op stores is taken.
    """

    def of_each(t: Tensor | None) -> Tensor | None:
        return None if t is None else reference.per_channel(t.detach(), z).expand_as(z).reshape(-1)

    weight, bias, residual = operands.of_graph()
    values = z.reshape(1, -1)
    xhat, dy = torch.empty_like(values), torch.ones_like(values)
    added = None if residual is None else residual.reshape(1, -1)
    given = values, dy, of_each(weight), of_each(bias), added, *settings.arithmetic()
    slope, product = ops.run(ops.backward_reduce_out, [xhat, dy], *given, xhat=xhat, dy=dy)
    slope, product = slope.double().view(z.shape), product.double().view(z.shape)
    return torch.where(slope == 0, xhat.double().view(z.shape), product / slope), slope
