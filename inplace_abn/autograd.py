"""Autograd where C++ does not suffice: for statistics of several processes, torch.func's transforms, compilers, and
gradients of gradients. Everything else is in ``src/autograd.cpp``, by the same rules.

Everything is recovered from z alone (arXiv 1712.02616), in memory that is backward's own where there is some. The op
has run before autograd is told: `InPlaceABNFunction` only declares that x has become z, so that an op that fails leaves
no trace in the graph.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from inplace_abn import collectives, ops, ownership, reference
from inplace_abn.ops import backend
from inplace_abn.settings import Settings, name_of

# Gradients of x, weight, bias and residual.
_Gradients = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]


class _Saved(NamedTuple):
    """What backward has of the forward pass."""

    z: Tensor
    weight: Tensor | None
    bias: Tensor | None
    residual: Tensor | None
    var: Tensor


class InPlaceABNFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        var: Tensor,
        settings: Settings,
        watch: backend.Watch,
    ) -> Tensor:
        return x

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, *others, ctx.settings, ctx.watch = inputs
        ctx.mark_dirty(x)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(output, *others)

    @staticmethod
    def backward(ctx: Any, dz: Tensor | None) -> tuple[Tensor | None, ...]:
        if dz is None:
            return (None,) * 7
        settings: Settings = ctx.settings
        # Compiled code is functional: nothing is reused, the compiler does that.
        if torch.compiler.is_compiling():
            saved = _Saved(*ctx.saved_tensors)
            return *_gradients(ctx.needs_input_grad, saved, dz, False, False, settings), None, None, None
        own_dz = ownership.owns_gradient(dz)
        hooked = ownership.is_hooked(ctx)
        if not hooked:
            ctx.watch.check_unmodified(None)
        saved = _Saved(*ctx.saved_tensors)
        z = saved.z
        if hooked:
            ctx.watch.check_unmodified(z)
        if torch.is_grad_enabled():
            return *_differentiable(saved, dz, settings), None, None, None
        own_dz = own_dz and z.stride() == dz.stride()
        own_z = not hooked and ownership.owns_output(z)
        # z itself is part of the graph, its memory as a gradient must not be.
        saved = saved._replace(z=z.detach())
        return *_gradients(ctx.needs_input_grad, saved, dz, own_z, own_dz, settings), None, None, None


# `torch.autograd.Function.apply` without its binding of default arguments, which takes longer than all the rest.
_apply = super(torch.autograd.Function, InPlaceABNFunction).apply


def overwritten(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    var: Tensor,
    settings: Settings,
) -> Tensor:
    """x, whose content is z by now, with its place in the graph."""
    watch = backend.Watch()
    apply = InPlaceABNFunction.apply if torch._C._are_functorch_transforms_active() else _apply
    z: Tensor = apply(x, weight, bias, residual, var, settings, watch)
    watch.start(z)
    backend.observe_gradient(z)
    return z


def marked_as_overwritten(x: Tensor) -> Tensor:
    """x with the place in the graph that an identity has, of which ownership is calibrated."""
    var = x.new_ones(x.shape[1])
    return overwritten(x, None, None, None, var, Settings("identity", 0.0, 1e-5, False, False, None))


class TracedABNFunction(torch.autograd.Function):
    """For compilers: out of place. What `InPlaceABNFunction` does is beyond them: what is written under no_grad loses
    its gradient if x comes from outside of the compiled region, and later writes to z change what was saved."""

    @staticmethod
    def forward(
        x: Tensor,
        z: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        var: Tensor,
        settings: Settings,
    ) -> Tensor:
        return z.view_as(z)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, _, *others, ctx.settings = inputs
        ctx.save_for_backward(output, *others)

    @staticmethod
    def backward(ctx: Any, dz: Tensor) -> tuple[Tensor | None, ...]:
        saved, settings = _Saved(*ctx.saved_tensors), ctx.settings
        need_x, _, *need = ctx.needs_input_grad
        dx, *others = _gradients((need_x, *need), saved, dz, False, False, settings)
        return dx, None, *others, None, None


def _gradients(
    need: tuple[bool, ...], saved: _Saved, dz: Tensor, own_z: bool, own_dz: bool, settings: Settings
) -> _Gradients:
    if settings.group is None:
        return _local(need, saved, dz, settings)
    return _synchronised(need, saved, dz, own_z, own_dz, settings)


def _local(need: tuple[bool, ...], saved: _Saved, dz: Tensor, settings: Settings) -> _Gradients:
    z, weight, bias, residual, var = saved
    like = (z, weight, bias, residual)
    dx, dweight, dbias, dresidual = (
        torch.empty_like(t) if t is not None and needed else None for t, needed in zip(like, need, strict=False)
    )
    ops.local_backward(
        z,
        dz,
        var,
        weight,
        bias,
        residual,
        *settings.arithmetic(),
        settings.training,
        dx=dx,
        dweight=dweight,
        dbias=dbias,
        dresidual=dresidual,
    )
    return dx, dweight, dbias, dresidual


def _synchronised(
    need: tuple[bool, ...], saved: _Saved, dz: Tensor, own_z: bool, own_dz: bool, settings: Settings
) -> _Gradients:
    """With a collective in between: the sums over all ranks' dy and xhat * dy, and their count.

    xhat is written over z and dy over dz where these are backward's own; dx over xhat if the residual takes dy, else
    over dy.
    """
    z, weight, bias, residual, var = saved
    xhat = z if own_z else torch.empty_like(z)
    dy = dz if own_dz else torch.empty_like(z)
    sum_dy, sum_xhat_dy = ops.backward_reduce_out(
        z, dz, weight, bias, residual, *settings.arithmetic(), xhat=xhat, dy=dy
    )
    dweight = dbias = dx = None
    if weight is not None and need[1]:
        signed = sum_xhat_dy if settings.signed_weight else torch.where(weight < 0, -sum_xhat_dy, sum_xhat_dy)
        dweight = signed.to(weight.dtype)
    if bias is not None and need[2]:
        dbias = sum_dy.to(bias.dtype)
    if need[0]:
        means: tuple[Tensor | None, ...] = (None, None)
        if settings.training:
            share = torch.cat([sum_dy, sum_xhat_dy, sum_dy.new_full((1,), values_per_channel(z))])
            sums = collectives.all_reduce(share, cast(ProcessGroup, settings.group))
            means = (sums[:-1] / sums[-1]).view(2, -1).unbind()
        dx = xhat if need[3] else dy
        ops.backward_out(xhat, dy, var, weight, settings.eps, settings.signed_weight, *means, dx=dx)
    return dx, dweight, dbias, dy if need[3] else None


def _differentiable(saved: _Saved, dz: Tensor, settings: Settings) -> _Gradients:
    """For ``create_graph=True``, in plain torch.

    z alone does not do: var depends on x along xhat, a direction that z's own graph edge annihilates. So x is computed
    from z and given the graph edge that x had before it was overwritten; everything else is a function of that x. Its
    mean is arbitrary, because only x - mean matters.
    """
    z, weight, bias, residual, var = saved
    if settings.group is not None:
        raise RuntimeError(
            "inplace_abn: create_graph=True is not supported by synchronised statistics; "
            "use InPlaceABN, or set INPLACE_ABN_DISABLE=1 for plain out-of-place synchronised batch norm"
        )
    with torch.no_grad():
        xhat, dy = torch.empty_like(z), torch.empty_like(z)
        ops.backward_reduce_out(z, dz, weight, bias, residual, *settings.arithmetic(), xhat=xhat, dy=dy)
        x = xhat * reference.per_channel(torch.sqrt(var + settings.eps), xhat).to(xhat.dtype)
    _set_input_edges(x, z)
    dx, dweight, dbias, dresidual = reference.backward(
        x,
        dz,
        weight,
        bias,
        mean=None if settings.training else torch.zeros_like(var),
        var=None if settings.training else var,
        eps=settings.eps,
        activation=settings.activation,
        activation_param=settings.activation_param,
        signed_weight=settings.signed_weight,
        residual=residual,
    )
    return (
        dx,
        None if weight is None else dweight,
        None if bias is None else dbias,
        None if residual is None else dresidual,
    )


def differentiable(
    z: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    var: Tensor,
    dz: Tensor,
    activation: int,
    activation_param: float,
    eps: float,
    signed_weight: bool,
    training: bool,
) -> _Gradients:
    """The differentiable gradients of x, weight, bias and residual, for ``src/autograd.cpp``."""
    settings = Settings(name_of(activation), activation_param, eps, signed_weight, training, None)
    return _differentiable(_Saved(z, weight, bias, residual, var), dz, settings)


def _set_input_edges(x: Tensor, z: Tensor) -> None:
    """Gives x the edge that z's input had, at each level of torch.func's transforms that is still open."""
    functorch = torch._C._functorch
    while functorch.is_gradtrackingtensor(z) and functorch.maybe_get_level(z) < 0:
        z = functorch.get_unwrapped(z)
    if z.grad_fn is not None:
        backend.set_input_edge(x, z)
    if functorch.is_gradtrackingtensor(z):
        _set_input_edges(functorch.get_unwrapped(x), functorch.get_unwrapped(z))


def values_per_channel(x: Tensor) -> int:
    return x.shape[0] * math.prod(x.shape[2:])
