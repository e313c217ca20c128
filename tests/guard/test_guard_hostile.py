"""The guard of recovery where inputs, calls and settings are unusual. It is never silent, and it changes no more than a
mode."""

import pytest
import torch
from modes import distrust, end_beginning, error_of_dx, is_trusted, layer, start_over, the_mode
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from inplace_abn import InPlaceABN, guard, set_guard
from inplace_abn.guard import figures, recovery


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_layer_under_checkpoints_is_measured_in_every_interval(reentrant):
    start_over()
    module = set_guard(layer("elu"), interval=2)
    modes = []
    for i in range(4):
        # Where these have outliers, an elu saturates.
        leaf = (torch.randn(8, 8, 32, 32) ** (1 if i == 0 else 7)).requires_grad_()
        checkpoint(lambda t: module(t * 1), leaf, use_reentrant=reentrant).sum().backward()
        modes.append(is_trusted(module))
        end_beginning(module)
        guard.generations.advance()
    assert modes == [True, True, True, False]


def test_a_layer_that_is_called_several_times_a_step_is_trusted_only_if_all_calls_can_be():
    start_over()
    module = set_guard(layer(gamma=0.1), interval=5)
    for i in range(8):
        x = torch.randn(8, 8, 16, 16).bfloat16()
        module(x.clone().requires_grad_() * 1)
        error = error_of_dx(module, x, 30 * torch.randn_like(x))
        assert is_trusted(module) == (i == 0)
        assert error < 0.01 or i == 0
        guard.generations.advance()


def test_a_layer_that_is_called_in_two_dtypes_is_judged_by_both():
    module = set_guard(layer(gamma=0.5, beta=10.0), interval=100)
    assert error_of_dx(module, torch.randn(8, 8, 16, 16)) < 1e-4
    error_of_dx(module, torch.randn(8, 8, 16, 16).bfloat16())
    guard.generations.advance()
    assert error_of_dx(module, torch.randn(8, 8, 16, 16).bfloat16()) < 0.01
    assert not is_trusted(module)


def test_a_generation_that_never_ends_is_measured_a_few_times():
    module = layer()
    for _ in range(3 * guard.CALLS):
        module(torch.randn(8, 8, 4, 4).requires_grad_() * 1)
    assert the_mode(module).calls == guard.CALLS
    assert len(the_mode(module).collected()) < guard.CALLS


def test_the_sample_is_of_all_images_and_of_all_places():
    batch, size = 16, 56 * 56
    which = torch.arange(batch).view(-1, 1, 1, 1).expand(batch, 64, 56, 56)
    assert recovery.sample(which).unique().tolist() == list(range(batch))
    rows, columns = (torch.arange(56.0).view(shape).expand(batch, 64, 56, 56) for shape in ((-1, 1), (1, -1)))
    assert len(recovery.sample(rows).unique()) == len(recovery.sample(columns).unique()) == 56
    assert recovery.sample(which).shape[2] <= 2 * (1 << 17) // 64 < batch * size


def test_an_image_unlike_the_first_one_is_seen():
    module = layer(gamma=0.1, channels=64)
    x = torch.randn(4, 64, 56, 56).bfloat16()
    residual = 30 * torch.randn_like(x)
    residual[0] *= 1e-3
    assert error_of_dx(module, x, residual) < 0.02
    assert not is_trusted(module)


@pytest.mark.parametrize("values", [1, 2])
def test_frozen_statistics_are_measured_on_a_single_value_per_channel(values):
    module = layer(gamma=0.0, beta=1.0).eval()
    leaf = torch.randn(values, 8).requires_grad_()
    module(leaf * 1).backward(torch.ones(values, 8))
    assert leaf.grad.abs().max() == 0
    assert not is_trusted(module)


def test_a_first_batch_of_nan_is_followed_by_a_measurement():
    module, x = layer("elu", 10.0), torch.randn(8, 8, 16, 16)
    module(torch.full_like(x, torch.nan).requires_grad_() * 1)
    assert error_of_dx(module, x) < 1e-5
    assert not is_trusted(module)


