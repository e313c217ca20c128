"""What is measured counts for the dtype that it was measured in. A layer that meets another dtype is measured first, as
a new one is."""

import pytest
import torch
from cases import param_of
from modes import error_of_dx, layer
from torch import nn

from inplace_abn import InPlaceABNSync, InPlaceInstanceNorm, convert, guard, set_guard

# The error that a layer had which was measured in float32 before.
FORMER = {
    "silu float16 gamma 10: dx 13 %": ("silu", torch.float16, 10.0, 0.0),
    "leaky_relu bfloat16 gamma 0.02 beta 1: dweight 14 %": ("leaky_relu", torch.bfloat16, 0.02, 1.0),
    "relu bfloat16 gamma 0.5 beta 10: dx 6 %": ("relu", torch.bfloat16, 0.5, 10.0),
}


def step(model, module, x, dz):
    module.zero_grad()
    leaf = x.clone().requires_grad_()
    z = model(leaf * 1)
    z.backward(dz)
    return [z.detach(), leaf.grad, module.weight.grad.clone(), module.bias.grad.clone()]


def converted(activation, kind):
    activated = {"silu": nn.SiLU(), "relu": nn.ReLU(), "leaky_relu": nn.LeakyReLU(1.0)}[activation]
    return convert(nn.Sequential(kind(8, affine=True), activated))


MAKES = {
    "InPlaceABN": lambda activation: layer(activation),
    "InPlaceABNSync": lambda activation: InPlaceABNSync(
        8, activation=activation, activation_param=param_of(activation, 1.0), signed_weight=True
    ),
    "InPlaceInstanceNorm": lambda activation: InPlaceInstanceNorm(
        8, affine=True, activation=activation, activation_param=param_of(activation, 1.0)
    ),
    "converted BatchNorm": lambda activation: converted(activation, nn.BatchNorm2d),
    "converted InstanceNorm": lambda activation: converted(activation, nn.InstanceNorm2d),
}


@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize("case", FORMER)
@pytest.mark.filterwarnings("ignore:inplace_abn_sync")
def test_a_layer_that_was_measured_in_float32_is_measured_again_in_16_bits(case, make):
    """The mode that was found in float32 was used in 16 bits, where the input is not recoverable."""
    activation, dtype, gamma, beta = FORMER[case]
    results = []
    x = torch.randn(8, 8, 32, 32)
    dz = torch.randn(x.shape) + 2 * x
    for is_new in (False, True):
        model = MAKES[make](activation)
        module = model[0] if isinstance(model, nn.Sequential) else model
        nn.init.constant_(module.weight, gamma)
        nn.init.constant_(module.bias, beta)
        for _ in () if is_new else range(2):
            step(model, module, x, dz)
            assert module.shares_saved() == {torch.float32: 0.0}
            guard.generations.advance()
        results.append(step(model, module, x.to(dtype), dz.to(dtype)))
        guard.generations.advance()
        assert module.shares_saved()[dtype] == 1.0
    for ours, of_new in zip(*results, strict=True):
        assert torch.equal(ours, of_new)


def test_each_dtype_has_a_mode_of_its_own():
    module = set_guard(layer("relu", 0.5, 10.0), interval=2)
    for _ in range(6):
        in_place = []
        for dtype in (torch.float32, torch.bfloat16):
            given = torch.randn(8, 8, 16, 16).to(dtype).requires_grad_() * 1
            z = module(given)
            z.sum().backward()
            in_place.append(z.data_ptr() == given.data_ptr())
        assert in_place == [True, False]
        guard.generations.advance()


def test_autocast_in_later_epochs_is_measured_first():
    """Training began in float32, and went on under autocast."""
    model = convert(nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.SiLU(), nn.Conv2d(8, 8, 1)))
    nn.init.constant_(model[1].weight, 30.0)
    x = torch.randn(8, 3, 16, 16)
    for _ in range(2):
        model(x).sum().backward()
        guard.generations.advance()
    with torch.autocast("cpu", torch.bfloat16):
        model(x).sum().backward()
    assert {mode.dtype for mode in model[1]._guard.modes.values()} == {torch.float32, torch.bfloat16}
    assert all(mode.measured_at >= 0 for mode in model[1]._guard.modes.values())


def test_messages_say_in_which_dtype_a_layer_keeps_its_input(logged):
    records = logged("INFO")
    module = layer(gamma=0.5, beta=10.0)
    assert error_of_dx(module, torch.randn(8, 8, 16, 16)) < 1e-4
    assert error_of_dx(module, torch.randn(8, 8, 16, 16).bfloat16()) < 0.01
    (record,) = records
    assert "it saves its input for backward in bfloat16, as torch does" in record.getMessage()
