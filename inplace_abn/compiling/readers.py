"""Finds readers that would notice a tag, as the watch of eager steps does, in a compiler's graph."""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx
from torch.utils._pytree import tree_leaves, tree_map_only

from inplace_abn import _torch, tags
from inplace_abn._torch import is_backward


class Readers:
    """The ops of the forward part of a joint graph of forward and backward."""

    def __init__(self, graph: fx.Graph) -> None:
        self._ops: list[tuple[fx.Node, tags.Op, list[tags.Seen]]] = []
        self._outputs: set[int] = set()
        for node in graph.nodes:
            if node.op == "output":
                nodes = [n for n in tree_leaves(node.args) if isinstance(n, fx.Node) and not is_backward(n)]
                self._outputs.update(seen.storage for n in nodes for seen in _seen(n))
            elif isinstance(node.target, _torch.OpOverload) and not is_backward(node):
                args, kwargs = tree_map_only(fx.Node, lambda n: n.meta.get("val"), (node.args, node.kwargs))
                self._ops.append((node, tags.op_of(node.target, args, kwargs), _seen(node)))

    def reads_tags(self, z: fx.Node, activation: str, param: float) -> bool:
        """Whether an op of the forward pass would notice the tags in an activation's result."""
        sign = tags.sign_of(activation, param)
        if not sign:
            return False
        follower = tags.Follower()
        (seen,) = _seen(z)
        follower.add(seen.storage, z, sign)
        start = next(i for i, (node, *_) in enumerate(self._ops) if node is z)
        for _, op, results in self._ops[start + 1 :]:
            if follower.readings(op):
                return True
            follower.follow(op, results)
        return bool(follower.chosen.keys() & self._outputs)


def _seen(node: Any) -> list[tags.Seen]:
    return [tags.seen(t) for t in tree_leaves(node.meta.get("val")) if isinstance(t, Tensor)]
