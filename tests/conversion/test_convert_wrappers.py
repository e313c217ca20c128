"""Under torch's wrappers, checkpoints and averages, converted models do what the originals do."""

import copy

import pytest
import torch
import torch.nn.functional as F
from foreign_nets import BasicBlock, conv, spread
from modes import start_over
from ranks import on_each_rank
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from inplace_abn import convert, revert
from inplace_abn.conversion.norms import InPlaceNorm

WAYS = ["before", "after"]


class EndsInANorm(nn.Module):
    """A net with a unit that ends with a norm. The activation of that norm is outside of the unit."""

    def __init__(self):
        super().__init__()
        self.first, self.second = BasicBlock(3, 4), BasicBlock(4, 8)
        self.last, self.fc = nn.Sequential(conv(8, 8), nn.BatchNorm2d(8)), nn.Linear(8, 2)
        self.run = lambda module, x: module(x)

    def forward(self, x):
        x = self.run(self.second, self.run(self.first, x))
        return self.fc(F.relu(self.run(self.last, x)).mean((2, 3)))


def net(converted, gamma=None):
    start_over()
    torch.manual_seed(0)
    made = spread(EndsInANorm()).double()
    if gamma is not None:
        nn.init.constant_(made.last[1].weight, gamma)
    if converted:
        convert(made)
        assert isinstance(made.last[1], InPlaceNorm)
    return made


def images(seed):
    return torch.randn(4, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def train(model, steps=3, rank=0, averaged=None):
    """Trains for some steps. Returns the losses and gradients of the steps, and the buffers after them."""
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(images(10 * step + rank)).square().mean()
        loss.backward()
        found += [loss.detach(), *(p.grad for p in model.parameters())]
        found = [t.full_tensor() if isinstance(t, DTensor) else t.clone() for t in found]
        optimizer.step()
        if averaged is not None:
            averaged.update_parameters(model)
    return [*found, *(t.double() for t in model.buffers())]


def check(actual, expected):
    for ours, others in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, others, rtol=1e-9, atol=1e-9)


def sharded(model, units):
    modules = {"norms": lambda m: isinstance(m, nn.BatchNorm2d), "blocks": lambda m: m in (*model.children(),)}
    for module in [m for m in model.modules() if units in modules and modules[units](m)]:
        fully_shard(module)
    return fully_shard(model)


@pytest.mark.parametrize("gamma", [None, 0.0])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("units", ["one", "blocks", "norms"])
@on_each_rank(2)
def test_fully_sharded(units, way, gamma):
    """If a unit ends with a norm, the norm's parameters are freed before it is known what follows the norm."""
    rank = torch.distributed.get_rank()
    expected = train(sharded(net(False, gamma), units), rank=rank)
    model = sharded(net(way == "before", gamma), units)
    model = model if way == "before" else convert(model)
    check(train(model, rank=rank), expected)


@pytest.mark.parametrize(
    "options",
    [{}, {"find_unused_parameters": True}, {"static_graph": True}, {"gradient_as_bucket_view": True}],
    ids=lambda options: next(iter(options), "default"),
)
@on_each_rank(2)
def test_distributed_data_parallel(options):
    rank = torch.distributed.get_rank()
    expected = train(DistributedDataParallel(net(False), **options), rank=rank)
    check(train(DistributedDataParallel(net(True), **options), rank=rank), expected)


def test_data_parallel():
    check(train(nn.DataParallel(net(True))), train(nn.DataParallel(net(False))))


CHECKPOINTS = {
    "each": lambda module, x: checkpoint(module, x, use_reentrant=False),
    "nested": lambda module, x: checkpoint(
        lambda x: checkpoint(module, x, use_reentrant=False) * 1.5, x, use_reentrant=False
    ),
    "sequential": lambda module, x: (
        checkpoint_sequential(module, 2, x, use_reentrant=False) if isinstance(module, nn.Sequential) else module(x)
    ),
}


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_checkpoints(kind, reentrant):
    models = net(False), net(True)
    for model in models:
        if reentrant:
            model.run = lambda module, x: checkpoint(module, x.requires_grad_(), use_reentrant=True)
        else:
            model.run = CHECKPOINTS[kind]
    expected, actual = (train(model) for model in models)
    # If nothing within a unit needs the output of a converted norm, the norm is not computed again. It counts its
    # batches once, so its buffers are not compared.
    buffers = len([*models[0].last.buffers()])
    check(actual[:-buffers], expected[:-buffers])


@pytest.mark.parametrize("average", ["swa", "ema"])
def test_averages(average):
    options = {"use_buffers": True, "multi_avg_fn": get_ema_multi_avg_fn(0.9)} if average == "ema" else {}
    results = []
    for converted in (False, True):
        model = net(converted)
        averaged = AveragedModel(model, **options)
        train(model, averaged=averaged)
        update_bn([images(50), images(51)], averaged)
        averaged.eval()
        results.append([averaged(images(60)).detach(), *averaged.state_dict().values()])
    check(results[1], results[0])


def test_parametrized_convolutions_and_norms():
    results = []
    for converted in (False, True):
        model = net(converted)
        torch.manual_seed(1)
        parametrizations.weight_norm(model.first.conv1)
        parametrizations.spectral_norm(model.second.conv2)
        parametrizations.weight_norm(model.second.bn1)
        results.append(train(model))
    check(results[1], results[0])


def test_a_model_that_is_reverted_between_steps_and_fused():
    model, other = net(False), net(True)
    check(train(other), train(model))
    check(train(revert(other)), train(model))
    check(train(convert(other)), train(model))
    revert(other)
    fused = []
    for trained in (model.eval(), other.eval()):
        pairs = [["first.conv1", "first.bn1"], ["second.conv2", "second.bn2"], ["last.0", "last.1"]]
        fused.append(torch.ao.quantization.fuse_modules(copy.deepcopy(trained), pairs)(images(7)))
    torch.testing.assert_close(fused[1], fused[0])
    torch.testing.assert_close(fused[1], other(images(7)))
