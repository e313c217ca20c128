"""The backward pass, which recovers xhat from z (arXiv 1712.02616).

It reuses the memory of z and dz where backward owns it.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from inplace_abn import _torch, distributed, reference
from inplace_abn.activations import activation_backward
from inplace_abn.kernels import ops
from inplace_abn.reference import channel_mean, channel_sum, gamma, of_group, per_channel, repeated
from inplace_abn.settings import WHOLE, Operands, Settings


class Saved(NamedTuple):
    """The tensors that backward has from the forward pass. Later writes to the parameters do not matter."""

    z: Tensor
    weight: Tensor | None
    bias: Tensor | None
    residual: Tensor | None
    var: Tensor
    verbatim: Tensor | None = None
    """xhat of the channels of `Settings.verbatim`, of shape (batch, their number, \\*) and z's dtype."""
    rows: Tensor | None = None
    """`settings.Channels.rows` of these channels."""


def by_value(weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Copies of the parameters, without place in the graph.

    Under transforms and compilers these are the parameters themselves: nobody writes to them there.
    """
    if torch.compiler.is_compiling() or _torch.transforms_active():
        return weight, bias
    with _torch.BelowAutograd():
        return None if weight is None else weight.clone(), None if bias is None else bias.clone()


Gradients = tuple[Tensor | None, ...]
"""The gradients of x, weight, bias and residual; None where none is asked for."""


class Needed(NamedTuple):
    """Which gradients are asked for."""

    x: bool
    weight: bool
    bias: bool
    residual: bool


def values_per_channel(x: Tensor) -> int:
    return x.shape[0] * math.prod(x.shape[2:])


def gradients(need: Needed, saved: Saved, dz: Tensor, own_z: bool, own_dz: bool, settings: Settings) -> Gradients:
    """The gradients that are needed. ``own_z`` and ``own_dz`` say whether backward may overwrite z and dz.

    The residual's gradient is written over dz or z, and dx over the other one, as far as these may be overwritten. If
    both may be overwritten, the op may write xhat over z, so that z is inverted once.
    """
    if settings.group is not None:
        return _in_steps(need, saved, dz, own_z, own_dz, settings)
    z, weight, bias, residual, var, verbatim, rows = saved
    if settings.shared == WHOLE:
        return _of_activation(z, dz, var, own_dz, settings), None, None, None
    reusable = [t for t, own in ((z, own_z), (dz, own_dz)) if own]

    def activation_sized() -> Tensor:
        return reusable.pop() if reusable else torch.empty_like(z)

    dresidual = activation_sized() if need.residual else None
    dx = activation_sized() if need.x else None
    xhat = z if own_z and own_dz and need.x else None
    dweight = _like(weight, saved, settings) if need.weight else None
    dbias = _like(bias, saved, settings) if need.bias else None
    weight, bias = _of_samples(weight, bias, z, settings)
    options = *settings.arithmetic(), settings.training, settings.shared, rows, verbatim
    given = z, dz, var, weight, bias, residual, *options
    written = [t for t in (dx, dresidual, xhat) if t is not None]
    buffers = {"dx": dx, "dweight": dweight, "dbias": dbias, "dresidual": dresidual, "xhat": xhat}
    ops.run(ops.local_backward, written, *given, **buffers)
    if settings.per_instance:
        dweight, dbias = _summed(dweight, saved.weight, len(z)), _summed(dbias, saved.bias, len(z))
    return dx, dweight, dbias, dresidual


def _of_activation(z: Tensor, dz: Tensor, var: Tensor, own_dz: bool, settings: Settings) -> Tensor:
    """The gradient of an activation alone. All tensors have z's strides, and no gaps, as what hooks return may have."""
    if not z.is_contiguous():
        dense = torch.empty_like(z)
        z = z if dense.stride() == z.stride() else dense.copy_(z)
    dz = dz if dz.stride() == z.stride() else torch.empty_like(z).copy_(dz)
    dx = dz if own_dz else torch.empty_like(z)
    given = reference.as_channel(z), reference.as_channel(dz), var, None, None, None, *settings.arithmetic(), False
    ops.run(ops.local_backward, [dx], *given, dx=reference.as_channel(dx))
    return dx


def _like(t: Tensor | None, saved: Saved, settings: Settings) -> Tensor | None:
    """Memory for a parameter's gradient, or for those of all samples, which are summed in the statistics' dtype."""
    return None if t is None else torch.empty_like(saved.var if settings.per_instance else t)


def _summed(t: Tensor | None, like: Tensor | None, samples: int) -> Tensor | None:
    """A parameter's gradient, summed over samples that have their own statistics."""
    return None if t is None or like is None else t.view(samples, len(like)).sum(dim=0).to(like.dtype)


def _of_samples(
    weight: Tensor | None, bias: Tensor | None, z: Tensor, settings: Settings
) -> tuple[Tensor | None, Tensor | None]:
    """The parameters, repeated for samples that have their own statistics."""
    return (repeated(weight, len(z)), repeated(bias, len(z))) if settings.per_instance else (weight, bias)


def _folded(t: Tensor, settings: Settings) -> Tensor:
    """The channels of all samples as channels of one sample, if samples have their own statistics. A tensor that is one
    channel is folded to that."""
    if settings.shared == WHOLE:
        return t.reshape(1, 1, -1)
    return t.reshape(1, t.shape[0] * t.shape[1], *t.shape[2:]) if settings.per_instance else t


def _reduced(
    saved: Saved, dz: Tensor, own_z: bool, own_dz: bool, settings: Settings
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """xhat, dy, and the sums of dy and of xhat * dy. Samples are folded.

    xhat is written over z, and dy over dz, if backward owns them.
    """
    z, dz = _folded(saved.z, settings), _folded(dz, settings)
    residual = None if saved.residual is None else _folded(saved.residual, settings)
    xhat, dy = z if own_z else torch.empty_like(z), dz if own_dz else torch.empty_like(z)
    given = z, dz, *_of_samples(saved.weight, saved.bias, saved.z, settings), residual, *settings.arithmetic()
    sum_dy, sum_xhat_dy = ops.run(
        ops.backward_reduce_out, [xhat, dy], *given, *_verbatim(saved, settings), xhat=xhat, dy=dy
    )
    return xhat, dy, sum_dy, sum_xhat_dy


def _verbatim(saved: Saved, settings: Settings) -> tuple[Tensor | None, Tensor | None]:
    """The rows of channels in the saved xhat, and that xhat; of the channels of all samples, if samples are folded."""
    rows, verbatim = saved.rows, saved.verbatim
    if rows is None or verbatim is None or not settings.per_instance:
        return rows, verbatim
    samples, count = verbatim.shape[:2]
    first = count * torch.arange(samples, device=rows.device).unsqueeze(1)
    return torch.where(rows < 0, rows, rows + first).flatten(), _folded(verbatim, settings)


def _in_steps(need: Needed, saved: Saved, dz: Tensor, own_z: bool, own_dz: bool, settings: Settings) -> Gradients:
    """The gradients in training with statistics of all ranks: a collective comes between the sums and dx.

    dx is written over xhat if dy is the residual's gradient, otherwise over dy.
    """
    z, weight, bias, _, var, *_ = saved
    assert settings.group is not None
    xhat, dy, sum_dy, sum_xhat_dy = _reduced(saved, dz, own_z, own_dz, settings)
    dx = dweight = dbias = None
    if weight is not None and need.weight:
        dweight = reference.weight_gradient(sum_xhat_dy, weight, settings.scale).to(weight.dtype)
    if bias is not None and need.bias:
        dbias = sum_dy.to(bias.dtype)
    if need.x:
        means = distributed.means(sum_dy, sum_xhat_dy, values_per_channel(z), settings.group)
        dx = xhat if need.residual else dy
        ops.run(ops.backward_out, [dx], xhat, dy, var, weight, settings.eps, settings.scale, *means, dx=dx)
    return dx, dweight, dbias, dy if need.residual else None


class _WithEdge(torch.autograd.Function):
    @staticmethod
    def forward(edge: Tensor, values: Tensor) -> Tensor:
        return values.view_as(values)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def input_edge(x: Tensor) -> Tensor:
    """A tensor without memory that has x's place in the graph. It keeps this place when x gets another one."""
    if torch.is_inference_mode_enabled():
        # In inference mode the tensor would have no place.
        with torch.inference_mode(False):
            return input_edge(x)
    # The tensor must not be a view of x, because autograd renews the place of views when x is overwritten.
    (edge,) = torch.unsafe_split(x, x.shape[0] or 1)
    if not _torch.transforms_active():
        edge.data = x.new_empty(0)
    return edge


class Edges(NamedTuple):
    """Tensors that have the places in the graph of a call's tensors. None for what needs no gradient, and for what was
    saved with its place."""

    x: Tensor | None
    weight: Tensor | None = None
    bias: Tensor | None = None
    residual: Tensor | None = None


def edge_of_value(t: Tensor | None, value: Tensor | None) -> Tensor | None:
    """A tensor that keeps the place in the graph of a tensor that was saved as ``value``."""
    if t is None or t is value or not t.requires_grad:
        return None
    return t if t.is_leaf else input_edge(t)


def placed(values: Tensor | None, edge: Tensor | None) -> Tensor | None:
    """``values``, with the place in the graph of ``edge``."""
    return values if values is None or edge is None else _WithEdge.apply(edge, values)


def differentiable(saved: Saved, dz: Tensor, edges: Edges, settings: Settings) -> Gradients:
    """The gradients for ``create_graph=True``, in plain torch.

    z is not enough: when x changes along xhat, var changes, but z does not. So x is computed from z. It gets the place
    in the graph of the `input_edge` of x before x was overwritten, and everything else is a function of it. Its mean is
    arbitrary, because only x - mean matters. The parameters have their places, and the values of the forward pass.

    Samples with their own statistics are treated as further channels.
    """
    z, weight, bias, residual, var, *_ = saved
    shape, residual = z.shape, placed(residual, edges.residual)
    if settings.group is not None:
        raise RuntimeError(
            "inplace_abn: create_graph=True is not supported by synchronised statistics; "
            "use InPlaceABN, or set INPLACE_ABN_DISABLE=1 for plain out-of-place synchronised batch norm"
        )
    samples = shape[0] if settings.per_instance else 1
    with torch.no_grad():
        xhat, *_ = _reduced(saved, dz, False, False, settings)
        x = xhat * per_channel(torch.sqrt(var + settings.eps), xhat).to(xhat.dtype)
    if edges.x is not None:
        x = _folded(_WithEdge.apply(edges.x, x.view(shape)), settings)
    weight, bias = placed(weight, edges.weight), placed(bias, edges.bias)
    frozen = None if settings.training else (torch.zeros_like(var), var)
    residual = None if residual is None else _folded(residual, settings)
    operands = Operands(*_of_samples(weight, bias, z, settings), residual)
    dx, dweight, dbias, dresidual = _formulas(x, _folded(dz, settings), operands, settings, frozen)
    return (
        dx.reshape(shape),
        _summed(dweight, weight, samples),
        _summed(dbias, bias, samples),
        None if residual is None else dresidual.reshape(shape),
    )


def _formulas(
    x: Tensor, dz: Tensor, operands: Operands, settings: Settings, frozen: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dx, dweight, dbias, dresidual), by the formulas, so that autograd can differentiate them once more.

    The statistics are computed from x (training), unless ``frozen``, mean and var, is given (evaluation).
    """
    weight, bias, residual = operands.of_graph()
    shared = max(settings.shared, 0)
    if frozen is None:
        mean = of_group(channel_mean(x), shared)
        var = of_group(channel_mean((x - per_channel(mean, x)).square()), shared)
    else:
        mean, var = frozen
    scale = None if weight is None else gamma(weight, settings.eps, settings.scale)
    xhat = reference.standardised(x, mean, var, settings.eps)
    y = reference.scaled(xhat, scale, bias, residual)
    dy = activation_backward(y, dz, settings.activation, settings.activation_param)
    dxhat = dy if scale is None else dy * per_channel(scale, dy)
    means = None
    if frozen is None:
        means = of_group(channel_mean(dxhat), shared), of_group(channel_mean(xhat * dxhat), shared)
    dx = reference.input_gradient(dxhat, xhat, torch.rsqrt(var + settings.eps), means)
    dweight = channel_sum(xhat * dy)
    if weight is not None:
        dweight = reference.weight_gradient(dweight, weight, settings.scale)
    return dx, dweight, channel_sum(dy), dy
