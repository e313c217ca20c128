"""In most steps the host neither waits for the device nor copies numbers to it. A device would stall there, and a step
with such a wait cannot be captured into a graph."""

import copy

import pytest
import torch
import torch.nn.functional as F
from ranks import on_each_rank
from torch import nn

from inplace_abn import (
    InPlaceABN,
    InPlaceABNSync,
    InPlaceGroupNorm,
    InPlaceInstanceNorm,
    _torch,
    convert,
    guard,
    report,
)
from inplace_abn.guard.figures import are_known, no_figures, unpacked, worst

WAITING = {"_local_scalar_dense", "lift_fresh", "nonzero", "is_nonzero", "equal"}
"""Ops that give the host a number of the device, or the device numbers of the host."""


class NoWaits(_torch.OwnMode):
    """A mode under which such an op is an error."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.split("::")[1]
        assert name not in WAITING, f"the host waits in {func}"
        return func(*args, **(kwargs or {}))


def conv():
    return nn.Conv2d(8, 8, 3, padding=1)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second, self.act = conv(), nn.BatchNorm2d(8), conv(), nn.ReLU()

    def forward(self, x):
        return self.second(self.act(self.norm(self.first(x)) + x))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.rms, self.gamma = nn.LayerNorm(8), nn.RMSNorm(8), nn.Parameter(torch.ones(8))
        self.fc1, self.fc2 = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        x = x.flatten(2).transpose(1, 2) * 1
        x = x + self.fc2(F.gelu(self.fc1(self.norm(x)))) * self.gamma
        return self.fc1(self.rms(x))


NETS = {
    "in place": lambda: nn.Sequential(conv(), InPlaceABN(8), conv(), InPlaceABN(8, activation="elu"), conv()),
    "instance norm": lambda: nn.Sequential(conv(), InPlaceInstanceNorm(8, affine=True), conv()),
    "group norm": lambda: nn.Sequential(conv(), InPlaceGroupNorm(2, 8), conv()),
    "converted": lambda: convert(nn.Sequential(conv(), nn.BatchNorm2d(8), nn.SiLU(), conv())),
    "converted, residual": lambda: convert(Residual()),
    "converted instance norm": lambda: convert(nn.Sequential(conv(), nn.InstanceNorm2d(8), nn.ReLU(), conv())),
    "converted group norm": lambda: convert(nn.Sequential(conv(), nn.GroupNorm(2, 8), nn.SiLU(), conv())),
    "transformer": lambda: convert(Transformer()),
    "activation": lambda: convert(nn.Sequential(conv(), nn.GELU(), conv())),
}


def steps_without_waits(net):
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    # Layers measure in the first step, and in the second, fourth, eighth and so on after it.
    guard.generations.current += 199 - guard.generations.current % 100
    watched = 0
    for step in range(8):
        optimizer.zero_grad()
        x = torch.randn(4, 8, 6, 6)
        if step in (3, 6, 7):
            watched += 1
            with NoWaits():
                net(x).square().mean().backward()
        else:
            net(x).square().mean().backward()
        optimizer.step()
    assert watched == 3
    assert all(layer.in_place for layer in report(net).layers)


@pytest.mark.parametrize("name", NETS)
def test_the_host_does_not_wait_in_a_step_that_is_not_measured(name):
    steps_without_waits(NETS[name]())


def test_the_mode_sees_waits():
    with NoWaits(), pytest.raises(AssertionError, match="the host waits"):
        torch.ones(1).item()
    with NoWaits(), pytest.raises(AssertionError, match="the host waits"):
        torch.tensor([1.0])


@pytest.mark.parametrize("kind", ["in place", "converted"])
@on_each_rank(2)
def test_ranks_that_synchronise_do_not_wait_either(kind):
    torch.manual_seed(0)
    if kind == "in place":
        net = nn.Sequential(conv(), InPlaceABNSync(8), conv())
    else:
        net = convert(nn.Sequential(conv(), nn.BatchNorm2d(8), nn.ReLU(), conv()), sync=True)
    steps_without_waits(net)


def test_figures_of_ranks_are_merged_on_the_device():
    nothing = no_figures(torch.device("cpu"))
    assert nothing.tolist() == [0.0, 0.0, -1.0, float("inf")]
    assert not are_known(torch.stack([nothing, nothing]))
    measured = torch.tensor([[0.5, 0.1, 3.0, 7.0], [0.2, 0.4, 5.0, 2.0]], dtype=torch.float64)
    with NoWaits():
        found = worst(torch.cat([measured, nothing[None]]))
    assert tuple(unpacked(found)) == (0.5, 0.4, 5, 2.0)


def test_a_copy_of_a_net_does_not_wait_after_its_first_steps():
    net = NETS["transformer"]()
    steps_without_waits(net)
    steps_without_waits(copy.deepcopy(net))
