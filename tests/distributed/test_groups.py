"""Which ranks synchronise, and with which collectives. There are none in evaluation and none without a process group.
With a process group, only the ranks of the module's group take part."""

import warnings

import maths
import pytest
import torch
import torch.distributed as dist
from ranks import new_process_group, on_each_rank
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from whole_batch import (
    CHANNELS,
    SHAPES,
    batches,
    check,
    over_ranks,
    own,
    parameters,
    running_statistics,
    single_process,
    synchronised,
)

from inplace_abn import ABN, InPlaceABN, InPlaceABNSync, active_group, set_active_group
from inplace_abn import inplace_abn_sync as abn_sync


class Collectives(TorchDispatchMode):
    """Collects the names of the collectives that are called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if func.namespace in ("c10d", "_c10d_functional") and name not in ("wait_tensor", "_wrap_tensor_autograd"):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@on_each_rank(2)
def test_training_has_one_all_gather_and_one_all_reduce():
    x, dz = own(batches(SHAPES["equal"]))
    with Collectives() as forward:
        z = abn_sync(x.requires_grad_().clone(), *parameters(), *running_statistics())
    with Collectives() as backward:
        z.backward(dz)
    assert forward.names == ["all_gather_into_tensor"]
    assert backward.names == ["all_reduce"]


@on_each_rank(2)
def test_frozen_input_needs_no_collective_in_backward():
    drawn, affine = batches(SHAPES["batch sizes differ"]), parameters()
    x, dz = own(drawn)
    z = abn_sync(x, *affine, None, None)
    with Collectives() as backward:
        z.backward(dz)
    assert backward.names == []
    check([over_ranks(t.grad) for t in affine], single_process(drawn, *affine)[2:])


@on_each_rank(2)
def test_evaluation_has_no_collectives():
    x, dz = own(batches(SHAPES["batch sizes differ"]))
    leaf, twin_leaf = x.requires_grad_(), x.detach().clone().requires_grad_()
    affine, twin_affine = parameters(), parameters()
    with Collectives() as mode:
        z = abn_sync(leaf.clone(), *affine, *running_statistics(), training=False)
        kept = z.detach().clone()
        z.backward(dz)
    assert mode.names == []
    twin = maths.forward(twin_leaf, *twin_affine, *running_statistics(), training=False)
    twin.backward(dz)
    check((kept, leaf.grad, *(t.grad for t in affine)), (twin, twin_leaf.grad, *(t.grad for t in twin_affine)))


@on_each_rank(2)
def test_evaluation_on_one_rank_waits_for_no_other():
    if dist.get_rank() == 0:
        module = InPlaceABNSync(CHANNELS, dtype=torch.float64).eval()
        for shape in [(2, CHANNELS, 3, 3), (1, CHANNELS), (0, CHANNELS, 3)]:
            x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
            module(x.clone()).sum().backward()
            assert x.grad.shape == x.shape
        with torch.no_grad():
            module(x.detach())


@on_each_rank(3)
def test_subgroup_synchronises_its_ranks_only():
    drawn = batches(SHAPES["batch sizes differ"])
    rank = dist.get_rank()
    group = dist.new_group([0, 2])
    running, expected_running = running_statistics(), running_statistics()
    x, dz = own(drawn)
    x.requires_grad_()
    z = abn_sync(x.clone(), *parameters(), *running, group=group)
    kept = z.detach().clone()
    z.backward(dz)
    zero = [(x[:0], dz[:0]) for x, dz in drawn]
    members = [drawn[r] if (r == 1) == (rank == 1) else zero[r] for r in range(3)]
    check((kept, x.grad), single_process(members, *parameters(), expected_running)[:2])
    check(running, expected_running)


@on_each_rank(2)
def test_group_of_one_rank_keeps_local_statistics():
    drawn = batches(SHAPES["batch sizes differ"])
    rank = dist.get_rank()
    group = [dist.new_group([r]) for r in range(2)][rank]
    with Collectives() as mode:
        z = abn_sync(own(drawn)[0], *parameters(), None, None, group=group).detach()
    assert mode.names == []
    check((z,), (maths.forward(drawn[rank][0], *parameters(), None, None),))


@on_each_rank(3)
def test_active_group_leaves_inactive_ranks_with_local_statistics():
    drawn = batches(SHAPES["batch sizes differ"])
    active = dist.get_rank() != 1
    module = InPlaceABNSync(CHANNELS, group=active_group(active), dtype=torch.float64)
    zero = [(x[:0], dz[:0]) for x, dz in drawn]
    members = [drawn[r] if (r != 1) == active else zero[r] for r in range(3)]
    with Collectives() as mode:
        z = module(own(drawn)[0]).detach()
    assert mode.names == (["all_gather_into_tensor"] if active else [])
    check((z,), single_process(members, module.weight, module.bias)[:1])


@on_each_rank(3)
def test_active_group_is_made_once_per_set_of_ranks():
    rank = dist.get_rank()
    everyone, pair = active_group(True), active_group(rank < 2)
    assert active_group(True) is everyone
    assert active_group(rank < 2) is pair
    assert dist.get_process_group_ranks(everyone) == [0, 1, 2]
    if rank < 2:
        assert pair is not everyone
        assert dist.get_process_group_ranks(pair) == [0, 1]
    else:
        assert dist.get_rank(pair) == -1


@on_each_rank(2)
def test_active_group_without_any_active_rank():
    module = InPlaceABNSync(CHANNELS, group=active_group(False), dtype=torch.float64)
    x, _ = own(batches(SHAPES["equal"]))
    expected = maths.forward(x.clone(), module.weight, module.bias, None, None)
    check((module(x),), (expected,))


@on_each_rank(3)
def test_active_group_is_forgotten_with_its_process_group():
    drawn = batches(SHAPES["batch sizes differ"])
    old = active_group(True)
    new_process_group()
    new = active_group(True)
    assert new is not old
    check(synchronised(*own(drawn), *parameters(), group=new), single_process(drawn, *parameters()))


@on_each_rank(2)
def test_set_active_group_reaches_every_synchronised_module_of_a_network():
    network = nn.Sequential(
        InPlaceABNSync(2), InPlaceABN(2), ABN(2), nn.ModuleDict({"deep": nn.Sequential(InPlaceABNSync(2))})
    )
    group = active_group(True)
    set_active_group(network, group)
    synchronised_modules = [m for m in network.modules() if isinstance(m, InPlaceABNSync)]
    assert len(synchronised_modules) == 2
    assert all(m.group is group for m in synchronised_modules)
    assert not any(hasattr(m, "group") for m in network.modules() if not isinstance(m, InPlaceABNSync))
    set_active_group(network, None)
    assert all(m.group is None for m in synchronised_modules)


@on_each_rank(2)
def test_without_a_process_group_statistics_are_local_with_one_warning():
    dist.destroy_process_group()
    x = torch.randn(4, CHANNELS, 3, 3, dtype=torch.float64, requires_grad=True)
    twin = x.detach().clone().requires_grad_()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            x.grad = None
            abn_sync(x.clone(), *parameters(), None, None).square().sum().backward()
    maths.forward(twin, *parameters(), None, None).square().sum().backward()
    check((x.grad,), (twin.grad,))
    assert len(caught) == 1
    assert "torch.distributed is not initialised" in str(caught[0].message)


def test_active_group_without_a_process_group_says_so():
    with pytest.raises(RuntimeError, match=r"inplace_abn: active_group needs .*init_process_group"):
        active_group(True)


@on_each_rank(2)
def test_compiled_without_a_process_group_keeps_local_statistics():
    dist.destroy_process_group()
    torch.compiler.reset()
    module = InPlaceABNSync(CHANNELS, dtype=torch.float64)
    x = torch.randn(4, CHANNELS, 3, 3, dtype=torch.float64)
    z = torch.compile(lambda x: module(1 * x), backend="aot_eager", fullgraph=True)(x)
    check((z.detach(),), (maths.forward(x, module.weight, module.bias, None, None).detach(),))
