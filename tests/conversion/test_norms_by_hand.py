"""Norms that a class computes by hand. They do not keep their input for backward, as torch's layer norm does."""

import copy

import pytest
import torch
import torch.nn.functional as F
from layer_norms import RMSNormOfLlama
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from inplace_abn import convert, guard

SIZE = 16


class NormByHand(nn.Module):
    """A norm that does not keep its input: it keeps what it subtracts the mean from."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(SIZE)), nn.Parameter(torch.zeros(SIZE))
        self.eps = 1e-6

    def forward(self, x):
        centred = x - x.mean(1, keepdim=True)
        xhat = centred * torch.rsqrt(centred.pow(2).mean(1, keepdim=True) + self.eps)
        return self.weight[:, None, None] * xhat + self.bias[:, None, None]


class OfWrittenInput(nn.Module):
    """A norm whose input is written to."""

    def __init__(self, stem, norm):
        super().__init__()
        self.stem, self.norm = stem, norm

    def forward(self, x):
        x = self.stem(x)
        y = self.norm(x)
        return y + F.leaky_relu_(x, 0.1)


def test_a_write_to_the_input_of_a_norm_by_hand_is_an_error_that_names_it_and_the_next_step_works():
    model = convert(OfWrittenInput(nn.Conv2d(3, SIZE, 3), NormByHand()))
    with pytest.raises(RuntimeError, match="the input of norm has been modified in place"):
        model(torch.randn(2, 3, 8, 8)).sum().backward()
    model(torch.randn(2, 3, 8, 8)).sum().backward()


@pytest.mark.parametrize(
    "around",
    [
        lambda model, x: checkpoint(model, x, use_reentrant=False),
        lambda model, x: hooked(model, x, saved_tensors_hooks(lambda t: t, lambda t: t)),
        lambda model, x: hooked(model, x, save_on_cpu()),
    ],
    ids=["checkpoint", "hooks", "on the CPU"],
)
@pytest.mark.parametrize("written", ["input", "output"])
def test_under_saved_tensor_hooks_a_write_is_an_error_that_names_it_and_the_next_step_works(written, around):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.norm, self.head = nn.Conv2d(3, SIZE, 3), NormByHand(), nn.Linear(6, 6)

        def forward(self, x):
            x = self.stem(x)
            y = self.norm(x)
            # A linear layer keeps a copy of what is transposed.
            z = y + 1 if written == "input" else self.head(y.transpose(2, 3))
            other = x if written == "input" else y
            other.mul_(2)
            return torch.sigmoid(z + other)

    native = Net()
    model, x = convert(copy.deepcopy(native)), torch.randn(2, 3, 8, 8)
    with pytest.raises(RuntimeError, match=f"the {written} of norm has been modified in place"):
        around(model, x).sum().backward()
    for step in range(3):
        for each in (native, model):
            each.zero_grad()
            (around if step else lambda net, x: net(x))(each, x).square().sum().backward()
        torch.testing.assert_close(model.norm.weight.grad, native.norm.weight.grad)
        torch.testing.assert_close(model.stem.weight.grad, native.stem.weight.grad)


def hooked(model, x, context):
    with context:
        return model(x)


@pytest.mark.parametrize("reader", [nn.LogSigmoid(), nn.GLU()], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parameters_narrower_than_the_output_have_gradients_of_their_dtype(dtype, reader):
    class WideNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.rand(SIZE) + 0.5), nn.Parameter(torch.randn(SIZE))
            self.eps = 1e-6

        def forward(self, x):
            x = x.float()
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight + self.bias

    native = nn.Sequential(nn.Linear(8, SIZE), WideNorm(), reader).to(dtype)
    converted = convert(copy.deepcopy(native))
    for _ in range(4):
        x, found = torch.randn(32, 8).to(dtype), []
        for model in (native, converted):
            model.zero_grad()
            model(x).sum().backward()
            found.append([p.grad for p in model.parameters()])
        for mine, torchs in zip(found[1], found[0], strict=True):
            assert mine.dtype == dtype
            assert (mine - torchs).norm() <= 2.0**-6 * torchs.norm()
        guard.generations.advance()
    assert converted[1]._record.outcome.in_place


def test_a_class_that_scales_by_the_magnitude_of_its_weight_is_torchs():
    class NormByMagnitude(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.randn(SIZE)), 1e-6

        def forward(self, x):
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight.square().sqrt()

    native = nn.Sequential(nn.Linear(8, SIZE), NormByMagnitude(), nn.Linear(SIZE, 2))
    converted, x = convert(copy.deepcopy(native)), torch.randn(32, 8)
    for model in (native, converted):
        model(x).square().sum().backward()
    for mine, torchs in zip(converted.parameters(), native.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, torchs.grad)
    assert not converted[1]._record.outcome.in_place


@pytest.mark.parametrize("norm", [NormByHand(), nn.RMSNorm(8)], ids=["by hand", "rms norm"])
def test_a_write_to_an_input_that_needs_no_gradient_is_no_error(norm):
    """torch keeps products of the input only."""
    native = OfWrittenInput(nn.Conv2d(3, SIZE, 1).requires_grad_(False), norm)
    converted = convert(copy.deepcopy(native))
    for _ in range(4):
        x = torch.randn(2, 3, 8, 8)
        for model in (native, converted):
            model.zero_grad()
            model(x).square().sum().backward()
        torch.testing.assert_close(converted.norm.weight.grad, native.norm.weight.grad)
        guard.generations.advance()


@pytest.mark.parametrize("kind", [nn.RMSNorm, RMSNormOfLlama])
@pytest.mark.parametrize("size", [0.01, 1.0, 300.0])
def test_in_float16_an_rms_norm_whose_output_nothing_keeps_has_the_gradients_that_torchs_has(kind, size):
    """Squares of the input overflowed and underflowed."""
    native = nn.Sequential(kind(SIZE), nn.Tanh()).half()
    converted = convert(copy.deepcopy(native))
    for _ in range(3):
        x, dy, gradients = size * torch.randn(64, SIZE), torch.randn(64, SIZE), []
        for model in (copy.deepcopy(native).double(), native, converted):
            dtype = model[0].weight.dtype
            t = x.half().to(dtype).requires_grad_()
            model.zero_grad()
            model(t).backward(dy.half().to(dtype))
            gradients.append([t.grad.double(), model[0].weight.grad.double()])
        for exact, of_torch, found in zip(*gradients, strict=True):
            # The class of Llama rounds in between.
            assert (found - exact).norm() <= 1.1 * (of_torch - exact).norm() + 1e-3 * exact.norm()
        guard.generations.advance()


def test_where_nothing_keeps_an_output_wider_than_the_input_gradients_are_as_exact():
    """Gradients of the output were rounded to the dtype of the input."""
    native = nn.Sequential(nn.Conv2d(3, SIZE, 1), NormByHand())
    converted, x, dy = convert(copy.deepcopy(native)), torch.randn(32, 3, 8, 8), torch.randn(32, SIZE, 8, 8)
    for _ in range(3):
        for model in (native, converted):
            model.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                y = model(x)
            assert y.dtype is torch.float32
            y.backward(dy)
        terms = dy.abs().sum((0, 2, 3))
        assert ((converted[1].bias.grad - native[1].bias.grad).abs() <= 1e-6 * terms).all()
        # In torch the values less their mean are rounded to bfloat16.
        assert ((converted[1].weight.grad - native[1].weight.grad).abs() <= 5e-4 * terms).all()
        guard.generations.advance()
