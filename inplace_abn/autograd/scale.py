"""A linear layer whose output u is multiplied by a vector (LayerScale, arXiv 2103.17239), without keeping u.

    u = h W^T + b        z = u * gamma        du = dz * gamma

`reference.gradients_of_scaled` has the gradients of gamma and W. The product of matrices that both need is computed
once if u was multiplied only.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from inplace_abn import _torch
from inplace_abn.autograd.backward import input_edge, placed
from inplace_abn.kernels import ops
from inplace_abn.reference import gradients_of_scaled, mean_of_rows, wide


class Linear(NamedTuple):
    """What a linear layer computed its output from."""

    h: Tensor
    weight: Tensor
    bias: Tensor | None


def _rows(t: Tensor) -> Tensor:
    return t.reshape(-1, t.shape[-1])


def _quick_mean(t: Tensor) -> Tensor:
    """`mean_of_rows`, in 16 bits by the kernel for statistics: on the CPU torch would copy the matrix."""
    if t.dtype == wide(t.dtype) or _torch.is_batched(t) or t.shape[0] < 2 or not ops.run_on(t.device):
        return mean_of_rows(t)
    mean, _ = ops.run(ops.statistics, [], t, 0)
    return mean  # type: ignore[no-any-return]


class Exchange:
    """What the node of the product leaves to the node of the linear layer: dW for a certain du."""

    du: Tensor | None = None
    version: int = 0
    dweight: Tensor | None = None

    def give(self, du: Tensor, dweight: Tensor) -> None:
        self.du, self.version, self.dweight = _rows(du), du._version, dweight

    def take(self, du: Tensor) -> Tensor | None:
        """dW, if all of du came from the product. Nobody else gets the memory of the du that is held here."""
        given, self.du = self.du, None
        dweight, self.dweight = self.dweight, None
        if given is None or _torch.is_batched(du) or given.data_ptr() != du.data_ptr() or self.version != du._version:
            return None
        return dweight if (given.shape, given.stride()) == (du.shape, du.stride()) else None


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
        du = _rows(du)
        (h, weight), need = ctx.saved_tensors, ctx.needs_input_grad
        exchanged = None if torch.is_grad_enabled() else ctx.exchange.take(du)
        dh = (du @ weight.to(du.dtype)).view(h.shape) if need[0] else None
        dweight = None
        if need[1]:
            dweight = (du.t() @ _rows(h) if exchanged is None else exchanged).to(weight.dtype)
        return dh, dweight, du.sum(dim=0).to(ctx.bias_dtype) if need[2] else None, None, None


class Product(NamedTuple):
    """What the node of z = t * gamma knows besides t and gamma. t is u, or a permutation of it."""

    linear: Linear
    back: tuple[int, ...]
    """The permutation that makes u of t."""
    mean: Tensor
    """Of u over its rows."""
    exchange: Exchange | None
    edge: Tensor
    """A tensor without memory that has t's place in the graph."""


class ScaleFunction(torch.autograd.Function):
    """The node of z, which is computed already. t is its place in the graph only."""

    @staticmethod
    def forward(t: Tensor, gamma: Tensor, z: tuple[Tensor], product: Product) -> Tensor:
        return z[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        t, gamma, _, product = inputs
        h, weight, bias = product.linear
        # Autograd notices writes to h and W, as it does for the linear layer. Nobody else keeps the bias.
        values = None if bias is None else bias.detach().clone()
        ctx.save_for_backward(gamma, h.detach(), weight.detach(), values, product.mean)
        ctx.back, ctx.exchange, ctx.edge, ctx.dtype = product.back, product.exchange, product.edge, t.dtype
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, dz: Tensor | None) -> tuple[Tensor | None, ...]:
        if dz is None:
            return (None,) * 4
        gamma, h, weight, bias, mean_of_u = ctx.saved_tensors
        need, back = ctx.needs_input_grad, ctx.back
        forth = [back.index(i) for i in range(len(back))]
        # Here all tensors are laid out as u.
        dz = dz.permute(back).contiguous()
        du = (dz * gamma).to(ctx.dtype) if need[0] else None
        dgamma = None
        if need[1] and torch.is_grad_enabled():
            values = F.linear(h, weight.to(ctx.dtype), None if bias is None else bias.to(ctx.dtype)).permute(forth)
            t: Any = placed(values, ctx.edge)
            dgamma = _rows(dz * t.permute(back)).sum(dim=0)
        elif need[1]:
            dgamma, product, *vectors = gradients_of_scaled(_rows(dz), _rows(h), weight, mean_of_u, _quick_mean)
            if du is not None and ctx.exchange is not None:
                ctx.exchange.give(du, product.addr_(*vectors).mul_(gamma.unsqueeze(1)))
        return None if du is None else du.permute(forth), None if dgamma is None else dgamma.to(gamma.dtype), None, None


def linear(given: Linear, u: Tensor, exchange: Exchange) -> Tensor:
    """u, the output of a linear layer, with a node that `scaled` works together with."""
    # Some releases of torch return a view of a matrix, for some layouts of h. Hooks on a view stay behind when it is
    # written to.
    is_view = _torch.is_view(u)
    # An output that is a view could not be written to.
    values = _rows(u.detach()).detach() if is_view else u.detach()
    result: Tensor = LinearFunction.apply(*given, (values,), exchange)
    return result.view(u.shape) if is_view else result


def scaled(
    t: Tensor, gamma: Tensor, z: Tensor, given: Linear, back: tuple[int, ...], exchange: Exchange | None
) -> Tensor:
    """z, with a node that does not keep t.

    Args:
        t: u, or a permutation of it.
        gamma: the vector.
        z: the product, without a place in the graph.
        back: the permutation that makes u of t.
        exchange: that of the linear layer; None if it has torch's node.
    """
    mean = _quick_mean(_rows(t.detach().permute(back)))
    result: Tensor = ScaleFunction.apply(t, gamma, (z,), Product(given, back, mean, exchange, input_edge(t)))
    return result
