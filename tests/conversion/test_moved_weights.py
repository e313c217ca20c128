"""Weights and biases that an optimizer moves far between two measurements."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import inplace_abn
from inplace_abn.guard.figures import THRESHOLDS

CHANNELS = 12
SOME, ALL = [1, 5, 6], list(range(CHANNELS))
NORMS = {
    "batch": nn.BatchNorm2d,
    "instance": lambda channels: nn.InstanceNorm2d(channels, affine=True),
    "group": lambda channels: nn.GroupNorm(3, channels),
}
ACTIVATIONS = {"relu": F.relu, "silu": F.silu, "elu": F.elu, "mish": F.mish}


class Net(nn.Module):
    def __init__(self, norm, activation, weight=1.0, bias=0.0, adds=False):
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, CHANNELS, 1, bias=False), NORMS[norm](CHANNELS)
        self.last = nn.Conv2d(CHANNELS, 2, 1)
        nn.init.constant_(self.norm.weight, weight)
        nn.init.constant_(self.norm.bias, bias)
        self.activation, self.adds = ACTIVATIONS[activation], adds

    def forward(self, x):
        y = self.first(x)
        z = self.norm(y)
        return self.last(self.activation(z + y if self.adds else z))


def gradients(net, x, dtype):
    net.zero_grad()
    with torch.autocast("cpu", dtype, enabled=dtype in (torch.bfloat16, torch.float16)):
        z = net(x)
    # Gradients follow the input.
    ((1 + x[:, :2]) * z).mean().backward()
    return {name: p.grad.double() for name, p in net.named_parameters()}


def assert_right_in_the_same_step(model, channels, weight, bias, dtype):
    """Gradients are as exact as is trusted in a step before which an optimizer has set weights and biases."""
    torch.manual_seed(0)
    model = model.to(torch.promote_types(dtype, torch.float32))
    converted = inplace_abn.convert(model)
    optimizer = torch.optim.SGD(converted.parameters(), lr=1.0)

    def batch():
        return torch.randn(16, 3, 8, 8, dtype=next(model.parameters()).dtype)

    # Step 4 is measured, steps 5 to 7 are not.
    for step in range(6):
        gradients(converted, batch(), dtype)
        for p in converted.parameters():
            p.grad = torch.zeros_like(p)
        if step == 5:
            norm = converted.norm
            for p, value in ((norm.weight, weight), (norm.bias, bias)):
                p.grad[channels] = p.detach()[channels] - value
        optimizer.step()
    x = batch()
    exact = inplace_abn.revert(copy.deepcopy(converted)).double()
    native = copy.deepcopy(exact).to(x.dtype)
    expected = gradients(exact, x.double(), torch.float64)
    found, torchs = (gradients(net, x, dtype) for net in (converted, native))
    for name, e in expected.items():
        bound = THRESHOLDS[dtype].weight if name.startswith("norm") else THRESHOLDS[dtype].x
        assert (found[name] - e).norm() <= (torchs[name] - e).norm() + bound * e.norm(), name
    return converted.norm


@pytest.mark.parametrize("small", [1e-3, -1e-3, 1e-4])
@pytest.mark.parametrize("adds", [False, True], ids=["bias", "residual"])
@pytest.mark.parametrize("norm", NORMS)
def test_weights_that_become_small_are_saved_in_the_same_step(norm, adds, small):
    """Gradients of weights that were larger than eps, but small beside bias or residual, were any number."""
    found = assert_right_in_the_same_step(Net(norm, "relu", bias=1.0, adds=adds), SOME, small, 1.0, torch.bfloat16)
    assert found.outcome().in_place
    assert found.shares_saved()[torch.bfloat16] == len(SOME) / CHANNELS


CASES = {
    "next to a minimum": ("silu", SOME, (1.0, 0.0), (1e-3, -1.278), torch.float32),
    "all, next to a minimum": ("silu", ALL, (0.3, 0.5), (0.02, -1.278), torch.float32),
    "all, beside the same bias": ("mish", ALL, (1.0, -1.19), (0.25, -1.19), torch.bfloat16),
    "a large bias": ("relu", SOME, (0.05, 0.0), (0.05, 4.0), torch.bfloat16),
    "a bias at a minimum": ("silu", ALL, (0.1, 1.0), (0.1, -1.278), torch.bfloat16),
    "a bias where it saturates": ("elu", ALL, (1.0, 0.0), (1.0, -6.0), torch.bfloat16),
    "a weight that grows": ("elu", ALL, (1.0, 0.0), (6.0, -3.0), torch.float32),
    "channels that were dead": ("relu", SOME, (1.0, -9.0), (1e-2, 1.0), torch.bfloat16),
    "one that had most of dx": ("silu", [0], (0.05, -1.278), (0.0, 0.0), torch.float32),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("norm", NORMS)
def test_weights_and_biases_that_move_far_are_measured_in_the_same_step(norm, case):
    """Errors of dx were up to 40 times, and of dweight up to 6 times as large as is trusted."""
    activation, channels, before, after, dtype = CASES[case]
    model = Net(norm, activation, *before)
    if case.startswith("one"):
        nn.init.constant_(model.norm.weight[:1], 10.0)
    assert_right_in_the_same_step(model, channels, *after, dtype)


def test_inputs_without_a_variance_say_nothing_of_small_weights():
    """A measurement of zeros has no error, and so no later weight was too small."""
    model = Net("batch", "relu")
    nn.init.zeros_(model.first.weight)
    converted = inplace_abn.convert(model)
    optimizer = torch.optim.SGD(converted.parameters(), lr=1.0)
    for _ in range(6):
        gradients(converted, torch.randn(16, 3, 8, 8), torch.bfloat16)
        converted.zero_grad()
        optimizer.step()
    with torch.no_grad():
        nn.init.normal_(converted.first.weight)
    converted.norm.weight.grad, converted.norm.bias.grad = torch.full((CHANNELS,), 0.99), torch.full((CHANNELS,), -1.0)
    optimizer.step()
    x = torch.randn(16, 3, 8, 8)
    exact = inplace_abn.revert(copy.deepcopy(converted)).double()
    expected, found = gradients(exact, x.double(), torch.float64), gradients(converted, x, torch.bfloat16)
    assert (found["norm.weight"] - expected["norm.weight"]).norm() < 0.02 * expected["norm.weight"].norm()


@pytest.mark.parametrize("kind", [nn.RMSNorm, nn.LayerNorm])
def test_weights_that_shrink_beside_no_bias_save_nothing(kind):
    """What is saved is measured, not estimated: without a bias the output has as many digits as before."""
    torch.manual_seed(0)
    model = inplace_abn.convert(nn.Sequential(nn.Linear(8, 16), kind(16), nn.Linear(16, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for _ in range(12):
        with torch.autocast("cpu", torch.bfloat16):
            model(torch.randn(64, 8)).float().square().sum().backward()
        model.zero_grad()
        model[1].weight.grad = 0.5 * model[1].weight.detach()
        optimizer.step()
        assert set(model[1].shares_saved().values()) == {0.0}


@pytest.mark.parametrize("signed", [False, True])
def test_a_module_in_place_whose_weight_becomes_small_beside_its_residual_is_right_in_the_same_step(signed):
    torch.manual_seed(0)
    layer = inplace_abn.InPlaceABN(CHANNELS, signed_weight=signed, overwrite_input=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    for step in range(7):
        x, residual = (torch.randn(16, CHANNELS, 8, 8).bfloat16() for _ in range(2))
        optimizer.zero_grad()
        found = layer(x, residual)
        weight, bias = (p.detach().clone().requires_grad_() for p in (layer.weight, layer.bias))
        scale = weight if signed else weight.abs() + layer.eps
        y = F.batch_norm(x.float(), None, None, scale, bias, True, 0.0, layer.eps) + residual.float()
        expected = F.leaky_relu(y, 0.01)
        direction = torch.randn(y.shape) + (x.float() - x.float().mean((0, 2, 3), True))
        (expected * direction).sum().backward()
        (found * direction.bfloat16()).sum().backward()
        off = (layer.weight.grad - weight.grad)[SOME].abs().max() / weight.grad[SOME].abs().max()
        assert off < 0.01, step
        layer.zero_grad()
        if step == 5:
            layer.weight.grad = torch.zeros(CHANNELS)
            layer.weight.grad[SOME] = layer.weight.detach()[SOME] - 1e-3
        optimizer.step()


def test_a_batch_that_is_evaluated_after_weights_have_moved_does_not_keep_a_layer_from_being_in_place():
    torch.manual_seed(0)
    layer = inplace_abn.InPlaceABN(CHANNELS, activation="relu", signed_weight=True)
    x = torch.randn(16, CHANNELS, 8, 8)

    def step():
        given = x.clone().requires_grad_() * 1.0
        z = layer(given)
        z.sum().backward()
        return z.data_ptr() == given.data_ptr()

    assert step()
    layer.weight.data[SOME] = 1e-7
    layer.eval()
    with torch.no_grad():
        layer(x.clone())
    layer.train()
    assert step()
    assert layer.shares_saved()[torch.float32] == len(SOME) / CHANNELS


@pytest.mark.parametrize("count", [CHANNELS - 4, CHANNELS + 4])
@pytest.mark.parametrize("small", [1.0, 0.0], ids=["", "channels are saved"])
@pytest.mark.parametrize("norm", ["batch", "instance"])
def test_channels_may_be_cut_out_or_added(norm, small, count):
    """Bounds and saved channels of the old number of channels were an error in every further call."""
    torch.manual_seed(0)
    model = Net(norm, "relu").double()
    with torch.no_grad():
        model.norm.weight[SOME] = small
    converted = inplace_abn.convert(copy.deepcopy(model))
    for step in range(6):
        if step == 3:
            for net in (model, converted):
                torch.manual_seed(1)
                net.first = nn.Conv2d(3, count, 1, bias=False).double()
                net.last = nn.Conv2d(count, 2, 1).double()
                net.norm.num_features = count
                net.norm.weight = nn.Parameter(torch.rand(count).double())
                net.norm.bias = nn.Parameter(torch.rand(count).double())
                if norm == "batch":
                    net.norm.running_mean, net.norm.running_var = (
                        torch.zeros(count).double(),
                        torch.ones(count).double(),
                    )
        x = torch.randn(4, 3, 8, 8).double()
        found, expected = (gradients(net, x, torch.float64) for net in (converted, model))
        torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9)
        inplace_abn.guard.generations.advance()


def test_where_a_call_cannot_be_measured_moved_weights_make_it_torchs_for_a_reason():
    converted, x = inplace_abn.convert(Net("batch", "relu", bias=1.0)), torch.randn(16, 3, 8, 8)
    for _ in range(2):
        gradients(converted, x, torch.float32)
    assert inplace_abn.report(converted).layers[0].in_place
    with inplace_abn.guard.paused():
        converted.norm.weight.data[SOME] = 1e-9
        gradients(converted, x, torch.float32)
    (layer,) = inplace_abn.report(converted).layers
    assert not layer.in_place
    assert layer.why == "its weights have moved since they were measured, and this call cannot be measured"
    gradients(converted, x, torch.float32)
    assert inplace_abn.report(converted).layers[0].in_place
