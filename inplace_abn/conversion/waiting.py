"""What a pending tensor stands for (`conversion.pending`).

This is a norm's call, the memory that holds its result, and the graph nodes that a pending tensor may have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from inplace_abn import _torch, functions, guard, reference
from inplace_abn.activations import ACTIVATIONS, IDENTITY, take_back
from inplace_abn.autograd.backward import Values
from inplace_abn.autograd.kept import KeptABNFunction
from inplace_abn.conversion.converted import Note
from inplace_abn.kernels import ops
from inplace_abn.settings import WEIGHT, Channels, Operands, Settings

_GONE = (
    "inplace_abn: the output of {name} is needed after it was activated or added to in place, and cannot be computed "
    "again, because {why}. Leave this norm out of the conversion (filter_fn)"
)


Seen = tuple[int, int, bool]
"""A tensor at the time of a call: its version, its address, and whether it requires grad.

Whoever writes to it, or frees its memory, changes this. The address is zero for subclasses, which need not have memory
of their own.
"""


@dataclass(eq=False)
class NormCall:
    """A norm's call: what it was called with, and what it computed."""

    module: Any
    x: Tensor
    operands: Operands
    """Only parameters are kept. The statistics of the call are the mean and the variance among the values."""
    mean: Tensor | None
    values: Values
    settings: Settings
    look: guard.Look
    dtype: torch.dtype | None = None
    """That of what is kept; None for that of x."""
    trusted: bool = True

    def __post_init__(self) -> None:
        x, self.operands = self.x, Operands(self.operands.weight, self.operands.bias)
        self.called_with(seen(x), (x.grad_fn, x.output_nr), self._present(), _torch.top_saved_tensors_hooks(True))

    def called_with(self, x: Seen, edge: tuple[Any, int], parameters: tuple[Seen, Seen], hooks: Any) -> None:
        """Notes what the tensors were like when the norm was called, x's place in the graph, and the saved-tensor
        hooks."""
        self._x, self._edge, self._parameters, self._hooks = x, edge, parameters, hooks

    @property
    def name(self) -> str:
        return self.settings.name or type(self.module).__name__

    def is_unchanged(self) -> bool:
        """Whether x has its place in the graph, the parameters are unchanged, and saved-tensor hooks are the same.

        Checkpoints are saved-tensor hooks that count what is saved. One may have begun or ended in between.
        """
        if self._present() != self._parameters or _torch.top_saved_tensors_hooks(True) != self._hooks:
            return False
        x, (node, number) = self.x, self._edge
        return x.requires_grad == self._x[2] and x.grad_fn is node and x.output_nr == number

    def why_gone(self) -> str:
        """Why y cannot be computed again, in words; empty if it can."""
        if seen(self.x)[:2] != self._x[:2]:
            return "the norm's input was modified since"
        # Sharded parameters are freed after the forward pass of their unit.
        if any(now[:2] != then[:2] for now, then in zip(self._present(), self._parameters, strict=True)):
            return "the norm's parameters were modified or freed since"
        return ""

    def _present(self) -> tuple[Seen, Seen]:
        return seen(self.operands.weight), seen(self.operands.bias)

    def native(self) -> Tensor:
        """y as torch computes it from x, with a node that keeps x."""
        why = self.why_gone()
        if why:
            raise RuntimeError(_GONE.format(name=self.name, why=why))
        weight, bias, _ = self.operands.of_graph()
        return native(self.x, weight, bias, self.mean, self.values.var, self.settings)

    def is_trusted(self, activation: tuple[str, float], residual: Tensor | None) -> bool:
        """Whether the guard allows that the node keeps z instead of x, given what follows.

        If the layer was never measured, the measurement of this call decides at once. If the layer was measured, but
        not with what follows, this call is torch's. Its measurement, or one in the next generation, then decides for
        later calls.
        """
        consumer, observation = (*activation, residual is not None), self.look.observation
        if observation is not None:
            self.look = self.look._replace(observation=None)
            self.look = guard.learn(self.module, self.look, observation.figures(*activation, residual), consumer)
            self._save(self.look.decision.verbatim)
        self.trusted = self.look.trusted
        if observation is not None:
            return self.trusted and self.look.decision.knows(consumer)
        return guard.knows(self.module, self.look, consumer)

    def _save(self, channels: Channels) -> None:
        """Saves xhat of these channels, which were chosen after the norm was called, and of no others."""
        settings = self.settings
        if channels == settings.verbatim:
            return
        x, var, mean = self.x.detach(), self.values.var, self.mean
        with torch.no_grad(), _torch.unwatched():
            if mean is None:
                mean, _ = ops.run(ops.statistics, [], x, settings.shared)
            rows, verbatim = channels.rows(x.device), None
            if rows is not None:
                xhat = reference.standardised_channels(x, mean, var, settings.eps, channels.indices(x.device))
                verbatim = reference.empty_channels(x, len(channels)).to(self.dtype or x.dtype).copy_(xhat)
        self.values = self.values._replace(verbatim=verbatim, rows=rows)
        self.settings = settings._replace(verbatim=channels)

    def note(self, follows: str, why: str = "") -> None:
        """Stores on the module what it did: it was in place unless there is a reason why not."""
        self.module._past.note = Note(follows, not why, why)

    def record_consumer(self, *what: Any) -> None:
        """Remembers what followed."""
        self.look.saw(what)
        if what == ("plain",):
            # Nothing is measured, so the next call is.
            self.look = self.look._replace(observation=None)


