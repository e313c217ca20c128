"""How exact the gradients of a scaled linear layer are, and under autocast."""

import copy

import pytest
import torch
import torch.nn.functional as F
from scaled_layers import SIZE, Net, scales, times
from torch import nn

from inplace_abn import convert, guard
from inplace_abn.autograd.scale import Exchange, Linear, linear, scaled


@pytest.mark.parametrize("bias", [True, False])
def test_gradients_and_their_gradients_are_right(bias):
    def function(h, weight, bias, gamma, is_exchanged=True):
        exchange = Exchange()
        given = Linear(h, weight, bias)
        u = linear(given, F.linear(*given).detach(), exchange)
        return scaled(
            u, gamma, u.detach() * gamma.detach(), given, tuple(range(u.dim())), exchange if is_exchanged else None
        )

    shapes = [(2, 3, 4), (5, 4), (5,), (5,)]
    given = [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes]
    if not bias:
        given[2] = None
    assert torch.autograd.gradcheck(function, given)
    assert torch.autograd.gradgradcheck(function, given)
    assert torch.autograd.gradcheck(lambda *args: function(*args, is_exchanged=False), given)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_its_gradients_are_as_exact_as_torchs(dtype):
    """The gradient follows the input. Errors count beside those of torch, relative to float64."""
    torch.manual_seed(0)
    native = Net(times).to(dtype)
    x = (torch.randn(16, 32, SIZE) + 0.5).to(dtype)
    converted = convert(copy.deepcopy(native))
    for _ in range(2):
        converted(x.clone().requires_grad_()).float().sum().backward()
        guard.generations.advance()
    found = []
    for model in (native, converted, copy.deepcopy(native).double()):
        model.zero_grad()
        given = x.to(model.gamma.dtype, copy=True).requires_grad_()
        z = model(given)
        z.backward((x + 1).to(z.dtype))
        found.append((z, given.grad, *(p.grad for p in model.parameters() if p.grad is not None)))
    # In 16 bits the product that stands for the output has too few digits.
    assert scales(converted) == (["fc1"] if dtype == torch.float32 else [])
    assert torch.equal(found[0][0], found[1][0])
    for torchs, own, right in zip(*found, strict=True):
        errors = [float((t.double() - right).norm() / right.norm()) for t in (torchs, own)]
        assert errors[1] <= 6 * errors[0], errors


def test_under_autocast_it_trains_as_torchs():
    def run(m, x):
        with torch.autocast("cpu", torch.bfloat16):
            return x + m.fc2(F.gelu(m.fc1(x))) * m.gamma

    torch.manual_seed(0)
    native = Net(run)
    converted = convert(copy.deepcopy(native))
    x = torch.randn(8, 16, SIZE)
    for _ in range(3):
        for model in (native, converted):
            model.zero_grad()
            model(x).float().square().sum().backward()
        guard.generations.advance()
    assert scales(converted) == ["fc2"]
    for p, q in zip(native.parameters(), converted.parameters(), strict=True):
        if p.grad is not None:
            assert (p.grad - q.grad).norm() <= 0.02 * p.grad.norm()


def test_complex_layers_are_torchs():
    class Complex(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 6, dtype=torch.complex128)
            self.gamma = nn.Parameter(torch.randn(6, dtype=torch.complex128))

        def forward(self, x):
            return self.fc(x) * self.gamma

    native = Complex()
    converted = convert(copy.deepcopy(native))
    x = torch.randn(3, 4, dtype=torch.complex128, requires_grad=True)
    for _ in range(2):
        for model in (native, converted):
            model.zero_grad()
            model(x).abs().square().sum().backward()
        torch.testing.assert_close(converted.gamma.grad, native.gamma.grad)
        guard.generations.advance()


def test_a_gradient_beyond_float16_under_autocast_is_as_with_torch():
    native = Net(times)
    with torch.no_grad():
        native.gamma.fill_(1e-5)
    converted = convert(copy.deepcopy(native))
    x = torch.randn(2, 7, SIZE).half().requires_grad_()
    for _ in range(2):
        for model in (native, converted):
            model.zero_grad()
            with torch.autocast("cpu", torch.float16):
                z = model.fc1(x) * model.gamma
            (z * 1e5).sum().backward()
        torch.testing.assert_close(converted.gamma.grad, native.gamma.grad, rtol=1e-2, atol=1.0)
        guard.generations.advance()


@pytest.mark.parametrize("compiler", [None, "aot_eager"])
@pytest.mark.parametrize("autocast", [False, True])
def test_where_the_bias_cancels_the_product_its_gradient_is_nearly_as_exact_as_torchs(autocast, compiler):
    """The sums of G * W and of b * dz lost the digits of the output where these cancel and dz has a mean."""
    torch.manual_seed(0)
    h, dz = 30 + 0.5 * torch.randn(784, SIZE), 1 + torch.randn(784, SIZE)
    native = Net(lambda m, x: m.fc1(x) * m.gamma)
    with torch.no_grad():
        native.fc1.bias.copy_(-(native.fc1.weight.double() @ h.double().mean(0)))
    converted, found = convert(copy.deepcopy(native)), []
    for model, dtype in (native, torch.float32), (converted, torch.float32), (copy.deepcopy(native), torch.float64):
        model.to(dtype)
        run = torch.compile(model, backend=compiler) if compiler and model is converted else model
        for _ in range(3):
            model.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast and dtype == torch.float32):
                z = run(h.to(dtype).requires_grad_())
            z.backward(dz.to(z.dtype))
        found.append(model.gamma.grad.double())
    errors = [float((t - found[2]).norm() / found[2].norm()) for t in found[:2]]
    assert errors[1] <= 4 * errors[0], errors
