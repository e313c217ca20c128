"""The autograd nodes of the op. They save z instead of x, and reuse the memory of z where `ownership` allows it.

The op runs before its node is made, so that an op that fails leaves no trace in the graph. `gradients` has the maths.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from inplace_abn import _torch, gradients, ownership
from inplace_abn.activations import name_of
from inplace_abn.gradients import Needed, Saved
from inplace_abn.settings import Settings


class _Hidden:
    """Wraps a tensor, so that autograd does not take it for an input."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class _Watch:
    """Tells whether a tensor was written to, without holding its memory."""

    def __init__(self, t: Tensor) -> None:
        # A detached tensor shares the version counter, even after its memory is replaced.
        self._counter = t.detach()
        self._counter.data = t.new_empty(0)
        self.version = 0

    def start(self) -> None:
        self.version = self._counter._version

    def is_modified(self) -> bool:
        return self._counter._version != self.version


class InPlaceABNFunction(torch.autograd.Function):
    """The node of z, which is x after the op has overwritten it, or ``written`` if the op wrote elsewhere."""

    @staticmethod
    def forward(
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        var: Tensor,
        settings: Settings,
        edge: _Hidden | Tensor | None,
        watch: _Watch | None,
        written: _Hidden | None,
        stand_in: _Hidden | None,
        saved: _Hidden | None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        z = x if written is None else written.tensor
        return z if stand_in is None else (z, stand_in.tensor)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor | tuple[Tensor, Tensor]) -> None:
        x, *others, ctx.settings, ctx.edge, ctx.watch, written, _, saved = inputs
        ctx.of_view = written is None and _torch.is_view(x)
        if written is None:
            ctx.mark_dirty(x)
        ctx.set_materialize_grads(False)
        z = output if isinstance(output, Tensor) else output[0]
        ctx.alias = None if saved is None else saved.tensor.data_ptr()
        ctx.save_for_backward(z if saved is None else saved.tensor, *others)

    @staticmethod
    def backward(ctx: Any, dz: Tensor | None, of_stand_in: Tensor | None = None) -> tuple[Tensor | None, ...]:
        if of_stand_in is not None:
            dz = of_stand_in if dz is None else dz + of_stand_in
        if dz is None:
            return (None,) * 11
        if _torch.is_batched(dz):
            raise RuntimeError("inplace_abn: gradients in batches are not supported. Use ABN, which works out of place")
        settings: Settings = ctx.settings
        need = Needed(*ctx.needs_input_grad[:4])
        # Compiled code is functional. The compiler reuses memory, so nothing is reused here.
        if torch.compiler.is_compiling():
            return *gradients.gradients(need, Saved(*ctx.saved_tensors), dz, False, False, settings), *(None,) * 7
        # Only the engine passes gradients that nobody else holds. Other callers hold theirs, and may call again. If x
        # is a view, the engine runs the CopySlices node of its base, and that node calls this one.
        node = _torch.current_node()
        by_engine = node is ctx or (ctx.of_view and node is not None and node.name().endswith("CopySlices"))
        own_dz = by_engine and of_stand_in is None and ownership.owns_gradient(dz, sys.getrefcount(dz))
        saved = _unpacked(ctx)
        if torch.is_grad_enabled():
            edge = ctx.edge.tensor if isinstance(ctx.edge, _Hidden) else ctx.edge
            return *gradients.differentiable(saved, dz, edge, settings), *(None,) * 7
        z = saved.z
        own_dz = own_dz and z.stride() == dz.stride()
        # Counts of holders are those of an output. They do not tell who else holds an alias.
        own_z = by_engine and ctx.alias is None and not _is_hooked(ctx) and ownership.owns_output(z)
        # The tensor z is part of the graph. A gradient that takes its memory must be another tensor.
        saved = saved._replace(z=z.detach())
        return *gradients.gradients(need, saved, dz, own_z, own_dz, settings), *(None,) * 7


# This is `torch.autograd.Function.apply` without its binding of default arguments, which takes longer than the rest of
# the call. The two do the same where no transform is active.
_apply = super(torch.autograd.Function, InPlaceABNFunction).apply


def _is_hooked(ctx: Any) -> bool:
    """Whether saved-tensor hooks have packed the saved output. They may keep it or hand it out again."""
    return ctx._raw_saved_tensors[0].unpack_hook is not None


