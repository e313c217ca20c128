"""Finds out whether a class computes a layer norm or an RMS norm, and of what.

Every package has norm classes of its own. A class is tried with other weights on some rows that tell formulas apart,
forward and backward. That says nothing about other calls, and a trial may have effects, so only classes are tried whose
code does nothing else as far as can be read, or that come from packages that are known.
"""

from __future__ import annotations

import builtins
import dis
import itertools
import types
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from inplace_abn.reference import LAYER, RMS, normalised_rows, wide
from inplace_abn.settings import NAMES, Names, names_of, parameters

_PACKAGES = ("torch", "timm", "transformers", "diffusers", "torchvision", "monai")
"""The packages whose norms are tried without a look at their code."""
ATTRIBUTES = ("eps", "variance_epsilon", "normalized_shape", "data_format", "dim")
"""The attributes of a module, besides its parameters, by which it may compute."""
_NAMES = frozenset(
    [
        *(*ATTRIBUTES, "weight", "bias", "forward", "nn", "functional", "layer_norm", "rms_norm", "promote_types"),
        *("mean", "var", "pow", "square", "sqrt", "rsqrt", "add", "sub", "mul", "div"),
        *("float", "double", "to", "type_as", "dtype", "float32", "shape", "size", "dim", "ndim", "numel"),
        *("permute", "transpose", "movedim", "contiguous", "view", "reshape", "unsqueeze"),
    ]
)
"""The attributes that code may refer to, besides methods of its class whose code is like that, too."""
_SIMPLE = (int, float, str, tuple, type(None))
_PARAMETERS = ("weight", "bias")
_WRITING = (
    *("STORE_ATTR", "STORE_GLOBAL", "STORE_SUBSCR", "STORE_SLICE"),
    *("DELETE", "IMPORT", "INPLACE", "YIELD", "RAISE"),
)
_GLOBALS = (torch, nn, F, super)
"""What else it may refer to."""


class Kind(NamedTuple):
    """How a norm computes."""

    rows: str
    """`reference.LAYER` or `reference.RMS`."""
    axis: int
    """The dimension that is normalised: the last one, or that of channels."""
    offset: float
    """What is added to the weight: some classes keep the scale less 1."""
    eps: float
    is_torch: bool
    """Whether the result has the bits and the strides of ``torch.native_layer_norm``."""
    dtype: torch.dtype
    """That of the result."""


def register_norm(
    cls: type[nn.Module],
    kind: str,
    *,
    weight: str = "weight",
    bias: str = "bias",
    offset: float = 0.0,
    eps: str = "eps",
) -> None:
    """Makes `inplace_abn.convert` take a class for a layer norm or an RMS norm, over the last dimension or channels.

    Classes that torch and well-known packages have, and those whose code does nothing else, are found without it. The
    first call of a module still compares its results and gradients with the formula, and leaves it as it is if they are
    others.

    Args:
        cls: the class. Its forward pass gets one tensor, and computes the formula for every input. It depends on
            the input, the parameters, and attributes that are numbers, strings and tuples; not on chance. It changes
            nothing.
        kind: "layer" for xhat = (x - mean) / sqrt(var + eps), "rms" for xhat = x / sqrt(mean(x^2) + eps).
        weight, bias: names of the parameters of shape (channel,), which a module may lack.
        offset: what is added to the weight: the result is (weight + offset) * xhat + bias.
        eps: the name of the attribute.

    Raises:
        TypeError: ``cls`` is no class of modules.
        ValueError: another ``kind``.
    """
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise TypeError(f"inplace_abn.register_norm: expected a subclass of torch.nn.Module, got {cls!r}")
    if kind not in (LAYER, RMS):
        raise ValueError(f"inplace_abn.register_norm: expected kind to be {LAYER!r} or {RMS!r}, got {kind!r}")
    NAMES[cls] = Names(weight, bias, eps, kind, float(offset))


def length(module: Any) -> int:
    """The length of the rows that a module normalises; 0 if it does not normalise rows as far as can be seen."""
    weight, bias = parameters(module)
    for t in (weight, bias):
        if t is not None and (not isinstance(t, Tensor) or nn.parameter.is_lazy(t) or t.dim() != 1):
            return 0
    shape = vars(module).get("normalized_shape", vars(module).get("dim"))
    if weight is not None or not isinstance(shape, tuple) or len(shape) != 1 or not isinstance(shape[0], int):
        return 0 if weight is None else weight.numel()
    return shape[0]


