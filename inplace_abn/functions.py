"""``inplace_abn`` and ``inplace_abn_sync``, and how autograd sees them.

The forward pass writes z over x and keeps z alone ("In-Place Activated BatchNorm for Memory-Optimized Training of
DNNs", arXiv 1712.02616). The op has run before autograd is told, so that an op that fails leaves no trace in the graph.
`gradients` has the backward pass, `ownership` decides what it may overwrite.

``INPLACE_ABN_DISABLE=1`` in the environment makes both functions work out of place, for debugging.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from inplace_abn import _torch, collectives, gradients, guard, node, ops, ownership, plain, reference
from inplace_abn.activations import ACTIVATIONS, check_activation, name_of
from inplace_abn.gradients import Needed, Saved, values_per_channel
from inplace_abn.kept import KeptABNFunction
from inplace_abn.settings import Settings, check_hyperparameters

_DISABLED = os.environ.get("INPLACE_ABN_DISABLE") == "1"
_node = None if _DISABLED else node.load()
_REMEDY = ". Pass x.clone(), or use ABN, which works out of place"


def inplace_abn(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool = True,
    momentum: float | Tensor = 0.1,
    eps: float = 1e-5,
    activation: str = "leaky_relu",
    activation_param: float = 0.01,
    *,
    signed_weight: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """z = act(gamma * (x - mean) / sqrt(var + eps) + bias + residual), written over ``x``.

    Args:
        x: activations of shape (batch, channel, \\*), dtype float64, float32, bfloat16 or float16, in any strides
            without internal overlap. Overwritten with the result.
        weight: (channel,) or None; scales by ``|weight| + eps``. float32 or x's dtype.
        bias: (channel,) or None. float32 or x's dtype.
        running_mean: (channel,) or None; updated in training, used otherwise.
        running_var: (channel,) or None; updated in training (with the unbiased variance), used otherwise.
        training: normalise with the statistics of ``x``; otherwise with the running ones, if there are any.
        momentum: share of the new statistics in the running ones; a float64 tensor of one value on x's device where
            it is only known there.
        eps: added to the variance, and the least that scales. Positive.
        activation: "identity" (or "none"), "leaky_relu", "elu", "relu", "silu", "hardswish".
        activation_param: slope of leaky_relu (>= 0; zero means relu), alpha of elu (> 0).
        signed_weight: scale by the weight itself, sign kept and at least ``eps`` in magnitude, as a standard
            BatchNorm's weight needs it, instead of by ``|weight| + eps``.
        residual: of x's shape, dtype and device, in memory of its own; added before the activation. Saved beside the
            result, because it is alive anyway: it is the input of the block it bridges.

    Returns:
        ``x``, which now holds the result.

    Raises:
        ValueError: a wrong value or shape, one value per channel in training, or an ``x`` that autograd does not let
            be overwritten. Nothing has been modified.
        TypeError: a dtype that is not supported or does not combine.
        RuntimeError: ``x``'s producer needs it for its own backward.

    Source: arXiv 1712.02616.
    """
    check_activation(activation, activation_param)
    check_hyperparameters(eps, momentum)
    training = training or running_mean is None
    if _node is not None and not torch.compiler.is_compiling() and not _torch.saves_its_result(x):
        try:
            z: Tensor | None = _node.inplace_abn(
                x,
                weight,
                bias,
                residual,
                running_mean,
                running_var,
                training,
                *_momentum_arguments(momentum),
                eps,
                signed_weight,
                ACTIVATIONS[activation].code,
                activation_param,
            )
        except (ValueError, RuntimeError) as raised:
            raise ops.translated(raised) from None
        if z is not None:
            return z
    settings = Settings(activation, activation_param, eps, signed_weight, training, None)
    return _forward(x, weight, bias, residual, running_mean, running_var, momentum, settings)


def inplace_abn_sync(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool = True,
    momentum: float | Tensor = 0.1,
    eps: float = 1e-5,
    activation: str = "leaky_relu",
    activation_param: float = 0.01,
    group: ProcessGroup | None = None,
    *,
    signed_weight: bool = False,
    residual: Tensor | None = None,
    watch: guard.Frozen | None = None,
) -> Tensor:
    """`inplace_abn` with the statistics of all ranks of ``group`` (None: the default group).

    Ranks may have different batch and spatial sizes, also empty ones. Forward has one all_gather, backward one
    all_reduce, both in training only. ``dweight`` and ``dbias`` are those of the rank's own share of the batch, to be
    reduced with the other parameters' gradients (as DistributedDataParallel does). If torch.distributed is not
    initialised, statistics are local, with one warning; so they are on a rank that is not in ``group``.

    ``watch`` is the guard's part of a module's call: while it does not trust z, the result is a new tensor and x is
    kept, with the same collectives.

    Arguments, result and errors are those of `inplace_abn`; all ranks raise together where the whole batch has less
    than two values per channel.
    """
    check_activation(activation, activation_param)
    check_hyperparameters(eps, momentum)
    training = training or running_mean is None
    group = collectives.participating_group(group) if training else None
    if group is None:
        return inplace_abn(
            x,
            weight,
            bias,
            running_mean,
            running_var,
            training,
            momentum,
            eps,
            activation,
            activation_param,
            signed_weight=signed_weight,
            residual=residual,
        )
    settings = Settings(activation, activation_param, eps, signed_weight, training, group)
    return _forward(x, weight, bias, residual, running_mean, running_var, momentum, settings, watch)


class _Edge:
    """A tensor that autograd is not to take for an input."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class _Watch:
    """Tells whether a tensor was written to, without holding its memory."""

    def __init__(self, t: Tensor) -> None:
        # What shares a version counter goes on sharing it when it gets other memory.
        self._counter = t.detach()
        self._counter.data = t.new_empty(0)
        self.version = 0

    def start(self) -> None:
        self.version = self._counter._version

    def is_modified(self) -> bool:
        return self._counter._version != self.version


