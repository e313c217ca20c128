"""A converted norm gives what the original gives, whatever the program does with its output."""

import copy

import pytest
import torch
from cases import relative_error
from graph_programs import GRAPH, READS
from programs import SEEN
from sum_programs import SUMS
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves
from unseen_functions import DoubledInPlace, Gated, scripted_gate, scripted_relu_in_place
from unseen_programs import UNSEEN

from inplace_abn import convert, guard, revert
from inplace_abn.conversion import classes

PROGRAMS = SEEN | SUMS | UNSEEN | GRAPH


class ProgramNet(nn.Module):
    """The layers that programs call."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.layer = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.bn, self.bn2, self.bn3 = nn.BatchNorm2d(4), nn.BatchNorm2d(4, momentum=None), nn.BatchNorm2d(3)
        self.instance = nn.InstanceNorm2d(4, affine=True, track_running_stats=True)
        self.r = nn.Parameter(torch.randn(4, 4, 6, 5, generator=generator)).requires_grad_()
        for norm in (self.bn, self.bn2, self.bn3, self.instance):
            nn.init.uniform_(norm.weight, 0.5, 1.5, generator=generator)
            nn.init.normal_(norm.bias, generator=generator)
        with torch.no_grad():
            self.bn.weight[1] *= -1
        self.kept = []

    def conv(self, a):
        return self.layer(a)


def converted(net):
    net = copy.deepcopy(net)
    for name in ("bn", "bn2", "bn3", "instance"):
        classes.adopt(getattr(net, name), name)
    return net


def results(net, program, calls):
    """Returns the losses, outputs, gradients, buffers and kept values of some calls."""
    found = []
    for i in range(calls):
        generator = torch.Generator().manual_seed(i)
        a = torch.randn(4, 3, 6, 5, dtype=torch.float64, generator=generator).requires_grad_()
        net.zero_grad()
        net.kept.clear()
        r = net._parameters.pop("r")
        net.r = r * 1.0  # a plain tensor, because residuals are no parameters
        outputs = [t for t in tree_leaves(program(net, a)) if t is not None]
        loss = sum((t * torch.linspace(-1, 1.5, t.numel(), dtype=t.dtype).view(t.shape).cos()).sum() for t in outputs)
        del net.r
        net._parameters["r"] = r
        loss.backward()
        found += [loss.detach(), *(t.detach().clone() for t in outputs), a.grad]
        found += [None if p.grad is None else p.grad.clone() for p in net.parameters()]
        found += [b.clone() for b in net.buffers()]
        found += [torch.tensor(value) for value in net.kept]
        guard.generations.advance()
    return found


def check(actual, expected, allowed=1e-9):
    for i, (ours, others) in enumerate(zip(actual, expected, strict=True)):
        assert (ours is None) == (others is None), i
        if ours is not None:
            assert type(ours) is torch.Tensor
            exact = ours.shape == others.shape and (ours - others).abs().max() < 1e-12
            assert exact or relative_error(ours, others.double()) < allowed, i


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_give_what_they_give_with_the_original(name):
    torch.manual_seed(0)
    net = ProgramNet().double()
    changed = converted(net)
    # The layer learns in the first call, and uses what it has learned from the second call on.
    expected, actual = (results(n, PROGRAMS[name], 3) for n in (net, changed))
    check(actual, expected, 1e-2 if name == "autocast" else 1e-9)


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_give_what_they_give_with_the_original_within_a_converted_model(name):
    """The model is watched in the first step."""

    class Whole(ProgramNet):
        def forward(self, a):
            return PROGRAMS[name](self, a)

    net = Whole().double()
    changed = convert(copy.deepcopy(net))
    run = lambda model, a: model(a)  # noqa: E731
    check(results(changed, run, 3), results(net, run, 3), 1e-2 if name == "autocast" else 1e-9)


@pytest.mark.parametrize("gamma", [0.0, 1e-7])
@pytest.mark.parametrize(
    "name",
    [
        *("relu", "residual", "custom function", "scripted relu_", "relu_ of a name, then custom function", "numpy"),
        *("read without grad", "checkpoint begins", "residual modified", "saved by a function, then relu"),
    ],
)
def test_weights_that_are_too_small_to_be_recovered_from_change_nothing(name, gamma):
    """In these programs nothing is measured, or somebody sees the norm's memory."""
    net = ProgramNet().double()
    torch.nn.init.constant_(net.bn.weight, gamma)
    check(results(converted(net), PROGRAMS[name], 3), results(net, PROGRAMS[name], 3))


