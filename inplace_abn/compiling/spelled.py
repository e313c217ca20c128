"""Recognises the activations that a graph's ops spell out.

Compilers decompose activations before the graph can be seen, and each release of torch does so in its own way. So the
patterns are made by decomposing our own activations in the same way.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from inplace_abn import _torch
from inplace_abn._torch import decompositions, is_backward
from inplace_abn.activations import ACTIVATIONS, IDENTITY, TYPICAL, activate, find, is_relu, name_of

_PARAM = 0.40234375
"""Stands for the parameter of an activation that has one.

It is a number that no activation contains and that 16 bits can hold.
"""
_SPELLINGS = [
    *((name, _PARAM) for name, entry in ACTIVATIONS.items() if entry.param),
    *(what for what in TYPICAL if what != IDENTITY),
]


def activation_key(activation: str, param: float) -> str:
    """The activation as one word, by which a norm names the activations that it trusts."""
    if is_relu(activation, param):
        return "relu"
    entry = find(activation)
    name = name_of(entry.code)
    return name if not entry.param or param >= entry.alike_from else f"{name}={float(param)}"


def activated(y: fx.Node) -> tuple[fx.Node, str, float] | None:
    """The node that activates ``y``, with the activation and its parameter.

    None if there is none, or if anything else in the forward pass reads ``y``.
    """
    for activation, param in _SPELLINGS:
        # As it is, and as inductor decomposes it.
        for taken_apart in (False, True) if decompositions() is not None else (False,):
            found = _match(y, _pattern(y.meta["val"].dtype, activation, param, taken_apart))
            if found is not None:
                result, seen = found
                return result, activation, seen if param == _PARAM else param
    return None


@cache
def _pattern(dtype: torch.dtype, activation: str, param: float, taken_apart: bool) -> fx.Graph:
    example = torch.empty([2, 2], dtype=dtype, device="meta")
    table = decompositions() if taken_apart else None
    return make_fx(lambda t: activate(t, activation, param), decomposition_table=table)(example).graph


def _match(y: fx.Node, pattern: fx.Graph) -> tuple[fx.Node, float] | None:
    """The node that matches the pattern's result, and the activation's parameter; None if the graph does not match."""
    # The graph may have equal nodes, because the compiler has not merged them yet.
    alike: dict[fx.Node, set[fx.Node]] = {}
    params: set[float] = set()
    source, *parts, output = pattern.nodes
    alike[source] = {y}
    for part in parts:
        readers = {user for given in part.all_input_nodes for node in alike[given] for user in node.users}
        alike[part] = {node for node in readers if _is_spelled(node, part, alike, params)}
        if not alike[part]:
            return None
    (last,) = output.all_input_nodes
    results = [node for node in alike.pop(last) if not is_backward(node)]
    if len(results) != 1 or len(params) > 1:
        return None
    inner = {node for nodes in alike.values() for node in nodes if not is_backward(node)}
    known = inner | {*results}
    if any(user not in known and not (node is y and is_backward(user)) for node in inner for user in node.users):
        return None
    return results[0], next(iter(params), _PARAM)


def _is_spelled(node: fx.Node, part: fx.Node, alike: dict[fx.Node, set[fx.Node]], params: set[float]) -> bool:
    """Whether a node of the graph is the same op as ``part`` of the pattern, with arguments that match."""
    if node.target is not part.target or is_backward(node):
        return False
    found: list[float] = []

    def same(value: Any, wanted: Any) -> bool:
        if isinstance(wanted, fx.Node):
            return isinstance(value, fx.Node) and value in alike[wanted]
        if wanted == _PARAM:
            found.append(value)
            return isinstance(value, (int, float))
        return bool(value == wanted)

    if not all(map(same, _given(node), _given(part))):
        return False
    params.update(found)
    return True


def _given(node: fx.Node) -> list[Any]:
    """The arguments of an op, with its defaults."""
    values = []
    for i, argument in enumerate(_torch.schema_of(node.target).arguments):  # type: ignore[union-attr]
        default = argument.default_value if argument.has_default_value() else None
        values.append(node.args[i] if i < len(node.args) else node.kwargs.get(argument.name, default))
    return values
