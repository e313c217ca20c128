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
