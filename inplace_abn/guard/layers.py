"""Guarded layers: what the guard stores on them, their names, and how they are set and reset."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from inplace_abn.guard import generations
from inplace_abn.guard.modes import CALLS, Follows, Mode, State
from inplace_abn.settings import ChannelSlots, parameters

if TYPE_CHECKING:
    from typing_extensions import Self


ON_UNTRUSTED = ("fallback", "warn", "raise")
CARRIED = "_follows"
"""The attribute of a module that is no guarded layer itself, but carries one."""
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
        return "; ".join(dict.fromkeys(mode.why for mode in modes_of(self) if mode.why))

    def shares_saved(self) -> dict[torch.dtype, float]:
        """The share of channels whose xhat is saved beside z now, by the dtype of inputs; 1 where the input is."""
        last = {mode.dtype: mode.decisions[-1] for mode in sorted(modes_of(self), key=lambda mode: mode.training)}
        return {dtype: 1.0 if not d.trusted else len(d.verbatim) / max(1, d.verbatim.size) for dtype, d in last.items()}

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], *rest: Any) -> None:
        forget(self)
        super()._load_from_state_dict(state_dict, *rest)  # type: ignore[misc]


def mode_of(module: Any, dtype: torch.dtype, follows: Follows = ()) -> Mode | None:
    """What the module does where this follows; None if that never happened."""
    return None if module._guard is None else module._guard.modes.get((dtype, follows, module.training))


def modes_of(module: Any, dtype: torch.dtype | None = None) -> list[Mode]:
    """What the module does, whatever followed, in training or not; where this dtype is kept, if one is given."""
    state: State | None = module._guard
    return [] if state is None else [mode for mode in state.modes.values() if dtype in (None, mode.dtype)]


def notice_writes(module: Any) -> State:
    """The module's state, which notices writes to the weight and the bias from now on."""
    state: State | None = module._guard
    if state is None or not state.writes.are_entered():
        state = module.__dict__["_guard"] = state or State()
        state.writes.updated(module)
    return state


def renew_if_written(module: Any) -> bool:
    """Forgets what was measured if anything but an optimizer wrote to the module's weight or bias, and returns whether.

    What writes often is an optimizer that torch does not know. It counts as often as the guard measures.
    """
    state: State | None = module._guard
    if state is None or state.writes.is_unchanged(module) or not state.writes.updated(module):
        return False
    writes, interval = state.writes, module.guard_interval
    writes.count = 1 if generations.has_passed(writes.counted_at, interval) else writes.count + 1
    writes.counted_at = generations.current
    if writes.count > CALLS and writes.count % interval:
        return False
    for mode in state.modes.values():
        if not mode.decisions[-1].trusted:
            # Nobody has watched what reads its output in place.
            generations.mark_changed(module)
        mode.renew(module.scale_and_offset()[0])
    return True


def name(module: Any) -> str:
    """What messages call a layer: its name in the model, if it is known, or its class and number of channels."""
    return module.__dict__.get("_guard_name") or f"{type(module).__name__}({getattr(module, 'num_features', '')})"


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


def slots(module: Any) -> ChannelSlots | None:
    """The channels whose xhat compiled code of the module saves; None if there are none, and in eager mode."""
    if not torch.compiler.is_compiling() or not hasattr(module, "_saved_rows"):
        return None
    return ChannelSlots(module._saved_rows, module._saved_channels)


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
        interval: optimizer steps between two measurements. With 0 only layers with a weight within eps of zero are
            measured, and all others are in place. None leaves the interval as it is (100 by default).
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
    generations.mark_changed()
    module.__dict__.pop("_guard", None)
    renew(module)


def renew(module: Any) -> None:
    """Makes compilers compile the module anew."""
    module.__dict__["_revision"] = next(_revisions)
    _layers.add(module)


def layers_called(called: str) -> list[Any]:
    """The layers of all models that have this name in messages."""
    return [layer for layer in [*_layers] if name(layer) == called]


def strip(module: Any) -> None:
    """Removes all that the guard has stored on a module."""
    forget(module)
    for name in ("_guard_name", *Guarded.__annotations__):
        module.__dict__.pop(name, None)
