"""LayerScale for compilers: a linear layer's output that is multiplied by a vector need not be kept.

The formulas are those of `inplace_abn.reference`.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from inplace_abn._torch import is_backward
from inplace_abn.compiling.inlining import inlined
from inplace_abn.compiling.search import PERMUTATIONS, VIEWS, is_cast, is_read_again
from inplace_abn.reference import gradients_of_scaled, mean_of_rows

_aten = torch.ops.aten
_LINEAR = frozenset([_aten.mm.default, _aten.addmm.default])


class _Path(NamedTuple):
    """How a node is made of another one by views, permutations and casts."""

    source: fx.Node
    steps: tuple[fx.Node, ...]
    """From the source on."""


def _path(node: fx.Node) -> _Path:
    steps: list[fx.Node] = []
    while node.target in VIEWS or node.target in PERMUTATIONS or is_cast(node):
        steps.insert(0, node)
        node = node.args[0]  # type: ignore[assignment]
    return _Path(node, tuple(steps))


def _back(t: Tensor, steps: tuple[fx.Node, ...]) -> Tensor:
    """A tensor like the last step's result, laid out as what the first step was made of."""
    for step in reversed(steps):
        if step.target in VIEWS:
            t = t.reshape(step.args[0].meta["val"].shape)  # type: ignore[union-attr]
        elif step.target in PERMUTATIONS:
            dims = _dims(step)
            t = t.permute([dims.index(i) for i in range(t.dim())])
    return t


def _dims(step: fx.Node) -> list[int]:
    """Where the dimensions of a permutation's result come from."""
    dims = [*range(step.meta["val"].dim())]
    given: Any = step.args[1:]
    if step.target is _aten.permute.default:
        return [dims[dim] for dim in given[0]]
    a, b = given or (0, -1)
    dims[a], dims[b] = dims[b], dims[a]
    return dims


class _Scaled(NamedTuple):
    """A product of a linear layer's output and a vector, in both passes."""

    linear: fx.Node
    steps: tuple[fx.Node, ...]
    """What makes the product's operand of the linear layer's output."""
    gamma: fx.Node
    weight: fx.Node
    dz: fx.Node
    products: fx.Node
    """dz * u, of which only the sums are used."""
    sums: fx.Node
    dweight: fx.Node


def fuse(graph: fx.Graph) -> None:
    """Rewrites the gradients of all vectors that are multiplied so."""
    found = [_found(node) for node in graph.nodes if node.target is _aten.mul.Tensor and not is_backward(node)]
    for scaled in found:
        if scaled is not None:
            _write(graph, scaled)


def _found(product: fx.Node) -> _Scaled | None:
    operands = [node for node in product.args if isinstance(node, fx.Node)]
    for u, factor in itertools.permutations(operands, 2):
        path, gamma = _path(u), _path(factor).source
        if path.source.target in _LINEAR and gamma.op == "placeholder" and _is_vector(path, factor, gamma):
            return _with_gradients(path, u, gamma)
    return None


def _is_vector(path: _Path, factor: fx.Node, gamma: fx.Node) -> bool:
    """Whether the factor has one value for each output of the linear layer."""
    count, place = path.source.meta["val"].shape[1], 1
    for step in path.steps:
        shape = step.meta["val"].shape
        if step.target in VIEWS:
            if place != step.args[0].meta["val"].dim() - 1 or shape[-1] != count:  # type: ignore[union-attr]
                return False
            place = len(shape) - 1
        elif step.target in PERMUTATIONS:
            place = _dims(step).index(place)
    value, dim = factor.meta["val"], len(path.steps[-1].meta["val"].shape) if path.steps else 2
    at = place - dim
    if value.dtype != gamma.meta["val"].dtype or not value.is_floating_point() or gamma.meta["val"].numel() != count:
        return False
    return bool(count != 1 and value.dim() >= -at and value.numel() == count and value.shape[at] == count)


