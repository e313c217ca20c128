"""The CPU kernels convert float16 in blocks. Every value must be that of torch's own conversion."""

import pytest
import torch
from torch import Tensor

from inplace_abn.activations import find
from inplace_abn.kernels import ops

IDENTITY = find("identity").code


def every_half() -> Tensor:
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)


def floats_around_every_rounding() -> Tensor:
    """Each half, the middle between it and the next one, and the floats on either side of that middle. These are
    enough, because rounding is monotone."""
    halves = every_half().float()
    finite = halves[halves.isfinite()].unique()
    beyond = torch.tensor([65536.0], dtype=torch.float32)
    middle = (finite + torch.cat([finite[1:], beyond])) / 2
    sides = [middle.nextafter(torch.full_like(middle, sign * torch.inf)) for sign in (-1, 1)]
    special = torch.tensor([torch.inf, torch.nan, 1e-45, 1e-40, 3.4e38, 0.0])
    values = torch.cat([finite, middle, *sides, special])
    return torch.cat([values, -values])


@pytest.fixture(params=[False, True], ids=["denormals", "flushed"])
def flushed(request):
    torch.set_flush_denormal(request.param)
    yield
    torch.set_flush_denormal(False)


def expect_equal(result: Tensor, expected: Tensor) -> None:
    assert torch.equal(result.isnan(), expected.isnan())
    assert torch.equal(result[~result.isnan()], expected[~expected.isnan()])


@pytest.mark.parametrize("rest", [0, 1, 37], ids=lambda rest: f"without the last {rest}")
def test_every_half_is_widened_to_its_value(rest, flushed):
    z = every_half()[: 2**16 - rest].view(1, -1)
    magnitude = (z.view(torch.int16).int() & 0x7FFF).double()
    exponent, mantissa = (magnitude / 1024).floor(), magnitude % 1024
    normal = (1024 + mantissa) * 2.0 ** (exponent - 25)
    expected = torch.where(exponent == 0, mantissa * 2.0**-24, normal).masked_fill(magnitude == 31 * 1024, torch.inf)
    expected = torch.where(z.view(torch.int16) < 0, -expected, expected).masked_fill(magnitude > 31 * 1024, torch.nan)
    expect_equal(ops.inverse(z, IDENTITY, 0.0).double(), expected)


@pytest.mark.parametrize("rest", [0, 1, 37], ids=lambda rest: f"without the last {rest}")
def test_every_float_is_narrowed_to_the_nearest_half(rest, flushed):
    bias = floats_around_every_rounding()
    bias = bias[: len(bias) - rest]
    expected = bias.to(torch.float16)
    z, zero = torch.zeros(1, len(bias), dtype=torch.float16), torch.zeros(len(bias))
    ops.forward(z, zero, zero + 0.5, None, bias, None, 0.5, False, IDENTITY, 0.0, True)
    expect_equal(z[0], expected)


@pytest.mark.parametrize("length", [2**16, 2**16 - 1, 2**16 - 37])
def test_halves_of_a_plane_stay_what_they_are(length, flushed):
    x = every_half()[:length].view(1, 1, length)
    z, zero = x.clone(), torch.zeros(1)
    ops.forward(z, zero, zero + 0.5, None, None, None, 0.5, False, IDENTITY, 0.0, True)
    expect_equal(z, x)
