"""``inplace_abn`` and ``inplace_abn_sync``: the forward pass, local and synchronised.

The forward pass writes z over x, or to new memory, and keeps z instead of x ("In-Place Activated BatchNorm for
Memory-Optimized Training of DNNs", arXiv 1712.02616). `autograd.checks` refuses invalid calls before anything is
written. `autograd.forward` calls the ops, `autograd.nodes` makes the node of the graph, `autograd.backward` has the
backward pass, and `autograd.ownership` decides which memory backward may overwrite.

``INPLACE_ABN_DISABLE=1`` in the environment makes both functions work out of place, for debugging.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from inplace_abn import _torch, distributed, reference
from inplace_abn.activations import ACTIVATIONS, activate, check_activation
from inplace_abn.autograd import backward, checks, forward, nodes, ownership, plain
from inplace_abn.autograd.backward import Values
from inplace_abn.autograd.kept import KeptABNFunction
from inplace_abn.compiling import norms, trust
from inplace_abn.kernels import node, ops
from inplace_abn.settings import ChannelSlots, Operands, Settings, check_hyperparameters

_DISABLED = os.environ.get("INPLACE_ABN_DISABLE") == "1"
_node = None if _DISABLED else node.load()


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
    overwrite_input: bool = True,
) -> Tensor:
    """z = act(gamma * (x - mean) / sqrt(var + eps) + bias + residual), written over ``x``.

    Args:
        x: activations of shape (batch, channel, \\*), dtype float64, float32, bfloat16 or float16, in any strides
            without internal overlap. Overwritten with the result, unless ``overwrite_input`` is False.
        weight: (channel,) or None; scales by ``|weight| + eps``. float32 or x's dtype.
        bias: (channel,) or None. float32 or x's dtype.
        running_mean: (channel,) or None; updated in training, used otherwise.
        running_var: (channel,) or None; updated in training (with the unbiased variance), used otherwise.
        training: normalise with the statistics of ``x``; otherwise with the running ones, if there are any.
        momentum: share of the new statistics in the running ones. It may be a float64 tensor of one value on x's
            device, if only the device knows it.
        eps: added to the variance; also the smallest magnitude of the scale. Positive.
        activation: "identity" (or "none"), "leaky_relu", "elu", "relu", "silu", "hardswish",
            "gelu", "gelu_tanh", "mish".
        activation_param: slope of leaky_relu (>= 0; zero means relu), alpha of elu (> 0).
        signed_weight: scale by the weight itself instead of ``|weight| + eps``, as a standard BatchNorm does. The sign
            is kept, and the magnitude is at least ``eps``.
        residual: of x's shape, dtype and device, in memory of its own. It is added before the activation and kept for
            backward. That takes no extra memory if it is the input of a residual block, because that input is kept
            anyway.
        overwrite_input: whether the result takes x's memory. If not, ``x`` is unchanged, and not saved for backward. It
            may then be a leaf, a view, the residual itself, or a tensor that other ops need.

    Returns:
        ``x``, which now holds the result. If it is not overwritten, a new tensor of x's shape, dtype and memory format.

    Raises:
        ValueError: a wrong value or shape, only one value per channel in training, or an ``x`` that autograd forbids to
            overwrite. Nothing has been modified.
        TypeError: a dtype that is not supported or does not combine with x's.
        RuntimeError: the op that made ``x`` needs it for its own backward.

    Source: arXiv 1712.02616.
    """
    settings = Settings(activation, activation_param, eps, int(signed_weight), training or running_mean is None, None)
    return run(x, Operands(weight, bias, residual, running_mean, running_var, momentum), settings, overwrite_input)


def run(
    x: Tensor,
    operands: Operands,
    settings: Settings,
    overwrite_input: bool,
    keeps_input: bool = False,
    slots: ChannelSlots | None = None,
) -> Tensor:
    """`inplace_abn`, or `inplace_abn_sync` if there is a group. Compiled code saves xhat of the channels in ``slots``,
    if all statistics are of the batch and local."""
    check_activation(settings.activation, settings.activation_param)
    check_hyperparameters(settings.eps, operands.momentum)
    if settings.group is None:
        return local(x, operands, settings, overwrite_input, slots)
    return _forward(x, operands, settings, keeps_input, overwrite_input)


def local(
    x: Tensor, operands: Operands, settings: Settings, overwrite_input: bool, slots: ChannelSlots | None = None
) -> Tensor:
    """`inplace_abn` for settings that were checked and have no group."""
    if not overwrite_input:
        return _forward(x, operands, settings, overwrite_input=False, slots=slots)
    # Transforms would look for rules of the node's op, before it could say that it is not for them.
    refuses = torch.compiler.is_compiling() or _torch.transforms_active()
    z: Tensor | None = None
    if _node is not None and not refuses and ops.run_on(x.device) and not _torch.saves_its_result(x):
        z = _by_node(_node, x, operands, settings)
    return _forward(x, operands, settings, slots=slots) if z is None else z


def _by_node(compiled: node.Node, x: Tensor, operands: Operands, settings: Settings) -> Tensor | None:
    """The call by the node in C++; None if it needs Python."""
    what = *operands.momentum_arguments(), *settings.arithmetic(), settings.shared, *settings.saved(x.device)
    try:
        return compiled.inplace_abn(x, *operands.tensors(), settings.training, *what)  # type: ignore[no-any-return]
    except (ValueError, RuntimeError) as raised:
        if not settings.per_instance:
            checks.check_channels(x, operands)
        raise ops.as_python_error(raised) from None


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
    overwrite_input: bool = True,
    keeps_input: bool = False,
) -> Tensor:
    """`inplace_abn` with the statistics of all ranks of ``group`` (None: the default group).

    Ranks may have different batch and spatial sizes, and empty batches. In training, forward calls one all_gather, and
    backward one all_reduce. ``dweight`` and ``dbias`` are those of the rank's own share of the batch. Reduce them with
    the gradients of the other parameters, as DistributedDataParallel does. If torch.distributed is not initialised,
    statistics are local, and one warning is given. Statistics are local on a rank that is not in ``group``, too.

    With ``keeps_input``, x is kept for backward, as in torch, and the result is a new tensor. The collectives are the
    same either way, so ranks may differ in it.

    The other arguments, the result and the errors are those of `inplace_abn`. All ranks raise together if the whole
    batch has only one value per channel.
    """
    training = training or running_mean is None
    group = distributed.participating_group(group) if training else None
    settings = Settings(activation, activation_param, eps, int(signed_weight), training, group)
    operands = Operands(weight, bias, residual, running_mean, running_var, momentum)
    return run(x, operands, settings, overwrite_input, keeps_input)


def kept(x: Tensor, operands: Operands, settings: Settings, overwrite_input: bool) -> Tensor:
    """`autograd.plain.kept` with the errors of `run`: a module that keeps x for a while must not fail once it runs in
    place."""
    check_kept(x, operands, settings.training, overwrite_input)
    return plain.kept(x, operands, settings)


def check_kept(x: Tensor, operands: Operands, training: bool, overwrite_input: bool) -> None:
    """Raises the errors that the call in place would raise."""
    checks.check_channels(x, operands)
    if not must_run_out_of_place() and not torch.compiler.is_compiling():
        _check(x, operands, training, _requires_grad(x, operands), overwrite_input)
        if not _torch.transforms_active():
            ops.run(ops.check, [], x, *operands.tensors())


def _requires_grad(x: Tensor, operands: Operands) -> bool:
    if torch.is_grad_enabled():
        for t in (x, operands.weight, operands.bias, operands.residual):
            if t is not None and t.requires_grad:
                return True
    return False


def _count_sole_holders() -> None:
    ownership.set_sole_holders(*ownership.sole_holders(nodes.as_identity, ownership.last_counts, False))
    if _node is not None:
        compiled = _node
        # The C++ node builds graphs only after counts were set. With None it reuses nothing.
        compiled.set_sole_holders(None, None)
        identity = (1e-5, 0, ACTIVATIONS["identity"].code, 0.0, 0, None, 0)
        sole = ownership.sole_holders(
            lambda x: compiled.inplace_abn(x, None, None, None, None, None, True, 0.0, None, *identity),
            compiled.last_counts,
            True,
        )
        compiled.set_sole_holders(*sole)


def node_in_cpp() -> node.Node | None:
    """The node in C++, if there is one."""
    return _node


def is_disabled() -> bool:
    """Whether ``INPLACE_ABN_DISABLE=1`` makes every call out of place, for debugging."""
    return _DISABLED


def must_run_out_of_place() -> bool:
    """Whether the call must run torch's own ops, out of place.

    Tracers would record ops that have no gradient. Selective checkpointing skips an op whose result it has kept, and
    then what the op writes is missing.
    """
    if _DISABLED or _torch.is_exporting():
        return True
    if torch.compiler.is_compiling():
        return False
    return _torch.is_captured() or (_torch.count_dispatch_modes() > 0 and _torch.is_checkpointed_selectively())


def _forward(
    x: Tensor,
    operands: Operands,
    settings: Settings,
    keeps_input: bool = False,
    overwrite_input: bool = True,
    slots: ChannelSlots | None = None,
) -> Tensor:
    if must_run_out_of_place():
        return out_of_place(x, operands, settings)
    if not settings.per_instance:
        checks.check_channels(x, operands)
    requires_grad = _requires_grad(x, operands)
    compiling = torch.compiler.is_compiling()
    if not compiling:
        _check(x, operands, settings.training, requires_grad, overwrite_input)
        if settings.group is not None:
            ops.run(ops.check, [], x, *operands.tensors())
    if settings.training and settings.group is None and not settings.per_instance:
        checks.check_count(x)
    if not overwrite_input and _torch.transforms_active():
        # Under transforms the tensors that backward needs must be inputs of the node. So z is written over a copy of x,
        # which is an input.
        x, overwrite_input = x.clone(), True
    if compiling and requires_grad and settings.group is None and not settings.per_instance and x.numel() > 0:
        # Compilers remove this clone, except those that run the ops as they are.
        given = x.clone() if overwrite_input else x
        z: Tensor = _compiled(given, operands, settings, slots)
        return x.copy_(z) if overwrite_input else z
    statistics = None
    if settings.group is not None:
        statistics = forward.sync_statistics(x.detach(), operands, settings.group)
        if keeps_input:
            z = KeptABNFunction.apply(x, *operands.of_graph(), *statistics, settings)
            return z
    if not requires_grad:
        z = x if overwrite_input else torch.empty_like(x)
        forward.written(x, z, operands, settings, False, statistics)
        return z
    if compiling:
        # The compiler merges x, its clone, and the target of the copy below into one buffer.
        with torch.no_grad():
            data = x.clone()
            values = forward.written(data, data, operands, settings, True, statistics)
        z = nodes.TracedABNFunction.apply(x, data, *operands.of_graph(), values.var, settings)
        return x.copy_(z) if overwrite_input else z
    calibrate()
    data = x.detach()
    if not overwrite_input:
        z = torch.empty_like(data)
        values = forward.written(data, z, operands, settings, True, statistics)
        return attached(x, nodes.Result(z), operands, values, settings)
    edge = _input_edge(x, settings)
    values = forward.written(data, data, operands, settings, True, statistics)
    return nodes.attached(x, nodes.Result(x), operands, values, settings, edge)


def _compiled(x: Tensor, operands: Operands, settings: Settings, slots: ChannelSlots | None) -> Tensor:
    """The call for compilers: a norm and an activation, which `compiling.joint` fuses."""
    weight, residual = operands.weight, operands.residual
    param, eps = norms.constant(settings.activation_param), norms.constant(settings.eps)
    scale = None if weight is None else reference.gamma(weight, eps, settings.scale)
    trusted = trust.in_place(settings.activation, param)
    y = norms.normalised(x, operands._replace(weight=scale), settings.training, eps, trusted, slots)
    return activate(y if residual is None else y + residual, settings.activation, param)


def _input_edge(x: Tensor, settings: Settings) -> Tensor | None:
    # Under transforms x may need a gradient at another level than the current one.
    differentiated = x.requires_grad or _torch.transforms_active()
    return backward.input_edge(x) if settings.group is None and differentiated else None


def calibrate() -> None:
    """Calibrates `autograd.ownership`, once. This must happen before the first graph is built."""
    ownership.calibrate(_count_sole_holders)


def _check(x: Tensor, operands: Operands, training: bool, requires_grad: bool, overwrite_input: bool) -> None:
    """Raises for errors that the op does not detect."""
    if _torch.transforms_active() or _torch.in_forward_mode():
        checks.check_transforms((x, *operands.of_graph()))
    checks.check_tensors(x, operands)
    if requires_grad:
        checks.check_saved(operands, training)
    if overwrite_input:
        checks.check_overwritable(x, requires_grad)


def attached(x: Tensor, result: nodes.Result, operands: Operands, values: Values, settings: Settings) -> Tensor:
    """Makes a node for z, which `forward.written` wrote with these settings, as a function of x. Returns z.

    Args:
        x: of z's shape. It may have been overwritten since.
        result: z, which has no graph.
        values: what `forward.written` returned.
    """
    is_simple = result.saved is None and result.residual is None and not settings.rows
    if _node is not None and settings.group is None and is_simple:
        options = (settings.training, *settings.arithmetic(), settings.shared, settings.name)
        given = *values[:3], values.rows, values.verbatim
        found: Tensor | None = _node.attached(x, result.z, *operands.of_graph(), *given, *options)
        if found is not None:
            return found
    return nodes.attached(x, result, operands, values, settings, _input_edge(x, settings))


def out_of_place(x: Tensor, operands: Operands, settings: Settings) -> Tensor:
    """The call by torch's own ops."""
    if operands.weight is not None:
        operands = operands._replace(weight=reference.gamma(operands.weight, settings.eps, settings.scale))
    if settings.per_instance:
        return plain.of_samples(x, operands, settings)
    return plain.abn(x, operands, settings, False) if settings.group is None else plain.abn_sync(x, operands, settings)
