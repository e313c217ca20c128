"""The call of a direct module, as compilers see it: a norm and an activation, which `compiling.joint` fuses.

Compilers do not trace the graph nodes of `autograd.nodes` correctly: an x from outside of the compiled region would
lose its gradient, and later writes to z would change what was saved.
"""

from __future__ import annotations

from torch import Tensor

from inplace_abn import reference
from inplace_abn.activations import activate
from inplace_abn.compiling import norms, trust
from inplace_abn.settings import ChannelSlots, Operands, Settings


def compiled(
    x: Tensor,
    operands: Operands,
    settings: Settings,
    overwrite_input: bool,
    keeps_input: bool,
    slots: ChannelSlots | None,
) -> Tensor:
    """`inplace_abn.functions.run` for a call that was checked and needs a graph."""
    param, eps = norms.constant(settings.activation_param), norms.constant(settings.eps)
    scale = None if operands.weight is None else reference.gamma(operands.weight, eps, settings.scale)
    trusted = "" if keeps_input else trust.in_place(settings.activation, param)
    groups = x.shape[1] // settings.shared if settings.per_instance else 0
    name = "" if settings.group is None else settings.group.group_name
    # Compilers remove this clone, except those that run the ops as they are.
    given = x.clone() if overwrite_input else x
    y = norms.normalised(given, operands._replace(weight=scale), settings.training, eps, trusted, slots, groups, name)
    z = activate(y if operands.residual is None else y + operands.residual, settings.activation, param)
    return x.copy_(z) if overwrite_input else z
