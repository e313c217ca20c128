"""inplace_instance_norm and its ops against torch's instance norm in float64, for all shapes, layouts and dtypes."""

import pytest
import torch
import torch.nn.functional as F
from cases import (
    ACTIVATIONS,
    DTYPES,
    TOLERANCE,
    assert_matches,
    covering,
    laid_out,
    parameters,
    relative_error,
    stats_dtype,
    tolerance,
)
from maths import exactly
from torch.autograd import gradcheck, gradgradcheck

from inplace_abn import inplace_instance_norm
from inplace_abn.activations import find
from inplace_abn.kernels import ops

SHAPES = [
    (3, 5, 7),
    (2, 70, 3, 3),  # more channels than a vector holds, and no multiple of them
    (2, 3, 75, 67),  # planes longer than a panel
    (1, 6, 5, 4),  # one sample, so that the result is batch norm's
    (4, 1, 6, 5),  # one channel, and an even number of samples
    (33, 7, 3, 3),  # so many samples that the CPU divides them among its threads
    (2, 4, 3, 5, 6),
]
LAYOUTS = ["contiguous", "channels_last", "channel slice", "channels_last slice", "transposed", "strided"]
EPS = 1e-3


def oracle(x, dz, weight, bias, running_mean, running_var, residual, training, momentum, activation, param):
    """Results of torch's instance norm in float64."""
    leaves = {"x": x, "weight": weight, "bias": bias, "residual": residual}
    # On the CPU, torch's gradients for one sample in channels-last memory are wrong.
    leaves = {
        name: t.detach().double().clone(memory_format=torch.contiguous_format).requires_grad_()
        for name, t in leaves.items()
        if t is not None
    }
    running = [None if t is None else t.double().clone() for t in (running_mean, running_var)]
    # On CUDA torch has no gradient of a bias without a weight.
    scale = leaves.get("weight", x.new_ones(x.shape[1], dtype=torch.float64))
    y = F.instance_norm(leaves["x"], *running, scale, leaves.get("bias"), training, momentum, EPS)
    z = exactly(y + leaves["residual"] if residual is not None else y, activation, param)
    z.backward(dz.double().contiguous())
    return {"z": z, **{f"d{name}": t.grad for name, t in leaves.items()}, "mean": running[0], "var": running[1]}


def run(x, dz, weight, bias, running_mean, running_var, residual, training, momentum, activation, param, **options):
    leaves = {"x": x, "weight": weight, "bias": bias, "residual": residual}
    # A clone does not keep a layout with gaps.
    leaves = {
        name: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device).copy_(t).requires_grad_()
        for name, t in leaves.items()
        if t is not None
    }
    running = [None if t is None else t.clone() for t in (running_mean, running_var)]
    given = leaves["x"]
    if options.get("overwrite_input", True):
        given = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(given)
    z = inplace_instance_norm(
        given,
        leaves.get("weight"),
        leaves.get("bias"),
        *running,
        training,
        momentum,
        EPS,
        activation,
        param,
        residual=leaves.get("residual"),
        **options,
    )
    assert (z is given) is options.get("overwrite_input", True)
    z.backward(dz)
    return {"z": z, **{f"d{name}": t.grad for name, t in leaves.items()}, "mean": running[0], "var": running[1]}


def correlated(x):
    """A gradient that is correlated with x, as that of a squared loss is."""
    return torch.randn_like(x) + 2 * x


@covering(3, shape=SHAPES, layout=LAYOUTS, activation=ACTIVATIONS, training=[True, False])
def test_results_are_torchs_in_float64(shape, layout, activation, training, device):
    x = laid_out(1 + 2 * torch.randn(shape, dtype=torch.float64, device=device), layout)
    vectors = parameters(shape[1], torch.float64, device)
    arguments = (x, correlated(x), *vectors, None, training, 0.3, *activation)
    assert_matches(run(*arguments), oracle(*arguments), TOLERANCE[torch.float64])


