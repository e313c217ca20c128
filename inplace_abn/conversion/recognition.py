"""Recognises what a call of torch does with a tensor.

It is an activation, an addition, nothing, a question about its metadata, or anything else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from inplace_abn import _torch
from inplace_abn.activations import ACTIVATIONS, activation_of_op, find


class Activating(NamedTuple):
    """A call that activates a tensor."""

    input: Any
    activation: str
    param: float
    in_place: bool


class Adding(NamedTuple):
    """A call that adds two values."""

    first: Any
    second: Any
    in_place: bool


Reading = Callable[[tuple[Any, ...], Mapping[str, Any]], Any]
"""Reads a call: `Activating`, `Adding`, what it is given if it returns that, or None for any other call."""


def by_name(names: tuple[str, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
    """The arguments of a call by name; None if there are arguments without one of these names."""
    if len(args) > len(names):
        return None
    given = dict(zip(names, args, strict=False))
    for name, value in kwargs.items():
        name = names[0] if name in ("input", "self") else name
        if name not in names or name in given:
            return None
        given[name] = value
    return given if names[0] in given else None


def _activating(op: str, options: Sequence[str], defaults: Mapping[str, Any], in_place: bool) -> Reading:
    """Reads the calls of an activation function, by its arguments after the first. Those that are neither the parameter
    nor "inplace" must have their defaults."""
    names, known = ("input", *options), frozenset(options)
    default_activation = activation_of_op(op, "none" if "approximate" in known else "") or ""
    entry = find(default_activation)
    default_param = float(defaults.get(entry.param, 0.0))
    fixed = known - {entry.param, "inplace", "approximate"}

    def read(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Activating | None:
        if len(args) == 1 and (not kwargs or kwargs.keys() == {"inplace"}):
            return Activating(args[0], default_activation, default_param, in_place or bool(kwargs.get("inplace")))
        given = by_name(names, args, kwargs)
        if given is None or any(given.get(name, defaults[name]) != defaults[name] for name in fixed):
            return None
        param = given.get(entry.param, defaults.get(entry.param, 0.0))
        activation = activation_of_op(op, given.get("approximate", "none") if "approximate" in known else "")
        if activation is None or not isinstance(param, (int, float)) or not entry.valid(param):
            return None
        return Activating(given["input"], activation, float(param), in_place or bool(given.get("inplace", False)))

    return read


def _adding(in_place: bool) -> Reading:
    def read(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Adding | None:
        if len(args) == 2 and not kwargs:
            return Adding(*args, in_place)
        given = by_name(("input", "other"), args, {k: v for k, v in kwargs.items() if k != "alpha"})
        if given is None or len(given) != 2 or kwargs.get("alpha", 1) != 1:
            return None
        return Adding(given["input"], given["other"], in_place)

    return read


def _dropping(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Reads the calls of a dropout, which passes its input on if it drops nothing."""
    given = by_name(("input", "p", "training", "inplace"), args, kwargs)
    if given is None or (given.get("p", 0.5) != 0 and given.get("training", True)):
        return None
    return given["input"]


_aten, _nn = torch.ops.aten, _torch.nn_functions


def _spelled(op: str) -> Iterator[tuple[Reading, Sequence[Any]]]:
    """The functions of an activation. One has an argument for "in place", and the others have two names."""
    arguments = _torch.schema_of(getattr(_aten, op).default).arguments[1:]
    defaults = {argument.name: argument.default_value for argument in arguments}
    options = tuple(defaults)
    yield _activating(op, (*options[:1], "inplace"), defaults, False), (getattr(F, op),)
    for in_place in (False, True):
        functions = [getattr(namespace, op + "_" * in_place, None) for namespace in (torch, Tensor, _nn, _aten)]
        functions.append(getattr(functions[-1], "default", None))
        yield _activating(op, options, defaults, in_place), [function for function in functions if function is not None]


_SPELLINGS: list[tuple[Reading, Sequence[Any]]] = [
    *(spelling for op in {entry.op for entry in ACTIVATIONS.values()} - {""} for spelling in _spelled(op)),
    (_adding(False), (torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__, _aten.add, _aten.add.Tensor)),
    (_adding(True), (Tensor.add_, Tensor.__iadd__, _aten.add_, _aten.add_.Tensor)),
    (_dropping, (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout)),
]

KNOWN: dict[Any, Reading] = {function: read for read, functions in _SPELLINGS for function in functions}
"""How to read the calls of each function that may activate, add, or do nothing."""


_ATTRIBUTES = (
    *("shape", "dtype", "device", "layout", "ndim", "requires_grad", "itemsize", "nbytes"),
    *("is_cpu", "is_cuda", "is_meta", "is_sparse", "is_quantized", "is_mkldnn", "is_mps", "is_xpu", "is_nested"),
)
_METHODS = (
    *("size", "dim", "ndimension", "stride", "numel", "nelement", "element_size", "__len__", "storage_offset"),
    *("is_contiguous", "is_floating_point", "is_complex", "is_signed", "get_device"),
)

METADATA: frozenset[Any] = frozenset(
    [
        *(getattr(Tensor, name).__get__ for name in _ATTRIBUTES),
        *(getattr(Tensor, name) for name in _METHODS),
        *(torch.is_floating_point, torch.is_complex, torch.numel),
    ]
)
"""Functions that ask for a tensor's metadata only."""

_GRAD: Any = Tensor.grad
_RETAINS_GRAD: Any = Tensor.retains_grad

IN_GRAPH: frozenset[Any] = frozenset(
    [
        *(Tensor.register_hook, Tensor.retain_grad, torch.autograd.grad),
        *(_RETAINS_GRAD.__get__, _GRAD.__get__, _GRAD.__set__, _GRAD.__delete__),
    ]
)
"""Functions that ask for gradients of the first argument, or of the second one of ``torch.autograd.grad``."""

_GRAD_FN: Any = Tensor.grad_fn

SHOWING: frozenset[Any] = frozenset(
    [Tensor.__repr__, Tensor.__format__, Tensor.__reduce_ex__, Tensor.__deepcopy__, _GRAD_FN.__get__]
)
"""Functions that show what a tensor is, or its place in the graph."""

NO_GRADIENT: frozenset[Any] = frozenset([_GRAD.__get__, _RETAINS_GRAD.__get__])
"""Those of `IN_GRAPH` that have an answer for a tensor without a place in the graph: its gradient is not retained."""
