"""Autograd: ``inplace_abn`` and ``inplace_abn_sync``, the buffers they own, and what backward may reuse.

The forward pass writes z over x and keeps z alone; the backward pass recovers everything else from it
("In-Place Activated BatchNorm for Memory-Optimized Training of DNNs", arXiv 1712.02616). The op runs before autograd is
told: `_InPlaceABN` only declares that x has become z, so that an op that fails leaves no trace in the graph.

``INPLACE_ABN_DISABLE=1`` in the environment makes both functions work out of place, for debugging.
"""

from __future__ import annotations

import math
import os
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from inplace_abn import collectives, ops, ownership, plain, reference
from inplace_abn.ops import backend

_DISABLED = os.environ.get("INPLACE_ABN_DISABLE") == "1"


class _Settings(NamedTuple):
    """What a call does, beside its tensors."""

    activation: str
    activation_param: float
    eps: float
    signed_weight: bool
    training: bool
    group: ProcessGroup | None

    def arithmetic(self) -> tuple[float, bool, int, float]:
        """The arguments that every op has in common."""
        return self.eps, self.signed_weight, _ACTIVATIONS[self.activation], self.activation_param


class _Saved(NamedTuple):
    """What backward has of the forward pass."""

    z: Tensor
    weight: Tensor | None
    bias: Tensor | None
    residual: Tensor | None
    var: Tensor


# Gradients of x, weight, bias and residual.
_Gradients = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]

_ACTIVATIONS: dict[str, int] = {name: int(value) for name, value in backend.Activation.__members__.items()}
_ACTIVATIONS["none"] = _ACTIVATIONS["identity"]


def check_activation(activation: str, activation_param: float) -> None:
    """Raises ValueError for an unknown activation, a negative slope or an alpha that is not positive."""
    if activation not in _ACTIVATIONS:
        raise ValueError(f"inplace_abn: expected activation to be one of {sorted(_ACTIVATIONS)}, got {activation!r}")
    if activation == "leaky_relu" and not 0 <= activation_param < math.inf:
        raise ValueError(f"inplace_abn: expected a finite leaky_relu slope >= 0, got {activation_param}")
    if activation == "elu" and not 0 < activation_param < math.inf:
        raise ValueError(f"inplace_abn: expected a finite elu alpha > 0, got {activation_param}")


def check_hyperparameters(eps: float, momentum: float | Tensor | None) -> None:
    """Raises ValueError for an eps that is not positive or a momentum that is not finite."""
    if not 0 < eps < math.inf:
        raise ValueError(f"inplace_abn: expected a finite eps > 0, got {eps}")
    if not isinstance(momentum, Tensor) and momentum is not None and not -math.inf < momentum < math.inf:
        raise ValueError(f"inplace_abn: expected a finite momentum, got {momentum}")


class _Output:
    """Of z, nothing but whether it still is what backward will need."""

    version: backend.Version

    def check_unmodified(self, unpacked: Tensor | None = None) -> None:
        """``unpacked``: what saved-tensor hooks made of z, which may be a copy made in time, or z itself."""
        if self.version.changed() and (unpacked is None or unpacked._version > self.version.then):
            raise RuntimeError(
                "inplace_abn: the output of an in-place ABN has been modified in place, but its backward needs it. "
                "Replace that operation by one out of place (z = z + y for z += y), or use ABN"
            )


