"""Ops that save xhat of some channels, and take it from there, against the formulas in float64."""

import pytest
import torch
from cases import DTYPES, TOLERANCE, covering, laid_out, relative_error
from maths import exactly

from inplace_abn import reference
from inplace_abn.activations import find
from inplace_abn.kernels import ops
from inplace_abn.settings import WEIGHT, Channels

EPS = 1e-5
CHANNELS = 11
ACTIVATIONS = [("identity", 0.0), ("relu", 0.0), ("leaky_relu", 0.01), ("elu", 1.0), ("silu", 0.0), ("gelu", 0.0)]
SHAPES = [(4, CHANNELS, 5, 7), (3, CHANNELS, 75, 67), (40, CHANNELS), (2, CHANNELS, 8, 16), (3, CHANNELS, 9)]
SAVED = {"one": [3], "some": [0, 4, 5, 10], "most": range(2, 10), "all": range(CHANNELS)}


def operands(dtype, device, saved):
    """Weights, of which those of saved channels are zero, tiny or ordinary, and biases."""
    torch.manual_seed(3)
    weight, bias = torch.rand(CHANNELS) + 0.5, torch.randn(CHANNELS)
    for i, c in enumerate(saved):
        weight[c] *= [0.0, 1e-9, -1e-6, 1.0][i % 4]
    return weight.to(device, dtype), bias.to(device, dtype)


def oracle(x, dz, weight, bias, residual, activation, shared, training):
    leaves = [t.double().clone().requires_grad_() for t in (x, weight, bias, residual) if t is not None]
    x, weight, bias = leaves[:3]
    dims = [0, *range(2, x.dim())] if shared == 0 else [*range(2, x.dim())]
    if shared < 2:
        var, mean = torch.var_mean(x, dims, correction=0, keepdim=True)
    else:
        grouped = x.unflatten(1, (-1, shared))
        var, mean = torch.var_mean(grouped, [*range(2, grouped.dim())], correction=0, keepdim=True)
        var, mean = (t.expand(*grouped.shape[:3], *[1] * (x.dim() - 2)).flatten(1, 2) for t in (var, mean))
    if not training:
        var, mean = var.detach(), mean.detach()
    y = (x - mean) * torch.rsqrt(var + EPS) * reference.per_channel(weight, x) + reference.per_channel(bias, x)
    z = exactly(y if residual is None else y + leaves[3], *activation)
    z.backward(dz.double())
    return z.detach(), [t.grad for t in leaves], (mean, var)


