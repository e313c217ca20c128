"""The guard of synchronised layers: each rank decides by itself, and collectives are the same whatever they decide."""

import pytest
import torch
import torch.distributed as dist
from cases import param_of
from modes import distrust, end_beginning, is_trusted, the_mode
from ranks import on_each_rank
from torch import nn

from inplace_abn import ABN, InPlaceABNSync, distributed, guard, set_guard


def layer(activation="elu", gamma=10.0):
    module = InPlaceABNSync(4, activation=activation, activation_param=param_of(activation, 1.0), signed_weight=True)
    nn.init.constant_(module.weight, gamma)
    return module


def advance():
    guard.generations.advance()


def start_over():
    """Sets the generation to zero on each rank. Ranks that took part in different tests have counted differently. Ranks
    of one training never do."""
    guard.generations.current, guard.generations.changed_at = 0, -1
    guard.generations._changed.clear()


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
    module, twin = (
        layer(activation, -0.7).double(),
        ABN(4, activation=activation, activation_param=param_of(activation, 1.0)).double(),
    )
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


def check_against_one_process(module, sizes, x, dz, residual, allowed):
    """Asserts that a step equals one of one process on the whole batch, in float64: this rank's z and dx, and the
    parameters' gradients over all ranks."""
    twin = ABN(4, activation=module.activation, activation_param=module.activation_param).double()
    for ours, theirs in ((module.weight, twin.weight), (module.bias, twin.bias)):
        theirs.data.copy_(ours.data)
    module.zero_grad()
    added = (None, None) if residual is None else (share(residual, sizes), residual.double())
    found = run(module, share(x, sizes), share(dz, sizes), added[0])
    expected = (share(t, sizes) for t in run(twin, x.double(), dz.double(), added[1]))
    parameters = ((module.weight, twin.weight), (module.bias, twin.bias))
    sums = [(distributed.all_reduce(ours.grad.double(), dist.group.WORLD), theirs.grad) for ours, theirs in parameters]
    for a, e in (*zip(found, expected, strict=True), *sums):
        assert (a.double() - e).norm() <= allowed * e.norm()


@on_each_rank(2, 3)
def test_what_one_rank_cannot_recover_only_that_rank_keeps_from_the_first_step_on():
    sizes = [2, 3, 2][: dist.get_world_size()]
    is_calm = dist.get_rank() > 0
    start_over()
    torch.manual_seed(0)
    module = set_guard(layer("relu", 1.0), interval=2)
    x, dz, residual = torch.randn(3, sum(sizes), 4, 16, 16).bfloat16()
    calm = 0.1 * residual.clamp(-1, 1)
    residual[: sizes[0]] *= 1000
    residual[sizes[0] :] *= 0.1
    check_against_one_process(module, sizes, x, dz, residual, 0.03)
    assert is_trusted(module) == is_calm
    end_beginning(module)
    advance()
    while guard.generations.current % 2:
        check_against_one_process(module, sizes, x, dz, calm, 0.03)
        advance()
    check_against_one_process(module, sizes, x, dz, calm, 0.03)
    assert is_trusted(module) == is_calm
    advance()
    check_against_one_process(module, sizes, x, dz, calm, 0.03)
    assert is_trusted(module)


@on_each_rank(2, 3)
def test_each_rank_saves_the_channels_that_it_cannot_recover():
    sizes, rank = [2, 3, 2][: dist.get_world_size()], dist.get_rank()
    start_over()
    torch.manual_seed(0)
    module = layer("relu", 1.0)
    nn.init.constant_(module.weight[2], 3e-5)
    nn.init.constant_(module.bias[2], 0.5)
    x, dz, residual = torch.randn(3, sum(sizes), 4, 16, 16)
    residual[: sizes[0], 1] *= 1e6
    for _ in range(3):
        check_against_one_process(module, sizes, x, dz, residual, 1e-4)
        assert is_trusted(module)
        assert the_mode(module).decisions[-1].verbatim.numbers == ((2,) if rank else (1, 2))
        advance()


@pytest.mark.parametrize("activation", ["silu", "mish"])
@on_each_rank(2)
def test_ranks_that_lie_far_apart_are_measured_by_the_statistics_of_all(activation):
    """By a rank's own statistics its values would be spread over the whole activation. They lie in its tail."""
    start_over()
    torch.manual_seed(0)
    module = layer(activation, 1.5)
    far = torch.tensor([-10.0, -10.0, 0.0, 0.0]).view(4, 1, 1, 1)
    x = (torch.randn(4, 4, 8, 8) + far).bfloat16()
    dz = (torch.randn(4, 4, 8, 8) + x - far).bfloat16()
    check_against_one_process(module, [2, 2], x, dz, None, 0.03)


@on_each_rank(2)
def test_an_empty_rank_decides_nothing():
    start_over()
    torch.manual_seed(0)
    module = layer("elu", 30.0)
    x, dz = torch.randn(2, 4, 4, 8, 8)
    check_against_one_process(module, [4, 0], x, dz, None, 1e-5)
    if dist.get_rank():
        assert module._guard is None
    else:
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
    for module in (layer("relu", 1.0), layer("elu", 10.0)):
        # Nothing can be measured, and to keep the input takes hardly any memory.
        given = x[:1, :, :1, :1].clone().requires_grad_() * 1
        assert module(given) is not given
        assert module._guard is None or the_mode(module).measured_at < 0
    module = layer("relu", 1.0)
    run(module, x[:1, :, :1, :1].clone(), dz[:1, :, :1, :1].clone())
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
