"""The graph node of a norm's output. It keeps x, as torch's node does, until a reader keeps the output anyway.

From then on it keeps the output instead, and x is free. It stays one node, so everybody who has read the output, or put
a hook on it, sees the same gradients. `autograd.backward` and `autograd.rows` have the gradients from the output.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from inplace_abn import _torch, reference
from inplace_abn.activations import IDENTITY
from inplace_abn.autograd import backward, ownership, rows
from inplace_abn.autograd.backward import Edges, Needed, Saved, edge_of_value, input_edge
from inplace_abn.autograd.kept import KeptABNFunction
from inplace_abn.autograd.versions import Aliased, Hooked, Versions, modified, of_mode, refuse_batched
from inplace_abn.kernels import node as kernels
from inplace_abn.reference import NORMS_OF_ROWS, normalised_rows
from inplace_abn.settings import WEIGHT, Operands, Settings


def native(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor | None, var: Any, settings: Settings
) -> Tensor:
    """y as torch computes it from x. Running statistics are not updated."""
    if settings.rows:
        # The output of a norm by hand may be wider than its input.
        return normalised_rows(x.to(reference.wide(x.dtype)), weight, bias, settings.rows, settings.eps)
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
    mean, running_var = (None, None) if settings.training else (mean, var)
    return F.batch_norm(x, mean, running_var, weight, bias, settings.training, 0.0, settings.eps)


def _gradients(
    g: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias_dtype: torch.dtype | None,
    call: tuple[Any, Any, Settings],
    needed: Sequence[bool],
) -> list[Tensor | None]:
    """The gradients of x, weight and bias by torch's norm; None where none is asked for.

    The bias's value does not matter, so torch's norm does not save it either.
    """
    mean, var, settings = call
    is_wide = x.dtype in (torch.float32, torch.float64) or (weight is not None and weight.dtype == torch.float32)
    # torch's op has no gradient of a bias without a weight.
    is_whole = mean is not None and (weight is not None or not needed[2])
    if is_wide and is_whole and not (settings.per_instance or settings.group or torch.is_grad_enabled()):
        found = _by_torch(g, x, weight, mean, var, settings, list(needed[:3]))
        return [t if need else None for t, need in zip(found, needed, strict=False)]
    create_graph, inputs = torch.is_grad_enabled(), list[Tensor]()
    with torch.enable_grad(), _own_hooks(create_graph):
        channels = x.shape[-1 if settings.rows else 1]
        bias = None if bias_dtype is None else x.new_zeros(channels, dtype=bias_dtype)

        def asked(t: Tensor | None, need: bool) -> Any:
            if t is None or not need:
                return t
            # Hooks on a tensor itself run when its gradient is complete, and must not run here.
            inputs.append(t.view_as(t) if create_graph and t.requires_grad else t.detach().requires_grad_())
            return inputs[-1]

        y = native(asked(x, needed[0]), asked(weight, needed[1]), asked(bias, needed[2]), *call)
        each = iter(torch.autograd.grad(y, inputs, g.to(y.dtype), create_graph=create_graph) if inputs else ())
    return [next(each) if need else None for need in needed[:3]]


def _own_hooks(create_graph: bool) -> AbstractContextManager[Any]:
    """Hides what backward saves for itself from saved-tensor hooks. Those of a checkpoint would count it.

    Tensors are packed detached, since a tensor with its graph would keep itself.
    """
    if create_graph or _torch.top_saved_tensors_hooks(True) is None:
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(Tensor.detach, lambda t: t)


def _by_torch(
    g: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, var: Tensor, settings: Settings, needed: list[bool]
) -> Sequence[Tensor | None]:
    """The gradients, by the op that torch's own node calls."""
    aten = torch.ops.aten
    if settings.rows:
        bias = weight if weight is None else weight.new_empty(len(weight))
        return aten.native_layer_norm_backward(g, x, x.shape[-1:], mean, var, weight, bias, needed)  # type: ignore[no-any-return]
    running = (None, None) if settings.training else (mean, var)
    given = mean, torch.rsqrt(var + settings.eps), settings.training, settings.eps, needed
    return aten.native_batch_norm_backward(g, x, weight, *running, *given)  # type: ignore[no-any-return]


