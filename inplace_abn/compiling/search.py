"""Finds what can be fused in the joint graph of forward and backward (`inplace_abn.compiling.joint`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves, tree_map_only

from inplace_abn import _torch, tags
from inplace_abn._torch import is_backward
from inplace_abn.activations import gains
from inplace_abn.compiling.norms import NORM, NORM_BACKWARD
from inplace_abn.compiling.spelled import activated, activation_key

_aten = torch.ops.aten
_library = torch.library.Library("inplace_abn", "FRAGMENT")
_library.define("alone(Tensor x) -> Tensor")

ALONE = torch.ops.inplace_abn.alone.default
"""Marks x as the input of an activation without a norm of a converted model. Where `compiling.joint` does not run, it
copies x."""

_library.impl(ALONE, torch.clone, "CompositeExplicitAutograd")
torch.library.register_fake(ALONE, torch.clone, lib=_library)
torch.library.register_autograd(ALONE, lambda ctx, dy: dy, lib=_library)

_PRODUCTS = frozenset([_aten.addmm.default, _aten.mm.default, _aten.bmm.default])
_MAKERS = _PRODUCTS | {_aten.convolution.default}
"""Ops whose result nobody else keeps."""
VIEWS = frozenset([_aten.view.default, _aten._unsafe_view.default, _aten.reshape.default])
_CASTS = frozenset([_aten._to_copy.default, torch.ops.prims.convert_element_type.default])
_KEEPING = _PRODUCTS | {_aten.convolution_backward.default, _aten.baddbmm.default}
"""Ops of a backward pass whose inputs are kept. Compilers do not compute these inputs again to save memory."""
PERMUTATIONS = frozenset([_aten.permute.default, _aten.t.default, _aten.transpose.int])
_VIEWS = VIEWS | PERMUTATIONS | {_aten.expand.default, _aten.squeeze.dims, _aten.unsqueeze.default}


def inputs_of_activations(graph: fx.Graph) -> list[fx.Node]:
    """What may be the input of an activation: what is marked, and results of linear layers and convolutions.

    A graph of a converted model is meant, in which activations may be functions. The marks are removed.
    """
    found: dict[Any, None] = {}
    for node in list(graph.nodes):
        if node.target is ALONE:
            (x,) = node.args
            node.replace_all_uses_with(x)
            graph.erase_node(node)
            found[x] = None
        elif _is_made(node):
            found[node] = None
    return [*found]


def _is_made(node: Any) -> bool:
    while node.target in VIEWS and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node.target in _MAKERS


class Fusion(NamedTuple):
    """What will be one with the activation that follows."""

    norm: fx.Node | None
    """None for an activation alone."""
    total: fx.Node
    """The activation's input. If there is a norm, it is the norm, or its sum with the residual."""
    residual: fx.Node | None
    result: fx.Node
    """z; the total itself if there is no activation. If autocast has widened the norm's input, it may be the copy in 16
    bits that a convolution or a linear layer takes."""
    activation: str
    param: float


class Readers:
    """Finds who would notice a difference in the forward part of the graph, as the watch of eager steps does."""

    def __init__(self, graph: fx.Graph) -> None:
        self._ops: list[tuple[fx.Node, tags.Op, list[tags.TensorInfo]]] = []
        self._outputs: set[int] = set()
        for node in graph.nodes:
            if node.op == "output":
                nodes = [n for n in tree_leaves(node.args) if isinstance(n, fx.Node) and not is_backward(n)]
                self._outputs.update(info.storage for n in nodes for info in _infos(n))
            elif isinstance(node.target, _torch.OpOverload) and not is_backward(node):
                args, kwargs = tree_map_only(fx.Node, lambda n: n.meta.get("val"), (node.args, node.kwargs))
                self._ops.append((node, tags.op_of(node.target, args, kwargs), _infos(node)))

    def notice(self, z: fx.Node, activation: str, param: float) -> bool:
        """Whether somebody would notice that backward has an activation's result instead of its input.

        Ops of the forward pass may notice tags. Whoever gets a result of the graph may do so, too, or write to it where
        torch allows that.
        """
        sign = tags.sign_of(activation, param)
        (info,) = _infos(z)
        if info.storage in self._outputs and (sign or not is_read_again(z)):
            return True
        if not sign:
            return False
        follower = tags.Follower()
        follower.add(info.storage, z, sign)
        start = next(i for i, (node, *_) in enumerate(self._ops) if node is z)
        for _, op, results in self._ops[start + 1 :]:
            if follower.readings(op):
                return True
            follower.follow(op, results)
        return bool(follower.chosen.keys() & self._outputs)