@covering(
    3,
    dtype=DTYPES[1:],
    layout=LAYOUTS[:3],
    activation=ACTIVATIONS,
    training=[True, False],
    narrow_parameters=[False, True],
)
def test_results_are_torchs_in_every_dtype(dtype, layout, activation, training, narrow_parameters, device):
    shape = (3, 18, 5, 5, 6)
    x = laid_out(torch.randn(shape, device=device).to(dtype), layout)
    weight, bias, *running = parameters(shape[1], stats_dtype(dtype), device)
    if narrow_parameters:
        weight, bias, *running = (t.to(dtype) for t in (weight, bias, *running))
    # The gradient has one sign, so that sums do not cancel by accident. Cancellation would make relative errors
    # meaningless.
    activation, param = activation
    arguments = (x, torch.rand_like(x), weight, bias, *running, None, training, 0.3, activation, param)
    actual, expected = run(*arguments), oracle(*arguments)
    assert actual["z"].dtype == actual["dx"].dtype == dtype
    assert actual["dweight"].dtype == weight.dtype
    allowed = tolerance(dtype, activation)
    if dtype in (torch.bfloat16, torch.float16):
        # dweight sums terms of both signs, which the rounding of z has changed. Its error is relative to the size of
        # the terms.
        scale = expected["dbias"].abs().max()
        assert (actual["dweight"].double() - expected.pop("dweight")).abs().max() < 2 * allowed * scale
    assert relative_error(actual.pop("z"), expected.pop("z")) < TOLERANCE[dtype]
    assert_matches(actual, expected, allowed)


@pytest.mark.parametrize("overwrite_input", [True, False])
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("tracking", [False, True])
@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
@pytest.mark.parametrize("affine", ["both", "weight", "bias", "none"])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_what_is_optional_is_optional_independently(
    layout, affine, training, tracking, with_residual, overwrite_input, device
):
    shape = (3, 6, 5, 4)
    x, residual = (laid_out(torch.randn(shape, dtype=torch.float64, device=device), layout) for _ in range(2))
    weight, bias, *running = parameters(shape[1], torch.float64, device, affine)
    running = running if tracking else [None, None]
    arguments = (x, correlated(x), weight, bias, *running, residual if with_residual else None)
    arguments += (training or not tracking, 0.1, "leaky_relu", 0.01)
    assert_matches(run(*arguments, overwrite_input=overwrite_input), oracle(*arguments), TOLERANCE[torch.float64])


@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "channel slice", "transposed"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 5, 6, 7), (2, 16, 90, 71), (17, 3, 4, 4)], ids=str)
def test_ops_treat_each_sample_as_if_it_were_alone(shape, dtype, layout, device):
    batch, channels = shape[:2]
    x, dz = (laid_out((1 + torch.randn(shape, device=device)).to(dtype), layout) for _ in range(2))
    weight, bias, *_ = parameters(batch * channels, stats_dtype(dtype), device)
    what = (EPS, True, find("leaky_relu").code, 0.1)
    mean, var = ops.statistics(x, 1)
    z = laid_out(x, layout)
    _, again = ops.local_forward(z, weight, bias, None, None, None, 0.1, None, *what, True, 1)
    dx, dweight, dbias = torch.empty_like(z), torch.empty_like(weight), torch.empty_like(bias)
    gradients = {"dx": dx, "dweight": dweight, "dbias": dbias}
    ops.local_backward(z, dz, var, weight, bias, None, *what, True, 1, **gradients)
    allowed = 1e-12 if dtype == torch.float64 else 2e-6
    assert relative_error(again, var.double()) < allowed
    for i in range(batch):
        own = slice(i * channels, (i + 1) * channels)
        sample = laid_out(x[i : i + 1], layout)
        alone = ops.statistics(sample)
        assert relative_error(mean[own], alone[0].double()) < allowed
        assert relative_error(var[own], alone[1].double()) < allowed
        ops.local_forward(sample, weight[own], bias[own], None, None, None, 0.1, None, *what, True)
        assert relative_error(z[i : i + 1], sample.double()) < TOLERANCE[dtype]
        expected = {name: torch.empty_like(t[i : i + 1] if name == "dx" else t[own]) for name, t in gradients.items()}
        ops.local_backward(z[i : i + 1], dz[i : i + 1], var[own], weight[own], bias[own], None, *what, True, **expected)
        assert relative_error(dx[i : i + 1], expected["dx"].double()) < TOLERANCE[dtype]
        assert relative_error(dweight[own], expected["dweight"].double()) < 1e-5
        assert relative_error(dbias[own], expected["dbias"].double()) < 1e-5


