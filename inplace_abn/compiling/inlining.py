"""Replaces the ops of a compiler's graph by the ops of Python functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from inplace_abn._torch import decompositions


def inlined(graph: fx.Graph, function: Callable[..., Any], arguments: Sequence[Any], like: fx.Node) -> list[fx.Node]:
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


def inline(node: fx.Node, function: Callable[..., Any], arguments: Sequence[Any] | None = None) -> list[fx.Node]:
    """Replaces an op by ``function`` of its arguments, or of others. Returns the nodes of the results."""
    graph = node.graph
    with graph.inserting_before(node):
        found = inlined(graph, function, node.args if arguments is None else arguments, node)
    if isinstance(node.meta["val"], Tensor):
        node.replace_all_uses_with(found[0])
    for part in list(node.users):
        part.replace_all_uses_with(found[part.args[1]])  # type: ignore[index]
        graph.erase_node(part)
    graph.erase_node(node)
    return found
