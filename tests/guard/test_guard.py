"""The guard of recovery decides by a rule which layers run in place. The first step is right, and lost trust comes
back."""

import copy
import logging
import pickle

import pytest
import torch
from cases import param_of
from modes import end_beginning, is_trusted, layer, the_mode
from torch import nn
from torch.utils.checkpoint import checkpoint

from inplace_abn import ABN, InPlaceABN, guard, set_guard
from inplace_abn.guard import measuring
from inplace_abn.settings import Channels

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
# Errors of dx that the in-place form has for dz = noise + 2x without a guard.
MEASURED = {
    "elu bf16 gamma 3 beta -2: 97 %": ("elu", "bf16", 3.0, -2.0),
    "elu fp32 gamma 5: 1 %": ("elu", "fp32", 5.0, 0.0),
    "elu fp32 gamma 10: 13 %": ("elu", "fp32", 10.0, 0.0),
    "silu fp32 gamma 30: 2 %": ("silu", "fp32", 30.0, 0.0),
    "silu fp32 gamma 100: 34 %": ("silu", "fp32", 100.0, 0.0),
    "silu fp16 gamma 10: 8.5 %": ("silu", "fp16", 10.0, 0.0),
    "relu fp16 gamma 1e-3: 42 %": ("relu", "fp16", 1e-3, 0.0),
    "identity bf16 beta / gamma 20: 5 to 7 %": ("identity", "bf16", 1.0, 20.0),
    "relu bf16 beta / gamma 20: 5 to 7 %": ("relu", "bf16", 0.5, 10.0),
}


def values(dtype=torch.float32, channels=8):
    return torch.randn(8, channels, 32, 32).to(dtype)


def outliers():
    """Values of which some lie where an elu saturates."""
    return values() ** 7


def step(module, x=None, optimizer=None):
    x = values(channels=module.num_features) if x is None else x
    leaf = x.clone().requires_grad_()
    given = leaf * 1
    z = module(given)
    z.backward((torch.randn(x.shape) + 2 * x.float()).to(x.dtype))
    if optimizer is not None:
        optimizer.step()
    return z.data_ptr() == given.data_ptr()


def advance(times=1):
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    for _ in range(times):
        optimizer.step()


def to_multiple(interval):
    advance(interval - guard.generations.current % interval)


def saved(module):
    """The channels whose xhat is saved, of a module that was called with one dtype."""
    return the_mode(module).decisions[-1].verbatim.numbers


def gradients(module, x, dz):
    leaf = x.clone().requires_grad_()
    module.zero_grad()
    module(leaf * 1).backward(dz)
    return [leaf.grad.double(), module.weight.grad.double(), module.bias.grad.double()]


def compared(module, x):
    """The gradients of a module with a ReLU, those of torch's, and the exact ones, for dz that follow x."""
    native, exact = (ABN(8, activation="relu") for _ in range(2))
    for twin in (native, exact):
        twin.load_state_dict(module.state_dict())
    dz = (torch.randn(x.shape) + 2 * x.float()).to(x.dtype)
    expected = gradients(exact.double(), x.double(), dz.double())
    return gradients(module, x, dz), gradients(native, x, dz), expected


