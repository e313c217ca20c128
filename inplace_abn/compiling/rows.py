"""Layer norms and RMS norms for compilers: two ops that `fuse` finds in the joint graph of forward and backward.

The output is computed by torch's own ops, or by those of the norm's class. The first op marks it, and the second one is
its gradient. If the backward of a reader keeps the output anyway, perhaps a cast of it, the gradient is computed from
that, and the input need not be kept. Where `fuse` does not run, the gradient is that of the input.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx

from inplace_abn._torch import is_backward
from inplace_abn.compiling.inlining import inline
from inplace_abn.compiling.norms import register
from inplace_abn.compiling.search import gradients_of, is_cast, is_read_again
from inplace_abn.reference import RMS, wide

_library = torch.library.Library("inplace_abn", "FRAGMENT")
# y and x have the shape (\*, column), weight and bias (column,), and the statistics (\*, 1); an RMS norm has no mean.
# xhat of some columns is kept in ``values``, and ``places`` says where each column is among them. ``trusted`` names the
# dtypes in which y is trusted for recovering xhat, with spaces in between.
_CALL = "Tensor x, Tensor? mean, Tensor rstd, Tensor? weight, Tensor? bias, Tensor? places, Tensor? values, str trusted"
_library.define(f"norm_of_rows(Tensor y, {_CALL}) -> Tensor")
_library.define(f"norm_of_rows_backward(Tensor dy, Tensor y, {_CALL}) -> (Tensor, Tensor, Tensor)")

NORM = torch.ops.inplace_abn.norm_of_rows.default
NORM_BACKWARD = torch.ops.inplace_abn.norm_of_rows_backward.default


def statistics(x: Tensor, rows: str, eps: float) -> list[Any]:
    """The mean of each row, None for an RMS norm, and its rstd; of shape (\\*, 1)."""
    x = x.to(wide(x.dtype))
    if rows == RMS:
        return [None, torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)]
    var, mean = torch.var_mean(x, dim=-1, correction=0, keepdim=True)
    return [mean, torch.rsqrt(var + eps)]


def verbatim(x: Tensor, statistics: Sequence[Any], columns: Tensor) -> Tensor:
    """xhat of some columns."""
    return _standardised(x[..., columns], *statistics).to(x.dtype)


def _standardised(x: Tensor, mean: Tensor | None, rstd: Tensor) -> Tensor:
    # torch's layer norm rounds its statistics to 16 bits where its parameters have them, and on the CPU if compiled.
    x = x.to(wide(x.dtype))
    return (x if mean is None else x - mean) * rstd


def _gradients(
    dy: Tensor, xhat: Tensor, mean: Tensor | None, rstd: Tensor, weight: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, dweight, dbias) in the dtype of xhat. dweight and dbias have shape (column,), also without a weight and a
    bias."""
    dy = dy.to(xhat.dtype)
    others = [*range(dy.dim() - 1)]
    dweight, dbias = (dy * xhat).sum(others), dy.sum(others)
    dxhat = dy if weight is None else dy * weight
    dx = dxhat - xhat * (dxhat * xhat).mean(-1, keepdim=True)
    if mean is not None:
        dx = dx - dxhat.mean(-1, keepdim=True)
    return dx * rstd, dweight, dbias


def _plain_backward(dy: Tensor, y: Tensor, x: Tensor, *call: Any) -> tuple[Tensor, Tensor, Tensor]:
    mean, rstd, weight, *_ = call
    dx, dweight, dbias = _gradients(dy, _standardised(x, mean, rstd), mean, rstd, weight)
    return dx.to(x.dtype), dweight, dbias


def _recovered(y: Tensor, weight: Tensor | None, bias: Tensor | None, places: Tensor | None, values: Any) -> Tensor:
    """xhat from y, as in `reference.recovered_rows`, in plain ops."""
    xhat = y.to(wide(y.dtype))
    xhat = xhat if bias is None else xhat - bias
    if weight is not None:
        xhat = xhat * torch.where(weight == 0, 0.0, 1 / weight)
    if places is None:
        return xhat
    return torch.where(places < 0, xhat, values[..., places.clamp_min(0)].to(xhat.dtype))


PLAIN: dict[Any, Any] = {NORM: lambda y, *_: y.clone(), NORM_BACKWARD: _plain_backward}
register(_library, PLAIN, 1)


def fuse(graph: fx.Graph) -> bool:
    """Makes norms be differentiated from their output where that is kept anyway. Returns whether there are any.

    The marks are removed.
    """
    marks = [node for node in graph.nodes if node.target is NORM]
    gradients, found = gradients_of(marks, NORM_BACKWARD), False
    for mark in marks:
        kept = None if "recompute" in mark.meta else _kept(mark)
        for node in gradients.get(mark, []):
            if kept is not None:
                _differentiate(node, kept)
                found = True
        mark.replace_all_uses_with(mark.args[0])
        graph.erase_node(mark)
    return found


def _differentiate(node: fx.Node, kept: fx.Node) -> None:
    """Replaces the gradient of the input by that of the output."""
    dy, _, _, *given, _ = cast("tuple[Any, ...]", node.args)
    dtype = node.meta["val"][0].dtype

    def backward(dy: Tensor, y: Tensor, mean: Tensor | None, rstd: Tensor, *operands: Any) -> tuple[Tensor, ...]:
        xhat = _recovered(y, *operands)
        dx, dweight, dbias = _gradients(dy, xhat, mean, rstd.to(xhat.dtype), operands[0])
        return dx.to(dtype), dweight, dbias

    inline(node, backward, (dy, kept, *given))


def _kept(mark: fx.Node) -> fx.Node | None:
    """What is kept of a norm's output anyway: itself, or a cast of it."""
    trusted = str(mark.args[-1]).split()
    readers = [user for user in mark.users if not is_backward(user)]
    casts = [user for user in readers if is_cast(user)]
    for node in (mark, *casts):
        if str(node.meta["val"].dtype).removeprefix("torch.") in trusted and is_read_again(node):
            return mark.args[0] if node is mark else node  # type: ignore[return-value]
    return None
