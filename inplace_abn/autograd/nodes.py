"""The autograd nodes of the op. They save z instead of x, and reuse the memory of z where `ownership` allows it.

The op runs before its node is made, so that an op that fails leaves no trace in the graph. `backward` has the maths.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor

from inplace_abn import _torch
from inplace_abn.activations import bits, name_of
from inplace_abn.autograd import backward, ownership, rows
from inplace_abn.autograd.backward import Edges, Needed, Saved, Values, edge_of_value
from inplace_abn.settings import MAGNITUDE, Operands, Settings


class Versions:
    """Tells whether a tensor was written to, without holding its memory."""

    def __init__(self, t: Tensor) -> None:
        # A detached tensor shares the version counter, even after its memory is replaced.
        self._counter = t.detach()
        self._counter.data = t.new_empty(0)
        self.first: int = t._version

    def start(self) -> None:
        self.first = self._counter._version

    def is_modified(self) -> bool:
        return self._counter._version != self.first

    def is_modified_in(self, t: Tensor | None) -> bool:
        """Whether it was written to in what saved-tensor hooks give back for it, and not after they made a copy."""
        return t is not None and self.is_modified() and t._version > self.first


class _Aliased(Versions):
    """Tells whether z was written to while backward knows it by an alias, which has a version of its own.

    An alias that has become a copy has other memory.
    """

    def __init__(self, z: Tensor, alias: Tensor) -> None:
        super().__init__(z)
        self._memory = alias.data_ptr()

    def check(self, saved: Saved, name: str) -> None:
        """Raises RuntimeError if z was modified in place."""
        if self.is_modified() and saved.z.data_ptr() == self._memory:
            raise RuntimeError(modified("output", name))


class _Hooked(Versions):
    """Tells whether saved-tensor hooks give back what they were given. Autograd does not look at that.

    Tags do not survive a cast, so all saved tensors must come back bit for bit. Hooks of checkpoints compute the call
    again instead, and what they give back belongs together, but need not be the same: dropout may draw other numbers.
    """

    def __init__(self, saved: Saved, hooks: tuple[Any, Any]) -> None:
        super().__init__(saved.z)
        self._residual = None if saved.residual is None else Versions(saved.residual)
        names = (getattr(hook, "__qualname__", type(hook).__qualname__) for hook in hooks)
        self._names = " and ".join(f"{hook.__module__}.{name}" for hook, name in zip(hooks, names, strict=True))
        compares = _torch.checkpoint_of(hooks) is None and _is_comparable(saved.z)
        self._checksum = _checksum(saved) if compares else None
        self._kinds = _kinds(saved)

    def check(self, saved: Saved, name: str) -> None:
        """Raises RuntimeError if z or the residual was modified in place, or if the hooks gave back other bits.

        A modification is no error if the hooks return a copy that was made before it. On CUDA the host waits for the
        comparison.
        """
        if self.is_modified_in(saved.z):
            raise RuntimeError(modified("output", name))
        if self._residual is not None and self._residual.is_modified_in(saved.residual):
            raise RuntimeError(modified("residual", name))
        if self._checksum is not None and not (
            _kinds(saved) == self._kinds and torch.equal(_checksum(saved), self._checksum)
        ):
            raise RuntimeError(
                f"inplace_abn: the saved-tensor hooks {self._names} gave back other values than {name or 'a layer'} "
                "gave them. An in-place ABN recovers its input from the last bits of its output, so hooks must give "
                "back every bit. Leave its saved tensors out of these hooks, or use ABN, or leave the layer out of the "
                "conversion (filter_fn)"
            )


def modified(what: str, name: str) -> str:
    """The message for a tensor that somebody wrote to. The layer is told, so that its next step works."""
    torch.ops.inplace_abn.was_written_to(what, name)
    return (
        f"inplace_abn: the {what} of {name or 'an in-place ABN'} has been modified in place, but its backward needs "
        "it. Replace that operation by one out of place (z = z + y for z += y), use ABN, or leave the layer out of the "
        "conversion (filter_fn)"
    )


def _is_comparable(z: Tensor) -> bool:
    """Whether z has values that the host may wait for."""
    return type(z) is Tensor and not z.is_meta and not _torch.is_capturing(z)


def _kinds(saved: Saved) -> list[Any]:
    return [None if t is None else (t.dtype, t.shape, t.device) for t in saved]


def _checksum(saved: Saved) -> Tensor:
    """The sums of all bits per channel, which are the same in any layout. They need no memory of z's size."""
    sums = []
    for t in saved:
        if t is not None:
            values = bits(t.detach())
            sums.append(values if t.dim() == 1 else values.sum([0, *range(2, t.dim())], dtype=values.dtype))
    return torch.cat(sums)


