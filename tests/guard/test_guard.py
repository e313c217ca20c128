"""The guard of recovery decides by a rule which layers run in place. The first step is right, and lost trust comes
back."""

import copy
import logging
import math
import pickle

import pytest
import torch
from cases import param_of
from modes import end_beginning, is_trusted, layer, the_mode
from torch import nn
from torch.utils.checkpoint import checkpoint

from inplace_abn import ABN, InPlaceABN, guard, set_guard
from inplace_abn.activations import find
from inplace_abn.guard import figures, measuring
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
    module(leaf * 1).backward(dz)
    return [leaf.grad.double(), module.weight.grad.double(), module.bias.grad.double()]


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


def table(**changes):
    """Figures of four channels, which have an error of dx of 1 together."""
    zeros = torch.zeros(4, dtype=torch.float64)
    found = figures.Table(zeros, (zeros + 0.25).view(1, 4), zeros + 100.0, zeros + 1.0, zeros + 1.0)
    return found._replace(**{name: torch.tensor(value, dtype=torch.float64) for name, value in changes.items()})


def choose(found, x, weight=None, before=(), trusted=True, dtype=torch.float32):
    """What is chosen with these thresholds: whether the layer is in place, and what it saves."""
    threshold = figures.Threshold(x, x if weight is None else weight)
    choice = figures.chosen(found, Channels(before, 4 if before else 0), trusted, threshold, dtype)
    return choice.trusted, choice.channels.numbers


def test_channels_are_given_up_above_the_threshold_and_regained_below_a_quarter_of_it():
    assert choose(table(), 1.0) == (True, ())
    bad = table(weight=[0.0, 1.1, 0.0, 0.9])
    assert choose(bad, 2.0, 1.0) == (True, (1,))
    assert choose(bad, 4.0, 1.0, before=(1, 3)) == (True, (1, 3))
    assert choose(bad, 4.0, 3.7, before=(1, 3)) == (True, (1,))
    assert choose(bad, 4.0, 4.5, before=(1, 3)) == (True, ())
    small = table(least=[100.0, 100.0, 0.5, 5.0])
    assert choose(small, 2.0) == (True, (2,))
    assert choose(small, 4.0, before=(2, 3)) == (True, (2, 3))
    assert choose(table(least=[100.0, 100.0, 17.0, 100.0]), 4.0, before=(2,)) == (True, ())


def test_as_few_channels_as_possible_are_given_up_for_the_error_of_the_layer():
    uneven = table(dx=[[0.002, 0.95, 0.04, 0.008]])
    assert choose(uneven, 1.0) == (True, ())
    # What remains is below a quarter of the threshold.
    assert choose(uneven, 0.99) == choose(uneven, 4.01 * 0.05**0.5) == (True, (1,))
    assert choose(uneven, 3.99 * 0.05**0.5) == choose(uneven, 4.01 * 0.01**0.5) == (True, (1, 2))
    assert choose(uneven, 3.99 * 0.01**0.5) == choose(uneven, 4.01 * 0.002**0.5) == (True, (1, 2, 3))
    assert not choose(uneven, 3.99 * 0.002**0.5)[0]
    # They are well again when the errors of all are below a quarter of the threshold.
    assert choose(uneven, 3.9, before=(1, 2)) == (True, (1, 2))
    assert choose(uneven, 4.0, before=(1, 2)) == (True, ())


def test_a_layer_is_given_up_if_most_channels_are_ill_and_regained_when_half_of_them_are_well():
    three, four = table(weight=[2.0, 2.0, 2.0, 0.0]), table(weight=[2.0] * 4)
    assert choose(three, 1.0) == (True, (0, 1, 2))
    assert not choose(four, 1.0)[0]
    assert not choose(three, 4.0, 1.0, trusted=False)[0]
    assert choose(table(weight=[2.0, 2.0, 0.0, 0.0]), 4.0, 1.0, trusted=False) == (True, (0, 1))
    # The error of dx must be below a quarter of its threshold, too, by channels that are saved if need be.
    two = table(dx=[[0.48, 0.5, 0.01, 0.01]])
    assert choose(two, 4.0, trusted=False) == (True, ())
    assert choose(two, 3.0, trusted=False) == (True, (0, 1))
    assert not choose(two, 2.0, trusted=False)[0]


def test_a_layer_is_given_up_in_float16_if_values_of_an_ill_channel_are_large():
    for bias, is_ill in ((-8.0, True), (6.9, True), (8.0, False)):
        found = table(weight=[2.0 * is_ill, 0.0, 0.0, 0.0], bias=[bias, 0.0, 0.0, 0.0])
        assert choose(found, 4.0, 1.0, dtype=torch.float16)[0] == (abs(bias) < 7.0 or not is_ill)
        assert choose(found, 4.0, 1.0, dtype=torch.bfloat16) == (True, (0,) if is_ill else ())


