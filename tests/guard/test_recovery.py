"""The errors that gradients really have in place, against those that the guard measures."""

import copy

import fidelity
import pytest
import torch
from cases import covering, rows_covering
from fidelity import Layer
from torch import nn

from inplace_abn import convert

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Errors below this number of unit roundoffs are not compared. They are those of float32 sums, of subnormal gradients,
# and of the few values next to a minimum. All of them are far too small to cost trust.
FLOORS = {torch.float32: 16, torch.bfloat16: 2, torch.float16: 6}


def assert_within_two(actual, torchs, figure, dtype, where):
    """Asserts that ``figure`` and the actual error are within a factor of two. Errors count as at least a few
    roundings, as at least torch's error, and as at most 1."""
    unit = torch.finfo(dtype).eps / 2
    for name in ("x", "weight"):
        floor = max(FLOORS[dtype] * unit, getattr(torchs, name))
        real, said = (min(max(getattr(pair, name), floor), 1.0) for pair in (actual, figure))
        told = (where, name, real / unit, said / unit, getattr(torchs, name) / unit)
        assert real / 2 <= said <= 2 * real, told


@pytest.mark.parametrize("label", DTYPES)
@pytest.mark.parametrize("activation", fidelity.ACTIVATIONS)
def test_the_measured_error_is_within_two_of_the_worst_that_a_gradient_causes(activation, label):
    dtype = DTYPES[label]
    x, state = fidelity.inputs(dtype), torch.get_rng_state()
    for gamma, ratio in rows_covering(2, (1e-4, 1e-2, 1.0, 3.0, 10.0, 100.0), (0.0, -2.0, 2.0, -20.0, 20.0)):
        torch.set_rng_state(state)
        layer = Layer(x, gamma, ratio * gamma, activation)
        ours, torchs = fidelity.errors(layer)
        assert_within_two(ours.worst(), torchs.worst(), fidelity.measured(layer), dtype, (gamma, ratio))


@covering(2, activation=fidelity.ACTIVATIONS, label=DTYPES, tails=["normal", "heavy"])
def test_the_measured_error_is_within_two_of_the_worst_with_residuals_and_outliers(activation, label, tails):
    dtype = DTYPES[label]
    x, state = fidelity.inputs(dtype, tails), torch.get_rng_state()
    for gamma, size in rows_covering(2, (1e-2, 0.1, 1.0, 5.0), (0.0, 0.3, 3.0)):
        torch.set_rng_state(state)
        residual = (size * torch.randn(x.shape)).to(dtype) if size else None
        layer = Layer(x, gamma, gamma / 2, activation, residual)
        ours, torchs = fidelity.errors(layer)
        assert_within_two(ours.worst(), torchs.worst(), fidelity.measured(layer), dtype, (gamma, size))


@pytest.mark.parametrize("label", DTYPES)
@pytest.mark.parametrize("activation", fidelity.ACTIVATIONS)
def test_a_sample_of_a_batch_says_what_the_whole_batch_says(activation, label):
    dtype = DTYPES[label]
    parts = [fidelity.inputs(dtype) for _ in range(6)]
    for gamma in (0.1, 1.0, 5.0):
        whole = Layer(torch.cat(parts), gamma, gamma / 2, activation)
        said = fidelity.measured(whole)
        each = [fidelity.measured(whole._replace(x=part)) for part in parts]
        for name in ("x", "weight"):
            average = sum(getattr(pair, name) ** 2 for pair in each) / len(each)
            floor = FLOORS[dtype] * torch.finfo(dtype).eps / 2
            one, all_of_them = (max(value, floor) for value in (getattr(said, name), average**0.5))
            assert all_of_them / 2 <= one <= 2 * all_of_them, (gamma, name, said, each)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("activation", [nn.Identity, nn.ReLU, nn.SiLU, nn.GELU])
@pytest.mark.parametrize("scale", ["running variance", "eps"])
def test_a_weight_has_its_gradient_where_xhat_is_small(scale, activation, dtype):
    """xhat is small in a frozen norm whose running variance is far above the batch's, and where eps is the variance."""
    torch.manual_seed(0)
    conv, norm, following = nn.Conv2d(3, 8, 1, bias=False), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 1)
    nn.init.constant_(norm.bias, 2.0)
    with torch.no_grad():
        if scale == "eps":
            conv.weight[4:] *= torch.tensor([1e-2, 1e-3, 3e-4, 1e-4]).view(4, 1, 1, 1)
        else:
            norm.running_var[4:] = 1e4
    native = nn.Sequential(conv, norm, activation(), following).to(dtype).train(scale == "eps")
    ours, exact = convert(copy.deepcopy(native)), copy.deepcopy(native).double()
    x, noise = torch.randn(2, 8, 8, 12, 12)

    def dweight(net):
        y = net[1](net[0](x[:, :3].to(net[0].weight.dtype)))
        z = net[3](net[2](y))
        found = torch.autograd.grad(z, [net[1].weight, *[y] * (net is exact)], 0.3 * noise.to(z.dtype) + z.detach())
        return y.detach(), *(t.double() for t in found)

    (y, expected, dy), (_, found), (_, torchs) = map(dweight, (exact, ours, native))
    sizes = [torch.linalg.vector_norm(t, dim=(0, 2, 3)) for t in (y - 2, dy)]
    allowed = {torch.bfloat16: 2.0**-4, torch.float32: 2.0**-10}[dtype] * sizes[0] * sizes[1]
    assert ((found - expected).abs() <= allowed.maximum(3 * (torchs - expected).abs())).all()
