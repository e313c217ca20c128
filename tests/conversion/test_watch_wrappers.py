"""A model is watched right under checkpoints, wrappers and autocast, however it is called, and whatever is raised
in its forward pass."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from foreign_nets import conv, spread
from one_norm import images
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint
from training import check_training, differences, trained

from inplace_abn import _torch, convert, guard, report, revert, set_guard
from inplace_abn.conversion import watch


class Block(nn.Module):
    """A norm whose zeros are compared with zero, and one whose activated output is written to."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.conv1, self.bn1 = conv(inputs, outputs), nn.BatchNorm2d(outputs)
        self.conv2, self.bn2 = conv(outputs, outputs), nn.BatchNorm2d(outputs)

    def forward(self, x):
        z = F.relu(self.bn1(self.conv1(x)))
        h = F.silu(self.bn2(self.conv2(z * (1 + (z == 0).to(z.dtype)))))
        h += z
        return h


class ReadAndWritten(nn.Module):
    """Two blocks, and a norm that nobody reads or writes to."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Block(3, 4), Block(4, 4)
        self.bn, self.last = nn.BatchNorm2d(4), conv(4, 4)
        self.run = lambda module, x: module(x)

    def forward(self, x):
        return self.last(F.relu(self.bn(self.run(self.second, self.run(self.first, x)))))


READ, WRITTEN = "eq compares them with zero", "add writes to its output"


def check_given_up(model):
    layers = {layer.name: layer for layer in report(model).layers}
    for block in ("first", "second"):
        assert READ in layers[f"{block}.bn1"].why
        assert WRITTEN in layers[f"{block}.bn2"].why
    assert layers["bn"].in_place, layers["bn"].why


def net():
    return spread(ReadAndWritten())


def test_readers_and_writers_are_found_together():
    check_given_up(check_training(net(), images(), tolerance=1e-6))


CHECKPOINTS = {
    "plain": lambda module, x: checkpoint(module, x, use_reentrant=False),
    "reentrant": lambda module, x: checkpoint(module, x, use_reentrant=True),
    "nested": lambda module, x: checkpoint(
        lambda x: checkpoint(module, x, use_reentrant=False) * 1.5, x, use_reentrant=False
    ),
}


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_checkpoints(kind):
    model = net()
    model.run = CHECKPOINTS[kind]
    check_given_up(check_training(model, images(), tolerance=1e-6))


def test_an_optimizer_that_steps_between_a_forward_pass_and_its_recomputation():
    """As the two optimizers of a GAN do."""

    def losses(model):
        guard.generations.current += 198 - guard.generations.current % 100
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        other = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.0)
        found = {}
        for step in range(4):
            torch.manual_seed(step)
            optimizer.zero_grad()
            loss = model(images().double()).square().mean()
            other.step()
            loss.backward()
            optimizer.step()
            found |= {f"step {step}, gradient of {name}": p.grad.clone() for name, p in model.named_parameters()}
        return found

    model = net().double()
    model.run = CHECKPOINTS["plain"]
    converted = convert(copy.deepcopy(model))
    errors = differences(losses(converted), losses(model))
    assert max(errors.values()) < 1e-6, errors
    check_given_up(converted)


@pytest.mark.parametrize("parts", ["first", "all"])
def test_nested_converted_models(parts):
    model = net().double()
    nested = copy.deepcopy(model)
    for part in (nested.first, nested.second)[: 1 if parts == "first" else 2]:
        convert(part)
    convert(nested)
    errors = differences(trained(nested, images()), trained(model, images()))
    assert max(errors.values()) < 1e-6, errors
    check_given_up(nested)


def test_a_converted_part_of_a_model():
    model = net().double()
    part = copy.deepcopy(model)
    convert(part.second)
    errors = differences(trained(part, images()), trained(model, images()))
    assert max(errors.values()) < 1e-6, errors
    assert READ in report(part.second).layers[0].why


def test_a_model_that_is_called_several_times_a_step():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(Block(3, 4), conv(4, 3))

        def forward(self, x):
            return self.inner(self.inner(x)) + self.inner(-x)

    model = spread(Twice()).double()
    inner = copy.deepcopy(model)
    convert(inner.inner)
    errors = differences(trained(inner, images()), trained(model, images()))
    assert max(errors.values()) < 1e-6, errors
    check_training(model, images(), tolerance=1e-6)


def test_autocast():
    model, outputs = net(), []
    converted = convert(copy.deepcopy(model))
    for made in (model, converted):
        torch.manual_seed(0)
        with torch.autocast("cpu", torch.bfloat16):
            y = made(images())
        y.float().square().sum().backward()
        outputs.append(y.float())
    assert (outputs[0] - outputs[1]).norm() < 0.03 * outputs[0].norm()
    check_given_up(converted)


@pytest.mark.parametrize("when", ["in a module", "in the model"])
def test_an_exception_in_the_forward_pass_ends_the_watch(when):
    model = convert(net())

    def fail(*_):
        raise KeyError("mine")

    handle = (model.last if when == "in a module" else model).register_forward_pre_hook(fail)
    with pytest.raises(KeyError, match="mine"):
        model(images())
    handle.remove()
    assert not _torch.dispatch_modes()
    assert watch.current() is None
    handle = model.register_forward_hook(fail)
    with pytest.raises(KeyError, match="mine"):
        model(images())
    assert not _torch.dispatch_modes()
    assert watch.current() is None
    handle.remove()
    model(images()).sum().backward()
    check_given_up(model)


def test_nothing_watches_between_two_measured_steps(monkeypatch):
    guard.generations.current += 101 - guard.generations.current % 100
    model = convert(spread(nn.Sequential(conv(3, 4), nn.BatchNorm2d(4), nn.ReLU(), conv(4, 4))))
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.0), []
    dispatch = watch.Watch.__torch_dispatch__
    counted = lambda self, *args: (seen.append(guard.generations.current % 100), dispatch(self, *args))[1]  # noqa: E731
    monkeypatch.setattr(watch.Watch, "__torch_dispatch__", counted)
    for _ in range(102):
        model(images()).sum().backward()
        optimizer.step()
        assert not _torch.dispatch_modes()
    assert set(seen) == {1, 0}
    set_guard(model, interval=0)
    model(images()).sum().backward()
    assert set(seen) == {1, 0}


def test_where_no_backward_pass_can_follow_nothing_watches(monkeypatch):
    model = convert(net())
    monkeypatch.setattr(watch.Watch, "__torch_dispatch__", None)
    with torch.inference_mode():
        model(images())
    with torch.no_grad():
        model.eval()(images())


class Called:
    """Calls a model otherwise than by its name."""

    def __init__(self, model, call):
        self.model, self.call = model, call
        self.parameters, self.named_parameters = model.parameters, model.named_parameters
        self.named_buffers = model.named_buffers

    def __call__(self, x):
        return self.call(self.model, x)


class System(nn.Module):
    """As a LightningModule, which nobody calls by its name."""

    def __init__(self):
        super().__init__()
        self.net = net()

    def training_step(self, x):
        return self.net(x).square()


def after_evaluations(model, x):
    for _ in range(9):
        model.eval()(x.detach()).sum().backward()
    model.zero_grad()
    return model.train()(x)


CALLS = {
    "method of the model": (System, System.training_step),
    "part of the model": (System, lambda model, x: model.net(x)),
    "parts of a part": (System, lambda model, x: model.net.last(model.net.second(model.net.first(x)))),
    "whole in a checkpoint": (net, lambda model, x: checkpoint(model, x, use_reentrant=False)),
    "whole in a reentrant checkpoint": (net, lambda model, x: checkpoint(model, x, use_reentrant=True)),
    "evaluated nine times before": (net, after_evaluations),
}


@pytest.mark.parametrize("name", CALLS)
def test_readers_and_writers_are_found_however_the_model_is_called(name):
    """The first steps read tags: the watch began with a call of the converted model, and ended after eight."""
    make, call = CALLS[name]
    torch.manual_seed(0)
    model = make().double().train()
    converted = convert(copy.deepcopy(model))
    errors = differences(trained(Called(converted, call), images()), trained(Called(model, call), images()))
    assert max(errors.values()) < 1e-6, errors
    for norm in converted.modules():
        if isinstance(norm, nn.BatchNorm2d) and (norm.num_features, norm.outcome().follows) != (4, ""):
            assert norm.outcome().in_place or READ in norm.outcome().why or WRITTEN in norm.outcome().why, norm
    whys = " ".join(norm.outcome().why for norm in converted.modules() if isinstance(norm, nn.BatchNorm2d))
    assert READ in whys
    assert WRITTEN in whys


def test_parts_have_hooks_only_until_what_is_called_is_known():
    def hooked(model):
        return [name for name, part in model.named_modules() if part._forward_pre_hooks]

    model = System()
    assert hooked(convert(model)) == ["", "net", "net.first", "net.second"]
    model.net(images())
    assert hooked(model) == ["", "net"]
    assert hooked(revert(model)) == []
    model = convert(System())
    with torch.no_grad():
        model.net.eval()(images())
    assert hooked(model) == ["", "net", "net.first", "net.second"]
    torch.fx.symbolic_trace(model.net.first)
    convert(model)
    assert hooked(model) == ["", "net", "net.first", "net.second"]


def test_what_a_step_has_found_is_copied_pickled_and_reverted():
    model = net()
    model.run = None
    model.forward = None
    original = copy.deepcopy(model.second)
    part = convert(model.second)
    x = torch.randn(2, 4, 8, 8)
    part(x).sum().backward()
    for again in (copy.deepcopy(part), pickle.loads(pickle.dumps(part))):
        assert report(again) == report(part)
        again(x).sum().backward()
    average = AveragedModel(part, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    average.update_parameters(part)
    average(x).sum().backward()
    revert(part)
    assert not part._forward_hooks
    assert not part._forward_pre_hooks
    assert [set(vars(m)) for m in part.modules()] == [set(vars(m)) for m in original.modules()]
