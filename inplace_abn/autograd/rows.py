"""Layer norm and RMS norm, whose backward pass recovers xhat from the output (`inplace_abn.conversion.layer_norms`)."""

from __future__ import annotations

import torch
from torch import Tensor

from inplace_abn.autograd.backward import Edges, Gradients, Needed, Saved, placed
from inplace_abn.kernels import ops
from inplace_abn.reference import LAYER, LEAST_WEIGHT, normalised_rows, recovered_rows, wide
from inplace_abn.settings import Settings


def _recovered(saved: Saved, dtype: torch.dtype) -> Tensor:
    """xhat. ``saved.rows`` are the numbers of the columns whose xhat is saved."""
    return recovered_rows(saved.z, saved.weight, saved.bias, saved.rows, saved.verbatim, dtype)


def gradients(need: Needed, saved: Saved, dy: Tensor, own_z: bool, own_dz: bool, settings: Settings) -> Gradients:
    """The gradients that are needed. dx is written over dy if backward owns it."""
    rows, shape, dtypes = saved.var.to(wide(dy.dtype)), dy.shape, (dy.dtype, wide(dy.dtype))
    # The output of a norm by hand may be wider than its parameters.
    parameters = saved.weight, saved.bias
    weight, bias = (t if t is None or t.dtype in dtypes else t.to(dtypes[1]) for t in parameters)
    is_xhat = saved.verbatim is not None
    y = _recovered(saved, dy.dtype) if is_xhat else saved.z.to(dy.dtype)
    y, dy = y.flatten(0, -2).contiguous(), dy.flatten(0, -2).contiguous()
    dweight = torch.empty_like(weight) if need.weight and weight is not None else None
    dbias = torch.empty_like(bias) if need.bias and bias is not None else None
    dx = (dy if own_dz else torch.empty_like(dy)) if need.x else None
    written = [t for t in (dx, dweight, dbias) if t is not None]
    given = y, dy, rows, weight, bias, LEAST_WEIGHT, settings.rows == LAYER, is_xhat
    ops.run(ops.rows_backward, written, *given, dx=dx, dweight=dweight, dbias=dbias)
    dx = None if dx is None else dx.view(shape)
    dweight, dbias = (
        None if d is None or t is None else d.to(t.dtype) for d, t in zip((dweight, dbias), parameters, strict=True)
    )
    return dx, dweight, dbias, None


def differentiable(saved: Saved, dy: Tensor, edges: Edges, settings: Settings) -> Gradients:
    """The gradients for ``create_graph=True``: those of the formulas, at an x that is computed from y.

    As in `autograd.backward.differentiable`, the mean of x is arbitrary where only x - mean matters.
    """
    with torch.no_grad():
        xhat = _recovered(saved, wide(dy.dtype))
        x = (xhat / saved.var.view(*dy.shape[:-1], 1)).to(xhat.dtype)
    given = placed(x, edges.x), placed(saved.weight, edges.weight), placed(saved.bias, edges.bias)
    y = normalised_rows(*given, settings.rows, settings.eps).to(dy.dtype)  # type: ignore[arg-type]
    inputs = [t for t in given if t is not None and t.requires_grad]
    found = iter(torch.autograd.grad(y, inputs, dy, create_graph=True))
    dx, dweight, dbias = (next(found) if t is not None and t.requires_grad else None for t in given)
    return None if dx is None else dx.to(dy.dtype), dweight, dbias, None


_library = torch.library.Library("inplace_abn", "FRAGMENT")
_library.define(
    "recovered_rows(Tensor y, Tensor? weight, Tensor? bias, Tensor columns, Tensor verbatim, ScalarType dtype) "
    "-> Tensor"
)
_library.impl("recovered_rows", recovered_rows, "CompositeExplicitAutograd")