@covering(
    2,
    activation=[a for a in ACTIVATIONS if a != ("leaky_relu", 0.0)],
    layout=["contiguous", "channels_last"],
    affine=["both", "none"],
)
def test_gradcheck_and_gradgradcheck(activation, layout, affine, device):
    shape = (2, 2, 2, 3)
    x, residual = (laid_out(torch.randn(shape, dtype=torch.float64, device=device), layout) for _ in range(2))
    weight, bias, *_ = parameters(shape[1], torch.float64, device, affine)
    leaves = [t.requires_grad_() for t in (x, residual, weight, bias) if t is not None]

    def function(x, residual, weight=None, bias=None):
        settings = (True, 0.1, EPS, *activation)
        return inplace_instance_norm(x * 1.0, weight, bias, None, None, *settings, residual=residual)

    assert gradcheck(function, leaves)
    assert gradgradcheck(function, leaves)


@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
@pytest.mark.parametrize("shape", [(0, 4, 3, 3), (2, 4, 0, 3), (2, 0, 3, 3)], ids=str)
def test_what_is_empty_stays_so_and_leaves_the_running_statistics_alone(shape, training, device):
    weight, bias, mean, var = parameters(shape[1], torch.float32, device)
    before = mean.clone(), var.clone()
    x = torch.randn(shape, device=device, requires_grad=True)
    z = inplace_instance_norm(x * 1, weight.requires_grad_(), bias.requires_grad_(), mean, var, training)
    assert z.shape == shape
    z.sum().backward()
    assert x.grad.shape == shape
    assert (weight.grad == 0).all()
    assert (bias.grad == 0).all()
    torch.testing.assert_close((mean, var), before)


def test_a_running_statistic_of_another_memory_order_is_updated(device):
    x = torch.randn(3, 4, 5, 5, device=device)
    wide = torch.zeros(8, device=device)
    mean, var = wide[::2], torch.ones(4, device=device)
    inplace_instance_norm(x.clone(), None, None, mean, var, momentum=1.0)
    torch.testing.assert_close(mean, x.mean(dim=(0, 2, 3)))
    torch.testing.assert_close(var, x.flatten(2).var(dim=2).mean(dim=0))
    assert (wide[1::2] == 0).all()


REFUSED = {
    "one value per channel": (lambda: torch.randn(2, 3, 1, 1), {}, ValueError, "more than 1 spatial element"),
    "no space": (lambda: torch.randn(2, 3), {}, ValueError, r"of shape \(batch, channel, space, \*\), got \(2, 3\)"),
    "weight": (lambda: torch.randn(2, 3, 4), {"weight": torch.ones(6)}, ValueError, r"weight of shape \(3,\).*\(6,\)"),
    "bias": (lambda: torch.randn(2, 3, 4), {"bias": torch.ones(3, 1)}, ValueError, r"bias of shape \(3,\)"),
    "one statistic": (lambda: torch.randn(2, 3, 4), {"running_mean": torch.ones(3)}, ValueError, "both or neither"),
    "dtype": (lambda: torch.randn(2, 3, 4).long(), {}, TypeError, "dtype"),
    "weight's dtype": (lambda: torch.randn(2, 3, 4), {"weight": torch.ones(3).double()}, TypeError, "weight of dtype"),
    "eps": (lambda: torch.randn(2, 3, 4), {"eps": 0.0}, ValueError, "finite eps > 0"),
    "momentum": (lambda: torch.randn(2, 3, 4), {"momentum": torch.inf}, ValueError, "finite momentum"),
    "activation": (lambda: torch.randn(2, 3, 4), {"activation": "tanh"}, ValueError, "tanh"),
    "leaf": (lambda: torch.randn(2, 3, 4, requires_grad=True), {}, ValueError, "leaf"),
    "residual": (lambda: torch.randn(2, 3, 4), {"residual": torch.ones(2, 3, 5)}, ValueError, "residual of shape"),
    "producer": (lambda: torch.randn(2, 3, 4, requires_grad=True).exp(), {}, RuntimeError, "ExpBackward"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_errors_come_before_anything_is_touched(name):
    make, options, error, words = REFUSED[name]
    x = make()
    given = {"weight": None, "bias": None, "running_mean": None, "running_var": None} | options
    before = x.detach().clone(), {k: t.clone() for k, t in given.items() if isinstance(t, torch.Tensor)}
    with pytest.raises(error, match=words):
        inplace_instance_norm(x, **given)
    assert torch.equal(x, before[0])
    assert x._version == 0
    for key, value in before[1].items():
        assert torch.equal(given[key], value)
