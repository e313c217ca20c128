"""The recipes of norms' outputs (`conversion.offered`): one node for the norm and what follows, which keeps the result.

The guard is asked when such a node is to be made, with the call's input, what was added, and what follows at hand.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from inplace_abn import _torch, checkpoints, guard, reference
from inplace_abn.activations import IDENTITY, find, of_rounded
from inplace_abn.autograd import forward, native, nodes
from inplace_abn.autograd.backward import Saved, by_value
from inplace_abn.conversion import observed
from inplace_abn.conversion.converted import Outcome
from inplace_abn.conversion.offered import Offered, Recipe, added, made_plain, offer
from inplace_abn.conversion.recognition import Activating, Adding
from inplace_abn.conversion.results import offer_result
from inplace_abn.guard import measuring
from inplace_abn.guard.modes import Decision
from inplace_abn.kernels import ops
from inplace_abn.settings import DISABLED, WEIGHT, Channels, Operands, Settings

UNREAD = Outcome("code outside of torch's functions", False, "it cannot be seen what keeps its output")
"""What a norm did whose output nobody has read."""

TensorState = tuple[int, int, bool]
"""A tensor at the time of a call: its version, its address, and whether it requires grad.

Whoever writes to it, or frees its memory, changes this. The address is zero for subclasses, which need not have memory
of their own.
"""


def state_of(t: Tensor | None) -> TensorState:
    """What the tensor is like now."""
    if type(t) is Offered:
        with _torch.NoTorchFunction():
            return t._version, t.data_ptr(), t.requires_grad
    return _NOTHING if t is None else (t._version, t.data_ptr() if type(t) in _STORED else 0, t.requires_grad)


_NOTHING: TensorState = (0, 0, False)
_STORED = (Tensor, torch.nn.Parameter)


class OfCall(Recipe):
    """The recipe of a layer's result: what it was called with.

    That of a call by the node in C++ has next to nothing in it until Python needs more.
    """

    _is_loaded = True
    _operand = 0
    """Which operand of a sum is the norm's output."""
    residual: Tensor | None = None
    _state_of_residual: TensorState = _NOTHING
    _summed: OfCall | None = None
    """The recipe of the norm's output, if this is one of a sum."""

    def __init__(self, layer: Any, x: Tensor, operands: Operands, y: Tensor, node: native.Keep | None) -> None:
        self.layer, self.x, self.operands, self._keep_node = layer, x, operands, node
        self._edge = x.grad_fn, x.output_nr
        self._states = state_of(x), state_of(operands.weight), state_of(operands.bias)
        self._hooks: Any = _torch.top_saved_tensors_hooks(True)
        self._version = y._version

    @classmethod
    def in_cpp(cls, layer: Any, **given: Any) -> Any:
        """The recipe of an output that the node in C++ has made, and attributes that it does not know."""
        recipe = cls.__new__(cls)
        recipe.__dict__.update(given, layer=layer, _is_loaded=False, _version=0)
        return recipe

    def _load(self, t: Tensor) -> bool:
        """Gets from the node in C++ what the norm was called with. False if that has changed."""
        if self._is_loaded:
            return True
        cpp, layer = nodes.cpp, self.layer
        found = () if cpp is None or t._version != self._version else cpp.parts(t, self._operand)
        if not found:
            return False
        x, weight, bias, *statistics = found
        OfCall.__init__(self, layer, x, Operands(weight, bias), t, None if cpp is None else native.keep_in_cpp(cpp))
        # The node in C++ makes no call under saved-tensor hooks.
        self._hooks = None
        self._is_loaded = True
        self._take(statistics)
        return True

    def _take(self, statistics: Any) -> None:
        """Takes the statistics of the call."""

    def _cpp_and_decision(
        self, t: Tensor, what: tuple[Any, ...], dtype: torch.dtype | None = None
    ) -> tuple[Any, Decision] | None:
        """The node in C++, if it may make what follows, and what was decided; None otherwise."""
        residual, summed = self.residual, self._summed
        if self._is_loaded or self.is_left or (summed is not None and summed.is_asked):
            return None
        if type(residual) is Offered and not residual._recipe.is_result:
            return None
        mode, cpp = guard.current_mode(self.layer, dtype or t.dtype, what), nodes.cpp
        if mode is None or cpp is None or not mode.decisions[-1].trusted:
            return None
        return (cpp, mode.decisions[-1]) if state_of(residual) == self._state_of_residual else None

    def _keep_in_cpp(self, cpp: Any, decision: Decision, t: Tensor, narrow: Tensor | None = None) -> bool:
        """Makes the node in C++ keep t, or this copy of it. False if the call needs Python."""
        given = self.residual, self._operand, self._version, decision.bounds
        return bool(cpp.keep(t, *given, *decision.verbatim.places(t.device), narrow))

    def not_kept(self, reader: str) -> None:
        if not self.is_left:
            self.layer._record.outcome = Outcome(
                reader, False, "what follows does not keep the norm's output for backward"
            )

    def of_view(self, t: Tensor, func: Any, args: tuple[Any, ...]) -> Recipe | None:
        return None if self.residual is not None else OfView(self, t)

    def is_open(self, t: Tensor) -> bool:
        """Whether a node may be made, which keeps t or what follows."""
        return self._load(t) and t._version == self._version and self.is_unchanged()

    def is_unchanged(self) -> bool:
        """Whether a graph is recorded that nobody watches, all tensors are as they were in the call, and so are
        saved-tensor hooks. Checkpoints are such hooks, which count what is saved."""
        x, (weight, bias, _) = self.x, self.operands.of_graph()
        return (
            torch.is_grad_enabled()
            and self._hooks == _torch.top_saved_tensors_hooks(True)
            and (x.grad_fn, x.output_nr) == self._edge
            and (state_of(x), state_of(weight), state_of(bias)) == self._states
            and state_of(self.residual) == self._state_of_residual
            and not (self._summed is not None and self._summed.is_asked)
            and not checkpoints.are_seen()
            and not DISABLED
        )


