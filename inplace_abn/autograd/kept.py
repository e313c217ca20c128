"""Synchronised batch norm and activation that keep x, for layers that the guard does not trust.

The collectives and their payloads are those of the in-place form. So ranks never disagree about them, even where they
disagree about a layer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from inplace_abn import distributed, reference
from inplace_abn.activations import activate, activation_backward
from inplace_abn.autograd import backward
from inplace_abn.settings import Operands, Settings


class KeptABNFunction(torch.autograd.Function):
    """z from x of shape (batch, channel, \\*) and the statistics of the whole batch, out of place."""

    @staticmethod
    def forward(
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        mean: Tensor,
        var: Tensor,
        settings: Settings,
    ) -> Tensor:
        _, y = _normalised(x, Operands(weight, bias, residual), (mean, var), settings)
        return activate(y, settings.activation, settings.activation_param)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, bias, *others, ctx.settings = inputs
        ctx.save_for_backward(x, *backward.by_value(weight, bias), *others)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dz: Tensor) -> tuple[Tensor | None, ...]:
        settings: Settings = ctx.settings
        need_x, need_weight, need_bias, need_residual, *_ = ctx.needs_input_grad
        x, weight, bias, residual, mean, var = ctx.saved_tensors
        xhat, y = _normalised(x, Operands(weight, bias, residual), (mean, var), settings)
        dy = activation_backward(y, dz, settings.activation, settings.activation_param)
        dresidual = dy if need_residual else None
        dy = dy.to(xhat.dtype)
        sum_dy, sum_xhat_dy = reference.channel_sum(dy), reference.channel_sum(xhat * dy)
        dx = dweight = dbias = None
        if need_weight:
            dweight = reference.weight_gradient(sum_xhat_dy, weight, settings.scale).to(weight.dtype)
        if need_bias:
            dbias = sum_dy.to(bias.dtype)
        if need_x:
            assert settings.group is not None
            means = distributed.means(sum_dy, sum_xhat_dy, backward.values_per_channel(x), settings.group)
            inv_std, scale = torch.rsqrt(var + settings.eps), reference.unclamped(weight, settings.eps, settings.scale)
            dx = reference.input_gradient(dy, xhat, inv_std if scale is None else inv_std * scale, means).to(x.dtype)
        return dx, dweight, dbias, dresidual, None, None, None


def _normalised(
    x: Tensor, operands: Operands, statistics: tuple[Tensor, Tensor], settings: Settings
) -> tuple[Tensor, Tensor]:
    """xhat in the statistics' dtype, and the activation's input in x's dtype, rounded where torch rounds."""
    weight, bias, residual = operands.of_graph()
    xhat = reference.standardised(x, *statistics, settings.eps)
    scale = reference.unclamped(weight, settings.eps, settings.scale)
    y = reference.scaled(xhat, scale, bias, None).to(x.dtype)
    return xhat, y if residual is None else y + residual
