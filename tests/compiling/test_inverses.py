"""Activations in compiled code are those of the kernels: z, its tag, and the y that comes back."""

from pathlib import Path

import pytest
import torch

from inplace_abn.activations import ACTIVATIONS as FOUND
from inplace_abn.activations import TYPICAL, activation_backward, find, is_relu
from inplace_abn.compiling import inverses
from inplace_abn.kernels import ops

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
ACTIVATIONS = [*TYPICAL, ("leaky_relu", 0.0), *((name, 0.2) for name, entry in FOUND.items() if entry.param)]


def values(dtype):
    return torch.cat([torch.linspace(-9, 9, 4001, dtype=torch.float64), torch.tensor([0.0, -1.5, 3.0, -3.0])]).to(dtype)


def of_kernels(y, activation, param):
    """z computed by the op. The op takes ``y`` for values that are normalised already."""
    z = y.view(1, 1, -1).clone()
    wide = torch.promote_types(y.dtype, torch.float32)
    mean, var = torch.zeros(1, dtype=wide), torch.ones(1, dtype=wide)
    ops.run(ops.forward, [z], z, mean, var, None, None, None, 1e-30, True, find(activation).code, param, True)
    return z.view(-1)


def recovered_by_kernels(z, activation, param):
    y, dy = z.view(1, 1, -1).clone(), torch.ones_like(z).view(1, 1, -1)
    ops.run(ops.backward_reduce, [y, dy], y, dy, None, None, None, 1e-30, True, find(activation).code, param)
    return y.view(-1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("activation", "param"), ACTIVATIONS)
def test_z_is_that_of_the_kernels(activation, param, dtype):
    y = values(dtype)
    wide = y.to(torch.promote_types(dtype, torch.float32))
    actual, expected = inverses.tagged(wide, activation, param, dtype), of_kernels(y, activation, param)
    # expm1 and exp differ by roundings, and so do their arguments.
    spread = wide.abs() * activation_backward(wide.double(), torch.ones_like(wide).double(), activation, param).abs()
    # A relu's zero is the least trace.
    least = (2.0**-24 if dtype == torch.float16 else torch.finfo(dtype).tiny) * is_relu(activation, param)
    assert ((actual - expected).abs() <= 4 * torch.finfo(dtype).eps * (expected.abs() + spread) + least).all()
    assert torch.equal(actual.signbit(), expected.signbit())


def test_gelus_polynomials_are_those_of_the_kernels():
    header = (Path(__file__).parents[2] / "include" / "inplace_abn" / "fits.h").read_text()
    tail = header[header.index("struct NormalTail") :]
    for name, coefficients in zip("pq", inverses.NORMAL_TAIL, strict=True):
        written = tail[tail.index(f"{name}[] = {{") :].split("{")[1].split("}")[0]
        assert [float(c) for c in written.split(",")] == [*coefficients[::-1]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("activation", "param"), ACTIVATIONS)
def test_y_comes_back_as_from_the_kernels(activation, param, dtype):
    y = values(dtype)
    z = of_kernels(y, activation, param)
    expected = recovered_by_kernels(z, activation, param)
    least = 1e-30
    if is_relu(activation, param):
        # Compiled code has its own zeros: they are never those of the least numbers.
        z = inverses.tagged(y.to(torch.promote_types(dtype, torch.float32)), activation, param, dtype)
        least = 2.0**-9 if dtype == torch.float16 else 1e-20
    actual = inverses.untagged(z.view(1, 1, -1), activation, param).view(-1).to(dtype)
    torch.testing.assert_close(actual, expected, rtol=2 * torch.finfo(dtype).eps, atol=least)


def kinds(t):
    return t.isnan() + 2 * t.isposinf() + 3 * t.isneginf()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("activation", "param"), ACTIVATIONS)
def test_infinities_and_nan_are_those_of_the_kernels(activation, param, dtype):
    """hardswish and gelu of -inf were finite, and relu's y came back as zero."""
    y = torch.tensor([-torch.inf, torch.inf, torch.nan, 0.0, -0.0, 1e-8, -1e-8], dtype=dtype)
    z = inverses.tagged(y.to(torch.promote_types(dtype, torch.float32)), activation, param, dtype)
    expected = of_kernels(y, activation, param)
    assert torch.equal(kinds(z), kinds(expected))
    # What is recovered has the values of which the result is made.
    recovered = inverses.untagged(z.view(1, 1, -1), activation, param).view(-1)
    by_kernels = recovered_by_kernels(expected, activation, param)
    assert torch.equal(kinds(recovered), kinds(by_kernels))
    if z.isnan().sum() == 1:
        assert torch.equal(kinds(recovered), kinds(y))
