"""Memory that others hold stays as it is: a converted norm overwrites neither its input nor what somebody has seen."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from foreign_nets import conv, spread
from torch import nn
from training import differences, trained

from inplace_abn import convert

HOLD = {
    "flatten": lambda h: h.flatten(1),
    "detach": lambda h: h.detach(),
    "data": lambda h: h.data,
    "slice": lambda h: h[:, 1:],
    "expand_as": lambda h: h.expand_as(h),
}


class Holding(nn.Module):
    """Reads a view of the norm's input, and one of its output, from the third call on only."""

    def __init__(self, hold):
        super().__init__()
        self.conv, self.bn, self.last = conv(3, 4), nn.BatchNorm2d(4), conv(4, 4)
        self.hold, self.calls = hold, 0

    def forward(self, x):
        h = self.conv(x)
        of_input = self.hold(h)
        y = self.bn(h)
        of_output = self.hold(y)
        z = self.last(F.relu(y))
        self.calls += 1
        if self.calls > 2:
            z = z + of_input.sum() + of_output.square().sum()
        return z


@pytest.mark.parametrize("hold", HOLD)
def test_views_of_input_and_output_that_are_read_later_are_right(hold):
    """The norm's input was overwritten, because nobody read it while the model was analyzed."""
    model = spread(Holding(HOLD[hold])).double()
    converted = convert(copy.deepcopy(model))
    found = differences(trained(converted, torch.empty(2, 3, 8, 8)), trained(model, torch.empty(2, 3, 8, 8)))
    assert max(found.values()) < 1e-9, max(found, key=found.get)


def test_an_array_of_numpy_is_not_overwritten():
    """The array that the user had made the norm's input of was overwritten."""
    array = np.random.default_rng(0).standard_normal((2, 3, 8, 8)).astype(np.float32)
    before = array.copy()
    net = convert(nn.Sequential(nn.BatchNorm2d(3), nn.ReLU()))
    for _ in range(3):
        net(torch.from_numpy(array)).sum().backward()
    assert (array == before).all()


def test_a_hook_that_comes_later_and_stores_the_output_finds_it_unchanged():
    """What a forward hook had stored was overwritten in backward: it was 44 % off."""
    model = spread(Holding(HOLD["detach"])).double()
    stored = []
    for net in (convert(copy.deepcopy(model)), model):
        for step in range(4):
            if step == 2:
                net.bn.register_forward_hook(lambda m, args, out: stored.append((args[0].detach(), out.detach())))
            torch.manual_seed(step)
            net(torch.randn(2, 3, 8, 8, dtype=torch.float64)).sum().backward()
    for own, other in zip(stored[:2], stored[2:], strict=True):
        for a, b in zip(own, other, strict=True):
            torch.testing.assert_close(a, b)


NORMS = {
    "batch": lambda: nn.BatchNorm2d(4),
    "instance": lambda: nn.InstanceNorm2d(4, affine=True),
    "instance, no weight": lambda: nn.InstanceNorm2d(4),
    "group": lambda: nn.GroupNorm(2, 4),
    "layer": lambda: nn.LayerNorm(8),
}
PLACES = {
    "its output": lambda y, other: y,
    "a sum": lambda y, other: y + other,
    "a sum with it": lambda y, other: other + y,
    "a view": lambda y, other: y.view(2, 4, 64).view(2, 4, 8, 8),
}
KEEPING = {
    "detach": lambda t: t.detach(),
    "data": lambda t: t.data,
    "numpy": lambda t: torch.from_numpy(t.detach().numpy()),
    "dlpack": lambda t: torch.from_dlpack(t.detach()),
}


class Branches(nn.Module):
    """A convolution reads the output of a norm, or a sum of it and the output of another layer."""

    def __init__(self, place, norm, other=nn.Identity):
        super().__init__()
        self.first, self.second, self.last = conv(3, 4), conv(3, 4), conv(4, 4)
        self.norm, self.other, self.place = norm(), other(), place

    def forward(self, x):
        self.read = self.place(self.norm(self.first(x)), self.other(self.second(x)))
        return self.last(self.read)


@pytest.mark.parametrize("keep", KEEPING)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("norm", NORMS)
def test_what_is_kept_of_what_a_convolution_reads_is_not_overwritten_in_backward(norm, place, keep):
    model = convert(spread(Branches(PLACES[place], NORMS[norm])).double())
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    for _ in range(4):
        loss = model(torch.randn(2, 3, 8, 8, dtype=torch.float64)).square().sum()
        kept = KEEPING[keep](model.read)
        model.read, before = None, kept.clone()
        loss.backward()
        assert torch.equal(kept, before)
        optimizer.step()


@pytest.mark.parametrize("place", ["a sum", "a sum with it"])
@pytest.mark.parametrize("other", NORMS)
@pytest.mark.parametrize("norm", NORMS)
def test_two_norms_whose_sum_a_convolution_reads(norm, other, place):
    class Sum(Branches):
        def forward(self, x):
            return self.last(self.place(self.norm(self.first(x)), self.other(self.second(x))))

    model = spread(Sum(PLACES[place], NORMS[norm], NORMS[other])).double()
    converted = convert(copy.deepcopy(model))
    found = differences(trained(converted, torch.empty(2, 3, 8, 8)), trained(model, torch.empty(2, 3, 8, 8)))
    assert max(found.values()) < 1e-9, max(found, key=found.get)
