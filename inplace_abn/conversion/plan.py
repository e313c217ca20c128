"""What a norm does in most of its calls: what it did in the call before.

A call makes a plan, by which later calls that are like it need not look at everything again. The node in C++ makes such
a call, and the activation or the sum that follows, in one step each. If anything else follows, Python goes on.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from inplace_abn import _torch, functions, guard
from inplace_abn.activations import IDENTITY, find, name_of
from inplace_abn.autograd.backward import Values
from inplace_abn.conversion.converted import Note
from inplace_abn.conversion.waiting import NormCall, PendingState, seen_as
from inplace_abn.kernels.node import Node
from inplace_abn.settings import Operands, Settings, counted_batches, parameters, running_statistics

NATIVE = object()
"""What stands for the output of a norm that does what it did before conversion."""


class Following(NamedTuple):
    """What is done with the output, and how."""

    in_cpp: Any
    """The activation for the node."""
    consumer: tuple[Any, ...]
    """What the guard is told: the activation, and whether a sum came before."""
    note: Note
    in_place: bool


class Native:
    """A norm's calls in which it does what it did before conversion, because the guard does not trust it."""

    __slots__ = ("_decision", "_eps", "_mode", "_state")

    def __init__(self, module: Any, look: guard.Look, mode: guard.Mode) -> None:
        self._state, self._mode, self._decision, self._eps = module._guard, mode, look.decision, module.eps

    def holds(self, module: Any, x: Tensor) -> bool:
        """Whether a call that nobody watches is one of these."""
        state, mode = module._guard, self._mode
        return (
            state is self._state
            and mode.decisions[-1] is self._decision
            and x.dtype is mode.dtype
            and module.eps is self._eps
            and torch.is_grad_enabled()
            and guard.settled(module, x.dtype) is mode
        )

    def approve(self, *_: Any) -> None:
        """What follows an earlier call does not matter."""


