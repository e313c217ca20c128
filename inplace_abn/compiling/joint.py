"""Rewrites the joint graph of forward and backward, before a compiler divides that graph, so that less is kept.

No op in the joint graph writes to a tensor, and the graph has all readers of a tensor. So it is certain what follows a
norm. A norm is fused in two cases. Either an activation is its only reader in the forward pass, perhaps after an
addition. Or no activation follows, but the backward of a reader keeps the norm's output anyway. Then backward recovers
xhat from the result z, and x need not be kept. Every other norm becomes plain ops that do the same as torch's.

An activation without a norm is rewritten if the backward of a reader keeps its result anyway. Norms of rows are
rewritten in `compiling.rows`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, fx

from inplace_abn import _torch, reference
from inplace_abn._torch import is_backward
from inplace_abn.activations import of_rounded
from inplace_abn.compiling import inverses, layer_scale, norms, rows
from inplace_abn.compiling.inlining import inline, inlined
from inplace_abn.compiling.search import ALONE, VIEWS, Fusion, Search, inputs_of_activations, is_alike, is_cast

_aten = torch.ops.aten
_COPIES = frozenset([_aten.clone.default, _aten.copy.default, _aten.detach.default, _aten.alias.default])


def fuse(module: fx.GraphModule, *_: Any) -> fx.GraphModule:
    """Rewrites the joint graph of forward and backward, and returns it."""
    graph = module.graph
    if all(node.target not in _OPS for node in graph.nodes):
        return module
    _without_copies(graph)
    graph.eliminate_dead_code()
    inputs = inputs_of_activations(graph)
    search = Search(graph)
    fused = search.run(inputs)
    # Fused results replace nodes that may be the residuals of later fusions.
    written: dict[fx.Node, fx.Node] = {}
    for fusion in fused:
        _write_fused(graph, fusion, search.gradients.get(fusion.norm or fusion.total, []), written)
    layer_scale.fuse(graph)
    if rows.fuse(graph) or fused:
        _keep_parameters(graph)
    graph.eliminate_dead_code()
    for node in list(graph.nodes):
        plain = norms.PLAIN.get(node.target) or rows.PLAIN.get(node.target)
        if plain is not None:
            inline(node, plain)
    graph.eliminate_dead_code()
    graph.lint()
    module.recompile()
    return module


_OPS = norms.PLAIN.keys() | rows.PLAIN.keys() | {ALONE}


def _without_copies(graph: fx.Graph) -> None:
    """Replaces copies by what they copy.

    No op of the graph writes to a tensor. What the graph is given or returns may be written to outside of it.
    """
    outside = {_memory(node) for each in graph.nodes if each.op == "output" for node in each.all_input_nodes}
    for node in list(graph.nodes):
        source = node.args[-1] if node.target in _COPIES else None
        if not isinstance(source, fx.Node) or node.kwargs or not is_alike(node, source):
            continue
        same, memory = node.meta["val"].stride() == source.meta["val"].stride(), _memory(source)
        if same and node not in outside and memory not in outside and memory.op != "placeholder":
            node.replace_all_uses_with(source)
            graph.erase_node(node)


def _memory(node: fx.Node) -> fx.Node:
    """The node that made the memory of a node's result."""
    while isinstance(node.target, _torch.OpOverload):
        returned = _torch.schema_of(node.target).returns
        if not returned or returned[0].alias_info is None or node.target in _COPIES:
            break
        node = node.all_input_nodes[0]
    return node


def _keep_parameters(graph: fx.Graph) -> None:
    """Makes the forward pass hold weights and inputs of convolutions themselves for backward, if they are the graph's
    inputs.

    Where inductor prefers another layout, it would hold a copy of each from the forward pass on.
    """
    for node in list(graph.nodes):
        if node.target is _aten.convolution.default and not is_backward(node):
            for source in node.args[:2]:
                if source.op == "placeholder" and source.meta["val"].dim() == 4 and _is_constant(source):
                    with graph.inserting_before(node):
                        seen = _in_its_strides(graph, source)
                    node.replace_input_with(source, seen)


def _is_constant(node: fx.Node) -> bool:
    """Whether the shape and the strides of the node's value are numbers."""
    value = node.meta["val"]
    return all(isinstance(n, int) for n in (*value.shape, *value.stride()))