def native(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor | None, var: Tensor, settings: Settings
) -> Tensor:
    """y as torch computes it from x. Running statistics are not updated."""
    if settings.group is not None:
        y: Tensor = KeptABNFunction.apply(x, weight, bias, None, mean, var, settings)
        return y
    samples, channels = x.shape[:2]
    # An instance norm's x is contiguous. A group norm of one channel per group keeps x's memory format.
    if settings.shared > 1 or (settings.per_instance and not x.is_contiguous()):
        return F.group_norm(x, channels // settings.shared, weight, bias, settings.eps)
    if settings.per_instance:
        folded = x.reshape(1, samples * channels, -1)
        weight, bias = (reference.repeated(t, samples) for t in (weight, bias))
        return F.batch_norm(folded, None, None, weight, bias, True, 0.0, settings.eps).view(x.shape)
    running_mean, running_var = (None, None) if settings.training else (mean, var)
    return F.batch_norm(x, running_mean, running_var, weight, bias, settings.training, 0.0, settings.eps)


def seen(t: Tensor | None) -> Seen:
    """What the tensor is like now."""
    return _NOTHING if t is None else (t._version, t.data_ptr() if type(t) in _STORED else 0, t.requires_grad)


def seen_as(t: Tensor | None, version: int, address: int, requires_grad: int) -> Seen:
    """What the node in C++ saw of the tensor."""
    return _NOTHING if t is None else (version, address if type(t) in _STORED else 0, bool(requires_grad))


_NOTHING: Seen = (0, 0, False)
_STORED = (Tensor, torch.nn.Parameter)


@dataclass(eq=False)
class PendingState:
    """What a pending tensor stands for: memory, and what was done with that memory."""

    norm: NormCall
    memory: Tensor | None
    residual: Tensor | None
    applied: tuple[str, float]
    """The activation whose result memory holds. It was applied in expectation, and nobody has asked for it yet."""
    narrow: Tensor | None = None
    """The activated output in 16 bits, if autocast computes in float32 and there is no memory."""

    def __post_init__(self) -> None:
        self.made_of(0 if self.memory is None else self.memory._version, seen(self.residual))

    def made_of(self, version: int, residual: Seen) -> None:
        """Notes the version of the memory, and what the residual was like."""
        self._version, self._residual = version, residual

    def has_its_residual(self) -> bool:
        return self.residual is None or seen(self.residual) == self._residual

    def take_back(self) -> Tensor:
        """The memory, with the norm's output and the residual, without an activation.

        An activation that was applied in expectation is taken back.
        """
        memory = self.memory
        assert memory is not None
        if memory._version != self._version:
            raise RuntimeError(_GONE.format(name=self.norm.name, why="it was modified since"))
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
            zero = torch.zeros(memory.shape[1], dtype=reference.wide(memory.dtype), device=memory.device)
            code, param = ACTIVATIONS[activation[0]].code, activation[1]
            with _torch.BelowAutograd():
                # With these statistics the norm is the identity, bit for bit.
                ops.forward(memory, zero, torch.ones_like(zero), None, None, None, 1e-30, WEIGHT, code, param, True)
            self.applied = activation
        return memory

    def native(self) -> Tensor:
        """The norm's output and the residual, as torch computes them from x."""
        y = self.norm.native()
        if not self.has_its_residual():
            raise RuntimeError(_GONE.format(name=self.norm.name, why="what was added to it was modified since"))
        return y if self.residual is None else y + self.residual

    def expose(self) -> Tensor:
        """The values, for code that bypasses ``__torch_function__``. That code may modify them."""
        # Below autograd the values are no view, whatever torch's norm returns. Views must not become outputs of nodes.
        with torch.inference_mode(False), torch.no_grad(), _torch.BelowAutograd():
            values = self.native() if self.memory is None else self.take_back()
        self.memory = None
        return values


def _gradients(
    g: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias_dtype: torch.dtype | None,
    call: tuple[Any, ...],
    needed: Sequence[bool],
) -> list[Tensor | None]:
    """The gradients of torch's norm with respect to those of x, weight and bias that need one.

    The bias's value does not matter, so torch's norm does not save it either.
    """
    create_graph, inputs = torch.is_grad_enabled(), []
    with torch.enable_grad():
        given = [x, weight, None if bias_dtype is None else x.new_zeros(x.shape[1], dtype=bias_dtype)]
        for i, t in enumerate(given):
            if t is not None and needed[i]:
                # Hooks on a tensor itself run when its gradient is complete, and must not run here.
                given[i] = t.view_as(t) if create_graph and t.requires_grad else t.detach().requires_grad_()
                inputs.append(given[i])
        y = native(*given, *call)  # type: ignore[arg-type]
        found = iter(torch.autograd.grad(y, inputs, g, create_graph=create_graph) if inputs else ())  # type: ignore[arg-type]
    return [next(found) if need else None for need in needed[:3]]


class WaitingFunction(torch.autograd.Function):
    """The graph node of a pending tensor: the norm, and the addition, without activation.

    It saves what torch's norm saves, when torch's norm saves it. So autograd notices modifications, and saved-tensor
    hooks get x while the norm is called.
    """

    @staticmethod
    def forward(*inputs: Any) -> Tensor:
        return inputs[-1][0]  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, bias, _residual, norm, _pending = inputs
        ctx.save_for_backward(x, weight)
        ctx.bias_dtype, ctx.call = None if bias is None else bias.dtype, (norm.mean, norm.values.var, norm.settings)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> tuple[Tensor | None, ...]:
        if g is None:
            return (None,) * 6
        needed: tuple[bool, ...] = ctx.needs_input_grad
        x, weight = ctx.saved_tensors
        found = _gradients(g, x, weight, ctx.bias_dtype, ctx.call, needed)
        return *found, g if needed[3] else None, None, None


_library = torch.library.Library("inplace_abn", "FRAGMENT")
_library.define(
    "waiting_backward(Tensor g, Tensor x, Tensor? weight, ScalarType? bias_dtype, Tensor? mean, Tensor var, "
    "bool[] needed, float eps, bool training, int shared) -> Tensor[]"
)


def _waiting_backward(*args: Any) -> list[Tensor]:
    """The gradients that are needed, for the node in C++."""
    g, x, weight, bias_dtype, mean, var, needed, eps, training, shared = args
    settings = Settings(*IDENTITY, eps, WEIGHT, training, None, shared)
    found = _gradients(g, x, weight, bias_dtype, (mean, var, settings), needed)
    return [t for t in found if t is not None]


_library.impl("waiting_backward", _waiting_backward, "CompositeImplicitAutograd")


class StandsForFunction(torch.autograd.Function):
    """Places one tensor after another one in the graph. The two have the same values.

    A tensor that is given itself, and not in a tuple, is placed as if it had been written to in place. So torch moves
    what belongs to the tensor and not to its place, such as ``retain_grad``.
    """

    @staticmethod
    def forward(before: Tensor, after: Tensor | tuple[Tensor]) -> Tensor:
        return after[0] if type(after) is tuple else after  # type: ignore[return-value]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        if type(inputs[1]) is not tuple:
            ctx.mark_dirty(inputs[1])

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g, None


# As in autograd/nodes.py, this is ``apply`` without the binding of default arguments.
_wait = super(torch.autograd.Function, WaitingFunction).apply
stand: Callable[..., Any] = super(torch.autograd.Function, StandsForFunction).apply


def wait(norm: NormCall, residual: Tensor | None, t: Tensor) -> None:
    """Gives a pending tensor its place in the graph: that of the norm, without activation."""
    node, settings, operands = functions.node_in_cpp(), norm.settings, norm.operands
    if node is None or settings.group is not None:
        _wait(norm.x, operands.weight, operands.bias, residual, norm, (t,))
        return
    options = (settings.eps, settings.training, settings.shared)
    with _torch.NoTorchFunction():
        node.wait(t, norm.x, operands.weight, operands.bias, residual, norm.mean, norm.values.var, *options)
