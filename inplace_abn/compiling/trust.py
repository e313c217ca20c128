"""Decides what a compiled norm may be fused with.

What eager steps measured decides. A module that was never measured is measured when it is compiled, with the weights
that it has then, on values of a normal distribution. Such modules and all converted norms are measured so again, as
often as the guard measures. When the answer changes, the compiler compiles anew.

Compilers keep their programs on disk, by the code that they compiled. So the answers contain the version of the sources
that rewrite the graph.
"""

from __future__ import annotations

import hashlib
import logging
import math
import weakref
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from inplace_abn import _torch, guard, reference
from inplace_abn.activations import IDENTITY, TYPICAL
from inplace_abn.compiling import joint
from inplace_abn.compiling.search import word_in
from inplace_abn.compiling.spelled import activation_key
from inplace_abn.guard.figures import THRESHOLDS, Choice, Threshold, chosen, unpacked
from inplace_abn.guard.measuring import Observation, figures_of_rows
from inplace_abn.kernels import ops
from inplace_abn.settings import MAGNITUDE, Channels, Settings, parameters

_VALUES, _VALUES_OF_CHANNEL = 1 << 14, 1 << 12
"""The largest numbers of values that are looked at in a layer, and in a channel."""
_LEAST = 32
"""The smallest number of values of a channel."""
_LEAST_ROOM = 4
"""The smallest number of channels that there is room for."""
_REACH = 4.5
"""The values reach as many deviations. One value in 150,000 of a batch lies beyond."""
_MEAN, _DEVIATION, _RESIDUAL = 0.37, 1.3, 4.0
"""The mean and the deviation of the values, and the deviation of residuals. With 0 and 1, y would often be a number
that a 16-bit dtype holds exactly, and its rounding would not show."""

_Candidates = dict[str, tuple[str, float]]
"""Activations and their parameters, by the names of `activation_key`. "residual" is the identity after an addition."""
_TYPICAL: _Candidates = {activation_key(*what): what for what in TYPICAL} | {"residual": IDENTITY}

_LATE = (
    "its weight was written to, or is nearly zero, which compiled code sees only now; if a weight was set to zero, its "
    "gradient in this step was not torch's"
)
_logger = logging.getLogger("inplace_abn")
_KINDS = (Tensor, torch.nn.Parameter)

_HIDDEN = "its weights are sharded, computed or freed, so nobody sees how they change; compiled code does as torch does"
_Shapes = tuple[torch.Size | None, ...]


class _Answer(NamedTuple):
    names: frozenset[str] = frozenset()
    """What a norm may be fused with."""
    channels: Channels = Channels()
    """The channels whose xhat it then saves."""


_NOTHING = _Answer()
_Answers = dict[tuple[int, Any, _Shapes, torch.dtype], _Answer]
_answers: weakref.WeakKeyDictionary[Any, _Answers] = weakref.WeakKeyDictionary()
"""The answers for each module, by revision, eps, shapes of parameters and dtype. All programs of a revision get the
same answer."""


@_torch.read_while_tracing
def in_place(activation: str, param: float) -> str:
    """The argument ``trusted`` of `norms.normalised` for a norm that this activation follows."""
    return _words({activation_key(activation, param), "identity", "residual"})


def converted(module: Any, dtype: torch.dtype, narrow: torch.dtype | None = None) -> tuple[str, bool]:
    """The argument ``trusted`` of `norms.normalised` for a converted norm, whose result may also be kept in ``narrow``,
    and whether the module has the argument ``saved``.

    Empty if no activation is trusted.
    """
    found = set(_answer(module, dtype).names)
    if narrow is not None and found:
        found |= {word_in(narrow, name) for name in _answer(module, narrow).names}
    return _words(found), _has_saved(module)


def of_rows(module: Any, *dtypes: torch.dtype) -> tuple[str, bool]:
    """The same for `rows.NORM`, for outputs in these dtypes."""
    found = {dtype: _answer(module, dtype) for dtype in dtypes if dtype in THRESHOLDS}
    trusted = {str(dtype).removeprefix("torch.") for dtype, answer in found.items() if answer.names}
    return _words(trusted), _has_saved(module)


def _has_saved(module: Any) -> bool:
    """Whether compiled code of the module saves xhat of some channels. Sets the tensors that say which.

    They have room for more channels, so that a change takes no new program.
    """
    answers = _answers.get(module, {})
    now = [answer.channels for key, answer in answers.items() if key[:2] == _state(module)]
    channels = Channels(sorted({number for each in now for number in each.numbers}), max([each.size for each in now]))
    there: Tensor | None = module.__dict__.get("_saved_channels")
    if not channels and there is None:
        return False
    with torch.no_grad(), _torch.unwatched():
        device = module.scale_and_offset()[0].device
        fits = there is not None and len(there) >= len(channels) and there.device == device
        if fits and module._saved_numbers == channels.numbers:
            return True
        room = len(there) if there is not None and fits else max(_LEAST_ROOM, 1 << (len(channels) - 1).bit_length())
        # A backward pass to come may need the tensors that are there.
        indices = torch.zeros(min(channels.size, room), dtype=torch.int64, device=device)
        rows, numbers = channels.places(device)
        if numbers is not None:
            indices[: len(channels)] = numbers
        module.__dict__["_saved_channels"], module.__dict__["_saved_numbers"] = indices, channels.numbers
        module.__dict__["_saved_rows"] = torch.full((channels.size,), -1, device=device) if rows is None else rows
    return True


