"""The op for the gradients of norms of rows, against torch's layer norm and RMS norm in float64."""

import pytest
import torch
import torch.nn.functional as F
from cases import DTYPES, TOLERANCE, relative_error, stats_dtype

from inplace_abn.kernels import ops

EPS = 1e-5
# Fewer columns than a vector holds, no multiple of one, more than are converted at a time, and one row. Rows that 8
# threads, a warp or a block keep, and longer ones.
SHAPES = [(7, 3), (5, 96), (4, 300), (33, 130), (1, 1025), (2, 1), (9, 640), (3, 1096), (2, 4104)]


def call(shape, dtype, device, affine, centred):
    """What the op is given, dx of torch in float64, and xhat in float64."""
    torch.manual_seed(0)
    x = (torch.randn(shape, device=device, dtype=torch.float64) * 1.7 + 0.4).requires_grad_()
    weight, bias = (torch.rand(shape[1], device=device).double() + k for k in (0.5, -0.5)) if affine else (None, None)
    mean = x.mean(1, keepdim=True) if centred else torch.zeros_like(x[:, :1])
    rstd = torch.rsqrt((x - mean).square().mean(1, keepdim=True) + EPS)
    xhat = ((x - mean) * rstd).detach()
    y = F.layer_norm(x, shape[1:], weight, bias, EPS) if centred else F.rms_norm(x, shape[1:], weight, EPS)
    y = y if centred or bias is None else y + bias
    dy = torch.randn_like(y) + 2 * xhat
    (dx,) = torch.autograd.grad(y, x, dy)
    wide = stats_dtype(dtype)
    given = [y.detach().to(dtype), dy.to(dtype), rstd.detach().flatten().to(wide)]
    return [*given, *(None if t is None else t.to(wide) for t in (weight, bias))], dx, xhat


@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_dx_is_torchs_from_the_output_and_from_xhat(shape, dtype, affine, centred, device):
    (y, dy, rstd, weight, bias), expected, xhat = call(shape, dtype, device, affine, centred)
    scale = 1 + float(expected.norm())
    for t, is_xhat in ((y, False), (xhat.to(dtype), True)):
        dx = torch.empty_like(dy)
        ops.rows_backward(t, dy, rstd, weight, bias, EPS, centred, is_xhat, dx=dx)
        assert (dx.double() - expected).norm() <= 10 * TOLERANCE[dtype] * scale
        for written in (t.clone(), dy.clone()):
            # dx may take the memory of an input.
            given = [written, dy] if written is not dy and torch.equal(written, t) else [t, written]
            ops.rows_backward(*given, rstd, weight, bias, EPS, centred, is_xhat, dx=written)
            assert torch.equal(written, dx)


@pytest.mark.parametrize("overwritten", [None, "y", "dy"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, (0, 4)], ids=str)
def test_the_parameters_gradients_are_the_sums_and_come_before_dx(shape, dtype, overwritten, device):
    (y, dy, rstd, weight, bias), _, xhat = call(shape, dtype, device, True, True)
    expected = {"dweight": (dy.double() * xhat).sum(0), "dbias": dy.double().sum(0)}
    for t, is_xhat in ((y, False), (xhat.to(dtype), True)):
        given = {"y": t.clone(), "dy": dy.clone()}
        outputs = {name: torch.full_like(weight, torch.nan) for name in expected}
        dx = torch.empty_like(dy) if overwritten is None else given[overwritten]
        ops.rows_backward(*given.values(), rstd, weight, bias, EPS, True, is_xhat, dx=dx, **outputs)
        alone = torch.empty_like(dy)
        ops.rows_backward(t, dy, rstd, weight, bias, EPS, True, is_xhat, dx=alone)
        assert torch.equal(dx, alone)
        for name, found in outputs.items():
            scale = 1 + float((dy.double() * (y.double().abs() + 1)).square().sum(0).sum().sqrt())
            assert (found.double() - expected[name]).norm() <= 10 * TOLERANCE[dtype] * scale
            by_itself = torch.full_like(weight, torch.nan)
            ops.rows_backward(t, dy, rstd, weight, bias, EPS, True, is_xhat, **{name: by_itself})
            assert torch.equal(by_itself, found)


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_no_gradient_is_written_of_a_parameter_that_is_not_there(name, device):
    y, one, missing = torch.randn(4, 6, device=device), torch.ones(6, device=device), torch.zeros(6, device=device)
    affine = {"weight": one, "bias": one} | {name: None}
    with pytest.raises(ValueError, match=f"d{name} was asked for without a {name}"):
        ops.rows_backward(y, y, one[:4], *affine.values(), EPS, True, False, **{f"d{name}": missing})
    assert not missing.any()


def test_where_the_weight_is_zero_xhat_does_not_matter(device):
    (y, dy, rstd, weight, bias), *_ = call((5, 40), torch.float32, device, True, True)
    weight[3] = 0.0
    found = []
    for value in (1.0, -1e30):
        y[:, 3] = value
        dx = torch.empty_like(dy)
        ops.rows_backward(y, dy, rstd, weight, bias, EPS, True, False, dx=dx)
        found.append(dx)
    assert torch.equal(*found)
    assert found[0].isfinite().all()


def test_nothing_is_done_for_no_rows(device):
    empty, weight = torch.empty(0, 4, device=device), torch.ones(4, device=device)
    ops.rows_backward(empty, empty, torch.empty(0, device=device), weight, None, EPS, True, False, dx=empty)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"y": torch.randn(4)}, ValueError, "expected y of shape"),
        ({"dy": torch.randn(4, 2)}, ValueError, "expected dy of shape"),
        ({"dy": torch.randn(4, 6).double()}, TypeError, "expected dy of dtype"),
        ({"y": torch.randn(6, 4).t()}, ValueError, "contiguous matrix"),
        ({"rstd": torch.randn(3)}, ValueError, "expected rstd of shape"),
        ({"rstd": torch.randn(4).bfloat16()}, TypeError, "expected rstd of dtype"),
        ({"weight": torch.randn(4)}, ValueError, "expected weight of shape"),
        ({"dx": torch.randn(4, 7)[:, :6]}, ValueError, "contiguous matrix"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(changes, error, message):
    given = {"y": torch.randn(4, 6), "dy": torch.randn(4, 6), "rstd": torch.ones(4), "weight": None} | changes
    dx = given.pop("dx", torch.zeros(4, 6))
    before = dx.clone()
    with pytest.raises(error, match=message):
        ops.rows_backward(*given.values(), None, EPS, True, False, dx=dx)
    assert torch.equal(dx, before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_results_do_not_depend_on_the_number_of_threads(dtype):
    given, *_ = call((999, 200), dtype, "cpu", True, True)
    found, threads = [], torch.get_num_threads()
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        dx = torch.empty_like(given[1])
        ops.rows_backward(*given, EPS, True, False, dx=dx)
        found.append(dx)
    torch.set_num_threads(threads)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    assert relative_error(found[0], found[0].double()) == 0
