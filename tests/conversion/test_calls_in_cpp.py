"""Between two watched steps the node in C++ makes the calls of all norms and activations, and does what Python does."""

import copy

import pytest
import torch
import torch._dynamo.compiled_autograd
from cases import relative_error
from torch import nn

from inplace_abn import convert, guard
from inplace_abn.autograd import nodes
from inplace_abn.conversion.activations import ActivationAlone
from inplace_abn.conversion.layer_norms import ConvertedLayerNorm
from inplace_abn.conversion.norms import InPlaceNorm
from inplace_abn.conversion.observed import NOBODY
from inplace_abn.conversion.recipes_of_rows import OfRows
from inplace_abn.guard.figures import THRESHOLDS

pytestmark = pytest.mark.skipif(nodes.cpp is None, reason="there is no node in C++")
LAYERS = {
    "batch norm": (lambda: nn.BatchNorm2d(8), nn.SiLU),
    "instance norm": (lambda: nn.InstanceNorm2d(8, affine=True), lambda: nn.LeakyReLU(inplace=True)),
    "instance norm without weight": (lambda: nn.InstanceNorm2d(8), nn.ReLU),
    "group norm": (lambda: nn.GroupNorm(2, 8), nn.SiLU),
    "group norm that is read": (lambda: nn.GroupNorm(2, 8), nn.Identity),
    "layer norm": (lambda: nn.LayerNorm(6), nn.Identity),
    "layer norm without bias": (lambda: nn.LayerNorm(6, bias=False), nn.Identity),
    "layer norm without weight": (lambda: nn.LayerNorm(6, elementwise_affine=False), nn.Identity),
    "RMS norm": (lambda: nn.RMSNorm(6), nn.Identity),
    "activation": (nn.Identity, nn.GELU),
    "activation, channels last": (nn.Identity, nn.SiLU),
}
STEPS = 14
"""Layers are measured in the first, second, fourth, eighth and twelfth of these, and judged in the one after."""


class Net(nn.Module):
    def __init__(self, layer):
        super().__init__()
        torch.manual_seed(0)
        norm, activation = LAYERS[layer]
        self.first, self.norm, self.act = nn.Conv2d(3, 8, 1, bias=False), norm(), activation()
        self.second, self.last = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 2, 1)
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        z = self.act(self.norm(self.first(x)))
        return self.last(self.second(z) if z.shape[1] == 8 and not self.is_of_rows() else self.linear(z))

    def is_of_rows(self):
        return isinstance(self.norm, (nn.LayerNorm, nn.RMSNorm))


def batch(layer, dtype):
    memory_format = torch.channels_last if layer.endswith("last") else torch.contiguous_format
    return torch.randn(2, 3, 4, 6).to(dtype, memory_format=memory_format)


def gradients(model, x):
    model.zero_grad()
    x = x.clone(memory_format=torch.preserve_format).requires_grad_()
    y = model(x)
    (y.square().sum() + y.sum()).backward()
    return [x.grad, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def steps(model, layer, dtype):
    # All layers are measured, and the model is watched, in each hundredth step.
    guard.generations.current += 100 - guard.generations.current % 100
    for _ in range(STEPS):
        gradients(model, batch(layer, dtype))
        guard.generations.advance()


def errors(found, expected):
    """The error of each gradient, relative to a thousandth of all at least: some are zero but for roundings."""
    least = 1e-3 * torch.stack([t.norm() for t in expected]).norm()
    return [float((a.double() - b).norm() / b.norm().clamp_min(least)) for a, b in zip(found, expected, strict=True)]


def refuse(*_, **__):
    raise AssertionError("Python makes the call")


@pytest.mark.parametrize("layer", [name for name in LAYERS if name != "RMS norm"])
def test_python_makes_no_call_between_two_watched_steps(layer, monkeypatch):
    model = convert(Net(layer))
    steps(model, layer, torch.float32)
    monkeypatch.setattr(InPlaceNorm, "_offered", refuse)
    monkeypatch.setattr(ConvertedLayerNorm, "_offered", refuse)
    monkeypatch.setattr(ActivationAlone, "_remember_watch", refuse)
    gradients(model, batch(layer, torch.float32))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lost", [(), (3,), (1, 4)], ids=["", "one channel lost", "two channels lost"])
@pytest.mark.parametrize("layer", LAYERS)
def test_gradients_are_right_in_steps_that_nobody_watches(layer, lost, dtype):
    native = Net(layer).to(dtype)
    if getattr(native.norm, "weight", None) is not None:
        with torch.no_grad():
            native.norm.weight[list(lost)] = 0
    converted, exact = convert(copy.deepcopy(native)), copy.deepcopy(native).double()
    steps(converted, layer, dtype)
    worst = 0.0
    for _ in range(3):
        assert all(m.observer() is NOBODY for _, m in guard.layers_of(converted) if m._record.cpp_call is not None)
        x = batch(layer, dtype)
        expected = gradients(exact, x.double())
        natives, ours = (errors(gradients(m, x), expected) for m in (native, converted))
        worst = max([worst, *(b - 3 * a for a, b in zip(natives, ours, strict=True))])
        guard.generations.advance()
    assert worst < max(THRESHOLDS[dtype])


class WithResidual(nn.Module):
    def __init__(self, norm, in_place):
        super().__init__()
        self.first, self.norm, self.act = nn.Conv2d(3, 8, 1), norm(), nn.ReLU(in_place)
        self.shortcut, self.last = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 2, 1)

    def forward(self, x):
        return self.last(self.act(self.norm(self.first(x)) + self.shortcut(x)))


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("layer", ["batch norm", "instance norm", "instance norm without weight", "group norm"])
def test_norm_sum_and_activation_are_one_node_in_steps_that_nobody_watches_too(layer, in_place):
    """The output of an instance norm is a view, whose sums kept what torch keeps from the third step on."""
    torch.manual_seed(0)
    native = WithResidual(LAYERS[layer][0], in_place).double()
    model, names = convert(copy.deepcopy(native)), []
    model.act.register_forward_hook(lambda module, args, z: names.append(z.grad_fn.name()))
    for step in range(STEPS):
        x = batch(layer, torch.float64)
        found, expected = (gradients(net, x) for net in (model, native))
        assert max(errors(found, expected)) < 1e-9, step
        guard.generations.advance()
    assert all(name.startswith("InPlaceABNFunction") for name in names)