def why_not_tried(module: nn.Module) -> str:
    """Why the forward pass of a module may not be tried, in words; empty if it may."""
    names = names_of(type(module))
    if length(module) == 0:
        return f"it has no {names.weight} of one dimension, and no normalized_shape of one number"
    others = [*module._modules, *module._buffers, *sorted(module._parameters.keys() - set(names[:2]))]
    if names.kind and not module._modules:
        return ""
    if others:
        return f"it has {', '.join(others)} besides a weight and a bias"
    # Wrappers make parameters plain tensors.
    kinds = dict.fromkeys(ATTRIBUTES, _SIMPLE) | dict.fromkeys(_PARAMETERS, (Tensor, type(None)))
    given = {name: value for name, value in vars(module).items() if name in _NAMES}
    unknown = [n for n, value in given.items() if not isinstance(value, kinds.get(n, ()))]  # type: ignore[arg-type]
    if unknown:
        return f"nobody knows what its attribute {unknown[0]} does"
    is_plain = _is_plain_class(type(module))  # type: ignore[arg-type]
    return "" if is_plain else "its code may do more than compute a norm"


@cache
def _is_plain_class(kind: type) -> bool:
    own: set[str] = set()
    for base in kind.__mro__:
        forward = vars(base).get("forward")
        if forward is not None and str(getattr(forward, "__module__", "")).split(".")[0] in _PACKAGES:
            # Classes of somebody else may change methods that this one calls.
            return not own - {"forward"} or base is nn.Module
        if forward is not None and not _is_plain(forward, kind, set()):
            return False
        if base.__module__.split(".")[0] not in _PACKAGES:
            own |= {name for name in vars(base) if not name.startswith("__")} - {"extra_repr", "reset_parameters"}
    return False


def _is_plain(function: Any, kind: type, seen: set[Any]) -> bool:
    """Whether the code of a function, and of the methods that it calls, only computes from its arguments."""
    function = getattr(function, "__func__", function)
    if function in seen:
        return True
    if not isinstance(function, types.FunctionType) or set(function.__code__.co_freevars) - {"__class__"}:
        return False
    if function.__defaults__ or function.__kwdefaults__:
        return False
    seen.add(function)
    known = vars(builtins) | function.__globals__
    names = set()
    for step in dis.get_instructions(function):
        is_augmented = step.opname == "BINARY_OP" and step.argrepr.endswith("=")
        if is_augmented or step.opname.startswith(_WRITING) or isinstance(step.argval, types.CodeType):
            return False
        if step.opname == "LOAD_GLOBAL" and not any(known.get(step.argval) is each for each in _GLOBALS):
            return False
        if step.opname in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"):
            names.add(step.argval)
    bases = [base for base in kind.__mro__ if not issubclass(nn.Module, base)]
    methods = {name: next((vars(base)[name] for base in bases if name in vars(base)), None) for name in names}
    # All forward passes are looked at anyway.
    return all(
        name == "forward" or (name in _NAMES if method is None else _is_plain(method, kind, seen))
        for name, method in methods.items()
    )


def autocast_of(x: Tensor) -> torch.dtype | None:
    """The dtype to which autocast casts what is on x's device; None where it is off."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def key_of(module: Any, x: Tensor) -> tuple[Any, ...]:
    """What a module's way of computing may depend on, as far as its code may be tried."""
    given, names = vars(module), names_of(type(module))
    of_parameters = (None if t is None else (t.dtype, t.shape, t.requires_grad) for t in parameters(module))
    attributes = (given.get(name) for name in attributes_of(module))
    return x.dtype, x.dim(), x.shape[1], x.shape[-1], autocast_of(x), names, *of_parameters, *attributes


def attributes_of(module: Any) -> tuple[str, ...]:
    """The attributes, besides the parameters, by which a module may compute: all, if its code was not read."""
    kind: Any = type(module)
    if not (names_of(kind).kind or _is_of_package(kind)):
        return ATTRIBUTES
    return tuple(n for n, value in vars(module).items() if n[0] != "_" and isinstance(value, (*_SIMPLE, bool)))


@cache
def _is_of_package(kind: type) -> bool:
    """Whether a class comes from a package whose code is not read, other than torch."""
    known = (base for base in kind.__mro__ if base.__module__.split(".")[0] != "inplace_abn")
    package = next(known).__module__.split(".")[0]
    return package != "torch" and package in _PACKAGES


def kind_of(module: Any, original: type, x: Tensor) -> Kind | None:
    """How a module of the class ``original``, or of a subclass, computes an input like x; None if that is unknown."""
    size, given = length(module), vars(module)
    eps = given.get(names_of(original).eps, given.get("eps", given.get("variance_epsilon")))
    if size == 0 or not isinstance(eps, (int, float, type(None))):
        return None
    # torch's default depends on the dtype.
    values = {torch.finfo(wide(x.dtype)).eps, torch.finfo(x.dtype).eps} if eps is None else {float(eps)}
    axes = [axis for axis in (-1, 1) if x.shape[axis] == size and (axis < 0 or x.dim() > 2)]
    # In 16 bits formulas are near each other that are not the same.
    dtypes = dict.fromkeys([x.dtype, torch.promote_types(x.dtype, torch.float32)])
    found = [
        {kind for axis in axes for value in values for kind in _kinds(module, original, x, axis, value, dtype)}
        for dtype in dtypes
    ]
    alike = {kind._replace(is_torch=False, dtype=x.dtype) for kind in set.union(*found)}
    if len(alike) != 1 or not all(found):
        return None
    (kind,) = alike
    is_torch = all(each.is_torch for each in set.union(*found))
    return kind._replace(is_torch=is_torch, dtype=next(iter(found[0])).dtype)


