"""The CPU kernels for channels-last memory, which reduce rows in chunks, and each chunk in blocks."""

import pytest
import torch
from cases import TOLERANCE, laid_out, parameters, relative_error

from inplace_abn import reference
from inplace_abn.activations import find
from inplace_abn.kernels import ops

EPS = 1e-5


@pytest.mark.parametrize("layout", ["channels_last", "channels_last slice"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(3, 260, 37, 23), (2, 192, 91, 97)], ids=str)
def test_rows_of_many_chunks_and_blocks_lose_no_element_and_no_digits(shape, dtype, layout):
    """The last chunk, the last block of each chunk, and the last of the rows that are reduced together are cut
    short."""
    x = laid_out((100 + torch.randn(shape)).to(dtype), layout)
    expected = x.double().transpose(0, 1).flatten(1)
    mean, var = ops.statistics(x)
    assert relative_error(mean, expected.mean(1)) < 1e-6
    assert relative_error(var, expected.var(1, unbiased=False)) < 1e-6

    weight, bias, *_ = parameters(shape[1], torch.float32)
    z, tail = laid_out(x, layout), (EPS, False, find("leaky_relu").code, 0.5)
    ops.forward(z, mean, var, weight, bias, None, *tail, True)
    y = torch.where(z.signbit(), 2 * z.double(), z.double())
    xhat = (y - reference.per_channel(bias.double(), x)) / reference.per_channel(weight.double().abs() + EPS, x)
    dz = laid_out((2 + torch.randn(shape)).to(dtype), layout)
    dy = torch.where(z.signbit(), dz.double() / 2, dz.double())
    dweight, dbias = torch.empty_like(weight), torch.empty_like(bias)
    ops.local_backward(z, dz, var, weight, bias, None, *tail, True, dx=dz, dweight=dweight, dbias=dbias)
    dxhat = reference.channel_sum(xhat * dy)
    assert relative_error(dbias, reference.channel_sum(dy)) < 1e-6
    assert (dweight * weight.sign() - dxhat).norm() < 1e-6 * reference.channel_sum((xhat * dy).abs()).norm()
    count = x.numel() / shape[1]
    scale = reference.per_channel((weight.double().abs() + EPS) * torch.rsqrt(var.double() + EPS), x)
    mean_dy, mean_dxhat = (reference.per_channel(s / count, x) for s in (reference.channel_sum(dy), dxhat))
    assert relative_error(dz, scale * (dy - mean_dy - xhat * mean_dxhat)) < TOLERANCE[dtype]
