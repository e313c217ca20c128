"""Backward allocates nothing of an activation's size if it can reuse memory, and a chain holds one activation per
unit."""

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from inplace_abn import InPlaceABN, guard


def allocations(step, at_least, node="InPlaceABNFunction"):
    """Returns the sizes of the blocks of at least ``at_least`` bytes that each backward node allocates, and the sizes
    of all events. ``node`` is a part of the name of these nodes, by default an ABN's."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    events = profiler.profiler.kineto_results.events()
    memory = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    nodes = sorted((e.start_ns(), e.end_ns()) for e in events if "evaluate_function" in e.name() and node in e.name())
    within = [[size for time, size in memory if start <= time <= end and size >= at_least] for start, end in nodes]
    return within, [size for _, size in memory]


def peak(sizes):
    held = most = 0
    for size in sizes:
        held += size
        most = max(most, held)
    return most


def activation(device, layout="contiguous"):
    x = torch.randn(8, 16, 24, 24, device=device)
    return x.contiguous(memory_format=torch.channels_last) if layout == "channels_last" else x


def conv(bias=False):
    return nn.Conv2d(16, 16, 3, padding=1, bias=bias)


def in_place(activation="leaky_relu"):
    return [InPlaceABN(16, activation=activation)]


def native():
    return [nn.BatchNorm2d(16), nn.LeakyReLU(0.01)]


class Chain(nn.Sequential):
    def __init__(self, units, norm=in_place):
        super().__init__(*[m for _ in range(units) for m in (conv(), *norm())], conv())


class AddBlock(nn.Module):
    """y = ABN(conv(ABN(conv(r)))) + r"""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(conv(), *in_place(), conv(), *in_place("identity"))

    def forward(self, r):
        return self.body(r) + r


class ResidualArgumentBlock(nn.Module):
    """y = act(BN(conv(ABN(conv(r)))) + r) by the residual argument."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(conv(), *in_place(), conv())
        self.last = InPlaceABN(16)

    def forward(self, r):
        return self.last(self.body(r), residual=r)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("loss", [lambda y: y.square().mean(), torch.sum], ids=["weighted", "sum"])
@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
def test_backward_of_abn_between_convolutions_allocates_nothing(training, loss, layout):
    net = Chain(3).train(training)
    x = activation("cpu", layout)
    value = loss(net(x))
    within, _ = allocations(value.backward, x.nbytes)
    assert within == [[], [], []]


# The numbers are the blocks of an activation's size that each ABN of a block allocates in backward, from the last ABN
# to the first.
#
# AddBlock: the addition passes the same gradient to the block and around it, so the last ABN may not overwrite that
# gradient. But nobody needs the output of that ABN any more, because the addition saves nothing. dx takes its memory.
#
# ResidualArgumentBlock: backward writes two results, dx and the gradient of the residual, and it owns two buffers, dz
# and z. The output of the block is the input of the next block, whose convolution has finished its backward by then.
RESIDUAL = {
    "add": (AddBlock, [[], []]),
    "residual argument": (ResidualArgumentBlock, [[], []]),
}


@pytest.mark.parametrize("block", RESIDUAL)
def test_backward_of_residual_blocks_allocates_what_sharing_forces(block):
    kind, expected = RESIDUAL[block]
    net = nn.Sequential(conv(), *in_place(), kind(), kind(), conv())
    x = activation("cpu")
    value = net(x).square().mean()
    within, _ = allocations(value.backward, x.nbytes)
    assert within == [*expected, *expected, []]


VIEWS = {
    "flattened": lambda y: y.flatten(2),
    "part of the batch": lambda y: y[1:],
    "part of the channels": lambda y: y[:, 2:],
}


@pytest.mark.parametrize("view", VIEWS)
def test_backward_through_a_view_allocates_no_more_than_autograd_for_an_op_in_place(view):
    """Autograd itself allocates for each in-place op on a view. An ABN must not allocate more than that."""
    sizes = []
    for overwrite in (lambda x: InPlaceABN(x.shape[1])(x), lambda x: x.add_(1)):
        y = activation("cpu").requires_grad_() * 2
        z = overwrite(VIEWS[view](y))
        at_least = z.nbytes
        loss = z.square().sum()
        del y, z
        within, _ = allocations(loss.backward, at_least, node="CopySlices")
        sizes.append(within)
    assert sizes[0] == sizes[1]


def test_an_output_that_is_kept_costs_one_block_where_the_gradient_is_shared_too():
    net = nn.Sequential(conv(), *in_place(), AddBlock(), conv())
    kept = []
    net[2].body[3].register_forward_hook(lambda module, args, output: kept.append(output))
    x = activation("cpu")
    value = net(x).square().mean()
    within, _ = allocations(value.backward, x.nbytes)
    assert within == [[x.nbytes], [], []]


@pytest.mark.parametrize("units", [2, 5, 9])
def test_a_chain_keeps_one_activation_per_unit(units):
    x = activation("cpu")
    held = []

    def forward(net):
        def step():
            held.append(net(x))

        return step

    _, ours = allocations(forward(Chain(units)), 0)
    _, theirs = allocations(forward(Chain(units, native)), 0)
    # In place, each unit holds one activation, and the last convolution its result. BatchNorm and its activation hold
    # an input each in addition.
    assert round(sum(ours) / x.nbytes, 1) == units + 1
    assert round(sum(theirs) / x.nbytes, 1) == 3 * units + 1


def test_a_training_step_needs_no_more_than_the_activations_and_a_few_at_a_time():
    x = activation("cpu")
    peaks = {}
    for units in (4, 8):
        net = Chain(units)
        net(x).square().mean().backward()
        net.zero_grad(set_to_none=True)
        with guard.paused():
            _, sizes = allocations(lambda net=net: net(x).square().mean().backward(), 0)
        peaks[units] = peak(sizes) / x.nbytes
    assert peaks[8] - peaks[4] == pytest.approx(4, abs=0.1)
    assert peaks[4] < 4 + 5.5


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_a_chain_on_cuda_keeps_one_activation_per_unit_and_backward_adds_none(layout):
    x = torch.randn(8, 16, 64, 64, device="cuda").contiguous(
        memory_format=torch.channels_last if layout == "channels_last" else torch.contiguous_format
    )
    used = {}
    for units in (4, 8):
        net = Chain(units).cuda().to(memory_format=torch.channels_last if layout == "channels_last" else None)
        net(x).square().mean().backward()
        net.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        with guard.paused():
            value = net(x).square().mean()
            held = torch.cuda.memory_allocated() - before
            value.backward()
        used[units] = held / x.nbytes, (torch.cuda.max_memory_allocated() - before) / x.nbytes
    assert used[8][0] - used[4][0] == pytest.approx(4, abs=0.1)
    assert used[8][1] - used[4][1] == pytest.approx(4, abs=0.1)
