"""Activations and their inverses, element by element, for every kind of value."""

import pytest
import torch
from cases import ALL_ACTIVATIONS, DTYPES, stats_dtype
from maths import exactly

from inplace_abn import inplace_abn
from inplace_abn.activations import OF_ROUNDED, activate, activation_backward, find
from inplace_abn.kernels import ops

NAMES = {f"{name}({param})": (name, param) for name, param in ALL_ACTIVATIONS}
# Values of y in float64: near extrema and kinks, near zero, where activations saturate, and between.
INTERESTING = torch.cat(
    [
        torch.linspace(-12, 12, 4001, dtype=torch.float64),
        *(torch.linspace(y - 0.02, y + 0.02, 4001, dtype=torch.float64) for y in (-1.2785, -1.1924, -0.7518)),
        torch.linspace(-1.51, -1.49, 401, dtype=torch.float64),
        torch.linspace(-3.01, -2.99, 401, dtype=torch.float64),
        torch.linspace(-1e-3, 1e-3, 401, dtype=torch.float64),
        torch.logspace(-40, 2, 400, dtype=torch.float64),
        -torch.logspace(-40, 1.3, 400, dtype=torch.float64),
    ]
)


def code(name):
    return find(name).code


def act(y, name, param, invertible):
    """act(y), computed by the op. The statistics leave y as it is."""
    z = y.clone().view(-1, 1)
    zero = torch.zeros(1, dtype=stats_dtype(y.dtype), device=y.device)
    # var + eps is exactly one.
    ops.forward(z, zero, zero + 0.5, None, None, None, 0.5, False, code(name), param, invertible)
    return z.view(-1)


def invert(z, dz, name, param):
    """Returns (y, dy), recovered from z."""
    y, dy = z.clone().view(-1, 1), dz.clone().view(-1, 1)
    ops.backward_reduce(y, dy, None, None, None, 0.5, False, code(name), param)
    return y.view(-1), dy.view(-1)


def of_minus_infinity(name, param, dtype):
    """What -inf becomes, which backward may read again."""
    return act(torch.tensor([-torch.inf], dtype=dtype), name, param, invertible=True).item()