def _unpacked(ctx: Any) -> Saved:
    """The saved tensors.

    Under saved-tensor hooks autograd does not notice that the output was modified in place. The watch does. A
    modification is no error if the hooks return a copy that was made before it.

    Raises:
        RuntimeError: the output, or the residual, was modified in place.
    """
    modified = (
        "inplace_abn: the {} of an in-place ABN has been modified in place, but its backward needs it. "
        "Replace that operation by one out of place (z = z + y for z += y), use ABN, or leave the norm out of the "
        "conversion (filter_fn)"
    )
    try:
        saved = Saved(*ctx.saved_tensors)
    except RuntimeError as error:
        text = str(error)
        if "modified by an inplace operation" in text:
            raise RuntimeError(modified.format("output" if "InPlaceABNFunction" in text else "residual")) from error
        raise
    watch: _Watch | None = ctx.watch
    if watch is not None and watch.is_modified():
        # An alias has a version of its own, and other memory once it is a copy.
        was_seen = saved.z._version > watch.version if ctx.alias is None else saved.z.data_ptr() == ctx.alias
        if was_seen:
            raise RuntimeError(modified.format("output"))
    return saved


class TracedABNFunction(torch.autograd.Function):
    """The node for compilers, out of place.

    Compilers do not trace `InPlaceABNFunction` correctly: an x from outside of the compiled region would lose its
    gradient, and later writes to z would change what was saved.
    """

    @staticmethod
    def forward(
        x: Tensor,
        z: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        var: Tensor,
        settings: Settings,
    ) -> Tensor:
        return z.view_as(z)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, _, *others, ctx.settings = inputs
        ctx.save_for_backward(output, *others)

    @staticmethod
    def backward(ctx: Any, dz: Tensor) -> tuple[Tensor | None, ...]:
        need_x, _, *need = ctx.needs_input_grad
        saved = Saved(*ctx.saved_tensors)
        dx, *others = gradients.gradients(Needed(need_x, *need[:3]), saved, dz, False, False, ctx.settings)
        return dx, None, *others, None, None


def overwritten(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    var: Tensor,
    settings: Settings,
    edge: Tensor | None,
) -> Tensor:
    """Makes the node of z for x, which the op has already overwritten. Returns x."""
    apply = InPlaceABNFunction.apply if _torch.transforms_active() else _apply
    watch = _watch(x)
    # Transforms wrap the edge at each of their levels, so it must be a visible input.
    hidden = edge if edge is None or _torch.transforms_active() else _Hidden(edge)
    z: Tensor = apply(x, weight, bias, residual, var, settings, hidden, watch, None, None, None)
    if watch is not None:
        watch.start()
    return z


def attached(
    x: Tensor,
    z: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    var: Tensor,
    settings: Settings,
    edge: Tensor | None,
    stand_in: Tensor | None,
    saved: Tensor | None,
) -> Tensor:
    """Makes a node for z, which is already written, as a function of x. Only x's place in the graph is read.

    ``stand_in`` becomes a second output of the node. ``saved`` is what the node saves instead of z: a copy of z, or an
    alias that becomes a copy before somebody writes to z.
    """
    is_alias = saved is not None and saved.data_ptr() == z.data_ptr()
    watch = _Watch(z) if is_alias else None if saved is not None else _watch(z)
    tensors = [None if t is None else _Hidden(t) for t in (z, stand_in, saved)]
    given = (x, weight, bias, residual, var, settings, None if edge is None else _Hidden(edge), watch, *tensors)
    z = _apply(*given) if stand_in is None else _apply(*given)[0]
    if watch is not None:
        watch.start()
    return z


def _watch(z: Tensor) -> _Watch | None:
    """A watch on z if saved-tensor hooks are set. Autograd does not check the versions of what hooks return."""
    return None if _torch.top_saved_tensors_hooks(True) is None else _Watch(z)


def as_identity(x: Tensor) -> Tensor:
    """Makes an identity node for x. It serves to calibrate `ownership`."""
    settings = Settings("identity", 0.0, 1e-5, False, False, None)
    return overwritten(x, None, None, None, x.new_ones(x.shape[1]), settings, None)


def differentiable(
    z: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    var: Tensor,
    dz: Tensor,
    edge: Tensor,
    eps: float,
    signed_weight: bool,
    activation: int,
    activation_param: float,
    training: bool,
    per_instance: bool,
) -> gradients.Gradients:
    """`gradients.differentiable` for the node in C++."""
    settings = Settings(name_of(activation), activation_param, eps, signed_weight, training, None, per_instance)
    return gradients.differentiable(Saved(z, weight, bias, residual, var), dz, edge, settings)
