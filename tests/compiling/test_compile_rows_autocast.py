"""Compiled layer norms, RMS norms and group norms under autocast."""

import copy

import pytest
import torch
from cases import covering, needs_compiler
from compiled_converted_nets import held
from compiled_nets import step
from compiled_rows_nets import batch, made
from torch import nn

from inplace_abn import convert

pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.filterwarnings("ignore:.*torch.jit"),
]


def compiled(module, backend="aot_eager"):
    return torch.compile(module, backend=backend, fullgraph=True)


def narrowed(function, dtype):
    def narrow(x):
        with torch.autocast("cpu", dtype):
            return function(x)

    return narrow


@covering(
    2, name=["layer norm, gelu", "Llama's norm, hardswish", "group norm, silu"], dtype=[torch.bfloat16, torch.float16]
)
def test_under_autocast_no_more_is_held_than_natively(name, dtype):
    """The norm's output in float32 was kept beside the copy of 16 bits that the linear layer keeps."""
    native, x = made(name).float(), batch().float()
    module = convert(copy.deepcopy(native))
    found = []
    for net in (native, module):
        narrow = narrowed(compiled(net), dtype)
        gradients = [t.double() for t in step(narrow, net, x)]
        found.append((gradients, held(narrow, x)))
    exact = [t.double() for t in step(native.double(), native, x.double())]
    for ours, torchs, t in zip(found[1][0], found[0][0], exact, strict=True):
        assert (ours - t).norm() <= 4 * (torchs - t).norm() + 1e-3 * t.norm()
    assert found[1][1] <= found[0][1]


class Unread(nn.Module):
    """A layer norm whose output nothing keeps, and perhaps a sum of it and another linear layer."""

    def __init__(self, adds):
        super().__init__()
        self.first, self.norm, self.other = nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64)
        nn.init.normal_(self.norm.weight, 1.0, 0.3)
        self.adds = adds

    def forward(self, x):
        y = self.norm(self.first(x))
        return torch.tanh(y + self.other(x) if self.adds else y)


@needs_compiler
@pytest.mark.parametrize("adds", [False, True])
def test_a_layer_norm_whose_output_nothing_keeps_is_as_exact_as_torchs(adds):
    """dbias and dweight were of 16 bits, and beside those of a linear layer inductor compiled nothing."""
    torch.manual_seed(0)
    native, x = Unread(adds), torch.randn(16, 64, 64)
    module, wide, errors = convert(copy.deepcopy(native)), copy.deepcopy(native).double(), []
    exact = [t for t in step(wide, wide, x.double()) if t is not None]
    for net in (module, native):
        found = step(narrowed(compiled(net, "inductor"), torch.bfloat16), net, x)
        found = [t.double() for t in found if t is not None]
        errors.append([(t - e).norm() / e.norm() for t, e in zip(found, exact, strict=True)])
    for ours, torchs in zip(*errors, strict=True):
        assert ours <= 1.2 * torchs + 1e-4