class InPlaceABNFunction(torch.autograd.Function):
    """Declares that x has become z."""

    @staticmethod
    def forward(
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        var: Tensor,
        settings: Settings,
        edge: _Edge | Tensor | None,
        watch: _Watch | None,
    ) -> Tensor:
        return x

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, *others, ctx.settings, ctx.edge, ctx.watch = inputs
        ctx.of_view = _torch.is_view(x)
        ctx.mark_dirty(x)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(output, *others)

    @staticmethod
    def backward(ctx: Any, dz: Tensor | None) -> tuple[Tensor | None, ...]:
        if dz is None:
            return (None,) * 8
        if _torch.is_batched(dz):
            raise RuntimeError("inplace_abn: gradients in batches are not supported. Use ABN, which works out of place")
        settings: Settings = ctx.settings
        need = Needed(*ctx.needs_input_grad[:4])
        # Compiled code is functional: nothing is reused, the compiler does that.
        if torch.compiler.is_compiling():
            return (
                *gradients.gradients(need, Saved(*ctx.saved_tensors), dz, False, False, settings),
                None,
                None,
                None,
                None,
            )
        # Called by anybody else than the engine, backward is given what its caller holds, and will be called again.
        # For the node of a view, autograd's own node of the base stands in.
        node = _torch.current_node()
        by_engine = node is ctx or (ctx.of_view and node is not None and node.name().endswith("CopySlices"))
        own_dz = by_engine and ownership.owns_gradient(dz, sys.getrefcount(dz))
        saved = _unpacked(ctx)
        if torch.is_grad_enabled():
            edge = ctx.edge.tensor if isinstance(ctx.edge, _Edge) else ctx.edge
            return *gradients.differentiable(saved, dz, edge, settings), None, None, None, None
        z = saved.z
        own_dz = own_dz and z.stride() == dz.stride()
        own_z = by_engine and not _is_hooked(ctx) and ownership.owns_output(z)
        # z itself is part of the graph, its memory as a gradient must not be.
        saved = saved._replace(z=z.detach())
        return *gradients.gradients(need, saved, dz, own_z, own_dz, settings), None, None, None, None


# What `torch.autograd.Function.apply` comes to where no transform is active, without the binding of default arguments
# that takes longer than all the rest.
_apply = super(torch.autograd.Function, InPlaceABNFunction).apply


