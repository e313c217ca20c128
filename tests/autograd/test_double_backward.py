"""``create_graph=True``: gradients of gradients are those of the out-of-place formulas, and nothing is overwritten."""

from contextlib import contextmanager, nullcontext

import cases
import maths
import pytest
import torch
from cases import covering, param_of, parameters
from torch import nn
from torch.autograd import gradcheck, gradgradcheck
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from inplace_abn import ABN, InPlaceABN, inplace_abn

# The finite differences of gradgradcheck take a time that is quadratic in the number of values.
SHAPE = (2, 2, 2, 3)
ALL_ACTIVATIONS = [a for a in cases.ALL_ACTIVATIONS if a != ("leaky_relu", 0.0)]
ACTIVATIONS = ALL_ACTIVATIONS[:6]
EPS = 1e-3


def leaves(device, affine="both", shape=SHAPE):
    """Returns x, weight and bias as leaves, or None for those that ``affine`` leaves out, and the running
    statistics."""
    x = torch.randn(shape, dtype=torch.float64, device=device)
    weight, bias, *running = parameters(shape[1], torch.float64, device, affine)
    return [None if t is None else t.requires_grad_() for t in (x, weight, bias)], running


def call(function, tensors, running, training=True, **options):
    """Calls ``function`` on a fresh copy of the input, so that the input survives. Running statistics are copied,
    too."""
    x, weight, bias = tensors
    return function(x * 1.0, weight, bias, *[t.clone() for t in running], training, eps=EPS, **options)


@covering(2, activation=ALL_ACTIVATIONS, training=[True, False], affine=["both", "weight", "bias", "none"])
def test_gradgradcheck(activation, training, affine, device):
    activation, param = activation
    tensors, running = leaves(device, affine)

    def function(*tensors):
        return call(inplace_abn, tensors, running, training, activation=activation, activation_param=param)

    assert gradcheck(function, tensors)
    assert gradgradcheck(function, tensors)


@pytest.mark.parametrize("signed_weight", [False, True])
@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
def test_gradgradcheck_with_residual(training, signed_weight, device):
    tensors, running = leaves(device)
    residual = torch.randn(SHAPE, dtype=torch.float64, device=device, requires_grad=True)

    def function(residual, *tensors):
        return call(inplace_abn, tensors, running, training, residual=residual, signed_weight=signed_weight)

    assert gradgradcheck(function, [residual, *tensors])


def conv_net(norm, device, activation):
    torch.manual_seed(3)
    net = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        *norm(4, activation),
        nn.Conv2d(4, 4, 3, padding=1, bias=False),
        *norm(4, activation),
        nn.Conv2d(4, 1, 3),
    ).to(device, torch.float64)
    with torch.no_grad():
        for p in net.parameters():
            p.add_(torch.randn(p.shape, dtype=torch.float64).to(device), alpha=0.2)
    return net


def ours(channels, activation):
    return [InPlaceABN(channels, activation=activation, activation_param=param_of(activation, 0.7), signed_weight=True)]


class ExactHardswish(nn.Module):
    """In double precision on CUDA, too, where torch's own kernel is less exact."""

    def forward(self, y):
        return maths.exactly(y, "hardswish", 0.0)


def native(channels, activation):
    following = {"identity": nn.Identity(), "leaky_relu": nn.LeakyReLU(0.7), "elu": nn.ELU(0.7), "relu": nn.ReLU()}
    following |= {"silu": nn.SiLU(), "hardswish": ExactHardswish()}
    return [nn.BatchNorm2d(channels), following[activation]]