def _with_gradients(path: _Path, u: fx.Node, gamma: fx.Node) -> _Scaled | None:
    linear = path.source
    h, transposed = linear.args[-2:]
    weight = _path(transposed).source  # type: ignore[arg-type]
    if linear.kwargs or weight.op != "placeholder" or is_read_again(linear) or not _is_wide_enough(linear, weight):
        return None
    again = [user for node in (linear, *path.steps) for user in node.users if is_backward(user)]
    if len(again) != 1 or again[0].target is not _aten.mul.Tensor or len(again[0].users) != 1:
        return None
    (products,), (sums,) = again, again[0].users
    (dz,) = [node for node in products.args if node is not u] or [None]
    if sums.target is not _aten.sum.dim_IntList or sums.meta["val"].numel() != gamma.meta["val"].numel():
        return None
    for dweight in h.users:  # type: ignore[union-attr]
        if dweight.target is _aten.mm.default and is_backward(dweight) and dweight.args[1] is h:
            du, back = _path(dweight.args[0])  # type: ignore[arg-type]
            if isinstance(dz, fx.Node) and _is_product(du, dz, gamma) and _is_reverse(back, path.steps):
                return _Scaled(linear, path.steps, gamma, weight, dz, products, sums, dweight)
    return None


def _is_wide_enough(linear: fx.Node, weight: fx.Node) -> bool:
    """Whether the product of matrices has the digits that torch's gradient has, and no larger numbers than the output.

    In bfloat16 that is so only if autocast takes digits from the output, too.
    """
    dtype, of_weight = linear.meta["val"].dtype, weight.meta["val"].dtype
    return dtype != torch.float16 and bool(dtype != torch.bfloat16 or of_weight == torch.float32)


def _is_product(node: fx.Node, a: Any, gamma: fx.Node) -> bool:
    others = [operand for operand in node.args if operand is not a]
    is_of_two = node.target is _aten.mul.Tensor and len(others) == 1
    return is_of_two and isinstance(others[0], fx.Node) and _path(others[0]).source is gamma


def _is_reverse(back: tuple[fx.Node, ...], steps: tuple[fx.Node, ...]) -> bool:
    """Whether steps go the way back of others, and then transpose a matrix."""
    here = [step for step in back if not is_cast(step)]
    there = [step for step in reversed(steps) if not is_cast(step)]
    if len(here) != len(there) + 1 or here[-1].target not in PERMUTATIONS or _dims(here[-1]) != [1, 0]:
        return False
    return all(map(_is_inverse, here, there))


def _is_inverse(step: fx.Node, other: fx.Node) -> bool:
    if other.target in VIEWS:
        return step.target in VIEWS and bool(step.meta["val"].shape == other.all_input_nodes[0].meta["val"].shape)
    dims = _dims(other)
    return step.target in PERMUTATIONS and _dims(step) == [dims.index(i) for i in range(len(dims))]


def _write(graph: fx.Graph, scaled: _Scaled) -> None:
    linear, steps, gamma, weight, dz, products, sums, dweight = scaled
    h: Any = linear.args[-2]
    dtype, shape = dweight.meta["val"].dtype, sums.meta["val"].shape

    def found(dz: Tensor, h: Tensor, weight: Tensor, mean: Tensor, gamma: Tensor) -> tuple[Tensor, ...]:
        dgamma, *of_product = gradients_of_scaled(_back(dz, steps), h, weight, mean)
        product = torch.addr(*of_product)
        return dgamma.to(sums.meta["val"].dtype).view(shape), (product * gamma.reshape(-1, 1)).to(dtype)

    with graph.inserting_before(linear.next):
        (mean,) = inlined(graph, mean_of_rows, (linear,), linear)
    with graph.inserting_before(min(products, dweight)):
        dgamma, of_weight = inlined(graph, found, (dz, h, weight, mean, gamma), products)
    sums.replace_all_uses_with(dgamma)
    dweight.replace_all_uses_with(of_weight)