def _is_hooked(ctx: Any) -> bool:
    """Whether the output that was saved goes through hooks, which may keep it or hand it out again."""
    return ctx._raw_saved_tensors[0].unpack_hook is not None


def _unpacked(ctx: Any) -> Saved:
    """What was saved. Raises RuntimeError if the output was written to, also where saved-tensor hooks keep autograd
    from noticing; what they hand out may be a copy made in time, though, or the output itself."""
    modified = (
        "inplace_abn: the output of an in-place ABN has been modified in place, but its backward needs it. "
        "Replace that operation by one out of place (z = z + y for z += y), or use ABN"
    )
    try:
        saved = Saved(*ctx.saved_tensors)
    except RuntimeError as error:
        if "InPlaceABNFunction" in str(error) and "modified by an inplace operation" in str(error):
            raise RuntimeError(modified) from error
        raise
    watch: _Watch | None = ctx.watch
    if watch is not None and watch.is_modified() and saved.z._version > watch.version:
        raise RuntimeError(modified)
    return saved


class TracedABNFunction(torch.autograd.Function):
    """For compilers: out of place. What `InPlaceABNFunction` does is beyond them: what is written under no_grad loses
    its gradient if x comes from outside of the compiled region, and later writes to z change what was saved."""

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
    """x, whose content is z by now, with its place in the graph."""
    apply = InPlaceABNFunction.apply if _torch.transforms_active() else _apply
    # Hooks may take the output elsewhere, and autograd does not check the versions of what they hand out.
    watch = None if _torch.top_saved_tensors_hooks(True) is None else _Watch(x)
    # Transforms wrap it at each of their levels, so they have to see it.
    hidden = edge if edge is None or _torch.transforms_active() else _Edge(edge)
    z: Tensor = apply(x, weight, bias, residual, var, settings, hidden, watch)
    if watch is not None:
        watch.start()
    return z


def _as_identity(x: Tensor) -> Tensor:
    """x with the place in the graph that an identity has, of which ownership is calibrated."""
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
) -> gradients.Gradients:
    """`gradients.differentiable` for the node in C++."""
    settings = Settings(name_of(activation), activation_param, eps, signed_weight, training, None)
    return gradients.differentiable(Saved(z, weight, bias, residual, var), dz, edge, settings)


def check_transforms(tensors: tuple[Tensor | None, ...]) -> None:
    """Raises for vmap and forward-mode differentiation, at every level of torch.func's transforms."""
    kinds = {kind for t in tensors if t is not None for kind in _torch.kinds_of_wrappers(t)}
    if "vmap" in kinds:
        raise ValueError(
            "inplace_abn: vmap is not supported: batch statistics mix the samples it separates. Use ABN, which works "
            "out of place"
        )
    if "jvp" in kinds:
        raise ValueError(
            "inplace_abn: forward-mode differentiation is not supported. Use ABN, which works out of place"
        )


def _check_tensors(x: Tensor, **others: Tensor | None) -> None:
    """Raises for what the ops, which are chosen by device and layout, would not see as an error of this one."""
    if x.layout is not torch.strided:
        raise ValueError(f"inplace_abn: expected a strided x, got layout {x.layout}")
    device = x.device
    for name, t in others.items():
        if t is not None and t.device != device:
            raise ValueError(f"inplace_abn: expected {name} on {device} like x, got {t.device}")
    if (others["running_mean"] is None) != (others["running_var"] is None):
        given = "running_mean" if others["running_var"] is None else "running_var"
        raise ValueError(f"inplace_abn: expected running_mean and running_var both or neither, got only {given}")
    for name, t in (("x", x), *others.items()):
        if t is not None and (t.is_neg() or t.is_conj()):
            raise ValueError(
                f"inplace_abn: expected {name} without torch's negative or conjugate bit, which its memory does not "
                f"show. Pass {name}.resolve_neg() instead"
            )


