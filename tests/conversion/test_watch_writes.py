"""Code that writes to a norm's activated output, where torch allows it, gets what it gets with torch, in the first step
and in all others. The report tells what is saved."""

import copy
import functools
import logging

import pytest
import torch
import torch.nn.functional as F
from convertible_nets import HELD, Siblings, chain, make
from foreign_nets import conv, spread
from one_norm import OneNorm, images, plain
from test_instance_norm_convert import NETS
from torch import nn
from torch.utils.checkpoint import checkpoint
from training import check_training, trained
from unseen_functions import DoubledInPlace

from inplace_abn import analyze, convert, guard, report
from inplace_abn.autograd import nodes
from inplace_abn.memory import measure


def writing(write):
    """A forward pass. ``write`` gets the activated tensor, and another one of its shape."""

    def run(m, x):
        x = m.conv(x)
        h = m.act(m.bn(x))
        write(h, x)
        return m.last(h)

    return run


ACTIVATIONS = {
    "silu": nn.SiLU(),
    "silu in place": nn.SiLU(inplace=True),
    "gelu": nn.GELU(),
    "hardswish": nn.Hardswish(),
    "mish": nn.Mish(),
    "leaky_relu": nn.LeakyReLU(0.1),
    "elu": nn.ELU(),
}


def item_set(h, x):
    h[:, 1] = 0.5


WRITES = {
    "+=": lambda h, x: h.add_(x),
    "*= of a number": lambda h, x: h.mul_(2.0),
    "relu_": lambda h, x: F.relu_(h),
    "item": item_set,
    "view": lambda h, x: h.view(2, -1).mul_(0.5),
    "slice": lambda h, x: h[:, 1:].add_(1.0),
    "transposed": lambda h, x: h.transpose(1, 2).add_(1.0),
    "copy_": lambda h, x: h.copy_(x),
    "zero_": lambda h, x: h.zero_().add_(x),
    "dropout in place": lambda h, x: F.dropout(h, 0.5, True, True),
    "out=": lambda h, x: torch.add(h.detach(), 1.0, out=h.detach()),
    "detached": lambda h, x: h.detach().mul_(2.0),
    "twice": lambda h, x: h.add_(1.0).mul_(2.0),
    "foreach": lambda h, x: torch._foreach_add_([h], 1.0),
    "without grad": torch.no_grad()(lambda h, x: h.mul_(2.0)),
}


def tolerance(name):
    return 1e-9 if name in ("leaky_relu", "elu", "relu") else 1e-6


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("name", ["silu", "hardswish", "leaky_relu"])
def test_an_output_that_is_written_to_is_as_with_torch_and_the_write_is_named(name, write):
    model = spread(OneNorm(writing(WRITES[write]), ACTIVATIONS[name]))
    (layer,) = report(check_training(model, images(), tolerance=tolerance(name))).layers
    assert not layer.in_place
    assert "writes to its output, which backward needs" in layer.why


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_every_activation_that_keeps_its_input_may_be_written_to(name):
    """``h += x`` after an activation that keeps its input is right with torch, and was an error."""
    model = spread(OneNorm(writing(WRITES["+="]), ACTIVATIONS[name]))
    converted = check_training(model, images(), tolerance=tolerance(name))
    assert "add writes to its output" in report(converted).layers[0].why
    assert "not in place: add writes to its output" in repr(converted.bn)


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.ELU(inplace=True), nn.LeakyReLU(0.1, inplace=True)], ids=str)
@pytest.mark.parametrize("write", ["+=", "foreach"])
def test_what_torch_refuses_is_refused(write, activation):
    model = spread(OneNorm(writing(WRITES[write]), activation))
    for made in (model, convert(copy.deepcopy(model))):
        with pytest.raises(RuntimeError, match=r"modified (by an inplace operation|in place)"):
            trained(made.double(), images(), 1)


