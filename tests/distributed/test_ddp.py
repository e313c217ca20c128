"""Training under torch's data-parallel wrappers: the same parameters as training on one process."""

import contextlib
import functools
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import check_same_on_all_ranks, on_each_rank
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from inplace_abn import ABN, InPlaceABN, InPlaceABNSync, convert

STEPS = 5
SHARE = 3
OPTIONS = {
    "default": {},
    "find_unused_parameters": {"find_unused_parameters": True},
    "static_graph": {"static_graph": True},
    "gradient_as_bucket_view": {"gradient_as_bucket_view": True},
    "all": {"find_unused_parameters": True, "static_graph": True, "gradient_as_bucket_view": True},
}
NORMS = {
    "abn": functools.partial(ABN, dtype=torch.float64),
    "inplace": functools.partial(InPlaceABN, signed_weight=True, dtype=torch.float64),
    "inplace_sync": functools.partial(InPlaceABNSync, signed_weight=True, dtype=torch.float64),
}


class Branched(nn.Module):
    """A residual net with a branch that may stay unused."""

    def __init__(self, norm):
        super().__init__()
        conv = functools.partial(nn.Conv2d, kernel_size=3, padding=1, bias=False, dtype=torch.float64)
        self.stem = nn.Sequential(conv(2, 4), norm(4))
        self.block = nn.Sequential(conv(4, 4), norm(4, activation="elu", activation_param=1.0), conv(4, 4))
        self.norm = norm(4, activation="elu", activation_param=0.7)
        self.branch = nn.Sequential(conv(4, 4), norm(4))
        self.checkpoint = lambda run, x: run(x)
        self.head = nn.Linear(4, 3, dtype=torch.float64)

    def forward(self, x, use_branch=True):
        x = self.stem(x)
        x = self.norm(self.checkpoint(self.block, x), residual=x)
        if use_branch:
            x = self.branch(x) + x
        return self.head(x.mean(dim=(2, 3)))


def net(norm):
    torch.manual_seed(0)
    return Branched(NORMS[norm])


def shares(step):
    """Every rank's x and target."""
    draw = torch.Generator().manual_seed(step)
    ranks = dist.get_world_size()
    x = torch.randn(ranks, SHARE, 2, 5, 5, generator=draw, dtype=torch.float64)
    x += torch.arange(ranks).view(-1, 1, 1, 1, 1)
    return x, torch.randn(ranks, SHARE, 3, generator=draw, dtype=torch.float64)


def own(step):
    return [t[dist.get_rank()] for t in shares(step)]


def whole(step):
    return [t.flatten(0, 1) for t in shares(step)]


