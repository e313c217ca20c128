"""Errors that are raised in Python, before anything is written. The ops check the rest."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from inplace_abn import _torch
from inplace_abn.activations import check_activation
from inplace_abn.autograd import nodes
from inplace_abn.autograd.backward import values_per_channel
from inplace_abn.kernels import ops
from inplace_abn.reference import wide
from inplace_abn.settings import Operands, Settings, check_hyperparameters

_TENSORS = Operands._fields[:-1]
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_REMEDY = ". Use overwrite_input=False, or ABN, which works out of place"


def check_call(
    x: Tensor,
    operands: Operands,
    settings: Settings,
    requires_grad: bool,
    overwrite_input: bool,
    is_plain: bool,
    asks_op: bool = False,
) -> None:
    """Raises for all that may be wrong with a call, and that its op does not find.

    Args:
        requires_grad: whether the call needs a graph.
        is_plain: whether torch's ops or a compiler make the call, which find the rest.
        asks_op: whether the op's own checks are made here, because something happens before the op.
    """
    check_activation(settings.activation, settings.activation_param)
    check_hyperparameters(settings.eps, operands.momentum)
    if settings.per_instance:
        check_instances(x, operands, settings.shared)
    else:
        check_channels(x, operands)
    if not is_plain:
        transforms = _torch.transforms_active()
        if transforms or _torch.in_forward_mode():
            check_transforms((x, *operands.of_graph()))
        check_tensors(x, operands)
        if requires_grad:
            check_saved(operands, settings.training)
        if overwrite_input:
            check_overwritable(x, requires_grad)
        if (asks_op and not transforms) or settings.group is not None:
            ops.run(ops.check, [], x, *operands.tensors())
        if transforms and settings.per_instance and operands.running_mean is not None:
            # Writing to a statistic that the transform has captured raises, and must not do so later.
            operands.running_mean.add_(0)
    if settings.training and settings.group is None and not settings.per_instance:
        check_count(x)


def name_layer(error: BaseException, name: str) -> None:
    """Makes the message of an error of this package name the layer."""
    text = str(error)
    if name and text.startswith("inplace_abn: ") and name not in text:
        error.args = (f"inplace_abn: {name}: {text.removeprefix('inplace_abn: ')}",)


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


def check_tensors(x: Tensor, operands: Operands) -> None:
    """Raises for errors that the ops cannot report, because device and layout choose the kernels that would check."""
    if x.layout is not torch.strided:
        raise ValueError(f"inplace_abn: expected a strided x, got layout {x.layout}")
    device = x.device
    if device.type != "meta" and type(x) in (Tensor, nn.Parameter) and not ops.run_on(device):
        raise ValueError(ops.why_not_on(device))
    others = [(name, getattr(operands, name)) for name in _TENSORS]
    for name, t in others:
        if t is not None and t.device != device:
            raise ValueError(f"inplace_abn: expected {name} on {device} like x, got {t.device}")
    for name, t in others if x.dtype in _DTYPES else ():
        expected = (x.dtype,) if name == "residual" else tuple(dict.fromkeys((x.dtype, wide(x.dtype))))
        if t is not None and t.dtype not in expected:
            raise TypeError(
                f"inplace_abn: expected {name} of dtype {' or '.join(map(str, expected))} for x of {x.dtype}, got "
                f"{t.dtype}. Give the input and the module one dtype, as x.to({t.dtype}) or module.to({x.dtype}) do"
            )
    if (operands.running_mean is None) != (operands.running_var is None):
        given = "running_mean" if operands.running_var is None else "running_var"
        raise ValueError(f"inplace_abn: expected running_mean and running_var both or neither, got only {given}")
    for name, t in (("x", x), *others):
        if t is not None and (t.is_neg() or t.is_conj()):
            raise ValueError(
                f"inplace_abn: expected {name} without torch's negative or conjugate bit, which its memory does not "
                f"show. Pass {name}.resolve_neg() instead"
            )


def check_saved(operands: Operands, training: bool) -> None:
    """Raises if autograd forbids keeping a tensor that backward needs.

    In evaluation the running variance is one of them.
    """
    for name in ("weight", "bias", "residual", *(() if training else ("running_var",))):
        t = getattr(operands, name)
        if t is not None and t.is_inference():
            raise ValueError(
                f"inplace_abn: {name} was made under torch.inference_mode() and cannot be saved for backward. Pass "
                f"{name}.clone()"
            )


def check_overwritable(x: Tensor, requires_grad: bool) -> None:
    """Raises if autograd forbids overwriting x. This is called before x is overwritten."""
    if x.is_inference() and not torch.is_inference_mode_enabled():
        raise ValueError(
            f"inplace_abn: x was made under torch.inference_mode() and cannot be overwritten outside it{_REMEDY}"
        )
    if not requires_grad:
        return
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
        ours = nodes.is_ours(t.grad_fn)
        if ours or _torch.saves_its_result(t):
            producer = "InPlaceABNFunction" if ours else t.grad_fn.name()
            raise RuntimeError(
                f"inplace_abn: x is the output of {producer}, which needs it for its own backward, so it cannot be "
                f"overwritten{_REMEDY}"
            )


def check_instances(x: Tensor, operands: Operands, shared: int) -> None:
    """Raises if ``shared`` channels of a sample have only one value, and so no statistics of their own. Also raises for
    vectors whose size is not the number of channels."""
    if isinstance(x, Tensor) and x.dim() < 3 and shared == 1:
        raise ValueError(f"inplace_abn: expected x of shape (batch, channel, space, *), got {tuple(x.shape)}")
    if isinstance(x, Tensor) and shared == 1 and math.prod(x.shape[2:]) == 1:
        raise ValueError(f"Expected more than 1 spatial element when training, got input size {x.shape}")
    check_channels(x, operands)


def check_channels(x: Tensor, operands: Operands) -> None:
    """Raises for an x that is no tensor, and for vectors whose size is not the number of its channels. Names x if they
    agree with each other."""
    if not isinstance(x, Tensor):
        raise TypeError(f"inplace_abn: expected x to be a torch.Tensor, got {type(x).__name__}")
    if x.dim() < 2:
        return
    given = {name: getattr(operands, name) for name in _TENSORS if name != "residual"}
    shapes = {name: tuple(t.shape) for name, t in given.items() if t is not None}
    wrong = [name for name, shape in shapes.items() if shape != (x.shape[1],)]
    if not wrong:
        return
    shape = shapes[wrong[0]]
    if len(wrong) == len(shapes) > 1 and len(set(shapes.values())) == 1 and len(shape) == 1:
        raise ValueError(
            f"inplace_abn: expected x of {shape[0]} channels, the size of {', '.join(wrong)}; got x of {x.shape[1]} "
            f"channels, of shape {tuple(x.shape)}"
        )
    raise ValueError(
        f"inplace_abn: expected {wrong[0]} of shape ({x.shape[1]},) for x of shape {tuple(x.shape)}, got {shape}"
    )


def check_count(x: Tensor, count: float | None = None) -> None:
    """Raises for one value per channel, which has no variance. An empty batch is valid, and leaves the running
    statistics alone.

    ``count`` is the number of values per channel of the whole batch, if x is a share of it.
    """
    if count is None:
        # The op refuses other shapes.
        count = values_per_channel(x) if x.dim() >= 2 else 0
    if count == 1:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {x.shape}")
