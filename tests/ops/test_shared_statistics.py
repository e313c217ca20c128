"""Ops with statistics that neighbouring channels of a sample share, against torch's group norm in float64."""

import pytest
import torch
import torch.nn.functional as F
from cases import (
    ACTIVATIONS,
    DTYPES,
    TOLERANCE,
    assert_matches,
    laid_out,
    parameters,
    relative_error,
    stats_dtype,
    tolerance,
)
from maths import exactly

from inplace_abn.activations import find
from inplace_abn.kernels import ops

EPS = 1e-3
LAYOUTS = ["contiguous", "channels_last", "channel slice", "channels_last slice", "transposed", "strided"]
# A shape, and how many channels share statistics.
SHAPES = [
    ((3, 6, 7), 3),
    ((2, 70, 3, 3), 35),  # more channels than a vector holds, and no multiple of them
    ((2, 6, 75, 67), 2),  # planes longer than a panel
    ((1, 6, 5, 4), 6),  # one sample and one group
    ((4, 2, 6, 5), 2),
    ((33, 8, 3, 3), 4),  # so many groups that the CPU divides them among its threads
    ((5, 130, 1, 1), 65),  # one value per channel, and more channels than a block of a device has threads
    ((4, 12), 4),
    ((2, 4, 3, 5, 6), 2),
]


def correlated(x):
    """A gradient that is correlated with x, as that of a squared loss is."""
    return torch.randn_like(x) + 2 * x


def of_samples(weight, bias, samples):
    return tuple(None if t is None else t.repeat(samples) for t in (weight, bias))


def oracle(x, dz, shared, weight, bias, residual, activation, param):
    """z and all gradients, of parameters per sample, in float64 by autograd of torch's group norm."""
    samples, channels = x.shape[:2]
    per_sample = of_samples(weight, bias, samples)
    given = {"x": x, "weight": per_sample[0], "bias": per_sample[1], "residual": residual}
    leaves = {
        name: t.detach().double().clone(memory_format=torch.contiguous_format).requires_grad_()
        for name, t in given.items()
        if t is not None
    }
    y = F.group_norm(leaves["x"], channels // shared, eps=EPS)
    per_channel = [samples, channels] + [1] * (x.dim() - 2)
    if "weight" in leaves:
        y = y * leaves["weight"].view(per_channel)
    if "bias" in leaves:
        y = y + leaves["bias"].view(per_channel)
    z = exactly(y if residual is None else y + leaves["residual"], activation, param)
    z.backward(dz.double().contiguous())
    return {"z": z, **{f"d{name}": t.grad for name, t in leaves.items()}}


def run(x, dz, shared, weight, bias, residual, activation, param, layout, over="fresh", keep_xhat=False):
    """The ops' z and gradients. ``over`` names what dx is written over."""
    arithmetic = (EPS, True, find(activation).code, param)
    weight, bias = of_samples(weight, bias, len(x))
    z = laid_out(x, layout)
    _, var = ops.local_forward(z, weight, bias, residual, None, None, 0.1, None, *arithmetic, True, shared)
    results = {"z": z.clone()}
    dz = laid_out(dz, layout)
    outputs = {"dx": {"dz": dz, "z": z, "fresh": laid_out(torch.full_like(z, torch.nan), layout)}[over]}
    for name, t in (("dweight", weight), ("dbias", bias)):
        if t is not None:
            outputs[name] = torch.full_like(t, torch.nan)
    if residual is not None:
        outputs["dresidual"] = torch.full_like(z, torch.nan)
    room = {"xhat": laid_out(torch.full_like(z, torch.nan), layout)} if keep_xhat else {}
    ops.local_backward(z, dz, var, weight, bias, residual, *arithmetic, True, shared, **outputs, **room)
    return results | outputs


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "shared"), SHAPES, ids=str)
def test_statistics_are_those_of_groups_of_channels(shape, shared, dtype, layout, device):
    # Channels have means of their own, whose spread is part of the variance.
    x = torch.randn(shape, device=device) + 3 * torch.randn(1, shape[1], *[1] * (len(shape) - 2), device=device)
    x = laid_out(x.to(dtype), layout)
    mean, var = ops.statistics(x, shared)
    assert mean.dtype == var.dtype == stats_dtype(dtype)
    groups = x.double().reshape(shape[0] * shape[1] // shared, -1)
    allowed = 1e-13 if dtype == torch.float64 else 1e-6
    assert relative_error(mean, groups.mean(dim=1).repeat_interleave(shared)) < allowed
    assert relative_error(var, groups.var(dim=1, unbiased=False).repeat_interleave(shared)) < allowed


@pytest.mark.parametrize(("activation", "param"), ACTIVATIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("shape", "shared"), SHAPES, ids=str)
def test_results_are_torchs_in_float64(shape, shared, layout, activation, param, device):
    x = laid_out(1 + 2 * torch.randn(shape, dtype=torch.float64, device=device), layout)
    weight, bias, *_ = parameters(shape[1], torch.float64, device)
    arguments = (x, correlated(x), shared, weight, bias, None, activation, param)
    assert_matches(run(*arguments, layout), oracle(*arguments), TOLERANCE[torch.float64])


@pytest.mark.parametrize("narrow_parameters", [False, True], ids=["fp32 parameters", "x's dtype"])
@pytest.mark.parametrize(("activation", "param"), ACTIVATIONS)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "channel slice"])
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_results_are_torchs_in_every_dtype(dtype, layout, activation, param, narrow_parameters, device):
    shape = (3, 18, 5, 5, 6)
    x = laid_out(torch.randn(shape, device=device).to(dtype), layout)
    weight, bias, *_ = parameters(shape[1], dtype if narrow_parameters else stats_dtype(dtype), device)
    # The gradient has one sign, so that sums do not cancel by accident.
    arguments = (x, torch.rand_like(x), 6, weight, bias, None, activation, param)
    actual, expected = run(*arguments, layout), oracle(*arguments)
    assert actual["z"].dtype == actual["dx"].dtype == dtype
    allowed = tolerance(dtype, activation)
    if dtype in (torch.bfloat16, torch.float16):
        # dweight sums terms of both signs, which the rounding of z has changed. Its error is relative to the size of
        # the terms.
        scale = expected["dbias"].abs().max()
        assert (actual["dweight"].double() - expected.pop("dweight")).abs().max() < 2 * allowed * scale
    assert relative_error(actual.pop("z"), expected.pop("z")) < TOLERANCE[dtype]
    assert_matches(actual, expected, allowed)


