"""torch's norm: the graph node of an output that this package's op has computed. It keeps x, as torch's node does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from inplace_abn import _torch, reference
from inplace_abn.activations import IDENTITY
from inplace_abn.autograd.kept import KeptABNFunction
from inplace_abn.kernels.node import Node
from inplace_abn.settings import WEIGHT, Operands, Settings

Gradients = list[Tensor | None]
"""The gradients of x, weight and bias; None where none is asked for."""


def native(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor, settings: Settings
) -> Tensor:
    """y as torch computes it from x. Running statistics are not updated."""
    if settings.group is not None:
        y: Tensor = KeptABNFunction.apply(x, weight, bias, None, mean, var, settings)
        return y
    samples, channels = x.shape[:2]
    # An instance norm's x is contiguous. A group norm of one channel per group keeps x's memory format.
    if settings.shared > 1 or (settings.per_instance and not x.is_contiguous()):
        return F.group_norm(x, channels // settings.shared, weight, bias, settings.eps)
    if settings.per_instance:
        folded = x.reshape(1, samples * channels, -1)
        weight, bias = (reference.repeated(t, samples) for t in (weight, bias))
        return F.batch_norm(folded, None, None, weight, bias, True, 0.0, settings.eps).view(x.shape)
    running = (None, None) if settings.training else (mean, var)
    return F.batch_norm(x, *running, weight, bias, settings.training, 0.0, settings.eps)


def _gradients(
    g: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias_dtype: torch.dtype | None,
    call: tuple[Tensor, Tensor, Settings],
    needed: Sequence[bool],
) -> Gradients:
    """The gradients of torch's norm. The bias's value does not matter, so torch's norm does not save it either."""
    mean, var, settings = call
    is_usual = x.dtype in (torch.float32, torch.float64) or (weight is not None and weight.dtype == torch.float32)
    if is_usual and settings.group is None and not torch.is_grad_enabled() and not _torch.transforms_active():
        inv_std, mask = torch.rsqrt(var + settings.eps), list(needed[:3])
        if not settings.per_instance:
            running = (None, None) if settings.training else (mean, var)
            found = torch.ops.aten.native_batch_norm_backward(
                g, x, weight, *running, mean, inv_std, settings.training, settings.eps, mask
            )
            return [t if need else None for t, need in zip(found, mask, strict=True)]
    create_graph, inputs = torch.is_grad_enabled(), []
    with torch.enable_grad():
        given = [x, weight, None if bias_dtype is None else x.new_zeros(x.shape[1], dtype=bias_dtype)]
        for i, t in enumerate(given):
            if t is not None and needed[i]:
                # Hooks on a tensor itself run when its gradient is complete, and must not run here.
                given[i] = t.view_as(t) if create_graph and t.requires_grad else t.detach().requires_grad_()
                inputs.append(given[i])
        y = native(*given, *call)  # type: ignore[arg-type]
        found = iter(torch.autograd.grad(y, inputs, g, create_graph=create_graph) if inputs else ())  # type: ignore[arg-type]
    return [next(found) if need else None for need in needed[:3]]


class NormFunction(torch.autograd.Function):
    """The node of y. It saves what torch's norm saves."""

    @staticmethod
    def forward(*inputs: Any) -> Tensor:
        return inputs[-1][0]  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, bias, mean, var, settings, _ = inputs
        ctx.save_for_backward(x, weight)
        ctx.bias_dtype, ctx.call = None if bias is None else bias.dtype, (mean, var, settings)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> tuple[Tensor | None, ...]:
        if g is None:
            return (None,) * 7
        x, weight = ctx.saved_tensors
        return *_gradients(g, x, weight, ctx.bias_dtype, ctx.call, ctx.needs_input_grad), None, None, None, None


_library = torch.library.Library("inplace_abn", "FRAGMENT")
_library.define(
    "waiting_backward(Tensor g, Tensor x, Tensor? weight, ScalarType? bias_dtype, Tensor? mean, Tensor var, "
    "bool[] needed, float eps, bool training, int shared) -> Tensor[]"
)


def _norm_backward(*args: Any) -> list[Tensor]:
    """The gradients that are needed, for the node in C++."""
    g, x, weight, bias_dtype, mean, var, needed, eps, training, shared = args
    settings = Settings(*IDENTITY, eps, WEIGHT, training, None, shared)
    found = _gradients(g, x, weight, bias_dtype, (mean, var, settings), needed)
    return [t for t in found if t is not None]


_library.impl("waiting_backward", _norm_backward, "CompositeImplicitAutograd")

# As in autograd/nodes.py, this is ``apply`` without the binding of default arguments.
_apply = super(torch.autograd.Function, NormFunction).apply


def attached(
    node: Node | None, y: Tensor, x: Tensor, operands: Operands, statistics: tuple[Tensor, Tensor], settings: Settings
) -> None:
    """Gives y, which has no graph, the node of torch's norm."""
    weight, bias, _ = operands.of_graph()
    if node is None or settings.group is not None:
        _apply(x, weight, bias, *statistics, settings, (y,))
    else:
        node.wait(y, x, weight, bias, None, *statistics, settings.eps, settings.training, settings.shared)
