"""A norm's output while it is not known yet what follows.

Everything is computed when the norm is called; what waits is only the graph node. The `Pending` tensor stands for the
norm's output y. An activation that is called with it activates y's memory and makes one node of norm and activation, an
addition before makes it one of all three, and whatever else is called with it gets a plain tensor. If the activation is
one that the layer expects, it is applied when the norm is called, and taken back if something else comes.

A pending tensor has no memory, but a place in the graph: `_WaitingFunction`, the node of a norm without activation. So
what looks at it without torch's ``__torch_function__`` (custom autograd functions, scripted functions, ops of other
libraries) gets the right values and the right gradients, in memory that nobody else sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.utils._pytree import tree_map_only

from inplace_abn import _torch, functions, gradients, guard, ops
from inplace_abn.activations import ACTIVATIONS
from inplace_abn.gradients import Needed, Saved
from inplace_abn.kept import KeptABNFunction
from inplace_abn.recognition import KNOWN, METADATA, Activating, Adding, is_writing
from inplace_abn.settings import Settings

IDENTITY = ("identity", 0.01)

_GONE = (
    "inplace_abn: the output of {name} is needed after it was activated or added to in place, and cannot be computed "
    "again, because the norm's input was {why}. Leave this norm out of the conversion (filter_fn), or convert the "
    "model without an example, which keeps inputs"
)


class Norm:
    """What a norm was called with, and what it computed with it."""

    def __init__(
        self,
        module: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor | None,
        var: Tensor,
        settings: Settings,
        overwritten: bool,
        observation: guard.Observation | None,
        decisive: bool,
    ) -> None:
        self.module, self.weight, self.bias = module, weight, bias
        self.mean, self.var, self.settings = mean, var, settings
        self.overwritten, self.observation, self.decisive = overwritten, observation, decisive
        self.x: Tensor | None = x
        self._edge = (x.requires_grad, x.grad_fn, x.output_nr)
        self._version = x._version
        self._versions = _versions(weight, bias)
        self._hooks = _torch.top_saved_tensors_hooks(True)
        self.trusted = True

    @property
    def name(self) -> str:
        return str(self.module.__dict__.get("_guard_name") or type(self.module).__name__)

    def is_unchanged(self) -> bool:
        """Whether x has the place in the graph that it had, the parameters are what they were, and what is saved for
        backward goes where it went: checkpoints, which begin or end in between, count what is saved."""
        x = self.x
        if x is None or _versions(self.weight, self.bias) != self._versions:
            return False
        if _torch.top_saved_tensors_hooks(True) != self._hooks:
            return False
        requires_grad, node, number = self._edge
        return x.requires_grad == requires_grad and x.grad_fn is node and x.output_nr == number

    def why_gone(self) -> str:
        """Why y cannot be computed again, in words; empty if it can."""
        if self.overwritten:
            return "overwritten"
        return "modified since" if self.x is None or self.x._version != self._version else ""

    def native(self) -> Tensor:
        """y as torch makes it, of x, which its node keeps. Running statistics are left alone."""
        why = self.why_gone()
        if why:
            raise RuntimeError(_GONE.format(name=self.name, why=why))
        x = self.x
        assert x is not None
        s = self.settings
        if s.group is not None:
            y: Tensor = KeptABNFunction.apply(x, self.weight, self.bias, None, self.mean, self.var, s)
            return y
        mean, var = (None, None) if s.training else (self.mean, self.var)
        return F.batch_norm(x, mean, var, self.weight, self.bias, s.training, 0.0, s.eps)

    def is_trusted(self, activation: tuple[str, float], residual: Tensor | None) -> bool:
        """Whether the guard lets the node keep z alone. What is measured decides at once if nothing is known yet."""
        observation, self.observation = self.observation, None
        if observation is not None:
            figures = observation.figures(*activation, residual)
            trusted = guard.take(self.module, figures, self.decisive, observation.x.dtype)
            self.trusted = trusted or not self.decisive
        return self.trusted

    def saw(self, *what: Any) -> None:
        """Tells the layer what followed."""
        self.module._seen.add(what)
        if what == ("plain",) and self.observation is not None:
            # Nothing was measured: the next call has to.
            self.observation = None
            self.module.__dict__["_guard_generation"] = -1


def _versions(*tensors: Tensor | None) -> list[Any]:
    return [None if t is None else (t._version, t.requires_grad) for t in tensors]


class State:
    """What a pending tensor stands for: memory, and what was done with it."""

    def __init__(self, norm: Norm, memory: Tensor, residual: Tensor | None, applied: tuple[str, float]) -> None:
        self.norm = norm
        self.memory: Tensor | None = memory
        self.residual = residual
        self.applied = applied
        """The activation that memory holds the result of, which nobody has asked for yet."""
        self.own: Tensor | None = None
        """The values, for the node alone, once somebody has seen them whom torch does not tell of."""
        self.shown: Tensor | None = None
        """A copy of them, which may be modified."""
        self._version = memory._version
        self._residual_version = _versions(residual)

    def has_its_residual(self) -> bool:
        return _versions(self.residual) == self._residual_version

    def is_fusible(self) -> bool:
        return self.memory is not None and self.own is None and self.has_its_residual() and self.norm.is_unchanged()

    def take_back(self) -> Tensor:
        """The memory, which holds the norm's output, the residual added, and nothing else."""
        memory = self.memory
        assert memory is not None
        if memory._version != self._version:
            raise RuntimeError(_GONE.format(name=self.norm.name, why="overwritten and modified since"))
        if self.applied != IDENTITY:
            with _torch.BelowAutograd():
                F.leaky_relu_(memory, 1.0 / slope(self.applied, memory.dtype))
            self.applied = IDENTITY
        return memory

    def activate(self, activation: tuple[str, float]) -> Tensor:
        """The memory, activated so that it tells what it was."""
        memory = self.memory
        assert memory is not None
        if self.applied != activation or memory._version != self._version:
            memory = self.take_back()
            channels = memory.shape[1]
            dtype = torch.float64 if memory.dtype == torch.float64 else torch.float32
            zero, one = torch.zeros(channels, dtype=dtype, device=memory.device), memory.new_ones(channels, dtype=dtype)
            name, param = activation
            with _torch.BelowAutograd():
                # With these statistics the norm is the identity, bit for bit.
                ops.forward(memory, zero, one, None, None, None, 1e-30, True, ACTIVATIONS[name].code, param, True)
            self.applied = activation
        return memory

    def expose(self) -> Tensor:
        """The values, for whom torch does not tell of."""
        if self.shown is not None:
            return self.shown
        with torch.inference_mode(False), torch.no_grad():
            if self.memory is not None and self.has_its_residual():
                self.own = self.take_back()
                self.shown = self.own.clone()
            else:
                # The node needs the norm's output alone.
                self.own = self.norm.native()
                if self.residual is None:
                    self.shown = self.own.clone()
                elif self.memory is not None:
                    self.shown = self.take_back()
                elif self.has_its_residual():
                    self.shown = self.own + self.residual
                else:
                    raise RuntimeError(
                        _GONE.format(name=self.norm.name, why="added to a tensor that was modified since")
                    )
                self.residual = None
        self.memory = None
        self.norm.saw("plain")
        return self.shown


