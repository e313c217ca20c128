"""Without overwrite_input the result is in new memory, and x is neither changed nor saved. Others may need x."""

import maths
import pytest
import torch
import torch.nn.functional as F
from cases import (
    ACTIVATIONS,
    DTYPES,
    TOLERANCE,
    covering,
    laid_out,
    parameters,
    relative_error,
    stats_dtype,
    tolerance,
)
from test_allocations import activation, allocations, conv
from torch import nn
from torch.autograd import gradcheck, gradgradcheck
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint
from wired_nets import C, leaf_input

from inplace_abn import ABN, InPlaceABN, inplace_abn, inplace_abn_sync

SHAPE = (4, 6, 7, 5)


def kept(x, weight=None, bias=None, mean=None, var=None, training=True, **options):
    return inplace_abn(x, weight, bias, mean, var, training, overwrite_input=False, **options)


@covering(
    4,
    dtype=DTYPES,
    activation=ACTIVATIONS,
    layout=["contiguous", "channels_last", "channel slice", "transposed"],
    training=[True, False],
    with_residual=[False, True],
)
def test_results_match_the_formulas_and_x_stays(dtype, activation, layout, training, with_residual, device):
    activation, param = activation
    x, residual = (laid_out(torch.randn(SHAPE, device=device).to(dtype), layout).requires_grad_() for _ in range(2))
    weight, bias, mean, var = parameters(SHAPE[1], stats_dtype(dtype), device)
    residual = residual if with_residual else None
    leaves = [t for t in (x, weight.requires_grad_(), bias.requires_grad_(), residual) if t is not None]
    dz = torch.rand(SHAPE, device=device).to(dtype)
    settings = {"training": training, "activation": activation, "activation_param": param}
    exact = [t.detach().double().clone().requires_grad_() for t in leaves]
    means = [t.double().clone() for t in (mean, var)]
    expected = maths.forward(*exact[:3], *means, residual=exact[3] if with_residual else None, **settings)
    expected.backward(dz.double())

    before, version = x.detach().clone(), x._version
    z = kept(x, weight, bias, mean, var, residual=residual, **settings)
    assert torch.equal(x, before)
    assert x._version == version
    assert z.data_ptr() != x.data_ptr()
    assert (z.shape, z.dtype) == (x.shape, x.dtype)
    assert relative_error(z, expected) < TOLERANCE[dtype]
    assert relative_error(mean, means[0]) < 1e-2
    z.backward(dz)
    allowed = tolerance(dtype, activation)
    for leaf, other in zip(leaves, exact, strict=True):
        if leaf is weight and dtype in (torch.bfloat16, torch.float16):
            assert (leaf.grad.double() - other.grad).abs().max() < 2 * allowed * exact[2].grad.abs().max()
        else:
            assert relative_error(leaf.grad, other.grad) < allowed


@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
@pytest.mark.parametrize(("activation", "param"), ACTIVATIONS)
def test_gradcheck_and_gradgradcheck_on_leaves(activation, param, training, device):
    # The finite differences take a time that is quadratic in the number of values.
    weight, bias, mean, var = parameters(2, torch.float64, device)
    x, residual = torch.randn(2, 3, 2, 2, dtype=torch.float64, device=device)
    leaves = [t.requires_grad_() for t in (x, weight, bias, residual)]
    settings = {"activation": activation, "activation_param": param}

    def op(x, weight, bias, residual):
        return kept(x, weight, bias, mean.clone(), var.clone(), training, residual=residual, **settings)

    assert gradcheck(op, leaves)
    assert gradgradcheck(op, leaves)
    assert gradgradcheck(lambda x, weight, bias: op(x, weight, bias, x), leaves[:3])


def sigmoid_of(a):
    return torch.sigmoid(a)


INPUTS = {
    "a leaf": lambda a: a,
    "what its producer saved": sigmoid_of,
    "a view": lambda a: (a * 2)[1:],
    "one of several views": lambda a: (a * 2).chunk(2)[1],
    "a view of a leaf": lambda a: a[1:],
    "transposed": lambda a: (a * 2).transpose(0, 1),
    "expanded": lambda a: (a[:1] * 2).expand(4, -1, -1, -1),
    "the output of an in-place layer": lambda a: inplace_abn(a * 1, None, None, None, None),
    "the output of one that does not overwrite its input": lambda a: kept(a),
    "a view made without grad": lambda a: no_grad_view(a * 2),
}


def no_grad_view(x):
    with torch.no_grad():
        return x.view(x.shape)


READ = {
    "nobody else": lambda x, z: z,
    "an addition": lambda x, z: z + x,
    "a product": lambda x, z: z * x,
    "a convolution": lambda x, z: z + F.conv2d(x, torch.ones(1, x.shape[1], 1, 1).to(x)),
    "another norm": lambda x, z: z - kept(x.sin(), activation="relu"),
}


@pytest.mark.parametrize("read", READ)
@pytest.mark.parametrize("make", INPUTS)
@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
def test_x_may_be_anything_that_others_need(training, make, read, device):
    results = []
    for function in (kept, maths.forward):
        a = leaf_input(device)
        x = INPUTS[make](a)
        channels = x.shape[1]
        running = (None, None) if training else (torch.zeros(channels).to(x), torch.ones(channels).to(x))
        weight = torch.linspace(0.5, 1.5, channels, dtype=x.dtype, device=device).requires_grad_()
        z = function(x, weight, None, *running, training, activation="leaky_relu", activation_param=0.1)
        z = READ[read](x, z)
        gradients = torch.autograd.grad(
            (z * torch.linspace(-1, 1, z.numel()).to(z).view(z.shape)).sum(), (a, weight), allow_unused=True
        )
        results.append((z, *gradients))
    for ours, others in zip(*results, strict=True):
        assert (ours is None) == (others is None)
        assert ours is None or relative_error(ours, others) < 1e-9


