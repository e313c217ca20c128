"""The guard of synchronised layers: ranks decide together, with the collectives that they need anyway."""

import pytest
import torch
import torch.distributed as dist
from modes import distrust, end_beginning, is_trusted, the_mode
from ranks import on_each_rank
from torch import nn

from inplace_abn import ABN, InPlaceABNSync, distributed, guard, set_guard


def layer(activation="elu", gamma=10.0):
    module = InPlaceABNSync(4, activation=activation, activation_param=1.0, signed_weight=True)
    nn.init.constant_(module.weight, gamma)
    return module


def advance():
    guard.generations.advance()


def start_over():
    """Sets the generation to zero on each rank. Ranks that took part in different tests have counted differently. Ranks
    of one training never do."""
    guard.generations.current = 0


def share(t, sizes):
    return t.split(sizes)[dist.get_rank()]


def run(module, x, dz, residual=None):
    leaf = x.clone().requires_grad_()
    z = module(leaf * 1, residual)
    z.backward(dz)
    return z.detach(), leaf.grad


@pytest.mark.parametrize("activation", ["elu", "silu", "identity", "relu"])
@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("residual", [True, False])
@on_each_rank(2, 3)
def test_a_layer_that_is_not_trusted_equals_one_process_on_the_whole_batch(activation, signed, residual):
    sizes = [3, 5, 0][: dist.get_world_size()]
    torch.manual_seed(0)
    x, dz, added = torch.randn(3, 8, 4, 6, 5).double()
    dz = dz + 2 * x
    module, twin = layer(activation, -0.7).double(), ABN(4, activation=activation, activation_param=1.0).double()
    module.signed_weight = signed
    module.guard_interval = 0
    distrust(module, x.dtype)
    nn.init.constant_(twin.weight, -0.7 if signed else 0.7 + 1e-5)
    z, dx = run(module, share(x, sizes), share(dz, sizes), share(added, sizes) if residual else None)
    expected_z, expected_dx = run(twin, x, dz, added if residual else None)
    torch.testing.assert_close(z, share(expected_z, sizes))
    torch.testing.assert_close(dx, share(expected_dx, sizes))
    torch.testing.assert_close(module.running_var, twin.running_var)
    for ours, theirs in ((module.weight, twin.weight), (module.bias, twin.bias)):
        total = distributed.all_reduce(ours.grad, dist.group.WORLD)
        torch.testing.assert_close(total, theirs.grad if signed or ours is module.bias else -theirs.grad)


@on_each_rank(2, 3)
def test_what_one_rank_cannot_recover_all_ranks_keep_from_the_first_step_on():
    rank = dist.get_rank()
    start_over()
    module = set_guard(layer("relu", 1.0), interval=2)
    x, dz = torch.randn(2, 2 if rank != 1 else 3, 4, 16, 16).bfloat16()
    residual = torch.randn_like(x) * (1000 if rank == 0 else 0.1)
    run(module, x, dz, residual)
    assert not is_trusted(module)
    end_beginning(module)
    calm = 0.1 * residual.clamp(-1, 1)
    advance()
    while guard.generations.current % 2:
        run(module, x, dz, calm)
        advance()
    run(module, x, dz, calm)
    assert not is_trusted(module)
    advance()
    run(module, x, dz, calm)
    assert is_trusted(module)


@on_each_rank(2)
def test_an_empty_rank_takes_part_in_the_decision():
    module = layer("elu", 30.0)
    x = torch.randn(0 if dist.get_rank() else 4, 4, 8, 8)
    run(module, x, x)
    assert not is_trusted(module)
    assert the_mode(module).measured_at == guard.generations.current


@on_each_rank(2)
def test_ranks_that_disagree_about_a_layer_do_not_wait_for_each_other():
    module = layer("relu", 1.0)
    x = torch.randn(4, 4, 8, 8)
    run(module, x, x)
    if dist.get_rank() > 0:
        distrust(module, x.dtype)
    z, dx = run(module, x, x)
    assert z.isfinite().all()
    assert dx.isfinite().all()


@on_each_rank(2, 3)
def test_ranks_that_have_one_value_each_keep_their_input():
    start_over()
    torch.manual_seed(0)
    x, dz = torch.randn(2, dist.get_world_size(), 4, 1, 1).double()
    module, twin = layer("relu", 0.0).double(), ABN(4, activation="relu").double()
    nn.init.zeros_(twin.weight)
    sizes = [1] * dist.get_world_size()
    z, dx = run(module, share(x, sizes), share(dz, sizes))
    expected_z, expected_dx = run(twin, x, dz)
    torch.testing.assert_close(z, share(expected_z, sizes))
    torch.testing.assert_close(dx, share(expected_dx, sizes))
    x, dz = torch.randn(2, 4, 4, 8, 8)
    module = layer("relu", 1.0)
    run(module, x[:1, :, :1, :1].clone(), dz[:1, :, :1, :1].clone())
    assert the_mode(module).measured_at < 0
    run(module, x, dz)
    assert is_trusted(module)
    assert the_mode(module).measured_at == guard.generations.current


@on_each_rank(2)
def test_what_raises_raises_on_all_ranks_and_again_and_changes_nothing():
    start_over()
    module = set_guard(layer("elu", 30.0), on_untrusted="raise")
    x = torch.randn(4, 4, 8, 8)
    for _ in range(2):
        given = x.clone().requires_grad_() * 1
        with pytest.raises(RuntimeError, match="its input is not recoverable from its output"):
            module(given)
        assert torch.equal(given, x)
        assert module.num_batches_tracked == 0
        assert module.running_mean.abs().max() == 0