ASKED = {
    "a hook": lambda h, z: h.register_hook(lambda g: g * 0.5),
    "retain_grad": lambda h, z: h.retain_grad(),
    "a gradient": lambda h, z: torch.autograd.grad(z.sum(), h, allow_unused=True),
}


@pytest.mark.parametrize("again", [lambda h: None, Gated.apply, torch.sin])
@pytest.mark.parametrize("follows", [torch.relu, lambda h: torch.relu(h + torch.ones(4, 4, 6, 5))])
@pytest.mark.parametrize("asked", ASKED)
def test_who_asks_for_a_gradient_of_what_has_no_place_in_the_graph_any_more_gets_an_error(asked, follows, again):
    net = converted(ProgramNet())
    h = net.bn(net.conv(torch.randn(4, 3, 6, 5)))
    z = follows(h)
    again(h)
    with pytest.raises(RuntimeError, match=r"a gradient of the output of bn, or a hook on it, .*filter_fn"):
        ASKED[asked](h, z)
    z.sum().backward()


@pytest.mark.parametrize("read", ["", "read without grad", "read by a function"])
@pytest.mark.parametrize("function", [Gated.apply, scripted_gate])
def test_a_view_written_to_before_a_custom_function_gives_torchs_gradients(function, read):
    """Once somebody had read the output without gradients, the write was lost in the gradients, without a word."""
    found = []
    original = ProgramNet()
    for net in (original, converted(original)):
        h = net.bn(net.conv(torch.linspace(-1, 1, 360).view(4, 3, 6, 5).sin()))
        if read:
            READS[read](h)
        h[:, 1:].mul_(2)
        function(h).square().sum().backward()
        found.append([net.layer.weight.grad, net.bn.weight.grad])
    for actual, expected in zip(*found, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_what_is_exposed_keeps_no_more_than_torch_does():
    """The input of the norm and its output, which the function saves, are all that is held."""
    held = []
    for net in (ProgramNet(), converted(ProgramNet())):
        sizes = {}
        x = net.conv(torch.randn(4, 3, 6, 5))
        h = net.bn(x)
        z = Gated.apply(h)
        state = getattr(h, "_state", None)
        tensors = [x, *z.grad_fn.saved_tensors]
        if state is not None:
            tensors += [t for t in vars(state).values() if isinstance(t, torch.Tensor)]
        for t in tensors:
            storage = t.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
        held.append(sum(sizes.values()))
    assert held[1] <= held[0]


CHANGES = {
    "added to": lambda x: x.add_(1),
    "multiplied": lambda x: x.mul_(2),
    "zeroed without grad": lambda x: x.detach().zero_(),
}


@pytest.mark.parametrize("follows", [torch.relu, torch.sigmoid, Gated.apply, lambda h: h])
@pytest.mark.parametrize("change", CHANGES)
def test_an_input_that_is_modified_before_backward_is_an_error_where_it_is_one_with_torch(change, follows):
    """What is fused does not need it."""
    net = converted(ProgramNet())
    x = net.conv(torch.randn(4, 3, 6, 5))
    z = follows(net.bn(x))
    CHANGES[change](x)
    if follows is torch.relu:
        z.sum().backward()
    else:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            z.sum().backward()


@pytest.mark.parametrize("generation", range(200, 204))
def test_what_never_followed_before_is_torchs_until_it_was_measured(generation, monkeypatch):
    """A measurement that is due anyway may come with any of these steps."""
    monkeypatch.setattr(guard.generations, "current", generation)
    net = converted(ProgramNet().double())
    with torch.no_grad():
        # The inverse of elu loses almost all of what lies below -20. The inverse of relu loses nothing.
        net.bn.weight.fill_(30.0)

    def step(activate):
        a = torch.randn(4, 3, 6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
        x = net.conv(a) * 1.0
        z = activate(net.bn(x))
        (z.cumsum(1) * z).sum().backward()
        twin = copy.deepcopy(net)
        revert(twin)
        b = a.detach().clone().requires_grad_()
        y = activate(twin.bn(twin.conv(b) * 1.0))
        (y.cumsum(1) * y).sum().backward()
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-8, atol=1e-8)
        guard.generations.advance()
        return z

    assert "InPlaceABN" in step(torch.relu).grad_fn.name()
    for activate in (torch.nn.functional.elu, torch.nn.functional.elu, torch.relu, torch.nn.functional.elu):
        step(activate)


def test_an_output_that_is_modified_before_backward_is_an_error_that_tells_what_to_do():
    net = converted(ProgramNet())
    z = torch.nn.functional.silu(net.bn(net.conv(torch.randn(4, 3, 6, 5))))
    z.view(-1).add_(1)
    with pytest.raises(RuntimeError, match=r"modified in place, but its backward needs it.*filter_fn"):
        z.sum().backward()


@pytest.mark.parametrize("dropout", [nn.Dropout, nn.Dropout2d, nn.AlphaDropout, nn.FeatureAlphaDropout])
@pytest.mark.parametrize("training", [True, False])
def test_a_dropout_that_drops_nothing_is_no_reader(dropout, training):
    """MONAI has a dropout of probability zero between norm and activation."""
    norm = nn.BatchNorm2d(4)
    classes.adopt(norm, "norm")
    layer = dropout(0.0 if training else 0.5).train(training)
    y = norm(torch.randn(2, 4, 5, 5, requires_grad=True) * 1)
    assert layer(y) is y
    assert "InPlaceABNFunction" in torch.relu(layer(y)).grad_fn.name()


def test_what_is_kept_for_backward_under_hooks_is_what_they_gave_back():
    """The norm's input stayed in memory, although the hooks had it saved elsewhere."""
    net = converted(ProgramNet())
    x = net.conv(torch.randn(4, 3, 6, 5))
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda t: t):
        h = net.bn(x)
    z = Gated.apply(h)
    storage = StorageWeakRef(x.untyped_storage())
    del x
    assert storage.expired()
    z.sum().backward()


