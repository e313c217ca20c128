"""A converted norm whose attributes are changed after its construction does what torch's norm does then."""

import copy

import pytest
import torch
from cases import relative_error
from torch import nn

from inplace_abn import guard
from inplace_abn.conversion import classes
from inplace_abn.modules.instance_norm import InPlaceInstanceNorm

KINDS = {
    nn.BatchNorm1d: 1,
    nn.BatchNorm2d: 2,
    nn.BatchNorm3d: 3,
    nn.InstanceNorm1d: 1,
    nn.InstanceNorm2d: 2,
    nn.InstanceNorm3d: 3,
}
CHANGES = {
    "nothing": {},
    "statistics not tracked": {"track_running_stats": False},
    "statistics not tracked, no momentum": {"track_running_stats": False, "momentum": None},
    "statistics not tracked, no weight": {"track_running_stats": False, "weight": None},
    "no momentum": {"momentum": None},
    "momentum 0": {"momentum": 0.0},
    "momentum 1, an integer": {"momentum": 1},
    "no weight": {"weight": None},
    "no bias": {"bias": None},
    "no parameters": {"weight": None, "bias": None},
    "no mean": {"running_mean": None},
    "no variance": {"running_var": None},
    "no statistics": {"running_mean": None, "running_var": None},
    "no statistics, not tracked": {"running_mean": None, "running_var": None, "track_running_stats": False},
    "no counter": {"num_batches_tracked": None},
    "no counter, no momentum": {"num_batches_tracked": None, "momentum": None},
    "another eps": {"eps": 0.3},
    "an eps above weights": {"eps": 1.0},
    "an eps of zero": {"eps": 0.0},
    "not affine": {"affine": False},
    "other features": {"num_features": 7},
}
# What follows, and the number of the call before which the change comes. One follower is an activation, one keeps the
# norm's output, and one does not.
CASES = [(torch.relu, 0), (torch.relu, 1), (torch.sin, 1), (torch.sigmoid, 1)]


def made(kind):
    generator = torch.Generator().manual_seed(3)
    norm = kind(4, affine=True, track_running_stats=True).double()
    norm.shape = (3, 4, *[3] * KINDS[kind])
    nn.init.uniform_(norm.weight, 0.5, 1.5, generator=generator)
    nn.init.normal_(norm.bias, generator=generator)
    norm.running_mean.normal_(generator=generator)
    norm.running_var.uniform_(0.5, 2, generator=generator)
    return norm


def results(norm, function, change, training, at):
    """The outputs, gradients and buffers of two calls, or the error. The change comes before call number ``at``."""
    found = []
    for i in range(2):
        if i == at:
            norm.train(training)
            for name, value in change.items():
                setattr(norm, name, value)
        generator = torch.Generator().manual_seed(i)
        x = torch.randn(norm.shape, dtype=torch.float64, generator=generator).requires_grad_()
        try:
            y = function(norm(x * 1))
        except (RuntimeError, ValueError) as error:
            return str(error)
        (y.square() + y * x.detach()).sum().backward()
        found += [y.detach(), x.grad, *(p.grad.clone() for p in norm.parameters() if p.grad is not None)]
        found += [b.double() for b in norm.buffers()]
        guard.generations.advance()
    return found


@pytest.mark.filterwarnings("ignore:input's size at dim")
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", KINDS)
def test_attributes_that_are_changed_later_mean_what_they_mean_in_torch(kind, change, training):
    """An InstanceNorm that was told to track no statistics used them in evaluation, and updated none in training; and
    an eps above the weights, set after they were looked at, scaled by eps."""
    for function, at in CASES:
        norm = made(kind)
        ours = copy.deepcopy(norm)
        classes.adopt(ours, "norm")
        expected, actual = (results(n, function, CHANGES[change], training, at) for n in (norm, ours))
        if isinstance(expected, str):
            assert actual == expected
            continue
        for a, b in zip(actual, expected, strict=True):
            assert relative_error(a, b) < 1e-10


@pytest.mark.parametrize("training", [True, False])
def test_an_instance_norm_that_stops_tracking_uses_its_own_statistics(training):
    """In evaluation it used the running ones."""
    norm = made(nn.InstanceNorm2d)
    ours = InPlaceInstanceNorm(4, affine=True, track_running_stats=True, activation="identity").double()
    ours.load_state_dict(norm.state_dict())
    x = torch.randn(3, 4, 5, 5, dtype=torch.float64)
    for n in (norm, ours):
        n.track_running_stats = False
        n.train(training)
    torch.testing.assert_close(ours(x.clone()), norm(x))
    torch.testing.assert_close(ours.running_mean, norm.running_mean)
    torch.testing.assert_close(ours.running_var, norm.running_var)
