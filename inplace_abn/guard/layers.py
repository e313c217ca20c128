"""What each layer does in a call: it is measured, judged, and trusted or not (`inplace_abn.guard`)."""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from inplace_abn import _torch
from inplace_abn.guard import generations, measuring, verbatim
from inplace_abn.guard.figures import THRESHOLDS, Table, Threshold, described, worst
from inplace_abn.guard.modes import Decision, Follows, Mode, State
from inplace_abn.settings import Channels, ChannelSlots, parameters

if TYPE_CHECKING:
    from typing_extensions import Self

ON_UNTRUSTED = ("fallback", "warn", "raise")
CALLS = 8
"""The largest number of calls that are measured in a generation. Without optimizer steps a generation never ends."""

CARRIED = "_follows"
"""The attribute of a module that is no guarded layer itself, but carries one."""

_logger = logging.getLogger("inplace_abn")
_NONE = Channels()
_revisions = itertools.count(1)
_layers: weakref.WeakSet[Any] = weakref.WeakSet()
"""All guarded layers."""


class Guarded:
    """The part of a module that the guard needs. The guard keeps its state in the instance's dictionary."""

    guard_interval: int = 100
    guard_threshold: float | None = None
    on_untrusted: str = "fallback"
    _guard: State | None = None
    per_instance: bool = False
    """Whether each sample of the input has its own statistics."""
    _revision: int = 0
    """A number that no other module has or had: what was compiled for one must not run for another. It changes when
    such code is no longer valid; negative: compiled code does as torch does."""
    _saved_rows: Tensor
    """The channels whose xhat compiled code saves: `settings.Channels.rows`."""
    _saved_channels: Tensor
    """Their numbers, with room for more."""
    _saved_numbers: tuple[int, ...]
    """The same on the host."""

    def __new__(cls, *_: Any, **__: Any) -> Self:
        module = super().__new__(cls)
        renew(module)
        return module

    def __setstate__(self, state: dict[str, Any]) -> None:
        compiled = ("_saved_rows", "_saved_channels", "_saved_numbers")
        restore = getattr(super(), "__setstate__", self.__dict__.update)
        restore({name: value for name, value in state.items() if name not in compiled})
        renew(self)

    @property
    def shared(self) -> int:
        """How many neighbouring channels of a sample share statistics; 0 if statistics are of the batch."""
        return int(self.per_instance)

    @property
    def least_weight(self) -> float:
        """The smallest magnitude of a weight that does not lose xhat, whatever is measured."""
        return self.eps  # type: ignore[attr-defined, no-any-return]

    def is_parametrized(self) -> bool:
        """Whether parameters are computed whenever they are read, which may have effects: torch reads them once.

        torch.nn.utils.parametrize makes them properties.
        """
        return hasattr(type(self), "weight") or hasattr(type(self), "bias")

    def scale_and_offset(self) -> tuple[Tensor | None, Tensor | None]:
        """What xhat is multiplied by, and what is added, before the activation."""
        return parameters(self)

    @property
    def why_untrusted(self) -> str:
        """Why the module saves its input for backward, in words; empty if it runs in place."""
        return "; ".join(dict.fromkeys(mode.why for mode in _modes(self) if mode.why))

    def shares_saved(self) -> dict[torch.dtype, float]:
        """The share of channels whose xhat is saved beside z now, by the dtype of inputs; 1 where the input is."""
        last = {mode.dtype: mode.decisions[-1] for mode in _modes(self)}
        return {dtype: 1.0 if not d.trusted else len(d.verbatim) / max(1, d.verbatim.size) for dtype, d in last.items()}

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], *rest: Any) -> None:
        forget(self)
        super()._load_from_state_dict(state_dict, *rest)  # type: ignore[misc]


class Look(NamedTuple):
    """What a layer does in a call."""

    decision: Decision
    mode: Mode | None = None
    """What may learn from the call; None if nothing does."""
    due: bool = False
    """Whether the call is measured."""
    decisive: bool = False
    """Whether that measurement may change the mode in the same call."""

    @property
    def trusted(self) -> bool:
        return self.decision.trusted


def _modes(module: Any) -> list[Mode]:
    return [] if module._guard is None else [*module._guard.modes.values()]