class Result(NamedTuple):
    """A call's result, and what else belongs to it if the result is not in x's memory."""

    z: Tensor
    saved: Tensor | None = None
    """What the node saves instead of z: a copy of z, or an alias that becomes a copy before somebody writes to z."""
    residual: Tensor | None = None
    """What the node saves instead of the residual, if there is one: an alias or a copy, as of z."""


class _Call:
    """What autograd need not see of a call. It has no activations, because the node would hold its own output."""

    __slots__ = ("beside", "edges", "has_copies", "hooked", "is_alias", "is_of_view", "overwrites", "settings")

    def __init__(
        self, x: Tensor, result: Result, operands: Operands, values: Values, settings: Settings, edge: Tensor | None
    ) -> None:
        weight, bias, residual, *_ = operands
        z, saved, of_residual = result
        self.settings: Settings = settings
        self.overwrites: bool = z is x
        self.is_of_view: bool = self.overwrites and _torch.is_view(x)
        self.is_alias: bool = saved is not None
        # Parameters that stand for themselves are saved with their places in the graph.
        self.has_copies: bool = values.weight is not weight or values.bias is not bias
        places = (edge_of_value(weight, values.weight), edge_of_value(bias, values.bias))
        self.edges: Edges = Edges(edge, *places, None if of_residual is None else edge_of_value(residual, of_residual))
        hooks = _torch.top_saved_tensors_hooks(True)
        is_usual = hooks is None and not settings.rows and not _torch.transforms_active()
        self.beside: Values | None = values if is_usual else None
        """Vectors that the node keeps beside what autograd saves, which takes longer. Hooks and transforms get all."""
        self.hooked: _Hooked | _Aliased | None = None
        if hooks is not None:
            given = z if saved is None else saved, residual if of_residual is None else of_residual
            self.hooked = _Hooked(values.saved(*given), hooks)
        elif saved is not None and saved.data_ptr() == z.data_ptr():
            self.hooked = _Aliased(z, saved)


class InPlaceABNFunction(torch.autograd.Function):
    """The node of z, which is x after the op has overwritten it, or ``result.z`` if the op wrote elsewhere."""

    @staticmethod
    def forward(x: Tensor, *inputs: Any) -> Tensor:
        *_, result, _, call = inputs
        return x if call.overwrites else result.z  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, bias, residual, var, edge, (_, saved, of_residual), values, call = inputs
        ctx.call, ctx.edges = call, call.edges if edge is None else Edges(edge)
        ctx.set_materialize_grads(False)
        if call.overwrites:
            ctx.mark_dirty(x)
        z, residual = output if saved is None else saved, residual if of_residual is None else of_residual
        if call.beside is None:
            parameters = values[:2] if call.has_copies else (weight, bias)
            ctx.save_for_backward(z, *parameters, residual, var, values.verbatim, values.rows)
        else:
            ctx.save_for_backward(z, residual)

    @staticmethod
    def backward(ctx: Any, dz: Tensor | None) -> tuple[Tensor | None, ...]:
        if dz is None:
            return (None,) * 9
        if _torch.is_batched(dz):
            raise RuntimeError(
                "inplace_abn: gradients in batches are not supported. Use ABN, or leave the layer out of the "
                "conversion (filter_fn)"
            )
        call: _Call = ctx.call
        settings, need = call.settings, Needed(*ctx.needs_input_grad[:4])
        maths = rows if settings.rows else backward
        # Compiled code is functional. The compiler reuses memory, so nothing is reused here.
        if torch.compiler.is_compiling():
            return *maths.gradients(need, _saved(ctx), dz, False, False, settings), *(None,) * 5
        # Only the engine passes gradients that nobody else holds. Other callers hold theirs, and may call again. If x
        # is a view, the engine runs the CopySlices node of its base, and that node calls this one.
        node = _torch.current_node()
        by_engine = node is ctx or (call.is_of_view and node is not None and node.name().endswith("CopySlices"))
        own_dz = by_engine and ownership.owns_gradient(dz, sys.getrefcount(dz))
        saved = _unpacked(ctx)
        if torch.is_grad_enabled():
            return *maths.differentiable(saved, dz, ctx.edges, settings), *(None,) * 5
        z = saved.z
        own_dz = own_dz and z.stride() == dz.stride()
        # Counts of holders are those of an output. They do not tell who else holds an alias.
        own_z = by_engine and not call.is_alias and not _is_hooked(ctx) and ownership.owns_output(z)
        # The tensor z is part of the graph. A gradient that takes its memory must be another tensor.
        saved = Saved(z.detach(), *saved[1:])
        found = maths.gradients(need, saved, dz, own_z, own_dz, settings)
        if by_engine and not _torch.keeps_graph():
            call.beside = None
        return *found, *(None,) * 5


