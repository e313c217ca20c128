"""What a norm does in most of its calls: what it did in the call before.

A call makes a plan, by which later calls that are like it need not look at everything again. The node in C++ makes such
a call, and the activation or the sum that follows, in one step each. If anything else follows, Python goes on.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from inplace_abn import _torch, functions, guard
from inplace_abn.activations import find, name_of
from inplace_abn.autograd.backward import Values
from inplace_abn.conversion.converted import Note
from inplace_abn.conversion.waiting import NormCall, PendingState, seen_as
from inplace_abn.settings import Operands, Settings


class Plan:
    """A norm's calls in training, by statistics of their own, which nobody measures or watches."""

    __slots__ = ("_approved", "_like", "_look", "in_cpp", "name", "node", "settings")

    def __init__(
        self, module: Any, x: Tensor, settings: Settings, applied: tuple[str, float], look: guard.Look, node: Any
    ) -> None:
        self.settings, self.node, self._look = settings, node, look
        self.name, self._like = settings.name or type(module).__name__, _like(module)
        options = (module.momentum, settings.eps, find(applied[0]).code, applied[1], settings.name)
        self.in_cpp = node.plan(x, parameters(module)[0], _statistics(module)[0], *options)
        self._approved: dict[tuple[str, float, bool], tuple[int, Note]] = {}
        """The activations, after a sum or not, that the guard lets follow: their number in the kernels, and what the
        norm then says that it did."""

    def fits(self, module: Any, x: Tensor) -> bool:
        """Whether the module still does the same. The node looks at the tensors."""
        look, mode = self._look, guard.settled(module, x.dtype)
        return (
            mode is look.mode
            and mode is not None
            and mode.decisions[-1] is look.decision
            and functions.node_in_cpp() is self.node
            and guard.given_up(module) is None
            and self._like == _like(module)
            and not _torch.in_forward_mode()
            and not _torch.is_watched()
        )

    def call(self, module: Any, x: Tensor, stand_in: Tensor) -> Any:
        """Calls the norm. Returns what waits, in C++; None, and does nothing, if the call is not like the plan's."""
        with _torch.NoTorchFunction():
            return self.node.norm(self.in_cpp, stand_in, x, *parameters(module), *_statistics(module))

    def approve(self, look: guard.Look, activation: tuple[str, float], adds: bool, note: Note) -> None:
        """Lets an activation follow in calls by this plan, as the guard did in this one."""
        if look.decision is self._look.decision:
            self._approved[(*activation, adds)] = find(activation[0]).code, note

    def saw(self, module: Any, activation: str, param: float, adds: bool) -> int | None:
        """Remembers what followed. Returns its number in the kernels; None, and does nothing, if it is not approved."""
        found, past = self._approved.get((activation, param, adds)), module._past
        if found is None or past.was_watched or _torch.is_watched():
            return None
        self._look.saw((activation, param, adds))
        past.note = found[1]
        return found[0]

    def state(self, module: Any, waiting: Any, t: Any) -> tuple[PendingState, Any]:
        """What ``t``, which stands for the output, stands for, and the node that it was given.

        The node is None if it has another one since.
        """
        with _torch.NoTorchFunction():
            tensors, numbers, param = self.node.parts(waiting, t)
            x, weight, bias, residual, weight_value, bias_value, var, memory = tensors
            code, is_placed, is_inner, output_nr, version, *seen = numbers
            of_x, of_weight, of_bias, of_residual = (
                seen_as(t, *seen[3 * i : 3 * i + 3]) for i, t in enumerate((x, weight, bias, residual))
            )
            node: Any = t.grad_fn if is_placed else None
            inputs = node.next_functions if is_placed else ()
        values, operands = Values(weight_value, bias_value, var), Operands(weight, bias)
        norm = NormCall(module, x, operands, None, values, self.settings, self._look)
        source = inputs[0][0] if inputs and is_inner else None
        norm.called_with(of_x, (source, output_nr), (of_weight, of_bias), None)
        state = PendingState(norm, memory, residual, (name_of(code), param))
        state.made_of(version, of_residual)
        return state, node


def of_call(module: Any, x: Tensor, settings: Settings, applied: tuple[str, float], look: guard.Look) -> Plan | None:
    """The plan for calls that are like this one, which is not measured; None if there is none."""
    is_simple = module.training and not settings.per_instance and not module.is_synchronised()
    node = functions.node_in_cpp()
    # Tensors may be written to.
    are_numbers = isinstance(module.momentum, (int, float)) and isinstance(module.eps, (int, float))
    if node is None or not is_simple or not are_numbers:
        return None
    return Plan(module, x, settings, applied, look, node)


def parameters(module: Any) -> tuple[Tensor | None, Tensor | None]:
    """Weight and bias. The dictionary is read directly, because attribute access of modules is slow."""
    try:
        return module._parameters["weight"], module._parameters["bias"]
    except KeyError:  # torch.nn.utils.parametrize turns parameters into properties
        return module.weight, module.bias


def _statistics(module: Any) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The running statistics, and the number of batches, that a call in training updates."""
    if not module.track_running_stats:
        return None, None, None
    buffers = module._buffers
    return buffers.get("running_mean"), buffers.get("running_var"), buffers.get("num_batches_tracked")


def _like(module: Any) -> tuple[Any, ...]:
    """What must be the same in all calls of a plan, besides the tensors."""
    return module.training, module.track_running_stats, module.eps, module.momentum
