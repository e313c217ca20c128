"""The maths in plain torch: readable, out of place and differentiable.

It runs where the in-place ops must not: with ``create_graph=True`` and with ``INPLACE_ABN_DISABLE=1``.

The notation is that of the paper ("In-Place Activated BatchNorm for Memory-Optimized Training of DNNs", arXiv
1712.02616). x is the input, y the batch norm's output, and z = act(y) the result. mean and var are those of a channel,
over all values of batch and space.

    inv_std = 1 / sqrt(var + eps)        xhat = (x - mean) * inv_std        y = gamma * xhat + beta
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

MAGNITUDE, AT_LEAST_EPS, WEIGHT = range(3)
"""What xhat is multiplied by: ``|weight| + eps``; the weight, moved to a magnitude of at least ``eps``; or the weight
itself (`settings.Settings.scale`)."""


def per_channel(t: Tensor, like: Tensor) -> Tensor:
    """``t``, of shape (channel,), so that it broadcasts against ``like`` of shape (batch, channel, \\*): a view.

    It may also be of shape (batch, group), with a value for the neighbouring channels of each group.
    """
    if t.dim() == 2:
        spread = t.unsqueeze(-1).expand(*t.shape, like.shape[1] // t.shape[1])
        return spread.reshape(t.shape[0], like.shape[1], *[1] * (like.dim() - 2))
    return t.view([1, -1] + [1] * (like.dim() - 2))


def repeated(t: Tensor | None, samples: int) -> Tensor | None:
    """A vector of shape (channel,) for each sample; of shape (samples * channel,)."""
    return None if t is None else t.repeat(samples)


def empty_channels(x: Tensor, count: int) -> Tensor:
    """An uninitialised tensor of x's shape, dtype and memory format, but with ``count`` channels."""
    samples, _, *space = x.shape
    if x.is_contiguous() or x.stride(1) != 1:
        return x.new_empty((samples, count, *space))
    return x.new_empty((samples, *space, count)).movedim(-1, 1)


def of_group(t: Tensor, shared: int) -> Tensor:
    """The mean over each group of ``shared`` neighbouring values, in the place of each of them; of t's shape."""
    if shared < 2:
        return t
    return t.view(-1, shared, *t.shape[1:]).mean(dim=1).repeat_interleave(shared, dim=0)


def channel_sum(t: Tensor) -> Tensor:
    """The sum over all dimensions but the channel."""
    return t.sum(dim=[d for d in range(t.dim()) if d != 1])


