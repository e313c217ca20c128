"""Layer norm and RMS norm, whose backward pass recovers xhat from the output (`inplace_abn.conversion.layer_norms`).

They normalise each row, which is the last dimension of x. A row has statistics of its own, and the weight and the bias
belong to the values of a row. With rstd = 1 / sqrt(var + eps):

    layer norm    xhat = (x - mean) * rstd    var = mean((x - mean)^2)
    RMS norm      xhat = x * rstd             var = mean(x^2)
    y = weight * xhat + bias
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from inplace_abn.activations import find
from inplace_abn.autograd.backward import Edges, Gradients, Needed, Saved, placed
from inplace_abn.kernels import ops
from inplace_abn.reference import indices
from inplace_abn.settings import Settings

_EPS = 1e-30
"""Below any weight that matters, so that the scale is the weight itself."""
LAYER, RMS = "layer", "rms"
"""The values of `Settings.rows`."""


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of statistics and sums."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def inverse_std(x: Tensor, rows: str, eps: float) -> Tensor:
    """rstd of each row, of shape (\\*, 1)."""
    dtype = wide(x.dtype)
    if rows == LAYER:
        var = torch.var(x.to(dtype), dim=-1, correction=0, keepdim=True)
    else:
        var = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=dtype).square_().div_(x.shape[-1])
    return var.add_(eps).rsqrt_()


def standardised(x: Tensor, rstd: Tensor, rows: str, channels: tuple[int, ...]) -> Tensor:
    """xhat of some values of each row, in the dtype of statistics."""
    values = x[..., indices(channels, x.device)].to(wide(x.dtype))
    if rows == LAYER:
        values -= x.mean(dim=-1, keepdim=True, dtype=values.dtype)
    return values.mul_(rstd)


def normalised(x: Tensor, weight: Tensor | None, bias: Tensor | None, rows: str, eps: float) -> Tensor:
    """y by the formulas, so that autograd can differentiate it twice."""
    weight, bias = (None if t is None else t.to(x.dtype) for t in (weight, bias))
    if rows == LAYER:
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    y = x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def recovered(saved: Saved, settings: Settings, dtype: torch.dtype) -> Tensor:
    """xhat from y. Where the weight is zero, and xhat was not saved, it is zero, which the guard does not trust."""
    y, weight, bias = saved.z, saved.weight, saved.bias
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
    if saved.verbatim is not None:
        xhat[..., indices(settings.verbatim, y.device)] = saved.verbatim.to(dtype)
    return xhat


def gradients(need: Needed, saved: Saved, dy: Tensor, own_z: bool, own_dz: bool, settings: Settings) -> Gradients:
    """The gradients that are needed. dx is written over dy if backward owns it."""
    weight, bias, rows, shape = saved.weight, saved.bias, saved.var.to(wide(dy.dtype)), dy.shape
    if weight is not None and weight.dtype not in (dy.dtype, wide(dy.dtype)):
        weight = weight.to(wide(dy.dtype))
    is_xhat = saved.verbatim is not None
    y = recovered(saved, settings, dy.dtype) if is_xhat else saved.z.to(dy.dtype)
    y, dy = y.flatten(0, -2).contiguous(), dy.flatten(0, -2).contiguous()
    dweight = torch.empty_like(saved.weight) if need.weight and saved.weight is not None else None
    dbias = torch.empty_like(bias) if need.bias and bias is not None else None
    sums = [t for t in (dweight, dbias) if t is not None]
    if sums:
        one = rows.new_ones(y.shape[1])
        affine = (one, None) if is_xhat or weight is None else (weight, bias)
        given = y, dy, one, *affine, None, _EPS, True, find("identity").code, 0.0, False
        ops.run(ops.local_backward, sums, *given, dweight=dweight, dbias=dbias)
    dx = None
    if need.x:
        dx = dy if own_dz else torch.empty_like(dy)
        ops.run(ops.rows_backward, [dx], y, dy, rows, weight, bias, settings.rows == LAYER, is_xhat, dx=dx)
        dx = dx.view(shape)
    return dx, dweight, dbias, None


def differentiable(saved: Saved, dy: Tensor, edges: Edges, settings: Settings) -> Gradients:
    """The gradients for ``create_graph=True``: those of the formulas, at an x that is computed from y.

    As in `autograd.backward.differentiable`, the mean of x is arbitrary where only x - mean matters.
    """
    with torch.no_grad():
        xhat = recovered(saved, settings, wide(dy.dtype))
        x = (xhat / saved.var.view(*dy.shape[:-1], 1)).to(xhat.dtype)
    given = placed(x, edges.x), placed(saved.weight, edges.weight), placed(saved.bias, edges.bias)
    y = normalised(*given, settings.rows, settings.eps).to(dy.dtype)  # type: ignore[arg-type]
    inputs = [t for t in given if t is not None and t.requires_grad]
    found = iter(torch.autograd.grad(y, inputs, dy, create_graph=True))
    dx, dweight, dbias = (next(found) if t is not None and t.requires_grad else None for t in given)
    return None if dx is None else dx.to(dy.dtype), dweight, dbias, None