class _InPlaceABN(torch.autograd.Function):
    @staticmethod
    def forward(
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        var: Tensor,
        settings: _Settings,
        output: _Output,
    ) -> Tensor:
        return x

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, *others, ctx.settings, ctx.output = inputs
        ctx.mark_dirty(x)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(output, *others)

    @staticmethod
    def backward(ctx: Any, dz: Tensor | None) -> tuple[Tensor | None, ...]:
        if dz is None:
            return (None,) * 7
        settings: _Settings = ctx.settings
        backward = _local_backward if settings.group is None else _sync_backward
        # Compiled code is functional: nothing is reused, the compiler does that.
        if torch.compiler.is_compiling():
            saved = _Saved(*ctx.saved_tensors)
            return *backward(ctx.needs_input_grad, saved, dz, False, False, settings), None, None, None
        hooked = ownership.is_hooked(ctx)
        if not hooked:
            ctx.output.check_unmodified()
        saved = _Saved(*ctx.saved_tensors)
        z = saved.z
        if hooked:
            ctx.output.check_unmodified(z)
        if torch.is_grad_enabled():
            return *_differentiable_backward(saved, dz, settings), None, None, None
        own_dz = z.stride() == dz.stride() and ownership.owns_gradient(dz)
        own_z = not hooked and ownership.owns_output(z)
        # z itself is part of the graph, its memory as a gradient must not be.
        saved = saved._replace(z=z.detach())
        return *backward(ctx.needs_input_grad, saved, dz, own_z, own_dz, settings), None, None, None


class _TracedABN(torch.autograd.Function):
    """For compilers: out of place. What `_InPlaceABN` does is beyond them: what is written under no_grad loses its
    gradient if x comes from outside of the compiled region, and later writes to z change what was saved."""

    @staticmethod
    def forward(
        x: Tensor,
        z: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        var: Tensor,
        settings: _Settings,
    ) -> Tensor:
        return z.view_as(z)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, _, *others, ctx.settings = inputs
        ctx.save_for_backward(output, *others)

    @staticmethod
    def backward(ctx: Any, dz: Tensor) -> tuple[Tensor | None, ...]:
        saved, settings = _Saved(*ctx.saved_tensors), ctx.settings
        backward = _local_backward if settings.group is None else _sync_backward
        need_x, _, *need = ctx.needs_input_grad
        dx, *others = backward((need_x, *need), saved, dz, False, False, settings)
        return dx, None, *others, None, None


def _local_backward(
    need: tuple[bool, ...], saved: _Saved, dz: Tensor, own_z: bool, own_dz: bool, settings: _Settings
) -> _Gradients:
    """Writes dx, and the residual's gradient if there is one, over dz and z where these are backward's own."""
    z, weight, bias, residual, var = saved
    reusable = [t for t, own in ((z, own_z), (dz, own_dz)) if own]

    def activation_sized(needed: bool) -> Tensor | None:
        if not needed:
            return None
        return reusable.pop() if reusable else torch.empty_like(z)

    dresidual = activation_sized(need[3])
    dx = activation_sized(need[0])
    dweight = torch.empty_like(weight) if weight is not None and need[1] else None
    dbias = torch.empty_like(bias) if bias is not None and need[2] else None
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