def penalty_step(net, x, run, times=1):
    """Runs steps with a loss and a gradient penalty, as in training a critic. Returns the penalty and all gradients."""
    net.zero_grad()
    x = x.clone().requires_grad_()
    for _ in range(times):
        y = run(net, x)
        (g,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        penalty = (g.flatten(1).norm(dim=1) - 1).square().mean()
        (y.mean() + 10 * penalty).backward()
    return [penalty.detach(), x.grad, *(p.grad for p in net.parameters())]


def plain(net, x):
    return net(x)


def checkpointed(net, x):
    return checkpoint(net, x, use_reentrant=False)


def under_identity_hooks(net, x):
    with saved_tensors_hooks(lambda t: t, lambda t: t):
        return net(x)


def under_save_on_cpu(net, x):
    with save_on_cpu():
        return net(x)


@pytest.mark.parametrize("run", [plain, checkpointed, under_identity_hooks, under_save_on_cpu])
@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
@pytest.mark.parametrize("activation", [name for name, _ in ACTIVATIONS])
def test_gradient_penalty_equals_that_of_batch_norm(activation, training, run, device):
    x = torch.randn(3, 2, 6, 6, dtype=torch.float64, device=device)
    nets = [conv_net(norm, device, activation).train(training) for norm in (ours, native)]
    actual, expected = (penalty_step(net, x, run, times=2) for net in nets)
    torch.testing.assert_close(actual, expected, rtol=1e-8, atol=1e-9)


def test_gradient_penalty_in_bfloat16_is_near_the_one_in_float64(device):
    x = torch.randn(8, 2, 8, 8, dtype=torch.float64, device=device).bfloat16()
    expected = penalty_step(conv_net(ours, device, "elu"), x.double(), plain)[0]
    net = conv_net(ours, device, "elu").bfloat16()
    for module in net.modules():
        if isinstance(module, ABN):
            module.float()
    (g,) = torch.autograd.grad(net(x.requires_grad_()).square().sum(), x, create_graph=True)
    penalty = (g.float().flatten(1).norm(dim=1) - 1).square().mean()
    penalty.backward()
    assert abs(penalty.item() - expected.item()) < 0.1 * expected.item()
    assert all(p.grad.isfinite().all() for p in net.parameters())


@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
def test_nothing_is_overwritten(training, device):
    tensors, running = leaves(device)
    z = call(inplace_abn, tensors, running, training)
    loss = (z * z.detach().cos()).sum()
    gradients, before = [], z.detach().clone()
    z.register_hook(lambda g: gradients.append((g, g.detach().clone())))
    version = z._version
    grads = torch.autograd.grad(loss, tensors, create_graph=True)
    again = torch.autograd.grad(loss, tensors, create_graph=True)
    assert torch.equal(z.detach(), before)
    assert z._version == version
    for g, copy in gradients:
        assert torch.equal(g, copy)
    torch.testing.assert_close(grads, again, rtol=0, atol=0)
    loss.backward()
    for t, g in zip(tensors, grads, strict=True):
        torch.testing.assert_close(t.grad, g, rtol=1e-10, atol=1e-12)


def test_first_order_backward_after_a_kept_graph_of_second_order(device):
    tensors, running = leaves(device)
    results = []
    for function in (inplace_abn, maths.forward):
        z = call(function, tensors, running)
        loss = (z * z).sum().tanh() + (z * z.detach().cos()).sum()
        del z
        (g,) = torch.autograd.grad(loss, tensors[0], create_graph=True)
        second = torch.autograd.grad(g.square().sum(), tensors, retain_graph=True)
        results.append([g, *second, *torch.autograd.grad(loss + g.sum(), tensors)])
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-9)


class CallsNode(torch.autograd.Function):
    """The identity. Its backward calls the node of an ABN."""

    @staticmethod
    def forward(ctx, y, node):
        ctx.node = node
        return y * 1.0

    @staticmethod
    def backward(ctx, gradient):
        node = ctx.node if callable(ctx.node) else ctx.node.apply
        return node(gradient)[0], None


def test_second_derivatives_by_a_call_of_the_node_within_another_go_through_its_own_input(device):
    """The node must use its own edge and not that of the node that calls it. Otherwise the path through x is lost."""
    tensors, running = leaves(device)
    z = call(inplace_abn, tensors, running)
    weights = torch.randn_like(z)
    (expected,) = torch.autograd.grad(z, tensors[0], weights, create_graph=True)
    y = torch.zeros_like(z, requires_grad=True)
    (actual,) = torch.autograd.grad(CallsNode.apply(y, z.grad_fn), y, weights, create_graph=True)
    torch.testing.assert_close(actual, expected)
    seconds = [torch.autograd.grad(g.square().sum(), tensors[0], retain_graph=True)[0] for g in (actual, expected)]
    torch.testing.assert_close(*seconds, rtol=1e-9, atol=1e-9)


