"""The guard of recovery: a layer runs in place only while z still tells what xhat was (`inplace_abn.recovery`).

The rule is deterministic, so that the same seed gives the same bits. Generations count optimizer steps, of all
optimizers of the process. A layer measures at the first generation that it sees and once in every ``guard_interval``
generations, in the first calls of that generation, which may be of several inputs, each on a sample of the batch that
it is given, before that is overwritten. Its mode is constant within a generation, so that micro-batches and the
computing again of checkpoints agree, and changes at the next one, from figures whose copies were started when they were
measured. Only the first measurement of a layer is waited for: its first step must be right, too.

Trust is lost above the threshold and regained below a quarter of it. A layer that is not trusted is `plain.kept`: it
keeps x, as torch does, and scales by the weight itself, also where that is within eps of zero.

What is compiled, captured, traced or transformed by torch.func stays in the mode that the layer had: that would need
the host to wait. What is computed again in a backward pass stays in the mode of the forward pass; it is measured if
the forward pass was not, since reentrant checkpoints need gradients there only.

Converted norms, which anything may follow, are measured by what follows. What never did is torch's until the next
generation, in which it is measured.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from inplace_abn import _torch, measuring
from inplace_abn.figures import (
    THRESHOLDS,
    Figures,
    Threshold,
    are_known,
    described,
    fetched,
    no_figures,
    unpacked,
    worst,
)

ON_UNTRUSTED = ("fallback", "warn", "raise")
CALLS = 8
"""Calls of a generation that are measured at most: where no optimizer steps, a generation never ends."""

generation = 0
"""Steps that optimizers of this process have taken."""

_logger = logging.getLogger("inplace_abn")


def _advance(*_: Any) -> None:
    global generation
    generation += 1


register_optimizer_step_post_hook(_advance)

_paused = 0


@contextmanager
def paused() -> Iterator[None]:
    """Pauses the guard: modes stay as they are, and nothing is measured."""
    global _paused
    _paused += 1
    try:
        yield
    finally:
        _paused -= 1


class State:
    """What the guard knows of a layer, besides its mode."""

    def __init__(self) -> None:
        self.measured_at = -1
        self.calls = 0
        self.scaled_at = -1
        self.scales = True
        self.pending: list[tuple[Tensor, torch.Event | None, torch.dtype]] = []
        self.met: dict[Any, int | None] = {}
        """When what follows the layer was measured first; None where that decided at once."""
        self.stranger: int | None = None
        """When something followed that never was measured."""

    def knows(self, what: Any) -> bool:
        """Whether it was measured, in a generation before this one: all calls of a generation are to do the same."""
        return what in self.met and self.met[what] != generation

    def learn(self, what: Any, at_once: bool) -> None:
        self.met.setdefault(what, None if at_once else generation)

    def is_new(self) -> bool:
        """Whether the layer is to be measured as if it had never been."""
        return self.measured_at < 0 or self.stranger not in (None, generation)

    def is_due(self, interval: int) -> bool:
        """Whether calls of this generation are measured, of a layer that has been."""
        if self.measured_at == generation:
            return self.calls < CALLS
        return _has_passed(self.measured_at, interval)

    def keep(self, figures: Tensor, dtype: torch.dtype, waited: bool) -> None:
        """Keeps the figures of a call; those of an earlier generation are forgotten."""
        if self.measured_at != generation:
            self.measured_at, self.calls, self.pending, self.stranger = generation, 0, [], None
        self.calls += 1
        self.pending.append((*((figures, None) if waited else fetched(figures)), dtype))

    def take(self) -> list[tuple[Figures, torch.dtype]]:
        """The figures that wait to be looked at, once."""
        pending, self.pending = self.pending, []
        for _, event, _ in pending:
            if event is not None:
                event.synchronize()
        return [(unpacked(figures), dtype) for figures, _, dtype in pending]

    def __getstate__(self) -> dict[str, Any]:
        """Events cannot be copied, so their figures are waited for."""
        for _, event, _ in self.pending:
            if event is not None:
                event.synchronize()
        return vars(self) | {"pending": [(figures, None, dtype) for figures, _, dtype in self.pending]}


def _has_passed(since: int, interval: int) -> bool:
    """Whether a multiple of the interval has come; a generation that is to come is another process's."""
    return since > generation or generation // interval > since // interval


