"""What a layer does in a call: it is measured, judged, and trusted or not (`inplace_abn.guard`)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from inplace_abn import _torch
from inplace_abn.guard import generations, measuring
from inplace_abn.guard.figures import (
    THRESHOLDS,
    Table,
    Threshold,
    bounds,
    chosen,
    described,
    worst,
)
from inplace_abn.guard.layers import forget, mode_of, modes_of, name, notice_writes, renew, renew_if_written
from inplace_abn.guard.modes import CALLS, Decision, Follows, Mode, State
from inplace_abn.kernels import ops
from inplace_abn.settings import Channels

_logger = logging.getLogger("inplace_abn")
_NONE = Channels()


class Plan(NamedTuple):
    """What a layer does in a call."""

    decision: Decision
    mode: Mode | None = None
    """What may learn from the call; None if nothing does."""
    measures: bool = False
    """Whether the call is measured."""
    is_first: bool = False
    """Whether that measurement may change the mode in the same call."""

    @property
    def trusted(self) -> bool:
        return self.decision.trusted


def current_mode(module: Any, dtype: torch.dtype, follows: Follows = ()) -> Mode | None:
    """The mode if this call only has to do what was decided, as most calls."""
    state: State | None = module._guard
    mode = None if state is None else state.modes.get((dtype, follows, module.training))
    if state is None or mode is None or _torch.top_saved_tensors_hooks(True) is not None:
        return None
    if not state.writes.is_unchanged(module):
        return None
    at, interval = generations.current, module.guard_interval
    if mode.decided_at == at:
        return mode
    if generations.is_paused() or not interval or _is_due(mode, interval):
        return None
    return mode if mode.continues(at) else None


def _is_due(mode: Mode, interval: int) -> bool:
    """Whether it is time to measure a layer again."""
    return generations.has_passed(mode.measured_at, interval if interval < mode.gap else mode.gap)


def plan(
    module: Any, x: Tensor, residual: Tensor | None, follows: Follows = (), dtype: torch.dtype | None = None
) -> Plan:
    """What an in-place module does with this x in this generation.

    Args:
        module: a `Guarded` module.
        x, residual: its arguments. They may be invalid, and are then not measured.
        follows: what follows, if the module does not know it.
        dtype: that of what is kept; by default that of x.
    """
    planned = _plan(module, x, residual, follows, x.dtype if dtype is None else dtype)
    mode = planned.mode
    if not planned.trusted or not has_left(module, planned.decision):
        return planned
    if mode is None or not measuring.is_measurable(module, x, residual):
        return Plan(Decision(trusted=False))
    mode.renew(module.scale_and_offset()[0])
    return Plan(mode.decisions[-1], mode, True, True)


def _plan(module: Any, x: Tensor, residual: Tensor | None, follows: Follows, dtype: torch.dtype) -> Plan:
    """The same, if the weights are those that were measured."""
    mode = current_mode(module, dtype, follows)
    if mode is not None:
        return Plan(mode.decisions[-1], mode)
    mode = mode_of(module, dtype, follows)
    at, interval = generations.now(), module.guard_interval
    if generations.is_paused():
        return Plan(Decision() if mode is None else mode.at(at))
    # A checkpoint that saved nothing in its forward pass calls the layer again in backward.
    is_recomputed = _torch.in_backward() and _torch.top_saved_tensors_hooks(True) is not None
    if interval and not is_recomputed:
        renew_if_written(module)
    if mode is not None and at < mode.generation <= generations.current:
        return Plan(mode.at(at))
    if mode is None or mode.generation != at:
        measures = interval > 0 and (mode is None or mode.measured_at < 0 or _is_due(mode, interval))
        judges = mode is not None and bool(mode.figures)
        if (measures or judges) and not measuring.is_measurable(module, x, residual):
            return Plan(Decision() if mode is None else mode.decisions[-1])
        mode = _entered(module, dtype, follows, at, measures)
    decision = mode.decisions[-1]
    if not decision.measures or (mode.measured_at == at and mode.calls >= CALLS):
        mode.decided_at = at
        return Plan(decision, mode)
    if not measuring.is_measurable(module, x, residual):
        return Plan(decision, mode)
    first = mode.measured_at < 0
    is_repeated = mode.measured_at == at and _torch.in_backward()
    return Plan(decision, mode, _recovers(module, x, residual) and not is_repeated, first)


def _recovers(module: Any, x: Tensor, residual: Tensor | None) -> bool:
    """Whether the call has a backward."""
    tensors = (x, *module.scale_and_offset(), residual)
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _entered(module: Any, dtype: torch.dtype, follows: Follows, at: int, measures: bool) -> Mode:
    """The mode, with a decision about a generation that it sees for the first time."""
    mode = notice_writes(module).mode(dtype, follows, module.training)
    mode.enter(at, measures)
    if mode.figures:
        _judge(module, mode, mode.collected())
    return mode


def record(module: Any, figures: Tensor, planned: Plan) -> None:
    """Keeps measured figures for the next generation.

    The host waits for the first measurement of a layer, which decides at once. After a batch that tells nothing the
    next measurement is the first again.
    """
    mode = planned.mode
    assert mode is not None
    mode.record(figures, waited=planned.is_first)
    if planned.is_first:
        found = mode.collected()
        _judge(module, mode, found)
        if not found[0].is_useful:
            mode.measured_at = -1
        elif not mode.decisions[-1].trusted:
            # Other calls of the generation are judged together with this one.
            mode.figures.append((figures, None))


def decide(
    module: Any, x: Tensor, residual: Tensor | None, statistics: Callable[[], tuple[Tensor, Tensor]] | None = None
) -> tuple[bool, Channels]:
    """Whether an in-place module may run in place in this generation, on this x, and the channels that it then saves.

    Arguments are those of `plan`, and what computes a synchronised call's statistics. Ranks may differ in what they
    save: their collectives are the same. Compiled code does not read the generation, because a compiler would make a
    new program for each one.
    """
    if torch.compiler.is_compiling():
        return bool(module._revision >= 0 and module._may_be_compiled_in_place(x.dtype)), _NONE
    if module._guard is not None and module._guard.given_up is not None:
        return False, _NONE
    planned = plan(module, x, residual)
    found = statistics() if planned.measures and statistics is not None else None
    decision = decided(module, planned, lambda: measuring.measure(module, x, residual, None, found))
    if statistics is not None and module.guard_interval and 0 < x.numel() <= x.shape[1]:
        # One value per channel cannot be measured, and to keep the input takes hardly any memory.
        mode = mode_of(module, x.dtype)
        return decision.trusted and mode is not None and mode.measured_at >= 0, decision.verbatim
    return decision.trusted, decision.verbatim


def decided(module: Any, planned: Plan, measure: Callable[[], Tensor]) -> Decision:
    """What a layer does in a call, after that was measured if it is due.

    ``measure`` returns what `figures.packed` returns.
    """
    if planned.measures:
        assert planned.mode is not None
        record(module, measure(), planned)
        return planned.mode.decisions[-1]
    return planned.decision


def stays_untrusted(module: Any, dtype: torch.dtype) -> bool:
    """Whether the layer is not trusted, whatever of what it has seen follows, and nothing is to be measured."""
    modes = [mode for mode in modes_of(module, dtype) if mode.training == module.training]
    return bool(modes) and all(
        not mode.decisions[-1].trusted and current_mode(module, dtype, mode.follows) is mode for mode in modes
    )


def _is_readable(t: Any) -> bool:
    """Whether the values of a parameter may be looked at, without a wait for a device."""
    # Subclasses without a dispatch of their own have memory of their own.
    is_plain = isinstance(t, Tensor) and type(t).__torch_dispatch__ is Tensor.__torch_dispatch__
    return is_plain and t.is_cpu and t.dim() == 1 and t.dtype in THRESHOLDS


def has_left(module: Any, decision: Decision) -> bool:
    """Whether a weight on the CPU is nearly zero whose channel is not saved, or has left what the decision is for.

    Whatever has written to the weight, xhat of its channel could be lost in this very call.
    """
    weight, bias = module.scale_and_offset()
    if not _is_readable(weight) or _torch.transforms_active() or _torch.tracing_state() is not None:
        return False
    # What else is wrong with the bias is told by the op.
    bias = bias if _is_readable(bias) and bias.shape == weight.shape else None
    if decision.bounds is not None and decision.bounds.shape[1] != weight.numel():
        return True
    added = 0.0 if module.signed_weight else module.eps
    with _torch.unwatched():
        rows = decision.verbatim.rows(weight.device)
        return bool(ops.run(ops.has_left, [], weight, bias, module.least_weight, added, decision.bounds, rows))


def _say_untrusted(module: Any, text: str) -> None:
    """Says that a layer is torch's, or raises that it would be."""
    if module.on_untrusted == "raise":
        # The measurement is forgotten, so that the next call measures and raises, too.
        forget(module)
        raise RuntimeError(
            f"inplace_abn: {name(module)}: {text}, unless on_untrusted is 'raise': call set_guard(model)"
        )
    _logger.log(logging.WARNING if module.on_untrusted == "warn" else logging.INFO, "%s: %s", name(module), text)


