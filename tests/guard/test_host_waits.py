"""In most steps the host neither waits for the device nor copies numbers to it. A device would stall there, and a step
with such a wait cannot be captured into a graph.

Without a GPU the CPU plays the device, and "meta" plays the host: tensors are made there unless a device is named. Fake
tensors on a GPU have no backward without a GPU.
"""

import copy
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from cases import covering
from functorch.compile import make_boxed_func
from ranks import on_each_rank
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

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
from inplace_abn.guard import figures

WAITING = {"_local_scalar_dense", "lift_fresh", "lift_fresh_copy", "nonzero", "is_nonzero", "equal"}
"""Ops that give the host a number of the device, or the device numbers of the host."""


def is_at_one_place(func, *values):
    kinds = {t.device.type for t in tree_leaves(values) if isinstance(t, torch.Tensor)}
    assert len(kinds) < 2, f"{func} has tensors on {' and '.join(sorted(kinds))}"


class NoWaits(_torch.OwnMode):
    """A mode under which such an op is an error, and so is one that brings tensors of two devices together."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func._schema.name.split("::")[1]
        assert name not in WAITING, f"the host waits in {func}"
        is_at_one_place(func, args, kwargs)
        result = func(*args, **kwargs)
        is_at_one_place(func, args, kwargs, result)
        return result


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


def hard(net):
    """The net with norms whose input cannot be recovered."""
    for module in net.modules():
        if isinstance(module, (nn.BatchNorm2d, nn.GroupNorm, nn.InstanceNorm2d, nn.LayerNorm, InPlaceABN)):
            nn.init.constant_(module.bias, 1e5)
    return net


UNTRUSTED = {
    "in place": lambda: hard(nn.Sequential(conv(), InPlaceABN(8), conv())),
    "converted": lambda: convert(hard(nn.Sequential(conv(), nn.BatchNorm2d(8), nn.SiLU(), conv()))),
    "converted group norm": lambda: convert(hard(nn.Sequential(conv(), nn.GroupNorm(2, 8), nn.SiLU(), conv()))),
    "transformer": lambda: convert(hard(Transformer())),
}


def with_small_weights(net):
    """The net with a norm that keeps two columns as they are, because its output does not determine them."""
    with torch.no_grad():
        net.norm.weight[[2, 5]], net.norm.bias[[2, 5]] = 1e-12, 1.0
    return net


@contextmanager
def no_waits(device):
    """Waits are errors: of torch's own on a GPU."""
    if device.type == "cuda":
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)
    else:
        with torch.device("meta"), NoWaits():
            yield


CPU = torch.device("cpu")


def steps_without_waits(net, device=CPU, trusted=True):
    net = net.to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3 if trusted else 0.0)
    # Layers measure in the first step, and in the second, fourth, eighth and so on after it. Those that are not trusted
    # read their weights in these steps and in the next, and are measured anew with what they chose there.
    unmeasured = (3, 6, 7) if trusted else (7, 8)
    guard.generations.current += 199 - guard.generations.current % 100
    for step in range(9):
        optimizer.zero_grad()
        x = torch.randn(4, 8, 6, 6, device=device)
        if step in unmeasured:
            with no_waits(device):
                net(x).square().mean().backward()
        else:
            net(x).square().mean().backward()
        optimizer.step()
    assert all(layer.in_place for layer in report(net).layers) or not trusted
    assert all(layer.why_untrusted == "" for _, layer in guard.layers_of(net)) == trusted


@pytest.mark.parametrize("name", NETS)
def test_the_host_does_not_wait_in_a_step_that_is_not_measured(name, device):
    steps_without_waits(NETS[name](), device)


@pytest.mark.parametrize("name", UNTRUSTED)
def test_the_host_does_not_wait_for_layers_that_run_as_torch_does(name, device):
    steps_without_waits(UNTRUSTED[name](), device, trusted=False)


def test_the_mode_sees_waits():
    with NoWaits(), pytest.raises(AssertionError, match="the host waits"):
        torch.ones(1).item()
    with NoWaits(), pytest.raises(AssertionError, match="the host waits"):
        torch.tensor([1.0])
    with torch.device("meta"), NoWaits(), pytest.raises(AssertionError, match="tensors on cpu and meta"):
        torch.ones(3, device="cpu") * torch.ones(3)


@pytest.mark.parametrize("trusted", [True, False], ids=["in place", "as torch does"])
@pytest.mark.parametrize("kind", ["module", "converted"])
@on_each_rank(2)
def test_ranks_that_synchronise_do_not_wait_either(kind, trusted):
    """Ranks read how many values all of them had, in each step of a layer that runs as torch does."""
    torch.manual_seed(0)
    if kind == "module":
        net = nn.Sequential(conv(), InPlaceABNSync(8), conv())
        net = net if trusted else hard(net)
    else:
        native = nn.Sequential(conv(), nn.BatchNorm2d(8), nn.ReLU(), conv())
        net = convert(native if trusted else hard(native), sync=True)
    steps_without_waits(net, trusted=trusted)


def test_figures_of_a_gpu_come_to_the_host_without_a_wait_and_on_their_own_stream(monkeypatch):
    """The event was recorded on the stream of the current device, where it was complete before the copy."""
    recorded = []

    class Event:
        def __init__(self, device):
            self.device = device

        def record(self, stream):
            recorded.append((self.device, stream))

    monkeypatch.setattr(figures.torch, "Event", Event)
    monkeypatch.setattr(figures.torch.accelerator, "current_stream", lambda device: f"stream of {device}")
    with FakeTensorMode():
        other = torch.device("cuda", 1)
        host, event = figures.fetched(torch.empty(8, 5, device=other))
    assert host.device.type == "cpu"
    assert isinstance(event, Event)
    assert recorded == [(other, "stream of cuda:1")]


def test_a_copy_of_a_net_does_not_wait_after_its_first_steps():
    net = NETS["transformer"]()
    steps_without_waits(net)
    steps_without_waits(copy.deepcopy(net))


COMPILED = {**NETS, "transformer that keeps columns": lambda: convert(with_small_weights(Transformer()))}


@pytest.mark.usefixtures("fresh_compiler")
@covering(2, name=COMPILED, dynamic=[None, True])
def test_graphs_of_compilers_hold_no_numbers_of_the_host(name, dynamic):
    """Tensors that were made of columns while the compiler traced were copied to the device in each call."""
    graphs = []

    def kept(module, _):
        graphs.append(module)
        return make_boxed_func(module)

    net = torch.compile(COMPILED[name](), backend=aot_autograd(fw_compiler=kept), fullgraph=True, dynamic=dynamic)
    net(torch.randn(4, 8, 6, 6)).square().mean().backward()
    nodes = [node for module in graphs for node in module.graph.nodes]
    ops = [node.target for node in nodes if isinstance(node.target, torch._ops.OpOverload)]
    names = {op._schema.name.split("::")[1] for op in ops}
    assert names
    assert not names & WAITING
    # Tensors that a graph has as attributes are the host's.
    assert not [node for node in nodes if node.op == "get_attr"]
    assert ("index" in names) == ("keeps columns" in name)
