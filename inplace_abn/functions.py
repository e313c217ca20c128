"""``inplace_abn`` and ``inplace_abn_sync``: what is checked, what runs, and in which order.

The forward pass writes z over x and keeps z alone ("In-Place Activated BatchNorm for Memory-Optimized Training of
DNNs", arXiv 1712.02616). In eager mode both passes are ``src/autograd.cpp``; `autograd` has the backward pass of
everything else.

``INPLACE_ABN_DISABLE=1`` in the environment makes both functions work out of place, for debugging.
"""

from __future__ import annotations

import os
from typing import cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from inplace_abn import collectives, ops, ownership, plain, reference
from inplace_abn.autograd import TracedABNFunction, marked_as_overwritten, overwritten, values_per_channel
from inplace_abn.ops import backend
from inplace_abn.settings import Settings, check_activation, check_hyperparameters, code_of

_DISABLED = os.environ.get("INPLACE_ABN_DISABLE") == "1"


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
    training = training or running_mean is None
    if _is_plain_eager(x):
        return backend.inplace_abn(
            x,
            weight,
            bias,
            residual,
            running_mean,
            running_var,
            training,
            *_momentum_arguments(momentum),
            eps,
            signed_weight,
            code_of(activation),
            activation_param,
        )
    check_activation(activation, activation_param)
    check_hyperparameters(eps, momentum)
    settings = Settings(activation, activation_param, eps, signed_weight, training, None)
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
    if group is None:
        return inplace_abn(
            x,
            weight,
            bias,
            running_mean,
            running_var,
            training,
            momentum,
            eps,
            activation,
            activation_param,
            signed_weight=signed_weight,
            residual=residual,
        )
    settings = Settings(activation, activation_param, eps, signed_weight, training, group)
    return _forward(x, weight, bias, residual, running_mean, running_var, momentum, settings)


def _is_plain_eager(x: Tensor) -> bool:
    """Whether C++ can do it all: no compiler and no transform is watching, and x is no view, which autograd lets only
    functions in Python overwrite and save without a reference cycle."""
    watched = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    return not (_DISABLED or watched or (torch.is_grad_enabled() and x._is_view()))


def _forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float | Tensor,
    settings: Settings,
) -> Tensor:
    tensors = (x, weight, bias, residual)
    requires_grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    if _DISABLED:
        return _out_of_place(x, weight, bias, residual, running_mean, running_var, momentum, settings)
    compiling = torch.compiler.is_compiling()
    if not compiling:
        _check_inner_transforms(tensors)
        backend.check_call(x, weight, bias, residual, running_mean, running_var, requires_grad)
        if requires_grad:
            backend.check_producer(x)
    if settings.training and settings.group is None:
        _check_count(values_per_channel(x), x)
    if not requires_grad:
        _write(x, weight, bias, residual, running_mean, running_var, momentum, settings, invertible=False)
        return x
    with torch.no_grad():
        # The compiler makes one buffer of x, its clone and the copy below.
        data = x.clone() if compiling else x.detach()
        var = _write(data, weight, bias, residual, running_mean, running_var, momentum, settings, invertible=True)
    if compiling:
        return x.copy_(TracedABNFunction.apply(x, data, weight, bias, residual, var, settings))
    return overwritten(x, weight, bias, residual, var, settings)


def _write(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float | Tensor,
    settings: Settings,
    invertible: bool,
) -> Tensor:
    """Writes z over x, and returns the variance that backward needs. What makes z invertible costs a little of its
    exactness, and is left out where no backward will follow."""
    if settings.training and settings.group is None:
        _, var = ops.local_forward(
            x,
            weight,
            bias,
            residual,
            running_mean,
            running_var,
            *_momentum_arguments(momentum),
            *settings.arithmetic(),
            invertible,
        )
        return cast(Tensor, var)
    if settings.training:
        mean, var = _sync_statistics(x, running_mean, running_var, momentum, settings.group)
    else:
        mean, var = cast(Tensor, running_mean), cast(Tensor, running_var)
    ops.forward(x, mean, var, weight, bias, residual, *settings.arithmetic(), invertible)
    return var


def _sync_statistics(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float | Tensor,
    group: ProcessGroup | None,
) -> tuple[Tensor, Tensor]:
    """Mean and biased variance over all ranks. A rank with values enough knows that the whole batch has; only others
    look at the gathered counts (which waits for the device), so that all ranks raise together or none does."""
    count = values_per_channel(x)
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
    settings: Settings,
) -> Tensor:
    scale = None if weight is None else reference.gamma(weight, settings.eps, settings.signed_weight)
    what = (settings.eps, settings.activation, settings.activation_param, residual)
    if settings.group is None:
        return plain.abn(x, scale, bias, running_mean, running_var, settings.training, momentum, *what)
    return plain.abn_sync(x, scale, bias, running_mean, running_var, momentum, *what, settings.group)


if not _DISABLED:
    ownership.calibrate(inplace_abn, marked_as_overwritten)