# This is `torch.autograd.Function.apply` without its binding of default arguments, which takes longer than the rest of
# the call. The two do the same where no transform is active.
_apply = super(torch.autograd.Function, InPlaceABNFunction).apply


def is_ours(node: Any) -> bool:
    """Whether a node of the graph is one of the op's, in Python or in C++."""
    return "InPlaceABNFunction" in node.name()


def _is_hooked(ctx: Any) -> bool:
    """Whether saved-tensor hooks have packed the saved output. They may keep it or hand it out again."""
    return ctx._raw_saved_tensors[0].unpack_hook is not None


def _saved(ctx: Any) -> Saved:
    beside: Values | None = ctx.call.beside
    return Saved(*ctx.saved_tensors) if beside is None else beside.saved(*ctx.saved_tensors)


def _unpacked(ctx: Any) -> Saved:
    """The saved tensors.

    Raises:
        RuntimeError: the output was modified in place, or saved-tensor hooks gave back something else.
    """
    try:
        saved = _saved(ctx)
    except RuntimeError as error:
        text = str(error)
        if "modified by an inplace operation" in text:
            what = "output" if "InPlaceABNFunction" in text else "residual"
            raise RuntimeError(modified(what, ctx.call.settings.name)) from error
        raise
    hooked: _Hooked | _Aliased | None = ctx.call.hooked
    if hooked is not None:
        hooked.check(saved, ctx.call.settings.name)
    return saved


class TracedABNFunction(torch.autograd.Function):
    """The node for compilers, out of place.

    Compilers do not trace `InPlaceABNFunction` correctly: an x from outside of the compiled region would lose its
    gradient, and later writes to z would change what was saved.
    """

    @staticmethod
    def forward(x: Tensor, z: Tensor, *_: Any) -> Tensor:
        return z.view_as(z)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, _, weight, bias, residual, var, ctx.settings = inputs
        ctx.save_for_backward(output, weight, bias, residual, var)

    @staticmethod
    def backward(ctx: Any, dz: Tensor) -> tuple[Tensor | None, ...]:
        need_x, _, *need = ctx.needs_input_grad
        saved = Saved(*ctx.saved_tensors)
        dx, *others = backward.gradients(Needed(need_x, *need[:3]), saved, dz, False, False, ctx.settings)
        return dx, None, *others, None, None


def attached(
    x: Tensor, result: Result, operands: Operands, values: Values, settings: Settings, edge: Tensor | None
) -> Tensor:
    """Makes a node for z, which is already written, as a function of x. Returns z.

    If z is x itself, the op has overwritten x. Otherwise only x's place in the graph is read.
    """
    call = _Call(x, result, operands, values, settings, edge)
    weight, bias, residual, *_ = operands
    if call.overwrites and _torch.transforms_active():
        # Transforms wrap the edge at each of their levels, so it must be a visible input.
        z: Tensor = InPlaceABNFunction.apply(x, weight, bias, residual, values.var, edge, result, values, call)
    else:
        z = _apply(x, weight, bias, residual, values.var, None, result, values, call)
    if call.hooked is not None:
        call.hooked.start()
    return z


def as_identity(x: Tensor) -> Tensor:
    """Makes an identity node for x. It serves to calibrate `ownership`."""
    settings = Settings("identity", 0.0, 1e-5, MAGNITUDE, False, None)
    return attached(x, Result(x), Operands(None, None), Values(None, None, x.new_ones(x.shape[1])), settings, None)


_library = torch.library.Library("inplace_abn", "FRAGMENT")
_library.define(
    "differentiable(Tensor z, Tensor? weight, Tensor? bias, Tensor? residual, Tensor var, Tensor? rows, "
    "Tensor? verbatim, Tensor dz, Tensor?[] edges, float eps, int scale, int activation, float activation_param, "
    "bool training, int shared) -> Tensor[]"
)


def _differentiable(*args: Any) -> list[Tensor]:
    """`backward.differentiable` for the node in C++. A tensor without values stands for None."""
    z, weight, bias, residual, var, rows, verbatim, dz, edges, eps, scale, activation, param, training, shared = args
    settings = Settings(name_of(activation), param, eps, scale, training, None, shared)
    saved = Saved(z, weight, bias, residual, var, verbatim, rows)
    found = backward.differentiable(saved, dz, Edges(*edges), settings)
    return [dz.new_empty(0) if t is None else t for t in found]


_library.impl("differentiable", _differentiable, "CompositeImplicitAutograd")