def _infos(node: Any) -> list[tags.TensorInfo]:
    return [tags.info_of(t) for t in tree_leaves(node.meta.get("val")) if isinstance(t, Tensor)]


class Search:
    """Finds the norms of a graph that can be fused."""

    def __init__(self, graph: fx.Graph) -> None:
        self.norms: list[fx.Node] = [node for node in graph.nodes if node.target is NORM]
        self.gradients: dict[fx.Node, list[fx.Node]] = gradients_of(self.norms, NORM_BACKWARD)
        self.readers: Readers = Readers(graph)
        self.found: dict[fx.Node, Fusion] = {}

    def run(self, inputs: Iterable[fx.Node]) -> list[Fusion]:
        """The fusions: norms in their order, and then activations of ``inputs``, which are no norms."""
        for find in (self._activated, self._kept):
            for norm in self.norms:
                fusion = None if norm in self.found else find(norm)
                if fusion is not None:
                    self.found[norm] = fusion
        fusions = [self.found[norm] for norm in self.norms if norm in self.found]
        totals = {fusion.total for fusion in fusions}
        alone = [self._alone(x) for x in inputs if x.target is not NORM and x not in totals]
        return fusions + [fusion for fusion in alone if fusion is not None]

    def _trusts(self, norm: fx.Node, *what: str, result: fx.Node | None = None) -> bool:
        """Whether the norm's gradients are known, and its z is trusted for all of ``what``, in the dtype of ``result``.

        False if the norm is computed again anyway.
        """
        trusted, dtype = str(norm.args[-1]).split(), (result or norm).meta["val"].dtype
        words = what if dtype == norm.meta["val"].dtype else [word_in(dtype, name) for name in what]
        return norm in self.gradients and "recompute" not in norm.meta and all(word in trusted for word in words)

    def _activated(self, norm: fx.Node) -> Fusion | None:
        total, residual = norm, None
        found = activated(norm)
        if found is None:
            total, residual = self._sum(norm)
            found = None if residual is None else activated(total)
        if found is None or any(fusion.result is found[0] for fusion in self.found.values()):
            return None
        result, (_, activation, param) = _narrowed(norm, found[0]), found
        if result is None or not self._trusts(norm, activation_key(activation, param), result=result):
            return None
        if residual is not None and not (self._trusts(norm, "residual", result=result) and self._is_kept(residual)):
            return None
        if self.readers.notice(result, activation, param):
            return None
        return Fusion(norm, total, residual, result, activation, param)

    def _alone(self, x: fx.Node) -> Fusion | None:
        """The fusion of an activation that keeps its input only for itself, and whose result is kept anyway."""
        found = None if is_read_again(x) else activated(x)
        if found is None or not gains(*found[1:], x.meta["val"].dtype) or "recompute" in x.meta:
            return None
        if not is_read_again(found[0]) or not any(map(is_backward, x.users)) or self.readers.notice(*found):
            return None
        return Fusion(None, x, None, *found)

    def _kept(self, norm: fx.Node) -> Fusion | None:
        """The fusion of a norm without activation whose output, or the sum with that output, is kept anyway."""
        result = _narrowed(norm, norm)
        if result is None or not self._trusts(norm, "identity", result=result):
            return None
        if result is not norm:
            return Fusion(norm, norm, None, result, "identity", 0.0)
        if is_read_again(norm) or any(fusion.residual is norm for fusion in self.found.values()):
            return Fusion(norm, norm, None, norm, "identity", 0.0)
        total, residual = self._sum(norm)
        if residual is None or not is_read_again(total) or not self._trusts(norm, "residual"):
            return None
        if any(fusion.total is total for fusion in self.found.values()) or not self._is_kept(residual):
            return None
        return Fusion(norm, total, residual, total, "identity", 0.0)

    def _sum(self, norm: fx.Node) -> tuple[fx.Node, fx.Node | None]:
        """The sum that is the norm's only reader, and its other operand; the norm and None if there is no such sum."""
        (total, *others) = [*norm.users] or [norm]
        if others or total.target is not _aten.add.Tensor or total.kwargs or is_backward(total):
            return norm, None
        (other,) = [operand for operand in total.args if operand is not norm] or [None]
        if not isinstance(other, fx.Node) or not is_alike(other, norm) or not is_alike(total, norm):
            return norm, None
        return total, other

    def _is_kept(self, residual: fx.Node) -> bool:
        """Whether the residual is kept for backward anyway."""
        if residual.op == "placeholder" or is_read_again(residual):
            return True
        if any(residual is fusion.result for fusion in self.found.values()):
            return True
        return residual.target is NORM and self._trusts(residual, "identity")