class OfView(Recipe):
    """The recipe of a view of a norm's output. Whoever keeps the view keeps the output."""

    def __init__(self, viewed: OfCall, y: Tensor) -> None:
        self.layer, self._viewed, self._y = viewed.layer, viewed, y

    def keep(self, t: Tensor, reader: str) -> None:
        if t.untyped_storage().data_ptr() == self._y.untyped_storage().data_ptr():
            self._viewed.keep(self._y, reader)

    def of_view(self, t: Tensor, func: Any, args: tuple[Any, ...]) -> Recipe | None:
        return self


class OfNorm(OfCall):
    """The recipe of a norm's output, and of sums of it and something else."""

    base: Tensor | None = None
    """What the output is a view of, if torch's norm returns a view."""

    narrow: Tensor | None = None
    """x in 16 bits, if autocast makes the norm compute in float32."""

    def __init__(
        self,
        layer: Any,
        x: Tensor,
        operands: Operands,
        y: Tensor,
        node: native.Keep | None,
        statistics: tuple[Tensor, Tensor],
        settings: Settings,
    ) -> None:
        super().__init__(layer, x, operands, y, node)
        self.statistics, self.settings = statistics, settings
        self.base = y if layer.returns_view else None

    def _take(self, statistics: Any) -> None:
        layer = self.layer
        shared, name = layer.shared if layer.per_instance else 0, layer.__dict__["_guard_name"]
        self.settings = Settings(*IDENTITY, layer.eps, WEIGHT, True, None, shared, name)
        self.statistics = tuple(statistics)

    def _activated_in_cpp(self, t: Tensor, call: Activating) -> Tensor | None:
        what = call.activation, call.param, self.residual is not None
        settled = self._cpp_and_decision(t, what)
        if settled is None or (call.in_place and (_is_hooked(t) or self.layer.returns_view)):
            return None
        cpp, decision = settled
        given = self.residual, self._operand, self._version, decision.bounds
        activation, param = of_rounded((call.activation, call.param), t.dtype)
        what_follows = find(activation).code, param, call.in_place
        statistics = identity(t.shape[1], reference.wide(t.dtype), t.device)
        z: Tensor | None = cpp.activate(t, *statistics, *given, *what_follows, *decision.verbatim.places(t.device))
        if z is None:
            return None
        if call.in_place:
            made_plain(t)
        self.is_left = not call.in_place
        if self._summed is not None:
            self._summed.is_left = True
        self.layer._record.outcome = in_place_with(call.activation, self.residual is not None)
        offer_result(self.layer, z, (activation, param), observed.is_writable(call.activation, call.in_place))
        return z

    def adds(self, t: Tensor, other: Any, call: Adding) -> bool:
        is_open = t._version == self._version if not self._is_loaded else self.is_open(t)
        if self.residual is not None or self.is_left or not is_open or (call.in_place and _is_hooked(t)):
            return False
        if type(other) is not Tensor or other.layout is not torch.strided or other.is_neg() or other.is_inference():
            return False
        is_alike = other.dtype is t.dtype and other.shape == t.shape and other.device == t.device
        # The sum has the layout of its first operand.
        return is_alike and (t is call.first or other.stride() == t.stride())

    def of_sum(self, result: Tensor, residual: Any, call: Adding) -> Recipe:
        found = OfNorm.__new__(OfNorm)
        found.__dict__.update(self.__dict__)
        found.residual, found._state_of_residual, found._version = residual, state_of(residual), result._version
        found._summed, found._operand = self, int(residual is not call.second)
        found.base = self.base if call.in_place else None
        return found

    def activated(self, t: Tensor, call: Activating, native: Callable[[], Tensor]) -> Tensor | None:
        z = self._activated_in_cpp(t, call)
        if z is not None:
            return z
        if not self.is_open(t) or (call.in_place and (self.is_left or _is_hooked(t))):
            return None
        activation, writable = (call.activation, call.param), observed.is_writable(call.activation, call.in_place)
        data, rounded = t.detach(), of_rounded(activation, t.dtype)
        channels = self._decided(activation, rounded, "add, " * (self.residual is not None) + call.activation)
        if channels is None:
            return None
        z = data if call.in_place else torch.empty_like(data)
        activate_tagged(data, z, self.settings.activating(rounded))
        if call.in_place:
            made_plain(t)
            # A view has the place in the graph that its base has.
            z = t if self.base is None else self.base
            z.detach_()
        else:
            self.is_left = True
        if self._summed is not None:
            self._summed.is_left = True
        z = self._kept(z, rounded, channels, writable, activated=None if call.in_place else t)
        if call.in_place:
            z = t
            # A hook on a view whose place in the graph nobody has read since a write ends the process in torch.
            _ = z.grad_fn
        if not call.in_place and self.narrow is not None and self.residual is None:
            offer(z, OfWidened(self, activation, z))
        elif not self.layer._record.was_watched:
            offer_result(self.layer, z, rounded, writable)
        return z

    def keep(self, t: Tensor, reader: str) -> None:
        adds = self.residual is not None
        settled = self._cpp_and_decision(t, (*IDENTITY, adds))
        if settled is not None and self._keep_in_cpp(*settled, t):
            self.layer._record.outcome = in_place_with(reader, adds)
        elif not self.is_left and self.is_open(t) and self._keep_node is not None:
            channels = self._decided(IDENTITY, IDENTITY, "add, " * adds + reader)
            if channels is not None:
                self._kept(t, IDENTITY, channels, True, reader)

    def _decided(self, activation: tuple[str, float], rounded: tuple[str, float], follows: str) -> Channels | None:
        """The channels whose xhat is saved, if the guard trusts the layer; None if it does not. ``rounded`` is the
        activation as the ops take it."""
        layer, x = self.layer, self.x.detach()
        with _torch.NoTorchFunction():
            residual = None if self.residual is None else self.residual.detach()
        what, statistics = (*activation, residual is not None), self.statistics
        planned = guard.plan(layer, self.x, residual, what)
        decision = settled(layer, planned, lambda: measuring.measure(layer, x, residual, rounded, statistics))
        layer._record.outcome = outcome_of(layer, follows, decision)
        return decision.verbatim if decision.trusted else None

    def _kept(
        self,
        z: Tensor,
        activation: tuple[str, float],
        channels: Channels,
        writable: bool,
        reader: str = "",
        activated: Tensor | None = None,
    ) -> Tensor:
        """z with a node that keeps it, as a function of x. If a reader keeps the tensor itself, that is the norm's."""
        layer, residual = self.layer, None if self.residual is None else added(self.residual)
        observer = layer.observer()
        alias, of_residual = observer.saved(z, activation, writable), observer.of_residual(residual)
        settings = self.settings._replace(verbatim=channels).activating(activation)
        operands = self.operands._replace(residual=residual)
        saved = self._saved(z if alias is None else alias, residual if of_residual is None else of_residual, channels)
        if reader:
            keep, self._keep_node = self._keep_node, None
            assert keep is not None
            keep(z, saved, self.x, operands, settings, self._operand)
        else:
            z = nodes.attached(self.x, z, operands, saved, settings)
        result = observed.Result(layer, *activation, writable, reader == "add", saved=alias, of_residual=of_residual)
        if activated is not None:
            result = result._replace(activated=StorageWeakRef(activated.untyped_storage()))
        observer.record(result, self.x, z, residual)
        return z

    def _saved(self, z: Tensor, residual: Tensor | None, channels: Channels) -> Saved:
        x, (mean, var), settings = self.x.detach(), self.statistics, self.settings
        weight, bias = by_value(self.operands.weight, self.operands.bias)
        (rows, numbers), verbatim = channels.places(x.device), None
        if numbers is not None:
            with torch.no_grad(), _torch.unwatched():
                xhat = reference.standardised_channels(x, mean, var, settings.eps, numbers)
                verbatim = reference.empty_channels(x, len(channels)).to(z.dtype).copy_(xhat)
        return Saved(z, weight, bias, residual, var, verbatim, rows)