def _in_its_strides(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """The node's value, by an op that keeps compilers from giving it other strides."""
    value = node.meta["val"]
    seen = graph.call_function(_aten.as_strided.default, (node, list(value.shape), list(value.stride())))
    seen.meta = dict(node.meta)
    return seen


def _is_of_rows(node: fx.Node) -> bool:
    """Whether the node is the output of a linear layer, of four dimensions.

    Near convolutions inductor would transpose what is kept of it.
    """
    if node.meta["val"].dim() != 4:
        return False
    while node.target in VIEWS:
        node = node.all_input_nodes[0]
    return node.target in (_aten.addmm.default, _aten.mm.default)


def _write_fused(
    graph: fx.Graph, fusion: Fusion, gradients: Sequence[fx.Node], written: dict[fx.Node, fx.Node]
) -> None:
    norm, total, residual, result, activation, param = fusion
    residual = written.get(residual, residual) if residual is not None else None
    dtype = result.meta["val"].dtype
    call = (total, *[None] * 11) if norm is None else norm.args
    x, mean, var, total_count, weight, bias, rows, verbatim, eps, training, group, _ = cast("tuple[Any, ...]", call)

    if norm is None:
        # What a norm in the same program gives is not rounded.
        activation, param = of_rounded((activation, param), total.meta["val"].dtype)

    def forward(x: Tensor, mean: Tensor, var: Tensor, *operands: Any) -> Tensor:
        if norm is None:
            return inverses.tagged(x.to(reference.wide(dtype)), activation, param, dtype)
        y = reference.scaled(reference.standardised(x, mean, var, eps), *operands)
        return inverses.tagged(y, activation, param, dtype)

    def inverse(z: Tensor, rows: Any, verbatim: Any, *operands: Any) -> tuple[Tensor, Tensor]:
        recovered = inverses.untagged(z, activation, param)
        # The slope of a saved channel comes from the y that xhat says.
        exact = norms.with_saved(recovered, rows, verbatim)
        y = recovered if rows is None else norms.where_saved(rows, reference.scaled(exact, *operands), recovered)
        return recovered, y.to(total.meta["val"].dtype)

    def backward(
        dy: Tensor, y: Tensor, mean: Tensor, var: Tensor, total_count: Any, rows: Any, verbatim: Any, *operands: Any
    ) -> tuple[Tensor, ...]:
        scale, *others = operands
        divisor = None if scale is None else reference.clamped(scale, eps)
        xhat = norms.with_saved(norms.recovered(y, divisor, *others), rows, verbatim)
        statistics = norms.Statistics(mean, var, total_count, group)
        return norms.gradients(dy, xhat, statistics, scale, eps, training, x.meta["val"].dtype)

    operands = weight, bias, residual
    with graph.inserting_before(result):
        (z,) = inlined(graph, forward, (x, mean, var, *operands), result)
        read = _in_its_strides(graph, z) if norm is None and _is_of_rows(total) and _is_constant(z) else z
    written[result] = read
    again = [user for user in total.users if is_backward(user)] if total is not result else []
    first = min([*again, *gradients])
    with graph.inserting_before(first):
        y, rounded = inlined(graph, inverse, (z, rows, verbatim, *operands), first)
    if y.target is inverses.UNTAGGED:
        _torch.compute_in_backward(y)
    for user in again:
        user.replace_input_with(total, rounded)
    if is_cast(result) and result.args[0] is not total:
        _widen_in_backward(graph, result, z)
    result.replace_all_uses_with(read)
    for node in gradients:
        inline(node, backward, (node.args[0], y, mean, var, total_count, rows, verbatim, *operands))


def _widen_in_backward(graph: fx.Graph, cast: fx.Node, z: fx.Node) -> None:
    """Makes backward read z instead of what it is a copy of."""
    (source,) = cast.all_input_nodes
    again = [user for user in source.users if is_backward(user)]
    if again:
        with graph.inserting_before(min(again)):
            (wide,) = inlined(graph, lambda z: z.to(source.meta["val"].dtype), (z,), min(again))
        for user in again:
            user.replace_input_with(source, wide)


class _Pass:
    def __init__(self, before: Callable[..., Any] | None) -> None:
        self.before = before

    def __call__(self, module: fx.GraphModule, inputs: Any) -> fx.GraphModule:
        return fuse(module if self.before is None else self.before(module, inputs))


def install() -> None:
    """Makes torch's compilers call `fuse`, after a pass that the user has installed."""
    if not _torch.call_on_joint_graphs(_Pass):
        _tell_once()


@cache
def _tell_once() -> None:
    _logger.info("compiled models hold what torch's do: this torch's compilers call no pass on their joint graphs")


_logger = logging.getLogger("inplace_abn")
