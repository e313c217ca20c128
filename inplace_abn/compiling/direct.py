"""The call of a direct module, as compilers see it: a norm and an activation, which `compiling.joint` fuses."""

from __future__ import annotations

from torch import Tensor

from inplace_abn import reference
from inplace_abn.activations import activate
from inplace_abn.compiling import norms, trust
from inplace_abn.settings import ChannelSlots, Operands, Settings


def is_fusible(x: Tensor, settings: Settings) -> bool:
    """Whether the ops of `compiling.norms` take the call: its statistics are those of one process's batch."""
    return settings.group is None and not settings.per_instance and x.numel() > 0


def compiled(
    x: Tensor, operands: Operands, settings: Settings, overwrite_input: bool, slots: ChannelSlots | None
) -> Tensor:
    """`inplace_abn.functions.run` for a call that was checked and needs a graph."""
    param, eps = norms.constant(settings.activation_param), norms.constant(settings.eps)
    scale = None if operands.weight is None else reference.gamma(operands.weight, eps, settings.scale)
    trusted = trust.in_place(settings.activation, param)
    # Compilers remove this clone, except those that run the ops as they are.
    given = x.clone() if overwrite_input else x
    y = norms.normalised(given, operands._replace(weight=scale), settings.training, eps, trusted, slots)
    z = activate(y if operands.residual is None else y + operands.residual, settings.activation, param)
    return x.copy_(z) if overwrite_input else z
