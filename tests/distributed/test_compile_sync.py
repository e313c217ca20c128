"""Converted norms that synchronise their statistics, compiled on several ranks."""

import copy

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from compiled_converted_nets import held
from compiled_nets import step
from compiled_rows_nets import batch, made
from ranks import on_each_rank
from torch import nn

from inplace_abn import convert


def net():
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.SiLU()]
    layers += [nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.LeakyReLU(0.1), nn.Conv2d(8, 4, 1)]
    made = nn.Sequential(*layers).double()
    for norm in (made[1], made[4]):
        nn.init.uniform_(norm.weight, 0.5, 1.5)
    return made


@pytest.mark.parametrize("sizes", [(4, 4), (5, 3), (8, 0)])
@pytest.mark.parametrize("backend", ["aot_eager", "aot_eager_decomp_partition"])
@on_each_rank(2)
def test_the_step_is_that_of_one_process_on_the_whole_batch(sizes, backend):
    torch._dynamo.reset()
    native, rank = net(), dist.get_rank()
    module = convert(copy.deepcopy(native), sync=True)
    function = torch.compile(module, backend=backend, fullgraph=True)
    x = torch.randn(8, 3, 9, 10, dtype=torch.float64)
    expected = step(native, native, x)
    found = step(function, module, x.split(sizes)[rank])
    torch.testing.assert_close(found[0], expected[0].split(sizes)[rank])
    torch.testing.assert_close(found[1], expected[1].split(sizes)[rank])
    count = len([*module.parameters()])
    for ours, t in zip(found[2 : 2 + count], expected[2 : 2 + count], strict=True):
        dist.all_reduce(ours)
        torch.testing.assert_close(ours, t)
    torch.testing.assert_close(found[2 + count :], expected[2 + count :])


@on_each_rank(2)
def test_no_more_is_held_than_in_eager_steps():
    torch._dynamo.reset()
    native, x = net(), torch.randn(4, 3, 9, 10, dtype=torch.float64)
    module = convert(copy.deepcopy(native), sync=True)
    function = torch.compile(module, backend="aot_eager", fullgraph=True)
    step(function, module, x)
    eager = convert(copy.deepcopy(native), sync=True)
    optimizer = torch.optim.SGD(eager.parameters(), lr=0.0)
    for _ in range(4):
        step(eager, eager, x)
        optimizer.step()
    assert held(function, x) <= held(eager, x)


@on_each_rank(2)
def test_norms_that_are_not_trusted_synchronise():
    torch._dynamo.reset()
    native, x = net(), torch.randn(4, 3, 9, 10, dtype=torch.float64)
    nn.init.zeros_(native[1].weight)
    native[4].weight.data[2] = 1e-7
    module = convert(copy.deepcopy(native), sync=True)
    function = torch.compile(module, backend="aot_eager", fullgraph=True)
    found, expected = step(function, module, x.chunk(2)[dist.get_rank()]), step(native, native, x)
    torch.testing.assert_close(found[0], expected[0].chunk(2)[dist.get_rank()])
    torch.testing.assert_close(found[1], expected[1].chunk(2)[dist.get_rank()])


@pytest.mark.parametrize("name", ["layer norm, gelu", "group norm, silu", "layer scale"])
@on_each_rank(2)
def test_under_ddp_gradients_are_the_means_of_all_processes(name):
    torch._dynamo.reset()
    native = made(name)
    x = batch(samples=4)
    module = nn.parallel.DistributedDataParallel(convert(copy.deepcopy(native)))
    function = torch.compile(module, backend="aot_eager")
    for _ in range(2):
        found = step(function, module, x.chunk(2)[dist.get_rank()])
        expected = [step(native, native, part)[2:] for part in x.chunk(2)]
        means = [torch.stack(ts).mean(0) for ts in zip(*expected, strict=True)]
        torch.testing.assert_close(found[2:], means)