class OfWidened(Recipe):
    """The recipe of the activated output of a norm that autocast computes in float32. What follows mostly gets a copy
    in 16 bits, which is computed anew from x, because tags do not survive a cast."""

    def __init__(self, norm: OfNorm, activation: tuple[str, float], z: Tensor) -> None:
        self.layer, self._norm, self._activation, self._version = norm.layer, norm, activation, z._version
        self._found: dict[torch.dtype, Tensor | None] = {}

    def cast(self, t: Tensor, dtype: torch.dtype, reader: str) -> Tensor | None:
        norm, x = self._norm, self._norm.narrow
        if x is None or x.dtype != dtype or t._version != self._version or not norm.is_unchanged():
            return None
        if dtype not in self._found:
            self._found[dtype] = self._attached(x, reader)
            self.is_left = self._found[dtype] is not None
        return self._found[dtype]

    def _attached(self, x: Tensor, reader: str) -> Tensor | None:
        norm, layer, activation = self._norm, self.layer, self._activation
        planned = guard.plan(layer, x, None, (*activation, False))
        decision = guard.decided(layer, planned, lambda: measuring.measure(layer, x, None, activation, norm.statistics))
        if not decision.trusted:
            return None
        settings = norm.settings._replace(verbatim=decision.verbatim).activating(activation)
        z, operands = torch.empty_like(x), norm.operands
        saved = forward.written(x, z, operands, settings, True)
        return nodes.attached(norm.x, z, operands, saved, settings)


