"""What all converted modules have in common: they remember what they did, and are watched."""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from inplace_abn import _torch, checkpoints, guard
from inplace_abn.autograd import nodes
from inplace_abn.conversion import observed, watch
from inplace_abn.guard.figures import THRESHOLDS
from inplace_abn.kernels import ops
from inplace_abn.settings import DISABLED

_logger = logging.getLogger("inplace_abn")


class Outcome(NamedTuple):
    """What a module did in a call."""

    follows: str = ""
    """What followed, in words; empty if that is not known."""
    in_place: bool = False
    why: str = "it was not called in training"
    """Why it was not in place; empty if it was."""


@dataclass(slots=True, eq=False)
class Record:
    """What a converted module did in its last calls."""

    eps: float
    """The eps of the last call of a norm."""
    outcome: Outcome = field(default_factory=Outcome)
    was_watched: bool = False
    """Whether the last forward pass was watched (`conversion.watch`)."""
    is_read_compiled: bool = False
    """Whether a compiled function was seen to read an activated result of the module."""
    follows_norm: bool = False
    """Whether an activation was ever part of a converted norm."""
    kinds: dict[Any, Any] = field(default_factory=dict)
    """How a norm of rows computes, by what it is called with (`conversion.layer_norms`)."""
    bytes_saved: int | None = None
    """What the module saved in the last step in which that was measured."""
    cpp_call: tuple[Any, ...] | None = None
    """What calls are like that the node in C++ makes, if there are such: the dtype, and attributes of the module."""


class Converted(guard.Guarded):
    """The part that all converted modules have in common. It comes before the module's class before conversion."""

    _record: Record

    @property
    def qconfig(self) -> Any:
        """torch.ao.quantization's settings of a module that was prepared before it was converted."""
        if "qconfig" not in self.__dict__:
            raise AttributeError("qconfig")
        return self.__dict__["qconfig"]

    @qconfig.setter
    def qconfig(self, value: Any) -> None:
        if value is not None:
            raise RuntimeError(
                f"inplace_abn: {guard.name(self)} is {type(self).__name__}, and torch.ao.quantization knows torch's "
                "own modules only; call inplace_abn.revert before prepare_qat, and convert after it"
            )
        self.__dict__["qconfig"] = None

    @qconfig.deleter
    def qconfig(self) -> None:
        self.__dict__.pop("qconfig", None)

    def observer(self) -> observed.Observer:
        """What watches this call."""
        if not self._record.was_watched:
            return observed.NOBODY
        repeated = _torch.in_backward()
        is_blind = repeated or _torch.top_saved_tensors_hooks(True) is not None
        return observed.Observer(None if repeated else watch.current(), is_blind)

    def _cpp_node(self, x: Any) -> Any:
        """The node in C++, which looks at tensors and at what surrounds a call, for a call that may be like an earlier
        one; None if Python has to look at it."""
        record = self._record
        if record.cpp_call is None or record.was_watched or watch.active or not record.outcome.in_place:
            return None
        # Compilers that are not Dynamo pass tensors of classes of their own.
        if type(x) is not Tensor or torch.compiler.is_dynamo_compiling() or self.is_parametrized():
            return None
        state = self._guard
        if DISABLED or (state is not None and state.given_up is not None):
            return None
        return nodes.cpp if x.is_cpu or (ops.with_cuda and x.is_cuda) else None

    def _remember_watch(self) -> None:
        """Remembers whether this call is watched. A recomputation does what its forward pass did."""
        watched = self._record.was_watched if _torch.in_backward() else watch.current() is not None
        self._record.was_watched = checkpoints.of_forward_pass("watched", watched)
        if self._record.was_watched:
            guard.generations.mark_watched(self)

    def _watch_without_gradients(self) -> watch.Watch | None:
        """What watches this call, if it is in training without gradients: backward may repeat it with gradients."""
        module: Any = self
        if torch.compiler.is_compiling() or torch.is_grad_enabled() or not module.training or _torch.in_backward():
            return None
        watching = watch.current()
        self._record.was_watched = watching is not None
        return watching

    def _is_given_up(self) -> bool:
        """Whether the module does as torch does, because the watch gave it up.

        A call that nobody watches does so at once. All watched calls of a generation do the same. A generation that is
        still to come is from another process.
        """
        found = guard.given_up(self)
        is_now = found is not None and (
            not self._record.was_watched or found[0] < guard.now() or found[0] > guard.generations.current
        )
        # What is found after the forward pass of a checkpoint must not change the recomputation.
        return checkpoints.of_forward_pass(f"given up {id(self)}", is_now)

    def outcome(self) -> Outcome:
        """What the module did in its last call in training, or does from the next step on if the watch gave it up."""
        outcome, found = self._record.outcome, guard.given_up(self)
        if found is not None:
            return outcome._replace(in_place=False, why=found[1])
        return outcome if outcome.in_place or not self.why_untrusted else outcome._replace(why=self.why_untrusted)

    def adopt(self, name: str) -> None:
        """Begins with what conversion stores on the module, which is called ``name`` in messages."""
        self.__dict__.update(_guard_name=name, _record=Record(getattr(self, "eps", 0.0)))
        guard.renew(self)

    def forget(self) -> None:
        """Forgets what was measured and seen, as if the module had just been converted."""
        guard.forget(self)
        self.__dict__["_record"] = Record(getattr(self, "eps", 0.0))

    def release(self) -> None:
        """Removes what conversion has stored on the module. The class stays."""
        guard.strip(self)
        self.__dict__.pop("_record", None)

    def extra_repr(self) -> str:
        text: str = super().extra_repr()  # type: ignore[misc]
        outcome = self.outcome()
        does = "in place" if outcome.in_place else f"not in place: {outcome.why}"
        return f"{text}, {does}" if text else does

    def activations(self) -> set[str]:
        """The names of the activations that were in place in this generation of the guard."""
        at = guard.generations.current
        found = [mode for mode in guard.modes_of(self) if mode.generation == at and mode.decisions[-1].trusted]
        return {mode.follows[0] for mode in found if mode.follows}

    def __prepare_scriptable__(self) -> Any:
        raise RuntimeError(
            f"inplace_abn: {type(self).__name__} cannot be scripted; call inplace_abn.revert on the model before"
        )


