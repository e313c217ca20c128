"""The dtypes, shapes, layouts and activations of the tests, with tolerances and an oracle."""

import itertools
import os
import shutil
from pathlib import Path

import maths
import pytest
import torch

from inplace_abn.activations import TYPICAL, find

# The installed package needs no compiler.
needs_compiler = pytest.mark.skipif(shutil.which(os.environ.get("CXX", "c++")) is None, reason="needs a C++ compiler")
# The emulated device is built from the CUDA kernels. A copy of the tests may lack them.
needs_kernels = [
    needs_compiler,
    pytest.mark.skipif(
        not (Path(__file__).parents[2] / "src/kernels/cuda").is_dir(), reason="needs the kernels' sources"
    ),
]
INDUCTOR = pytest.param("inductor", marks=needs_compiler)

# The relative error in the 2-norm that a result in this dtype may have against float64.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 1e-2}
DTYPES = list(TOLERANCE)


def tolerance(dtype, activation):
    """The tolerance of results and gradients. hardswish has a larger one in 16 bits, because its derivative jumps at -3
    and 3, and rounding decides on which side a value is."""
    return TOLERANCE[dtype] * (4 if activation == "hardswish" and dtype in (torch.bfloat16, torch.float16) else 1)


# Pairs of name and activation_param. There is at least one for each way in which kernels and autograd treat
# activations.
ACTIVATIONS = [
    ("identity", 0.0),
    ("leaky_relu", 0.2),
    ("leaky_relu", 0.0),
    ("elu", 1.3),
    ("relu", 0.0),
    ("silu", 0.0),
    ("hardswish", 0.0),
]
# The other activations differ in their maths only, so they are for tests of the maths.
ALL_ACTIVATIONS = [*ACTIVATIONS, *(what for what in TYPICAL if what[0] not in dict(ACTIVATIONS))]


def param_of(activation, param):
    """The parameter, for an activation that has one."""
    return param if find(activation).param else 0.0


SHAPES = [
    (4, 5),
    (1000, 3),  # far more values than channels, one value wide
    (4, 5, 7),
    (3, 8, 6, 5),
    (2, 70, 3, 3),  # more channels than a vector holds, and no multiple of them
    (5, 100, 7, 7),  # short planes, which are walked several channels at a time
    (130, 33, 6, 6),  # the same in more than one panel
    (2, 300, 1, 1),  # more channels than values per channel
    (2, 3, 75, 67),  # few channels, planes longer than a panel
    (1, 1, 100, 50),
    (3, 2, 4, 5, 6),
]

LAYOUTS = {
    "contiguous": lambda shape: torch.empty(shape),
    "channels_last": lambda shape: torch.empty([shape[0], *shape[2:], shape[1]]).movedim(-1, 1),
    "channel slice": lambda shape: torch.empty([shape[0], shape[1] + 3, *shape[2:]])[:, 1:-2],
    "channels_last slice": lambda shape: torch.empty([shape[0], *shape[2:], shape[1] + 3])[..., 1:-2].movedim(-1, 1),
    "transposed": lambda shape: torch.empty(shape[::-1]).permute(*reversed(range(len(shape)))),
    "strided": lambda shape: torch.empty([*shape[:-1], 2 * shape[-1]])[..., ::2],
}


def label(value):
    return getattr(value, "__name__", None) or str(value)


def rows_covering(share, *axes):
    """One in ``share`` of the combinations of ``axes``. All combinations of the other axes are still among them if one
    axis has ``share`` values or more."""
    every = itertools.product(*(enumerate(axis) for axis in axes))
    return [[value for _, value in row] for row in every if sum(i for i, _ in row) % share == 0]


def covering(share, **axes):
    """Runs a test with `rows_covering` of ``axes``."""
    return pytest.mark.parametrize(list(axes), rows_covering(share, *axes.values()), ids=label)


def laid_out(values, layout):
    """``values`` in memory of the named layout."""
    result = LAYOUTS[layout](list(values.shape)).to(dtype=values.dtype, device=values.device)
    if result.shape != values.shape:
        raise AssertionError((result.shape, values.shape))
    if layout in ("channel slice", "channels_last slice", "strided"):
        result = torch.empty_strided(
            values.shape, LAYOUTS[layout](list(values.shape)).stride(), dtype=values.dtype, device=values.device
        )
    return result.copy_(values)


def relative_error(actual, expected):
    """The relative error in the 2-norm, against a float64 tensor."""
    if expected.numel() == 0:
        return 0.0
    difference = (actual.detach().double() - expected.detach()).norm()
    return (difference / expected.detach().norm().clamp_min(1e-30)).item()


def assert_matches(actual, expected, allowed):
    for name, value in expected.items():
        if value is not None:
            assert relative_error(actual[name], value) < allowed, name


def stats_dtype(dtype):
    return torch.float64 if dtype == torch.float64 else torch.float32


def parameters(channels, dtype, device="cpu", affine="both"):
    """Returns weight, bias, running_mean and running_var. The weight has both signs and is well away from zero."""
    sign = torch.where(torch.rand(channels, device=device) < 0.5, -1.0, 1.0)
    weight = ((0.5 + torch.rand(channels, device=device)) * sign).to(dtype)
    bias = torch.randn(channels, device=device).to(dtype) * 0.5
    running_mean = torch.randn(channels, device=device).to(dtype) * 0.1
    running_var = (0.5 + torch.rand(channels, device=device)).to(dtype)
    return (
        weight if affine in ("both", "weight") else None,
        bias if affine in ("both", "bias") else None,
        running_mean,
        running_var,
    )


def oracle(x, dz, weight, bias, running_mean, running_var, **settings):
    """Returns z, dx, dweight, dbias and the updated running statistics, in float64 by autograd of the reference."""
    leaves = [None if t is None else t.detach().double().requires_grad_() for t in (x, weight, bias)]
    running = [t.detach().double().clone() for t in (running_mean, running_var)]
    z = maths.forward(*leaves, *running, **settings)
    gradients = torch.autograd.grad(z, [t for t in leaves if t is not None], dz.double())
    found = iter(gradients)
    dx, dweight, dbias = [None if t is None else next(found) for t in leaves]
    return {"z": z, "dx": dx, "dweight": dweight, "dbias": dbias, "running_mean": running[0], "running_var": running[1]}
