"""A norm's output while it is not yet known what follows the norm.

Everything is computed when the norm is called. Only the graph node waits. A `Pending` tensor stands for the norm's
output y. If an activation is called with it, y's memory is activated, and norm and activation become one node. If an
addition comes before the activation, all three become one node. Any other function gets a plain tensor. If the layer
expects an activation, the activation is applied when the norm is called. It is taken back if something else follows.

A pending tensor has no memory, but it has a place in the graph: the node of `WaitingFunction`, which is the norm
without activation. Some code bypasses ``__torch_function__``: custom autograd functions, scripted functions, ops of
other libraries. Such code gets the right values and the right gradients, in memory that nobody else sees.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.utils._pytree import tree_map_only

from inplace_abn import _torch
from inplace_abn.activations import IDENTITY
from inplace_abn.conversion import watch
from inplace_abn.conversion.consumers import kept
from inplace_abn.conversion.naming import attached, attached_narrowly, made, record_plain
from inplace_abn.conversion.narrowed import narrowed
from inplace_abn.conversion.offered import settled
from inplace_abn.conversion.plan import Plan
from inplace_abn.conversion.recognition import IN_GRAPH, KNOWN, METADATA, NO_GRADIENT, Activating, Adding, is_writing
from inplace_abn.conversion.waiting import NormCall, PendingState, stand, wait

_logger = logging.getLogger("inplace_abn")


Waiting = tuple[Any, Plan, Any, bool]
"""What a tensor stands for that waits in C++, the plan and the norm of this call, and whether a residual was added.

