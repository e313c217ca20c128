"""What a pending tensor stands for (`inplace_abn.pending`): a norm's call, the memory that holds its result, and the
places in the graph that such a tensor may have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from inplace_abn import _torch, gradients, guard, ops
from inplace_abn.activations import ACTIVATIONS
from inplace_abn.gradients import Needed, Saved
from inplace_abn.kept import KeptABNFunction
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
        with _torch.NoTorchFunction():
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


class WaitingFunction(torch.autograd.Function):
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
            with _torch.NoTorchFunction():
                edge = gradients.input_edge(norm.x)
            found = gradients.differentiable(saved, g, edge, norm.settings)
        else:
            x, weight, bias = ctx.needs_input_grad[:3]
            need = Needed(x, weight, bias, False)
            found = gradients.gradients(need, saved, g, False, False, norm.settings)
        return *found[:3], g if ctx.needs_input_grad[3] else None, None, None


class ShownFunction(torch.autograd.Function):
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


class StandsForFunction(torch.autograd.Function):
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
wait = super(torch.autograd.Function, WaitingFunction).apply
show = super(torch.autograd.Function, ShownFunction).apply
stand = super(torch.autograd.Function, StandsForFunction).apply
