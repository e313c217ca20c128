"""Infinities and NaN come out where torch's do: a loss scaler looks for them in gradients."""

import math

import pytest
import torch
import torch.nn.functional as F
from cases import ALL_ACTIVATIONS, DTYPES, param_of, stats_dtype
from maths import exactly

from inplace_abn import inplace_abn
from inplace_abn.activations import activate

NAMES = {f"{name}({param})": (name, param) for name, param in ALL_ACTIVATIONS}
SHAPE = (4, 5, 7, 3)
VALUES = [-math.inf, math.inf, math.nan]


def kinds(t):
    """0 for a finite value; other numbers for NaN, +inf and -inf."""
    return t.detach().cpu().isnan() + 2 * t.detach().cpu().isposinf() + 3 * t.detach().cpu().isneginf()


def drawn(dtype, device="cpu"):
    """x, dz, weight, bias, running mean and variance."""
    statistics = stats_dtype(dtype)
    draws = [torch.randn(SHAPE).to(dtype) for _ in range(2)]
    draws += [torch.rand(SHAPE[1]).to(statistics) + 0.5, torch.randn(SHAPE[1]).to(statistics) * 0.3]
    draws += [torch.randn(SHAPE[1]).to(statistics) * 0.1, torch.rand(SHAPE[1]).to(statistics) + 0.5]
    return [t.to(device) for t in draws]


def gradients(z, dz, **leaves):
    return dict(zip(leaves, torch.autograd.grad(z, list(leaves.values()), dz), strict=True))


def ours(tensors, name, param, training, residual=None):
    x, dz, weight, bias, mean, var = tensors
    x, weight, bias = (t.clone().requires_grad_() for t in (x, weight, bias))
    leaves = {"x": x, "weight": weight, "bias": bias}
    if residual is not None:
        residual = leaves["residual"] = residual.clone().requires_grad_()
    z = inplace_abn(
        x * 1, weight, bias, mean.clone(), var.clone(), training, 0.1, 1e-5, name, param, signed_weight=True,
        residual=residual,
    )  # fmt: skip
    return {"z": z.detach().clone()} | gradients(z, dz, **leaves)


def torchs(tensors, name, param, training, residual=None):
    """On the CPU, whose results do not depend on the device that is tested."""
    x, dz, weight, bias, mean, var = (t.cpu() for t in tensors)
    leaves = {"x": x.clone().requires_grad_(), "weight": weight.requires_grad_(), "bias": bias.requires_grad_()}
    y = F.batch_norm(leaves["x"] * 1, mean.clone(), var.clone(), weight, bias, training, 0.1, 1e-5)
    if residual is not None:
        leaves["residual"] = residual.cpu().requires_grad_()
        y = y + leaves["residual"]
    z = activate(y, name, param)
    # On the CPU torch's gelu of infinity is NaN in some dtypes.
    return {"z": exactly(y.detach().double(), name, param)} | gradients(z, dz, **leaves)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
@pytest.mark.parametrize("case", NAMES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_infinities_and_nan_come_out_where_torchs_do(dtype, case, training, layout, device):
    """hardswish and gelu of -inf were 0.002; the weight's gradient was finite for relu and elu of -inf; in evaluation
    the gradient of an infinite input was NaN."""
    name, param = NAMES[case]
    for value in VALUES:
        tensors = drawn(dtype, device)
        tensors[0][1, 2, 3] = value
        tensors[:2] = [t.contiguous(memory_format=layout) for t in tensors[:2]]
        actual, expected = (call(tensors, name, param, training) for call in (ours, torchs))
        for what, t in actual.items():
            found, wanted = kinds(t), kinds(expected[what])
            if name == "hardswish" and value == -math.inf and what in ("x", "bias") and not training:
                # z is NaN. It does not tell whether y was -inf, where torch's slope is zero, or NaN.
                found[wanted == 0] = 0
            assert torch.equal(found, wanted), (value, what)


@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
@pytest.mark.parametrize("case", NAMES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_infinite_residual_leaves_its_traces_in_the_result_and_its_own_gradient(dtype, case, training, device):
    """The input's part in an infinite sum is lost. So only what does not need it can be torch's."""
    name, param = NAMES[case]
    for value in VALUES:
        tensors, residual = drawn(dtype, device), torch.randn(SHAPE).to(device, dtype)
        residual[1, 2, 3] = value
        actual, expected = (call(tensors, name, param, training, residual) for call in (ours, torchs))
        for what in ("z", "residual", "bias"):
            found, wanted = kinds(actual[what]), kinds(expected[what])
            if name == "hardswish" and value == -math.inf:
                found[wanted == 0] = 0
            assert torch.equal(found, wanted), (value, what)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["relu", "elu"])
def test_values_next_to_what_stands_for_minus_infinity_have_finite_gradients(name, dtype, device):
    """Zeros, values that are rounded to zero, and values far below."""
    values = torch.tensor([0.0, -0.0, 1e-45, -1e-45, 1e-8, 2.0**-25, -1e-30, -17.0, -88.0, -300.0, -7e4, -1e30])
    x = values.to(stats_dtype(dtype)).to(device).view(1, 1, -1).expand(2, 3, -1)
    # float16 holds -7e4 in the sum only.
    half = x / 2 if dtype == torch.float16 else x
    x, residual = half.clamp_min(-torch.finfo(dtype).max).to(dtype), torch.zeros(half.shape).to(device, dtype)
    if dtype == torch.float16:
        residual += x
    weight, bias, mean, var = (f(3, dtype=stats_dtype(dtype), device=device) for f in (torch.ones, torch.zeros) * 2)
    weight, bias = weight.requires_grad_(), bias.requires_grad_()
    x = x.clone().requires_grad_()
    z = inplace_abn(x * 1, weight, bias, var, mean + 0.5, False, 0.0, 0.5, name, param_of(name, 1.0), residual=residual)
    assert z.isfinite().all()
    z.sum().backward()
    assert all(t.grad.isfinite().all() for t in (x, weight, bias))