def _narrowed(norm: fx.Node, result: fx.Node) -> fx.Node | None:
    """What stands for the result that follows a norm: the result itself.

    If the norm's input is the copy in float32 that autocast makes, the result must be kept anyway, or a copy of it in
    16 bits, which then stands for it. None if nothing is.
    """
    x = norm.args[0]
    if not isinstance(x, fx.Node) or not is_cast(x) or _width(x.args[0]) >= _width(x) or is_read_again(result):
        return result
    first, *others = [user for user in result.users if not is_backward(user)] or [result]
    if not is_cast(first) or any(
        not is_cast(user) or user.meta["val"].dtype != first.meta["val"].dtype for user in others
    ):
        return None
    for user in others:
        user.replace_all_uses_with(first)
    return first if is_read_again(first) else None


def _width(node: Any) -> int:
    width: int = node.meta["val"].dtype.itemsize
    return width


def word_in(dtype: torch.dtype, name: str) -> str:
    """The word for an activation that is trusted in another dtype than the norm's."""
    return f"{name}/{str(dtype).removeprefix('torch.')}"


def is_alike(a: fx.Node, b: fx.Node) -> bool:
    first, second = a.meta.get("val"), b.meta.get("val")
    if not isinstance(first, Tensor) or not isinstance(second, Tensor):
        return False
    return (first.dtype, first.device, first.shape) == (second.dtype, second.device, second.shape)


def is_cast(node: fx.Node) -> bool:
    """Whether the node is its input in another dtype."""
    return node.target in _CASTS and node.kwargs.keys() <= {"dtype"}


def is_read_again(node: fx.Node) -> bool:
    """Whether an op of `_KEEPING` in the backward pass reads the node, perhaps through a view."""
    return any(
        (user.target in _VIEWS and is_read_again(user)) or (is_backward(user) and user.target in _KEEPING)
        for user in node.users
    )


def gradients_of(norms: list[fx.Node], backward: Any) -> dict[fx.Node, list[fx.Node]]:
    """The nodes of the op ``backward`` that are the gradient of each norm.

    Norms with the same arguments are left out, because their gradients cannot be told apart.
    """
    counts = Counter(norm.args for norm in norms)
    owners = {norm.args: norm for norm in norms if counts[norm.args] == 1}
    found: dict[fx.Node, list[fx.Node]] = {}
    for node in norms[0].graph.nodes if norms else ():
        if node.target is backward and node.args[1:] in owners:
            found.setdefault(owners[node.args[1:]], []).append(node)
    return found