@pytest.mark.parametrize("case", NAMES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_inverse_gives_back_y_and_the_derivative(dtype, case, device):
    name, param = NAMES[case]
    y = INTERESTING.to(device).to(dtype)
    z = act(y, name, param, invertible=True)
    recovered, derivative = (t.double() for t in invert(z, torch.ones_like(z), name, param))
    y, z = y.double(), z.double()
    slope = activation_backward(y, torch.ones_like(y), name, param)
    eps = torch.finfo(dtype).eps

    # The recovered y has the same image. If the next layer takes the image for zero, the recovered y is y itself.
    image, exact = exactly(recovered, name, param), exactly(y, name, param)
    dropped = (slope == 0) & (exact == 0) & (y < 0)
    # CUDA divides floats to 2 ulp, the CPU to half an ulp, both in forward and in the inverse. CUDA's exponential has
    # one ulp more. That is 4 eps of y where y is large and z is y.
    ulps = 6 if device.type == "cuda" and dtype == torch.float32 else 4
    allowed = ulps * eps * (z.abs() + y.abs() * slope.abs()) + eps / 64
    assert ((image - exact).abs() <= allowed)[~dropped].all()
    subnormal = 2.0**-9 if dtype == torch.float16 else eps / 64  # in fp16 the tiny multiple of y is subnormal
    assert ((recovered - y).abs() <= 4 * eps * y.abs() + subnormal)[dropped].all()

    # The derivative is the same, too. At an extremum it is less exact, because rounding z moves y by the square root of
    # that rounding. Where the derivative jumps, either value is right.
    jumps = {"hardswish": (-3.0, 3.0)}.get(name, (0.0,) if name in ("relu", "leaky_relu", "elu") else ())
    at_jump = torch.zeros_like(dropped)
    for kink in jumps:
        at_jump |= (y - kink).abs() <= 4 * eps * max(abs(kink), 1.0)
    error = (derivative - slope).abs()
    assert (error <= 8 * eps**0.5)[~at_jump].all()
    assert (error <= 60 * eps)[~at_jump & (slope > 0.2)].all()


@pytest.mark.parametrize("case", NAMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_16_bit_pattern_inverts_to_finite_values(dtype, case, device):
    name, param = NAMES[case]
    z = torch.arange(-(2**15), 2**15, dtype=torch.int32, device=device).to(torch.int16).view(dtype)
    z = z[z.isfinite()]
    if name in ("relu", "leaky_relu"):
        # A large negative z has no finite y, so it is left out.
        z = z[z >= -1e-4]
    z = z[z != of_minus_infinity(name, param, dtype)]
    y, dy = invert(z, torch.ones_like(z), name, param)
    assert y.isfinite().all()
    assert dy.isfinite().all()


@pytest.mark.parametrize("case", [case for case in NAMES if find(NAMES[case][0]).costly])
def test_float32_values_anywhere_invert_to_finite_values(case, device):
    name, param = NAMES[case]
    patterns = torch.arange(-(2**31), 2**31, 2**12 + 1, dtype=torch.int64, device=device).to(torch.int32)
    edges = torch.tensor(
        [-0.27846456, -0.27846453, -0.375, -0.1699712, -0.30884342, 0.0, -0.0, 1e-45, -1e-45, 3.4e38, -3.4e38],
        device=device,
    )
    near = torch.nextafter(edges, torch.zeros_like(edges))
    z = torch.cat([patterns.view(torch.float32), edges, near])
    z = z[z.isfinite() & (z != of_minus_infinity(name, param, torch.float32))]
    y, dy = invert(z, torch.ones_like(z), name, param)
    assert y.isfinite().all()
    assert dy.isfinite().all()


@pytest.mark.parametrize("name", ["relu", "silu", "hardswish", "gelu", "gelu_tanh", "mish"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mode", ["no_grad", "eval"])
def test_without_backward_the_result_is_torchs_activation(mode, dtype, name, device):
    """On the CPU the results are equal bit for bit."""
    x = 3 * torch.randn(50, 7, 9, 3, device=device).to(dtype)
    running = torch.zeros(7, device=device), torch.ones(7, device=device)
    running = tuple(t.to(stats_dtype(dtype)) for t in running)

    def call(activation):
        return inplace_abn(x.clone(), None, None, *running, mode == "no_grad", 0.0, activation=activation)

    with torch.no_grad():
        y = call("identity")
        z, expected = call(name), activate(y, name, 0.0)
    if device.type == "cpu":
        assert torch.equal(z, expected)
    else:
        # On CUDA torch's hardswish multiplies by a sixth in float's precision.
        eps = torch.finfo(torch.float32 if name == "hardswish" and dtype == torch.float64 else dtype).eps
        torch.testing.assert_close(z, expected, rtol=4 * eps, atol=0)
    if name == "relu":
        assert (call(name) >= 0).all()


@pytest.mark.parametrize(
    ("name", "largest"), [("relu", -3.0), ("hardswish", -3.0), ("gelu", -13.0), ("gelu_tanh", -13.0)]
)
def test_zeros_in_training_are_zero_to_the_next_layer(name, largest, device):
    y = largest - torch.logspace(-1, 3, 100, dtype=torch.float64, device=device)
    for dtype, bound in [
        (torch.float64, 1e-80),
        (torch.float32, 1e-14),
        (torch.bfloat16, 1e-14),
        (torch.float16, 1e-4),
    ]:
        z = act(y.to(dtype), name, 0.0, invertible=True).double()
        assert (z.abs() <= bound * y.abs()).all()
        assert (z != 0).all()


@pytest.mark.parametrize("name", ["silu", "mish"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_far_below_the_minimum_values_and_gradients_vanish(dtype, name, device):
    """However large y is. In float32 exp(-y) is infinite below -88, and in float64 below -710."""
    largest = -torch.finfo(dtype).max
    values = [-87.5, -88.5, -89.0, -100.0, -720.0, -6e4, max(largest, -1e30), largest]
    z = act(torch.tensor(values, dtype=dtype, device=device), name, 0.0, invertible=True)
    assert (z.double().abs() <= max(1e-35, torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps)).all()
    recovered, derivative = invert(z, torch.ones_like(z), name, 0.0)
    assert (recovered <= -10).all()
    assert recovered.isfinite().all()
    assert (derivative.abs() <= 1e-4).all()


@pytest.mark.parametrize("case", NAMES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_stays_nan_and_infinity_does_not_hide(dtype, case, device):
    name, param = NAMES[case]
    y = torch.tensor([float("nan"), float("inf")], dtype=dtype, device=device)
    for invertible in (True, False):
        z = act(y, name, param, invertible)
        assert z[0].isnan()
        # torch's own gelu makes NaN of infinity in some dtypes.
        expected = y[1] if invertible else activate(y, name, param)[1]
        torch.testing.assert_close(z[1], expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", ["silu", "hardswish", "gelu", "gelu_tanh", "mish"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_tags_of_16_bits_favour_neither_larger_nor_smaller_values(dtype, name, device):
    torch.manual_seed(0)
    x = torch.linspace(-4, 4, 801, device=device).to(dtype).view(-1, 1).repeat(1, 64)
    mean = torch.randn(64, dtype=stats_dtype(dtype), device=device) / 8
    z, one = x.clone(), torch.ones_like(mean)
    ops.forward(z, mean, one - 0.5, None, None, None, 0.5, 0, code(name), 0.0, True)
    y = x.double() - mean.double()
    exact, minimum = activate(y, name, 0.0), find(name).special[0]
    units = torch.ldexp(z.double() - exact, (8 if dtype == torch.bfloat16 else 11) - torch.frexp(exact)[1])
    # Next to the minimum the values crowd on one side; next to zero the formulas' own errors are units.
    usual = (exact < -0.1) & ((y - minimum).abs() > 0.4)
    for side in (usual & (y > minimum), usual & (y < minimum)):
        assert units[side].mean().abs() < 0.03
        assert units[side].abs().max() < 1.01


@pytest.mark.parametrize("name", ["silu", "hardswish", "gelu", "gelu_tanh", "mish"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_y_of_16_bits_is_the_middle_of_those_that_are_stored_as_its_z(dtype, name, device):
    minimum = find(name).special[0]
    exact = torch.linspace(minimum - 0.4, minimum + 0.4, 800_001, dtype=torch.float64, device=device)
    x = exact.to(dtype)
    rest = (exact - x.double()).to(dtype)
    y = (x.double() + rest.double()).view(-1)
    z, one = x.clone().view(-1, 1), torch.ones(1, dtype=stats_dtype(dtype), device=device)
    ops.forward(z, 0 * one, one - 0.5, None, None, rest.view(-1, 1), 0.5, 0, code(name), 0.0, True)
    cells, cell = z.view(-1).view(torch.int16).unique(return_inverse=True)
    recovered = ops.run(ops.inverse, [], cells.view(dtype).view(-1, 1), code(name), 0.0).view(-1).double()
    ends = [y.new_zeros(len(cells)).scatter_reduce_(0, cell, y, how, include_self=False) for how in ("amin", "amax")]
    middle, width = (ends[0] + ends[1]) / 2, ends[1] - ends[0]
    inner = (ends[0] > y.min()) & (ends[1] < y.max()) & (width > 0.004)
    assert inner.sum() > 8
    # The formulas are exact to about 1e-4 in bfloat16, 1e-6 in float16.
    assert ((recovered - middle).abs() <= 0.03 * width + (3e-4 if dtype == torch.bfloat16 else 1e-5))[inner].all()


@pytest.mark.parametrize("name", ["silu", "hardswish", "gelu", "gelu_tanh", "mish"])
def test_the_inverses_of_float16_have_no_error_with_a_direction(name, device):
    """The error of a fit of 1e-4 keeps its sign over long stretches. Here y is 0.5 to 4, where roundoff is 5e-4."""
    y = torch.linspace(0.5, 4, 400_001, dtype=torch.float64, device=device)
    x = y.half()
    rest = (y - x.double()).half()
    z, one = x.clone().view(-1, 1), torch.ones(1, device=device)
    ops.forward(z, 0 * one, one - 0.5, None, None, rest.view(-1, 1), 0.5, 0, code(name), 0.0, True)
    error = ops.run(ops.inverse, [], z, code(name), 0.0).view(-1).double() - (x.double() + rest.double())
    for part in error.chunk(16):
        assert part.mean().abs() < 0.1 * part.square().mean().sqrt()


@pytest.mark.parametrize("name", ["silu", "hardswish", "gelu", "gelu_tanh", "mish"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_rounded_y_comes_back_itself_where_no_other_one_has_its_z(dtype, name, device):
    every = torch.arange(1 << 16, dtype=torch.int32, device=device).to(torch.int16).view(dtype)
    y = every[every.isfinite() & (every.abs() < 20)]
    z = act(y, name, OF_ROUNDED, invertible=True)
    recovered = ops.run(ops.inverse, [], z.view(-1, 1), code(name), OF_ROUNDED).view(-1)
    _, cell, counts = z.view(torch.int16).unique(return_inverse=True, return_counts=True)
    exact = activation_backward(y.double(), torch.ones(()), name, 0.0)
    plain = (counts[cell] == 1) & (exact > 0.9)
    assert plain.sum() > 500
    # A y that is just between two others may be taken for its neighbour.
    assert (recovered == y)[plain].double().mean() > 0.99
    slopes = invert(z, torch.ones_like(z), name, OF_ROUNDED)[1].double()
    assert ((slopes - exact).abs() <= 2 * torch.finfo(dtype).eps)[plain].all()
