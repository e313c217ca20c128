"""Norms of channels for compilers: two ops that `compiling.joint` finds in the joint graph of forward and backward.

The norm's statistics are computed by torch's own ops. The normalisation is one of the two ops, and its gradient is the
other. Where the graph shows that an activation follows, `compiling.joint` replaces them by plain ops that keep z
instead of x. Elsewhere it replaces them by plain ops that do the same as torch's norm. Where `compiling.joint`
does not run, they run as `plain_norm` and `plain_norm_backward`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from inplace_abn import _torch, reference
from inplace_abn.distributed import all_gather, all_reduce
from inplace_abn.reference import channel_sum, input_gradient, per_channel, scaled, standardised
from inplace_abn.settings import ChannelSlots, Operands

_library = torch.library.Library("inplace_abn", "FRAGMENT")
_SETTINGS = (
    "Tensor mean, Tensor var, Tensor? total, Tensor? weight, Tensor? bias, Tensor? rows, Tensor? verbatim, "
    "float eps, bool training, str group, str trusted"
)
_library.define(f"norm(Tensor x, {_SETTINGS}) -> Tensor")
_library.define(f"norm_backward(Tensor dy, Tensor x, {_SETTINGS}) -> (Tensor, Tensor, Tensor)")

NORM = torch.ops.inplace_abn.norm.default
NORM_BACKWARD = torch.ops.inplace_abn.norm_backward.default


class Statistics(NamedTuple):
    """What x was normalised with."""

    mean: Tensor
    var: Tensor
    """Biased; of shape (channel,), or (batch, group) if samples have their own statistics."""
    total: Tensor | None = None
    """The number of values of a channel in all processes, if statistics are synchronised."""
    group: str = ""
    """The name of their process group."""


def where_saved(rows: Tensor, saved: Tensor, other: Tensor) -> Tensor:
    """``saved`` in the channels that have a row, and ``other`` elsewhere."""
    return torch.where(per_channel(rows, other) < 0, other, saved)


def with_saved(xhat: Tensor, rows: Tensor | None, saved: Tensor | None) -> Tensor:
    """xhat, with that of the channels that have rows in ``saved`` taken from there."""
    if rows is None or saved is None:
        return xhat
    return where_saved(rows, saved[:, rows.clamp_min(0)].to(xhat.dtype), xhat)


def recovered(y: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    """xhat of what `reference.scaled` returned."""
    if residual is not None:
        y = y - residual
    if bias is not None:
        y = y - per_channel(bias, y)
    return y if weight is None else y / per_channel(weight, y)


def gradients(
    dy: Tensor,
    xhat: Tensor,
    statistics: Statistics,
    weight: Tensor | None,
    eps: float,
    training: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, dweight, dbias). xhat is in the dtype of the arithmetic, and dx gets ``dtype``. dweight and dbias have shape
    (channel,), also without a weight and a bias."""
    var = statistics.var
    wide, inv_std = dy.to(xhat.dtype), torch.rsqrt(var + eps)
    if var.dim() == 1:
        sums = channel_sum(wide), channel_sum(wide * xhat)
        scale = inv_std if weight is None else inv_std * weight
        dx = input_gradient(wide, xhat, scale, _means(sums, dy, statistics) if training else None)
        return dx.to(dtype), sums[1], sums[0]
    # Of shape (batch, channel).
    of_samples = [t.flatten(2).sum(-1) if t.dim() > 2 else t for t in (wide, wide * xhat)]
    scaled_sums = of_samples if weight is None else [t * weight for t in of_samples]
    count = dy.numel() // var.numel()
    of_dy, of_xhat_dy = (torch.unflatten(t, 1, (var.shape[1], -1)).sum(-1) / count for t in scaled_sums)
    dx = wide if weight is None else wide * per_channel(weight, wide)
    dx = input_gradient(dx, xhat, inv_std, (of_dy, of_xhat_dy))
    return dx.to(dtype), of_samples[1].sum(0), of_samples[0].sum(0)


