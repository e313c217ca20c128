"""Recognises what a call of torch does with a tensor.

It is an activation, an addition, nothing, a question about its metadata, or anything else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from inplace_abn import _torch
from inplace_abn.activations import ACTIVATIONS, activation_of_op


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


def _activating(activation: str, *options: str, default: float = 0.0, in_place: bool = False) -> Reading:
    """Reads the calls of an activation function.

    ``options`` are its arguments after the first: "negative_slope" or "alpha", "inplace", and the factors "scale" and
    "input_scale", which have to be 1.
    """
    names = ("input", *options)
    known = frozenset(options)
    param_name = next((name for name in options if name in ("negative_slope", "alpha")), "")
    factors = [name for name in options if name in ("scale", "input_scale")]

    def read(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Activating | None:
        if len(args) == 1 and not param_name and (not kwargs or kwargs.keys() == {"inplace"}):
            return Activating(args[0], activation, default, in_place or bool(kwargs.get("inplace")))
        given = {**kwargs, "input": args[0]} if len(args) == 1 and kwargs.keys() <= known else None
        given = by_name(names, args, kwargs) if given is None else given
        if given is None or (factors and any(given.get(name, 1) != 1 for name in factors)):
            return None
        param = given.get(param_name, default)
        if not isinstance(param, (int, float)) or not 0 <= param < math.inf or (activation == "elu" and param == 0):
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
_OPTIONS: dict[str, tuple[tuple[str, ...], float]] = {
    "leaky_relu": (("negative_slope",), 0.01),
    "elu": (("alpha", "scale", "input_scale"), 1.0),
}
"""What ops take besides the tensor, and the default of the first one of these arguments."""


def _spelled(op: str) -> Iterator[tuple[Reading, Sequence[Any]]]:
    """The functions of an activation. One has an argument for "in place", and the others have two names."""
    name = activation_of_op(op)
    assert name is not None
    options, default = _OPTIONS.get(op, ((), 0.0))
    yield _activating(name, *options[:1], "inplace", default=default), (getattr(F, op),)
    for in_place in (False, True):
        functions: list[Any] = [
            getattr(namespace, op + "_" * in_place, None) for namespace in (torch, Tensor, _nn, _aten)
        ]
        reading = _activating(name, *options, default=default, in_place=in_place)
        yield reading, [function for function in (*functions, functions[-1].default) if function is not None]


def _gelu(in_place: bool) -> Reading:
    def read(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Activating | None:
        given = by_name(("input",), args, {k: v for k, v in kwargs.items() if k != "approximate"})
        name = activation_of_op("gelu", kwargs.get("approximate", "none"))
        return None if given is None or name is None else Activating(given["input"], name, 0.0, in_place)

    return read


_SPELLINGS: list[tuple[Reading, Sequence[Any]]] = [
    *(spelling for op in {entry.op for entry in ACTIVATIONS.values()} - {"", "gelu"} for spelling in _spelled(op)),
    (_gelu(False), (F.gelu, _nn.gelu, _aten.gelu, _aten.gelu.default)),
    (_gelu(True), (_aten.gelu_, _aten.gelu_.default)),
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