def test_x_may_be_modified_afterwards(device):
    results = []
    for function in (kept, maths.forward):
        a = leaf_input(device)
        x = a * 2
        z = function(x, None, None, None, None, activation="leaky_relu", activation_param=0.1)
        x.mul_(z.detach())
        (x * z).sum().backward()
        results.append(a.grad)
    assert relative_error(*results) < 1e-9


@pytest.mark.parametrize("context", ["checkpoint", "save_on_cpu", "inference mode", "no_grad", "compile"])
def test_it_works_in_every_context(context, device):
    results = []
    for overwrite_input in (False, True):
        torch.manual_seed(0)
        a = leaf_input(device)
        net = nn.Sequential(
            nn.Conv2d(C, C, 3), InPlaceABN(C, activation="relu", overwrite_input=overwrite_input), nn.Conv2d(C, C, 3)
        ).to(a)
        if context in ("inference mode", "no_grad"):
            with torch.inference_mode() if context == "inference mode" else torch.no_grad():
                results.append([net(a.detach())])
            continue
        if context == "checkpoint":
            z = checkpoint(net, a, use_reentrant=False)
        elif context == "save_on_cpu":
            with save_on_cpu():
                z = net(a)
        else:
            torch._dynamo.reset()
            z = torch.compile(net, fullgraph=True, backend="aot_eager")(a)
        z.square().sum().backward()
        results.append([z, a.grad, net[1].weight.grad])
    for ours, others in zip(*results, strict=True):
        assert relative_error(ours, others) < 1e-12


class PreActivation(nn.Module):
    """x + conv(act(norm(x))). The addition needs x, too."""

    def __init__(self, norm):
        super().__init__()
        self.norm, self.conv = norm(), conv()

    def forward(self, x):
        return x + self.conv(self.norm(x))


@pytest.mark.parametrize("blocks", [2, 6])
def test_a_chain_of_pre_activation_blocks_holds_one_tensor_per_layer(blocks):
    x, held = activation("cpu"), {}
    for norm in (lambda: InPlaceABN(16, activation="relu", overwrite_input=False), lambda: ABN(16, activation="relu")):
        net, results = nn.Sequential(conv(), *(PreActivation(norm) for _ in range(blocks))), []
        net(x)
        _, sizes = allocations(lambda net=net, results=results: results.append(net(x)), 0)
        held[len(held)] = round(sum(sizes) / x.nbytes, 1)
    # Each block holds its z, and the net holds the last sum. torch also holds the input of each norm.
    assert held == {0: blocks + 1, 1: 2 * blocks + 1}


@pytest.mark.parametrize("units", [2, 5])
def test_a_chain_holds_what_it_holds_in_place_and_backward_reuses_the_same(units):
    x = activation("cpu")
    results = []
    for overwrite_input in (True, False):
        parts = [m for _ in range(units) for m in (conv(), InPlaceABN(16, overwrite_input=overwrite_input))]
        net, held = nn.Sequential(*parts, conv()), []
        net(x)
        _, sizes = allocations(lambda net=net, held=held: held.append(net(x)), 0)
        within, _ = allocations(lambda held=held: held.pop().square().mean().backward(), x.nbytes)
        results.append((round(sum(sizes) / x.nbytes, 1), within))
    assert results[0] == results[1] == (units + 1, [[]] * units)


def test_modules_take_it_and_say_so():
    module = InPlaceABN(3, overwrite_input=False, signed_weight=True, activation="relu")
    assert "overwrite_input=False" in repr(module)
    assert "overwrite_input" not in repr(InPlaceABN(3))
    x = torch.randn(2, 3, 4, requires_grad=True)
    assert torch.allclose(module(x), ABN(3, activation="relu")(x), atol=1e-6)
    assert torch.allclose(module(x, residual=x), ABN(3, activation="relu")(x, residual=x), atol=1e-6)


@pytest.mark.filterwarnings("ignore:.*not initialised")
def test_the_synchronised_form_takes_it_too():
    x = torch.randn(2, 3, 4, requires_grad=True)
    z = inplace_abn_sync(x, None, None, None, None, overwrite_input=False)
    assert torch.equal(z, kept(x))


def test_what_cannot_be_is_refused_before_anything_is_written():
    x = torch.randn(2, 3, 4)
    mean, var = torch.zeros(3), torch.ones(3)
    for wrong in ({"residual": x[:1]}, {"weight": torch.ones(4)}, {"eps": 0.0}, {"activation": "celu"}):
        with pytest.raises(ValueError, match="expected"):
            kept(x, mean=mean, var=var, **wrong)
    with pytest.raises(ValueError, match="more than 1 value"):
        kept(x[:1, :, :1], mean=mean, var=var)
    assert torch.equal(mean, torch.zeros(3))


def test_a_result_that_is_modified_before_backward_is_noticed():
    z = kept(torch.randn(2, 3, 4, requires_grad=True))
    z.add_(1)
    with pytest.raises(RuntimeError, match="the output of an in-place ABN has been modified in place"):
        z.sum().backward()