def settled(module: Any, dtype: torch.dtype, follows: Follows = ()) -> Mode | None:
    """The mode if this call only has to do what was decided, as most calls."""
    state: State | None = module._guard
    mode = None if state is None else state.modes.get((dtype, follows))
    if state is None or mode is None or _torch.top_saved_tensors_hooks(True) is not None:
        return None
    return mode if is_settled(module, state, mode) else None


def is_settled(module: Any, state: State, mode: Mode) -> bool:
    """Whether a call without saved-tensor hooks only has to do what was decided."""
    if not state.writes.are_expected(module):
        return False
    at, interval = generations.current, module.guard_interval
    if mode.settled_at == at:
        return True
    if generations.is_paused() or not interval or _is_due(mode, interval):
        return False
    return mode.goes_on(at)


def _is_due(mode: Mode, interval: int) -> bool:
    """Whether it is time to measure a layer again."""
    return generations.has_passed(mode.measured_at, interval if interval < mode.gap else mode.gap)


def look(
    module: Any, x: Tensor, residual: Tensor | None, follows: Follows = (), dtype: torch.dtype | None = None
) -> Look:
    """What an in-place module does with this x in this generation.

    Args:
        module: a `Guarded` module.
        x, residual: its arguments. They may be invalid, and are then not measured.
        follows: what follows, if the module does not know it.
        dtype: that of what is kept; by default that of x.
    """
    dtype = x.dtype if dtype is None else dtype
    mode = settled(module, dtype, follows)
    if mode is not None:
        return Look(mode.decisions[-1], mode)
    mode = mode_of(module, dtype, follows)
    at, interval = generations.now(), module.guard_interval
    if generations.is_paused():
        return Look(Decision() if mode is None else mode.at(at))
    # A checkpoint that saved nothing in its forward pass calls the layer again in backward.
    is_recomputed = _torch.in_backward() and _torch.top_saved_tensors_hooks(True) is not None
    if interval and not is_recomputed:
        renew_if_written(module)
    if mode is not None and at < mode.generation <= generations.current:
        return Look(mode.at(at))
    if mode is None or mode.generation != at:
        measures = interval > 0 and (mode is None or mode.measured_at < 0 or _is_due(mode, interval))
        judges = mode is not None and bool(mode.figures)
        if (measures or judges) and not measuring.is_measurable(module, x, residual):
            return Look(Decision() if mode is None else mode.decisions[-1])
        mode = _begun(module, dtype, follows, at, measures)
    decision = mode.decisions[-1]
    if not decision.measures or (mode.measured_at == at and mode.calls >= CALLS):
        mode.settled_at = at
        return Look(decision, mode)
    if not measuring.is_measurable(module, x, residual):
        return Look(decision, mode)
    first = mode.measured_at < 0
    tensors = (x, *module.scale_and_offset(), residual)
    recovers = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    is_repeated = mode.measured_at == at and _torch.in_backward()
    return Look(decision, mode, recovers and not is_repeated, first)


def _begun(module: Any, dtype: torch.dtype, follows: Follows, at: int, measures: bool) -> Mode:
    """The mode, with a decision about a generation that it sees for the first time."""
    mode = notice_writes(module).mode(dtype, follows)
    mode.begin(at, measures)
    if mode.figures:
        _judge(module, mode, mode.take())
    return mode


def notice_writes(module: Any) -> State:
    """The module's state, which notices writes to the weight and the bias from now on."""
    state: State | None = module._guard
    if state is None or not state.writes.are_begun():
        state = module.__dict__["_guard"] = state or State()
        state.writes.take(module)
    return state


def renew_if_written(module: Any) -> bool:
    """Forgets what was measured if anything but an optimizer wrote to the module's weight or bias, and returns whether.

    What writes often is an optimizer that torch does not know. It counts as often as the guard measures.
    """
    state: State | None = module._guard
    if state is None or state.writes.are_expected(module) or not state.writes.take(module):
        return False
    writes, interval = state.writes, module.guard_interval
    writes.count = 1 if generations.has_passed(writes.counted_at, interval) else writes.count + 1
    writes.counted_at = generations.current
    if writes.count > CALLS and writes.count % interval:
        return False
    for mode in state.modes.values():
        if not mode.decisions[-1].trusted:
            # Nobody has watched what reads its output in place.
            generations.note_change(module)
        mode.renew()
    return True


