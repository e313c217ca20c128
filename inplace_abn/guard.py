"""The guard of recovery: a layer runs in place only while xhat can be recovered from z (`inplace_abn.recovery`).

The rule is deterministic, so that the same seed gives the same bits. Generations count the steps of all optimizers of
the process. A layer measures in the first generation that it sees, and then once in every ``guard_interval``
generations. In such a generation it measures the first calls, each on a sample of the call's input, before the input is
overwritten. The mode of a layer is constant within a generation, so that micro-batches and the recomputations of
checkpoints agree. The mode changes in the next generation. The copy of the figures to the host starts when they are
measured, so the host waits for the first measurement of a layer only: its first step must be right, too.

Trust is lost above the threshold and regained below a quarter of it. A layer that is not trusted runs `plain.kept`: it
keeps x, as torch does. A signed weight is then the scale itself, even within eps of zero.

Calls that are compiled, captured, traced or transformed by torch.func keep the mode that the layer had, because a
measurement would make the host wait. A recomputation in a backward pass keeps the mode of the forward pass. It is
measured if the forward pass was not, because under reentrant checkpoints only the recomputation needs gradients.

Anything may follow a converted norm, so its measurement depends on what follows. If something follows for the first
time, the norm runs as torch's until the next generation, in which it is measured.
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
"""The largest number of calls that are measured in a generation. Without optimizer steps a generation never ends."""

generation = 0
"""The number of steps that optimizers of this process have taken."""

_logger = logging.getLogger("inplace_abn")


def _advance(*_: Any) -> None:
    global generation
    generation += 1


register_optimizer_step_post_hook(_advance)

changed_at = -1
"""The last generation in which something was measured, or seen, that a module does differently in the next one."""

_paused = 0


def is_paused() -> bool:
    return _paused > 0


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
        """The generation in which what follows was measured first; None if that measurement decided at once."""
        self.stranger: int | None = None
        """The generation in which something followed that was never measured; None if nothing did."""

    def knows(self, what: Any) -> bool:
        """Whether ``what`` was measured before this generation, or decided at once.

        All calls of a generation must do the same.
        """
        return what in self.met and self.met[what] != generation

    def learn(self, what: Any, at_once: bool) -> None:
        if what not in self.met and not at_once:
            global changed_at
            changed_at = generation
        self.met.setdefault(what, None if at_once else generation)

    def is_new(self) -> bool:
        """Whether the layer must be measured as if for the first time."""
        return self.measured_at < 0 or self.stranger not in (None, generation)

    def is_due(self, interval: int) -> bool:
        """Whether this generation's calls are measured, for a layer that was measured before."""
        if self.measured_at == generation:
            return self.calls < CALLS
        return has_passed(self.measured_at, interval)

    def keep(self, figures: Tensor, dtype: torch.dtype, waited: bool) -> None:
        """Keeps the figures of a call, and drops those of earlier generations."""
        if self.measured_at != generation:
            self.measured_at, self.calls, self.pending, self.stranger = generation, 0, [], None
        self.calls += 1
        self.pending.append((*((figures, None) if waited else fetched(figures)), dtype))

    def take(self) -> list[tuple[Figures, torch.dtype]]:
        """The figures that were kept and not taken yet. Waits for the device."""
        pending, self.pending = self.pending, []
        for _, event, _ in pending:
            if event is not None:
                event.synchronize()
        return [(unpacked(figures), dtype) for figures, _, dtype in pending]

    def __getstate__(self) -> dict[str, Any]:
        """Waits for the figures, because events cannot be copied."""
        for _, event, _ in self.pending:
            if event is not None:
                event.synchronize()
        return vars(self) | {"pending": [(figures, None, dtype) for figures, _, dtype in self.pending]}


def has_passed(since: int, interval: int) -> bool:
    """Whether a multiple of the interval has come since that generation. A generation that is still to come is from
    another process, and counts as passed."""
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
    """Whether each sample of the input has its own statistics."""
    why_untrusted: str = ""
    """Why the module keeps its input, in words; empty if it runs in place."""
    _revision: int = 0
    """A number that changes when code that was compiled for the module is no longer valid."""

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], *rest: Any) -> None:
        forget(self)
        super()._load_from_state_dict(state_dict, *rest)  # type: ignore[misc]


class Look(NamedTuple):
    """What a layer does in a call."""

    trusted: bool
    """The mode of the layer. A first measurement may change it in the same call."""
    due: bool = False
    """Whether the call is measured."""
    first: bool = False


