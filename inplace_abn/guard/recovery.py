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
from inplace_abn.activations import IDENTITY, OF_ROUNDED, activation_backward, find
from inplace_abn.kernels import ops
from inplace_abn.settings import Operands, Settings

SAMPLE = 1 << 17
"""The number of values that `sample` takes of a larger batch at most, unless it has more channels."""
_CHANNELS = 1 << 12
"""The largest number of channels that several images have together of which `sample` takes values."""
_SILENT, _RIGHT = 2.0**-20, 2.0**-8
"""The mean square of what is nothing, and the error of dweight up to which it was recovered as nothing."""
PIECE = 1 << 15
"""The number of values that are looked at together on a CPU, for each of which there are up to 12 float64.

Elsewhere it is `SAMPLE`, because the host takes longer to start an op than a device to run it.
"""


class Errors(NamedTuple):
    """Relative errors of the gradients, as each channel causes them; float64.

    They assume that xhat of all channels is recovered. A channel whose xhat is saved has none.
    """

    weight: Tensor
    """The error of each channel's dweight; of shape (channel,)."""
    dx: Tensor
    """The squared error of each channel's dx, divided by the squared size of dx in the whole layer; of shape
    (combination, channel). Each dz that is considered is combined with each share that channels have in dx."""
    silent: Tensor
    """Whether the values say nothing of how a channel is recovered with others (`is_silent`); of shape (channel,)."""


def is_silent(size: Tensor, weight: Tensor) -> Tensor:
    """Whether nothing was to be recovered, and it was: all values of a channel are one, or nothing passes backward
    through any of them.

    Args:
        size: the mean square of what is recovered, which is xhat, or the product of xhat and the slope.
        weight: as in `Errors`.
    """
    return (size < _SILENT) & (weight < _RIGHT)