def channel_mean(t: Tensor) -> Tensor:
    """The mean over all dimensions but the channel."""
    return channel_sum(t) / (t.numel() // t.shape[1])


def gamma(weight: Tensor, eps: float, scale: int = MAGNITUDE) -> Tensor:
    """The scale of the normalised values, by `settings.Settings.scale`.

    The derivative of ``|weight| + eps`` is the weight's sign (+1 at zero), that of the others is 1.
    """
    if scale == MAGNITUDE:
        return torch.where(weight < 0, -weight, weight) + eps
    return weight if scale == WEIGHT else weight + (clamped(weight.detach(), eps) - weight).detach()


def clamped(weight: Tensor, eps: float) -> Tensor:
    """The weight, moved to a magnitude of at least ``eps``, so that xhat can be recovered from z."""
    magnitude = weight.abs().clamp_min(eps)
    return torch.where(weight < 0, -magnitude, magnitude)


def unclamped(weight: Tensor | None, eps: float, scale: int) -> Tensor | None:
    """The scale of a call that keeps x: `gamma`, but a signed weight as it is."""
    return gamma(weight, eps) if weight is not None and scale == MAGNITUDE else weight


def weight_gradient(sum_xhat_dy: Tensor, weight: Tensor, scale: int) -> Tensor:
    """dweight: the gradient of `gamma`, times its derivative."""
    return torch.where(weight < 0, -sum_xhat_dy, sum_xhat_dy) if scale == MAGNITUDE else sum_xhat_dy


def input_gradient(dy: Tensor, xhat: Tensor, scale: Tensor, means: tuple[Tensor, ...] | None) -> Tensor:
    """dx, for the scale gamma * inv_std and, in training, each channel's means of dy and of xhat * dy."""
    dx = dy
    if means is not None:
        dx = dx - per_channel(means[0], dy) - xhat * per_channel(means[1], dy)
    return dx * per_channel(scale, dy)


def as_channel(t: Tensor) -> Tensor:
    """A dense tensor as one channel, in the order of its memory."""
    count = t.numel()
    return t.as_strided((1, 1, count), (count, count, 1))


def standardised(x: Tensor, mean: Tensor, var: Tensor, eps: float) -> Tensor:
    """xhat for x of shape (batch, channel, \\*), in the wider of the two dtypes."""
    return (x - per_channel(mean, x)) * per_channel(torch.rsqrt(var + eps), x)


def standardised_channels(x: Tensor, mean: Tensor, var: Tensor, eps: float, channels: Tensor) -> Tensor:
    """xhat of some channels; statistics may be those of each sample, sample after sample."""
    mean, var = (t.view(-1, x.shape[1])[:, channels].view(-1, len(channels), *[1] * (x.dim() - 2)) for t in (mean, var))
    return (x[:, channels] - mean) * torch.rsqrt(var + eps)


def scaled(xhat: Tensor, scale: Tensor | None, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    """y for xhat of shape (batch, channel, \\*)."""
    y = xhat if scale is None else xhat * per_channel(scale, xhat)
    if bias is not None:
        y = y + per_channel(bias, xhat)
    return y if residual is None else y + residual


@torch.no_grad()
def update(
    running_mean: Tensor | None,
    running_var: Tensor | None,
    mean: Tensor,
    var: Tensor,
    count: int | Tensor,
    momentum: float | Tensor,
) -> None:
    """Updates the running statistics, if there are any, by those of ``count`` values per channel."""
    if running_mean is not None and running_var is not None:
        for running, batch in ((running_mean, mean), (running_var, var * count / (count - 1))):
            running.copy_((1 - momentum) * running.double() + momentum * batch.double())


# Layer norm and RMS norm normalise each row, which is the last dimension of x. A row has statistics of its own, and the
# weight and the bias belong to the values of a row. With rstd = 1 / sqrt(var + eps):
#
#     layer norm    xhat = (x - mean) * rstd    var = mean((x - mean)^2)
#     RMS norm      xhat = x * rstd             var = mean(x^2)
#     y = weight * xhat + bias

LAYER, RMS = "layer", "rms"
"""The values of `Settings.rows`."""
NORMS_OF_ROWS = ("", LAYER, RMS)
"""All of them, by their numbers in C++."""
LEAST_WEIGHT = 1e-5
"""The smallest magnitude of a weight from whose output xhat is recovered. Beside a bias of one, float32 keeps two
digits of xhat there."""


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of statistics and sums."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def inverse_std_of_rows(x: Tensor, rows: str, eps: float) -> Tensor:
    """rstd of each row, of shape (\\*, 1)."""
    dtype = wide(x.dtype)
    if rows == LAYER:
        var = torch.var(x.to(dtype), dim=-1, correction=0, keepdim=True)
    else:
        var = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=dtype).square_().div_(x.shape[-1])
    return var.add_(eps).rsqrt_()


def standardised_rows(x: Tensor, rstd: Tensor, rows: str, channels: Tensor | slice) -> Tensor:
    """xhat of some values of each row, in the dtype of statistics."""
    values = x[..., channels].to(wide(x.dtype))
    if rows == LAYER:
        values -= x.mean(dim=-1, keepdim=True, dtype=values.dtype)
    return values.mul_(rstd)


def normalised_rows(x: Tensor, weight: Tensor | None, bias: Tensor | None, rows: str, eps: float) -> Tensor:
    """y by the formulas, so that autograd can differentiate it twice."""
    weight, bias = (None if t is None else t.to(x.dtype) for t in (weight, bias))
    if rows == LAYER:
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    y = x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def recovered_rows(
    y: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    columns: Tensor | None,
    verbatim: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """xhat from y, but for some columns, of which it is given.

    Where the weight is zero otherwise, xhat is zero, which the guard does not trust.
    """
    xhat = torch.empty(y.shape, dtype=dtype, device=y.device)
    if weight is None:
        torch.sub(y, 0 if bias is None else bias, out=xhat)
    else:
        weight = weight.to(wide(y.dtype))
        inverse = torch.where(weight == 0, 0.0, 1 / weight)
        if bias is None:
            torch.mul(y, inverse, out=xhat)
        else:
            torch.addcmul(-bias.to(inverse.dtype) * inverse, y, inverse, out=xhat)
    if verbatim is not None:
        xhat[..., columns] = verbatim.to(dtype)
    return xhat


# LayerScale multiplies the output of a linear layer by a vector (arXiv 2103.17239). There are N rows r.
#
#     u = h W^T + b        z = u * gamma        G = dz^T h        dW = gamma * G        dgamma_i = sum_r dz_ri u_ri
#
# dgamma comes from the product that dW needs. Where h W^T and b cancel, sum_j G_ij W_ij + b_i sum(dz_i) would lose the
# digits of u. So dz is taken apart into its mean over the rows and the rest d. The mean is multiplied by the mean of u,
# which the forward pass has computed. In 16 bits sum(d) is not zero.
#
#     dgamma_i = sum_j (d^T h)_ij W_ij - sum(d_i) (W mean(h))_i + (sum(d_i) + N mean(dz_i)) mean(u_i)


def mean_of_rows(t: Tensor) -> Tensor:
    """The mean of a matrix over its rows, in the dtype of sums."""
    return t.mean(dim=0, dtype=wide(t.dtype))


def gradients_of_scaled(
    dz: Tensor, h: Tensor, weight: Tensor, mean_of_u: Tensor, mean: Callable[[Tensor], Tensor] = mean_of_rows
) -> tuple[Tensor, ...]:
    """dgamma; and a matrix and two vectors of which `torch.addr` makes G. All are in the dtype of sums.

    ``mean`` computes `mean_of_rows`.
    """
    (count, width), of_dz = dz.shape, mean(dz)
    rest = (dz - of_dz).to(h.dtype)
    # The sums of h come from the same product. Eight columns keep rows aligned.
    both = (torch.cat([rest, h.new_ones(count, 8)], dim=1).t() @ h).to(wide(h.dtype))
    product, of_h, sum_of_rest = both[:width], both[width] / count, count * mean(rest)
    dgamma = (product * weight).sum(dim=1) - sum_of_rest * (weight.to(of_h.dtype) @ of_h)
    return dgamma + (sum_of_rest + count * of_dz) * mean_of_u, product, count * of_dz, of_h
