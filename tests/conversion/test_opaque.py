"""Conversion of models of which TorchScript runs a part."""

import copy

import pytest
import torch
from foreign_nets import conv, spread
from one_norm import OneNorm, images, plain
from torch import nn
from training import check_training

from inplace_abn import analyze, convert, report, verify

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit", "ignore::DeprecationWarning")


def scripted(module):
    return torch.jit.script(module)


def traced(module):
    return torch.jit.trace(module, torch.randn(2, 4, 8, 8), check_trace=False)


def before_and_after(m, x):
    x = m.conv(x)
    m.last(x)
    return m.act(m.bn(x)) * m.last(x)


@pytest.mark.parametrize("make", [scripted, traced])
@pytest.mark.parametrize("forward", [plain, before_and_after])
def test_norms_of_a_scripted_submodule_are_left_alone(make, forward):
    """A ScriptModule does not support register_forward_pre_hook. Nothing may fail because of that."""
    inner = nn.Sequential(conv(4, 4), nn.BatchNorm2d(4), nn.ReLU())
    model = spread(OneNorm(forward))
    model.last = make(spread(inner))
    model.last.eval()
    state = {key: value.clone() for key, value in model.state_dict().items()}
    found = analyze(model, images())
    assert [(layer.name, layer.in_place) for layer in found.layers] == [("bn", True)]
    assert not model.last.training
    assert model.training
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert verify(model, convert(copy.deepcopy(model)), images())
    assert report(convert(model.last)).layers == ()


@torch.jit.script
def squared(x):
    return torch.relu(x) * x


def test_a_scripted_function_gets_the_norms_output():
    model = spread(OneNorm(lambda m, x: m.last(squared(m.bn(m.conv(x))))))
    check_training(model, images())
    (layer,) = analyze(model, images()).layers
    assert (layer.in_place, layer.why) == (False, "it cannot be seen what keeps its output")


@torch.jit.script
def compared(x):
    return torch.relu(x) * (x != 0)


def test_what_a_scripted_function_reads_is_seen():
    model = spread(OneNorm(lambda m, x: m.last(compared(m.act(m.bn(m.conv(x)))))))
    (layer,) = report(check_training(model, images())).layers
    assert "ne compares them with zero" in layer.why