@covering(
    4,
    dtype=DTYPES,
    activation=ACTIVATIONS,
    layout=["contiguous", "channels_last", "channel slice"],
    saved=SAVED,
    kind=["batch", "frozen", "instance", "residual", "group", "group of one position"],
)
def test_gradients_do_not_depend_on_weights_of_channels_whose_xhat_is_saved(
    dtype, activation, layout, saved, kind, device
):
    shape = SHAPES[(len(saved) + len(layout) + len(activation[0])) % len(SHAPES)]
    if kind in ("instance", "group") and len(shape) == 2:
        shape = SHAPES[0]
    if kind == "group of one position":
        shape = (2, CHANNELS, 1, 1)
    training = kind != "frozen"
    shared = {"instance": 1, "group": CHANNELS, "group of one position": CHANNELS}.get(kind, 0)
    channels = Channels(SAVED[saved], CHANNELS)
    weight, bias = operands(torch.float64 if dtype == torch.float64 else torch.float32, device, channels.numbers)
    torch.manual_seed(1)
    source = (torch.randn(shape, dtype=torch.float64) * 1.7 + 0.4).to(device, dtype)
    residual = torch.randn(shape, dtype=torch.float64).to(device, dtype) if kind == "residual" else None
    dz = (torch.randn(shape, dtype=torch.float64) + 0.5 * source.cpu().double()).to(device, dtype)
    z, gradients, (mean, var) = oracle(source, dz, weight, bias, residual, activation, shared, training)

    x, kept = laid_out(source, layout), reference.empty_channels(laid_out(source, layout), len(channels)).fill_(7)
    rows, samples = channels.rows(x.device), len(x) if shared else 1
    arithmetic = EPS, WEIGHT, find(activation[0]).code, activation[1]
    vectors = weight.repeat(samples), bias.repeat(samples)
    if not training:
        var = var.flatten().to(weight.dtype)
        ops.forward(x, mean.flatten().to(weight.dtype), var, *vectors, residual, *arithmetic, True, rows, kept)
    else:
        given = *vectors, residual, None, None, 0.0, None, *arithmetic, True, shared
        _, var = ops.local_forward(x, *given, rows, kept)
    given = x, laid_out(dz, layout), var, *vectors, residual, *arithmetic, training, shared, rows, kept
    dx, dweight, dbias = torch.empty_like(source), torch.empty_like(vectors[0]), torch.empty_like(vectors[0])
    dresidual = None if residual is None else torch.empty_like(source)
    ops.local_backward(*given, dx=dx, dweight=dweight, dbias=dbias, dresidual=dresidual)
    found = [dx, dweight.view(samples, -1).sum(0), dbias.view(samples, -1).sum(0), dresidual]
    tolerance = {torch.float64: 1e-9, torch.float32: 2e-4, torch.float16: 2e-2, torch.bfloat16: 6e-2}[dtype]
    assert relative_error(x, z) < TOLERANCE[dtype]
    for name, ours, exact in zip(("dx", "dweight", "dbias", "dresidual"), found, [*gradients, None], strict=False):
        if ours is not None and exact is not None:
            assert relative_error(ours, exact) < tolerance, name
    saved_channels = channels.places(x.device)[1]
    of_saved = relative_error(found[1][saved_channels], gradients[1][saved_channels])
    assert of_saved < tolerance, "dweight of the saved channels"


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "silu", "mish"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_saved_channels_in_a_tail_have_the_slope_that_their_values_do_not_tell(dtype, activation, device):
    torch.manual_seed(1)
    depth = -5.0 if dtype == torch.float16 else -12.5
    x, dz = (torch.randn(8, 3, 6, 6, dtype=torch.float64).to(device, dtype) for _ in range(2))
    # As a loss that follows x, and a loss scale.
    dz = 1024 * (dz + x)
    vectors = [torch.full((3,), value, dtype=torch.promote_types(dtype, torch.float32)) for value in (0.02, depth)]
    weight, bias = (t.to(device) for t in vectors)
    _, (_, dweight, dbias), _ = oracle(x, dz, weight, bias, None, (activation, 0.0), 0, True)
    channels, kept = Channels([0, 1, 2], 3), torch.empty_like(x)
    rows, arithmetic = channels.rows(x.device), (EPS, WEIGHT, find(activation).code, 0.0)
    _, var = ops.local_forward(x, weight, bias, None, None, None, 0.0, None, *arithmetic, True, 0, rows, kept)
    found = torch.empty_like(weight), torch.empty_like(bias)
    given = x, dz, var, weight, bias, None, *arithmetic, True, 0, rows, kept
    ops.local_backward(*given, dx=torch.empty_like(x), dweight=found[0], dbias=found[1], dresidual=None)
    # exp(-y * y / 2) multiplies the rounding of y by its square.
    tolerance = min(4 * depth**2 * torch.finfo(dtype).eps, 0.02)
    for ours, exact in zip(found, (dweight, dbias), strict=True):
        assert relative_error(ours, exact) < tolerance


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("activation", [("relu", 0.0), ("silu", 0.0)], ids=lambda a: a[0])
@pytest.mark.parametrize("memory", ["with gaps", "with room", "in another order", "none"])
def test_it_does_not_matter_where_saved_channels_lie(dtype, layout, activation, memory, device):
    numbers = [0, 4, 5, 10]
    torch.manual_seed(1)
    source, dz = (torch.randn(4, CHANNELS, 5, 7).to(device, dtype) for _ in range(2))
    weight, bias = (
        torch.randn(CHANNELS, device=device).to(torch.promote_types(dtype, torch.float32)) for _ in range(2)
    )
    arithmetic = EPS, WEIGHT, find(activation[0]).code, activation[1]

    def gradients(rows, kept):
        x, dx = laid_out(source, layout), torch.empty_like(source)
        dweight, dbias = torch.empty_like(weight), torch.empty_like(bias)
        _, var = ops.local_forward(x, weight, bias, None, None, None, 0.0, None, *arithmetic, True, 0, rows, kept)
        given = x, laid_out(dz, layout), var, weight, bias, None, *arithmetic, True, 0, rows, kept
        ops.local_backward(*given, dx=dx, dweight=dweight, dbias=dbias)
        return x, dx, dweight, dbias

    channels = Channels(numbers, CHANNELS)
    like, rows = laid_out(source, layout), channels.rows(source.device)
    expected = gradients(rows, reference.empty_channels(like, len(numbers)))
    if memory == "none":
        rows, expected = torch.full_like(rows, -1), gradients(None, None)
    if memory == "with gaps":
        kept = reference.empty_channels(like, 9)[:, 2 : 2 + len(numbers)]
    elif memory == "with room":
        kept = reference.empty_channels(like, 9)
    elif memory == "none":
        kept = reference.empty_channels(like, 0)
    else:
        kept = reference.empty_channels(like, len(numbers))
        rows = torch.where(rows < 0, rows, len(numbers) - 1 - rows)
    found = gradients(rows, kept)
    if memory == "none":
        # Devices take other steps for a call with saved channels.
        bound = {torch.float64: 1e-9, torch.float32: 2e-4, torch.float16: 2e-2, torch.bfloat16: 6e-2}[dtype]
        assert all(relative_error(ours, theirs.double()) < bound for ours, theirs in zip(found, expected, strict=True))
        return
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


