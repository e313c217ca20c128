"""What a pending tensor stands for (`conversion.pending`).

This is a norm's call, the memory that holds its result, and the graph nodes that a pending tensor may have.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from inplace_abn import _torch, gradients, guard, ops
from inplace_abn.activations import ACTIVATIONS, take_back
from inplace_abn.gradients import Edges, Needed, Values, parameter_edge, placed
from inplace_abn.kept import KeptABNFunction
from inplace_abn.measuring import Observation
from inplace_abn.settings import Settings

IDENTITY = ("identity", 0.0)

_GONE = (
    "inplace_abn: the output of {name} is needed after it was activated or added to in place, and cannot be computed "
    "again, because {why}. Leave this norm out of the conversion (filter_fn), or convert the "
    "model without an example, which keeps inputs"
)


class Norm:
    """A norm's call: what it was called with, and what it computed."""

    def __init__(
        self,
        module: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor | None,
        values: Values,
        settings: Settings,
        overwritten: bool,
        observation: Observation | None,
        decisive: bool,
    ) -> None:
        self.module, self.weight, self.bias = module, weight, bias
        self.mean, self.values, self.settings = mean, values, settings
        self.overwritten, self.observation, self.decisive = overwritten, observation, decisive
        self.x: Tensor | None = x
        self.edges = Edges(None, parameter_edge(weight, values.weight), parameter_edge(bias, values.bias))
        self._edge = (x.requires_grad, x.grad_fn, x.output_nr)
        self._content = x._version, x.data_ptr()
        self._versions = _versions(weight, bias)
        self._hooks = _torch.top_saved_tensors_hooks(True)
        self.trusted = True

    @property
    def name(self) -> str:
        return str(self.module.__dict__.get("_guard_name") or type(self.module).__name__)

    def is_unchanged(self) -> bool:
        """Whether x has its place in the graph, the parameters are unchanged, and saved-tensor hooks are the same.

        Checkpoints are saved-tensor hooks that count what is saved. One may have begun or ended in between.
        """
        if _versions(self.weight, self.bias) != self._versions or _torch.top_saved_tensors_hooks(True) != self._hooks:
            return False
        return self.has_its_place()

    def has_its_place(self) -> bool:
        x = self.x
        if x is None:
            return False
        requires_grad, node, number = self._edge
        with _torch.NoTorchFunction():
            return x.requires_grad == requires_grad and x.grad_fn is node and x.output_nr == number

    def fuses_residual(self) -> bool:
        """Whether a sum may be written over the norm's output.

        It may not if the norm's input was overwritten and the output is known to be kept, because others read the
        output again.
        """
        module = self.module
        if not module._fuses_residual or (self.overwritten and module._keeps_output):
            return False
        if self.overwritten and not is_known(module, IDENTITY, True):
            # Without x the output could not be computed again.
            module._guard.stranger = guard.generation
            return False
        return True

    def has_its_input(self) -> bool:
        return not self.overwritten and self.x is not None and (self.x._version, self.x.data_ptr()) == self._content

    def why_gone(self) -> str:
        """Why y cannot be computed again, in words; empty if it can."""
        if self.overwritten:
            return "the norm's input was overwritten"
        if not self.has_its_input():
            return "the norm's input was modified since"
        # Sharded parameters are freed after the forward pass of their unit.
        versions = _versions(self.weight, self.bias)
        if any(now[:2] != then[:2] for now, then in zip(versions, self._versions, strict=True)):
            return "the norm's parameters were modified or freed since"
        return ""

    def native(self) -> Tensor:
        """y as torch computes it from x, with a node that keeps x. Running statistics are not updated."""
        why = self.why_gone()
        if why:
            raise RuntimeError(_GONE.format(name=self.name, why=why))
        assert self.x is not None
        return self._native(self.x, self.weight, self.bias)

    def _native(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        s = self.settings
        if s.group is not None:
            y: Tensor = KeptABNFunction.apply(x, weight, bias, None, self.mean, self.values.var, s)
            return y
        if s.per_instance:
            samples, channels = x.shape[:2]
            folded = x.reshape(1, samples * channels, -1)
            return F.batch_norm(folded, None, None, weight, bias, True, 0.0, s.eps).view(x.shape)
        mean, var = (None, None) if s.training else (self.mean, self.values.var)
        return F.batch_norm(x, mean, var, weight, bias, s.training, 0.0, s.eps)

    def native_gradients(self, g: Tensor, needed: Sequence[bool]) -> list[Tensor | None]:
        """The gradients of x, weight and bias from y's gradient, as torch computes them.

        With ``create_graph=True`` they depend on x, weight and bias in the graph.
        """
        (weight, bias, _), edges = self.values, self.edges
        create_graph = torch.is_grad_enabled()
        tensors = self.x, placed(weight, edges.weight), placed(bias, edges.bias)
        if not create_graph:
            tensors = tuple(
                None if t is None else t.detach().requires_grad_(need) for t, need in zip(tensors, needed, strict=True)
            )  # type: ignore[assignment]
        with torch.enable_grad():
            y = self._native(*tensors)  # type: ignore[arg-type]
            inputs = [t for t, need in zip(tensors, needed, strict=True) if need and t is not None]
            found = iter(torch.autograd.grad(y, inputs, g, create_graph=create_graph) if inputs else ())
        return [next(found) if need else None for need in needed]

    def is_trusted(self, activation: tuple[str, float], residual: Tensor | None) -> bool:
        """Whether the guard lets the node keep z instead of x, given what follows.

        If the layer was never measured, the measurement of this call decides at once. If the layer was measured, but
        not with what follows, this call is torch's. Its measurement, or one in the next generation, then decides for
        later calls.
        """
        observation, self.observation = self.observation, None
        state: guard.State | None = self.module._guard
        if observation is not None:
            figures = observation.figures(*activation, residual)
            trusted = guard.take(self.module, figures, self.decisive, observation.x.dtype)
            self.trusted = trusted or not self.decisive
            self.module._guard.learn((*activation, residual is not None), self.decisive)
        if not self.trusted or is_known(self.module, activation, residual is not None):
            return self.trusted
        if observation is None and state is not None:
            state.stranger = guard.generation
        return False

    def saw(self, *what: Any) -> None:
        """Stores on the module what followed."""
        self.module._seen.add(what)
        if what == ("plain",) and self.observation is not None:
            # Nothing was measured, so the next call must measure.
            self.observation = None
            self.module.__dict__["_guard_generation"] = -1


def is_known(module: Any, activation: tuple[str, float], with_residual: bool) -> bool:
    """Whether what follows the norm was measured.

    The identity counts as measured if any activation was, because the z of an activation determines y less well.
    """
    state: guard.State | None = module._guard
    if state is None or module.guard_interval == 0:
        return True
    if activation == IDENTITY:
        return any(state.knows(what) for what in state.met if what[2] or not with_residual)
    return state.knows((*activation, with_residual))


def _versions(*tensors: Tensor | None) -> list[tuple[int, int, bool]]:
    """The version, the address and requires_grad of each tensor.

    Subclasses of tensors need not have memory of their own.
    """
    return [
        (0, 0, False) if t is None else (t._version, t.data_ptr() if type(t) in _STORED else 0, t.requires_grad)
        for t in tensors
    ]


_STORED = (Tensor, torch.nn.Parameter)


class State:
    """What a pending tensor stands for: memory, and what was done with that memory."""

    def __init__(self, norm: Norm, memory: Tensor, residual: Tensor | None, applied: tuple[str, float]) -> None:
        self.norm = norm
        self.memory: Tensor | None = memory
        self.residual = residual
        self.applied = applied
        """The activation whose result memory holds. It was applied in expectation, and nobody has asked for it yet."""
        self.own: Tensor | None = None
        """A copy of the values for the node alone.

        It is made if the values were exposed and the norm's input is gone.
        """
        self.tells = True
        """Whether the guard trusts that copy for recovering the norm's input."""
        self.is_exposed = False
        """Whether code that bypasses ``__torch_function__`` has seen the values."""
        self._version = memory._version
        self._residual_version = _versions(residual)

    def has_its_residual(self) -> bool:
        return _versions(self.residual) == self._residual_version

    def is_fusible(self) -> bool:
        return self.memory is not None and self.has_its_residual() and self.norm.is_unchanged()

    def take_back(self) -> Tensor:
        """The memory, with the norm's output and the residual, without an activation.

        An activation that was applied in expectation is taken back.
        """
        memory = self.memory
        assert memory is not None
        if memory._version != self._version:
            why = "the norm's input was overwritten and modified since"
            raise RuntimeError(_GONE.format(name=self.norm.name, why=why))
        if self.applied != IDENTITY:
            with _torch.BelowAutograd():
                take_back(memory, *self.applied)
            self.applied = IDENTITY
        return memory

    def activate(self, activation: tuple[str, float]) -> Tensor:
        """The memory, activated with tags, so that backward can recover the norm's output."""
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
        """The values, for code that bypasses ``__torch_function__``. That code may modify them.

        Backward then uses the norm's input, as torch's does. If the input is gone, backward uses a copy of the values.
        """
        norm = self.norm
        self.is_exposed = True
        with torch.inference_mode(False), torch.no_grad():
            if self.own is not None:
                values = self.own.clone()
            elif self.memory is not None and (norm.has_its_input() or self.has_its_residual()):
                values = self.take_back()
            elif self.residual is None or self.has_its_residual():
                values = norm.native()
                if self.residual is not None:
                    values = values + self.residual
            else:
                raise RuntimeError(_GONE.format(name=norm.name, why="what was added to it was modified since"))
            if norm.has_its_input():
                self.residual = None
            elif self.own is None:
                self.own, self.tells = values.clone(), norm.is_trusted(IDENTITY, self.residual)
        self.memory = None
        norm.saw("plain")
        return values


class WaitingFunction(torch.autograd.Function):
    """The graph node of a pending tensor: the norm, and the addition, without activation."""

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
        if state.memory is not None:
            state.expose()
        norm = state.norm
        if not (norm.has_its_input() or (state.own is not None and state.tells)):
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: the "
                f"input of {norm.name}"
            )
        needed: tuple[bool, ...] = ctx.needs_input_grad
        if torch.is_grad_enabled() and not norm.has_its_place():
            raise RuntimeError(f"inplace_abn: the input of {norm.name} was modified before create_graph=True")
        found: Sequence[Tensor | None]
        if state.own is None:
            found = norm.native_gradients(g, needed[:3])
        else:
            saved = norm.values.saved(state.own, state.residual)
            if torch.is_grad_enabled():
                assert norm.x is not None
                with _torch.NoTorchFunction():
                    edges = norm.edges._replace(x=gradients.input_edge(norm.x))
                found = gradients.differentiable(saved, g, edges, norm.settings)
            else:
                need = Needed(needed[0], needed[1], needed[2], False)
                found = gradients.gradients(need, saved, g, False, False, norm.settings)
        return *found[:3], g if needed[3] else None, None, None


class StandsForFunction(torch.autograd.Function):
    """Places one tensor after another one in the graph. The two have the same values."""

    @staticmethod
    def forward(before: Tensor, after: Sequence[Tensor]) -> Tensor:
        return after[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g, None


# As in autograd.py, this is ``apply`` without the binding of default arguments.
wait = super(torch.autograd.Function, WaitingFunction).apply
stand = super(torch.autograd.Function, StandsForFunction).apply
