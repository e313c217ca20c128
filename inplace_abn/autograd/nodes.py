"""The graph nodes of the in-place op, in C++ and in Python. They save z instead of x.

The node in Python reuses the memory of z where `ownership` allows it; so does the one in C++ (``src/node/node.cpp``).
The op runs before its node is made, so that an op that fails leaves no trace in the graph. `backward` has the maths.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from inplace_abn import _torch
from inplace_abn.activations import IDENTITY, is_valid, name_of
from inplace_abn.autograd import backward, ownership, rows
from inplace_abn.autograd.backward import Edges, Needed, Saved, edge_of_value, input_edge
from inplace_abn.autograd.versions import Aliased, Hooked, modified, of_mode, refuse_batched
from inplace_abn.kernels import node, ops
from inplace_abn.reference import NORMS_OF_ROWS
from inplace_abn.settings import DISABLED, MAGNITUDE, Operands, Settings

cpp: node.Node | None = None if DISABLED else node.load()
"""The node in C++, if there is one."""


def in_cpp(x: Tensor, operands: Operands, settings: Settings) -> Tensor | None:
    """The call over x by the node in C++; None if it needs Python, or if the op refused it before it wrote anything.

    Running statistics are given for each sample, if samples have their own.
    """
    # Transforms would look for rules of the node's op, before it could say that it is not for them.
    if torch.compiler.is_compiling() or cpp is None or settings.group is not None or _torch.transforms_active():
        return None
    if not isinstance(x, Tensor) or not ops.run_on(x.device) or _torch.saves_its_result(x):
        return None
    # The nodes in C++ know each other.
    if type(x.grad_fn).__name__ == "InPlaceABNFunctionBackward":
        return None
    if not is_valid(settings.activation, settings.activation_param):
        return None
    what = (
        *operands.momentum_arguments(),
        *settings.arithmetic(),
        settings.shared,
        *settings.saved(x.device),
        settings.name,
    )
    try:
        return cpp.inplace_abn(x, *operands.tensors(), settings.training, *what)  # type: ignore[no-any-return]
    except (ValueError, RuntimeError) as raised:
        if not ops.is_refusal(raised):
            raise
        return None


class _Call:
    """What autograd need not see of a call. It has no activations, because the node would hold its own output."""

    __slots__ = ("edges", "hooked", "is_of_view", "is_other", "overwrites", "settings")

    def __init__(
        self, x: Tensor, z: Tensor, operands: Operands, saved: Saved, settings: Settings, edge: Tensor | None
    ) -> None:
        given = operands.of_graph()
        self.settings: Settings = settings
        self.overwrites: bool = z is x
        self.is_of_view: bool = self.overwrites and _torch.is_view(x)
        self.is_other: list[bool] = [mine is not own for mine, own in zip(saved, (z, *given), strict=False)]
        """Whether z, the weight, the bias and the residual are saved as copies or aliases. Those that are not are saved
        with their places in the graph."""
        self.edges: Edges = Edges(edge, *map(edge_of_value, given, saved[1:4]))
        hooks = _torch.top_saved_tensors_hooks(True)
        self.hooked: Hooked | Aliased = Aliased(z, operands.residual, saved) if hooks is None else Hooked(saved, hooks)


class InPlaceABNFunction(torch.autograd.Function):
    """The node of z, which is x after the op has overwritten it, or another tensor if the op wrote elsewhere."""

    @staticmethod
    def forward(x: Tensor, *inputs: Any) -> Tensor:
        *_, (z,), _, call = inputs
        return x if call.overwrites else z  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, bias, residual, var, edge, _, saved, call = inputs
        ctx.call, ctx.edges = call, call.edges if edge is None else Edges(edge)
        ctx.set_materialize_grads(False)
        if call.overwrites:
            ctx.mark_dirty(x)
        each = zip(saved, (output, weight, bias, residual), call.is_other, strict=False)
        z, *others = (other if is_other else own for other, own, is_other in each)
        others += var, saved.verbatim, saved.rows
        ctx.save_for_backward(*of_mode(call.settings), z, *map(_savable, others))

    @staticmethod
    def backward(ctx: Any, dz: Tensor | None) -> tuple[Tensor | None, ...]:
        if dz is None:
            return (None,) * 9
        call: _Call = ctx.call
        refuse_batched(dz, call.settings.name)
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
        own_z = by_engine and not call.is_other[0] and not _is_hooked(ctx) and ownership.owns_output(z)
        # The tensor z is part of the graph. A gradient that takes its memory must be another tensor.
        saved = Saved(z.detach(), *saved[1:])
        return *maths.gradients(need, saved, dz, own_z, own_dz, settings), *(None,) * 5


# This is `torch.autograd.Function.apply` without its binding of default arguments, which takes longer than the rest of
# the call. The two do the same where no transform is active.
_apply = super(torch.autograd.Function, InPlaceABNFunction).apply


def _savable(t: Tensor | None) -> Tensor | None:
    """The tensor, or a copy of one that was made in inference mode, which autograd does not save."""
    if t is None or not t.is_inference():
        return t
    with torch.inference_mode(False):
        return t.clone()


def is_ours(node: Any) -> bool:
    """Whether a node of the graph is one of the op's, in Python or in C++."""
    return "InPlaceABNFunction" in node.name()


