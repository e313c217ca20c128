"""Fuses norms with what follows them, in the joint graph of forward and backward, before a compiler divides that graph.

No op in the joint graph writes to a tensor, and the graph has all readers of a tensor. So it is certain what follows a
norm. A norm is fused in two cases. Either an activation is its only reader in the forward pass, perhaps after an
addition. Or no activation follows, but the backward of a reader keeps the norm's output anyway. Then backward recovers
xhat from the result z, and x need not be kept. Every other norm becomes plain ops that do the same as torch's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from inplace_abn import _torch, reference
from inplace_abn._torch import decompositions, is_backward
from inplace_abn.compiling import batch_norm, inverses
from inplace_abn.compiling.batch_norm import NORM, NORM_BACKWARD
from inplace_abn.compiling.readers import Readers
from inplace_abn.compiling.spelled import activated, activation_key

_aten = torch.ops.aten
_KEEPING = frozenset(
    [
        *(_aten.convolution_backward.default, _aten.mm.default, _aten.addmm.default),
        *(_aten.bmm.default, _aten.baddbmm.default),
    ]
)
"""Ops of a backward pass whose inputs are kept. Compilers do not compute these inputs again to save memory."""
_VIEWS = frozenset(
    [
        *(_aten.view.default, _aten.reshape.default, _aten._unsafe_view.default, _aten.permute.default),
        *(_aten.t.default, _aten.expand.default, _aten.squeeze.dims, _aten.unsqueeze.default, _aten.transpose.int),
    ]
)
_COPIES = frozenset([_aten.clone.default, _aten.copy.default, _aten.detach.default, _aten.alias.default])


class Fusion(NamedTuple):
    """A norm that will be fused with what follows."""

    norm: fx.Node
    total: fx.Node
    """The activation's input: the norm, or its sum with the residual."""
    residual: fx.Node | None
    result: fx.Node
    """z; the total itself if there is no activation."""
    activation: str
    param: float


class Search:
    """Finds the norms of a graph that can be fused."""

    def __init__(self, graph: fx.Graph) -> None:
        self.norms = [node for node in graph.nodes if node.target is NORM]
        self.gradients = _gradients(graph, self.norms)
        self.readers = Readers(graph)
        self.found: dict[fx.Node, Fusion] = {}

    def run(self) -> list[Fusion]:
        """The fusions, in the order of their norms."""
        for find in (self._activated, self._kept):
            for norm in self.norms:
                fusion = None if norm in self.found else find(norm)
                if fusion is not None:
                    self.found[norm] = fusion
        return [self.found[norm] for norm in self.norms if norm in self.found]

    def _trusts(self, norm: fx.Node, *what: str) -> bool:
        """Whether the norm's gradients are known, and its z is trusted for all of ``what``.

        False if the norm is computed again anyway.
        """
        trusted = str(norm.args[-1]).split()
        return norm in self.gradients and "recompute" not in norm.meta and all(name in trusted for name in what)

    def _activated(self, norm: fx.Node) -> Fusion | None:
        total, residual = norm, None
        found = activated(norm)
        if found is None:
            total, residual = self._sum(norm)
            found = None if residual is None else activated(total)
        if found is None or any(fusion.result is found[0] for fusion in self.found.values()):
            return None
        if not self._trusts(norm, activation_key(*found[1:])):
            return None
        if residual is not None and not (self._trusts(norm, "residual") and self._is_kept(residual)):
            return None
        return None if self.readers.reads_tags(*found) else Fusion(norm, total, residual, *found)

    def _kept(self, norm: fx.Node) -> Fusion | None:
        """The fusion of a norm without activation whose output, or the sum with that output, is kept anyway."""
        if not self._trusts(norm, "identity"):
            return None
        if _is_read_again(norm) or any(fusion.residual is norm for fusion in self.found.values()):
            return Fusion(norm, norm, None, norm, "identity", 0.0)
        total, residual = self._sum(norm)
        if residual is None or not _is_read_again(total) or not self._trusts(norm, "residual"):
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
        if not isinstance(other, fx.Node) or not _is_alike(other, norm) or not _is_alike(total, norm):
            return norm, None
        return total, other

    def _is_kept(self, residual: fx.Node) -> bool:
        """Whether the residual is kept for backward anyway."""
        if residual.op == "placeholder" or _is_read_again(residual):
            return True
        if any(residual is fusion.result for fusion in self.found.values()):
            return True
        return residual.target is NORM and self._trusts(residual, "identity")


