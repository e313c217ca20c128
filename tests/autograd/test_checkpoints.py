"""Checkpoints of the public package."""

import pytest
import torch
import torch.nn.functional as F
from convertible_nets import images
from foreign_nets import conv
from torch import nn

from inplace_abn import InPlaceABN, convert, load_public_state_dict, revert
from inplace_abn.conversion.norms import InPlaceNorm


def public_checkpoint(channels=4):
    """A checkpoint as the public package saves it, without batch counters."""
    return {
        "0.weight": torch.randn(channels, 3, 3, 3),
        "1.weight": torch.tensor([-1.0, 0.5, 2.0, -1e-7]),
        "1.bias": torch.randn(channels),
        "1.running_mean": torch.randn(channels),
        "1.running_var": torch.rand(channels) + 0.5,
    }


@pytest.mark.parametrize("kind", ["converted", "reverted", "in place", "in place, reverted"])
def test_checkpoints_of_the_public_package_load(kind):
    state = public_checkpoint()
    x = images(8)
    y = F.batch_norm(
        F.conv2d(x, state["0.weight"], padding=1),
        state["1.running_mean"],
        state["1.running_var"],
        state["1.weight"].abs() + 1e-5,
        state["1.bias"],
    )
    if kind in ("converted", "reverted"):
        model = nn.Sequential(conv(3, 4), nn.BatchNorm2d(4), nn.LeakyReLU(0.01), nn.MaxPool2d(1))
        convert(model)
        assert isinstance(model[1], InPlaceNorm)
    else:
        model = nn.Sequential(conv(3, 4), InPlaceABN(4), nn.Identity())
    if kind.endswith("reverted"):
        model = revert(model)
    kept = {key: value.clone() for key, value in state.items()}
    result = load_public_state_dict(model, state)
    assert not result.missing_keys
    assert not result.unexpected_keys
    assert all(torch.equal(value, kept[key]) for key, value in state.items())
    with torch.no_grad():
        assert torch.allclose(model.eval()(x), F.leaky_relu(y, 0.01), atol=1e-5)


def test_a_public_checkpoint_may_have_standard_layers_too():
    model = nn.Sequential(conv(3, 4), nn.BatchNorm2d(4))
    load_public_state_dict(model, public_checkpoint(), layers=[])
    assert model[1].weight[0] == -1
    with pytest.raises(ValueError, match=r"expected layers to name norms, got \['0'\]"):
        load_public_state_dict(model, public_checkpoint(), layers=["0"])
    with pytest.raises(RuntimeError, match="Unexpected key"):
        load_public_state_dict(model, public_checkpoint() | {"more": torch.zeros(1)})
    assert load_public_state_dict(model, public_checkpoint() | {"more": torch.zeros(1)}, strict=False).unexpected_keys


def test_a_checkpoint_of_one_module_loads_into_that_module_reverted():
    """A model that is one norm had its keys not found."""
    module = InPlaceABN(4)
    state = module.state_dict()
    state["weight"] = torch.tensor([-1.0, 0.5, 2.0, 1.0])
    reverted = revert(module)
    result = load_public_state_dict(reverted, state)
    assert not result.missing_keys
    assert not result.unexpected_keys
    assert torch.equal(reverted.norm.weight, state["weight"].abs() + module.eps)