def _judge(module: Any, mode: Mode, found: list[Table]) -> None:
    """Sets the mode by the figures of a generation. Those of batches with infinities or NaN say nothing."""
    last, given = mode.decisions[-1], module.guard_threshold
    threshold = THRESHOLDS[mode.dtype] if given is None else Threshold(given, given)
    table = worst([figures for figures in found if not figures.unknown])
    before = now = last.trusted
    error = ""
    if table is not None:
        # Modes of users need not see these ops, which are on the host.
        with torch.no_grad(), _torch.NoDispatch():
            now, channels = chosen(table, last.verbatim, before, threshold, mode.dtype)
            error = described(table, len(channels), threshold)
            if now:
                follows = mode.follows[0] if mode.follows else getattr(module, "activation", "identity")
                mode.change(verbatim=channels, bounds=bounds(table, threshold, mode.dtype, follows))
    # A mode that was renewed is trusted, although other things were said of it.
    was_trusted = not mode.why
    if not now and error:
        mode.why = f"its input is not recoverable: {error}"
    if now == before == was_trusted:
        return
    kind = str(mode.dtype).removeprefix("torch.")
    if not now and (was_trusted or module.on_untrusted == "raise"):
        text = f"its input is not recoverable from its output ({error}); "
        _say_untrusted(module, f"{text}it saves its input for backward in {kind}, as torch does")
    if now:
        mode.why = ""
    mode.change(trusted=now)
    renew(module)
    if now and not was_trusted:
        _logger.info("%s: its input is recoverable again (%s); it runs in place in %s", name(module), error, kind)
