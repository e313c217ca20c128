"""A result of a direct module that somebody writes to: the message names the layer, and the next step works."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from inplace_abn import InPlaceABN, InPlaceGroupNorm, InPlaceInstanceNorm, set_guard

KINDS = {
    "batch": lambda: InPlaceABN(4, activation="silu", signed_weight=True),
    "batch, without activation": lambda: InPlaceABN(4, activation="identity"),
    "instance": lambda: InPlaceInstanceNorm(4, affine=True, activation="silu"),
    "group": lambda: InPlaceGroupNorm(2, 4, activation="silu"),
}


class Net(nn.Module):
    """Linknet of segmentation_models_pytorch adds to what an activation has read, too."""

    def __init__(self, norm):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), norm

    def forward(self, x):
        z = self.norm(self.conv(x))
        z += 1
        return F.relu(z).square().sum()


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_the_error_names_the_layer_and_the_next_step_works(kind, named):
    """The message said "an in-place ABN" or "1", and every later step failed as well."""
    net = Net(KINDS[kind]()).double()
    x = torch.randn(2, 3, 6, 7, dtype=torch.float64)
    if named:
        set_guard(net)
    name = "norm" if named else rf"{type(net.norm).__name__}\(4\)"
    with pytest.raises(RuntimeError, match=f"the output of {name} has been modified in place"):
        net(x).backward()
    net.zero_grad()
    net(x).backward()
    found = net.conv.weight.grad.clone()
    eps = 1e-6
    numeric = torch.zeros(3, dtype=torch.float64)
    with torch.no_grad():
        for i in range(3):
            for sign in (1, -1):
                net.conv.weight.view(-1)[i] += sign * eps
                numeric[i] += sign * net(x) / (2 * eps)
                net.conv.weight.view(-1)[i] -= sign * eps
    torch.testing.assert_close(found.view(-1)[:3], numeric, rtol=1e-5, atol=1e-6)