def take(module: Any, figures: Tensor, looked: Look) -> bool:
    """Keeps measured figures for the next generation, and returns whether the module is trusted.

    The host waits for the first measurement of a layer, which decides at once. A batch with infinities or NaN tells
    nothing, so the next measurement is the first again.
    """
    mode = looked.mode
    assert mode is not None
    mode.keep(figures, waited=looked.decisive)
    if looked.decisive:
        found = mode.take()
        _judge(module, mode, found)
        if found[0].unknown:
            mode.measured_at = -1
        elif not mode.decisions[-1].trusted:
            # Other calls of the generation are judged together with this one.
            mode.figures.append((figures, None))
    return mode.decisions[-1].trusted


def name(module: Any) -> str:
    """What messages call a layer: its name in the model, if it is known."""
    return module.__dict__.get("_guard_name") or f"{type(module).__name__}({module.extra_repr()})"


def give_up(module: Any, why: str, noticed: bool, at_once: bool = False) -> bool:
    """Makes a converted norm torch's from the next generation on, and returns whether it was not given up before.

    ``at_once`` makes it so from its next call on, because the present step has failed.
    ``noticed`` says that others read tags, or write to what backward needs: they may do so in compiled code, too.
    """
    state = notice_writes(module)
    is_new = state.given_up is None
    if is_new:
        state.given_up, state.noticed = (generations.current - at_once, why), noticed
        renew(module)
    return is_new


def is_noticed(module: Any) -> bool:
    """Whether a converted norm was given up because others read tags, or write to what backward needs."""
    return module._guard is not None and module._guard.noticed


def given_up(module: Any) -> tuple[int, str] | None:
    """The generation in which a converted norm was given up, and why; None if it was not."""
    return None if module._guard is None else module._guard.given_up


def decide(module: Any, x: Tensor, residual: Tensor | None) -> tuple[bool, Channels]:
    """Whether an in-place module may run in place in this generation, on this x, and the channels that it then saves.

    Arguments are those of `look`. Compiled code does not read the generation, because a compiler would make a new
    program for each one.
    """
    if torch.compiler.is_compiling():
        return bool(module._revision >= 0 and module._may_be_compiled_in_place(x.dtype)), _NONE
    looked = look(module, x, residual)
    decision = learnt(module, looked, lambda: measuring.measure(module, x, residual))
    return decision.trusted, decision.verbatim


def learnt(module: Any, looked: Look, measure: Callable[[], Tensor]) -> Decision:
    """What a layer does in a call, after that was measured if it is due.

    ``measure`` returns what `figures.packed` returns.
    """
    if looked.due:
        assert looked.mode is not None
        take(module, measure(), looked)
        looked = looked._replace(decision=looked.mode.decisions[-1])
    return _with_lost(module, looked).decision


def stays_untrusted(module: Any, dtype: torch.dtype) -> bool:
    """Whether the layer is not trusted, whatever of what it has seen follows, and nothing is to be measured."""
    modes = modes_of(module, dtype)
    return bool(modes) and all(
        not mode.decisions[-1].trusted and settled(module, dtype, mode.follows) is mode for mode in modes
    )


def slots(module: Any) -> ChannelSlots | None:
    """The channels whose xhat compiled code of the module saves; None if there are none, and in eager mode."""
    if not torch.compiler.is_compiling() or not hasattr(module, "_saved_rows"):
        return None
    return ChannelSlots(module._saved_rows, module._saved_channels)


def _with_lost(module: Any, looked: Look) -> Look:
    """What a layer does in a call, if its weights of this very call are looked at (`verbatim.lost`)."""
    decision, mode = looked.decision, looked.mode
    if not decision.trusted:
        return looked
    found = verbatim.lost(module, decision.verbatim, None if mode is None else mode.dtype)
    if found is None:
        return looked
    trusted, channels = found
    changes: dict[str, Any] = {"trusted": trusted, "verbatim": channels if trusted else _NONE}
    if mode is None:
        return looked._replace(decision=decision._replace(**changes))
    mode.change(**changes)
    if not trusted:
        mode.why = f"the weights of {len(channels)} of {channels.size} channels are nearly zero"
        renew(module)
        _tell(module, f"{mode.why}; it saves its input for backward, as torch does")
    return looked._replace(decision=mode.decisions[-1])


