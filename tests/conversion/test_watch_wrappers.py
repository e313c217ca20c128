"""A model is watched right under checkpoints, wrappers, autocast and threads, and whatever its forward pass raises."""

import copy
import pickle
import threading

import pytest
import torch
import torch.nn.functional as F
from foreign_nets import conv, spread
from one_norm import images
from ranks import on_each_rank
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
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


def test_threads_watch_models_of_their_own():
    expected = report(check_training(net(), images(), tolerance=1e-6)).to_dict()
    found = []

    def run():
        model = convert(net())
        model(images()).sum().backward()
        found.append(report(model).to_dict())

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    whys = [[layer["why"] for layer in told["layers"]] for told in [expected, *found]]
    assert whys == [whys[0]] * 5


def seeded():
    torch.manual_seed(0)
    return net().double()


@pytest.mark.parametrize("wrapper", ["ddp", "find_unused_parameters", "static_graph", "fsdp", "fsdp of blocks"])
@pytest.mark.parametrize("checkpointed", [False, True])
@on_each_rank(2)
def test_data_parallel_wrappers(wrapper, checkpointed):
    def wrapped(model):
        if checkpointed:
            model.run = CHECKPOINTS["plain"]
        if wrapper.startswith("fsdp"):
            for block in (model.first, model.second) if wrapper != "fsdp" else ():
                fully_shard(block)
            return fully_shard(model)
        options = {wrapper: True} if wrapper != "ddp" else {}
        return DistributedDataParallel(model, **options)

    def losses(model):
        guard.generations.current += 198 - guard.generations.current % 100
        optimizer, found = torch.optim.SGD(model.parameters(), lr=1e-3), {}
        for step in range(4):
            torch.manual_seed(10 * step + torch.distributed.get_rank())
            optimizer.zero_grad()
            y = model(images().double())
            y.square().mean().backward()
            optimizer.step()
            grads = {name: p.grad for name, p in model.named_parameters()}
            full = {n: g.full_tensor() if hasattr(g, "full_tensor") else g.clone() for n, g in grads.items()}
            found |= {f"step {step}, gradient of {name}": g for name, g in full.items()} | {
                f"output {step}": y.detach()
            }
        return found

    model = seeded()
    converted = convert(copy.deepcopy(model))
    errors = differences(losses(wrapped(converted)), losses(wrapped(model)))
    assert max(errors.values()) < 1e-6, errors
    check_given_up(converted)


@pytest.mark.parametrize("fullgraph", [False, True])
def test_compiled_functions_run_in_watched_steps(fullgraph):
    """A function that was compiled as a full graph was torch's error in the first step."""
    compiled = torch.compile(lambda h: h.tanh() * 2, backend="eager", fullgraph=fullgraph)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm, self.last = conv(3, 4), nn.BatchNorm2d(4), conv(4, 4)

        def forward(self, x):
            return compiled(self.last(F.relu(self.norm(self.conv(x)))))

    (layer,) = report(check_training(Net(), images())).layers
    assert layer.in_place
    # The compiler is at work again.
    torch._dynamo.utils.counters.clear()
    compiled(torch.randn([2] * (5 + fullgraph)))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


class CompiledBlocks(nn.Module):
    """Blocks that are compiled, each of which is checkpointed in eager code."""

    def __init__(self):
        super().__init__()
        blocks = [nn.Sequential(conv(3, 3), nn.BatchNorm2d(3), nn.ReLU(), conv(3, 3), nn.GELU()) for _ in range(2)]
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x):
        for block in self.blocks:
            # A copy of a compiled module is not compiled.
            if block._compiled_call_impl is None:
                block.compile(backend="aot_eager")
            x = checkpoint(block, x, use_reentrant=False)
        return x


def test_the_recomputation_of_a_compiled_block_does_what_its_watched_forward_pass_did():
    """The forward pass ran as it is written, and the recomputation was compiled, which was torch's CheckpointError."""
    check_training(CompiledBlocks(), torch.randn(2, 3, 8, 8))


def test_a_watch_whose_forward_pass_was_interrupted_ends_with_the_next_call():
    """torch calls no hooks after a KeyboardInterrupt. The watch went on for all that came afterwards."""

    class Interrupted(nn.Module):
        def __init__(self, interrupts):
            super().__init__()
            self.conv, self.norm, self.interrupts = conv(3, 4), nn.BatchNorm2d(4), interrupts

        def forward(self, x):
            if self.interrupts:
                raise KeyboardInterrupt
            return self.conv(x)

    with pytest.raises(KeyboardInterrupt):
        convert(Interrupted(True))(images())
    assert watch.current() is not None
    convert(Interrupted(False))(images())
    assert watch.current() is None
    assert _torch.count_dispatch_modes() == 0


def test_compilers_go_on_after_threads_have_watched_at_the_same_time():
    """The thread that ended last restored what the other one had set, for good."""
    both = threading.Barrier(2, timeout=30)
    first_ended = threading.Event()

    class Net(nn.Module):
        def __init__(self, is_first):
            super().__init__()
            self.conv, self.norm, self.is_first = conv(3, 4), nn.BatchNorm2d(4), is_first

        def forward(self, x):
            both.wait()
            if not self.is_first:
                assert first_ended.wait(30)
            return self.norm(self.conv(x))

    def run(is_first):
        convert(Net(is_first))(images())
        if is_first:
            first_ended.set()

    compiled = torch.compile(lambda t: t.sin(), backend="eager")
    threads = [threading.Thread(target=run, args=(is_first,)) for is_first in (True, False)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch._dynamo.utils.counters.clear()
    compiled(torch.randn(3))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
