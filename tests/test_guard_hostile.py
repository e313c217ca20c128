"""The guard of recovery where inputs, calls and settings are unusual: it is never silent, and never changes more than
a mode."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from inplace_abn import ABN, InPlaceABN, guard, recovery, set_guard


def layer(activation="relu", gamma=1.0, beta=0.0, channels=8, **options):
    module = InPlaceABN(channels, activation=activation, activation_param=1.0, signed_weight=True, **options)
    nn.init.constant_(module.weight, gamma)
    nn.init.constant_(module.bias, beta)
    return module


def error_of_dx(module, x, residual=None):
    """Against float64, with a gradient that follows x."""
    exact = ABN(module.num_features, module.eps, activation=module.activation, activation_param=module.activation_param)
    exact.load_state_dict(module.state_dict())
    exact.double().train(module.training)
    dz = (torch.randn(x.shape) + 2 * x.float()).to(x.dtype)
    found = []
    for twin, dtype in ((module, x.dtype), (exact, torch.float64)):
        leaf = x.to(dtype).clone().requires_grad_()
        twin(leaf * 1, None if residual is None else residual.to(dtype)).backward(dz.to(dtype))
        found.append(leaf.grad.double())
    return ((found[0] - found[1]).norm() / found[1].norm()).item()


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
    assert not module._trusted


def test_finite_values_that_are_recovered_as_infinite_cost_trust():
    module, x = layer("elu", 1e-3), torch.randn(8, 8, 16, 16).half()
    residual = 30 * torch.randn_like(x)
    error = error_of_dx(module, x, residual)
    assert not module._trusted
    assert error < 0.01


@pytest.mark.parametrize("momentum", [0, 1, 0.3])
def test_a_layer_that_keeps_its_input_updates_statistics_as_one_that_does_not(momentum):
    x = torch.randn(8, 8, 16, 16) + 3
    kept, trusted = (layer(gamma=1.0, momentum=momentum, guard_interval=0) for _ in range(2))
    kept.__dict__["_trusted"] = False
    kept(x.clone()), trusted(x.clone())
    torch.testing.assert_close(kept.running_mean, trusted.running_mean)
    torch.testing.assert_close(kept.running_var, trusted.running_var)