class Fused(nn.Module):
    """A block as in torchvision's EfficientNetV2: the skip is added in place to what the activation returns."""

    def __init__(self, activation):
        super().__init__()
        self.stem, self.block = conv(3, 4), nn.Sequential(conv(4, 4), nn.BatchNorm2d(4), activation)
        self.last = conv(4, 4)

    def forward(self, x):
        x = self.stem(x)
        for _ in range(2):
            result = self.block(x)
            result += x
            x = result
        return self.last(x)


def test_a_skip_that_is_added_in_place_trains_as_with_torch():
    """torchvision's efficientnet_v2_s could not be trained."""
    model = spread(Fused(nn.SiLU(inplace=True)))
    (layer,) = report(check_training(model, images(), tolerance=1e-6)).layers
    assert "add writes to its output" in layer.why
    (layer,) = analyze(model, images()).layers
    assert not layer.in_place
    # Its memory can be measured.
    assert measure(convert(copy.deepcopy(model)), images()).held <= 1.01 * measure(model, images()).held


class Added(nn.Module):
    """What is added to the norm's output is written to afterwards. ``late`` is the first call that does so."""

    def __init__(self, norm, needs_grad, late=0):
        super().__init__()
        self.conv, self.norm, self.last = conv(3, 4), norm, conv(4, 4)
        self.needs_grad, self.late, self.calls = needs_grad, late, 0

    def forward(self, x):
        x = self.conv(x)
        added = x * self.last.weight[0, 0, 0, 0] if self.needs_grad else x.detach() * 0.5
        h = torch.relu(self.norm(x) + added)
        if self.calls >= self.late:
            added.add_(1)
        self.calls += 1
        return self.last(h) + added


@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("norm", [nn.BatchNorm2d(4), nn.InstanceNorm2d(4, affine=True)], ids=["bn", "instance"])
def test_what_was_added_may_be_written_to(norm, needs_grad):
    """A sum keeps nothing, so torch allows a write to what was added, and ours was an error."""
    (layer,) = report(check_training(spread(Added(norm, needs_grad)), images())).layers
    assert not layer.in_place
    assert layer.why == "add writes to what was added to its output, which backward needs"


def test_what_was_added_has_its_place_in_graphs_of_second_order():
    """In a watched step backward knows what was added by an alias, which has no place in the graph."""
    model = spread(Added(nn.BatchNorm2d(4), needs_grad=True, late=2)).double()
    x = images().double().requires_grad_()
    for net in (model, converted := convert(copy.deepcopy(model))):
        (g,) = torch.autograd.grad(net(x).sin().sum(), x, create_graph=True)
        g.square().sum().backward()
    for (name, p), other in zip(model.named_parameters(), converted.parameters(), strict=True):
        torch.testing.assert_close(other.grad, p.grad, msg=name)


@pytest.mark.parametrize("late", ["output", "residual"])
def test_a_late_write_is_an_error_that_names_the_norm_and_the_next_step_works(late):
    """The error named no norm, in a model of fifty. And every later step ended with it."""
    guard.generations.current += 101 - guard.generations.current % 100
    model = Added(nn.BatchNorm2d(4), False, late=1) if late == "residual" else OneNorm(plain, nn.SiLU())
    converted = convert(nn.Sequential(spread(model)))
    optimizer = torch.optim.SGD(converted.parameters(), lr=0.0)
    converted(images()).sum().backward()
    optimizer.step()
    if late == "output":
        model.run = writing(WRITES["view"])
    name = "0.norm" if late == "residual" else "0.bn"
    with pytest.raises(RuntimeError, match=rf"the {late} of {name} has been modified in place.*filter_fn"):
        converted(images()).sum().backward()
    converted(images()).sum().backward()
    (layer,) = report(converted).layers
    assert f"its {late} was written to" in layer.why


def test_a_sum_that_is_written_to_trains_as_with_torch():
    def run(m, x):
        x = m.conv(x)
        h = F.silu(m.bn(x) + x)
        h += 1.0
        return m.last(h)

    (layer,) = report(check_training(spread(OneNorm(run)), images(), tolerance=1e-6)).layers
    assert "add writes to its output" in layer.why