def slope(activation: tuple[str, float], dtype: torch.dtype) -> float:
    """By what the activation multiplies negative values."""
    name, param = activation
    if name == "relu" or (name == "leaky_relu" and param == 0):
        return 2.0**-300 if dtype == torch.float64 else 2.0**-48
    return param


def can_be_taken_back(activation: tuple[str, float], dtype: torch.dtype) -> bool:
    """Whether y is known within a rounding once it was activated. In float16 negative values lose bits."""
    return (
        activation[0] in ("relu", "leaky_relu")
        and dtype != torch.float16
        and (activation[0] == "relu" or activation[1] == 0 or activation[1] >= 2.0**-12)
    )


class _WaitingFunction(torch.autograd.Function):
    """The norm, and the addition, without activation: the place in the graph of a pending tensor."""

    @staticmethod
    def forward(
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        state: State,
        pending: Sequence[Tensor],
    ) -> Tensor:
        return pending[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.state = inputs[4]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> tuple[Tensor | None, ...]:
        if g is None:
            return (None,) * 6
        state: State = ctx.state
        state.expose()
        norm = state.norm
        assert state.own is not None
        if _versions(norm.weight, norm.bias) != norm._versions:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"parameter of {norm.name}"
            )
        saved = Saved(state.own, norm.weight, norm.bias, state.residual, norm.var)
        if torch.is_grad_enabled():
            if norm.x is None or not norm.is_unchanged():
                raise RuntimeError(f"inplace_abn: the input of {norm.name} was modified before create_graph=True")
            found = gradients.differentiable(saved, g, gradients.input_edge(norm.x), norm.settings)
        else:
            x, weight, bias = ctx.needs_input_grad[:3]
            need = Needed(x, weight, bias, False)
            found = gradients.gradients(need, saved, g, False, False, norm.settings)
        return *found[:3], g if ctx.needs_input_grad[3] else None, None, None