def relative(actual, expected):
    return ((actual - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("case", MEASURED)
def test_the_first_step_of_a_layer_that_cannot_be_trusted_is_as_exact_as_torchs(case):
    activation, label, gamma, beta = MEASURED[case]
    module, x = layer(activation, gamma, beta), values(DTYPES[label])
    dz = (torch.randn(x.shape) + 2 * x.float()).to(x.dtype)
    native, exact = (ABN(8, activation=activation, activation_param=param_of(activation, 1.0)) for _ in range(2))
    for twin in (native, exact):
        twin.load_state_dict(module.state_dict())
    expected = gradients(exact.double(), x.double(), dz.double())
    ours, torchs = gradients(module, x, dz), gradients(native, x, dz)
    assert not is_trusted(module)
    for a, t, e in zip(ours, torchs, expected, strict=True):
        assert relative(a, e) <= 1.01 * relative(t, e)
    torch.testing.assert_close(module.running_var, native.running_var)


def test_a_bf16_elu_of_gamma_2_had_15_percent_off_dx_and_is_in_place_below_3():
    module, x = layer("elu", 2.0), values(torch.bfloat16)
    dz = (torch.randn(x.shape) + 2 * x.float()).to(x.dtype)
    exact = ABN(8, activation="elu", activation_param=1.0)
    exact.load_state_dict(module.state_dict())
    expected = gradients(exact.double(), x.double(), dz.double())
    assert relative(gradients(module, x, dz)[0], expected[0]) < 0.03
    assert is_trusted(module)


@pytest.mark.parametrize(("activation", "gamma", "beta"), [("identity", 1.0, 20.0), ("relu", 0.5, 10.0)])
def test_of_a_layer_with_some_channels_that_cannot_be_trusted_these_are_saved(activation, gamma, beta):
    """If all channels were like them, dx would be 5 to 7 % off."""
    module, x = layer(activation, gamma), values(torch.bfloat16)
    nn.init.constant_(module.bias[2:6], beta)
    dz = (torch.randn(x.shape) + 2 * x.float()).to(x.dtype)
    exact = ABN(8, activation=activation)
    exact.load_state_dict(module.state_dict())
    expected = gradients(exact.double(), x.double(), dz.double())
    ours = gradients(module, x, dz)
    assert is_trusted(module)
    assert saved(module) == (2, 3, 4, 5)
    for a, e in zip(ours, expected, strict=True):
        assert relative(a, e) < 0.01


@pytest.mark.parametrize("label", DTYPES)
@pytest.mark.parametrize("activation", ["identity", "leaky_relu", "relu", "silu", "hardswish", "elu"])
def test_typical_parameters_are_trusted_in_every_dtype(activation, label):
    module = layer(activation, channels=32)
    if label == "fp64":
        module.double()
    with torch.no_grad():
        module.weight.uniform_(0.5, 1.5)
        module.bias.normal_(0, 0.3)
    assert step(module, values(DTYPES[label], 32))


@pytest.mark.parametrize("signed", [True, False])
def test_zero_weights_scale_by_zero_in_the_first_step_only_where_they_are_the_weight(signed):
    module = InPlaceABN(8, activation="identity", signed_weight=signed)
    nn.init.zeros_(module.weight)
    x = values()
    with torch.no_grad():
        largest = module(x.clone()).abs().max().item()
    assert (largest == 0) == signed
    assert step(module, x) == (not signed)


def test_the_mode_changes_exactly_one_generation_after_the_measurement_that_asks_for_it():
    set_guard(module := layer("elu"), interval=5)
    to_multiple(5)
    assert step(module)
    end_beginning(module)
    advance()
    for _ in range(4):
        assert step(module, outliers())
        advance()
    # This generation is a multiple of the interval. The layer is measured, runs twice in the same mode, and loses trust
    # one generation later.
    assert step(module, outliers())
    assert step(module, outliers())
    advance()
    assert not step(module, outliers())
    advance()
    for _ in range(3):
        assert not step(module)
        advance()
    assert not step(module)
    advance()
    assert step(module)


def test_a_layer_is_measured_often_at_the_beginning_where_its_weights_change_most():
    set_guard(module := layer(), interval=32)
    to_multiple(32)
    first, measured = guard.generations.current, []
    for _ in range(70):
        step(module)
        measured.append(the_mode(module).measured_at - first)
        advance()
    assert sorted(set(measured)) == [0, 1, 2, 4, 8, 16, 32, 64]


def test_a_layer_that_sees_only_odd_generations_is_measured_all_the_same():
    set_guard(module := layer("elu"), interval=4)
    to_multiple(4)
    advance()
    assert step(module)
    end_beginning(module)
    advance()
    seen = []
    for times in (1, 2, 2, 2):
        advance(times)
        seen.append(step(module, outliers()))
    assert seen == [True, True, False, False]


def test_the_worst_channel_counts_for_its_weight_and_is_saved():
    module, x = layer(beta=0.5), values(torch.bfloat16)
    with torch.no_grad():
        module.weight[3] = 2e-4
    ours, torchs, expected = compared(module, x)
    assert is_trusted(module)
    assert saved(module) == (3,)
    assert module.shares_saved() == {torch.bfloat16: 1 / 8}
    for a, t, e in zip((t[3] for t in ours[1:]), (t[3] for t in torchs[1:]), (t[3] for t in expected[1:]), strict=True):
        assert relative(a, e) <= max(1.01 * relative(t, e), 2.0**-8)
    assert relative(ours[0][:, 3], expected[0][:, 3]) <= 2 * relative(torchs[0][:, 3], expected[0][:, 3])
    assert step(module, x)


def test_a_dead_channel_of_a_relu_costs_no_trust():
    module = layer()
    with torch.no_grad():
        module.weight[3], module.bias[3] = 1e-3, -1.0
    assert step(module, values(torch.bfloat16))


def test_nothing_is_measured_while_the_guard_is_paused():
    set_guard(module := layer("elu", 10.0), interval=1)
    with guard.paused():
        assert step(module)
        advance()
        assert step(module)
    assert module._guard is None
    assert not step(module)


def test_a_batch_with_infinities_changes_nothing():
    set_guard(module := layer(), interval=1)
    assert step(module)
    advance()
    step(module, torch.full((8, 8, 32, 32), torch.inf))
    advance()
    assert step(module)


@pytest.mark.parametrize("before", ["zeros", "values", "zeros after values"])
def test_a_batch_of_zeros_makes_no_channel_well(before):
    """A warm-up on zeros measured no errors, so that a weight of 1e-3 beside a bias of 1 had a gradient 84 % off."""
    set_guard(module := layer(beta=1.0), interval=1)
    with torch.no_grad():
        module.weight[:4] *= 1e-3
    x = values(torch.bfloat16)
    for batch in {"zeros": [x * 0], "values": [x], "zeros after values": [x, x * 0, x * 0]}[before]:
        step(module, batch)
        advance()
    ours, torchs, expected = compared(module, x)
    assert saved(module) == (0, 1, 2, 3)
    for a, t, e in zip(ours, torchs, expected, strict=True):
        assert relative(a, e) <= 2 * relative(t, e) + 2.0**-8


def test_an_interval_of_zero_trusts_always():
    assert step(layer("elu", 10.0, guard_interval=0))
    with pytest.raises(ValueError, match="guard_interval >= 0, got -1"):
        layer(guard_interval=-1)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_compute_again_in_the_mode_of_their_forward_pass(reentrant):
    torch.manual_seed(1)
    net = nn.Sequential(nn.Conv2d(3, 8, 1), layer("elu", 10.0), nn.Conv2d(8, 8, 1), layer())
    set_guard(net, interval=2)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    twin = copy.deepcopy(net)
    other = torch.optim.SGD(twin.parameters(), lr=1e-3)
    for _ in range(6):
        x = torch.randn(4, 3, 16, 16, requires_grad=True)
        for half in x.chunk(2):
            checkpoint(net, half, use_reentrant=reentrant).square().sum().backward()
            twin(half).square().sum().backward()
        for ours, theirs in zip(net.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-4)
        optimizer.step(), other.step()
        optimizer.zero_grad(), other.zero_grad()


def test_a_mode_survives_copies_and_pickles_and_is_no_part_of_the_state_dict():
    module = layer("elu", 10.0)
    assert not step(module)
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert not is_trusted(twin)
        assert not step(twin)
    assert set(module.state_dict()) == set(ABN(8).state_dict())


def test_loading_a_state_dict_measures_anew():
    module = layer("elu", 10.0)
    assert not step(module)
    module.load_state_dict(layer("elu").state_dict())
    assert step(module)


def test_each_change_is_told_once_with_layer_channel_and_numbers(logged):
    records = logged(logging.INFO)
    net = nn.Sequential(nn.Conv2d(3, 8, 1), layer("elu", 10.0))
    set_guard(net, interval=1)
    for _ in range(3):
        net(torch.randn(4, 3, 16, 16)).sum().backward()
        advance()
    (record,) = records
    assert record.levelno == logging.INFO
    assert record.getMessage().startswith("1: its input is not recoverable from its output (error of dx 0.")
    assert "in channel" in record.getMessage()
    assert "trusted up to 6.1e-05 and 0.00098" in record.getMessage()
    nn.init.ones_(net[1].weight)
    for _ in range(3):
        net(torch.randn(4, 3, 16, 16)).sum().backward()
        advance()
    assert len(records) == 2
    assert records[1].getMessage().startswith("1: its input is recoverable again")


def test_what_is_not_trusted_can_be_warned_of_or_raised(logged):
    records = logged(logging.WARNING)
    module = set_guard(layer("elu", 10.0), on_untrusted="warn")
    step(module)
    assert [r.levelno for r in records] == [logging.WARNING]
    module = set_guard(layer("elu", 10.0), on_untrusted="raise")
    x = values()
    with pytest.raises(RuntimeError, match="its input is not recoverable from its output"):
        module(x.requires_grad_() * 1)
    assert module.running_mean.abs().max() == 0
    assert step(set_guard(layer("elu", 10.0), threshold=0.5))
    for wrong in ({"interval": -1}, {"threshold": 0.0}, {"on_untrusted": "ignore"}):
        with pytest.raises(ValueError, match="expected"):
            set_guard(module, **wrong)


def test_tensors_that_are_errors_are_told_by_the_op_not_by_the_guard():
    module = layer()
    for each in (module, layer(guard_interval=0)):
        with pytest.raises(TypeError, match="dtype"):
            each(torch.ones(2, 8, 3, 3, dtype=torch.int32))
    with pytest.raises(ValueError, match="Expected more than 1 value"):
        module(torch.randn(1, 8, 1, 1, requires_grad=True) * 1)
    for bias, error in (
        (torch.zeros(8, dtype=torch.int64), "expected bias of dtype"),
        (torch.zeros(8, device="meta"), "expected bias on cpu"),
        (torch.zeros(9), r"expected bias of shape \(8,\)"),
    ):
        other = layer()
        other.bias = torch.nn.Parameter(bias, requires_grad=False)
        with pytest.raises((TypeError, ValueError), match=error):
            other(torch.randn(2, 8, 3, 3, requires_grad=True) * 1)
    with pytest.raises(ValueError, match="expected"):
        module(torch.randn(2, 7, 3, 3, requires_grad=True) * 1)


def test_measuring_leaves_x_the_statistics_and_the_random_generator_alone():
    module, x = layer(), values()
    before, state = x.clone(), torch.get_rng_state()
    measuring.measure(module, x, None)
    assert torch.equal(x, before)
    assert torch.equal(torch.get_rng_state(), state)
    assert module.num_batches_tracked == 0
    assert module.running_mean.abs().max() == 0


@pytest.mark.parametrize("shape", [(64, 8), (3, 8, 5), (2, 8, 3, 4, 5), (2, 8, 1, 1), (1, 8, 300, 400)])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_every_shape_and_layout_is_measured(shape, layout):
    if layout is torch.channels_last and len(shape) != 4:
        pytest.skip("only of four dimensions")
    module = layer("elu", 50.0)
    x = torch.randn(shape).to(memory_format=layout)
    trusted, channels = guard.decide(module, x.requires_grad_() * 1, None)
    assert not trusted
    assert not channels
    assert guard.decide(layer(), x * 1, None) == (True, Channels())
