"""The activations that converted norms take over, as modules and as function calls."""

import copy

import pytest
import torch
import torch.nn.functional as F
from convertible_nets import images
from foreign_nets import CalledActivation, conv, spread
from torch import nn
from training import check_training

from inplace_abn import analyze, convert
from inplace_abn.activations import find
from inplace_abn.memory import measure


def layer_of(model):
    (layer,) = analyze(model, images(8)).layers
    return layer


@pytest.mark.parametrize(
    ("activation", "name"),
    [
        (nn.ReLU(), "relu"),
        (nn.ReLU(inplace=True), "relu"),
        (nn.LeakyReLU(0.2), "leaky_relu"),
        (nn.LeakyReLU(0.2, inplace=True), "leaky_relu"),
        (nn.ELU(1.5), "elu"),
        (nn.ELU(1.5, inplace=True), "elu"),
        (nn.SiLU(), "silu"),
        (nn.SiLU(inplace=True), "silu"),
        (nn.Hardswish(), "hardswish"),
        (nn.Hardswish(inplace=True), "hardswish"),
        (nn.GELU(), "gelu"),
        (nn.GELU("tanh"), "gelu_tanh"),
        (nn.Mish(), "mish"),
        (nn.Mish(inplace=True), "mish"),
    ],
    ids=str,
)
def test_activation_modules_are_taken_over_and_one_tensor_is_kept(activation, name):
    model, x = spread(nn.Sequential(conv(3, 4), nn.BatchNorm2d(4), activation, conv(4, 4))), images(32)
    layer = layer_of(model)
    assert (layer.in_place, layer.follows) == (True, name), layer.why
    check_training(model, images(8), tolerance=1e-6 if find(name).special else 1e-9)
    size = 2 * 4 * 32 * 32 * 4
    # If an activation with a minimum is in place, autograd keeps a copy. That takes as much as out of place.
    held = 3 if find(name).special or (name in ("elu", "leaky_relu") and not activation.inplace) else 2
    native = measure(copy.deepcopy(model), x).held
    assert native - measure(convert(model), x).held == pytest.approx((held - 1) * size, rel=0.02)


@pytest.mark.parametrize("activation", [nn.SELU, nn.ReLU6, nn.Tanh, nn.Softplus])
def test_before_other_activations_a_norm_is_in_place_if_they_keep_its_output(activation):
    model = spread(nn.Sequential(conv(3, 4), nn.BatchNorm2d(4), activation(), conv(4, 4)))
    # tanh keeps only its result, so nobody keeps the BatchNorm's result.
    assert layer_of(model).in_place == (activation is not nn.Tanh)
    check_training(model, images(8))


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
    layer = layer_of(model)
    assert (layer.in_place, layer.follows) == (True, name), layer.why
    check_training(model, images(8), tolerance=1e-6 if find(name).special else 1e-9)
