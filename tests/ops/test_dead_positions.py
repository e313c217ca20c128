"""Where an activation is flat, its gradient is exactly zero, whatever the incoming gradient is."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from inplace_abn import InPlaceABN, inplace_abn, inplace_abn_sync
from inplace_abn.activations import activation_backward, find
from inplace_abn.kernels import ops

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
FLAT = {"relu": -1.0, "leaky_relu": -1.0, "hardswish": -4.0}
"""Activations that are flat somewhere, and a y where they are flat."""


def stats_of(dtype):
    return torch.promote_types(dtype, torch.float32)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FLAT)
def test_dy_is_exactly_zero_also_for_infinity_and_nan(name, dtype, layout, device):
    y = torch.full((2, 8, 5, 5), FLAT[name], dtype=dtype, device=device)
    y[:, ::2] = 4.0
    dead = y < 0
    dz = torch.randn(y.shape, device=device).to(dtype)
    dz[0][dead[0]] = math.inf
    dz[1][dead[1]] = math.nan
    if layout == "channels_last":
        y, dz = (t.contiguous(memory_format=torch.channels_last) for t in (y, dz))
    zero = torch.zeros(8, dtype=stats_of(dtype), device=device)
    arithmetic = (0.5, False, find(name).code, 0.0)
    ops.forward(y, zero, zero + 0.5, None, None, None, *arithmetic, True)
    xhat, dy = y.clone(), dz.clone()
    sum_dy, sum_xhat_dy = ops.backward_reduce(xhat, dy, None, None, None, *arithmetic)
    assert not dy[dead].any()
    torch.testing.assert_close(dy[~dead], dz[~dead])
    assert sum_dy.isfinite().all()
    assert sum_xhat_dy.isfinite().all()
    assert not sum_dy[1::2].any()
    dx, dweight, dbias = torch.empty_like(y), zero.clone(), zero.clone()
    weight = torch.ones_like(zero)
    ops.local_backward(y, dz, zero + 0.5, weight, zero, None, *arithmetic, True, dx=dx, dweight=dweight, dbias=dbias)
    assert all(t.isfinite().all() for t in (dx, dweight, dbias))


@pytest.mark.parametrize("name", FLAT)
def test_reference_has_the_same_zeros(name, device):
    y = torch.tensor([FLAT[name], 4.0], dtype=torch.float64, device=device)
    dz = torch.tensor([math.nan, 3.0], dtype=torch.float64, device=device)
    assert torch.equal(activation_backward(y, dz, name, 0.0), dz.new_tensor([0.0, 3.0]))


def test_a_dead_channel_in_float16_stays_where_it_is(device):
    """dy must be exactly zero. A dy of 2^-15 dz would let Adam move the bias from -20 to -30 in 100 steps."""
    bn = InPlaceABN(1, activation="relu", momentum=0.0).to(device)
    with torch.no_grad():
        bn.bias.fill_(-20.0)
    optimiser = torch.optim.Adam(bn.parameters(), lr=0.1)
    for _ in range(100):
        optimiser.zero_grad()
        x = torch.randn(8, 1, 6, device=device, dtype=torch.float16)
        (bn(x) * 1e3).sum().backward()
        assert not bn.bias.grad.any()
        optimiser.step()
    assert bn.bias.item() == -20.0


@pytest.mark.parametrize("masked", ["input", "residual"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_relu_of_minus_infinity_is_zero_to_its_reader(dtype, masked, device):
    x, residual = (torch.randn(4, 3, 5, device=device).to(dtype) for _ in range(2))
    (x if masked == "input" else residual)[1, 2, :3] = -math.inf
    weight = torch.ones(3, device=device, dtype=stats_of(dtype), requires_grad=True)
    zero, one = torch.zeros_like(weight).detach(), torch.ones_like(weight).detach()
    source = x.clone().requires_grad_()
    z = inplace_abn(
        source * 1, weight, None, zero, one, False, activation="relu", residual=residual, signed_weight=True
    )
    assert (z[1, 2, :3].abs() <= (1e-7 if dtype == torch.float16 else torch.finfo(dtype).tiny)).all()
    expected = F.relu((x / math.sqrt(1 + 1e-5) + residual).double())
    allowed = 4 * torch.finfo(dtype).eps * expected.max()
    assert ((z.double() - expected).abs() <= allowed)[expected > 0].all()
    if masked == "input":
        z.sum().backward()
        # The gradient of the weight is zero times -inf there, as in torch.
        assert weight.grad.isnan().tolist() == [False, False, True]
        assert source.grad.isfinite().all()
        assert not source.grad[1, 2, :3].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_relu_of_the_least_number_is_finite(dtype, device):
    y = torch.full((2, 1, 2), -torch.finfo(dtype).max, dtype=dtype, device=device)
    zero = torch.zeros(1, device=device, dtype=stats_of(dtype))
    ops.forward(y, zero, zero + 0.5, None, None, None, 0.5, False, find("relu").code, 0.0, True)
    assert y.isfinite().all()


@pytest.mark.parametrize("function", [inplace_abn, inplace_abn_sync])
@pytest.mark.parametrize("shape", [(0, 3, 4, 4), (2, 3, 0, 4), (0, 3)], ids=str)
@pytest.mark.filterwarnings("ignore:.*not initialised")
def test_an_empty_batch_is_accepted_as_torchs_batch_norm_accepts_it(shape, function, device):
    leaves = [torch.randn(shape, device=device, requires_grad=True) for _ in range(2)]
    affine = [[torch.ones(3, device=device, requires_grad=True) for _ in range(2)] for _ in range(2)]
    running = [[torch.full((3,), 0.3, device=device) for _ in range(2)] for _ in range(2)]
    z = function(leaves[0] * 1, *affine[0], *running[0])
    expected = F.leaky_relu(F.batch_norm(leaves[1] * 1, *running[1], *affine[1], True), 0.01)
    z.sum().backward()
    expected.sum().backward()
    for ours, theirs in zip(
        [z, leaves[0].grad, *(t.grad for t in affine[0]), *running[0]],
        [expected, leaves[1].grad, *(t.grad for t in affine[1]), *running[1]],
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


def test_modules_count_an_empty_batch_as_torchs_do():
    ours, theirs = InPlaceABN(3), nn.BatchNorm2d(3)
    for module in (ours, theirs):
        module(torch.empty(0, 3, 4, 4))
    for name, buffer in theirs.named_buffers():
        torch.testing.assert_close(getattr(ours, name), buffer)