@pytest.mark.parametrize("write", [scripted_relu_in_place, DoubledInPlace.apply, lambda h: h.mul_(2)])
@pytest.mark.parametrize("keep", [lambda h: torch.sin(h), lambda h: torch.relu_(h)])
def test_a_write_to_what_backward_needs_is_noticed_whoever_writes(keep, write):
    """A scripted function wrote to the norm's output, which backward had kept, without a word."""
    net = converted(ProgramNet())
    h = net.bn(net.conv(torch.randn(4, 3, 6, 5)))
    keep(h)
    z = write(h)
    with pytest.raises(RuntimeError, match="modified in place"):
        z.sum().backward()


@pytest.mark.parametrize("hooked", ["input", "weight"])
def test_a_hook_on_what_the_norm_was_given_runs_once_when_a_graph_of_the_gradient_is_made(hooked):
    """The hook ran once more inside of the norm's backward: the gradient was multiplied by 3 twice."""
    results = []
    torch.manual_seed(0)
    original = ProgramNet().double()
    a = torch.randn(4, 3, 6, 5, dtype=torch.float64)
    for net in (original, convert(copy.deepcopy(original))):
        x = net.layer(a)
        (x if hooked == "input" else net.bn.weight).register_hook(lambda g: 3 * g)
        z = net.bn(x).cumsum(1).sin().sum()
        (first,) = torch.autograd.grad(z, net.layer.weight, create_graph=True)
        first.square().sum().backward()
        results.append((first.detach(), net.layer.weight.grad, net.bn.weight.grad))
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("sum_first", [True, False])
def test_a_norm_whose_sum_is_kept_has_right_gradients_from_other_readers_of_its_output(sum_first):
    """The node kept the output in the place of the sum, and the residual of the sum."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm2d(8)
            self.first, self.second = (nn.Conv2d(8, 8, 3, padding=1) for _ in range(2))

        def forward(self, x):
            y = self.norm(self.first(x))
            read = None if sum_first else y.cos()
            summed = self.second(y + x)
            return summed.sin() + (y.cos() if read is None else read)

    native = Net().double()
    converted = convert(copy.deepcopy(native))
    x = torch.randn(3, 8, 5, 5, dtype=torch.float64)
    for _ in range(3):
        for net in (native, converted):
            net.zero_grad()
            net(x).square().mean().backward()
        for actual, expected in zip(converted.parameters(), native.parameters(), strict=True):
            torch.testing.assert_close(actual.grad, expected.grad, rtol=1e-9, atol=1e-12)