class Guarded:
    """The part of a module that the guard needs. The guard keeps its state in the instance's dictionary."""

    guard_interval: int = 100
    guard_threshold: float | None = None
    on_untrusted: str = "fallback"
    _guard: State | None = None
    _guard_generation: int = -1
    _trusted: bool = True
    per_instance: bool = False
    """Whether statistics of the input are those of each sample."""
    _revision: int = 0
    """Compiled code is valid for one of them."""

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], *rest: Any) -> None:
        forget(self)
        super()._load_from_state_dict(state_dict, *rest)  # type: ignore[misc]


class Look(NamedTuple):
    """What a layer is to do in a call."""

    trusted: bool
    """Its mode, before a measurement that is the first."""
    due: bool = False
    """Whether it measures."""
    first: bool = False


def look(module: Any, x: Tensor, residual: Tensor | None, empty: bool = False) -> Look:
    """What an in-place module is to do with this x, in this generation.

    Args:
        module: a `Guarded` one.
        x, residual: its arguments, which need not be valid; nothing is measured on what is not.
        empty: whether a share of the batch counts that has no values to measure.
    """
    state: State | None = module._guard
    interval: int = module.guard_interval
    if interval == 0 or _paused:
        return Look(bool(module._trusted))
    first = state is None or state.is_new()
    due = first or cast(State, state).is_due(interval)
    if not due and not cast(State, state).pending:
        module.__dict__["_guard_generation"] = generation
        return Look(bool(module._trusted))
    if not measuring.is_measurable(module, x, residual, empty):
        return Look(bool(module._trusted))
    if state is None:
        state = module.__dict__["_guard"] = State()
    tensors = (x, module.weight, module.bias, residual)
    recovers = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    if first and not recovers:
        return Look(_scales(module, state))
    if not first and _torch.in_backward():
        return Look(bool(module._trusted), due and recovers and state.measured_at != generation)
    if not first:
        if state.measured_at != generation:
            _decide(module, state.take())
        if not due:
            module.__dict__["_guard_generation"] = generation
    return Look(bool(module._trusted), due and recovers, first)


def take(module: Any, figures: Tensor, first: bool, dtype: torch.dtype) -> bool:
    """Keeps what was measured for the next generation. The first measurement of a layer is waited for and decides at
    once. A batch with infinities or NaN tells nothing: the next call's measurement is the first then."""
    state: State = module._guard
    state.keep(figures, dtype, waited=first)
    if first:
        found = state.take()
        _decide(module, found)
        if found[0][0].unknown:
            state.measured_at = -1
    return bool(module._trusted)


def trusts(module: Any, x: Tensor, residual: Tensor | None) -> bool:
    """Whether an in-place module may run in place in this generation, on this x. Arguments are those of `look`."""
    looked = look(module, x, residual)
    return take(module, measuring.measure(module, x, residual), looked.first, x.dtype) if looked.due else looked.trusted


def lets(module: Any, x: Tensor, residual: Tensor | None) -> bool:
    """`trusts`, of a module that is called. A compiler would make a new program of every generation."""
    if torch.compiler.is_compiling():
        # An exported program has torch's own ops in any case, and weights without values.
        known = _torch.is_exporting() or (module._revision >= 0 and module._lets_compiled(x.dtype))
        return bool(module._trusted and known)
    return bool(module._trusted) if module._guard_generation == generation else trusts(module, x, residual)


class Frozen:
    """A mode that does not change, with no figures, as in compiled code."""

    def __init__(self, trusted: bool) -> None:
        self.trusted = trusted

    def figures(self, x: Tensor) -> Tensor:
        """Those of a rank that has not measured; float64 of shape (4,)."""
        return no_figures(x.device)

    def trusts(self, gathered: Tensor) -> bool:
        return self.trusted


class Watch(Frozen):
    """The guard of one synchronised call, whose figures travel with the statistics.

    Where no rank has several values, there is nothing to measure by, and hardly anything to keep: x is kept.
    """

    def __init__(self, module: Any, x: Tensor, residual: Tensor | None) -> None:
        self.module, self.residual, self.dtype = module, residual, x.dtype
        self.look = look(module, x, residual, empty=True)
        self.measures = False
        super().__init__(self.look.trusted)

    def figures(self, x: Tensor) -> Tensor:
        """This rank's, of its own statistics; float64 of shape (4,)."""
        self.measures = self.look.due and x.numel() > x.shape[1]
        if not self.measures:
            return super().figures(x)
        return measuring.measure(self.module, x, self.residual)

    def trusts(self, gathered: Tensor) -> bool:
        """Whether the call may be in place, from all ranks' figures, (ranks, 4)."""
        if not self.look.due:
            return self.look.trusted
        # A rank that has not measured waits for the device, as it does for the count.
        if not self.measures and not are_known(gathered):
            return False
        return take(self.module, worst(gathered), self.look.first, self.dtype)


