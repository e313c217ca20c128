"""What is known of an activation comes from one table: whatever recognises activations knows all of them."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from inplace_abn import convert, report
from inplace_abn.activations import ACTIVATIONS, TYPICAL, activate, find
from inplace_abn.compiling.spelled import activated
from inplace_abn.conversion.recognition import KNOWN

WITH_OPS = {f"{name}({param})": (name, param) for name, param in TYPICAL if find(name).op}


@pytest.fixture(params=WITH_OPS, ids=str)
def case(request):
    return WITH_OPS[request.param]


def arguments(name, param):
    entry = find(name)
    given = {entry.param: param} if entry.param else {}
    return given | ({"approximate": entry.approximate} if entry.approximate else {})


def test_its_functions_are_recognised(case):
    name, param = case
    op, x = find(name).op, torch.randn(2, 3)
    functions = [getattr(space, op, None) for space in (F, torch, torch.Tensor, torch.ops.aten)]
    found = [KNOWN[function]((x,), arguments(name, param)) for function in functions if function is not None]
    assert found
    assert {(call.activation, call.param, call.in_place) for call in found} == {(name, param, False)}


def test_its_module_is_in_place_behind_a_norm_and_alone_where_that_gains(case):
    name, param = case
    entry = find(name)
    torch.manual_seed(0)
    native = nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), entry.module(param), nn.Linear(8, 8), entry.module(param)
    )
    native = nn.Sequential(*native, nn.Linear(8, 2)).double()
    converted, x = convert(copy.deepcopy(native)), torch.randn(16, 6, dtype=torch.float64)
    for _ in range(2):
        for model in (native, converted):
            model.zero_grad()
            model(x).square().sum().backward()
        for own, expected in zip(converted.parameters(), native.parameters(), strict=True):
            torch.testing.assert_close(own.grad, expected.grad)
    layers = {layer.name: layer for layer in report(converted).layers}
    assert layers["1"].in_place
    assert layers["1"].follows == name
    assert ("4" in layers and layers["4"].in_place) == entry.gains(param)


def test_compilers_recognise_it(case):
    name, param = case
    graph = make_fx(lambda y: activate(y * 1, name, param).sin())(torch.randn(2, 3)).graph
    (y,) = (node for node in graph.nodes if node.target is torch.ops.aten.mul.Tensor)
    assert isinstance(y, fx.Node)
    _, *found = activated(y)
    assert find(found[0]) is find(name)
    assert found[1] == param


def test_every_activation_of_the_table_is_here():
    assert {name for name, _ in WITH_OPS.values()} | {"identity", "none"} == ACTIVATIONS.keys()
