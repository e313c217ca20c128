"""The activations that analyze and convert take over, as modules and as function calls."""

import copy
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from convertible_nets import images
from foreign_nets import CalledActivation, ResNet, conv, spread
from torch import nn

from inplace_abn import analyze, convert, verify
from inplace_abn.activations import find


@pytest.mark.parametrize(
    ("activation", "name", "param"),
    [
        (nn.ReLU(), "relu", None),
        (nn.ReLU(inplace=True), "relu", None),
        (nn.LeakyReLU(0.2), "leaky_relu", 0.2),
        (nn.LeakyReLU(0.2, inplace=True), "leaky_relu", 0.2),
        (nn.ELU(1.5), "elu", 1.5),
        (nn.ELU(1.5, inplace=True), "elu", 1.5),
        (nn.SiLU(), "silu", None),
        (nn.SiLU(inplace=True), "silu", None),
        (nn.Hardswish(), "hardswish", None),
        (nn.Hardswish(inplace=True), "hardswish", None),
        (nn.GELU(), "gelu", None),
        (nn.GELU("tanh"), "gelu_tanh", None),
        (nn.Mish(), "mish", None),
        (nn.Mish(inplace=True), "mish", None),
    ],
    ids=str,
)
def test_activation_modules_are_recognised_by_what_they_do(activation, name, param):
    model = nn.Sequential(conv(3, 4), nn.BatchNorm2d(4), activation, conv(4, 4))
    (layer,) = analyze(model, images(8)).layers
    assert (layer.convertible, layer.activation) == (True, name), layer.reasons
    assert param is None or layer.activation_param == param
    size = 2 * 4 * 8 * 8 * 4
    # If an activation with a minimum is in place, autograd keeps a copy. That takes as much as out of place.
    held = 3 if find(name).special or (name in ("elu", "leaky_relu") and not activation.inplace) else 2
    assert layer.bytes_saved == (held - 1) * size


@pytest.mark.parametrize("activation", [nn.SELU, nn.ReLU6, nn.Tanh, nn.Softplus])
def test_before_other_activations_a_layer_goes_in_place_if_that_saves(activation):
    model = spread(nn.Sequential(conv(3, 4), nn.BatchNorm2d(4), activation(), conv(4, 4)))
    (layer,) = analyze(model, images(8)).layers
    # tanh keeps only its result, so nobody keeps the BatchNorm's result.
    keeps_input = activation not in (nn.Tanh,)
    assert layer.activation == "identity"
    if activation is nn.SELU:
        assert layer.convertible
    assert layer.convertible == keeps_input, layer.reasons


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda y: F.relu(y), "relu"),
        (lambda y: F.relu(y, inplace=True), "relu"),
        (lambda y: y.relu(), "relu"),
        (lambda y: torch.relu_(y), "relu"),
        (lambda y: F.leaky_relu(y, 0.3), "leaky_relu"),
        (lambda y: F.silu(y), "silu"),
        (lambda y: F.hardswish(y), "hardswish"),
        (lambda y: F.gelu(y), "gelu"),
        (lambda y: F.gelu(input=y, approximate="tanh"), "gelu_tanh"),
        (lambda y: F.mish(y, inplace=True), "mish"),
        (lambda y: F.elu(y, 0.5), "elu"),
    ],
)
def test_an_activation_that_is_a_function_call_is_taken_over(call, name):
    model = spread(nn.Sequential(CalledActivation(3, 4, call), conv(4, 4)))
    plan = analyze(model, images(8))
    (layer,) = plan.layers
    assert (layer.convertible, layer.activation) == (True, name), layer.reasons
    assert verify(model, convert(copy.deepcopy(model), plan), images(8))


def test_a_norm_whose_output_is_read_otherwise_too_is_left_as_it_is():
    class Dynamic(CalledActivation):
        def forward(self, x):
            y = self.bn(self.conv(x))
            return self.activation(y) if y.sum() > -1e9 else y

    for call in (F.relu, F.silu):
        model = spread(nn.Sequential(Dynamic(3, 4, call), conv(4, 4)))
        (layer,) = analyze(model, images(8)).layers
        assert layer.reasons == ("its pre-activation is also read by sum in 0",)
        assert verify(model, convert(copy.deepcopy(model)), images(8))


def counted(block, y):
    block.bn.num_batches_tracked += 1
    return y


def stored_on(block, y):
    block.shape = y.shape
    return y


def partly_without_grad(y):
    with torch.no_grad():
        scale = y.mean() + 1
    return y * scale


def optional(self, x, mask=None):
    y = F.relu(self.bn(self.conv(x)))
    return y if mask is None else y * mask


FORWARDS = {
    "training flag": lambda self, x: F.dropout(F.relu(self.bn(self.conv(x))), 0.5, self.training),
    "random": lambda self, x: F.relu(self.bn(self.conv(x))) * random.random(),
    "torch.rand": lambda self, x: F.relu(self.bn(self.conv(x))) * torch.rand(1).item(),
    "numpy": lambda self, x: F.relu(self.bn(self.conv(x))) * np.random.rand(),  # noqa: NPY002
    "buffers": lambda self, x: counted(self, F.relu(self.bn(self.conv(x)))),
    "attributes": lambda self, x: stored_on(self, F.relu(self.bn(self.conv(x)))),
    "no_grad": lambda self, x: partly_without_grad(F.relu(self.bn(self.conv(x)))),
    "optional arguments": optional,
}


@pytest.mark.parametrize("name", FORWARDS)
def test_forward_passes_that_tracing_would_have_changed_are_taken_over(name):
    block = type("Block", (CalledActivation,), {"forward": FORWARDS[name]})
    model = spread(nn.Sequential(block(3, 4), conv(4, 4)))
    plan = analyze(model, images(8))
    assert plan.layers[0].convertible
    converted = convert(copy.deepcopy(model), plan)
    results = []
    for net in (model, converted):
        for seeded in (random.seed, torch.manual_seed, np.random.seed):
            seeded(3)
        outputs = [net(x) for x in (torch.ones(2, 3, 8, 8), torch.linspace(-1, 1, 384).view(2, 3, 8, 8))]
        sum(z.square().sum() for z in outputs).backward()
        results.append([*outputs, *(p.grad for p in net.parameters())])
    for ours, others in zip(*results, strict=True):
        torch.testing.assert_close(ours, others, rtol=1e-4, atol=1e-4)
    assert not torch.equal(results[0][0].mean(), results[0][1].mean())


def test_an_activation_module_that_several_norms_share_is_no_obstacle():
    plan = analyze(ResNet(), torch.randn(2, 3, 32, 32))
    names = ["bn1", "layer1.0.bn1", "layer1.1.bn1", "layer2.0.bn1", "layer2.1.bn1"]
    assert [layer.name for layer in plan.convertible] == names
