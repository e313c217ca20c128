"""What is measured in evaluation says nothing of training, and the other way round: dx has other errors, and running
statistics may be far from those of a batch."""

import copy

import pytest
import torch
from modes import layer, optimize
from torch import nn

from inplace_abn import ABN, convert
from inplace_abn.guard.figures import THRESHOLDS


def dx_of(net, x, dz):
    leaf = x.clone().requires_grad_()
    net(leaf * 1).backward(dz)
    return leaf.grad.double()


def errors(net, original, x, dz):
    """The errors of dx, ours and torch's, relative to dy as it goes through the scale."""
    exact, native = copy.deepcopy(original).double().train(net.training), copy.deepcopy(original).train(net.training)
    dy = []
    hook = exact[0].register_full_backward_hook(lambda _, __, given: dy.append(given[0]))
    true = dx_of(exact, x.double(), dz.double())
    hook.remove()
    var = exact[0].running_var if not net.training else x.double().var([0, 2, 3], correction=0)
    scale = exact[0].weight / torch.sqrt(var + exact[0].eps)
    size = (dy[0] * scale.detach().view(1, -1, 1, 1)).norm()
    return [((dx_of(each, x, dz) - true).norm() / size).item() for each in (net, native)]


def in_place(weight):
    """A module, and torch's counterpart that shares its parameters."""
    module = layer("identity", weight)
    plain = ABN(8, activation="identity")
    plain.weight, plain.bias = module.weight, module.bias
    return module, nn.Sequential(plain)


def converted(weight):
    original = nn.Sequential(nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 1))
    nn.init.constant_(original[0].weight, weight)
    net = convert(copy.deepcopy(original))
    original[0].weight, original[0].bias = net[0].weight, net[0].bias
    return net, original


@pytest.mark.parametrize("with_gradients", [True, False])
@pytest.mark.parametrize(
    ("make", "dtype", "weight", "bias"),
    [
        (in_place, torch.bfloat16, 0.1, 3.0),
        (converted, torch.float32, 1e-4, 1.0),
        (converted, torch.float32, 1e-3, 3.0),
    ],
)
def test_an_evaluation_between_two_steps_does_not_take_the_measurement_of_the_next(
    make, dtype, weight, bias, with_gradients
):
    torch.manual_seed(0)
    x = torch.randn(16, 8, 8, 8).to(dtype)
    net, original = make(1.0)
    net, original = net.to(dtype), original.to(dtype)
    norm = original[0]
    dx_of(net, x, x)
    optimize(weight, norm)
    with torch.no_grad():
        norm.bias.fill_(bias)
    net.eval()
    with torch.set_grad_enabled(with_gradients):
        net(x.clone().requires_grad_() * 1)
    ours, torchs = errors(net.train(), original, x, x)
    assert ours <= max(THRESHOLDS[dtype].x, 2 * torchs)


@pytest.mark.parametrize("activation", [nn.SiLU, nn.ELU])
def test_a_norm_that_trains_and_evaluates_in_turn_is_right_in_each_step(activation):
    torch.manual_seed(0)
    original = nn.Sequential(nn.BatchNorm2d(8, momentum=0.0), activation(), nn.Conv2d(8, 8, 1)).bfloat16()
    net = convert(copy.deepcopy(original))
    for each in (net, original):
        each[0].running_mean.fill_(8.0)
    original[0].weight, original[0].bias = net[0].weight, net[0].bias
    original[2].load_state_dict(net[2].state_dict())
    x = torch.randn(16, 8, 8, 8).bfloat16()
    for step in range(6):
        net.train(step % 2 == 0)
        ours, torchs = errors(net, original, x, x)
        assert ours <= max(THRESHOLDS[x.dtype].x, 2 * torchs), step
        optimize(1.0 + 0.01 * step, net[0])