def _means(sums: tuple[Tensor, Tensor], dy: Tensor, statistics: Statistics) -> tuple[Tensor, Tensor]:
    """The means of each channel over the values of all processes, from this one's sums."""
    if statistics.total is None:
        share = 1.0 / (dy.numel() // dy.shape[1])
        return sums[0] * share, sums[1] * share
    of_dy, of_xhat_dy = (all_reduce(torch.stack(sums), statistics.group) / statistics.total).unbind()
    return of_dy, of_xhat_dy


def plain_norm(x: Tensor, mean: Tensor, var: Tensor, _: Any, weight: Any, bias: Any, *call: Any) -> Tensor:
    eps = call[2]
    return scaled(standardised(x, mean, var, eps), weight, bias, None).to(x.dtype)


def plain_norm_backward(dy: Tensor, x: Tensor, mean: Tensor, var: Tensor, *call: Any) -> tuple[Tensor, Tensor, Tensor]:
    total, weight, _, _, _, eps, training, group, _ = call
    statistics = Statistics(mean, var, total, group)
    return gradients(dy, standardised(x, mean, var, eps), statistics, weight, eps, training, x.dtype)


def register(library: torch.library.Library, plain: dict[Any, Any], place: int) -> None:
    """Registers a norm and its gradient, by the functions that run where nothing replaces the two ops.

    The first eight arguments of the norm are tensors. The one at this place is x, and 4 and 5 are weight and bias.
    """
    norm, gradient = plain

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:8])
        ctx.settings = inputs[8:]

    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        # A checkpoint gives what is saved once.
        saved = ctx.saved_tensors
        weight, bias = saved[4:6]
        found: list[Any] = [None] * (8 + len(ctx.settings))
        found[place], dweight, dbias = gradient(dy, *saved, *ctx.settings)
        found[4] = None if weight is None else dweight.to(weight.dtype)
        found[5] = None if bias is None else dbias.to(bias.dtype)
        return tuple(found)

    for op, function in plain.items():
        library.impl(op, function, "CompositeExplicitAutograd")
        torch.library.register_fake(op, function, lib=library)
    torch.library.register_autograd(norm, backward, setup_context=setup_context, lib=library)


PLAIN: dict[Any, Any] = {NORM: plain_norm, NORM_BACKWARD: plain_norm_backward}
register(_library, PLAIN, 0)


def _statistics(x: Tensor, operands: Operands, training: bool, groups: int, name: str) -> Statistics:
    """The statistics of each channel, or of each group of a sample.

    In training they are those of the batch, and the running ones are updated.
    """
    running_mean, running_var, momentum = operands.running_mean, operands.running_var, operands.momentum
    if not training:
        assert running_mean is not None
        assert running_var is not None
        return Statistics(running_mean.clone(), running_var.clone())
    with torch.no_grad():
        values = x.detach().to(reference.wide(x.dtype))
        if groups:
            values = torch.unflatten(values, 1, (groups, -1))
        dims = [*range(2, values.dim())] if groups else [0, *range(2, x.dim())]
        var, mean = torch.var_mean(values, dims, correction=0)
        found = _of_all_processes(mean, var, x.numel() // mean.numel(), name) if name else Statistics(mean, var)
        if running_mean is not None and running_var is not None and (name or x.numel() > 0):
            count = x.numel() // mean.numel() if found.total is None else found.total
            # A quotient of sizes alone would have float's precision on CUDA.
            of_batch = found.mean, found.var * count / (count - 1)
            for running, batch in zip((running_mean, running_var), of_batch, strict=True):
                batch = batch.mean(0) if groups else batch
                running.copy_((1 - momentum) * running + momentum * batch)
    return found


def _of_all_processes(mean: Tensor, var: Tensor, count: int, name: str) -> Statistics:
    """The statistics of the batches of all processes, of which some may be empty."""
    own = torch.stack([mean, var, torch.full_like(mean, count)])
    gathered = torch.unflatten(all_gather(own.flatten(), name), 1, own.shape)
    gathered = torch.where(gathered[:, 2:] == 0, 0.0, gathered)
    means, variances, counts = gathered.unbind(1)
    total = counts.sum(0)
    shares = counts / total
    mean = (means * shares).sum(0)
    var = ((variances + (means - mean).square()) * shares).sum(0)
    return Statistics(mean, var, total[0], name)


def is_suitable(x: Tensor, weight: Tensor | None, bias: Tensor | None, may_be_empty: bool = False) -> bool:
    """Whether the ops are used: they must take the tensors, and a gradient must be needed."""
    if x.dim() < 2 or (x.numel() == 0 and not may_be_empty) or not x.is_floating_point() or _torch.is_exporting():
        return False
    requires_grad = x.requires_grad
    for t in (weight, bias):
        requires_grad = requires_grad or (t is not None and t.requires_grad)
    return requires_grad


def constant(value: float) -> float:
    """The value as a constant, where a compiler would make it a variable."""
    numerator, denominator = value.as_integer_ratio()
    return numerator / denominator


def normalised(
    x: Tensor,
    operands: Operands,
    training: bool,
    eps: float,
    trusted: str,
    saved: ChannelSlots | None = None,
    groups: int = 0,
    name: str = "",
) -> Tensor:
    """torch's norm, which `compiling.joint` can fuse with what follows. The scale is the weight itself.

    ``trusted`` names the activations whose z is trusted for recovering x, by their `activation_key`, with spaces in
    between, if xhat of the channels ``saved`` is saved. In training each sample has its own statistics if there are
    ``groups`` of channels, and statistics are those of all processes of the process group ``name``, if it is given.
    """
    mean, var, total, name = _statistics(x, operands, training, groups, name)
    rows = kept = None
    if saved is not None:
        with torch.no_grad():
            of_x = per_channel(mean, x), per_channel(var, x)
            kept = reference.standardised_channels(x, *of_x, eps, saved.channels).to(x.dtype)
        rows = saved.rows
    y: Tensor = NORM(x, mean, var, total, operands.weight, operands.bias, rows, kept, eps, training, name, trusted)
    return y