def test_finite_values_that_are_recovered_as_infinite_cost_trust():
    module, x = layer("elu", 1e-3), torch.randn(8, 8, 16, 16).half()
    residual = 30 * torch.randn_like(x)
    error = error_of_dx(module, x, residual)
    assert not is_trusted(module)
    assert error < 0.01


def test_what_raises_raises_again_and_changes_nothing():
    module = set_guard(layer("elu", 10.0), on_untrusted="raise")
    x = torch.randn(8, 8, 16, 16)
    for _ in range(2):
        given = x.clone().requires_grad_() * 1
        with pytest.raises(RuntimeError, match="its input is not recoverable from its output"):
            module(given)
        assert torch.equal(given, x)
        assert module.num_batches_tracked == 0
        assert module.running_mean.abs().max() == 0
        guard.generations.advance()


@pytest.mark.parametrize("momentum", [0, 1, 0.3])
def test_a_layer_that_keeps_its_input_updates_statistics_as_one_that_does_not(momentum):
    x = torch.randn(8, 8, 16, 16) + 3
    kept, trusted = (layer(gamma=1.0, momentum=momentum, guard_interval=0) for _ in range(2))
    distrust(kept, x.dtype)
    kept(x.clone()), trusted(x.clone())
    torch.testing.assert_close(kept.running_mean, trusted.running_mean)
    torch.testing.assert_close(kept.running_var, trusted.running_var)


@pytest.mark.parametrize(("dtype", "gamma"), [(torch.float32, 7.0), (torch.bfloat16, 20.0)])
def test_a_channel_of_large_variance_counts_as_a_gradient_that_follows_x_makes_it_count(dtype, gamma):
    module = layer("elu")
    nn.init.constant_(module.weight[0], gamma)
    x = torch.randn(8, 8, 16, 16)
    x[:, 0] *= 1000
    assert error_of_dx(module, (10 * x).to(dtype)) < figures.THRESHOLDS[dtype].x
    assert is_trusted(module)
    assert the_mode(module).decisions[-1].verbatim.numbers == (0,)


@pytest.mark.parametrize("wide", ["weight", "bias"])
def test_a_layer_that_keeps_its_input_takes_the_dtypes_that_one_in_place_takes(wide):
    x, results = torch.randn(8, 8, 4, 4).bfloat16(), []
    for trusted in (True, False):
        module = layer(gamma=0.7, track_running_stats=False, guard_interval=0).bfloat16()
        setattr(module, wide, nn.Parameter(getattr(module, wide).detach().float()))
        if not trusted:
            distrust(module, x.dtype)
        z = module(x.clone().requires_grad_() * 1)
        z.sum().backward()
        results.append([z, module.weight.grad, module.bias.grad])
    for kept, in_place in zip(*results, strict=True):
        torch.testing.assert_close(kept, in_place, rtol=0.02, atol=0.02 * in_place.abs().max().item())


def save_all_results(context, op, *args, **kwargs):
    return CheckpointPolicy.PREFER_RECOMPUTE if op._schema.is_mutable else CheckpointPolicy.MUST_SAVE


def test_a_first_call_that_is_checkpointed_selectively_has_its_usual_gradients():
    x, results = torch.randn(5, 8, 6, 7).double(), []
    for module in (layer().double(), layer(guard_interval=0).double()):
        leaf = x.clone().requires_grad_()
        z = checkpoint(
            lambda t, module=module: module(t * 1),
            leaf,
            use_reentrant=False,
            context_fn=lambda: create_selective_checkpoint_contexts(save_all_results),
        )
        z.square().sum().backward()
        results.append(leaf.grad)
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("trusted", [True, False])
def test_what_in_place_refuses_is_refused_while_the_layer_keeps_its_input(trusted):
    module = InPlaceABN(3, activation="relu", signed_weight=True)
    if not trusted:
        torch.nn.init.zeros_(module.weight)
    x = torch.randn(4, 3, 5, requires_grad=True)
    module(x * 1)
    assert is_trusted(module) == trusted
    with pytest.raises(ValueError, match="leaf"):
        module(x)
    with pytest.raises(RuntimeError, match="Sigmoid"):
        module(torch.sigmoid(x))
    with pytest.raises(ValueError, match="residual"):
        module(x * 1, torch.randn(1, 3, 1))