def _check_overwritable(x: Tensor, requires_grad: bool, **saved: Tensor | None) -> None:
    """Raises if autograd does not let x be overwritten, or ``saved`` be kept for backward, before x is."""
    if x.is_inference() and not torch.is_inference_mode_enabled():
        raise ValueError(
            f"inplace_abn: x was made under torch.inference_mode() and cannot be overwritten outside it{_REMEDY}"
        )
    if not requires_grad:
        return
    for name, t in saved.items():
        if t is not None and t.is_inference():
            raise ValueError(
                f"inplace_abn: {name} was made under torch.inference_mode() and cannot be saved for backward. Pass "
                f"{name}.clone()"
            )
    if x.is_leaf and x.requires_grad:
        raise ValueError(f"inplace_abn: x is a leaf that requires grad and cannot be overwritten{_REMEDY}")
    base = None
    if _torch.is_view(x):
        if _torch.creation_meta(x) != _torch.CREATED_BY_DEFAULT:
            raise ValueError(
                "inplace_abn: autograd does not let x be overwritten, because it is one of several views made by one "
                "call (chunk, split, unbind), a view made by a custom autograd function or a module's backward hook, "
                f"or a view made under no_grad{_REMEDY}"
            )
        base = x._base
        if x.requires_grad and base is not None and base.is_leaf:
            raise ValueError(
                f"inplace_abn: x is a view of a leaf that requires grad and cannot be overwritten{_REMEDY}"
            )
    for t in (x, base):
        if t is None or t.grad_fn is None:
            continue
        name = t.grad_fn.name()
        ours = "InPlaceABNFunction" in name
        if ours or _torch.saves_its_result(t):
            producer = "InPlaceABNFunction" if ours else name
            raise RuntimeError(
                f"inplace_abn: x is the output of {producer}, which needs it for its own backward, so it cannot be "
                f"overwritten{_REMEDY}"
            )


def _requires_grad(*tensors: Tensor | None) -> bool:
    if torch.is_grad_enabled():
        for t in tensors:
            if t is not None and t.requires_grad:
                return True
    return False


def _observe_sole_holders() -> None:
    ownership.set_sole_holders(*ownership.sole_holders(_as_identity, ownership.last_observed, False))
    if _node is not None:
        compiled = _node
        # Without holders nothing is reused; with them set, graphs are built.
        compiled.set_sole_holders(None, None)
        identity = (1e-5, False, ACTIVATIONS["identity"].code, 0.0)
        sole = ownership.sole_holders(
            lambda x: compiled.inplace_abn(x, None, None, None, None, None, True, 0.0, None, *identity),
            compiled.last_observed,
            True,
        )
        compiled.set_sole_holders(*sole)


def _check_count(x: Tensor, count: float | None = None) -> None:
    """Raises for one value per channel, which has no variance; an empty batch leaves the running statistics alone.

    ``count`` is that of the whole batch where x is a share of it."""
    if count is None:
        # Anything else is refused by the op.
        count = values_per_channel(x) if x.dim() >= 2 else 0
    if count == 1:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {x.shape}")


def _is_plain() -> bool:
    """Whether the call has to be torch's own ops out of place: tracers record what runs, and would record ops without
    gradients; selective checkpointing skips ops whose results it kept, and with them what they write."""
    if _DISABLED or _torch.is_exporting():
        return True
    if torch.compiler.is_compiling():
        return False
    return _torch.is_captured() or (_torch.count_dispatch_modes() > 0 and _torch.is_checkpointed_selectively())


