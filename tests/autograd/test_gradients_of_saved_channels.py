"""Calls that save xhat of some channels, against finite differences."""

import pytest
import torch
from cases import covering
from torch.autograd import gradcheck, gradgradcheck
from torch.autograd.graph import save_on_cpu

from inplace_abn.functions import run
from inplace_abn.settings import AT_LEAST_EPS, MAGNITUDE, WEIGHT, Channels, Operands, Settings

CHANNELS = 5
SAVED = Channels([0, 2, 3], CHANNELS)
ACTIVATIONS = [("identity", 0.0), ("leaky_relu", 0.1), ("elu", 1.0), ("silu", 0.0), ("hardswish", 0.0), ("gelu", 0.0)]


def leaves(scale, layout):
    torch.manual_seed(0)
    x = torch.randn(3, CHANNELS, 2, 3, dtype=torch.float64).to(memory_format=layout)
    residual = torch.randn_like(x)
    weight, bias = (torch.randn(CHANNELS, dtype=torch.float64) for _ in range(2))
    # Finite differences must not cross the corner of |weight| at zero.
    weight[[0, 2]] = torch.tensor([0.0 if scale == WEIGHT else 1e-2, -1e-2], dtype=torch.float64)
    return [t.requires_grad_() for t in (x, weight, bias, residual)]


def caller(kind, scale, activation, overwrites):
    mean, var = torch.randn(CHANNELS, dtype=torch.float64), torch.rand(CHANNELS, dtype=torch.float64) + 0.5
    shared = int(kind == "instance")
    settings = Settings(*activation, 1e-5, scale, kind != "frozen", None, shared, verbatim=SAVED)

    def call(x, weight, bias, residual):
        running = (mean, var) if kind == "frozen" else (None, None)
        return run(x * 1, Operands(weight, bias, residual, *running), settings, overwrites)

    return call


@covering(
    3,
    layout=[torch.contiguous_format, torch.channels_last],
    kind=["batch", "frozen", "instance"],
    scale=[MAGNITUDE, AT_LEAST_EPS, WEIGHT],
    activation=ACTIVATIONS,
    overwrites=[True, False],
)
def test_gradients_are_those_of_finite_differences(layout, kind, scale, activation, overwrites):
    assert gradcheck(caller(kind, scale, activation, overwrites), leaves(scale, layout))


@pytest.mark.parametrize("kind", ["batch", "instance"])
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda a: a[0])
def test_gradients_of_gradients_are_those_of_finite_differences(kind, activation):
    assert gradgradcheck(caller(kind, WEIGHT, activation, True), leaves(WEIGHT, torch.contiguous_format))


def test_channels_may_be_asked_for_in_inference_mode_first():
    """Hooks could not save them in the next training step: they were tensors of inference mode."""
    settings = Settings("relu", 0.0, 1e-5, WEIGHT, True, None, verbatim=Channels([0, 2, 3], CHANNELS))
    x, weight, bias, _ = leaves(WEIGHT, torch.contiguous_format)
    operands = Operands(weight, bias)
    with torch.inference_mode():
        run(x.detach().clone(), operands, settings, True)
    with save_on_cpu():
        z = run(x * 1, operands, settings, True)
    z.sum().backward()
    expected = torch.autograd.grad(run(x * 1, operands, settings, True).sum(), weight)
    torch.testing.assert_close(weight.grad, *expected)
