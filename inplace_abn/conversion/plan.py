"""What a norm does in most of its calls: what it did in the call before.

A call makes a plan, by which later calls that are like it need not look at everything again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from inplace_abn import _torch, functions, guard
from inplace_abn.activations import find
from inplace_abn.autograd.backward import Values
from inplace_abn.conversion.waiting import NormCall
from inplace_abn.settings import Operands, Settings


class Plan(NamedTuple):
    """A norm's call in training, by statistics of its own, which nobody measured or watched."""

    settings: Settings
    expected: tuple[str, float] | None
    """The expectation of the guard's decision."""
    applied: tuple[str, float]
    """The activation that is applied in expectation."""
    code: int
    """Its number in the kernels."""
    like: tuple[Any, ...]
    """What the call was like."""


def of_call(
    module: Any, x: Tensor, settings: Settings, applied: tuple[str, float], expected: tuple[str, float] | None
) -> Plan | None:
    """The plan for calls that are like this one, which is not measured; None if there is none."""
    is_simple = module.training and not settings.per_instance and not module.is_synchronised()
    if functions.node_in_cpp() is None or not is_simple or module.momentum is None:
        return None
    return Plan(settings, expected, applied, find(applied[0]).code, _like(module, x))


def fits(plan: Plan, module: Any, x: Tensor) -> bool:
    """Whether a call is like the one that the plan is from."""
    if type(x) is not Tensor or x.layout is not torch.strided or plan.like != _like(module, x):
        return False
    if x.is_neg() or x.is_inference() or _torch.is_watched() or _torch.in_forward_mode():
        return False
    # Under hooks a checkpoint may repeat an earlier generation's call.
    if _torch.top_saved_tensors_hooks(True) is not None or functions.node_in_cpp() is None:
        return False
    weight, bias = _parameters(module)
    requires_grad = x.requires_grad or (weight is not None and weight.requires_grad)
    return bool(requires_grad or (bias is not None and bias.requires_grad))


def call(plan: Plan, module: Any, x: Tensor, look: guard.Look) -> tuple[NormCall, Tensor]:
    """Calls the norm. Returns the call and its result, which has no graph."""
    node, buffers, settings = functions.node_in_cpp(), module._buffers, plan.settings
    assert node is not None
    (weight, bias), running = _parameters(module), (None, None, None)
    if module.track_running_stats:
        running = buffers.get("running_mean"), buffers.get("running_var"), buffers.get("num_batches_tracked")
    z, var, *copies = node.norm(x, weight, bias, *running, module.momentum, settings.eps, plan.code, plan.applied[1])
    return NormCall(module, x, Operands(weight, bias), None, Values(copies[0], copies[1], var), settings, look), z


def _parameters(module: Any) -> tuple[Tensor | None, Tensor | None]:
    """Weight and bias. The dictionary is read directly, because attribute access of modules is slow."""
    try:
        return module._parameters["weight"], module._parameters["bias"]
    except KeyError:  # torch.nn.utils.parametrize turns parameters into properties
        return module.weight, module.bias


def _like(module: Any, x: Tensor) -> tuple[Any, ...]:
    """What must be the same in all calls of a plan. Parameters move and change their dtype without a new version."""
    weight, _ = _parameters(module)
    of_weight = None if weight is None else (weight.shape, weight.dtype, weight.device)
    of_module = module.training, module.track_running_stats, module.eps, module.momentum
    return x.shape, x.stride(), x.dtype, x.device, of_weight, *of_module