def test_weights_may_shrink_until_errors_are_four_times_what_is_trusted():
    threshold = figures.Threshold(1.0, 0.5)
    found = table(
        weight=[0.5, 0.125, 0.0, 0.02], dx=[[0.0] * 4], size=[1.0, 2.0, 1.0, 1e-3], bias=[0.0, -8.0, 0.0, 1.0]
    )
    # Of a line the error is a share of y, so what is left for weight and bias together is for each of them.
    least, most, lowest, highest = figures.bounds(found, threshold, torch.float32, "relu")
    assert least.tolist() == pytest.approx([0.5, 0.5, 2.0**-12.5, 1e-4])
    assert most.isinf().all()
    assert highest.tolist() == pytest.approx([4.0, 40.0, 2.0**12.5, 4 * 1.001])
    assert torch.equal(lowest, -highest)
    # A channel without an error has that of a rounding of y: 2**-8 of a sum that is 64 times the weight.
    silent = found._replace(size=found.size * 0 + 0.125, bias=found.bias * 0 - 7.875)
    expected = 0.125 / math.sqrt(2 * 2.0**8 / 64)
    assert figures.bounds(silent, threshold, torch.bfloat16, "relu")[0, 2] == pytest.approx(expected)
    # What the channels may add to the squared error of the layer, which is 1, makes it 16.
    of_dx = torch.tensor([[0.25, 0.75, 0.0, 0.0], [0.1, 0.0, 0.0, 0.0]])
    uneven = found._replace(weight=found.weight * 0, dx=of_dx.double())
    factors = (found.size / figures.bounds(uneven, threshold, torch.float64, "relu")[0]).tolist()
    assert factors[:2] == pytest.approx([16.0 ** (1 / 4), (1 + 5) ** (1 / 4)])
    # Less would be measured too often.
    dominant = found._replace(weight=found.weight * 0 + 2.0)
    assert figures.bounds(dominant, threshold, torch.float32, "relu")[0, 0] == pytest.approx(1 / 1.5)


def test_values_may_move_half_way_to_a_minimum_and_not_far_into_a_tail():
    threshold, minimum = figures.Threshold(1.0, 0.5), find("silu").special[0]
    there = {"weight": [2.0**-6] * 4, "dx": [[0.0] * 4], "size": [0.01, 0.01, 0.5, 0.5]}
    found = table(**there, bias=[minimum, minimum + 1.0, minimum + 1.0, 50.0])
    least, most, lowest, highest = figures.bounds(found, threshold, torch.float32, "silu")
    # The error may become 128 times as large.
    tail = math.log(128.0)
    assert (found.size / least).tolist() == pytest.approx([8.0, 128.0**0.5, 8.0, 128.0**0.5])
    assert (most - found.size).tolist() == pytest.approx([tail / 10] * 4)
    assert (highest - found.bias).tolist() == pytest.approx([0.02, 0.5, 1.0, tail / 2])
    assert (found.bias - lowest).tolist() == pytest.approx([0.02, 0.5, 1.0, tail / 2])
    of_elu = figures.bounds(found, threshold, torch.float32, "elu")
    # The second one's bias would be more than four times as large as all of y.
    assert (of_elu[3] - found.bias)[[0, 2, 3]].tolist() == pytest.approx([tail / 2] * 3)
    assert of_elu[3, 1] == pytest.approx(4 * (0.01 - minimum - 1.0))
    # Small numbers have fewer digits in float16, so there no activation is a line.
    assert figures.bounds(found, threshold, torch.float16, "relu")[1].isfinite().all()


def test_a_batch_with_infinities_says_nothing():
    assert table(weight=[float("nan"), 0.0, 0.0, 0.0]).unknown
    assert not table(weight=[float("inf"), 0.0, 0.0, 0.0]).unknown


def test_the_worst_channel_counts_for_its_weight_and_is_saved():
    module, x = layer(beta=0.5), values(torch.bfloat16)
    with torch.no_grad():
        module.weight[3] = 2e-4
    native, exact = (ABN(8, activation="relu") for _ in range(2))
    for twin in (native, exact):
        twin.load_state_dict(module.state_dict())
    dz = (torch.randn(x.shape) + 2 * x.float()).to(x.dtype)
    expected = gradients(exact.double(), x.double(), dz.double())
    ours, torchs = gradients(module, x, dz), gradients(native, x, dz)
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