A class would take longer.
"""


class Pending(Tensor):
    """A tensor without memory that stands for a norm's output."""

    _held: PendingState | None = None
    _waiting: Waiting | None = None
    """What the tensor stands for, in C++. Python takes it over once it does more with it than the next op."""
    _plain: Tensor | None = None
    _shown: Tensor | None = None
    """The values that ops below autograd have seen."""
    _node: Any = None
    """The tensor's graph node when it was placed, or the functions in C++ that know it, and what they know it by. The
    tensor has another node once a custom function, or an op below autograd, has written to it."""
    _version_of_plain: int
    """The version of the plain tensor when this tensor was placed."""
    _leads: bool = False
    """Whether the plain tensor comes after this one in the graph."""
    _name: str
    """The norm's name, once Python has taken the tensor over, or the tensor stands for a plain one."""
    _stands_for_view: bool = False
    """Whether torch's norm returns a view."""
    _is_named: bool = False
    """Whether the plain tensor is the result of an activation in place, which the caller may have."""
    _is_hooked: bool = False
    """Whether the gradient has a hook."""
    _is_taken: bool = False
    """Whether an activation or a sum took the memory, but not this tensor's place in the graph."""

    @property
    def _state(self) -> PendingState | None:
        """What the tensor stands for; None after that was decided."""
        self._take_over()
        return self._held

    @_state.setter
    def _state(self, state: PendingState | None) -> None:
        self._held, self._waiting = state, None

    def _take_over(self) -> None:
        if self._waiting is not None:
            (in_cpp, plan, module, _), self._waiting = self._waiting, None
            self._held, self._node = plan.state(module, in_cpp, self)
            self._name = plan.name

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        read = KNOWN.get(func)
        if read is not None:
            called: Any = None
            waiting = args[0]._waiting if len(args) == 1 and type(args[0]) is Pending else None
            if waiting is not None:
                called = func, waiting[3], *kwargs.items()
                z = _activated_at_once(args[0], waiting, called)
                if z is not None:
                    return z
            for t in args:
                if type(t) is not Pending:
                    settled(t)
            call = read(args, kwargs)
            result = None
            if isinstance(call, Activating):
                result = _activated(call, called)
            elif isinstance(call, Adding):
                result = _added(call)
            elif type(call) is Pending:
                result = call
            if result is not None:
                return result
        if func in METADATA or func in _torch.HOOKS:
            args = tuple(_asked(t) for t in args) if func in METADATA else args
            with _torch.NoTorchFunction():
                return func(*args, **kwargs)
        if func in IN_GRAPH:
            return _asked_of_graph(func, args, kwargs)
        given: list[tuple[Pending, Tensor, int]] = []

        writes = is_writing(func, kwargs)
        keeps = () if writes else tuple(kept(func, args, kwargs))

        def made_plain(t: Pending) -> Tensor:
            if writes and (t._leads or _torch.in_custom_function()):
                t._check_write()
            values = plain(t, any(t is other for other in keeps), getattr(func, "__name__", ""))
            given.append((t, values, values._version))
            return values

        args, kwargs = _replaced((args, kwargs), made_plain)
        result = func(*args, **kwargs)
        # The pending tensor's version follows the plain one's, so that autograd notices modifications.
        increment_version([t for t, values, version in given if values._version != version])
        for t, values, version in given:
            if writes or values._version != version:
                t._follow(values._version != version)
        # A function that returns an argument returns the pending tensor, not the plain one. The two must stay one
        # tensor for the caller, because a custom function may write to it later.
        return next((t for t, values, _ in given if values is result), result)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        shown: dict[int, Pending] = {}

        def values_of(t: Pending) -> Tensor:
            values = t._values()
            shown[id(values)] = t
            return values

        written = [
            value
            for i, argument in enumerate(_torch.schema_of(func).arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
            for value in [args[i] if i < len(args) else (kwargs or {}).get(argument.name)]
            if type(value) is Pending
        ]
        for t in written:
            t._check_write()
        args, kwargs = _replaced((args, kwargs or {}), values_of)
        watching = watch.current()
        result = func(*args, **kwargs) if watching is None else watching.run(func, args, kwargs)
        # Below autograd a detached tensor has a version of its own.
        increment_version([values for t in written for values in (t._shown, t._plain) if values is not None])
        # An in-place op returns the tensor that it was given.
        return tree_map_only(Tensor, lambda t: shown.get(id(t), t), result)

    def _values(self) -> Tensor:
        """The values that stand for this tensor in ops below autograd."""
        if self._is_left_behind() and not self._has_moved():
            raise _left_behind(self)
        if self._shown is None and self._plain is not None:
            with _torch.NoTorchFunction():
                self._shown = self._plain.detach()
        elif self._shown is None:
            state = self._state
            assert state is not None
            self._shown, self._state = state.expose(), None
            record_plain(state.norm, "code outside of torch's functions", "it cannot be seen what keeps its output")
        return self._shown

    def _has_moved(self) -> bool:
        self._take_over()
        if type(self._node) is tuple:
            node, waiting = self._node
            return not node.is_placed(waiting)
        with _torch.NoTorchFunction():
            return self.grad_fn is not self._node

    def _settle(self, plain: Tensor) -> None:
        """Makes this tensor stand for a plain one. It is decided what becomes of the norm."""
        self._plain, self._state = plain, None
        self._record_position()

    def _settle_at_once(self, plain: Tensor, waiting: Waiting) -> None:
        """The same for what waits in C++, which has placed this tensor after the plain one."""
        in_cpp, plan, _, _ = waiting
        self._plain, self._version_of_plain, self._name = plain, plain._version, plan.name
        self._waiting, self._node = None, (plan.node, in_cpp)

    def _record_position(self) -> None:
        if self._plain is not None:
            self._version_of_plain = self._plain._version
        with _torch.NoTorchFunction():
            self._node = self.grad_fn

    def _check_hooks(self) -> None:
        """Raises RuntimeError before a write that torch's hooks would not see.

        In torch a view that is written to leaves its hooks behind. This tensor is no view, and would not.
        """
        if self._stands_for_view and self._is_hooked:
            raise RuntimeError(
                f"inplace_abn: the output of {self._name} has a hook, and is then written to where torch's "
                "InstanceNorm would leave the hook behind. Register the hook after writing, write to a new tensor, or "
                "leave the norm out of the conversion (filter_fn)"
            )

    def _check_write(self) -> None:
        """Raises RuntimeError before scripted or custom code writes to what has a hook, or another name, too.

        An activation in place returns another tensor than this one. With torch the two are one, which the code moves.
        """
        self._check_hooks()
        if not self._is_named:
            return
        watching = watch.current()
        is_watched = watching is not None and watching.holds(self._plain)  # type: ignore[arg-type]
        if sys.getrefcount(self._plain) > _UNNAMED + is_watched:
            raise _left_behind(self)

    def _is_left_behind(self) -> bool:
        """Whether the plain tensor was written to through a view, and thereby got another place in the graph."""
        return self._plain is not None and self._plain._version != self._version_of_plain

    def _follow(self, is_written: bool) -> None:
        """Moves this tensor to the plain tensor's place in the graph, which may have changed."""
        values = self._plain
        if values is None or self._has_moved():
            return
        if is_written and self._leads:
            self._check_hooks()
        with torch.inference_mode(False), torch.enable_grad(), _torch.NoTorchFunction():
            if values.requires_grad:
                stand(values, self if is_written else (self,))
            else:
                self.detach_()
        self._leads, self._shown = False, None
        if is_written:
            self._is_taken = False
        self._record_position()


def _replaced(value: Any, replace: Callable[[Pending], Tensor]) -> Any:
    """The value with other tensors instead of pending ones, at any depth.

    This is ``tree_map_only``, which takes as long as a small convolution, for the containers that arguments are in.
    """
    kind = type(value)
    if kind is Pending:
        return replace(value)
    if kind is tuple or kind is list:
        return kind([_replaced(item, replace) for item in value])
    if kind is dict:
        return {key: _replaced(item, replace) for key, item in value.items()}
    return value if kind in _LEAVES else tree_map_only(Pending, replace, value)


_LEAVES = (Tensor, torch.nn.Parameter, int, float, bool, str, type(None))

_UNNAMED = 2
"""The references to a tensor that only its pending tensor holds, with that of the count's own argument."""


def _left_behind(t: Pending) -> RuntimeError:
    message = (
        f"inplace_abn: a scripted or custom autograd function got the output of {t._name} after it was activated in "
        "place or written to through a view, and gradients would be lost. Give that function the result of the last "
        "write, or leave the norm out of the conversion (filter_fn)"
    )
    # TorchScript drops the text of errors.
    _logger.error("%s", message)
    return RuntimeError(message)


def planned(plan: Plan, module: Any, x: Tensor) -> Pending | None:
    """A tensor that stands for a norm's output, by the norm's plan; None if the call is not like the plan's."""
    t, waiting = plan.call(module, x)
    if waiting is not None:
        t.__class__ = Pending
        t._waiting = waiting, plan, module, False
    return t  # type: ignore[no-any-return]


def pending(
    norm: NormCall,
    memory: Tensor | None,
    residual: Tensor | None,
    applied: tuple[str, float],
    t: Any = None,
    narrow: Tensor | None = None,
) -> Pending:
    """A tensor, a new one or ``t``, that stands for the norm's output, which ``memory`` holds.

    Without memory, ``narrow`` is the activated output in 16 bits.
    """
    t = _torch.stand_in_like(Pending, norm.x if memory is None else memory) if t is None else t
    t._state, t._plain, t._shown = PendingState(norm, memory, residual, applied, narrow), None, None
    t._leads = t._is_taken = t._is_hooked = t._is_named = False
    t._name, t._stands_for_view = norm.name, norm.module.returns_view
    wait(norm, residual, t)
    t._record_position()
    return t  # type: ignore[no-any-return]


def plain(t: Any, is_kept: bool = False, reader: str = "") -> Tensor:
    """The plain tensor that a pending one stands for. It is made once.

    ``reader`` is the function that asks for the tensor. ``is_kept`` says that it keeps the tensor for backward anyway.
    A custom function has a node that already leads to the pending tensor's node. So where one may have the tensor, the
    plain tensor comes after the pending one in the graph.
    """
    if type(t) is not Pending:
        return t  # type: ignore[no-any-return]
    if _torch.transforms_active() and (t._plain is None or t._has_moved()):
        # The pending tensor was made outside of the transforms.
        with _torch.outside_of_transforms():
            return plain(t, is_kept, reader)
    waiting = t._waiting if is_kept else None
    if waiting is not None:
        y = _kept_at_once(t, waiting, reader)
        if y is not None:
            return y
    moved = t._has_moved()
    if t._plain is not None and not moved:
        if t._is_left_behind():
            if _torch.in_custom_function():
                raise _left_behind(t)
            t._follow(True)
        return t._plain
    state = t._state
    is_seen = not moved and t._shown is None and not _torch.in_custom_function()
    # The plain tensor gets a place in the graph even under no_grad.
    with torch.inference_mode(False), torch.enable_grad():
        if is_seen and state is not None:
            y = made(state, is_kept, reader)
            if y is not None:
                stand(y, (t,))
                t._settle(y)
                return y
            # The pending tensor's node is the norm, and its memory is y.
            t._shown, t._state = state.expose(), None
        values = stand(t, (t._values(),))
        # Writing to a view is something else for hooks.
        t._plain = values.view_as(values) if t._stands_for_view else values
    t._leads = True
    t._record_position()
    if is_seen:
        t._follow(False)
    return t._plain


def _asked(t: Any) -> Any:
    """The tensor that knows the metadata: the plain one, because its shape may have been changed in place."""
    if type(t) is not Pending or t._plain is None:
        return t
    # A checkpoint asks for the device of what it saves next, with its version.
    return plain(t) if t._is_left_behind() and not _torch.in_custom_function() else t._plain


def _asked_of_graph(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Adds a hook to pending tensors, or computes their gradient.

    The gradient contains all that was computed with them.
    """

    def in_graph(t: Pending) -> Tensor:
        if t._is_taken and not t._has_moved():
            if func in NO_GRADIENT:
                return t
            raise RuntimeError(
                f"inplace_abn: a gradient of the output of {t._name}, or a hook on it, is asked for after "
                "it was activated or added to in place, and it has no place in the graph any more. Ask before, "
                "or leave this norm out of the conversion (filter_fn)"
            )
        values = plain(t)
        t._is_hooked = t._is_hooked or func is Tensor.register_hook
        first, last = (t, values) if t._leads else (values, t)
        if func is Tensor.retain_grad:
            # If the last one is written to, it has what is retained, and is the first one from then on.
            with _torch.NoTorchFunction():
                last.retain_grad()
        return first

    # The place in the graph matters for this argument only. For the other arguments the values matter.
    at = 1 if func is torch.autograd.grad else 0
    given = [_replaced(argument, in_graph if i == at else plain) for i, argument in enumerate(args)]
    kwargs = _replaced(kwargs, plain)
    with _torch.NoTorchFunction():
        return func(*given, **kwargs)


def _open(t: Any) -> PendingState | None:
    """What the tensor stands for, if a node may be made for it."""
    if type(t) is not Pending or not torch.is_grad_enabled() or t._has_moved() or _torch.is_watched():
        return None
    state = t._state
    return state if state is not None and state.norm.is_unchanged() else None


def _fusible(t: Any) -> PendingState | None:
    """What the tensor stands for, if the norm and what follows can become one node."""
    state = _open(t)
    return state if state is not None and state.memory is not None and state.has_its_residual() else None


def _activated_at_once(t: Any, waiting: Waiting, called: tuple[Any, ...]) -> Tensor | None:
    """The activation of what waits in C++; None if Python has to look at it."""
    in_cpp, plan, module, _ = waiting
    z, in_place = plan.activate(module, in_cpp, called)
    if z is None:
        return None
    if in_place:
        t._settle_at_once(z, waiting)
        t._is_named = True
    else:
        t._is_taken = True
    return z


def _kept_at_once(t: Any, waiting: Waiting, reader: str) -> Tensor | None:
    """The plain tensor of what waits in C++, which a function keeps; None if Python has to look at it."""
    in_cpp, plan, module, adds = waiting
    called = None if _torch.in_custom_function() else plan.learn_keeper(reader, adds)
    if called is None:
        return None
    y, _ = plan.activate(module, in_cpp, called)
    if y is not None:
        t._settle_at_once(y, waiting)
    return y


def _added_at_once(t: Any, residual: Any, in_place: bool) -> Pending | None:
    """The sum of what waits in C++ and a residual; None if Python has to look at them."""
    waiting = t._waiting if type(t) is Pending else None
    if waiting is None:
        return None
    if type(residual) is Pending and residual._plain is not None:
        residual = plain(residual)
    if type(residual) is not Tensor:
        return None
    in_cpp, plan, module, _ = waiting
    result, in_cpp = (plan.node.add_ if in_place else plan.node.add)(in_cpp, residual)
    if in_cpp is None:
        return None
    if not in_place:
        result.__class__ = Pending
        t._is_taken = True
    result._waiting = in_cpp, plan, module, True
    return result  # type: ignore[no-any-return]


def _activated(call: Activating, called: tuple[Any, ...] | None = None) -> Tensor | None:
    t = call.input
    if called is not None and t._waiting is not None:
        _, plan, _, adds = t._waiting
        if plan.learn(called, call.activation, call.param, adds, call.in_place):
            z = _activated_at_once(t, t._waiting, called)
            if z is not None:
                return z
    if type(t) is Pending and t._held is not None and t._held.narrow is not None:
        return _activated_narrowly(t, call)
    state = _fusible(t)
    if state is None:
        return None
    state.norm.record_consumer(call.activation, call.param, state.residual is not None)
    z = attached(state, (call.activation, call.param), t if call.in_place else None, in_place=call.in_place)
    if z is None:
        return None
    if call.in_place:
        increment_version([t])
        t._settle(z)
        t._is_named = True
    else:
        t._is_taken = True
    return z


def _activated_narrowly(t: Pending, call: Activating) -> Tensor | None:
    """The activation of an output whose result is there in 16 bits; None if it is another activation, or in place."""
    state = _open(t)
    if state is None or call.in_place or (call.activation, call.param) != state.applied:
        return None
    z = attached_narrowly(state)
    t._is_taken = z is not None
    return None if z is None else narrowed(z.float(), z, state.norm.module._past)


def _added(call: Adding) -> Tensor | None:
    """The sum of y and a residual, still pending; None if the other operand cannot be a residual."""
    result = _added_at_once(call.first, call.second, call.in_place)
    if result is None and not call.in_place:
        result = _added_at_once(call.second, call.first, False)
    if result is not None:
        return result
    for t, other in ((call.first, call.second), (call.second, call.first)):
        state = _fusible(t)
        if t is other or state is None or state.residual is not None:
            continue
        # The sum has the layout of its first operand.
        if t is not call.first and (call.in_place or (isinstance(other, Tensor) and other.stride() != t.stride())):
            return None
        residual = _as_residual(other, state)
        return None if residual is None else _with_residual(t, state, residual, call.in_place)
    return None


def _as_residual(other: Any, state: PendingState) -> Tensor | None:
    memory = state.memory
    assert memory is not None
    if not isinstance(other, Tensor):
        return None
    if (other.shape, other.dtype, other.device) != (memory.shape, memory.dtype, memory.device):
        return None
    if type(other) is Pending:
        before = _fusible(other)
        if before is not None and before.residual is None:
            # Both nodes save the same tensor. It is the output of the other norm, and the residual of this one.
            before.norm.record_consumer("residual")
            y = attached(before, IDENTITY, other, follows="add", is_residual=True)
            if y is not None:
                other._settle(y)
        other = plain(other)
    if type(other) is not Tensor or other.layout is not torch.strided or other.is_neg() or other.is_inference():
        return None
    if other.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr():
        return None
    return other


def _with_residual(t: Pending, state: PendingState, residual: Tensor, in_place: bool) -> Tensor:
    norm, memory = state.norm, state.take_back()
    with _torch.BelowAutograd():
        torch.ops.aten.add_.Tensor(memory, residual.detach())
    state.memory = None
    if not in_place:
        t._is_taken = True
        return pending(norm, memory, residual, IDENTITY)
    pending(norm, memory, residual, IDENTITY, t)
    increment_version([t])
    return t