def _scales(module: Any, state: State) -> bool:
    """Whether a layer scales by its weight, which alone matters where nothing is recovered. Looked at once in an
    interval, until the layer is measured."""
    if state.scaled_at < 0 or _has_passed(state.scaled_at, module.guard_interval):
        state.scaled_at, weight = generation, module.weight
        state.scales = weight is None or not module.signed_weight or bool((weight.detach().abs() >= module.eps).all())
    return state.scales


def _decide(module: Any, found: list[tuple[Figures, torch.dtype]]) -> None:
    """Changes the mode to what the figures of a generation ask for."""
    before, given = bool(module._trusted), module.guard_threshold
    now, told = before, ""
    for figures, dtype in found:
        threshold = THRESHOLDS[dtype] if given is None else Threshold(given, given)
        now, told = figures.trusted(before, threshold), described(figures, threshold)
        if not now:
            break
    if now == before:
        return
    name = module.__dict__.get("_guard_name") or f"{type(module).__name__}({module.extra_repr()})"
    text = f"{name}: z does not tell xhat ({told}); it keeps its input, as torch does"
    if not now and module.on_untrusted == "raise":
        # As if it had not been looked at, so that the next call raises, too.
        forget(module)
        raise RuntimeError(f"inplace_abn: {text}")
    module.__dict__["_trusted"] = now
    if now:
        _logger.info("%s: z tells xhat again (%s); it runs in place", name, told)
    else:
        _logger.log(logging.WARNING if module.on_untrusted == "warn" else logging.INFO, "%s", text)


def set_guard(
    model: nn.Module,
    interval: int | None = None,
    threshold: float | None = None,
    on_untrusted: str = "fallback",
) -> nn.Module:
    """Says how the in-place modules of ``model`` watch whether z still tells xhat. All are measured anew.

    Args:
        model: any module; names in messages are those of its modules.
        interval: optimizer steps between two measurements; 0 for none at all, and every layer in place. None leaves
            it as it is (100 if nothing else was said).
        threshold: the relative error of dx, and of the worst channel's dweight, above which a layer is not trusted; it
            is again below a quarter. None for the default of the activations' dtype, `THRESHOLDS`: for dx 0.023 in
            bfloat16, 2**-6 in float16, 2**-14 in float32, 2**-30 in float64.
        on_untrusted: "fallback" keeps the layer's input, as torch does, until it is trusted again, and says so as
            information through ``logging.getLogger("inplace_abn")``; "warn" does it with a warning there; "raise"
            raises a RuntimeError instead, before anything is written.

    Returns:
        ``model``.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: a negative interval, a threshold that is not positive, or another word. Nothing has been modified.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"inplace_abn.set_guard: expected model to be a torch.nn.Module, got {type(model).__name__}")
    if interval is not None:
        check_interval(interval)
    if threshold is not None and not threshold > 0:
        raise ValueError(f"inplace_abn.set_guard: expected a threshold > 0, got {threshold}")
    if on_untrusted not in ON_UNTRUSTED:
        raise ValueError(
            f"inplace_abn.set_guard: expected on_untrusted to be one of {ON_UNTRUSTED}, got {on_untrusted!r}"
        )
    for name, module in model.named_modules():
        if isinstance(module, Guarded):
            forget(module)
            module.__dict__.update(guard_threshold=threshold, on_untrusted=on_untrusted)
            if name:
                module.__dict__["_guard_name"] = name
            if interval is not None:
                module.__dict__["guard_interval"] = interval
    return model


def check_interval(interval: int) -> None:
    """Raises ValueError for an interval that is no count of steps."""
    if not isinstance(interval, int) or interval < 0:
        raise ValueError(f"inplace_abn: expected a guard_interval >= 0, got {interval}")


_STATE = ("_guard", "_guard_generation", "_trusted")
_SETTINGS = ("guard_interval", "guard_threshold", "on_untrusted", "_guard_name")


def forget(module: Any) -> None:
    """Has the module measure anew before its mode is decided, because its weights were replaced."""
    for name in _STATE:
        module.__dict__.pop(name, None)
    renew(module)


def renew(module: Any) -> None:
    """Has the module compiled anew."""
    # Of a module that was reverted, nothing is left.
    module.__dict__["_revision"] = getattr(module, "_revision", 0) + 1


def strip(module: nn.Module) -> None:
    """Takes away all that the guard has left on a module."""
    forget(module)
    for name in (*_SETTINGS, "_revision"):
        module.__dict__.pop(name, None)