def train(model, data, use_branch=lambda step: True, micro_batches=1):
    """Trains for `STEPS` steps. Each step sums the gradients of ``micro_batches`` batches. Only the last batch averages
    them over ranks."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(STEPS):
        for part in range(micro_batches):
            last = part == micro_batches - 1
            x, target = data(step * micro_batches + part)
            with contextlib.nullcontext() if last or not hasattr(model, "no_sync") else model.no_sync():
                F.mse_loss(model(x, use_branch(step)).to(target), target).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def check(model, expected):
    """Asserts that parameters and statistics are equal to 1e-10, and that training has changed them."""
    initial = net("abn").state_dict()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, expected.state_dict()[name], rtol=1e-10, atol=1e-10, msg=name)
        assert not torch.equal(value, initial[name]), name


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@on_each_rank(2)
def test_synchronised_training_equals_one_process_on_the_whole_batch(options):
    ddp = train(DistributedDataParallel(net("inplace_sync"), **options), own)
    check(ddp.module, train(net("inplace"), whole))
    check_same_on_all_ranks(*ddp.module.state_dict().values())


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@on_each_rank(2)
def test_local_training_equals_that_with_plain_batch_norm(options):
    ddp = train(DistributedDataParallel(net("inplace"), **options), own)
    check(ddp.module, train(DistributedDataParallel(net("abn"), **options), own).module)


@on_each_rank(2)
def test_local_training_on_the_same_data_equals_one_process():
    def data(step):
        return [t[0] for t in shares(step)]

    check(train(DistributedDataParallel(net("inplace")), data).module, train(net("inplace"), data))


@pytest.mark.parametrize("norm", ["inplace", "inplace_sync"])
@on_each_rank(2)
def test_accumulation_without_synchronisation_of_gradients(norm):
    ddp = train(DistributedDataParallel(net(norm), gradient_as_bucket_view=True), own, micro_batches=3)
    if norm == "inplace_sync":
        expected = train(net("inplace"), whole, micro_batches=3)
    else:
        expected = train(DistributedDataParallel(net("abn")), own, micro_batches=3).module
    check(ddp.module, expected)


@on_each_rank(2)
def test_branch_unused_by_all_ranks_in_some_steps():
    ddp = DistributedDataParallel(net("inplace_sync"), find_unused_parameters=True)
    train(ddp, own, use_branch=lambda step: step % 2)
    check(ddp.module, train(net("inplace"), whole, use_branch=lambda step: step % 2))


@on_each_rank(2)
def test_branch_unused_by_one_rank():
    def use_branch(step):
        return (step + dist.get_rank()) % 2

    models = [DistributedDataParallel(net(norm), find_unused_parameters=True) for norm in ("inplace", "abn")]
    for model in models:
        train(model, own, use_branch=use_branch)
    check(models[0].module, models[1].module)


@on_each_rank(2)
def test_checkpointed_block():
    models = [net(norm) for norm in ("inplace_sync", "inplace")]
    for model in models:
        model.checkpoint = functools.partial(checkpoint, use_reentrant=False)
    ddp = train(DistributedDataParallel(models[0], static_graph=True), own)
    check(ddp.module, train(models[1], whole))


@on_each_rank(2)
def test_fine_tuning_with_frozen_statistics():
    pretrained = train(net("abn"), whole)
    model = net("inplace_sync")
    model.load_state_dict(pretrained.state_dict())
    ddp = train(DistributedDataParallel(model).eval(), own)
    check(ddp.module, train(pretrained.eval(), whole))


@pytest.mark.parametrize("norm", ["inplace", "inplace_sync"])
@on_each_rank(2)
def test_fully_sharded_training_equals_unsharded(norm):
    sharded = net(norm)
    for module in (sharded.stem, sharded.block, sharded.branch, sharded):
        fully_shard(module)
    train(sharded, own)
    state = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in sharded.state_dict().items()}
    gathered = net(norm)
    gathered.load_state_dict(state)
    check(gathered, train(DistributedDataParallel(net(norm), broadcast_buffers=False), own).module)


@pytest.mark.parametrize("norm", ["inplace", "inplace_sync"])
@on_each_rank(2)
def test_fully_sharded_training_in_mixed_precision(norm):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    sharded = net(norm).float()
    for module in (sharded.stem, sharded.block, sharded.branch, sharded):
        fully_shard(module, mp_policy=policy)

    train(sharded, lambda step: [t.float() for t in own(step)])
    expected = train(DistributedDataParallel(net(norm), broadcast_buffers=False), own).module.state_dict()
    for name, value in sharded.state_dict().items():
        value = value.full_tensor() if isinstance(value, DTensor) else value
        torch.testing.assert_close(value, expected[name], rtol=0.02, atol=0.02, check_dtype=False, msg=name)


@pytest.mark.parametrize("norm", ["inplace", "inplace_sync"])
@on_each_rank(2)
def test_sharding_the_norm_alone_is_refused_with_the_reason(norm):
    sharded = net(norm)
    fully_shard(sharded.norm)
    x, _ = own(0)
    with pytest.raises(ValueError, match=r"inplace_abn: .*autograd does not let x be overwritten.*custom autograd"):
        sharded(x)


@pytest.mark.parametrize("norm", ["inplace", "inplace_sync"])
@on_each_rank(2)
def test_compiled_training_equals_eager(norm):
    torch.compiler.reset()
    compiled = net(norm)
    compiled.compile(backend="aot_eager", fullgraph=True)
    ddp = train(DistributedDataParallel(compiled), own)
    check(ddp.module, train(DistributedDataParallel(net(norm)), own).module)


@on_each_rank(2)
def test_a_converted_net_that_is_compiled_in_parts_trains_as_the_native_one():
    torch.compiler.reset()
    parts = []

    def backend(graph, inputs):
        parts.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    def made():
        torch.manual_seed(0)
        convs = [nn.Conv2d(2 if i == 0 else 4, 4, 3, padding=1, bias=False) for i in range(3)]
        layers = [layer for conv in convs for layer in (conv, nn.BatchNorm2d(4), nn.ReLU())]
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(100, 3)).double()

    def trained(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        for step in range(STEPS):
            x, target = own(step)
            F.mse_loss(model(x), target).backward()
            optimizer.step()
            optimizer.zero_grad()
        return model

    # Each layer has a bucket of gradients of its own. The compiler divides the net where the buckets end.
    options = {"bucket_cap_mb": 1e-4}
    compiled = torch.compile(DistributedDataParallel(convert(made()), **options), backend=backend)
    with mock.patch.object(dist, "_DEFAULT_FIRST_BUCKET_BYTES", 100):
        actual = trained(compiled)
    expected = trained(DistributedDataParallel(made(), **options))
    assert len(parts) > 2
    for (name, value), other in zip(actual.state_dict().items(), expected.state_dict().values(), strict=True):
        torch.testing.assert_close(value, other, rtol=1e-10, atol=1e-10, msg=name)