def may_have_node(x: Tensor) -> bool:
    """Whether a node may be made for a result of this tensor: it is a plain one, and nobody watches the ops."""
    if type(x) is not Tensor or x.is_nested:
        return False
    return not (checkpoints.are_seen() or _torch.in_forward_mode() or DISABLED)


def is_usual(x: Tensor) -> bool:
    """Whether a node may be made for a result of this tensor, and the ops take it."""
    if not may_have_node(x) or x.layout is not torch.strided or x.dtype not in THRESHOLDS or not ops.run_on(x.device):
        return False
    return x.dim() > 1 and x.numel() > 0 and not x.is_inference() and not x.is_neg()


def why_nowhere(device: torch.device) -> str:
    """Why no call on the device is in place; empty if calls may be. Each device without kernels is told once, at level
    WARNING."""
    if DISABLED:
        return "INPLACE_ABN_DISABLE=1 is set"
    if ops.run_on(device):
        return ""
    text = ops.why_not_on(device)
    # Nothing is computed there, so nothing could be saved.
    if device.type != "meta":
        _warn(text)
    return text.removeprefix("inplace_abn: ")


def unsuitable(device: torch.device) -> Outcome:
    """What a module did in a call on the device that cannot be in place."""
    return Outcome(why=why_nowhere(device) or "its input, its parameters or the mode of the call are not supported")


@functools.cache
def _warn(text: str) -> None:
    _logger.warning("%s", text)


def has_standard_strides(x: Tensor) -> bool:
    """Whether the tensor is contiguous, or channels-last."""
    if x.is_contiguous():
        return True
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return x.dim() in formats and x.is_contiguous(memory_format=formats[x.dim()])