def trusts(module: Any, dtype: torch.dtype) -> bool:
    """Whether a compiled in-place module may be in place."""
    # An exported program runs torch's own ops in any case, and its weights have no values to look at.
    if _torch.is_exporting():
        mode = guard.mode_of(module, dtype)
        return mode is None or mode.decisions[-1].trusted
    answer = _answer(module, dtype)
    return bool(answer.names) and (not answer.channels or _has_saved(module))


def _answer(module: Any, dtype: torch.dtype) -> _Answer:
    answers, key = _answers.setdefault(module, {}), (*_state(module), _shapes(module), dtype)
    if key not in answers:
        guard.notice_writes(module)
        answers[key] = _found(module, dtype, None)
    return answers[key]


def _state(module: Any) -> tuple[int, Any]:
    return module._revision, getattr(module, "eps", None)


def _shapes(module: Any) -> _Shapes:
    """The shapes of weight and bias; none of what has no values, is computed, or is a share of a process."""
    if module.is_parametrized():
        return ()
    given = parameters(module)
    # Memory that somebody has freed must not be read.
    is_there = (type(t) in _KINDS and not t.is_meta and t.untyped_storage().nbytes() for t in given if t is not None)
    if not all(is_there):
        return ()
    return tuple(None if t is None else t.shape for t in given)


def _found(module: Any, dtype: torch.dtype, before: _Answer | None) -> _Answer:
    """What a compiled norm may be fused with. Arguments are those of `_tolerated`."""
    if guard.is_noticed(module) or not _shapes(module):
        return _NOTHING
    modes = guard.modes_of(module, dtype)
    # One program may do for training and for evaluation.
    untrusted = {mode.follows for mode in modes if not mode.decisions[-1].trusted}
    trusted = [mode for mode in modes if mode.follows not in untrusted]
    if modes and not trusted:
        return _NOTHING
    measured = [mode for mode in trusted if mode.measured_at >= 0]
    is_known = bool(measured) and before is None
    saved = {number for mode in measured for number in mode.decisions[-1].verbatim.numbers}
    channels = Channels(sorted(saved), max((mode.decisions[-1].verbatim.size for mode in measured), default=0))
    if hasattr(module, "known_kind"):
        return _Answer(frozenset({"identity"}), channels) if is_known else _found_of_rows(module, dtype, before)
    if hasattr(module, "activation_param"):
        own = module.activation, module.activation_param
        candidates = {activation_key(*own): own}
        return _Answer(frozenset(candidates), channels) if measured else _tolerated(module, dtype, candidates, before)
    consumers = [mode.follows for mode in measured]
    if not consumers:
        return _tolerated(module, dtype, _TYPICAL, before)
    # What is trusted with an activation is trusted without one, because its z determines y less well.
    candidates = {activation_key(name, param): (name, param) for name, param, _ in consumers} | {"identity": IDENTITY}
    if any(added for *_, added in consumers):
        candidates["residual"] = IDENTITY
    return _Answer(frozenset(candidates), channels) if is_known else _tolerated(module, dtype, candidates, before)


def _found_of_rows(module: Any, dtype: torch.dtype, before: _Answer | None) -> _Answer:
    """As `_found` for a norm of rows, which is fused with nothing."""
    if module.guard_interval == 0:
        return _Answer(frozenset({"identity"}))
    kind = module.known_kind()
    weight, bias = (None if t is None else t.detach().to("cpu", torch.float64) for t in module.scale_and_offset())
    # In each row these values are spread over the whole distribution.
    _, values = _normal(module.num_features)
    x = (_MEAN + _DEVIATION * values[0].T).contiguous()
    y = reference.normalised_rows(x, weight, bias, kind.rows, kind.eps)
    settings = Settings(*IDENTITY, kind.eps, MAGNITUDE, True, None, rows=kind.rows)
    figures = figures_of_rows(x, y.to(dtype), weight, bias, settings)
    trusted, channels = _chosen(module, figures, dtype, "identity", before)
    return _Answer(frozenset({"identity"}), channels) if trusted else _NOTHING


def _chosen(module: Any, figures: Tensor, dtype: torch.dtype, name: str, before: _Answer | None) -> Choice:
    given = module.guard_threshold
    threshold = THRESHOLDS[dtype] if given is None else Threshold(given, given)
    last = _NOTHING if before is None else before
    return chosen(unpacked(figures), last.channels, before is None or name in last.names, threshold, dtype)


def _words(found: set[str]) -> str:
    """The words, and the version of the sources; empty if there are none."""
    if not found:
        return ""
    joint.install()
    return " ".join([*sorted(found), _version()])