def _forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float | Tensor,
    settings: Settings,
    watch: guard.Frozen | None = None,
) -> Tensor:
    if _is_plain():
        return _out_of_place(x, weight, bias, residual, running_mean, running_var, momentum, settings)
    tensors = (x, weight, bias, residual)
    requires_grad = _requires_grad(*tensors)
    compiling = torch.compiler.is_compiling()
    if not compiling:
        if _torch.transforms_active() or _torch.in_forward_mode():
            check_transforms(tensors)
        _check_tensors(
            x, weight=weight, bias=bias, residual=residual, running_mean=running_mean, running_var=running_var
        )
        var = None if settings.training else running_var
        _check_overwritable(x, requires_grad, weight=weight, bias=bias, residual=residual, running_var=var)
        if settings.group is not None:
            ops.run(ops.check, [], x, weight, bias, residual, running_mean, running_var)
    if settings.training and settings.group is None:
        _check_count(x)
    statistics = None
    if settings.group is not None:
        statistics, trusted = _sync_statistics(x.detach(), running_mean, running_var, momentum, settings.group, watch)
        if not trusted:
            z: Tensor = KeptABNFunction.apply(x, weight, bias, residual, *statistics, settings)
            return z
    write = partial(_write, statistics=statistics)
    if not requires_grad:
        write(x, weight, bias, residual, running_mean, running_var, momentum, settings, invertible=False)
        return x
    if compiling:
        # The compiler makes one buffer of x, its clone and the copy below.
        with torch.no_grad():
            data = x.clone()
            var = write(data, weight, bias, residual, running_mean, running_var, momentum, settings, invertible=True)
        return x.copy_(TracedABNFunction.apply(x, data, weight, bias, residual, var, settings))
    if not ownership.is_calibrated():
        ownership.calibrate(_observe_sole_holders)
    # Under transforms x may need a gradient at another level than this one.
    differentiated = x.requires_grad or _torch.transforms_active()
    edge = gradients.input_edge(x) if settings.group is None and differentiated else None
    var = write(x.detach(), weight, bias, residual, running_mean, running_var, momentum, settings, invertible=True)
    return overwritten(x, weight, bias, residual, var, settings, edge)


def _write(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float | Tensor,
    settings: Settings,
    invertible: bool,
    statistics: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Writes z over x, and returns the variance that backward needs. What makes z invertible costs a little of its
    exactness, and is left out where no backward will follow."""
    if settings.training and settings.group is None:
        _, var = ops.run(
            ops.local_forward,
            _written(x, running_mean, running_var),
            x,
            weight,
            bias,
            residual,
            running_mean,
            running_var,
            *_momentum_arguments(momentum),
            *settings.arithmetic(),
            invertible,
        )
        return cast(Tensor, var)
    mean, var = statistics or (cast(Tensor, running_mean), cast(Tensor, running_var))
    ops.run(ops.forward, [x], x, mean, var, weight, bias, residual, *settings.arithmetic(), invertible)
    # Training may change the running variance before backward needs what it was.
    return var if settings.training or not invertible else var.clone()


def _momentum_arguments(momentum: float | Tensor) -> tuple[float, Tensor | None]:
    return (0.0, momentum) if isinstance(momentum, Tensor) else (momentum, None)


def _written(*tensors: Tensor | None) -> list[Tensor]:
    return [t for t in tensors if t is not None]


def _sync_statistics(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float | Tensor,
    group: ProcessGroup,
    watch: guard.Frozen | None,
) -> tuple[tuple[Tensor, Tensor], bool]:
    """Mean and biased variance over all ranks, and whether the guard trusts z. A rank that has several values knows
    that the whole batch has; only others look at the gathered counts (which waits for the device), so that all ranks
    raise together or none does. The guard's figures are there in every call, measured or not, so that ranks agree on
    what is gathered."""
    count = values_per_channel(x)
    mean, var = ops.run(ops.statistics, [], x)
    figures = mean.new_zeros(guard.WIDTH) if watch is None else watch.figures(x).to(mean.dtype)
    packed = torch.cat([mean, var, mean.new_full((1,), count), figures])
    everything = collectives.all_gather(packed, group)
    gathered = everything[:, : -guard.WIDTH].contiguous()
    if not torch.compiler.is_compiling() and count < 2:
        _check_count(x, gathered[:, -1].sum().item())
    mean, var, _ = ops.run(
        ops.combine,
        _written(running_mean, running_var),
        gathered,
        running_mean,
        running_var,
        *_momentum_arguments(momentum),
    )
    return (mean, var), watch is None or watch.trusts(everything[:, -guard.WIDTH :])


def _out_of_place(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float | Tensor,
    settings: Settings,
) -> Tensor:
    scale = None if weight is None else reference.gamma(weight, settings.eps, settings.signed_weight)
    what = (settings.eps, settings.activation, settings.activation_param, residual)
    if settings.group is None:
        return plain.abn(x, scale, bias, running_mean, running_var, settings.training, momentum, *what, inplace=False)
    return plain.abn_sync(x, scale, bias, running_mean, running_var, momentum, *what, settings.group)
