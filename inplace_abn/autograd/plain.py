"""Norm and activation out of place, with torch's own ops.

`ABN` runs these functions. The in-place modules run them while the guard does not trust them, and for debugging.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from inplace_abn import _torch, checkpoints, reference
from inplace_abn.activations import activate
from inplace_abn.autograd import checks
from inplace_abn.autograd.backward import values_per_channel
from inplace_abn.distributed import AllReduce
from inplace_abn.settings import DISABLED, Operands, Settings


def is_required() -> bool:
    """Whether a call must run torch's own ops, out of place.

    Tracers would record ops that have no gradient. Selective checkpointing skips an op whose result it has kept, and
    then what the op writes is missing.
    """
    if DISABLED or _torch.is_exporting():
        return True
    if torch.compiler.is_compiling():
        return False
    return _torch.is_captured() or checkpoints.are_selective()


def out_of_place(x: Tensor, operands: Operands, settings: Settings) -> Tensor:
    """The call of an in-place op, with its scale."""
    if operands.weight is not None:
        operands = operands._replace(weight=reference.gamma(operands.weight, settings.eps, settings.scale))
    if settings.per_instance:
        return of_samples(x, operands, settings)
    return abn(x, operands, settings, False) if settings.group is None else abn_sync(x, operands, settings)


def abn(x: Tensor, operands: Operands, settings: Settings, inplace: bool = True) -> Tensor:
    """torch's batch norm, scaled by the weight itself, and the activation, which is in place if ``inplace``."""
    weight, bias, _, running_mean, running_var, momentum = operands
    if settings.training and isinstance(momentum, Tensor):
        # batch_norm takes a number only. Tracers would keep that number, and reading it would wait for the device.
        if running_mean is not None and x.numel() > 0:
            values = x.detach().to(reference.wide(x.dtype))
            var, mean = torch.var_mean(values, [0, *range(2, x.dim())], correction=0)
            reference.update(running_mean, running_var, mean, var, values_per_channel(x), momentum)
        running_mean = running_var = None
    momentum, weight = 0.0 if isinstance(momentum, Tensor) else float(momentum), _beside_bias(weight, bias)
    y = F.batch_norm(x, running_mean, running_var, weight, bias, settings.training, momentum, settings.eps)
    return _added_and_activated(y, operands, settings, inplace)


def of_samples(x: Tensor, operands: Operands, settings: Settings) -> Tensor:
    """torch's instance or group norm, scaled by the weight itself, and the activation, in a new tensor."""
    y = _group_norm(x, operands, settings) if settings.shared > 1 else _instance_norm(x, operands, settings)
    # Compilers make better code from ops that write to new memory.
    return _added_and_activated(y, operands, settings, not torch.compiler.is_compiling())


def _group_norm(x: Tensor, operands: Operands, settings: Settings) -> Tensor:
    # Not all devices take parameters of another dtype.
    dtypes = [t.dtype for t in (x, operands.weight, operands.bias) if t is not None]
    wide = functools.reduce(torch.promote_types, dtypes)
    weight, bias = (None if t is None else t.to(wide) for t in (operands.weight, operands.bias))
    weight = _beside_bias(weight, bias)
    return F.group_norm(x.to(wide), x.shape[1] // settings.shared, weight, bias, settings.eps).to(x.dtype)


def _instance_norm(x: Tensor, operands: Operands, settings: Settings) -> Tensor:
    _, _, _, running_mean, running_var, momentum = operands
    weight, bias = _of_one_dtype(operands.weight, operands.bias, running_mean)
    weight = _beside_bias(weight, bias)
    # On the CPU torch's gradient of one channels-last sample with several spatial dimensions is wrong.
    flat = x.flatten(2) if x.dim() > 3 else x
    share = float(momentum)
    y = F.instance_norm(flat, running_mean, running_var, weight, bias, settings.training, share, settings.eps)
    return y.view(x.shape)


def _added_and_activated(y: Tensor, operands: Operands, settings: Settings, inplace: bool) -> Tensor:
    if operands.residual is not None:
        y = y + operands.residual
    return activate(y, settings.activation, settings.activation_param, inplace)


def _beside_bias(weight: Tensor | None, bias: Tensor | None) -> Tensor | None:
    """The weight, or ones where there is a bias only. torch's norms do not have its gradient on all devices."""
    return torch.ones_like(bias) if weight is None and bias is not None else weight


def _of_one_dtype(
    weight: Tensor | None, bias: Tensor | None, running_mean: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Weight and bias in one dtype, because batch_norm requires that."""
    given = [t.dtype for t in (weight, bias) if t is not None]
    if not given:
        return weight, bias
    dtype = functools.reduce(torch.promote_types, given) if running_mean is None else running_mean.dtype
    return (None if weight is None else weight.to(dtype)), (None if bias is None else bias.to(dtype))


def kept(x: Tensor, operands: Operands, settings: Settings) -> Tensor:
    """The call of an in-place module that the guard does not trust: `abn`, which keeps x, in a new tensor.

    A signed weight is the scale itself, even within eps of zero.
    """
    if settings.per_instance:
        return of_samples(x, operands, settings)
    scale = reference.unclamped(operands.weight, settings.eps, settings.scale)
    scale, bias = _of_one_dtype(scale, operands.bias, operands.running_mean)
    # Compilers make better code from ops that write to new memory.
    return abn(x, operands._replace(weight=scale, bias=bias), settings, inplace=not torch.compiler.is_compiling())


def abn_sync(x: Tensor, operands: Operands, settings: Settings) -> Tensor:
    """`abn` in training, with the statistics of all ranks of the group. Autograd can differentiate its collectives.

    A rank with several values per channel knows that the whole batch has several, so it does not read the count, for
    which it would wait for the device.
    """
    weight, bias, residual, running_mean, running_var, momentum = operands
    group = settings.group
    assert group is not None
    values = x.to(reference.wide(x.dtype))
    own = values_per_channel(x)
    count = AllReduce.apply(values.new_full((1,), own), group)
    if own < 2:
        checks.check_count(x, count.item())
    mean = AllReduce.apply(reference.channel_sum(values), group) / count
    centred = values - reference.per_channel(mean, x)
    var = AllReduce.apply(reference.channel_sum(centred.square()), group) / count
    reference.update(running_mean, running_var, mean, var, count, momentum)
    xhat = centred * reference.per_channel(torch.rsqrt(var + settings.eps), x)
    y = reference.scaled(xhat, weight, bias, residual)
    return activate(y.to(x.dtype), settings.activation, settings.activation_param)