@pytest.mark.parametrize("layer", LAYERS)
def test_backward_may_be_compiled(layer):
    """A norm that keeps its output said that backward runs a second time."""
    model = convert(Net(layer))
    steps(model, layer, torch.float32)
    x = batch(layer, torch.float32)
    expected = gradients(model, x)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
        found = gradients(model, x)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layer", ["batch norm", "instance norm", "group norm that is read"])
def test_an_input_of_other_dimensions_is_refused_as_by_torch(layer):
    native = Net(layer)
    converted = convert(copy.deepcopy(native))
    steps(converted, layer, torch.float32)
    x = torch.randn(4, 8, 6, requires_grad=True)
    if layer.startswith("group"):
        assert converted.norm(x).shape == x.shape
        return
    message = []
    for model in (native, converted):
        try:
            message.append(model.norm(x).shape)
        except ValueError as error:
            message.append(str(error))
    assert message[0] == message[1]


@pytest.mark.parametrize("groups", [3, 16, 0])
def test_groups_that_do_not_divide_the_channels_are_torchs_error(groups):
    """The norm made groups of other sizes, or one of each channel of the batch."""
    native = Net("group norm")
    converted = convert(copy.deepcopy(native))
    steps(converted, "group norm", torch.float32)
    message = []
    for model in (native, converted):
        model.norm.num_groups = groups
        with pytest.raises((RuntimeError, ZeroDivisionError)) as raised:
            model(batch("group norm", torch.float32))
        message.append(str(raised.value))
    assert message[0] == message[1]


def test_an_input_that_is_written_to_is_an_error_that_names_the_layer_norm():
    model = convert(Net("layer norm"))
    steps(model, "layer norm", torch.float32)
    x = model.first(batch("layer norm", torch.float32))
    y = torch.sin(model.norm(x).tanh())
    x.mul_(2)
    with pytest.raises(RuntimeError, match="the input of norm has been modified in place"):
        y.sum().backward()


def test_a_weight_that_is_computed_later_makes_a_layer_norm_torchs():
    model = convert(Net("layer norm"))
    steps(model, "layer norm", torch.float32)
    assert model.norm.outcome().in_place
    leaf = model.norm.weight.detach().requires_grad_()
    del model.norm.weight
    model.norm.weight = leaf * 2
    model(batch("layer norm", torch.float32)).sum().backward()
    assert not model.norm.outcome().in_place
    assert leaf.grad is not None


@pytest.mark.parametrize("layer", ["layer norm", "RMS norm", "group norm", "activation"])
def test_gradients_of_gradients_are_right_in_steps_that_nobody_watches(layer):
    native = Net(layer).double()
    converted = convert(copy.deepcopy(native))
    steps(converted, layer, torch.float64)
    x, found = batch(layer, torch.float64), []
    for model in (native, converted):
        leaf = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(model(leaf).square().sum(), leaf, create_graph=True)
        found.append(torch.autograd.grad(gradient.square().sum(), [leaf, *model.first.parameters()]))
    assert max(errors(*reversed(found))) < 1e-9


class Rows(nn.Module):
    """A norm of rows in float32, and a linear layer, which gets a copy in 16 bits from autocast."""

    def __init__(self, norm):
        super().__init__()
        self.norm, self.linear = norm(), nn.Linear(6, 6)

    def forward(self, x):
        return self.linear(self.norm(x * 1.0))


@pytest.mark.parametrize("layer", ["layer norm", "layer norm without bias", "RMS norm"])
def test_under_autocast_a_norm_of_rows_keeps_the_copy_in_16_bits_in_steps_that_nobody_watches(layer, monkeypatch):
    torch.manual_seed(0)
    native = Rows(LAYERS[layer][0])
    with torch.no_grad():
        native.norm.weight[2] = 0
    converted = convert(copy.deepcopy(native))
    with torch.autocast("cpu", torch.bfloat16):
        steps(converted, layer, torch.float32)
        monkeypatch.setattr(OfRows, "_decided", refuse)
        if layer != "RMS norm":
            monkeypatch.setattr(ConvertedLayerNorm, "_offered", refuse)
        x = batch(layer, torch.float32)
        found = [gradients(model, x) for model in (converted, native)]
        # Gradients of other readers pass the same place in the graph.
        y = converted.norm(x.requires_grad_() * 1.0)
        z = converted.linear(y)
        (of_output,) = torch.autograd.grad(z.sum() + y.sum(), [y])
    assert y.dtype == torch.float32
    assert max(errors(*found)) < 2.0**-6
    assert relative_error(of_output, 1 + converted.linear.weight.sum(0).expand_as(y)) < 2.0**-6