def test_a_call_says_which_argument_about_saved_channels_is_wrong(device):
    x, rows = torch.randn(2, 4, 3, device=device), Channels([1], 4).rows(torch.device("cpu")).to(device)
    arithmetic = EPS, WEIGHT, 0, 0.0, True, 0
    for wrong, message in (
        ((rows, None), "both or neither"),
        ((rows[:3], x.new_empty(2, 1, 3)), "rows of shape"),
        ((rows.int(), x.new_empty(2, 1, 3)), "rows of dtype int64"),
        ((rows, x.new_empty(2, 1, 4)), "verbatim of shape"),
        ((rows, x.new_empty(2, 1, 3).double()), "verbatim of dtype"),
        ((rows, x.view(-1)[:6].view(2, 1, 3)), "overlap"),
    ):
        before = x.clone()
        with pytest.raises((ValueError, TypeError, RuntimeError), match=message):
            ops.local_forward(x, None, None, None, None, None, 0.0, None, *arithmetic, *wrong)
        assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_weight_within_eps_of_zero_is_seen_unless_its_channel_is_saved(dtype):
    weight = torch.tensor([1.0, -2.0, 3e-6, 1.0], dtype=dtype)
    assert not ops.has_left(weight[:2], None, EPS)
    assert ops.has_left(weight, None, EPS)
    assert not ops.has_left(weight, None, EPS, rows=Channels([2], 4).rows(weight.device))
    assert ops.has_left(weight, None, EPS, rows=Channels([1, 3], 4).rows(weight.device))
    assert ops.has_left(torch.full((3,), torch.nan, dtype=dtype), None, EPS)


@pytest.mark.parametrize("of_bias", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_weight_or_a_bias_beyond_its_bounds_is_seen_unless_its_channel_is_saved(dtype, of_bias):
    weight, bias = torch.tensor([1.0, -0.25, 4.0], dtype=dtype), torch.tensor([-3.0, 2.0, 0.0], dtype=of_bias)
    bounds = torch.tensor([[0.5, 0.25, 2.0], [1.0, 0.5, 8.0], [-3.0, 1.0, -1.0], [0.0, 3.0, 0.0]]).double()
    assert not ops.has_left(weight, bias, EPS, 0.0, bounds)
    assert ops.has_left(weight, bias, EPS, 0.25, bounds)
    rows = Channels([0], 3).rows(weight.device)
    assert not ops.has_left(weight, bias, EPS, 0.25, bounds, rows)
    for row, value in ((0, 1.5), (1, 0.5), (2, -2.0), (3, -4.0)):
        beyond = bounds.clone()
        beyond[row, 0] = value
        assert ops.has_left(weight, bias, EPS, 0.0, beyond)
        assert ops.has_left(weight, None, EPS, 0.0, beyond) == (row < 2)
        assert not ops.has_left(weight, bias, EPS, 0.0, beyond, rows)
    assert ops.has_left(weight, torch.full((3,), torch.nan, dtype=of_bias), EPS, 0.0, bounds)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bounds_and_biases_of_another_shape_are_refused(dtype):
    weight, bounds = torch.ones(3, dtype=dtype), torch.zeros(4, 3).double()
    for wrong in (bounds[:2], bounds.float(), bounds[:, :2], bounds.mT.contiguous().mT):
        with pytest.raises(ValueError, match="expected bounds"):
            ops.has_left(weight, None, EPS, 0.0, wrong)
    with pytest.raises(ValueError, match=r"expected bias of shape \(3,\)"):
        ops.has_left(weight, weight[:2], EPS)