class Plan:
    """A norm's calls in training, by statistics of their own, which nobody measures or watches. The node in C++ makes
    them."""

    __slots__ = (
        *("_approved", "_called", "_decision", "_eps", "_look", "_mode", "_momentum", "_state"),
        *("in_cpp", "name", "node", "settings"),
    )

    def __init__(
        self, module: Any, x: Tensor, settings: Settings, applied: tuple[str, float], look: guard.Look, node: Node
    ) -> None:
        assert look.mode is not None
        self.settings: Settings = settings
        self._look, self._mode, self._decision = look, look.mode, look.decision
        self._state, self._eps, self._momentum = module._guard, module.eps, module.momentum
        self.node: Node = node
        self.name: str = settings.name or type(module).__name__
        saved = settings.saved(x.device)
        options = (module.momentum, settings.eps, find(applied[0]).code, applied[1], *saved, settings.name)
        self.in_cpp: Any = node.plan(x, parameters(module)[0], _statistics(module)[0], *options)
        self._approved: dict[tuple[str, float, bool], Note] = {}
        """What the norm says that it did, by what the guard lets follow: an activation, and whether a sum came before.
        """
        self._called: dict[tuple[Any, ...], Following] = {}
        """What follows, by the functions and the options that were called, and whether a sum came before."""

    def holds(self, module: Any) -> bool:
        """Whether the module is as it was. Nothing is said about tensors, and about what surrounds the call."""
        state, mode = module._guard, self._mode
        return (
            state is self._state
            and state.given_up is None
            and mode.decisions[-1] is self._decision
            and module.training
            and module.eps is self._eps
            and module.momentum is self._momentum
            and guard.is_settled(module, state, mode)
        )

    def call(self, module: Any, x: Tensor) -> Any:
        """Calls the norm. Returns a tensor that stands for the output, and what waits, in C++.

        Both are None, and nothing was done, if the call is not like the plan's. The node looks at the tensors, and at
        what surrounds the call.
        """
        if not self.holds(module) or self.node is not functions.node_in_cpp():
            return None, None
        return self.node.norm(self.in_cpp, x, *parameters(module), *_statistics(module))

    def approve(self, look: guard.Look, activation: tuple[str, float], adds: bool, note: Note) -> None:
        """Lets an activation follow in calls by this plan, as the guard did in this one."""
        if look.decision is self._decision:
            self._approved[(*activation, adds)] = note

    def learn(self, called: tuple[Any, ...], activation: str, param: float, adds: bool, in_place: bool) -> bool:
        """Remembers which activation was called. Returns whether it is approved."""
        found = None if _torch.is_watched() else self._approved.get((activation, param, adds))
        if found is not None:
            in_cpp = self.node.activation(find(activation).code, param, in_place, in_place)
            self._called[called] = Following(in_cpp, (activation, param, adds), found, in_place)
        return found is not None

    def learn_keeper(self, reader: str, adds: bool) -> tuple[Any, ...] | None:
        """What `activate` is called with if a function keeps the output for backward; None if it is not approved."""
        called = "kept", reader, adds
        found = self._approved.get((*IDENTITY, adds))
        if called not in self._called and found is not None and not _torch.is_watched():
            in_cpp = self.node.activation(find(IDENTITY[0]).code, IDENTITY[1], True, False)
            self._called[called] = Following(in_cpp, ("kept",), found._replace(follows=reader), False)
        return None if found is None else called

    def activate(self, module: Any, waiting: Any, called: tuple[Any, ...]) -> tuple[Tensor | None, bool]:
        """The activation of what waits, and whether it is in place; None if Python has to look at it."""
        try:
            found = self._called.get(called)
        except TypeError:  # an option that cannot be hashed
            found = None
        if found is None:
            return None, False
        in_cpp, consumer, note, in_place = found
        z = self.node.activate(waiting, in_cpp)
        if z is not None:
            self._look.saw(consumer)
            module._past.note = note
        return z, in_place

    def state(self, module: Any, waiting: Any, t: Any) -> tuple[PendingState, Any]:
        """What ``t``, which stands for the output, stands for, and the node that it was given.

        The node is None if it has another one since.
        """
        with _torch.NoTorchFunction():
            tensors, numbers, param = self.node.parts(waiting)
            x, weight, bias, residual, weight_value, bias_value, var, verbatim, memory = tensors
            code, is_placed, is_inner, output_nr, version, *seen = numbers
            of_x, of_weight, of_bias, of_residual = (
                seen_as(t, *seen[3 * i : 3 * i + 3]) for i, t in enumerate((x, weight, bias, residual))
            )
            node: Any = t.grad_fn if is_placed else None
            inputs = node.next_functions if is_placed else ()
        rows = None if verbatim is None else self.settings.saved(x.device)[0]
        values, operands = Values(weight_value, bias_value, var, verbatim, rows), Operands(weight, bias)
        norm = NormCall(module, x, operands, None, values, self.settings, self._look)
        source = inputs[0][0] if inputs and is_inner else None
        norm.called_with(of_x, (source, output_nr), (of_weight, of_bias), None)
        state = PendingState(norm, memory, residual, (name_of(code), param))
        state.made_of(version, of_residual)
        return state, node


def of_call(module: Any, x: Tensor, settings: Settings, applied: tuple[str, float], look: guard.Look) -> Plan | None:
    """The plan for calls that are like this one, which is not measured; None if there is none."""
    node = functions.node_in_cpp()
    is_simple = module.training and not settings.per_instance and not module.is_synchronised()
    # Tensors may be written to.
    are_numbers = isinstance(module.momentum, (int, float)) and isinstance(module.eps, (int, float))
    if node is None or look.mode is None or not is_simple or not are_numbers:
        return None
    return Plan(module, x, settings, applied, look, node)


def _statistics(module: Any) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The running statistics, and the number of batches, that a call in training updates."""
    if not module.track_running_stats:
        return None, None, None
    return *running_statistics(module), counted_batches(module)
