"""A call that is like an earlier one goes by a plan. Whatever is changed in between, it does what torch's norm does."""

import copy
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from modes import end_beginning
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from inplace_abn import convert, functions, guard, set_guard
from inplace_abn.conversion import pending
from inplace_abn.conversion.plan import Native, Plan

pytestmark = pytest.mark.skipif(functions._node is None, reason="plans are of the node in C++")


@pytest.fixture
def planned(monkeypatch):
    """The calls that went by a plan."""
    calls, call = [], Plan.call

    def counted(*args):
        t, waiting = call(*args)
        if waiting is not None:
            calls.append(args)
        return t, waiting

    monkeypatch.setattr(Plan, "call", counted)
    return calls


def net():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 1)).double()
    nn.init.uniform_(model[1].weight, 0.5, 1.5)
    return model


def steps(model, change=lambda model: None, x=None):
    """The outputs, gradients and buffers of some steps. ``change`` comes after the third one."""
    optimizer, found = torch.optim.SGD(model.parameters(), 0.1), []
    # Nothing happened in this generation yet, and the guard measures in no step but the first.
    guard.generations.current += 201 - guard.generations.current % 100
    for step in range(6):
        torch.manual_seed(step)
        batch = torch.randn(2, 3, 5, 5, dtype=torch.float64)
        if step == 3:
            change(model)
        if step == 1:
            end_beginning(model)
        batch = batch if x is None or step < 3 else x(batch)
        try:
            y = model(batch)
            if y.requires_grad:
                optimizer.zero_grad()
                (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)).sum().backward()
                optimizer.step()
        except Exception as error:
            found.append(str(type(error)))
            break
        found += [y.detach().clone(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        found += [b.clone() for b in model.buffers()]
    return found


def check_alike(found, expected):
    assert [type(value) for value in found] == [type(value) for value in expected]
    for own, other in zip(found, expected, strict=True):
        if isinstance(other, str):
            assert own == other
        else:
            torch.testing.assert_close(own, other)


def test_calls_that_are_alike_go_by_a_plan_also_after_a_step(planned):
    check_alike(steps(convert(net())), steps(net()))
    assert len(planned) == 4


def frozen(model):
    for t in (*model[0].parameters(), *model[1].parameters()):
        t.requires_grad_(False)


CHANGES = {
    "eps": lambda model: setattr(model[1], "eps", 1e-2),
    "momentum": lambda model: setattr(model[1], "momentum", 0.5),
    "momentum of None": lambda model: setattr(model[1], "momentum", None),
    "evaluation": lambda model: model.eval(),
    "norm in evaluation": lambda model: model[1].eval(),
    "no running statistics": lambda model: setattr(model[1], "track_running_stats", False),
    "running statistics removed": lambda model: (
        setattr(model[1], "running_mean", None),
        setattr(model[1], "running_var", None),
    ),
    "one running statistic removed": lambda model: setattr(model[1], "running_mean", None),
    "number of batches removed": lambda model: setattr(model[1], "num_batches_tracked", None),
    "weight removed": lambda model: setattr(model[1], "weight", None),
    "bias made in inference mode": lambda model: model[1]._parameters.update(
        bias=torch.inference_mode()(torch.zeros)(4, dtype=torch.float64)
    ),
    "bias removed": lambda model: setattr(model[1], "bias", None),
    "both removed": lambda model: (setattr(model[1], "weight", None), setattr(model[1], "bias", None)),
    "weight replaced": lambda model: setattr(model[1], "weight", nn.Parameter(torch.full((4,), 2.0).double())),
    "weight of another size": lambda model: setattr(model[1], "weight", nn.Parameter(torch.ones(5).double())),
    "weight zeroed": lambda model: torch.no_grad()(model[1].weight.zero_)(),
    "float32": lambda model: model[1].float(),
    "frozen": frozen,
    "frozen but for the bias": lambda model: (frozen(model), model[1].bias.requires_grad_()),
    "statistics set": lambda model: model[1].running_var.fill_(3.0),
    "another activation": lambda model: setattr(model, "2", nn.SiLU(inplace=True)),
    "no activation": lambda model: setattr(model, "2", nn.Identity()),
    "running mean of another size": lambda model: setattr(model[1], "running_mean", torch.zeros(5).double()),
    "running mean of another dtype": lambda model: setattr(model[1], "running_mean", torch.zeros(4)),
    "number of batches made in inference mode": lambda model: setattr(
        model[1], "num_batches_tracked", torch.inference_mode()(torch.tensor)(0)
    ),
    "copied": lambda model: setattr(model, "1", copy.deepcopy(model[1])),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_between_two_calls_is_seen(name, planned):
    expected = steps(net(), CHANGES[name])
    check_alike(steps(convert(net()), CHANGES[name]), expected)
    assert planned


INPUTS = {
    "larger": lambda x: torch.cat([x, x], 2),
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "one image": lambda x: x[:1],
    "float32": lambda x: x.float(),
}


@pytest.fixture
def native(monkeypatch):
    """The calls of norms that stayed as they were before conversion, by a plan."""
    calls, holds = [], Native.holds

    def counted(*args):
        found = holds(*args)
        if found:
            calls.append(args)
        return found

    monkeypatch.setattr(Native, "holds", counted)
    return calls


def untrusted(model):
    model = convert(model)
    set_guard(model, threshold=1e-30)
    return model


@pytest.mark.parametrize("name", [*CHANGES, "nothing"])
def test_a_change_between_two_calls_of_an_untrusted_norm_is_seen(name, native, planned):
    change = CHANGES.get(name, lambda model: None)
    check_alike(steps(untrusted(net()), change), steps(net(), change))
    assert len(native) >= (4 if name == "nothing" else 1)
    assert not planned


def test_an_untrusted_norm_that_is_measured_again_is_in_place_again(native, planned):
    model, plain = untrusted(net()), net()
    check_alike(steps(model), steps(plain))
    assert native
    assert not planned
    set_guard(model, threshold=1.0)
    for each in (model, plain):
        each.load_state_dict(net().state_dict())
    check_alike(steps(model), steps(plain))
    assert planned


@pytest.mark.parametrize("kept_in", ["a checkpoint", "saved-tensor hooks"])
def test_an_untrusted_norm_under_saved_tensor_hooks_is_torchs(kept_in, native):
    def outcome(model):
        found = steps(model)
        x = torch.randn(2, 3, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
        model.zero_grad()
        y = checkpoint(model, x, use_reentrant=False) if kept_in == "a checkpoint" else saved(lambda: model(x))
        y.square().sum().backward()
        return [*found, y.detach(), *(p.grad for p in model[1:].parameters()), *model.buffers()]

    check_alike(outcome(untrusted(net())), outcome(net()))
    assert native


@pytest.mark.parametrize("name", INPUTS)
def test_another_input_is_seen(name, planned):
    expected = steps(net(), x=INPUTS[name])
    check_alike(steps(convert(net()), x=INPUTS[name]), expected)
    assert planned


SURROUNDINGS = {
    "vmap": lambda model, x: torch.func.vmap(model, randomness="same")(x.unsqueeze(0)),
    "functional gradient": lambda model, x: torch.func.grad(lambda x: model(x).square().sum())(x),
    "forward mode": lambda model, x: torch.func.jvp(model, (x,), (torch.ones_like(x),))[1],
    "no_grad": lambda model, x: torch.no_grad()(model)(x),
    "inference": lambda model, x: torch.inference_mode()(model)(x).clone(),
    "trace": lambda model, x: torch.jit.trace(model, x, check_trace=False)(x),
}


@pytest.mark.parametrize("name", SURROUNDINGS)
def test_what_surrounds_a_call_is_seen(name, planned):
    def outcome(model):
        found = steps(model)
        x = torch.randn(2, 3, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
        try:
            found.append(SURROUNDINGS[name](model, x).detach())
        except Exception as error:
            found.append(str(type(error)))
        return found

    check_alike(outcome(convert(net())), outcome(net()))
    assert planned


class Between(nn.Module):
    """A norm whose output, and the tensors of whose call, ``use`` gets."""

    def __init__(self, use):
        super().__init__()
        self.conv, self.bn, self.last, self.use = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1), use
        self.other = nn.BatchNorm2d(4)

    def forward(self, x):
        x = self.conv(x)
        return self.last(self.use(self, x, self.bn(x))).sin() * 0.1


def with_parameters(write, then=torch.relu):
    """Writes to a parameter between the norm and what follows."""

    def use(model, x, y):
        with torch.no_grad():
            write(model.bn)
        return then(y)

    return use


def in_order(*functions):
    def use(model, x, y):
        for function in functions:
            y = function(y)
        return y

    return use


def residual_of_a_norm(m, x, y):
    """A sum with the output of another norm, which a convolution has kept before."""
    other = m.other(x)
    return m.last(other) + (y + other)


USES = {
    "kept": lambda m, x, y: y,
    "kept, then activated": lambda m, x, y: m.last(y) + torch.relu(y),
    "kept, then activated in place": lambda m, x, y: (z := m.last(y).sin(), z + F.relu(y, inplace=True))[1],
    "kept, and read": lambda m, x, y: m.last(y) * y.cos(),
    "kept, then written to": lambda m, x, y: (z := m.last(y), y.mul_(2), z)[2],
    "x written to, then kept": lambda m, x, y: (torch.no_grad()(x.mul_)(2), m.last(y))[1],
    "x written to through an alias, then kept": lambda m, x, y: (x.detach().mul_(2), m.last(y))[1],
    "kept twice": lambda m, x, y: m.last(y) - F.conv2d(y, m.last.weight.sin()),
    "kept by a product": lambda m, x, y: y * x,
    "kept, with a hook": lambda m, x, y: (y.register_hook(lambda g: 2 * g), m.last(y))[1],
    "kept, then a hook": lambda m, x, y: (z := m.last(y), y.register_hook(lambda g: 2 * g), z + y)[2],
    "kept, then the gradient retained": lambda m, x, y: (z := m.last(y), y.retain_grad(), z + y)[2],
    "kept under a checkpoint": lambda m, x, y: checkpoint(m.last, y, use_reentrant=False),
    "kept under no_grad": lambda m, x, y: torch.no_grad()(m.last)(y) + y.sin(),
    "a kept sum": lambda m, x, y: m.last(y + x) + x,
    "a kept sum in place": lambda m, x, y: m.last(y.add_(x)) + y,
    "residual of a norm": residual_of_a_norm,
    "residual of a norm, in place": lambda m, x, y: (o := m.other(x), z := m.last(o), z + y.add_(o).relu_())[2],
    "residual of a norm first": lambda m, x, y: (o := m.other(x), z := m.last(o), z * torch.relu(o + y))[2],
    "residual of a norm that was written to": lambda m, x, y: (
        o := m.other(x),
        z := F.conv2d(o * 1, m.last.weight),
        o.mul_(0.5),
        z + torch.relu(y + o),
    )[3],
    "sum": lambda m, x, y: torch.relu(y + x),
    "sum of the other order": lambda m, x, y: torch.relu(x + y),
    "sum in place": lambda m, x, y: F.silu(y.add_(x)),
    "sum, all in place": lambda m, x, y: y.add_(x).relu_(),
    "sum without an activation": lambda m, x, y: y + x,
    "two sums": lambda m, x, y: torch.relu(y + x + x.sin()),
    "sum with itself": lambda m, x, y: torch.relu(y + y),
    "sum, and the norm's output": lambda m, x, y: torch.relu(y + x) * y.cos(),
    "sum of another layout": lambda m, x, y: torch.relu(y + x.contiguous(memory_format=torch.channels_last)),
    "sum with a number": lambda m, x, y: torch.relu(y + 1),
    "residual written to": lambda m, x, y: torch.relu((y + (r := x.sin())) + 0 * r.mul_(2)),
    "activated twice": lambda m, x, y: torch.relu(y) + F.silu(y),
    "activated in place and read": lambda m, x, y: F.relu(y, inplace=True) * y.cos(),
    "activated under no_grad": lambda m, x, y: torch.no_grad()(torch.relu)(y) + y.sin(),
    "activated under a checkpoint": lambda m, x, y: checkpoint(torch.relu, y, use_reentrant=False),
    "activated under a checkpoint that reads first": lambda m, x, y: checkpoint(
        lambda q: torch.relu(q) * q.cos(), y, use_reentrant=False
    ),
    "activated under a reentrant checkpoint": lambda m, x, y: checkpoint(torch.relu, y, use_reentrant=True),
    "activated with hooks": lambda m, x, y: saved(lambda: torch.relu(y)),
    "hook": lambda m, x, y: (y.register_hook(lambda g: 2 * g), torch.relu(y))[1],
    "hook after an activation in place": lambda m, x, y: ((z := y.relu_()), y.register_hook(lambda g: 2 * g), z)[2],
    "written to": in_order(lambda y: y.mul_(0.5), torch.relu),
    "detached": lambda m, x, y: torch.relu(y.detach()) + x,
    "detached in place": lambda m, x, y: torch.relu(y.detach_()) + x,
    "a view": lambda m, x, y: torch.relu(y.view(-1)).view(y.shape),
    "a slice written to": lambda m, x, y: (y[:, :2].mul_(2), torch.relu(y))[1],
    "bias written to": with_parameters(lambda bn: bn.bias.mul_(2)),
    "other activation": lambda m, x, y: F.silu(y) if guard.generations.current % 100 == 4 else torch.relu(y),
    "sum at times": lambda m, x, y: torch.relu(y + x) if guard.generations.current % 100 == 4 else torch.relu(y),
}


ALTERNATIVES = {
    "checkpoint": lambda f: checkpoint(lambda _: f(), torch.ones(1, requires_grad=True), use_reentrant=False),
    "saved-tensor hooks": lambda f: saved(f),
    "save_on_cpu": lambda f: in_context(torch.autograd.graph.save_on_cpu(), f),
    "dispatch mode": lambda f: in_context(FlopCounterMode(display=False), f),
    "vmap": lambda f: torch.func.vmap(lambda q: f() * q)(torch.ones(1, dtype=torch.float64))[0],
    "functional gradient": lambda f: f() + torch.func.grad(lambda q: (f() * q).mean())(torch.tensor(0.1).double()),
}


def in_context(context, function):
    with context:
        return function()


@pytest.mark.parametrize("adds", [False, True], ids=["alone", "sum"])
@pytest.mark.parametrize("activation", [F.elu, F.silu, torch.relu, F.leaky_relu, torch.sin])
@pytest.mark.parametrize("surroundings", ALTERNATIVES)
def test_what_begins_between_a_planned_norm_and_its_activation_is_seen(surroundings, activation, adds, planned):
    def of(x, y):
        return activation(y + x if adds else y)

    def change(model):
        model.use = lambda m, x, y: ALTERNATIVES[surroundings](lambda: of(x, y))

    torch.manual_seed(0)
    model = Between(lambda m, x, y: of(x, y)).double()
    expected = steps(copy.deepcopy(model), change)
    check_alike(steps(convert(model), change), expected)
    assert planned


def test_a_backward_pass_in_a_checkpoint_through_a_norm_outside_does_not_block(planned):
    def outcome(model):
        found = steps(model)
        x = torch.randn(2, 3, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(9))

        def use(model, x, y):
            def inner(y):
                z = y.sin()
                (gradient,) = torch.autograd.grad(z.mean(), model.conv.weight, retain_graph=True)
                return z + gradient.sum()

            return checkpoint(inner, y, use_reentrant=False)

        model.use = use
        y = model(x)
        model.zero_grad()
        y.mean().backward()
        return [*found, y.detach(), model.last.weight.grad]

    torch.manual_seed(0)
    model = Between(in_order(torch.relu)).double()
    expected = outcome(copy.deepcopy(model))
    check_alike(outcome(convert(model)), expected)
    assert planned


class OtherParameter(nn.Parameter):
    """A parameter that torch's classes do not know."""


def saved(function):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        return function()


@pytest.mark.parametrize("begins_with", ["relu", "sum", "kept", "itself"])
@pytest.mark.parametrize("name", USES)
def test_whatever_becomes_of_a_planned_output_training_is_torchs(name, begins_with, planned):
    """In the third step, after two that may have made a plan, something else becomes of the norm's output."""
    torch.manual_seed(0)
    begin = {"relu": in_order(torch.relu), "itself": USES[name]} | USES
    model = Between(begin[begins_with]).double()
    nn.init.uniform_(model.bn.weight, 0.5, 1.5)

    def change(model):
        model.use = USES[name]

    expected = steps(copy.deepcopy(model), change)
    check_alike(steps(convert(model), change), expected)
    assert planned or begins_with == "itself"


def test_sums_and_activations_of_planned_calls_are_made_by_the_node(monkeypatch):
    made = []
    for name in ("_activated_at_once", "_added_at_once"):
        function = getattr(pending, name)
        monkeypatch.setattr(
            pending, name, lambda *args, f=function: made.append((f.__name__, (z := f(*args)) is not None)) or z
        )
    monkeypatch.setattr(Plan, "state", None)
    steps(convert(Between(USES["sum, all in place"]).double()))
    # Nothing waits in C++ in the first two steps, and a function is read when it is called for the first time.
    assert made[:2] == [("_added_at_once", False)] * 2
    assert made[3] == ("_activated_at_once", False)
    del made[3]
    assert made[2:] == [("_added_at_once", True), ("_activated_at_once", True)] * 4


@pytest.mark.parametrize("name", ["kept", "a kept sum in place", "residual of a norm"])
def test_outputs_that_are_kept_are_made_by_the_node(name, monkeypatch):
    steps(convert(Between(USES[name]).double()), lambda model: monkeypatch.setattr(Plan, "state", None))


def test_a_momentum_that_is_written_to_is_read_in_every_call():
    model = net()
    model[1].momentum = torch.tensor(0.25, dtype=torch.float64)

    def change(model):
        model[1].momentum.fill_(0.9)

    expected = steps(copy.deepcopy(model), change)
    check_alike(steps(convert(model), change), expected)


def test_a_weight_of_a_class_of_its_own_is_not_taken_for_modified(planned):
    torch.manual_seed(0)
    model = Between(in_order(torch.relu)).double()
    model.bn.weight = OtherParameter(torch.full((4,), 0.7, dtype=torch.float64))

    def change(model):
        model.use = USES["sum, and the norm's output"]

    expected = steps(copy.deepcopy(model), change)
    check_alike(steps(convert(model), change), expected)
    assert planned


OPTIONS = {
    "slope": ({"negative_slope": 0.1}, {"negative_slope": 0.3}),
    "default": ({"negative_slope": 0.1}, {}),
    "in place": ({}, {"inplace": True}),
    "in place, by number": ({"inplace": 0}, {"inplace": 1}),
    "out of place": ({"negative_slope": 0.2, "inplace": True}, {"inplace": False, "negative_slope": 0.2}),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_other_options_of_a_function_that_was_called_before_are_seen(name, planned):
    def calling(options):
        return lambda m, x, y: F.leaky_relu(y, **options)

    first, then = (calling(options) for options in OPTIONS[name])
    torch.manual_seed(0)
    model = Between(first).double()

    def change(model):
        model.use = then

    expected = steps(copy.deepcopy(model), change)
    check_alike(steps(convert(model), change), expected)
    assert planned


def test_an_option_that_cannot_be_hashed_is_torchs_error():
    torch.manual_seed(0)
    model = convert(Between(in_order(torch.relu)).double())

    def change(model):
        model.use = lambda m, x, y: F.leaky_relu(y, negative_slope=[])

    assert steps(model, change)[-1] == str(TypeError)


def test_a_batch_that_cannot_be_counted_changes_nothing():
    model = convert(net())

    def change(model):
        model[1].num_batches_tracked = model[1].num_batches_tracked.reshape(1).expand(3)
        before.extend(b.clone() for b in model.buffers())

    before = []
    assert "RuntimeError" in steps(model, change)[-1]
    torch.testing.assert_close([*model.buffers()], before, rtol=0, atol=0)


def test_a_graph_may_be_recorded_in_inference_mode():
    def x(batch):
        return batch.requires_grad_()

    def recording(model):
        forward = model.forward

        def call(batch):
            with torch.inference_mode(), torch.enable_grad():
                return forward(batch)

        model.forward = call

    check_alike(steps(convert(net()), recording, x), steps(net(), recording, x))


@pytest.mark.parametrize("use", [torch.relu_, torch.sin], ids=["activated in place", "read"])
def test_an_output_does_not_keep_its_norm_alive(use, planned):
    kept = []
    model = convert(Between(lambda m, x, y: (kept.append(y), use(y))[1]).double())
    steps(model)
    norm = weakref.ref(model.bn)
    del model
    planned.clear()
    gc.collect()
    assert kept
    assert norm() is None