def _kinds(module: Any, original: Any, x: Tensor, axis: int, eps: float, dtype: torch.dtype) -> Iterator[Kind]:
    """What the module may compute along an axis of an x of this dtype. It is tried on a copy with other weights."""
    size, device, names = length(module), x.device, names_of(original)
    line = torch.arange(size, device=device, dtype=torch.float64)
    # Weights of both signs, and none next to zero.
    values = (torch.cos(3 * line) + 2) * torch.cos(5 * line).sign(), torch.cos(3 * line + 1) + 0.5
    weight, bias = (
        None if t is None else nn.Parameter(value.to(torch.promote_types(t.dtype, dtype)))
        for t, value in zip(parameters(module), values, strict=True)
    )
    other = object.__new__(type(module))
    other.__dict__.update({name: value for name, value in vars(module).items() if name not in names[:2]})
    other.__dict__.update(_buffers={}, _parameters={names.weight: weight, names.bias: bias})
    # The rows have means and sizes that tell layer norms from RMS norms, and where eps is added.
    middle = [2] * (x.dim() - 2)
    number = torch.arange(4 * 2 ** len(middle), device=device, dtype=torch.float64).unsqueeze(1)
    size_of_row = torch.where(number % 3 == 0, eps**0.5, 1 + number / 2)
    probe = ((torch.sin(line * (number + 1)) + torch.cos(2 * number) * 3) * size_of_row).to(dtype)
    placed = probe.view(4, *middle, size).movedim(-1, axis).contiguous().requires_grad_()
    with ExitStack() as contexts:
        contexts.enter_context(torch.enable_grad())
        contexts.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else []))
        # Hooks that are set see nothing of this. A node that kept its own result would live for ever.
        contexts.enter_context(torch.autograd.graph.saved_tensors_hooks(Tensor.detach, lambda t: t))
        try:
            results = [original.forward(other, placed) for _ in range(2)]
        except Exception:
            # Whatever it is, the module does not compute a norm of such an input.
            return
        y, again = results
        if type(y) is not Tensor or y.shape != placed.shape or not y.is_floating_point() or not torch.equal(y, again):
            return
        unit = max(torch.finfo(y.dtype).eps, torch.finfo(dtype).eps)
        # The gradient is far from what a norm takes out of it.
        dy = torch.cos(torch.arange(y.numel(), device=device, dtype=torch.float64)).view(y.shape)
        given = {"x": placed, "weight": weight, "bias": bias}
        inputs = {name: t for name, t in given.items() if t is not None}
        if not y.requires_grad:
            return
        found = torch.autograd.grad(y, [*inputs.values()], dy.to(y.dtype), allow_unused=True)
        kinds, offsets = ((names.kind,), (names.offset,)) if names.kind else ((LAYER, RMS), (0.0, 1.0))
        for kind, offset in itertools.product(kinds, offsets if weight is not None else (0.0,)):
            leaves = {name: t.detach().double().requires_grad_() for name, t in inputs.items()}
            rows, scale = leaves["x"].movedim(axis, -1), leaves["weight"] + offset if weight is not None else None
            expected = normalised_rows(rows, scale, leaves.get("bias"), kind, eps).movedim(-1, axis)
            gradients = torch.autograd.grad(expected, [*leaves.values()], dy)
            if _are_near(y, expected, min(32 * unit, 2.0**-6)) and all(
                _are_near(t, gradient, min(128 * unit, 2.0**-4)) for t, gradient in zip(found, gradients, strict=True)
            ):
                is_torch = kind == LAYER and not offset and _is_torchs(y, placed, weight, bias, axis, eps)
                yield Kind(kind, axis, offset, eps, is_torch, y.dtype)


def _are_near(t: Tensor | None, expected: Tensor, allowed: float) -> bool:
    if t is None:
        return False
    error = (t.double() - expected).norm() / expected.norm()
    return bool(error <= allowed)


def _is_torchs(y: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, axis: int, eps: float) -> bool:
    moved = x.detach().movedim(axis, -1)
    try:
        torchs, *_ = torch.native_layer_norm(moved, moved.shape[-1:], weight, bias, eps)
    except RuntimeError:
        return False
    torchs = torchs.movedim(-1, axis)
    return torchs.dtype == y.dtype and torchs.stride() == y.stride() and torch.equal(torchs, y)
