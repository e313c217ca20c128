"""Activations without a norm, for compilers: an op marks the input of an activation of a converted model.

Where `compiling.joint` does not run, the op copies the input.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

_aten = torch.ops.aten
_library = torch.library.Library("inplace_abn", "FRAGMENT")
_library.define("alone(Tensor x) -> Tensor")

ALONE = torch.ops.inplace_abn.alone.default
"""Marks x as the input of an activation."""

_library.impl(ALONE, torch.clone, "CompositeExplicitAutograd")
torch.library.register_fake(ALONE, torch.clone, lib=_library)
torch.library.register_autograd(ALONE, lambda ctx, dy: dy, lib=_library)

_MAKERS = frozenset([_aten.convolution.default, _aten.addmm.default, _aten.mm.default, _aten.bmm.default])
"""Ops whose result nobody else keeps."""
VIEWS = frozenset([_aten.view.default, _aten._unsafe_view.default, _aten.reshape.default])


def inputs(graph: fx.Graph) -> list[fx.Node]:
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
