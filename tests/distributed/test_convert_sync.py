"""Converted norms on several ranks compute what one process computes from the whole batch, whatever follows the norms
and whatever the guard decides."""

import copy

import pytest
import torch
import torch.distributed as dist
from modes import start_over
from ranks import on_each_rank
from torch import nn

from inplace_abn import active_group, convert, distributed, set_active_group
from inplace_abn.conversion.norms import InPlaceNorm


class ThreeNorms(nn.Module):
    """Norms before a relu, an addition in place, and tanh."""

    def __init__(self, gamma):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.conv2, self.bn2 = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4, momentum=None)
        self.relu, self.last = nn.ReLU(inplace=True), nn.BatchNorm2d(4)
        for norm in (self.bn1, self.bn2, self.last):
            nn.init.constant_(norm.weight, gamma)

    def forward(self, x):
        h = self.relu(self.bn1(self.conv1(x)))
        z = self.bn2(self.conv2(h))
        z += h
        return torch.tanh(self.last(nn.functional.silu(z)))


@pytest.mark.parametrize("kind", ["sync=True", "SyncBatchNorm"])
@on_each_rank(3)
def test_converted_norms_synchronise_in_the_active_group(kind):
    """set_active_group passed converted norms by, so they went on with the default group."""
    start_over()
    torch.manual_seed(0)
    net = ThreeNorms(0.7).double()
    shared = copy.deepcopy(net)
    if kind == "SyncBatchNorm":
        shared = nn.SyncBatchNorm.convert_sync_batchnorm(shared)
    convert(shared, sync=kind == "sync=True")
    rank, x = dist.get_rank(), torch.randn(6, 3, 6, 5, dtype=torch.float64)
    for members in ([0, 1], [0, 1, 2], None):
        set_active_group(shared, None if members is None else active_group(rank in members))
        together = [0, 1, 2] if members is None else members if rank in members else [rank]
        expected = net(torch.cat([x.chunk(3)[i] for i in together])).chunk(len(together))[together.index(rank)]
        torch.testing.assert_close(shared(x.chunk(3)[rank]), expected)


@pytest.mark.parametrize("kind", ["sync=True", "SyncBatchNorm"])
@pytest.mark.parametrize("gamma", [0.7, 0.0])
@on_each_rank(2)
def test_a_converted_net_equals_one_process_on_the_whole_batch(gamma, kind):
    start_over()
    torch.manual_seed(0)
    net = ThreeNorms(gamma).double()
    shared = copy.deepcopy(net)
    if kind == "SyncBatchNorm":
        shared = nn.SyncBatchNorm.convert_sync_batchnorm(shared)
    convert(shared, sync=kind == "sync=True")
    assert sum(isinstance(m, InPlaceNorm) for m in shared.modules()) == 3
    sizes = [3, 5]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (net, shared)]
    for _ in range(3):
        x = torch.randn(8, 3, 6, 5, dtype=torch.float64)
        mine = x.split(sizes)[dist.get_rank()]
        for optimizer in optimizers:
            optimizer.zero_grad()
        expected, z = net(x), shared(mine)
        expected.square().sum().backward()
        z.square().sum().backward()
        torch.testing.assert_close(z, expected.split(sizes)[dist.get_rank()])
        for ours, theirs in zip(shared.parameters(), net.parameters(), strict=True):
            ours.grad = distributed.all_reduce(ours.grad, dist.group.WORLD)
            torch.testing.assert_close(ours.grad, theirs.grad)
        for ours, theirs in zip(shared.buffers(), net.buffers(), strict=True):
            torch.testing.assert_close(ours, theirs)
        for optimizer in optimizers:
            optimizer.step()
    shared.eval()
    with torch.no_grad():
        torch.testing.assert_close(shared(x), net.eval()(x))


@pytest.mark.parametrize("activation", [nn.SiLU, nn.Mish, nn.ELU])
@on_each_rank(2)
def test_norms_of_ranks_that_lie_far_apart_are_measured_by_the_statistics_of_all(activation):
    """By a rank's own statistics its values would be spread over the whole activation. They lie around its minimum, or
    in its tail."""
    start_over()
    torch.manual_seed(0)
    native = nn.Sequential(nn.BatchNorm2d(4), activation(), nn.Conv2d(4, 4, 1)).bfloat16()
    nn.init.constant_(native[0].weight, 2.0 if activation is nn.ELU else 1.5)
    far = torch.tensor([-6.0, -6.0, 0.0, 0.0]).view(4, 1, 1, 1)
    x = (torch.randn(4, 4, 8, 8) + far).bfloat16()
    dz = (torch.randn(4, 4, 8, 8) + x).bfloat16()
    shared = convert(nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(native)))

    def dx_of(net, x, dz):
        leaf = x.clone().requires_grad_()
        net(leaf).backward(dz)
        return leaf.grad.chunk(2)[dist.get_rank()].double() if len(x) == 4 else leaf.grad.double()

    exact = dx_of(copy.deepcopy(native).double(), x.double(), dz.double())
    allowed = 2 * max(0.01, (dx_of(native, x, dz) - exact).norm() / exact.norm())
    mine = dx_of(shared, x.chunk(2)[dist.get_rank()], dz.chunk(2)[dist.get_rank()])
    assert (mine - exact).norm() <= allowed * exact.norm()