@functools.cache
def in_place_with(follows: str, adds: bool) -> Outcome:
    return Outcome("add, " * adds + follows, True, "")


def settled(layer: Any, planned: guard.Plan, measure: Callable[[], Tensor]) -> Decision:
    """`guard.decided`. Who reads and writes a result of a new kind is seen in the next step."""
    if planned.is_first and not layer._record.was_watched:
        guard.generations.mark_changed()
    return guard.decided(layer, planned, measure)


def outcome_of(layer: Any, follows: str, decision: Decision) -> Outcome:
    """What a call does by the guard's decision."""
    why = layer.why_untrusted or "its weights have moved since they were measured, and this call cannot be measured"
    return Outcome(follows, decision.trusted, "" if decision.trusted else why)


def _is_hooked(t: Tensor) -> bool:
    """Whether a gradient is asked for that a write in place would take to another place in the graph."""
    return bool(t._backward_hooks) or t.retains_grad


@functools.lru_cache(maxsize=256)
def identity(channels: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """The mean and the variance with which a norm without parameters, and with next to no eps, is the identity."""
    with torch.inference_mode(False), _torch.NoDispatch():
        zero = torch.zeros(channels, dtype=dtype, device=device)
        return zero, torch.ones_like(zero)


def activate_tagged(y: Tensor, z: Tensor, settings: Settings) -> None:
    """Activates y with tags, so that backward can recover it: with these statistics the norm is the identity."""
    statistics = identity(y.shape[1], reference.wide(y.dtype), y.device)
    given = y, *statistics, None, None, None, 1e-30, WEIGHT, *settings.arithmetic()[2:], True
    if z is y:
        ops.run(ops.forward, [z], *given)
    else:
        ops.run(ops.forward_out, [z], *given, z=z)