def _tell(module: Any, text: str) -> None:
    """Says that a layer is torch's, or raises that it would be."""
    if module.on_untrusted == "raise":
        # The measurement is forgotten, so that the next call measures and raises, too.
        forget(module)
        raise RuntimeError(f"inplace_abn: {name(module)}: {text}")
    _logger.log(logging.WARNING if module.on_untrusted == "warn" else logging.INFO, "%s: %s", name(module), text)


def mode_of(module: Any, dtype: torch.dtype, follows: Follows = ()) -> Mode | None:
    """What the module does where this follows; None if that never happened."""
    return None if module._guard is None else module._guard.modes.get((dtype, follows))


def modes_of(module: Any, dtype: torch.dtype | None = None) -> list[Mode]:
    """What the module does, whatever followed; where this dtype is kept, if one is given."""
    return [mode for mode in _modes(module) if dtype in (None, mode.dtype)]


def _judge(module: Any, mode: Mode, found: list[Table]) -> None:
    """Sets the mode by the figures of a generation. Those of batches with infinities or NaN say nothing."""
    last, given = mode.decisions[-1], module.guard_threshold
    threshold = THRESHOLDS[mode.dtype] if given is None else Threshold(given, given)
    table = worst([figures for figures in found if not figures.unknown])
    before = now = last.trusted
    told = ""
    if table is not None:
        # Modes of users need not see these ops, which are on the host.
        with torch.no_grad(), _torch.NoDispatch():
            now, channels = verbatim.chosen(table, last.verbatim, before, threshold, mode.dtype)
            told = described(table, len(channels), threshold)
        if now and channels != last.verbatim:
            mode.change(verbatim=channels)
    # A mode that was renewed is trusted, although other things were said of it.
    was_told = not mode.why
    if not now and told:
        mode.why = f"its input is not recoverable: {told}"
    if now == before == was_told:
        return
    kind = str(mode.dtype).removeprefix("torch.")
    if not now and (was_told or module.on_untrusted == "raise"):
        text = f"its input is not recoverable from its output ({told}); "
        _tell(module, f"{text}it saves its input for backward in {kind}, as torch does")
    if now:
        mode.why = ""
    mode.change(trusted=now)
    renew(module)
    if now and not was_told:
        _logger.info("%s: its input is recoverable again (%s); it runs in place in %s", name(module), told, kind)


def layers_of(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The guarded layers of a model and their names: modules, and what a module carries."""
    for name, module in model.named_modules():
        for layer in (module, module.__dict__.get(CARRIED)):
            if isinstance(layer, Guarded):
                yield name, layer


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
        threshold: the relative error of dx, and of a channel's dweight, above which channels are saved, and a layer is
            not trusted if they are most. They are well again below a quarter of it. None for the default of the
            activations' dtype, `THRESHOLDS`: for dx 0.023 in bfloat16, 2**-6 in float16, 2**-14 in float32, 2**-30 in
            float64.
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
    for name, layer in layers_of(model):
        forget(layer)
        layer.__dict__.update(guard_threshold=threshold, on_untrusted=on_untrusted)
        if name:
            layer.__dict__["_guard_name"] = name
        if interval is not None:
            layer.__dict__["guard_interval"] = interval
    return model


def check_interval(interval: int) -> None:
    """Raises ValueError for an interval that is not an integer >= 0."""
    if not isinstance(interval, int) or interval < 0:
        raise ValueError(f"inplace_abn: expected a guard_interval >= 0, got {interval}")


def forget(module: Any) -> None:
    """Forgets what was measured. The next measurement of the module is its first again."""
    generations.note_change()
    module.__dict__.pop("_guard", None)
    renew(module)


def renew(module: Any) -> None:
    """Makes compilers compile the module anew."""
    module.__dict__["_revision"] = next(_revisions)
    _layers.add(module)


def layers_called(name: str) -> list[Any]:
    """The layers of all models that have this name in messages."""
    return [layer for layer in [*_layers] if layer.__dict__.get("_guard_name") == name]


def strip(module: Any) -> None:
    """Removes all that the guard has stored on a module."""
    forget(module)
    for name in ("_guard_name", *Guarded.__annotations__):
        module.__dict__.pop(name, None)
