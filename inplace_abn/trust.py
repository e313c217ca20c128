"""What a compiled norm may be one with: decided when it is compiled, by the weights that it has then.

Compilers keep their programs on disk, by what they were given to compile. So the answers tell the version of what
becomes of them, too.
"""

from __future__ import annotations

import hashlib
import math
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from inplace_abn import joint, recovery
from inplace_abn.figures import HYSTERESIS, THRESHOLDS, Threshold
from inplace_abn.spelled import spelled_as

_CANDIDATES = [
    ("identity", 0.0),
    ("relu", 0.0),
    ("leaky_relu", 0.01),
    ("elu", 1.0),
    ("silu", 0.0),
    ("hardswish", 0.0),
]
_RESIDUAL = 4.0
"""Standard deviation that a residual is taken to have."""


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]
def in_place(activation: str, param: float) -> str:
    """What `compiled.normalised` is told of a norm that is to be one with this activation, and perhaps a residual."""
    joint.install()
    return " ".join([spelled_as(activation, param), "identity", "residual", _version()])


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]
def predicted(module: Any, dtype: torch.dtype) -> str:
    """What `compiled.normalised` is told of a converted norm: the activations of whose z its input may be recovered,
    with the weights that it has now. While a compiler traces, that is when it does."""
    joint.install()
    found = [spelled_as(*what) for what in _CANDIDATES if _tolerates(module, dtype, *what)]
    if found and _tolerates_residual(module, dtype):
        found.append("residual")
    return " ".join([*found, _version()]) if found else ""


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]
def trusts(module: Any, dtype: torch.dtype) -> bool:
    """Whether an in-place module may be in place with the weights that it has now, as far as nobody has measured."""
    if module._guard is not None and module._guard.measured_at >= 0:
        return True
    return _tolerates(module, dtype, module.activation, module.activation_param)


def _threshold(module: Any, dtype: torch.dtype) -> Threshold | None:
    if module.guard_interval == 0:
        return Threshold(math.inf, math.inf)
    given = module.guard_threshold
    return THRESHOLDS.get(dtype) if given is None else Threshold(given, given)


def _parameters(module: Any) -> list[Tensor | None]:
    return [None if t is None else t.detach() for t in (module.weight, module.bias)]


def _tolerates(module: Any, dtype: torch.dtype, activation: str, param: float) -> bool:
    """Whether the activation's z tells xhat, and the weight may be kept eps away from zero."""
    weight, bias = _parameters(module)
    threshold = _threshold(module, dtype)
    if threshold is None or any(t is not None and t.device.type == "meta" for t in (weight, bias)):
        return False
    if weight is not None and module.signed_weight and bool((weight.abs() < HYSTERESIS * module.eps).any()):
        return False
    how = (activation, param, module.eps, module.signed_weight)
    errors = recovery.predicted(weight, bias, dtype, *how)
    return not threshold.exceeded(errors.x.item(), errors.weight.max().item())


def _tolerates_residual(module: Any, dtype: torch.dtype) -> bool:
    """Whether rounding y and a residual still leaves xhat to tell."""
    threshold = _threshold(module, dtype)
    weight, bias = _parameters(module)
    gamma, beta = (torch.tensor(value, dtype=torch.float64) for value in (1.0, 0.0))
    if weight is not None:
        gamma = weight.to("cpu", torch.float64)
    if bias is not None:
        beta = bias.to("cpu", torch.float64)
    rounding = torch.finfo(dtype).eps / 2 / math.sqrt(3)
    errors = rounding * torch.sqrt(1 + (beta.square() + _RESIDUAL**2) / gamma.square())
    return threshold is not None and not threshold.exceeded(errors.square().mean().sqrt().item(), errors.max().item())


@cache
def _version() -> str:
    """Of the sources that say what becomes of a norm."""
    folder = Path(__file__).parent
    content = b"".join((folder / f"{name}.py").read_bytes() for name in _SOURCES)
    return hashlib.sha256(content).hexdigest()[:16]


_SOURCES = ("activations", "compiled", "inverses", "joint", "readers", "spelled", "tags")
