"""A linear layer whose output u is multiplied by a vector (LayerScale, arXiv 2103.17239), without keeping u.

    u = h W^T + b        z = u * gamma        G = dz^T h
    du = dz * gamma      dgamma_i = sum_j G_ij W_ij + b_i sum(dz_i)      dW = gamma * G

So the product that dW needs is computed once, if u was multiplied only.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Linear(NamedTuple):
    """What a linear layer computed its output from."""

    h: Tensor
    weight: Tensor
    bias: Tensor | None


class Exchange:
    """What the node of the product leaves to the node of the linear layer: dW for a certain du."""

    du: Tensor | None = None
    version = 0
    dweight: Tensor | None = None

    def give(self, du: Tensor, dweight: Tensor) -> None:
        self.du, self.version, self.dweight = du, du._version, dweight

    def take(self, du: Tensor) -> Tensor | None:
        """dW, if all of du came from the product."""
        is_same = self.du is du and self.version == du._version
        dweight, self.du, self.dweight = self.dweight if is_same else None, None, None
        return dweight


class LinearFunction(torch.autograd.Function):
    """The node of u, which is computed already."""

    @staticmethod
    def forward(h: Tensor, weight: Tensor, bias: Tensor | None, u: tuple[Tensor], exchange: Exchange) -> Tensor:
        return u[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        h, weight, bias, _, ctx.exchange = inputs
        ctx.save_for_backward(h, weight)
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, du: Tensor | None) -> tuple[Tensor | None, ...]:
        if du is None:
            return (None,) * 5
        (h, weight), need = ctx.saved_tensors, ctx.needs_input_grad
        exchanged = None if torch.is_grad_enabled() else ctx.exchange.take(du)
        dh = du @ weight.to(du.dtype) if need[0] else None
        dweight = None
        if need[1]:
            dweight = du.flatten(0, -2).t() @ h.flatten(0, -2) if exchanged is None else exchanged
            dweight = dweight.to(weight.dtype)
        return dh, dweight, du.flatten(0, -2).sum(dim=0).to(ctx.bias_dtype) if need[2] else None, None, None


class ScaleFunction(torch.autograd.Function):
    """The node of z, which is computed already. u is its place in the graph only."""

    @staticmethod
    def forward(u: Tensor, gamma: Tensor, z: tuple[Tensor], linear: Linear, exchange: Exchange | None) -> Tensor:
        return z[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        u, gamma, _, linear, ctx.exchange = inputs
        ctx.dtype = u.dtype
        ctx.save_for_backward(gamma, *linear)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, dz: Tensor | None) -> tuple[Tensor | None, ...]:
        if dz is None:
            return (None,) * 5
        gamma, h, weight, bias = ctx.saved_tensors
        du = (dz * gamma).to(ctx.dtype) if ctx.needs_input_grad[0] else None
        dgamma = None
        if ctx.needs_input_grad[1]:
            wide = torch.promote_types(ctx.dtype, torch.float32)
            dz = dz.flatten(0, -2)
            product = dz.to(ctx.dtype).t() @ h.flatten(0, -2)
            dgamma = (product.to(wide) * weight).sum(dim=1)
            if bias is not None:
                dgamma = dgamma + bias * dz.sum(dim=0, dtype=wide)
            dgamma = dgamma.to(gamma.dtype)
            if du is not None and ctx.exchange is not None and not torch.is_grad_enabled():
                ctx.exchange.give(du, product * gamma.unsqueeze(1).to(wide))
        return du, dgamma, None, None, None


def linear(given: Linear, u: Tensor, exchange: Exchange) -> Tensor:
    """u, the output of a linear layer, with a node that `scaled` works together with."""
    result: Tensor = LinearFunction.apply(*given, (u.detach(),), exchange)
    return result


def scaled(u: Tensor, gamma: Tensor, z: Tensor, given: Linear, exchange: Exchange | None) -> Tensor:
    """z = u * gamma, with a node that does not keep u, the output of a linear layer."""
    result: Tensor = ScaleFunction.apply(u, gamma, (z,), given, exchange)
    return result
