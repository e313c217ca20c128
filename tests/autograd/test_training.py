"""Nets with norms in place have the same losses in training as nets with torch's norms, and take less memory."""

import pytest
import torch
from cases import relative_error
from nets import NativeNorm, ResidualBlock, efficientnet, inplace_norm, resnet, segmenter
from torch import nn

from inplace_abn import InPlaceABN


def losses(make, norm, activation, dtype, steps, device):
    torch.manual_seed(0)
    net = make(norm, activation).to(device, dtype)
    with torch.no_grad():
        for module in net.modules():
            if hasattr(module, "running_mean"):
                module.weight.uniform_(-1.5, 1.5)
                module.bias.normal_()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    found = []
    for _ in range(steps):
        x = torch.randn(8, 3, 12, 12, dtype=dtype, device=device)
        target = torch.randint(0, 5, (8,), device=device)
        loss = nn.functional.cross_entropy(net(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    net.eval()
    with torch.no_grad():
        found.append(net(torch.ones(2, 3, 12, 12, dtype=dtype, device=device)).sum().item())
    return torch.tensor(found, dtype=torch.float64)


@pytest.mark.parametrize("activation", ["relu", "leaky_relu"])
@pytest.mark.parametrize("make", [resnet, efficientnet, segmenter])
def test_twenty_steps_in_float64_give_the_losses_of_batch_norm(make, activation, device):
    native, inplace = (losses(make, norm, activation, torch.float64, 20, device) for norm in (NativeNorm, inplace_norm))
    assert (native - inplace).abs().max() < 1e-9
    assert native[-2] != native[0]


@pytest.mark.parametrize(("activation", "tolerance"), [("silu", 1e-6), ("hardswish", 1e-5), ("elu", 1e-5)])
@pytest.mark.parametrize("make", [resnet, efficientnet, segmenter])
def test_five_steps_in_float32_give_the_losses_of_batch_norm(make, activation, tolerance, device):
    native, inplace = (losses(make, norm, activation, torch.float32, 5, device) for norm in (NativeNorm, inplace_norm))
    assert ((native - inplace)[:-1].abs() / native[:-1]).max() < tolerance
    exact = losses(make, NativeNorm, activation, torch.float64, 5, device)
    assert exact.isfinite().all()


@pytest.mark.parametrize("training", [True, False])
def test_a_converted_batch_norm_with_weights_of_any_sign_gives_the_same_output(training, device):
    weight = torch.tensor([-2.0, -1e-3, 1e-3, 0.5, 3.0, -1e-7, 0.0], dtype=torch.float64, device=device)
    bn = nn.BatchNorm2d(7).to(device, torch.float64).train(training)
    abn = InPlaceABN(7, activation="relu", signed_weight=True).to(device, torch.float64).train(training)
    with torch.no_grad():
        bn.weight.copy_(weight)
        bn.bias.normal_()
        bn.running_mean.normal_()
        bn.running_var.uniform_(0.5, 2)
    abn.load_state_dict(bn.state_dict())
    x = torch.randn(4, 7, 9, 9, dtype=torch.float64, device=device)
    expected = torch.relu(bn(x))
    # The norm in place moves weights that are smaller than eps to eps away from zero.
    kept = weight.abs() >= abn.eps
    actual = abn(x.clone())
    assert (actual - expected).abs()[:, kept].max() < 1e-12
    assert (actual - expected).abs()[:, ~kept].max() < 10 * abn.eps
    assert relative_error(abn.running_var, bn.running_var) < 1e-12


def held_after_forward(module, x):
    """The number of activation-sized blocks that forward leaves allocated, by the allocator's own events."""
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        z = module(x)
    held = sum(e.nbytes() for e in profile.profiler.kineto_results.events() if e.name() == "[memory]")
    del z
    return held / x.nbytes


class Chain(nn.Sequential):
    def __init__(self, norm, activation, units):
        super().__init__(
            *[m for _ in range(units) for m in (nn.Conv2d(8, 8, 3, 1, 1, bias=False), norm(8, activation))]
        )


@pytest.mark.parametrize(("activation", "native_per_unit"), [("relu", 2), ("silu", 3), ("leaky_relu", 2)])
def test_a_chain_of_units_holds_one_activation_per_unit(activation, native_per_unit):
    x = torch.randn(4, 8, 128, 128)
    for norm, per_unit in ((NativeNorm, native_per_unit), (inplace_norm, 1)):
        short, long = (held_after_forward(Chain(norm, activation, n), x) for n in (4, 12))
        assert (long - short) / 8 == pytest.approx(per_unit, abs=0.02)
        assert short - 4 * per_unit < 1.1


def test_a_residual_block_holds_two_activations_instead_of_four():
    x = torch.randn(4, 8, 128, 128)
    for norm, per_block in ((NativeNorm, 4), (inplace_norm, 2)):
        short, long = (
            held_after_forward(nn.Sequential(*[ResidualBlock(norm, 8, "relu") for _ in range(n)]), x) for n in (3, 7)
        )
        assert (long - short) / 4 == pytest.approx(per_block, abs=0.02)