def look(module: Any, x: Tensor, residual: Tensor | None, empty: bool = False) -> Look:
    """What an in-place module does with this x in this generation.

    Args:
        module: a `Guarded` module.
        x, residual: its arguments. They may be invalid, and are then not measured.
        empty: whether an x may have too few values to measure, as a rank's share of a batch may.
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
    """Keeps measured figures for the next generation, and returns whether the module is trusted.

    The host waits for the first measurement of a layer, which decides at once. A batch with infinities or NaN tells
    nothing, so the next measurement is the first again.
    """
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
    """`trusts`, for the forward pass of a module.

    Compiled code does not read the generation, because a compiler would make a new program for each one.
    """
    if torch.compiler.is_compiling():
        # An exported program runs torch's own ops in any case, and its weights have no values to look at.
        known = _torch.is_exporting() or (module._revision >= 0 and module._lets_compiled(x.dtype))
        return bool(module._trusted and known)
    return bool(module._trusted) if module._guard_generation == generation else trusts(module, x, residual)


class Frozen:
    """A mode that does not change, without figures, as in compiled code."""

    def __init__(self, trusted: bool) -> None:
        self.trusted = trusted

    def figures(self, x: Tensor) -> Tensor:
        """The figures of a rank that has not measured; float64 of shape (4,)."""
        return no_figures(x.device)

    def trusts(self, gathered: Tensor) -> bool:
        return self.trusted


class Watch(Frozen):
    """The guard of one synchronised call, whose figures are gathered with the statistics.

    If no rank has several values per channel, nothing can be measured. Then x is kept, which takes hardly any memory.
    """

    def __init__(self, module: Any, x: Tensor, residual: Tensor | None) -> None:
        self.module, self.residual, self.dtype = module, residual, x.dtype
        self.look = look(module, x, residual, empty=True)
        self.measures = False
        super().__init__(self.look.trusted)

    def figures(self, x: Tensor) -> Tensor:
        """The figures of this rank, from its own statistics; float64 of shape (4,)."""
        self.measures = self.look.due and x.numel() > x.shape[1]
        if not self.measures:
            return super().figures(x)
        return measuring.measure(self.module, x, self.residual)

    def trusts(self, gathered: Tensor) -> bool:
        """Whether the call may be in place, by the figures of all ranks, of shape (ranks, 4)."""
        if not self.look.due:
            return self.look.trusted
        # A rank that has not measured waits for the device, as it does for the count.
        if not self.measures and not are_known(gathered):
            return False
        return take(self.module, worst(gathered), self.look.first, self.dtype)


def _scales(module: Any, state: State) -> bool:
    """Whether a layer's scale is its weight, unchanged. If nothing is recovered, only this matters.

    The weight is looked at once in an interval, until the layer is measured.
    """
    if state.scaled_at < 0 or has_passed(state.scaled_at, module.guard_interval):
        state.scaled_at, weight = generation, module.weight
        state.scales = weight is None or not module.signed_weight or bool((weight.detach().abs() >= module.eps).all())
    return state.scales


def _decide(module: Any, found: list[tuple[Figures, torch.dtype]]) -> None:
    """Sets the mode by the figures of a generation."""
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
        # The measurement is forgotten, so that the next call measures and raises, too.
        forget(module)
        raise RuntimeError(f"inplace_abn: {text}")
    module.__dict__.update(_trusted=now, why_untrusted="" if now else f"its input is not recoverable: {told}")
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
    """Sets how the in-place modules of ``model`` watch whether xhat can be recovered from z. All are measured anew.

    Args:
        model: any module. Messages use the names of its modules.
        interval: optimizer steps between two measurements. With 0 nothing is measured, and every layer is in place.
            None leaves the interval as it is (100 by default).
        threshold: the relative error of dx, and of the worst channel's dweight, above which a layer is not trusted. The
            layer is trusted again below a quarter of it. None for the default of the activations' dtype, `THRESHOLDS`:
            for dx 0.023 in bfloat16, 2**-6 in float16, 2**-14 in float32, 2**-30 in float64.
        on_untrusted: "fallback" keeps the layer's input, as torch does, until the layer is trusted again, and logs this
            at level INFO through ``logging.getLogger("inplace_abn")``. "warn" does the same at level WARNING. "raise"
            raises a RuntimeError before anything is written.

    Returns:
        ``model``.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: a negative interval, a threshold that is not positive, or an unknown ``on_untrusted``. Nothing has
            been modified.
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
    """Raises ValueError for an interval that is not an integer >= 0."""
    if not isinstance(interval, int) or interval < 0:
        raise ValueError(f"inplace_abn: expected a guard_interval >= 0, got {interval}")


_STATE = ("_guard", "_guard_generation", "_trusted", "why_untrusted", "_given_up")
_SETTINGS = ("guard_interval", "guard_threshold", "on_untrusted", "_guard_name")


def forget(module: Any) -> None:
    """Forgets what was measured. The next measurement of the module is its first again."""
    global changed_at
    changed_at = generation
    for name in _STATE:
        module.__dict__.pop(name, None)
    renew(module)


def renew(module: Any) -> None:
    """Makes compilers compile the module anew."""
    # A module that was reverted has no revision any more.
    module.__dict__["_revision"] = getattr(module, "_revision", 0) + 1


def strip(module: nn.Module) -> None:
    """Removes all that the guard has stored on a module."""
    forget(module)
    for name in (*_SETTINGS, "_revision"):
        module.__dict__.pop(name, None)