def _review(*_: Any) -> None:
    """Makes compilers compile those modules anew whose answer has changed.

    This runs before each optimizer step, when weights are those of the forward pass. Somebody who writes to them after
    each step, as a mask does, writes over what the optimizer leaves.
    """
    for module, answers in list(_answers.items()):
        try:
            interval = getattr(module, "guard_interval", None)
            if interval is None:  # It was reverted.
                del _answers[module]
            elif interval > 0:
                _renew(module, answers, interval)
        except Exception as error:
            # Optimizers of other models must not fail, whatever became of this module. It is torch's from now on.
            name = module.__dict__.get("_guard_name")
            _logger.warning("%s: its weights cannot be looked at: %s", name or type(module).__name__, error)
            module.__dict__["_revision"] = -1
            _answers.pop(module, None)


def _renew(module: Any, answers: _Answers, interval: int) -> None:
    before = {key: found for key, found in answers.items() if key[:2] == _state(module)}
    now, why = _reviewed(module, before, interval)
    if now == before:
        return
    if why:
        _logger.warning("%s: %s", guard.name(module), why)
    there: Tensor | None = module.__dict__.get("_saved_channels")
    answers.update(now)
    are_too_few = _has_saved(module) and (there is None or there.shape != module._saved_channels.shape)
    if there is None or are_too_few or any(now[key].names != found.names for key, found in before.items()):
        guard.renew(module)
        _answers[module] = {(*_state(module), *key[2:]): found for key, found in now.items()}


def _reviewed(module: Any, before: _Answers, interval: int) -> tuple[_Answers, str]:
    """The answers, and why they are others now, if that is worth a message."""
    shapes = _shapes(module)
    if any(key[2] != shapes for key in before):
        return dict.fromkeys(before, _NOTHING), _HIDDEN
    # Compiled code does not see who writes to its weights, so that is found out here. Writes to .data are seen by what
    # they leave.
    is_written = guard.renew_if_written(module) or any(
        answer.names and guard.has_left(module, guard.Decision(verbatim=answer.channels)) for answer in before.values()
    )
    if not is_written and (guard.generations.current + 1) % interval:
        return before, ""
    return {key: _found(module, key[-1], found) for key, found in before.items()}, _LATE if is_written else ""


register_optimizer_step_pre_hook(_review)


def _tolerated(module: Any, dtype: torch.dtype, candidates: _Candidates, before: _Answer | None) -> _Answer:
    """The names of those candidates whose z is trusted, and the channels that are then saved; none if no activation is.

    ``before`` is the previous answer, or None if there was none. What is not in it needs better figures.
    """
    if dtype not in THRESHOLDS:
        return _NOTHING
    if module.guard_interval == 0:
        return _Answer(frozenset(candidates))
    gamma, beta = _affine(*parameters(module), torch.promote_types(dtype, torch.float32), module.shared)
    values, others = _normal(len(gamma))
    x, residual = (_MEAN + _DEVIATION * values).to(dtype), (_RESIDUAL * others).to(dtype)
    shared = module.shared if module.shared > 1 else 0
    settings = Settings(*IDENTITY, module.eps, int(module.signed_weight), True, None, shared)
    mean, var = ops.run(ops.statistics, [], x, shared)
    found: set[str] = set()
    saved: set[int] = set()
    for name, what in candidates.items():
        observation = Observation(x.clone(), len(gamma), mean, var, gamma, beta, settings)
        figures = observation.figures(*what, residual if name == "residual" else None)
        trusted, channels = _chosen(module, figures, dtype, name, before)
        if trusted:
            found.add(name)
            saved.update(channels.numbers)
    return _Answer(frozenset(found), Channels(sorted(saved), len(gamma))) if found - {"residual"} else _NOTHING


def _normal(channels: int) -> tuple[Tensor, Tensor]:
    """Values of two independent standard normal distributions, each of shape (1, channels, values); float64."""
    count = channels * min(max(_VALUES // channels, _LEAST), _VALUES_OF_CHANNEL)
    steps = torch.arange(0.5, count, dtype=torch.float64, device="cpu")
    # Quantiles are dealt to the channels in turn. Multiples of the golden ratio fill the range evenly, in an order that
    # has nothing to do with the size.
    values = torch.special.ndtri(steps / len(steps)).view(1, -1, channels).mT.contiguous()
    # Errors of a saturated activation are largest at the ends, which quantiles leave out.
    values[..., 0], values[..., -1] = -_REACH, _REACH
    return values, torch.special.ndtri(steps * ((math.sqrt(5) - 1) / 2) % 1).view(values.shape)


def _affine(weight: Tensor | None, bias: Tensor | None, dtype: torch.dtype, shared: int) -> tuple[Tensor, Tensor]:
    """Weight and bias on the CPU."""
    given = [t.detach().to("cpu", dtype) for t in (weight, bias) if t is not None]
    given = given or [torch.ones(max(shared, 1), dtype=dtype, device="cpu")]
    gamma = torch.ones_like(given[0]) if weight is None else given[0]
    return gamma, torch.zeros_like(gamma) if bias is None else given[-1]


@cache
def _version() -> str:
    """A hash of the sources, some of which decide what becomes of a norm."""
    sources = sorted(Path(__file__).parents[1].rglob("*.py"))
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:16]