def sampled_images(t: Tensor) -> slice:
    """The images of a batch that `sample` looks at where each has its own statistics: not all if they have too many
    channels together."""
    batch, channels = t.shape[:2]
    return slice(None, None, math.ceil(batch / max(1, _CHANNELS // channels)))


def sample(t: Tensor, per_instance: bool = False) -> Tensor:
    """A copy of some values of ``t``, which has shape (batch, channel, \\*).

    The values are spread over batch and space, and have shape (1, channel, n). With ``per_instance`` they are spread
    over space, and have shape (1, image * channel, n), for the images of `sampled_images`.
    """
    values = t.detach().flatten(2) if t.dim() > 2 else t.detach().unsqueeze(2)
    if per_instance:
        values = values[sampled_images(t)]
    batch, channels, size = values.shape
    if per_instance:
        step = math.ceil(size / max(1, SAMPLE // (batch * channels)))
        return values[:, :, ::step].reshape(1, batch * channels, -1).clone(memory_format=torch.contiguous_format)
    step = math.ceil(batch * size / max(1, SAMPLE // channels))
    # With a common divisor the values could all lie in one column of the images, or at one place of all images.
    while math.gcd(step, size) > 1:
        step += 1
    if step == 1:
        return values.transpose(0, 1).clone(memory_format=torch.contiguous_format).view(1, channels, -1)
    places = torch.arange(0, batch * size, step, device=t.device)
    found = values[places // max(1, size), :, places % max(1, size)]
    return found.t().unsqueeze(0).clone(memory_format=torch.contiguous_format)


def measured(x: Tensor, mean: Tensor, var: Tensor, operands: Operands, settings: Settings) -> Errors:
    """The errors of recovering xhat on these values, of shape (1, channel, values), which are overwritten.

    The figures are on x's device, and the host does not wait for them. ``mean`` and ``var`` are those that x's batch is
    normalised with. Shapes, dtypes and errors are those of the ops.
    """

    def part(t: Tensor | None, *places: slice) -> Tensor | None:
        return None if t is None else t[places]

    weight, bias, residual = (None if t is None else t.detach() for t in operands.of_graph())
    inv_std = torch.rsqrt(var.double() + settings.eps)
    gamma, beta = torch.ones_like(inv_std), torch.zeros_like(inv_std) if bias is None else bias.double()
    if weight is not None:
        gamma = reference.gamma(weight.double(), settings.eps, settings.scale)
    exact = torch.stack([mean.double(), inv_std, gamma, beta]).unsqueeze(-1)
    _, channels, size = x.shape
    count = sum(_SUMS)
    # The sums of a channel of few values take more memory than the values.
    piece = PIECE if x.is_cpu else SAMPLE
    means, step = inv_std.new_zeros(count, channels), max(1, piece // max(size, count))
    for rows in (slice(i, i + step) for i in range(0, channels, step)):
        for columns in (slice(i, i + piece) for i in range(0, size, piece)):
            given = Operands(part(weight, rows), part(bias, rows), part(residual, slice(None), rows, columns))
            statistics = mean[rows], var[rows]
            means[:, rows].add_(_sums(x[:, rows, columns], exact[:, rows], statistics, given, settings))
    return _errors(means.div_(size), inv_std, gamma, beta, x.dtype, residual is not None, settings)


_SUMS = 6, 1, 1, 2, 1, 3, 1, 5
"""How many sums of each kind `_sums` returns."""


def _sums(
    x: Tensor, exact: Tensor, statistics: tuple[Tensor, Tensor], operands: Operands, settings: Settings
) -> Tensor:
    """Sums over these values of each channel, of shape (sum, channel). `_errors` takes their means.

    ``exact`` are mean, inv_std, gamma and beta in float64, of shape (4, channel, 1). x is overwritten.
    """
    mean, inv_std, gamma, beta = exact
    xhat = (x - mean).mul_(inv_std)
    y = torch.addcmul(beta, gamma, xhat)
    if operands.residual is not None:
        y += operands.residual
    activation = settings.activation, settings.activation_param
    slopes = activation_backward(torch.stack([y, y.to(x.dtype).to(y.dtype)]), y.new_ones(()), *activation)
    del y
    _forward(x, statistics, operands, settings)
    recovered_xhat, recovered, product = _recovered(x, operands, settings)
    # Where the slope jumps, the rounding of y decides on which side it lies, in torch as well. The nearer slope counts.
    to_slope, to_torchs = (recovered - slopes).abs_()
    slope = torch.where(to_torchs < to_slope, slopes[1], slopes[0])
    del slopes, to_slope, to_torchs

    # For dz that are xhat and slope * xhat: the errors of dy that the slope causes, and dy.
    fields = slope.new_empty(6, *slope.shape[1:])
    errors, off, product_off, dy = fields.split((2, 1, 1, 2))
    torch.mul(recovered.sub_(slope), xhat, out=errors[:1])
    torch.mul(errors[:1], slope, out=errors[1:])
    torch.mul(slope, xhat, out=dy[:1])
    torch.mul(slope, dy[:1], out=dy[1:])
    torch.sub(recovered_xhat, xhat, out=off)
    torch.sub(product, dy[:1], out=product_off)
    del recovered_xhat, recovered, product
    found = [torch.linalg.vector_norm(t, dim=-1).square_() for t in (fields, xhat, slope)]
    found += [(errors * off).sum(dim=-1), (product_off * dy[:1]).sum(dim=-1)]
    found += [t.sum(dim=-1) for t in (fields[:3], xhat)]
    return torch.cat([*found, fields[:5].mul_(xhat).sum(dim=-1)])


def _forward(x: Tensor, statistics: tuple[Tensor, Tensor], operands: Operands, settings: Settings) -> None:
    """Overwrites x with z, and rounds where the call does."""
    weight, bias, residual = operands.of_graph()
    if settings.activation_param == OF_ROUNDED and x.dtype.itemsize == 2 and find(settings.activation).special:
        of_norm = settings.activating(IDENTITY)
        ops.run(ops.forward, [x], x, *statistics, weight, bias, None, *of_norm.arithmetic(), True)
        if residual is not None:
            x.add_(residual)
        zero = torch.zeros_like(statistics[0])
        statistics, weight, bias, residual = (zero, zero + 1), None, None, None
        settings = settings._replace(eps=1e-30)
    ops.run(ops.forward, [x], x, *statistics, weight, bias, residual, *settings.arithmetic(), True)


def _recovered(z: Tensor, operands: Operands, settings: Settings) -> tuple[Tensor, Tensor, Tensor]:
    """xhat, the slope and their product, as backward has them before it rounds to z's dtype; float64 of z's shape.

    Each value is passed as a channel of its own. Then the op's sums, which are at least float32, are the slope and its
    product with xhat. Where the slope is zero, the xhat that the op stores is taken.
    """

    def of_each(t: Tensor | None) -> Tensor | None:
        return None if t is None else t.unsqueeze(-1).expand_as(z).reshape(-1)

    weight, bias, residual = operands.of_graph()
    values = z.reshape(1, -1)
    xhat, dy = torch.empty_like(values), torch.ones_like(values)
    added = None if residual is None else residual.reshape(1, -1)
    given = values, dy, of_each(weight), of_each(bias), added, *settings.arithmetic()
    sums = ops.run(ops.backward_reduce_out, [xhat, dy], *given, xhat=xhat, dy=dy)
    slope, product = (t.double().view(z.shape) for t in sums)
    return torch.where(slope == 0, xhat.view(z.shape), product / slope), slope, product


def _errors(
    means: Tensor,
    inv_std: Tensor,
    gamma: Tensor,
    beta: Tensor,
    dtype: torch.dtype,
    has_residual: bool,
    settings: Settings,
) -> Errors:
    """The errors, from the means of what `_sums` sums."""
    squares, xhat, slope, *_ = means.split(_SUMS)
    # A slope that is too small for the dtype counts as zero, and must not make the relative error large.
    least = torch.finfo(dtype).smallest_normal ** 2
    sizes = gamma.square() * torch.stack([squares[4] + least * xhat[0], squares[5] + least * squares[4]])
    # A channel of large variance has a small share in dx, unless its dz is larger by the same factor.
    shares = torch.stack([inv_std.square(), torch.ones_like(inv_std)])
    # A product of matrices would not be deterministic on every device.
    layer = (sizes.unsqueeze(-2) * shares).sum(dim=-1, keepdim=True)
    of_dx = _ratio(_of_dx(means, gamma, beta, dtype, settings).unsqueeze(-2) * shares, layer).flatten(0, -2)
    of_weight = _ratio(squares[3], (slope + least)[0]).sqrt()
    # What is dead by its weight and bias stays dead, whatever the batch is. What a residual makes dead does not.
    silent = is_silent(squares[4] if has_residual else xhat[0], of_weight)
    # xhat is small where eps is most of the variance, or the running variance is larger than that of the batch.
    size = xhat[0].clamp_max(1).masked_fill(silent, 1)
    return Errors(_ratio(of_weight, size.sqrt()), of_dx, silent)


def _of_dx(means: Tensor, gamma: Tensor, beta: Tensor, dtype: torch.dtype, settings: Settings) -> Tensor:
    """The squared errors of dx * sqrt(var + eps); (\\*, dz, channel)."""
    squares, xhat, _, with_off, with_product, plain, xhat_mean, with_xhat = means.split(_SUMS)
    errors: Tensor = gamma.square() * squares[:2]
    if not settings.training:
        return errors
    # A loss has dz follow z. Where channels share statistics, the signs of their weights matter, too.
    scale = (gamma if settings.shared < 2 else torch.stack([gamma, gamma.abs()])).view(-1, 1, len(gamma))
    products = [*plain[:2], with_xhat[3], with_product[0], with_xhat[4], squares[4]]
    # The means over what has one mean and variance.
    inner = (scale * torch.stack(products).view(3, 1, 2, -1)).movedim(-1, 0)
    inner = reference.of_group(inner, settings.shared).movedim(0, -1)
    # The error of dx is that of dy without a mean and a multiple of xhat, and without a multiple of the error of xhat.
    mean, along, projection = inner
    mixed = mean * along * xhat_mean - scale * (mean * plain[:2] + along * with_xhat[:2])
    errors = (errors + mean.square() + along.square() * xhat).add_(mixed, alpha=2)
    recovered = projection + along
    mixed = mean * plain[2] + along * with_xhat[2] - scale * with_off
    errors = errors + recovered * (recovered * squares[2] + 2 * mixed)
    # dx is the sum of dy, a multiple of y and a constant. It rounds once more, in the precision of the arithmetic.
    unit = torch.finfo(torch.promote_types(dtype, torch.float32)).eps / 2
    ratio = beta / reference.clamped(gamma, settings.eps)
    errors = errors + unit**2 / 3 * (xhat + ratio * (2 * xhat_mean + ratio)) * projection.square()
    return errors.clamp_min_(0)


def _ratio(error: Tensor, size: Tensor) -> Tensor:
    """error / size. It is 0 where there is no error, and infinite where only the recovered values are not finite."""
    error = error.masked_fill(error.isnan() & size.isfinite(), math.inf)
    return (error / size).masked_fill_(error == 0, 0.0)
