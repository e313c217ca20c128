"""Finds readers that would notice a tag, as `inplace_abn.tags` does, in a compiler's graph instead of a recording."""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from inplace_abn import _torch, tags
from inplace_abn._torch import is_backward
from inplace_abn.recording import Op, Recording, Seen


class Readers:
    """The forward part of a joint graph of forward and backward, as a recording."""

    def __init__(self, graph: fx.Graph) -> None:
        self._recording = Recording()
        self._numbers: dict[int, int] = {}
        self._places: dict[fx.Node, int] = {}
        for node in graph.nodes:
            if node.op == "output":
                nodes = [n for n in tree_leaves(node.args) if isinstance(n, fx.Node) and not is_backward(n)]
                self._recording.outputs.update(seen.storage for n in nodes for seen in self._seen(n))
            elif isinstance(node.target, _torch.OpOverload) and not is_backward(node):
                op = self._op(node, node.target)
                if op.reads or not op.tensors:
                    self._places[node] = len(self._recording.ops)
                    self._recording.ops.append(op)

    def tell_tags(self, z: fx.Node, activation: str, param: float) -> bool:
        """Whether an op of the forward pass would notice the tags in an activation's result."""
        (seen,) = self._seen(z)
        return bool(tags.readers(self._recording, seen.storage, self._places[z], activation, param))

    def _seen(self, node: Any) -> list[Seen]:
        tensors = [t for t in tree_leaves(node.meta.get("val")) if isinstance(t, Tensor)]
        return [Seen(self._number(t), t.shape, t.dtype, t.device, True) for t in tensors]

    def _number(self, t: Tensor) -> int:
        return self._numbers.setdefault(_torch.storage_key(t.untyped_storage()), len(self._numbers))

    def _op(self, node: fx.Node, target: _torch.OpOverload) -> Op:
        schema = _torch.schema_of(target)
        names = [argument.name for argument in schema.arguments]
        values = {
            argument.name: argument.default_value for argument in schema.arguments if argument.has_default_value()
        }
        values |= dict(zip(names, node.args, strict=False)) | node.kwargs
        tensors = tuple(seen for source in node.all_input_nodes for seen in self._seen(source))
        values = {name: value for name, value in values.items() if not isinstance(value, fx.Node)}
        results = tuple(self._seen(node))
        reads = frozenset(seen.storage for seen in tensors) - {seen.storage for seen in results}
        name = schema.name.split("::")[1]
        return Op(name, "", tensors, values, reads, frozenset(), results, True)
