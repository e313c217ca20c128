"""Backward uses the weight and bias of its forward pass, whatever is written to the parameters in between."""

import copy

import pytest
import torch
import torch.nn.functional as F
from cases import covering
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from inplace_abn import InPlaceABN, InPlaceInstanceNorm, convert, inplace_abn

pytestmark = pytest.mark.usefixtures("one_thread")

C = 4


def by_data(p):
    p.data.add_(0.5)


def by_other_memory(p):
    p.data = p.data * 3 + 1


@torch.no_grad()
def without_grad(p):
    p.add_(0.5)


@torch.no_grad()
def by_copy(p):
    p.copy_(torch.full_like(p, 7.0))


def by_an_optimizer(p):
    p.grad = torch.ones_like(p)
    torch.optim.SGD([p], lr=0.7).step()
    p.grad = None


def by_freed_memory(p):
    p.untyped_storage().resize_(0)


WRITES = [by_data, by_other_memory, without_grad, by_copy, by_an_optimizer, by_freed_memory]


class OwnFunction(torch.autograd.Function):
    """A consumer that bypasses ``__torch_function__``."""

    @staticmethod
    def forward(ctx, y):
        ctx.save_for_backward(y)
        return y.sin()

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0].cos()


class WithResidual(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(C, C, 1), nn.BatchNorm2d(C)

    def forward(self, x):
        return F.relu(self.norm(self.conv(x)) + x)


def converted(*layers):
    model = nn.Sequential(nn.Conv2d(C, C, 1), *layers, nn.Conv2d(C, C, 1))
    convert(model)
    return model


class Own(nn.Module):
    def forward(self, y):
        return OwnFunction.apply(y)


NETS = {
    "in place": lambda: nn.Sequential(nn.Conv2d(C, C, 1), InPlaceABN(C, activation="elu")),
    "in place, signed": lambda: nn.Sequential(nn.Conv2d(C, C, 1), InPlaceABN(C, activation="relu", signed_weight=True)),
    "kept input": lambda: InPlaceABN(C, activation="silu", overwrite_input=False),
    "instances": lambda: nn.Sequential(nn.Conv2d(C, C, 1), InPlaceInstanceNorm(C, affine=True)),
    "converted": lambda: converted(nn.BatchNorm2d(C), nn.ReLU()),
    "converted, residual": lambda: convert(nn.Sequential(nn.Conv2d(C, C, 1), WithResidual())),
    "converted instances": lambda: converted(nn.InstanceNorm2d(C, affine=True), nn.SiLU()),
    "converted, unseen": lambda: converted(nn.BatchNorm2d(C), Own()),
}


def net(name, training, dtype=torch.float64):
    torch.manual_seed(0)
    found = NETS[name]()
    model = found if isinstance(found, nn.Module) else found[0]
    for p in model.parameters():
        p.data.add_(torch.randn_like(p) * 0.3)
    for module in model.modules():
        if getattr(module, "running_var", None) is not None:
            module.running_var.uniform_(0.5, 2)
    return model.to(dtype).train(training)


def norm_of(model):
    return next(m for m in model.modules() if getattr(m, "weight", None) is not None and m.weight.dim() == 1)


def run(model, x, write, which, create_graph=False, hooked=False):
    """The gradients of all parameters and x, with a write to the norm's parameter before backward."""
    # First steps measure, and tell a converted norm what follows. One that nothing follows is torch's from then on.
    if not any(isinstance(module, Own) for module in model.modules()):
        for _ in range(2):
            model(x * 1).sum().backward()
            guard_step()
    leaves = [x, *model.parameters()]
    if hooked:
        with saved_tensors_hooks(lambda t: t, lambda t: t):
            y = model(x * 1)
    else:
        y = model(x * 1)
    loss = (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y) + y.square()).sum()
    if write is not None:
        write(getattr(norm_of(model), which))
    if create_graph:
        first = torch.autograd.grad(loss, leaves, create_graph=True)
        found = torch.autograd.grad(sum(g.square().sum() for g in first), leaves)
    else:
        found = torch.autograd.grad(loss, leaves)
    return found