VIEWS = {
    "part of the batch": lambda x: x[1:],
    "transposed": lambda x: x.transpose(2, 3),
    "part of the channels": lambda x: torch.cat([x, x], 1)[:, 1:3],
    "flattened": lambda x: x.flatten(2),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
def test_second_derivatives_when_x_is_a_view(view, training, device):
    (x, weight, bias), running = leaves(device, shape=(3, 2, 2, 3))

    def function(x, weight, bias):
        return inplace_abn(VIEWS[view](x.sin()), weight, bias, *[t.clone() for t in running], training, eps=EPS)

    assert gradcheck(function, [x, weight, bias])
    assert gradgradcheck(function, [x, weight, bias])


def test_third_derivatives(device):
    tensors, running = leaves(device)
    results = []
    for function in (inplace_abn, maths.forward):
        value = call(function, tensors, running, activation="elu", activation_param=0.9).pow(3).sum()
        for _ in range(3):
            grads = torch.autograd.grad(value, tensors, create_graph=True)
            value = sum(g.pow(2).sum() for g in grads)
        results.append([value, *grads])
    torch.testing.assert_close(*results, rtol=1e-8, atol=1e-8)


# --- torch.func: gradients by transforms, and their gradients in turn ------------------------------------------------


def twice(f):
    """Several losses with derivatives of ``f``, a function of (x, weight, bias) to a scalar."""
    grad = torch.func.grad
    everything = (0, 1, 2)

    def of_all(*leaves):
        return sum(g.square().sum() for g in grad(f, argnums=everything)(*leaves))

    def of_x(*leaves):
        return grad(f)(*leaves).square().sum()

    def of_weight(*leaves):
        return grad(f, argnums=1)(*leaves).tanh().sum()

    def pulled_back(*leaves):
        value, pull = torch.func.vjp(f, *leaves)
        return sum(g.square().sum() for g in pull(value.detach() * 0.3))

    return [of_all, of_x, of_weight, pulled_back]


def by_outer_backward(loss, leaves):
    return torch.autograd.grad(loss(*leaves), leaves)


def by_outer_grad(loss, leaves):
    return torch.func.grad(loss, argnums=(0, 1, 2))(*[t.detach() for t in leaves])


def by_outer_vjp(loss, leaves):
    value, pull = torch.func.vjp(loss, *[t.detach() for t in leaves])
    return pull(torch.ones_like(value))


def by_two_outer_grads(loss, leaves):
    def inner(*leaves):
        return sum(g.tanh().sum() for g in torch.func.grad(loss, argnums=(0, 1, 2))(*leaves))

    return torch.func.grad(inner, argnums=(0, 1, 2))(*[t.detach() for t in leaves])


INNER = ["grad", "grad of x", "grad of weight", "vjp"]
OUTER = [by_outer_backward, by_outer_grad, by_outer_vjp, by_two_outer_grads]


@covering(4, activation=ACTIVATIONS[:4], training=[True, False], inner=INNER, outer=OUTER)
def test_gradients_of_functional_gradients(activation, training, inner, outer, device):
    tensors, running = leaves(device)
    activation, param = activation
    options = {"activation": activation, "activation_param": param}

    def compute(function):
        def f(*tensors):
            y = call(function, tensors, running, training, **options)
            y = call(function, [y * 1.3 + y.flip(2), *tensors[1:]], running, training, **options)
            return (y * 0.5).tanh().square().mean()

        return outer(twice(f)[INNER.index(inner)], tensors)

    torch.testing.assert_close(compute(inplace_abn), compute(maths.forward), rtol=1e-8, atol=1e-9)


@contextmanager
def recording_in_inference_mode():
    with torch.inference_mode(), torch.enable_grad():
        yield


def test_a_graph_that_is_recorded_in_inference_mode_has_gradients_of_gradients(device):
    (x, weight, _), _ = leaves(device, "weight")

    def norms(surrounding):
        a = x * 1.5
        with surrounding:
            z = inplace_abn(a, weight, None, None, None, activation="silu", signed_weight=True)
        given = torch.autograd.grad(z.sin().sum(), [x, weight], create_graph=True)
        return [*given, *torch.autograd.grad(sum(t.square().sum() for t in given), [x, weight])]

    torch.testing.assert_close(norms(recording_in_inference_mode()), norms(nullcontext()))
