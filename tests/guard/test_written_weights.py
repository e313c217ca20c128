"""Optimizers change weights by little between two measurements. Whatever else writes to a weight or a bias makes the
layer be measured at its next call, as a new one is."""

import copy

import pytest
import torch
from modes import end_beginning, error_of_dx, is_trusted, layer, the_mode
from torch import nn
from torch.nn.utils import prune

from inplace_abn import InPlaceABN, InPlaceABNSync, InPlaceInstanceNorm, convert, guard, set_guard
from inplace_abn.guard import measuring

MASK = torch.ones(8)
MASK[2] = 0


@torch.no_grad()
def set_an_element(module):
    module.weight[2] = 0


@torch.no_grad()
def multiply(module):
    module.weight.mul_(MASK)


@torch.no_grad()
def copy_an_average(module):
    module.weight.copy_(0.99 * module.weight * MASK)


def write_below_autograd(module):
    module.weight.detach()[2] = 0


def replace(module):
    module.weight = nn.Parameter(module.weight.detach() * MASK)


def prune_a_channel(module):
    prune.custom_from_mask(module, "weight", MASK)


WRITES = [set_an_element, multiply, copy_an_average, write_below_autograd, replace, prune_a_channel]
SIGNED = {"activation": "leaky_relu", "signed_weight": True}
MAKES = {
    "InPlaceABN": lambda: InPlaceABN(8, **SIGNED),
    "InPlaceABNSync": lambda: InPlaceABNSync(8, **SIGNED),
    "InPlaceInstanceNorm": lambda: InPlaceInstanceNorm(8, affine=True),
    "converted BatchNorm": lambda: convert(nn.Sequential(nn.BatchNorm2d(8), nn.LeakyReLU(0.01))),
    "converted InstanceNorm": lambda: convert(nn.Sequential(nn.InstanceNorm2d(8, affine=True), nn.LeakyReLU(0.01))),
}