@pytest.mark.parametrize("follows", [nn.Conv2d(4, 4, 1), nn.PReLU()], ids=lambda module: type(module).__name__)
def test_a_norm_whose_output_is_kept_otherwise_and_written_to_is_refused_as_with_torch(follows):
    """The other one keeps what is written to, so torch refuses as well."""

    def run(m, x):
        h = m.bn(m.conv(x))
        z = m.act(h)
        h += 1.0
        return z, m.last(h)

    model = spread(OneNorm(run, follows))
    for made in (model, convert(copy.deepcopy(model))):
        with pytest.raises(RuntimeError, match=r"modified (by an inplace operation|in place)"):
            trained(made.double(), images(), 1)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_an_output_that_its_caller_holds_is_not_written_over_by_backward(activation):
    """In a watched step backward knows an output by an alias. The alias is not the only holder of its memory."""
    model = convert(spread(nn.Sequential(conv(3, 4), nn.BatchNorm2d(4), copy.deepcopy(ACTIVATIONS[activation]))))
    z = model(images())
    before = z.detach().clone()
    (z * torch.linspace(-1, 1, z.numel()).view(z.shape)).sum().backward()
    assert torch.equal(z, before)


@torch.jit.script
def scripted_relu_in_place(h):
    return torch.relu_(h)


def kept_and_written_to_by_a_script(h):
    torch.sin(h)
    return scripted_relu_in_place(h).square()


def activated_and_written_to_by_a_script(h):
    F.silu(h, inplace=True)
    return scripted_relu_in_place(h).square()


def retained_and_written_to(h):
    F.silu(h, inplace=True)
    h.retain_grad()
    h.mul_(2.0)
    return h.square() + torch.sin(h)


def added_to_its_tanh(x: torch.Tensor):
    return x + torch.tanh(x)


@pytest.mark.parametrize(
    "follow", [kept_and_written_to_by_a_script, activated_and_written_to_by_a_script, retained_and_written_to]
)
def test_a_write_below_autograd_or_to_a_retained_tensor_trains_as_with_torch(follow):
    """A scripted function's write was not seen in the watched step; a write to what retains its gradient failed."""
    check_training(spread(OneNorm(lambda m, x: follow(m.bn(m.conv(x))))), images())


@pytest.mark.parametrize("named", ["norm", "activation"])
def test_a_hook_sees_the_gradient_of_both_names_of_an_output_that_was_activated_in_place(named):
    """A reentrant checkpoint got the norm's name of it, and its gradient passed by the hook."""

    def run(m, x):
        y = m.bn(m.conv(x))
        z = F.leaky_relu(y, 0.1, inplace=True)
        (y if named == "norm" else z).register_hook(lambda g: 3 * g)
        return checkpoint(torch.sin, y, use_reentrant=True) + z.square()

    check_training(spread(OneNorm(run)), images())


@pytest.mark.parametrize("write", [scripted_relu_in_place, DoubledInPlace.apply])
def test_code_that_writes_to_one_of_two_names_of_a_tensor_writes_to_both(write):
    """The result of an activation in place kept its old place in the graph: gradients were 67 % off, without a word."""

    def run(m, x):
        y = m.bn(m.conv(x))
        h = F.hardswish(y, inplace=True)
        write(y)
        return h.sin()

    check_training(spread(OneNorm(run)), images())


def test_a_script_may_read_what_was_written_to_twice():
    def run(m, x):
        y = m.bn(m.conv(x))
        F.relu(F.silu(y, inplace=True), inplace=True)
        return scripted(y)

    scripted = torch.jit.script(added_to_its_tanh)
    check_training(spread(OneNorm(run)), images())


