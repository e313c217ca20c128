"""analyze of models that it does not see completely, because their evaluation fails or TorchScript runs a part."""

import copy
import json

import pytest
import torch
from analyzed_nets import Net, images, plain
from foreign_nets import conv, spread
from torch import nn

from inplace_abn import Example, analyze, convert, verify


def test_an_error_in_evaluation_is_in_the_plan():
    """The plan must tell of an error that the model raises in evaluation."""

    def forward(m, x):
        y = plain(m, x)
        return y if m.training else {}["mine"]

    plan = analyze(Net(forward), images())
    assert plan.evaluation_errors == ("KeyError: 'mine'",)
    assert "The model failed in evaluation" in str(plan)
    assert "KeyError: 'mine'" in str(plan)
    assert json.loads(json.dumps(plan.to_dict()))["evaluation_errors"] == ["KeyError: 'mine'"]
    assert len(analyze(Net(forward), Example(images()), Example(images())).evaluation_errors) == 1
    assert analyze(Net(plain), images()).evaluation_errors == ()

    def silent(m, x):
        if not m.training:
            raise ValueError
        return plain(m, x)

    assert analyze(Net(silent), images()).evaluation_errors == ("ValueError",)


def scripted(module):
    return torch.jit.script(module)


def traced(module):
    return torch.jit.trace(module, torch.randn(2, 4, 8, 8), check_trace=False)


@pytest.mark.parametrize("make", [scripted, traced])
@pytest.mark.filterwarnings("ignore:.*torch.jit", "ignore::DeprecationWarning")
def test_a_scripted_submodule_is_opaque(make):
    """A ScriptModule does not support register_forward_pre_hook. The analysis must not fail because of that."""
    inner = nn.Sequential(conv(4, 4), nn.BatchNorm2d(4), nn.ReLU())
    model = Net(plain)
    model.last = make(spread(inner))
    model.last.eval()
    state = {key: value.clone() for key, value in model.state_dict().items()}
    plan = analyze(model, images())
    assert [(layer.name, layer.reasons) for layer in plan.layers] == [("bn", ())]
    assert not model.last.training
    assert model.training
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert verify(model, convert(copy.deepcopy(model), plan), images())

    def skipped(m, x):
        x = m.conv(x)
        m.last(x)
        y = m.relu(m.bn(x))
        return y * m.last(x)

    other = Net(skipped)
    other.last = model.last
    (layer,) = analyze(other, images()).layers
    # The scripted module reads the norm's input and keeps it.
    assert any("convolution" in reason for reason in layer.kept), layer.kept
    assert analyze(model.last, torch.randn(2, 4, 8, 8)).layers == ()


@torch.jit.script
def compared(x):
    return torch.relu(x) * (x != 0)


@pytest.mark.filterwarnings("ignore:.*torch.jit", "ignore::DeprecationWarning")
def test_what_a_scripted_function_reads_is_seen():
    (layer,) = analyze(Net(lambda m, x: m.last(compared(m.bn(m.conv(x))))), images()).layers
    assert any("its pre-activation is also read by" in reason for reason in layer.reasons), layer.reasons
    model = spread(Net(lambda m, x: m.last(compared(m.relu(m.bn(m.conv(x)))))))
    (layer,) = analyze(model, images()).layers
    assert any("ne in the model compares them with zero" in r or "ne compares" in r for r in layer.reasons)
