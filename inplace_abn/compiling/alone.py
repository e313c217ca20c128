"""Activations without a norm, for compilers: an op marks the input of an activation of a converted model.

Where `compiling.joint` does not run, the op copies the input.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from inplace_abn.activations import find, is_relu

_aten = torch.ops.aten
_library = torch.library.Library("inplace_abn", "FRAGMENT")
_library.define("alone(Tensor x) -> Tensor")

ALONE = torch.ops.inplace_abn.alone.default

_library.impl(ALONE, torch.clone, "CompositeExplicitAutograd")
torch.library.register_fake(ALONE, torch.clone, lib=_library)
torch.library.register_autograd(ALONE, lambda ctx, dy: dy, lib=_library)

_MAKERS = frozenset([_aten.convolution.default, _aten.addmm.default, _aten.mm.default, _aten.bmm.default])
"""Ops whose result nobody else keeps."""
_SHAPING = frozenset([_aten.view.default, _aten._unsafe_view.default, _aten.reshape.default])


def marked(x: Tensor) -> Tensor:
    """x, marked as the input of an activation."""
    y: Tensor = ALONE(x)
    return y


def gains(activation: str, param: float, dtype: torch.dtype) -> bool:
    """Whether torch keeps the input of the activation, and not its result, and the result determines the input.

    In float16 the tags of a flat tail grow to a quarter with the input, which no norm limits here.
    """
    if activation == "leaky_relu":
        return param > 0 and not is_relu(activation, param)
    if is_relu(activation, param) or activation in ("identity", "none") or (activation == "elu" and param > 1):
        return False
    return dtype != torch.float16 or find(activation).zeros != "positive"


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


def _is_made(node: fx.Node) -> bool:
    return any(source.target in _MAKERS for source in _with_sources(node))


def _with_sources(node: Any) -> Iterator[fx.Node]:
    yield node
    while node.target in _SHAPING and isinstance(node.args[0], fx.Node):
        node = node.args[0]
        yield node
