"""What the guard decides by the figures of a layer's channels, and for which weights that holds."""

import math

import pytest
import torch

from inplace_abn.activations import find
from inplace_abn.guard import figures
from inplace_abn.settings import Channels


def table(**changes):
    """Figures of four channels, which have an error of dx of 1 together."""
    zeros = torch.zeros(4, dtype=torch.float64)
    found = figures.Table(zeros, (zeros + 0.25).view(1, 4), zeros + 100.0, zeros, zeros + 1.0, zeros + 1.0)
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


def test_a_batch_with_infinities_says_nothing_nor_does_one_that_is_silent():
    assert table(weight=[float("nan"), 0.0, 0.0, 0.0]).unknown
    assert not table(weight=[float("inf"), 0.0, 0.0, 0.0]).unknown
    assert not table(weight=[float("nan"), 0.0, 0.0, 0.0]).is_useful
    assert not table(silent=[1.0, 1.0, 1.0, 1.0]).is_useful
    assert table(silent=[1.0, 1.0, 0.0, 1.0]).is_useful
    some, others = table(silent=[1.0, 1.0, 0.0, 0.0]), table(silent=[0.0, 1.0, 1.0, 1.0])
    assert figures.worst([some, others]).silent.tolist() == [0.0, 1.0, 0.0, 0.0]


def test_a_silent_channel_stays_what_it_is_or_has_the_error_of_a_rounding():
    quiet = table(
        silent=[1.0, 1.0, 1.0, 0.0], dx=[[0.0] * 4], size=[1.0, 1.0, 2.0**-7, 2.0**-7], bias=[0.0] * 3 + [8.0]
    )
    assert choose(quiet, 1.0, before=(1, 3)) == (True, (1,))
    # In bfloat16 it is 2**-8 of a sum that is 129 times the weight.
    ill = quiet._replace(bias=quiet.size * 0 + 1.0)
    assert choose(ill, 0.5, dtype=torch.bfloat16) == (True, (2,))
    assert choose(ill, 0.51, dtype=torch.bfloat16) == (True, ())
    # Weights say what they say of all batches.
    pruned = table(silent=[1.0] * 4, dx=[[0.0] * 4], least=[0.0, 100.0, 100.0, 0.0])
    assert choose(pruned, 1.0) == (True, (0, 3))
    # A layer is not trusted again for what nobody knows of it.
    assert not choose(quiet, 1.0, trusted=False)[0]