@pytest.fixture(autouse=True)
def generation_in_the_middle_of_an_interval(monkeypatch):
    """Nothing is measured because the interval has passed."""
    monkeypatch.setattr(guard.generations, "current", guard.generations.current // 100 * 100 + 101)


def norm_of(model):
    return model[0] if isinstance(model, nn.Sequential) else model


def backward(model, x):
    model.zero_grad()
    leaf = x.clone().requires_grad_()
    z = model(leaf * 1)
    z.backward(x + 0.1)
    return [z.detach(), leaf.grad, *(p.grad.clone() for p in norm_of(model).parameters())]


def steps(model, x, count=2):
    """Steps that leave the weights near 1."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    for _ in range(count):
        backward(model, x)
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("make", MAKES)
@pytest.mark.filterwarnings("ignore:inplace_abn_sync")
def test_a_weight_that_is_zeroed_between_two_measurements_is_exact_at_once(make, write, dtype):
    """The weight was clamped to eps until the next measurement. In bfloat16 dweight was 80 % off."""
    x = torch.randn(8, 8, 8, 8).to(dtype)
    model, new = (MAKES[make]().to(torch.promote_types(dtype, torch.float32)) for _ in range(2))
    steps(model, x)
    assert is_trusted(norm_of(model))
    norm_of(new).load_state_dict(norm_of(model).state_dict())
    for each in (model, new):
        write(norm_of(each))
    for ours, of_new in zip(backward(model, x), backward(new, x), strict=True):
        assert torch.equal(ours, of_new)
    assert not is_trusted(norm_of(model))


@pytest.mark.parametrize("when", ["after the step", "before the step", "between two passes of a step"])
@pytest.mark.parametrize("make", ["InPlaceABN", "converted BatchNorm"])
def test_it_does_not_matter_when_somebody_writes(make, when):
    x, model = torch.randn(8, 8, 8, 8), MAKES[make]()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-12)
    for _ in range(2):
        backward(model, x)
        optimizer.step()
    assert is_trusted(norm_of(model))
    if when != "after the step":
        backward(model, x)
    set_an_element(norm_of(model))
    if when == "before the step":
        optimizer.step()
    z, *_ = backward(model, x)
    assert z[:, 2].abs().max() <= 1e-11
    assert not is_trusted(norm_of(model))


def test_a_bias_that_is_written_is_noticed():
    x, module = torch.randn(8, 8, 16, 16).bfloat16(), layer()
    steps(module, x)
    nn.init.constant_(module.bias, 30.0)
    assert error_of_dx(module, x) < 0.01
    assert not is_trusted(module)


@pytest.mark.parametrize("make", ["InPlaceABN", "InPlaceInstanceNorm"])
def test_a_layer_that_was_trained_scales_by_a_zeroed_weight_without_gradients(make):
    x, model = torch.randn(8, 8, 8, 8), MAKES[make]()
    steps(model, x)
    set_an_element(model)
    with torch.no_grad():
        z = model(x.clone())[:, 2]
    assert z.max() == z.min()


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, 1e-4, 0.9, weight_decay=1e-4, foreach=False),
    "SGD, foreach": lambda p: torch.optim.SGD(p, 1e-4, 0.9, weight_decay=1e-4, foreach=True),
    "SGD, fused": lambda p: torch.optim.SGD(p, 1e-4, 0.9, fused=True),
    "AdamW, foreach": lambda p: torch.optim.AdamW(p, 1e-4, foreach=True),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, 1e-4, fused=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 1e-4),
}


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("make", ["InPlaceABN", "converted BatchNorm"])
def test_an_optimizers_own_writes_are_no_reason_to_measure(make, name, copied):
    """Several optimizers may step between two passes, and an optimizer may have parameters of several layers."""
    x, model = torch.randn(8, 8, 8, 8), MAKES[make]()
    backward(model, x)
    end_beginning(model)
    if copied:
        model = copy.deepcopy(model)
    others = nn.Linear(2, 2)
    others(torch.randn(1, 2)).sum().backward()
    first = the_mode(norm_of(model)).measured_at
    backward(model, x)
    optimizers = [OPTIMIZERS[name]([*others.parameters(), *model.parameters()]), torch.optim.SGD(others.parameters())]
    for _ in range(4):
        for optimizer in optimizers:
            optimizer.step()
        backward(model, x)
    assert the_mode(norm_of(model)).measured_at == first


def test_what_writes_in_every_step_counts_as_an_optimizer(monkeypatch):
    """Measuring waits for the device. Training loops that write to weights themselves would wait in every step."""
    module, x = layer(), torch.randn(8, 8, 8, 8)
    steps, measured = [], []
    measure = measuring.measure
    monkeypatch.setattr(measuring, "measure", lambda *args: (measured.append(len(steps)), measure(*args))[1])
    while len(steps) < 130:
        module.zero_grad()
        module(x.clone().requires_grad_() * 1).sum().backward()
        with torch.no_grad():
            for p in module.parameters():
                p -= 1e-6 * p.grad
        steps.append(None)
    # As in every generation, the next calls are measured, too.
    assert measured == [*range(2 * guard.CALLS), *range(100, 100 + guard.CALLS)]


def test_a_few_writes_in_every_interval_are_noticed_for_ever():
    module, x = set_guard(layer(), interval=3), torch.randn(8, 8, 8, 8)
    for i in range(3 * guard.CALLS):
        steps(module, x, 3)
        nn.init.constant_(module.weight, float(i % 2))
        backward(module, x)
        assert is_trusted(module) == (i % 2 == 1)


def test_a_layer_whose_weight_was_zeroed_is_trusted_again_after_it_was_set():
    module, x = layer(), torch.randn(8, 8, 8, 8)
    for weight in (0.0, 1.0, 0.0, 1.0):
        steps(module, x)
        nn.init.constant_(module.weight, weight)
        backward(module, x)
        assert is_trusted(module) == (weight == 1.0)
