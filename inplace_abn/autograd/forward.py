"""The forward pass in Python: writes running statistics and the result, and keeps what backward needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from inplace_abn import _torch, distributed, reference
from inplace_abn.autograd import checks, nodes
from inplace_abn.autograd.backward import Saved, by_value, values_per_channel
from inplace_abn.autograd.kept import KeptABNFunction
from inplace_abn.kernels import ops
from inplace_abn.settings import Operands, Settings


def in_python(
    x: Tensor,
    operands: Operands,
    settings: Settings,
    overwrite_input: bool,
    keeps_input: bool,
    requires_grad: bool,
    decide: Callable[..., Any] | None = None,
) -> Tensor:
    """`inplace_abn.functions.run` for a call that was checked. Running statistics are given for each sample, if samples
    have their own."""
    if not overwrite_input and _torch.transforms_active():
        # Under transforms the tensors that backward needs must be inputs of the node. So z is written over a copy of x,
        # which is an input.
        x, overwrite_input = x.clone(), True
    statistics = None
    if settings.group is not None:
        gathered = _gathered(x.detach(), settings.group)
        if decide is not None:
            trusted, verbatim = decide(lambda: _combined(gathered, Operands(None, None)))
            keeps_input, settings = not trusted, settings._replace(verbatim=verbatim)
        statistics = _combined(gathered, operands)
        if keeps_input:
            z: Tensor = KeptABNFunction.apply(x, *operands.of_graph(), *statistics, settings)
            return z
    if not requires_grad:
        z = x if overwrite_input else torch.empty_like(x)
        written(x, z, operands, settings, False, statistics)
        return z
    nodes.calibrate()
    data, edge = x.detach(), nodes.place_of(x, settings) if overwrite_input else None
    z = data if overwrite_input else torch.empty_like(data)
    saved = written(data, z, operands, settings, True, statistics)
    if overwrite_input:
        z, saved = x, saved._replace(z=x)
    return nodes.attached(x, z, operands, saved, settings, edge)


def written(
    x: Tensor,
    z: Tensor,
    operands: Operands,
    settings: Settings,
    invertible: bool,
    statistics: tuple[Tensor, Tensor] | None = None,
) -> Saved:
    """Writes the result to z, which may be x, and returns what backward needs.

    ``invertible`` says whether backward will recover xhat from z. This costs a little exactness, so it is False where
    no backward follows. Running statistics are given for each sample, if samples have their own.
    """
    rows, count = settings.saved(x.device) if invertible else (None, 0)
    verbatim = None if rows is None else reference.empty_channels(x, count)
    _, var = _computed(x, z, operands, settings, statistics, (invertible, rows, verbatim))
    if invertible and not settings.training:
        # A later training step may change the running variance before this backward reads it.
        var = var.clone()
    weight, bias, residual = operands.of_graph()
    return Saved(z, *(by_value(weight, bias) if invertible else (weight, bias)), residual, var, verbatim, rows)


def normalised(x: Tensor, y: Tensor, operands: Operands, settings: Settings) -> tuple[Tensor, Tensor]:
    """Writes the norm's output to y, as torch computes it, and returns the mean and the variance that it is normalised
    with."""
    statistics = None if settings.group is None else _combined(_gathered(x, settings.group), operands)
    mean, var = _computed(x, y, operands, settings, statistics, (False, None, None))
    # A later training step may change the running statistics before backward reads them.
    return (mean, var) if settings.training else (mean.clone(), var.clone())


def _computed(
    x: Tensor,
    z: Tensor,
    operands: Operands,
    settings: Settings,
    statistics: tuple[Tensor, Tensor] | None,
    for_backward: tuple[bool, Tensor | None, Tensor | None],
) -> tuple[Tensor, Tensor]:
    """Writes the result to z, which may be x, and returns the mean and the variance that x is normalised with.

    ``for_backward`` are the ops' arguments ``invertible``, ``rows`` and ``verbatim``.
    """
    kept = {} if z is x else {"z": z}
    weight, bias, residual, *running, _ = operands
    if settings.per_instance:
        weight, bias = (reference.repeated(t, x.shape[0]) for t in (weight, bias))
    invertible, *channels = for_backward
    if settings.training and settings.group is None:
        op = ops.local_forward_out if kept else ops.local_forward
        given = weight, bias, residual, *running, *operands.momentum_arguments(), *settings.arithmetic()
        found = ops.run(op, present(z, *running), x, *given, invertible, settings.shared, *channels, **kept)
        return cast("tuple[Tensor, Tensor]", found)
    op = ops.forward_out if kept else ops.forward
    mean, var = statistics or cast("tuple[Tensor, Tensor]", running)
    ops.run(op, [z], x, mean, var, weight, bias, residual, *settings.arithmetic(), *for_backward, **kept)
    return mean, var


def present(*tensors: Tensor | None) -> list[Tensor]:
    return [t for t in tensors if t is not None]


def _gathered(x: Tensor, group: ProcessGroup) -> Tensor:
    """The mean, the biased variance and the number of values per channel of each rank; (rank, 2 * channel + 1).

    One value per channel in the whole batch is an error, which all ranks raise together. A rank with several values
    knows that the whole batch has several. Only other ranks read the gathered counts, because reading waits for the
    device.
    """
    count = values_per_channel(x)
    mean, var = ops.run(ops.statistics, [], x)
    gathered = distributed.all_gather(torch.cat([mean, var, mean.new_full((1,), count)]), group)
    if not torch.compiler.is_compiling() and count < 2:
        checks.check_count(x, gathered[:, -1].sum().item())
    return gathered


def _combined(gathered: Tensor, operands: Operands) -> tuple[Tensor, Tensor]:
    """Mean and biased variance over all ranks. Also updates running statistics, if there are any."""
    running = operands.running_mean, operands.running_var
    mean, var, _ = ops.run(ops.combine, present(*running), gathered, *running, *operands.momentum_arguments())
    return mean, var