def _is_hooked(ctx: Any) -> bool:
    """Whether saved-tensor hooks have packed the saved output. They may keep it or hand it out again."""
    return ctx._raw_saved_tensors[0].unpack_hook is not None


def _saved(ctx: Any) -> Saved:
    return Saved(*ctx.saved_tensors[-len(Saved._fields) :])


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
    ctx.call.hooked.check(saved, ctx.call.settings.name)
    return saved


def place_of(x: Tensor, settings: Settings) -> Tensor | None:
    """x's place in the graph, to be asked for before x is overwritten; None if the node does not need it."""
    # Under transforms x may need a gradient at another level than the current one.
    differentiated = x.requires_grad or _torch.transforms_active()
    return input_edge(x) if settings.group is None and differentiated else None


def attached(
    x: Tensor, z: Tensor, operands: Operands, saved: Saved, settings: Settings, edge: Tensor | None = None
) -> Tensor:
    """Makes a node for z, which `forward.written` wrote with these settings, as a function of x. Returns z.

    Args:
        x: of z's shape. Only its place in the graph is read.
        z: it has no graph, or is x itself, which the op has overwritten.
        saved: what `forward.written` returned. Instead of z and the residual it may have copies, or aliases that become
            copies before somebody writes to z or the residual.
        edge: `place_of` x before it was overwritten.
    """
    overwrites = z is x
    is_simple = saved.z is z and saved.residual is operands.residual and not settings.rows
    if cpp is not None and not overwrites and settings.group is None and is_simple:
        options = (settings.training, *settings.arithmetic(), settings.shared, settings.name)
        given = saved.weight, saved.bias, saved.var, saved.rows, saved.verbatim
        found: Tensor | None = cpp.attached(x, z, *operands.of_graph(), *given, *options)
        if found is not None:
            return found
    return _attached(x, z, operands, saved, settings, edge if overwrites else place_of(x, settings))


def _attached(
    x: Tensor, z: Tensor, operands: Operands, saved: Saved, settings: Settings, edge: Tensor | None
) -> Tensor:
    call = _Call(x, z, operands, saved, settings, edge)
    given = *operands.of_graph(), saved.var
    if call.overwrites and _torch.transforms_active():
        # Transforms wrap the edge at each of their levels, so it must be a visible input.
        result: Tensor = InPlaceABNFunction.apply(x, *given, edge, (z,), saved, call)
    else:
        result = _apply(x, *given, None, (z,), saved, call)
    call.hooked.start()
    return result


def calibrate() -> None:
    """Calibrates `autograd.ownership`, once. This must happen before the first graph is built."""
    ownership.calibrate(count_sole_holders)


def count_sole_holders() -> None:
    """Sets the counts of holders for both nodes."""
    ownership.set_sole_holders(*ownership.sole_holders(_as_identity, ownership.last_counts, False))
    if cpp is not None:
        compiled = cpp
        # The C++ node builds graphs only after counts were set. With None it reuses nothing.
        compiled.set_sole_holders(None, None)
        what = *_IDENTITY.arithmetic(), 0, None, 0, ""
        sole = ownership.sole_holders(
            lambda x: compiled.inplace_abn(x, None, None, None, None, None, True, 0.0, None, *what),
            compiled.last_counts,
            True,
        )
        compiled.set_sole_holders(*sole)


_IDENTITY = Settings(*IDENTITY, 1e-5, MAGNITUDE, False, None)


def _as_identity(x: Tensor) -> Tensor:
    saved = Saved(x, None, None, None, x.new_ones(x.shape[1]))
    return _attached(x, x, Operands(None, None), saved, _IDENTITY, None)


_library = torch.library.Library("inplace_abn", "FRAGMENT")
_library.define(
    "differentiable(Tensor z, Tensor? weight, Tensor? bias, Tensor? residual, Tensor var, Tensor? rows, "
    "Tensor? verbatim, Tensor dz, Tensor?[] edges, float eps, int scale, int activation, float activation_param, "
    "bool training, int shared, int norm_of_rows) -> Tensor[]"
)


def _differentiable(*args: Any) -> list[Tensor]:
    """`backward.differentiable` for the node in C++. A tensor without values stands for None."""
    z, weight, bias, residual, var, places, verbatim, dz, edges, eps, scale, *others = args
    activation, param, training, shared, norm_of_rows = others
    kind = NORMS_OF_ROWS[norm_of_rows]
    settings = Settings(name_of(activation), param, eps, scale, training, None, shared, rows=kind)
    saved = Saved(z, weight, bias, residual, var, verbatim, places)
    found = (rows if kind else backward).differentiable(saved, dz, Edges(*edges), settings)
    return [dz.new_empty(0) if t is None else t for t in found]


_library.impl("differentiable", _differentiable, "CompositeImplicitAutograd")