class _Held:
    """Tensors that are saved for backward as autograd saves them, until this is dropped: hooks get them, and writes to
    them are noticed."""

    def __init__(self, settings: Settings, *tensors: Tensor | None) -> None:
        self._holder = _hold(torch.empty(0, requires_grad=True), (*of_mode(settings), *tensors))
        self._count = len(tensors)

    def tensors(self) -> tuple[Tensor | None, ...]:
        return self._holder.grad_fn.saved_tensors[-self._count :]  # type: ignore[no-any-return]


class _HoldingFunction(torch.autograd.Function):
    @staticmethod
    def forward(holder: Tensor, tensors: tuple[Tensor | None, ...]) -> Tensor:
        return holder.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1])


# As in autograd/nodes.py, this is ``apply`` without the binding of default arguments.
_hold: Callable[..., Any] = super(torch.autograd.Function, _HoldingFunction).apply


class Node:
    """What the node keeps."""

    __slots__ = ("_bias_dtype", "_edges", "_held", "_hooked", "_input", "_keeps_output", "settings")

    def __init__(self, x: Tensor, operands: Operands, statistics: tuple[Any, Any], settings: Settings) -> None:
        weight, bias, _ = operands.of_graph()
        self.settings: Settings = settings
        self._bias_dtype: torch.dtype | None = None if bias is None else bias.dtype
        # Of samples they are not needed again.
        kept = (None, None) if settings.per_instance else statistics
        self._held: _Held | None = _Held(settings, x, weight, *kept)
        self._keeps_output: bool = False
        self._edges: Edges = Edges(None)
        self._hooked: Hooked | Aliased | None = None
        hooks = _torch.top_saved_tensors_hooks(True)
        # Under hooks autograd does not look at versions.
        self._input: Versions | None = None if hooks is None or not settings.rows else Versions(x)

    def keep(
        self, t: Tensor, saved: Saved, x: Tensor, operands: Operands, settings: Settings, operand: int = 0
    ) -> None:
        """Keeps t instead of x. t is y, or the sum of y and the residual. ``saved.z`` is t, or an alias of it. The
        first reader decides."""
        if self._keeps_output:
            return
        edge = input_edge(x) if x.requires_grad else None
        self._edges = Edges(
            edge, edge_of_value(operands.weight, saved.weight), edge_of_value(operands.bias, saved.bias)
        )
        # An alias stays the tensor that it is: whoever made it may give it memory of its own.
        z, residual = t.detach() if saved.z is t else saved.z, saved.residual
        if residual is not None and residual.requires_grad:
            residual = residual.detach()
        found = saved._replace(z=z, residual=residual)
        self.settings, self._held, self._keeps_output = settings, _Held(settings, *found), True
        hooks = _torch.top_saved_tensors_hooks(True)
        self._hooked = Aliased(t, operands.residual, saved) if hooks is None else Hooked(found, hooks)

    def gradients(self, dy: Tensor, needed: Sequence[bool], own_dy: bool) -> Sequence[Tensor | None]:
        held = self._held
        if held is None:
            raise RuntimeError(
                "Trying to backward through the graph a second time. Specify retain_graph=True if you need to"
            )
        try:
            tensors = held.tensors()
        except RuntimeError as error:
            # torch's norms of channels keep their input, too, and have this error. A norm of rows by hand may not.
            is_ours = self._keeps_output or bool(self.settings.rows)
            if is_ours and "modified by an inplace operation" in str(error):
                raise RuntimeError(modified("output" if self._keeps_output else "input", self.settings.name)) from error
            raise
        if not self._keeps_output:
            x, weight, *statistics = tensors
            assert x is not None
            if self._input is not None and self._input.is_modified_in(x):
                raise RuntimeError(modified("input", self.settings.name))
            return _gradients(dy, x, weight, self._bias_dtype, (*statistics, self.settings), needed)  # type: ignore[arg-type]
        refuse_batched(dy, self.settings.name)
        saved, need = Saved(*tensors), Needed(*needed[:3], False)  # type: ignore[arg-type, call-arg]
        if self._hooked is not None:
            self._hooked.check(saved, self.settings.name)
        maths = rows if self.settings.rows else backward
        if torch.is_grad_enabled():
            return (*maths.differentiable(saved, dy, self._edges, self.settings),)[:3]
        own_dy = own_dy and saved.z.stride() == dy.stride()
        return (*maths.gradients(need, saved, dy, False, own_dy, self.settings),)[:3]

    def release(self) -> None:
        self._held = None