def guard_step():
    p = torch.zeros(1, requires_grad=True)
    p.grad = torch.zeros(1)
    torch.optim.SGD([p], lr=0.1).step()


# Where nobody sees what follows, the norm is torch's, which saves the weight itself.
BY_VALUE = [
    (name, which) for name in NETS for which in ("weight", "bias") if (name, which) != ("converted, unseen", "weight")
]


@covering(2, parameter=BY_VALUE, training=[True, False], write=WRITES)
def test_a_write_to_a_parameter_before_backward_does_not_matter(parameter, training, write):
    """``bias.data.add_`` made gradients wrong, and ``bias.add_`` without grad was an error where torch has none."""
    name, which = parameter
    x = torch.randn(3, C, 5, 4, dtype=torch.float64, requires_grad=True)
    model = net(name, training)
    expected = run(copy.deepcopy(model), x, None, which)
    torch.testing.assert_close(run(model, x, write, which), expected, rtol=1e-12, atol=1e-12)


@covering(2, parameter=BY_VALUE, hooked=[False, True], write=WRITES)
def test_second_derivatives_have_the_values_of_the_forward_pass_too(parameter, hooked, write):
    name, which = parameter
    x = torch.randn(3, C, 3, 2, dtype=torch.float64, requires_grad=True)
    model = net(name, True)
    expected = run(copy.deepcopy(model), x, None, which, create_graph=True)
    actual = run(model, x, write, which, create_graph=True, hooked=hooked)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_a_computed_weight_that_is_overwritten_leaves_second_derivatives_right():
    x, p, q = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((3, C, 5), C, C))

    def second(overwrites):
        weight, bias = p * 1.5, q * 2
        z = inplace_abn(x * 1, weight, bias, None, None, activation="elu", activation_param=1.0)
        if overwrites:
            weight.mul_(3)
            bias.zero_()
        first = torch.autograd.grad(z.square().sum(), [x, p, q], create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), [x, p, q])

    torch.testing.assert_close(second(True), second(False), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("weight_dtype", "bias_dtype"), [(torch.float32, torch.bfloat16), (torch.bfloat16, None)])
def test_parameters_may_have_two_dtypes_or_be_missing(weight_dtype, bias_dtype):
    x = torch.randn(4, C, 6).bfloat16().requires_grad_()
    weight = torch.rand(C).to(weight_dtype).requires_grad_()
    bias = None if bias_dtype is None else torch.randn(C).to(bias_dtype).requires_grad_()
    leaves = [t for t in (x, weight, bias) if t is not None]

    def gradients(writes):
        z = inplace_abn(x * 1, weight, bias, None, None)
        if writes:
            for t in leaves[1:]:
                t.data.add_(1)
        found = torch.autograd.grad(z.float().square().sum(), leaves)
        if writes:
            for t in leaves[1:]:
                t.data.sub_(1)
        return found

    expected = gradients(False)
    actual = gradients(True)
    assert [g.dtype for g in actual] == [t.dtype for t in leaves]
    assert all(map(torch.equal, actual, expected))


def test_a_frozen_weight_gets_no_gradient_and_second_derivatives_are_right():
    x = torch.randn(3, C, 5, dtype=torch.float64, requires_grad=True)
    weight, bias = torch.rand(C, dtype=torch.float64), torch.randn(C, dtype=torch.float64, requires_grad=True)
    z = inplace_abn(x * 1, weight, bias, None, None)
    first = torch.autograd.grad(z.pow(3).sum(), [x, bias], create_graph=True)
    weight.add_(1)
    second = torch.autograd.grad(sum(g.square().sum() for g in first), [x, bias])
    assert all(g.isfinite().all() for g in second)
    assert weight.grad is None
