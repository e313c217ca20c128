"""Decides what a compiled norm may be fused with.

The decision is made when the norm is compiled, by the weights that it has then. It is reviewed as often as the guard
measures. When the answer changes, the compiler compiles anew.

Compilers keep their programs on disk, by the code that they compiled. So the answers contain the version of the sources
that rewrite the graph.
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
"""The largest number of channels that are looked at in a layer."""
_RESIDUAL = 4.0
"""The standard deviation that residuals are assumed to have."""

_Answers = dict[tuple[int, torch.dtype], frozenset[str]]
_answers: weakref.WeakKeyDictionary[Any, _Answers] = weakref.WeakKeyDictionary()
"""The answers for each module, by revision and dtype. All programs of a revision get the same answer."""


@_torch.read_while_tracing
def in_place(activation: str, param: float) -> str:
    """The argument ``trusted`` of `batch_norm.normalised` for a norm that this activation follows."""
    return _told(frozenset({spelled_as(activation, param), "identity", "residual"}))


def predicted(module: Any, dtype: torch.dtype) -> str:
    """The argument ``trusted`` of `batch_norm.normalised` for a converted norm, by prediction.

    Empty if no activation is trusted.
    """
    found = _answer(module, dtype)
    return _told(found) if found else ""


def trusts(module: Any, dtype: torch.dtype) -> bool:
    """Whether a compiled in-place module may be in place: by the guard's mode if it has measured, or by prediction."""
    # An exported program runs torch's own ops in any case, and its weights have no values to look at.
    if _torch.is_exporting():
        mode = guard.mode_of(module, dtype)
        return mode is None or mode.decisions[-1].trusted
    return bool(_answer(module, dtype))


def _answer(module: Any, dtype: torch.dtype) -> frozenset[str]:
    answers, key = _answers.setdefault(module, {}), (module._revision, dtype)
    if key not in answers:
        guard.notice_writes(module)
        answers[key] = _found(module, dtype, None)
    return answers[key]


def _found(module: Any, dtype: torch.dtype, before: frozenset[str] | None) -> frozenset[str]:
    """What a compiled norm may be fused with. Arguments are those of `_tolerated`."""
    mode = guard.mode_of(module, dtype)
    if mode is not None and not mode.decisions[-1].trusted:
        return frozenset()
    if not hasattr(module, "activation_param"):
        return _tolerated(module, dtype, TYPICAL, before)
    own = module.activation, module.activation_param
    if mode is not None and mode.measured_at >= 0:
        return frozenset({spelled_as(*own)})
    return _tolerated(module, dtype, [own], before) & {spelled_as(*own)}


def _told(found: frozenset[str]) -> str:
    joint.install()
    return " ".join([*sorted(found), _version()])


def _review(*_: Any) -> None:
    """Runs after each optimizer step. Makes compilers compile those modules anew whose answer has changed."""
    for module, answers in list(_answers.items()):
        interval = module.guard_interval
        # Compiled code does not see who writes to its weights, so that is found out here.
        if interval == 0 or (not guard.renew_if_written(module) and guard.generation % interval):
            continue
        now = {
            dtype: _found(module, dtype, before)
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
    """The activations whose z is trusted, and "residual" if z is trusted after an addition as well.

    ``before`` is the previous answer, or None if there was none. A name that is not in it needs better figures.
    """
    threshold = THRESHOLDS.get(dtype)
    if module.guard_threshold is not None:
        threshold = Threshold(module.guard_threshold, module.guard_threshold)
    tensors = [None if t is None else t.detach() for t in (module.weight, module.bias)]
    if threshold is None or any(t is not None and t.device.type == "meta" for t in tensors):
        return frozenset()
    gamma, beta = _channels(*tensors)
    if module.guard_interval == 0:
        return frozenset({spelled_as(*what) for what in candidates} | {"residual"})
    # In place a weight within eps of zero would be replaced by eps. Such layers are refused, so that nobody sees this.
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
    """A hash of the sources that decide what becomes of a norm."""
    folder = Path(__file__).parent
    sources = [*sorted(folder.glob("*.py")), *(folder.parent / name for name in ("activations.py", "tags.py"))]
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:16]
