"""What a compiled norm may be one with: decided when it is compiled, by the weights that it has then, and looked at
again as often as the guard measures. When the answer changes the compiler compiles anew.

Compilers keep their programs on disk, by what they were given to compile. So the answers tell the version of what
becomes of them, too.
"""

from __future__ import annotations

import hashlib
import math
import weakref
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from inplace_abn import _torch, guard, recovery
from inplace_abn.activations import TYPICAL
from inplace_abn.compiling import joint
from inplace_abn.compiling.spelled import spelled_as
from inplace_abn.figures import HYSTERESIS, THRESHOLDS, Threshold

_CHANNELS = 32
"""That are looked at of a layer, at most."""
_RESIDUAL = 4.0
"""Standard deviation that a residual is taken to have."""

_Answers = dict[tuple[int, torch.dtype], frozenset[str]]
_answers: weakref.WeakKeyDictionary[Any, _Answers] = weakref.WeakKeyDictionary()
"""What is said of modules, by their revision and the dtype: the same in all programs of a revision."""


@_torch.read_while_tracing
def in_place(activation: str, param: float) -> str:
    """What `batch_norm.normalised` is told of a norm that is to be one with this activation, and perhaps a residual."""
    return _told(frozenset({spelled_as(activation, param), "identity", "residual"}))


def predicted(module: Any, dtype: torch.dtype) -> str:
    """What `batch_norm.normalised` is told of a converted norm: the activations of whose z its input may be recovered.
    Empty if there is none."""
    answers, key = _answers.setdefault(module, {}), (module._revision, dtype)
    if key not in answers:
        answers[key] = _tolerated(module, dtype, TYPICAL, None)
    return _told(answers[key]) if answers[key] else ""


def trusts(module: Any, dtype: torch.dtype) -> bool:
    """Whether an in-place module may be in place, as far as nobody has measured."""
    if module.guard_interval == 0 or (module._guard is not None and module._guard.measured_at >= 0):
        return True
    own = module.activation, module.activation_param
    return spelled_as(*own) in _tolerated(module, dtype, [own], None)


def _told(found: frozenset[str]) -> str:
    joint.install()
    return " ".join([*sorted(found), _version()])


def _review(*_: Any) -> None:
    """After an optimizer's step: has those layers compiled anew of which something else is to be said."""
    for module, answers in list(_answers.items()):
        interval = module.guard_interval
        if interval == 0 or guard.generation % interval:
            continue
        now = {
            dtype: _tolerated(module, dtype, TYPICAL, before)
            for (revision, dtype), before in answers.items()
            if revision == module._revision
        }
        if any(now[dtype] != answers[module._revision, dtype] for dtype in now):
            guard.renew(module)
            _answers[module] = {(module._revision, dtype): found for dtype, found in now.items()}


register_optimizer_step_post_hook(_review)


def _tolerated(
    module: Any, dtype: torch.dtype, candidates: list[tuple[str, float]], before: frozenset[str] | None
) -> frozenset[str]:
    """The activations whose z tells xhat, and "residual" if it does so after an addition. What was not there ``before``
    (None: nothing was said yet) needs better figures."""
    threshold = THRESHOLDS.get(dtype)
    if module.guard_threshold is not None:
        threshold = Threshold(module.guard_threshold, module.guard_threshold)
    tensors = [None if t is None else t.detach() for t in (module.weight, module.bias)]
    if threshold is None or any(t is not None and t.device.type == "meta" for t in tensors):
        return frozenset()
    gamma, beta = _channels(*tensors)
    if module.guard_interval == 0:
        return frozenset({spelled_as(*what) for what in candidates} | {"residual"})
    # In place a weight is kept eps away from zero, which nobody is to see.
    if module.signed_weight and tensors[0] is not None:
        least = tensors[0].abs().min().item() / module.eps
        if least < (1.0 if before else HYSTERESIS):
            return frozenset()

    def is_small(name: str, x: float, weight: float) -> bool:
        room = HYSTERESIS if before is not None and name not in before else 1.0
        return not threshold.exceeded(room * x, room * weight)

    found = set()
    for activation, param in candidates:
        errors = recovery.predicted(gamma, beta, dtype, activation, param, module.eps, module.signed_weight)
        name = spelled_as(activation, param)
        if is_small(name, errors.x.item(), errors.weight.max().item()):
            found.add(name)
    rounding = torch.finfo(dtype).eps / 2 / math.sqrt(3)
    added = rounding * torch.sqrt(1 + (beta.double().square() + _RESIDUAL**2) / gamma.double().square())
    if found and is_small("residual", added.square().mean().sqrt().item(), added.max().item()):
        found.add("residual")
    return frozenset(found)


def _channels(weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Weight and bias of some channels, on the CPU: the extreme ones, and others that are spread over all weights."""
    given = next((t for t in (weight, bias) if t is not None), None)
    if given is None:
        return torch.ones(1), torch.zeros(1)
    gamma = torch.ones_like(given) if weight is None else weight
    beta = torch.zeros_like(given) if bias is None else bias
    gamma, beta = (t.to("cpu", torch.promote_types(t.dtype, torch.float32)) for t in (gamma, beta))
    if len(gamma) > _CHANNELS:
        figures = (gamma, gamma.abs(), beta, beta / gamma)
        extreme = [index for figure in figures for index in (figure.argmax(), figure.argmin())]
        spread = gamma.argsort()[torch.linspace(0, len(gamma) - 1, _CHANNELS - len(extreme)).long()]
        chosen = torch.cat([torch.stack(extreme), spread]).unique()
        gamma, beta = gamma[chosen], beta[chosen]
    return gamma, beta


@cache
def _version() -> str:
    """Of the sources that say what becomes of a norm."""
    folder = Path(__file__).parent
    sources = [*sorted(folder.glob("*.py")), folder.parent / "activations.py", folder.parent / "conversion" / "tags.py"]
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:16]