@pytest.mark.parametrize("keep_xhat", [False, True], ids=["", "memory for xhat"])
@pytest.mark.parametrize("over", ["fresh", "z", "dz"])
@pytest.mark.parametrize("with_residual", [False, True], ids=["", "residual"])
@pytest.mark.parametrize("affine", ["both", "weight", "bias", "none"])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "channel slice"])
def test_what_is_optional_is_optional_independently(layout, affine, with_residual, over, keep_xhat, device):
    shape = (3, 6, 5, 4)
    x, residual = (laid_out(torch.randn(shape, dtype=torch.float64, device=device), layout) for _ in range(2))
    weight, bias, *_ = parameters(shape[1], torch.float64, device, affine)
    arguments = (x, correlated(x), 3, weight, bias, residual if with_residual else None, "leaky_relu", 0.01)
    actual = run(*arguments, layout, over, keep_xhat)
    assert_matches(actual, oracle(*arguments), TOLERANCE[torch.float64])


def test_gradients_of_parameters_alone_need_no_memory_for_dx(device):
    x = torch.randn(3, 6, 5, 4, dtype=torch.float64, device=device)
    weight, bias, *_ = parameters(6, torch.float64, device)
    dz = correlated(x)
    expected = oracle(x, dz, 3, weight, bias, None, "elu", 1.0)
    arithmetic = (EPS, True, find("elu").code, 1.0)
    weight, bias = of_samples(weight, bias, 3)
    _, var = ops.local_forward(x, weight, bias, None, None, None, 0.1, None, *arithmetic, True, 3)
    kept = x.clone(), dz.clone()
    outputs = {"dweight": torch.empty_like(weight), "dbias": torch.empty_like(bias)}
    ops.local_backward(x, dz, var, weight, bias, None, *arithmetic, True, 3, **outputs)
    for name, t in outputs.items():
        assert relative_error(t, expected[name]) < TOLERANCE[torch.float64]
    assert torch.equal(x, kept[0])
    assert torch.equal(dz, kept[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_channel_of_large_gamma_shares_its_gradient_with_its_group(dtype, device):
    """The group's means have gamma in them. Of equal gammas it would cancel."""
    x = torch.randn(2, 8, 6, 6, device=device).to(dtype)
    weight, bias, *_ = parameters(8, stats_dtype(dtype), device)
    weight = weight * torch.logspace(-1, 1, 8, device=device, dtype=weight.dtype)
    arguments = (x, correlated(x), 4, weight, bias, None, "identity", 0.0)
    actual, expected = run(*arguments, "contiguous"), oracle(*arguments)
    assert relative_error(actual["dx"], expected["dx"]) < TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("shared", "words"),
    [(4, "expected shared to divide the 6 channels of x, got 4"), (-1, "got -1"), (7, "got 7")],
    ids=str,
)
def test_channels_that_cannot_be_divided_are_an_error(shared, words, device):
    x, var = torch.randn(2, 6, 4, device=device), torch.ones(12, device=device)
    kept = x.clone()
    tail = (EPS, True, find("relu").code, 0.0)
    with pytest.raises(ValueError, match=words):
        ops.statistics(x, shared)
    with pytest.raises(ValueError, match=words):
        ops.local_forward(x, None, None, None, None, None, 0.1, None, *tail, True, shared)
    with pytest.raises(ValueError, match=words):
        ops.local_backward(x, x.clone(), var, None, None, None, *tail, True, shared, dx=torch.empty_like(x))
    assert torch.equal(x, kept)


def test_groups_have_no_running_statistics(device):
    x = torch.randn(2, 6, 4, device=device)
    running = torch.zeros(12, device=device), torch.ones(12, device=device)
    tail = (EPS, True, find("relu").code, 0.0)
    with pytest.raises(ValueError, match="no running statistics where channels share statistics"):
        ops.local_forward(x, None, None, None, *running, 0.1, None, *tail, True, 3)


@pytest.mark.parametrize("shape", [(0, 4, 3, 3), (2, 4, 0, 3), (2, 0, 3, 3)], ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_what_is_empty_stays_so(shape, layout, device):
    x = laid_out(torch.randn(shape, device=device), layout)
    mean, var = ops.statistics(x, 2)
    assert not mean.any()
    assert not var.any()
    tail = (EPS, True, find("relu").code, 0.0)
    weight = torch.ones(shape[0] * shape[1], device=device)
    ops.local_forward(x, weight, None, None, None, None, 0.1, None, *tail, True, 2)
    dweight = torch.full_like(weight, torch.nan)
    dx = torch.empty_like(x)
    ops.local_backward(x, x.clone(), var, weight, None, None, *tail, True, 2, dx=dx, dweight=dweight)
    assert not dweight.any()