def _is_alike(a: fx.Node, b: fx.Node) -> bool:
    first, second = a.meta.get("val"), b.meta.get("val")
    if not isinstance(first, Tensor) or not isinstance(second, Tensor):
        return False
    return (first.dtype, first.device, first.shape) == (second.dtype, second.device, second.shape)


def _is_read_again(node: fx.Node) -> bool:
    """Whether an op of `_KEEPING` in the backward pass reads the node, perhaps through a view."""
    return any(
        (user.target in _VIEWS and _is_read_again(user)) or (is_backward(user) and user.target in _KEEPING)
        for user in node.users
    )


def _gradients(graph: fx.Graph, norms: list[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """The gradient nodes of each norm.

    Norms with the same arguments are left out, because their gradients cannot be told apart.
    """
    counts = Counter(norm.args for norm in norms)
    owners = {norm.args: norm for norm in norms if counts[norm.args] == 1}
    found: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.target is NORM_BACKWARD and node.args[1:] in owners:
            found.setdefault(owners[node.args[1:]], []).append(node)
    return found


def fuse(module: fx.GraphModule, *_: Any) -> fx.GraphModule:
    """Rewrites the joint graph of forward and backward, and returns it."""
    graph = module.graph
    if all(node.target is not NORM for node in graph.nodes):
        return module
    _without_copies(graph)
    graph.eliminate_dead_code()
    search = Search(graph)
    fused = search.run()
    # Fused results replace nodes that may be the residuals of later fusions.
    written: dict[fx.Node, fx.Node] = {}
    for fusion in fused:
        _write_fused(graph, fusion, search.gradients[fusion.norm], written)
    if fused:
        _keep_parameters(graph)
    graph.eliminate_dead_code()
    for node in list(graph.nodes):
        if node.target in batch_norm.PLAIN:
            with graph.inserting_before(node):
                found = _inlined(graph, batch_norm.PLAIN[node.target], node.args, node)
            _replace(node, found)
    graph.eliminate_dead_code()
    graph.lint()
    module.recompile()
    return module


def _without_copies(graph: fx.Graph) -> None:
    """Replaces copies by what they copy.

    No op writes to a tensor, so only returned tensors need memory of their own.
    """
    for node in list(graph.nodes):
        source = node.args[-1] if node.target in _COPIES else None
        if not isinstance(source, fx.Node) or node.kwargs or not _is_alike(node, source):
            continue
        same = node.meta["val"].stride() == source.meta["val"].stride()
        if same and all(user.op != "output" for user in node.users):
            node.replace_all_uses_with(source)
            graph.erase_node(node)


def _keep_parameters(graph: fx.Graph) -> None:
    """Makes the forward pass hold weights and inputs of convolutions themselves for backward, if they are the graph's
    inputs.

    Where inductor prefers another layout, it would hold a copy of each from the forward pass on. An op that needs the
    original strides prevents the copy, so such an op is added.
    """
    for node in list(graph.nodes):
        if node.target is _aten.convolution.default and not is_backward(node):
            for source in node.args[:2]:
                value = source.meta["val"]
                constant = all(isinstance(n, int) for n in (*value.shape, *value.stride()))
                if source.op == "placeholder" and value.dim() == 4 and constant:
                    with graph.inserting_before(node):
                        arguments = (source, list(value.shape), list(value.stride()))
                        seen = graph.call_function(_aten.as_strided.default, arguments)
                        seen.meta = dict(node.meta) | {"val": value}
                    node.replace_input_with(source, seen)


def _write_fused(
    graph: fx.Graph, fusion: Fusion, gradients: Sequence[fx.Node], written: dict[fx.Node, fx.Node]
) -> None:
    _, total, residual, result, activation, param = fusion
    x, mean, var, weight, bias, eps, training, _ = cast("tuple[Any, ...]", fusion.norm.args)
    dtype = x.meta["val"].dtype
    residual = written.get(residual, residual) if residual is not None else None

    def forward(x: Tensor, mean: Tensor, var: Tensor, weight: Any, bias: Any, residual: Any) -> Tensor:
        scale = None if weight is None else reference.clamped(weight, eps)
        y = reference.scaled(reference.standardised(x, mean, var, eps), scale, bias, residual)
        return inverses.tagged(y, activation, param, dtype)

    def inverse(z: Tensor) -> tuple[Tensor, Tensor]:
        y = inverses.untagged(z, activation, param)
        return y, y.to(dtype)

    def backward(dy: Tensor, y: Tensor, var: Tensor, weight: Any, bias: Any, residual: Any) -> tuple[Tensor, ...]:
        scale = None if weight is None else reference.clamped(weight, eps)
        return batch_norm.gradients(dy, batch_norm.recovered(y, scale, bias, residual), var, scale, eps, training)

    with graph.inserting_before(result):
        (z,) = _inlined(graph, forward, (x, mean, var, weight, bias, residual), result)
    written[result] = z
    again = [user for user in total.users if is_backward(user)] if total is not result else []
    first = min([*again, *gradients])
    with graph.inserting_before(first):
        y, rounded = _inlined(graph, inverse, (z,), first)
    if y.target is inverses.UNTAGGED:
        _torch.compute_in_backward(y)
    for user in again:
        user.replace_input_with(total, rounded)
    result.replace_all_uses_with(z)
    for node in gradients:
        with graph.inserting_before(node):
            dy: Any = node.args[0]
            found = _inlined(graph, backward, (dy, y, var, weight, bias, residual), node)
        _replace(node, found)


def _replace(node: fx.Node, found: Sequence[fx.Node]) -> None:
    """Replaces an op by its results."""
    for part in list(node.users) if node.target is NORM_BACKWARD else ():
        part.replace_all_uses_with(found[part.args[1]])  # type: ignore[index]
        part.graph.erase_node(part)
    node.replace_all_uses_with(found[0])
    node.graph.erase_node(node)


def _inlined(graph: fx.Graph, function: Callable[..., Any], arguments: Sequence[Any], like: fx.Node) -> list[fx.Node]:
    """Inserts the nodes of ``function`` with these nodes and constants, with the metadata of ``like``.

    Returns the nodes of its results.
    """
    given = [argument for argument in arguments if isinstance(argument, fx.Node)]

    def computed(*tensors: Tensor) -> Any:
        rest = iter(tensors)
        result = function(*(next(rest) if isinstance(argument, fx.Node) else argument for argument in arguments))
        return result if isinstance(result, tuple) else (result,)

    traced = make_fx(computed, decomposition_table=decompositions())(*(node.meta["val"] for node in given))
    env: dict[fx.Node, fx.Node] = {}
    sources = iter(given)
    for node in traced.graph.nodes:
        if node.op == "placeholder":
            env[node] = next(sources)
        elif node.op == "output":
            return [env[result] for result in node.args[0]]
        else:
            env[node] = copied = graph.node_copy(node, env.__getitem__)
            copied.meta = {key: value for key, value in like.meta.items() if key not in _OF_ITS_RESULT}
            copied.meta.update({key: node.meta[key] for key in _OF_ITS_RESULT if key in node.meta})
    raise AssertionError("a graph without output")


_OF_ITS_RESULT = ("val", "tensor_meta", "original_aten", "unbacked_bindings")


class _Pass:
    def __init__(self, before: Callable[..., Any] | None) -> None:
        self.before = before

    def __call__(self, module: fx.GraphModule, inputs: Any) -> fx.GraphModule:
        return fuse(module if self.before is None else self.before(module, inputs))


def install() -> None:
    """Makes torch's compilers call `fuse`, after a pass that the user has installed."""
    _torch.call_on_joint_graphs(_Pass)
