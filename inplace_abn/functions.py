"""``inplace_abn`` and ``inplace_abn_sync``: the forward pass, local and synchronised.

The forward pass writes z over x, or to new memory, and keeps z instead of x ("In-Place Activated BatchNorm for
Memory-Optimized Training of DNNs", arXiv 1712.02616). A call goes one of four ways (`run`): by the node in C++
(`autograd.nodes`), in Python (`autograd.forward`), by torch's own ops (`autograd.plain`), or as compilers see it
(`compiling.direct`). Nothing is written before `autograd.checks` has refused what is invalid.

``INPLACE_ABN_DISABLE=1`` in the environment makes both functions work out of place, for debugging.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from inplace_abn import distributed
from inplace_abn.autograd import checks, forward, nodes, plain
from inplace_abn.compiling import direct
from inplace_abn.settings import ChannelSlots, Operands, Settings


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
    overwrite_input: bool = True,
) -> Tensor:
    """z = act(gamma * (x - mean) / sqrt(var + eps) + bias + residual), written over ``x``.

    Args:
        x: activations of shape (batch, channel, \\*), dtype float64, float32, bfloat16 or float16, in any strides
            without internal overlap. Overwritten with the result, unless ``overwrite_input`` is False.
        weight: (channel,) or None; scales by ``|weight| + eps``. float32 or x's dtype.
        bias: (channel,) or None. float32 or x's dtype.
        running_mean: (channel,) or None; updated in training, used otherwise.
        running_var: (channel,) or None; updated in training (with the unbiased variance), used otherwise.
        training: normalise with the statistics of ``x``; otherwise with the running ones, if there are any.
        momentum: share of the new statistics in the running ones. It may be a float64 tensor of one value on x's
            device, if only the device knows it.
        eps: added to the variance; also the smallest magnitude of the scale. Positive.
        activation: a name of `inplace_abn.activations.ACTIVATIONS`, such as "relu"; "identity" or "none" for none.
        activation_param: slope of leaky_relu (>= 0; zero means relu), alpha of elu (> 0). Others have none.
        signed_weight: scale by the weight itself instead of ``|weight| + eps``, as a standard BatchNorm does. The sign
            is kept, and the magnitude is at least ``eps``.
        residual: of x's shape, dtype and device, in memory of its own. It is added before the activation and kept for
            backward. That takes no extra memory if it is the input of a residual block, because that input is kept
            anyway.
        overwrite_input: whether the result takes x's memory. If not, ``x`` is unchanged, and not saved for backward. It
            may then be a leaf, a view, the residual itself, or a tensor that other ops need.

    Returns:
        ``x``, which now holds the result. If it is not overwritten, a new tensor of x's shape, dtype and memory format.

    Raises:
        ValueError: a wrong value or shape, only one value per channel in training, or an ``x`` that autograd forbids to
            overwrite. Nothing has been modified.
        TypeError: a dtype that is not supported or does not combine with x's.
        RuntimeError: the op that made ``x`` needs it for its own backward.

    Source: arXiv 1712.02616.
    """
    settings = Settings(activation, activation_param, eps, int(signed_weight), training or running_mean is None, None)
    return run(x, Operands(weight, bias, residual, running_mean, running_var, momentum), settings, overwrite_input)


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
    overwrite_input: bool = True,
    keeps_input: bool = False,
) -> Tensor:
    """`inplace_abn` with the statistics of all ranks of ``group`` (None: the default group).

    Ranks may have different batch and spatial sizes, and empty batches. In training, forward calls one all_gather, and
    backward one all_reduce. ``dweight`` and ``dbias`` are those of the rank's own share of the batch. Reduce them with
    the gradients of the other parameters, as DistributedDataParallel does. If torch.distributed is not initialised,
    statistics are local, and one warning is given. Statistics are local on a rank that is not in ``group``, too.

    With ``keeps_input``, x is kept for backward, as in torch, and the result is a new tensor. The collectives are the
    same either way, so ranks may differ in it.

    The other arguments, the result and the errors are those of `inplace_abn`. All ranks raise together if the whole
    batch has only one value per channel.
    """
    training = training or running_mean is None
    group = distributed.participating_group(group) if training else None
    settings = Settings(activation, activation_param, eps, int(signed_weight), training, group)
    operands = Operands(weight, bias, residual, running_mean, running_var, momentum)
    return run(x, operands, settings, overwrite_input, keeps_input)


def run(
    x: Tensor,
    operands: Operands,
    settings: Settings,
    overwrite_input: bool,
    keeps_input: bool = False,
    slots: ChannelSlots | None = None,
    decide: Callable[..., Any] | None = None,
) -> Tensor:
    """The call of a norm of channels. Compiled code saves xhat of the channels in ``slots``.

    ``decide`` is `inplace_abn.guard.decide` of a synchronised call, which is asked when statistics are known. It takes
    the place of ``keeps_input`` and ``settings.verbatim``.
    """
    if keeps_input and settings.group is None:
        return _kept(x, operands, settings, overwrite_input)
    each = operands.of_samples(x) if settings.shared else operands
    z = nodes.in_cpp(x, each, settings) if overwrite_input else None
    if z is None:
        requires_grad, out_of_place = operands.require_grad(x), plain.is_required()
        is_traced = torch.compiler.is_compiling()
        checks.check_call(x, operands, settings, requires_grad, overwrite_input, out_of_place or is_traced)
        if out_of_place:
            return plain.out_of_place(x, operands, settings)
        if is_traced and requires_grad:
            return direct.compiled(x, operands, settings, overwrite_input, keeps_input, slots)
        z = forward.in_python(x, each, settings, overwrite_input, keeps_input, requires_grad, decide)
    if each is not operands:
        operands.take_means(each)
    return z


def _kept(x: Tensor, operands: Operands, settings: Settings, overwrite_input: bool) -> Tensor:
    """A call with local statistics that keeps x, as torch does, in a new tensor.

    The errors are those of `run`: a module that keeps x for a while must not fail once it runs in place.
    """
    is_plain = plain.is_required() or torch.compiler.is_compiling()
    checks.check_call(x, operands, settings, operands.require_grad(x), overwrite_input, is_plain, asks_op=True)
    return plain.kept(x, operands, settings)