def test_a_write_is_told_once_with_its_name_and_the_layers(logged):
    records = logged(logging.INFO)
    check_training(spread(OneNorm(writing(WRITES["+="]), nn.SiLU())), images(), tolerance=1e-6)
    told = [record.getMessage() for record in records if record.getMessage().startswith("bn: ")]
    assert len(told) == 1
    assert "add writes to its output" in told[0]


class Subclass(nn.BatchNorm2d):
    """A norm that is not converted."""


RUNS = {
    "input kept by exp": lambda m, x: m.last(F.relu(m.bn(m.conv(x).exp()))),
    "input read again": lambda m, x: m.last(F.relu(m.bn(y := m.conv(x)))) * y,
    "a residual that nobody keeps": lambda m, x: m.last(F.relu(m.bn(m.conv(x)) + m.last(m.conv(x)))),
    "residual and input": lambda m, x: m.last(F.relu(m.bn(y := m.conv(x)) + y)),
    "two in a row": lambda m, x: m.last(F.silu(m.bn(F.silu(m.bn(m.conv(x)))))),
    "prelu": lambda m, x: m.last(F.prelu(m.bn(m.conv(x)), m.bn.weight)),
    "convolution": lambda m, x: m.last(m.bn(m.conv(x))),
    "gelu": lambda m, x: m.last(F.gelu(m.bn(m.conv(x)))),
}
SAVING = {
    "chain": lambda: chain(4),
    "siblings": Siblings,
    "siblings of which one is converted": lambda: Siblings(Subclass),
    **{name: functools.partial(OneNorm, run, inputs=4, channels=8) for name, run in RUNS.items()},
}


def check_bytes(model, x):
    converted = convert(copy.deepcopy(model))
    saved = measure(model, x).held - measure(converted, x).held
    told = report(converted).bytes_saved
    assert told == pytest.approx(saved, rel=0.02, abs=2000), str(report(converted))


@pytest.mark.parametrize("name", SAVING)
def test_the_bytes_that_a_report_tells_are_those_that_are_saved(name):
    check_bytes(spread(SAVING[name]()), torch.randn(2, 4, 32, 32))


@pytest.mark.parametrize("name", HELD)
def test_the_bytes_that_a_report_of_a_net_tells_are_those_that_are_saved(name):
    check_bytes(make(name), torch.randn(2, 3, 64, 64))


@pytest.mark.parametrize("name", NETS)
def test_the_bytes_that_a_report_of_a_medical_net_tells_are_those_that_are_saved(name):
    make, inputs, _ = NETS[name]
    check_bytes(make(), inputs())


class AddedAndWrittenTo(nn.Module):
    """What is added to a norm's output has no graph, and is written to after another norm has kept the sum."""

    def __init__(self):
        super().__init__()
        self.conv, self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.BatchNorm2d(4)

    def forward(self, x, added):
        z = self.second(F.gelu(added) * 1 + self.first(self.conv(x)))
        other = F.gelu(added)
        total = self.second(other + self.first(self.conv(x)))
        other.relu_()
        return (z.cos() + total.cos() * other).sum()


@pytest.mark.parametrize("in_cpp", [True, False])
def test_a_residual_that_is_written_to_after_a_norm_has_kept_its_sum_is_what_it_was(in_cpp, monkeypatch):
    """The node had an alias of the alias that the watch gives memory of its own: dweight was 50 % off in the first
    step, and nobody said so."""
    if not in_cpp:
        monkeypatch.setattr(nodes, "cpp", None)
    torch.manual_seed(0)
    native = AddedAndWrittenTo().double()
    converted = convert(copy.deepcopy(native))
    x, added = torch.randn(2, 3, 6, 6, dtype=torch.float64), torch.randn(2, 4, 6, 6, dtype=torch.float64)
    for _ in range(3):
        for model in (native, converted):
            model.zero_grad()
            model(x, added).backward()
        for own, expected in zip(converted.parameters(), native.parameters(), strict=True):
            torch.testing.assert_close(own.grad, expected.grad)