class _ShownFunction(torch.autograd.Function):
    """A plain tensor in the place of a pending one that was exposed."""

    @staticmethod
    def forward(pending: Tensor, shown: Sequence[Tensor]) -> Tensor:
        return shown[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g, None


class _StandsForFunction(torch.autograd.Function):
    """A pending tensor in the place of the plain one."""

    @staticmethod
    def forward(plain: Tensor, pending: Sequence[Tensor]) -> Tensor:
        return pending[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g, None


# As in autograd.py: what ``apply`` comes to where no transform is active.
_wait = super(torch.autograd.Function, _WaitingFunction).apply
_show = super(torch.autograd.Function, _ShownFunction).apply
_stand = super(torch.autograd.Function, _StandsForFunction).apply


class Pending(Tensor):
    """A tensor without memory that stands for a norm's output."""

    _state: State | None
    """None once it is settled what the tensor stands for."""
    _plain: Tensor | None
    _shown: Tensor | None
    """What ops below autograd have seen."""
    _node: Any
    """Where it was put in the graph. It is elsewhere once a custom function, or an op below autograd, wrote to it."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        read = KNOWN.get(func)
        if read is not None:
            call = read(args, kwargs)
            result = None
            if isinstance(call, Activating):
                result = _activated(call)
            elif isinstance(call, Adding):
                result = _added(call)
            if result is not None:
                return result
        if func in METADATA:
            with _torch.NoTorchFunction():
                return func(*args, **kwargs)
        given: list[tuple[Pending, Tensor, int]] = []

        writes = is_writing(func, kwargs)

        def made_plain(t: Pending) -> Tensor:
            values = plain(t, writes)
            given.append((t, values, values._version))
            return values

        args, kwargs = tree_map_only(Pending, made_plain, (args, kwargs))
        result = func(*args, **kwargs)
        # Whoever has saved a pending tensor learns that it was written to.
        increment_version([t for t, values, version in given if values._version != version])
        return result

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        shown: dict[int, Pending] = {}

        def show(t: Pending) -> Tensor:
            values = t._values()
            shown[id(values)] = t
            return values

        written = [
            value
            for i, argument in enumerate(func._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
            for value in [args[i] if i < len(args) else (kwargs or {}).get(argument.name)]
            if type(value) is Pending
        ]
        args, kwargs = tree_map_only(Pending, show, (args, kwargs or {}))
        result = func(*args, **kwargs)
        increment_version([t._values() for t in written])
        # What an op in place returns is what it was given.
        return tree_map_only(Tensor, lambda t: shown.get(id(t), t), result)

    def _values(self) -> Tensor:
        """What an op below autograd is given."""
        if self._shown is None:
            with _torch.NoTorchFunction():
                self._shown = self._plain.detach() if self._state is None else self._state.expose()  # type: ignore[union-attr]
        return self._shown

    def _has_moved(self) -> bool:
        with _torch.NoTorchFunction():
            return self.grad_fn is not self._node

    def _is_placed(self) -> None:
        with _torch.NoTorchFunction():
            self._node = self.grad_fn


def pending(norm: Norm, memory: Tensor, residual: Tensor | None, applied: tuple[str, float]) -> Pending:
    """A tensor that stands for the norm's output, which memory holds."""
    return _placed(_torch.stand_in_like(Pending, memory), State(norm, memory, residual, applied))


def _placed(t: Any, state: State) -> Pending:
    t._state, t._plain, t._shown = state, None, None
    norm = state.norm
    _wait(norm.x, norm.weight, norm.bias, state.residual, state, (t,))
    t._is_placed()
    return t  # type: ignore[no-any-return]


def plain(t: Any, to_write: bool = False) -> Tensor:
    """The plain tensor that a pending one stands for, made once.

    Who asks under no_grad may be a custom function, whose node has this one before it.
    """
    if type(t) is not Pending:
        return t  # type: ignore[no-any-return]
    moved = t._has_moved()
    if t._plain is not None and not moved:
        return t._plain
    state = t._state
    if (
        torch.is_grad_enabled()
        and not moved
        and t._shown is None
        and state is not None
        and state.own is None
        and state.has_its_residual()
        and state.norm.is_unchanged()
        and (state.norm.overwritten or not state.norm.why_gone())
        and _is_plain_surroundings()
    ):
        t._plain = _unfused(t, state, to_write)
    else:
        # Also under no_grad, where the tensor still has its place in the graph.
        with torch.inference_mode(False), torch.enable_grad():
            t._plain = _show(t, (t._values(),))
        t._is_placed()
    return t._plain


def _unfused(t: Pending, state: State, to_write: bool) -> Tensor:
    """The norm's output as torch makes it; or where x is no more, or the layer is to be in place anyway, in place."""
    norm = state.norm
    keeps_output = norm.module._keeps_output and not to_write
    if state.memory is not None and (norm.overwritten or keeps_output):
        y = _attached(state, IDENTITY, None)
        if y is not None:
            norm.saw("kept" if keeps_output else "plain")
            # Whoever writes to it must not write to what backward needs.
            return _settled(t, y if keeps_output else y.clone())
    y = norm.native()
    if state.residual is not None:
        y = y + state.residual
    if norm.trusted:
        norm.saw("plain")
    return _settled(t, y)


def _settled(t: Pending, result: Tensor) -> Tensor:
    _stand(result, (t,))
    t._is_placed()
    t._state = None
    return result


def _attached(state: State, activation: tuple[str, float], stand_in: Tensor | None) -> Tensor | None:
    """The memory, activated, with its node; None if the guard does not trust it."""
    norm, residual = state.norm, state.residual
    if not norm.is_trusted(activation, residual):
        return None
    memory = state.take_back() if activation == IDENTITY else state.activate(activation)
    settings = norm.settings._replace(activation=activation[0], activation_param=activation[1])
    assert norm.x is not None
    z = functions.attached(norm.x, memory, norm.weight, norm.bias, residual, norm.var, settings, stand_in)
    state.memory = None
    if norm.overwritten:
        # It is the same memory, which is to be the result's alone.
        norm.x = None
    return z


def _is_plain_surroundings() -> bool:
    """Whether nothing watches the ops that run. A node made here would go unnoticed, or be no node of a tracer's."""
    return not (_torch.count_dispatch_modes() or _torch.transforms_active() or _torch.is_captured())


def _is_fusible(t: Any) -> bool:
    return (
        type(t) is Pending
        and t._plain is None
        and t._shown is None
        and torch.is_grad_enabled()
        and not t._has_moved()
        and _is_plain_surroundings()
        and t._state.is_fusible()  # type: ignore[union-attr]
    )


def _activated(call: Activating) -> Tensor | None:
    t = call.input
    if not _is_fusible(t):
        return None
    state: State = t._state
    norm, activation = state.norm, (call.activation, call.param)
    norm.saw(*activation, state.residual is not None)
    z = _attached(state, activation, t if call.in_place else None)
    if z is None:
        return None
    if call.in_place:
        t._plain, t._state = z, None
        t._is_placed()
        increment_version([t])
    return z


def _added(call: Adding) -> Tensor | None:
    """y plus what is added to it, still pending; None if that is no residual."""
    for t, other in ((call.first, call.second), (call.second, call.first)):
        if (
            t is other
            or not _is_fusible(t)
            or t._state.residual is not None
            or not t._state.norm.module._fuses_residual
        ):
            continue
        if call.in_place and t is not call.first:
            return None
        residual = _as_residual(other, t._state)
        if residual is None:
            return None
        return _with_residual(t, residual, call.in_place)
    return None


def _as_residual(other: Any, state: State) -> Tensor | None:
    memory = state.memory
    if not isinstance(other, Tensor) or memory is None:
        return None
    if (other.shape, other.dtype, other.device) != (memory.shape, memory.dtype, memory.device):
        return None
    if type(other) is Pending:
        if _is_fusible(other) and other._state is not None and other._state.residual is None:
            # Saved once, as the other's output and this one's residual.
            other._state.norm.saw("residual")
            y = _attached(other._state, IDENTITY, other)
            if y is not None:
                other._plain, other._state = y, None
                other._is_placed()
        other = plain(other)
    if type(other) is not Tensor or other.layout is not torch.strided or other.is_neg() or other.is_inference():
        return None
    if other.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr():
        return None
    return other


def _with_residual(t: Pending, residual: Tensor, in_place: bool) -> Tensor:
    state = t._state
    assert state is not None
    norm, memory = state.norm, state.take_back()
    with _torch.BelowAutograd():
        torch.ops.aten.add_.Tensor(memory, residual.detach())
    state.memory = None
    if not in_place:
        return pending(norm, memory, residual, IDENTITY)
    _placed(t, State(norm, memory, residual, IDENTITY))
    increment_version([t])
    return t