class NormFunction(torch.autograd.Function):
    """The node of y in Python."""

    @staticmethod
    def forward(*inputs: Any) -> Tensor:
        return inputs[-1][0]  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.node = inputs[3]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:
        if dy is None:
            return (None,) * 5
        node, by_engine = ctx.node, bool(_torch.current_node() is ctx)
        own_dy = by_engine and ownership.owns_gradient(dy, sys.getrefcount(dy))
        found = node.gradients(dy, ctx.needs_input_grad, own_dy)
        if by_engine and not _torch.keeps_graph():
            node.release()
        return *found, None, None


_apply: Callable[..., Any] = super(torch.autograd.Function, NormFunction).apply


Keep = Callable[..., None]
"""`Node.keep`, of a node in Python or in C++."""


def keep_in_cpp(cpp: kernels.Node) -> Keep:
    def keep(t: Tensor, saved: Saved, x: Tensor, operands: Operands, settings: Settings, operand: int = 0) -> None:
        values = saved.var, saved.rows, saved.verbatim
        cpp.keep_as(t, saved.z, operands.residual, saved.residual, operand, *values)

    return keep


def attached(
    cpp: kernels.Node | None,
    y: Tensor,
    x: Tensor,
    operands: Operands,
    statistics: tuple[Any, Any],
    settings: Settings,
) -> Keep | None:
    """Gives y, which has no graph, a node that keeps x, and returns what makes it keep y instead.

    None if nothing needs a gradient.
    """
    weight, bias, _ = operands.of_graph()
    if not any(t is not None and t.requires_grad for t in (x, weight, bias)):
        return None
    # The node in C++ keeps some tensors where saved-tensor hooks do not see them.
    if cpp is not None and settings.group is None and _torch.top_saved_tensors_hooks(True) is None:
        options = settings.eps, settings.training, settings.shared, NORMS_OF_ROWS.index(settings.rows), settings.name
        with _torch.NoTorchFunction():
            # Of samples they are not needed again.
            cpp.attach_norm(y, x, weight, bias, *((None, None) if settings.per_instance else statistics), *options)
        return keep_in_cpp(cpp)
    node = Node(x, operands, statistics, settings)
    _apply(x, weight, bias, node, (y,))
    return node.keep


_library = torch.library.Library("inplace_abn", "FRAGMENT")
_library.define(
    "native_norm_backward(Tensor g, Tensor x, Tensor? weight, ScalarType? bias_dtype, Tensor? mean, Tensor? var, "
    "bool[] needed, float eps, bool training, int shared, int norm_of_rows) -> Tensor[]"
)


def _norm_backward(*args: Any) -> list[Tensor]:
    """The gradients that are needed, for the node in C++."""
    g, x, weight, bias_dtype, mean, var, needed, eps, training, shared, norm_of_rows = args
    settings = Settings(*IDENTITY, eps, WEIGHT, training, None, shared, rows=NORMS_OF_ROWS[norm_of_rows])
    found = _gradients(g, x, weight, bias_dtype, (mean, var, settings), needed)
    return [t for t in found if t is not None]


_library.impl("native_norm_backward", _norm_backward, "CompositeImplicitAutograd")