def _sync_backward(
    need: tuple[bool, ...], saved: _Saved, dz: Tensor, own_z: bool, own_dz: bool, settings: _Settings
) -> _Gradients:
    """Step by step, with one collective in between: the sums over all ranks' dy and xhat * dy, and their count.

    dx is written over xhat if the residual takes dy, else over dy.
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
        channels = z.shape[1]
        count = sum_dy.new_full((1,), _values_per_channel(z))
        sums = collectives.all_reduce(torch.cat([sum_dy, sum_xhat_dy, count]), cast(ProcessGroup, settings.group))
        mean_dy, mean_xhat_dy = (sums[: 2 * channels] / sums[2 * channels]).view(2, channels).unbind()
        dx = xhat if need[3] else dy
        ops.backward_out(xhat, dy, var, weight, settings.eps, settings.signed_weight, mean_dy, mean_xhat_dy, dx=dx)
    return dx, dweight, dbias, dy if need[3] else None


def _differentiable_backward(saved: _Saved, dz: Tensor, settings: _Settings) -> _Gradients:
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


def _set_input_edges(x: Tensor, z: Tensor) -> None:
    """Gives x the edge that z's input had, at each level of torch.func's transforms that is still open."""
    functorch = torch._C._functorch
    while functorch.is_gradtrackingtensor(z) and functorch.maybe_get_level(z) < 0:
        z = functorch.get_unwrapped(z)
    if z.grad_fn is not None:
        backend.set_input_edge(x, z)
    if functorch.is_gradtrackingtensor(z):
        _set_input_edges(functorch.get_unwrapped(x), functorch.get_unwrapped(z))


def _values_per_channel(x: Tensor) -> int:
    return x.shape[0] * math.prod(x.shape[2:])


def _check_count(count: float, x: Tensor) -> None:
    if count < 2:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {x.shape}")


def _check_inner_transforms(inputs: tuple[Tensor | None, ...]) -> None:
    functorch = torch._C._functorch
    if functorch.peek_interpreter_stack() is None:
        return
    for t in inputs:
        while t is not None and functorch.is_functorch_wrapped_tensor(t):
            backend.check_transforms(t)
            t = functorch.get_unwrapped(t)
        backend.check_transforms(t)


def _check_producer(x: Tensor) -> None:
    """Raises if the node that made x, or what x is a view of, saved its result."""
    for node in (x.grad_fn, x._base.grad_fn if x._base is not None else None):
        # Asked of the type: the node itself would unpack what it saved.
        if node is not None and (hasattr(type(node), "_saved_result") or isinstance(node, _InPlaceABN._backward_cls)):
            raise RuntimeError(
                f"inplace_abn: x is the output of {node.name()}, which needs it for its own backward, so it cannot be "
                "overwritten. Pass x.clone(), or use ABN, which works out of place"
            )


def _momentum_arguments(momentum: float | Tensor) -> tuple[float, Tensor | None]:
    return (0.0, momentum) if isinstance(momentum, Tensor) else (momentum, None)


def inplace_abn(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool = True,
    momentum: float | Tensor = 0.1,
    eps: float = 1e-5,
    activation: str = "leaky_relu",
    activation_param: float = 0.01,
    *,
    signed_weight: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """z = act(gamma * (x - mean) / sqrt(var + eps) + bias + residual), written over ``x``.

    Args:
        x: activations of shape (batch, channel, \\*), dtype float64, float32, bfloat16 or float16, in any strides
            without internal overlap. Overwritten with the result.
        weight: (channel,) or None; scales by ``|weight| + eps``. float32 or x's dtype.
        bias: (channel,) or None. float32 or x's dtype.
        running_mean: (channel,) or None; updated in training, used otherwise.
        running_var: (channel,) or None; updated in training (with the unbiased variance), used otherwise.
        training: normalise with the statistics of ``x``; otherwise with the running ones, if there are any.
        momentum: share of the new statistics in the running ones; a float64 tensor of one value on x's device where
            it is only known there.
        eps: added to the variance, and the least that scales. Positive.
        activation: "identity" (or "none"), "leaky_relu", "elu", "relu", "silu", "hardswish".
        activation_param: slope of leaky_relu (>= 0; zero means relu), alpha of elu (> 0).
        signed_weight: scale by the weight itself, sign kept and at least ``eps`` in magnitude, as a standard
            BatchNorm's weight needs it, instead of by ``|weight| + eps``.
        residual: of x's shape, dtype and device, in memory of its own; added before the activation. Saved beside the
            result, because it is alive anyway: it is the input of the block it bridges.

    Returns:
        ``x``, which now holds the result.

    Raises:
        ValueError: a wrong value or shape, one value per channel in training, or an ``x`` that autograd does not let
            be overwritten. Nothing has been modified.
        TypeError: a dtype that is not supported or does not combine.
        RuntimeError: ``x``'s producer needs it for its own backward.

    Source: arXiv 1712.02616.
    """
    check_activation(activation, activation_param)
    check_hyperparameters(eps, momentum)
    settings = _Settings(activation, activation_param, eps, signed_weight, training or running_mean is None, None)
    return _forward(x, weight, bias, residual, running_mean, running_var, momentum, settings)


def inplace_abn_sync(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool = True,
    momentum: float | Tensor = 0.1,
    eps: float = 1e-5,
    activation: str = "leaky_relu",
    activation_param: float = 0.01,
    group: ProcessGroup | None = None,
    *,
    signed_weight: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """`inplace_abn` with the statistics of all ranks of ``group`` (None: the default group).

    Ranks may have different batch and spatial sizes, also empty ones. Forward has one all_gather, backward one
    all_reduce, both in training only. ``dweight`` and ``dbias`` are those of the rank's own share of the batch, to be
    reduced with the other parameters' gradients (as DistributedDataParallel does). If torch.distributed is not
    initialised, statistics are local, with one warning; so they are on a rank that is not in ``group``.

    Arguments, result and errors are those of `inplace_abn`; all ranks raise together where the whole batch has less
    than two values per channel.
    """
    check_activation(activation, activation_param)
    check_hyperparameters(eps, momentum)
    training = training or running_mean is None
    group = collectives.participating_group(group) if training else None
    settings = _Settings(activation, activation_param, eps, signed_weight, training, group)
    return _forward(x, weight, bias, residual, running_mean, running_var, momentum, settings)


def _forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float | Tensor,
    settings: _Settings,
) -> Tensor:
    inputs = (x, weight, bias, residual)
    requires_grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs)
    if _DISABLED:
        return _out_of_place(x, weight, bias, residual, running_mean, running_var, momentum, settings)
    if not torch.compiler.is_compiling():
        _check_inner_transforms(inputs)
        backend.check_call(x, weight, bias, residual, running_mean, running_var, requires_grad)
        if requires_grad:
            _check_producer(x)
    if settings.training and settings.group is None:
        _check_count(_values_per_channel(x), x)
    # What makes z invertible is left out where no backward will follow.
    invertible = requires_grad
    with torch.no_grad():
        traced = requires_grad and torch.compiler.is_compiling()
        data = x.clone() if traced else x.detach()
        if settings.training and settings.group is None:
            _, var = ops.local_forward(
                data,
                weight,
                bias,
                residual,
                running_mean,
                running_var,
                *_momentum_arguments(momentum),
                *settings.arithmetic(),
                invertible,
            )
        else:
            if settings.training:
                mean, var = _sync_statistics(data, running_mean, running_var, momentum, settings.group)
            else:
                mean, var = cast(Tensor, running_mean), cast(Tensor, running_var)
            ops.forward(data, mean, var, weight, bias, residual, *settings.arithmetic(), invertible)
    if not requires_grad:
        return x
    if traced:
        # The compiler makes one buffer of x, its clone and the copy.
        return x.copy_(_TracedABN.apply(x, data, weight, bias, residual, var, settings))
    output = _Output()
    z: Tensor = _InPlaceABN.apply(x, weight, bias, residual, var, settings, output)
    output.version = backend.Version(z)
    return z


def _sync_statistics(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float | Tensor,
    group: ProcessGroup | None,
) -> tuple[Tensor, Tensor]:
    """Mean and biased variance over all ranks. A rank with values enough knows that the whole batch has; only others
    look at the gathered counts (which waits for the device), so that all ranks raise together or none does."""
    count = _values_per_channel(x)
    mean, var = ops.statistics(x)
    packed = torch.cat([mean, var, mean.new_full((1,), count)])
    gathered = collectives.all_gather(packed, cast(ProcessGroup, group))
    if not torch.compiler.is_compiling() and count < 2:
        _check_count(gathered[:, -1].sum().item(), x)
    mean, var, _ = ops.combine(gathered, running_mean, running_var, *_momentum_arguments(momentum))
    return mean, var


def _out_of_place(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float | Tensor,
    settings: _Settings,
) -> Tensor:
    scale = None if weight is None else reference.gamma(weight, settings.eps, settings.signed_weight)
    what = (settings.eps, settings.activation, settings.activation_param, residual)
    if settings.group is None:
        return plain.abn(x, scale, bias, running_mean, running_var, settings.training, momentum, *what)
    return plain.abn_sync(x, scale, bias, running_mean, running_var, momentum, *what, settings.group)


if not _DISABLED:
    ownership.calibrate(inplace_abn)
