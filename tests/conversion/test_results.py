"""Who reads or writes to an activated result between two watched steps gets what it gets with torch."""

import copy
import pickle
import threading

import pytest
import torch
from cases import covering
from foreign_nets import spread
from one_norm import OneNorm, images
from test_activation_modules import Wired, tokens
from test_watch_writes import ACTIVATIONS, WRITES
from torch import nn
from torch.utils.checkpoint import checkpoint

from inplace_abn import convert, guard, report

READERS = {
    "==": lambda h: (h == 0).sum(),
    "!= of a function": lambda h: torch.ne(h, 0).sum(),
    "> from the right": lambda h: (h > 0).sum(),
    "<=": lambda h: h.le(0).sum(),
    ">=": lambda h: torch.greater_equal(h, 0).sum(),
    "<": lambda h: (h < 0).sum(),
    "sign": lambda h: h.sign().abs().sum(),
    "count_nonzero": torch.count_nonzero,
    "bool": lambda h: h.bool().sum(),
    "to bool": lambda h: h.to(torch.bool).sum(),
    "a root": lambda h: h.sqrt().nansum(),
    "a power": lambda h: h.pow(0.5).nansum(),
    "a reciprocal": lambda h: (1 / h).isinf().sum(),
    "a division": lambda h: torch.div(torch.ones_like(h), h).isinf().sum(),
    "a floor": lambda h: (h // 1).sum(),
    "a power in float64": lambda h: torch.float_power(h, 0.5).nansum(),
    "where": lambda h: torch.tensor(float(len(torch.where(h)[0]))),
    "argwhere": lambda h: torch.tensor(float(len(torch.argwhere(h)))),
    "type_as": lambda h: h.type_as(torch.ones((), dtype=torch.bool)).sum(),
    "the norm of zeros": lambda h: torch.linalg.vector_norm(h, 0),
    "argmin": lambda h: h.argmin(),
    "detached": lambda h: (h.detach() == 0).sum(),
    "data": lambda h: (h.data == 0).sum(),
    "a view": lambda h: (h.view(-1) == 0).sum(),
    "a view of a view": lambda h: (h.flatten(1)[:, 2:] == 0).sum(),
    "an index": lambda h: (h[:, 1] == 0).sum(),
    "after others": lambda h: (h.mean(), h.std(), (h == 0).double().mean())[2],
    "numpy": lambda h: torch.tensor((h.detach().numpy() == 0).sum()),
    "a list": lambda h: torch.tensor(sum(value == 0 for value in h.detach().flatten().tolist())),
    "a copy": lambda h: (h.detach().clone() == 0).sum(),
    "a cast": lambda h: (h.detach().float() == 0).sum(),
    "a pickle": lambda h: (pickle.loads(pickle.dumps(h.detach())) == 0).sum(),
    "a deep copy": lambda h: (copy.deepcopy(h.detach()) == 0).sum(),
    "an item": lambda h: torch.tensor(h.detach().abs().min().item()),
}


def reading(found, read=None):
    def run(m, x):
        h = m.act(m.bn(m.conv(x))) if isinstance(m, OneNorm) else m.act(m.fc1(x) - 4)
        if read is not None:
            with torch.no_grad():
                found.append(read(h).item())
        return (m.last if isinstance(m, OneNorm) else m.fc2)(h)

    return run


def trained(model, late, steps=12, since=6):
    """The state after some steps. From one on, which nobody watches, the forward pass is another one."""
    guard.generations.current += 101 - guard.generations.current % 100
    torch.manual_seed(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for i in range(steps):
        if i == since:
            model.run = late
        torch.manual_seed(i)
        optimizer.zero_grad()
        x = images() if isinstance(model, OneNorm) else tokens()
        model(x.double()).square().mean().backward()
        optimizer.step()
    return model.state_dict()


def models(kind, activation, run):
    torch.manual_seed(0)
    model = spread(OneNorm(run, activation)) if kind == "norm" else Wired(run, activation)
    return model.double(), convert(copy.deepcopy(model.double()))


@covering(2, reader=READERS, activation=[nn.ReLU(), nn.GELU(), nn.Hardswish(), nn.SiLU()], kind=["norm", "activation"])
def test_a_late_reader_of_tags_reads_zeros(reader, activation, kind):
    """A hook at every fiftieth step counted no zero of a relu, ever."""
    found = [], []
    for model, values in zip(models(kind, activation, reading([])), found, strict=True):
        trained(model, reading(values, READERS[reader]))
    assert found[0] == pytest.approx(found[1], rel=1e-6)


def in_place_on_a_view(run):
    torch.manual_seed(0)
    model = spread(OneNorm(run, nn.ReLU(inplace=True), nn.InstanceNorm2d(4, affine=True))).double()
    return model, convert(copy.deepcopy(model))


@pytest.mark.parametrize("reader", READERS)
def test_a_late_reader_of_an_instance_norms_memory_reads_zeros(reader):
    """torch's instance norm returns a view, and what was activated in its memory was not offered."""
    found = [], []
    for model, values in zip(in_place_on_a_view(reading([])), found, strict=True):
        trained(model, reading(values, READERS[reader]))
    assert found[0] == pytest.approx(found[1], rel=1e-6)


def test_a_hook_on_what_was_activated_in_an_instance_norms_memory_is_called():
    """It ended the process."""

    def run(m, x):
        h = m.act(m.bn(m.conv(x)))
        h.register_hook(lambda g: g * 2)
        return m.last(h)

    states = [trained(model, run) for model in in_place_on_a_view(reading([]))]
    for key, value in states[0].items():
        torch.testing.assert_close(states[1][key], value, rtol=1e-6, atol=1e-7)


def test_a_late_reader_of_a_module_in_place_reads_zeros():
    """The layer is in place before and after, so it was the reader that got zeros."""
    found = []
    _, converted = models("norm", nn.ReLU(), reading([]))
    trained(converted, reading(found, READERS["=="]))
    (layer,) = report(converted).layers
    assert layer.in_place
    assert min(found) > 0


def test_a_root_of_zeros_has_torchs_gradient():
    """The root of a tag, a tiny negative number, is NaN. That of a zero has an infinite slope, which relu's stops."""

    def run(m, x):
        h = m.act(m.bn(m.conv(x)))
        return m.last(h) + h.sqrt()

    states = [trained(model, run) for model in models("norm", nn.ReLU(), reading([]))]
    for name, value in states[0].items():
        assert value.isfinite().all()
        torch.testing.assert_close(states[1][name], value, rtol=1e-8, atol=1e-8)


SEEN = ["+=", "*= of a number", "relu_", "item", "copy_", "dropout in place", "twice", "foreach", "without grad"]


@covering(2, name=ACTIVATIONS, write=SEEN, read_before=[False, True])
def test_a_late_write_trains_as_with_torch(name, write, read_before):
    """A dropout in place behind silu, whose probability rises from zero in the sixth step, ended the training."""

    def run(m, x):
        x = m.conv(x)
        h = m.act(m.bn(x))
        if read_before:
            assert ((h == 0).sum() + h.mean()).isfinite()
        WRITES[write](h, x)
        return m.last(h)

    states = [trained(model, run) for model in models("norm", ACTIVATIONS[name], reading([]))]
    for key, value in states[0].items():
        torch.testing.assert_close(states[1][key], value, rtol=1e-5, atol=1e-6)


def test_a_result_that_was_written_to_is_the_tensor_that_was_written_to():
    kept = []

    def run(m, x):
        kept.append(m.act(m.bn(m.conv(x))))
        m.drop(kept[-1])
        return m.last(kept[-1])

    results = []
    for model in models("norm", nn.SiLU(), reading([])):
        model.drop = nn.Dropout2d(0.5, inplace=True)
        trained(model, run)
        results.append(kept[-1])
        assert type(kept[-1]) is torch.Tensor
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-7)
    assert (results[0] == 0).any()


def test_a_write_that_torch_forbids_is_an_error():
    def run(m, x):
        h = m.act(m.bn(m.conv(x)))
        return m.last(h.mul_(2))

    _, converted = models("norm", nn.ReLU(), reading([]))
    with pytest.raises(RuntimeError, match="the output of bn has been modified in place"):
        trained(converted, run)


def test_what_a_model_returns_is_a_plain_tensor():
    converted = convert(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.SiLU()))
    guard.generations.current += 101 - guard.generations.current % 100
    optimizer = torch.optim.SGD(converted.parameters(), lr=0.1)
    for _ in range(4):
        z = converted(images())
        z.mean().backward()
        optimizer.step()
        assert type(z) is torch.Tensor


@torch.jit.script
def detached(t):
    return t.detach()


def without_torch_function(t):
    with torch._C.DisableTorchFunctionSubclass():
        return t.detach()


def shares_memory(t):
    return torch.autograd.Variable(t)


@pytest.mark.parametrize(
    "alias", [detached, without_torch_function, shares_memory, torch.Tensor.detach, lambda t: t[:]]
)
def test_a_late_write_to_what_others_hold_is_an_error_not_other_numbers(alias):
    """The other tensor kept the values of before the write."""

    def run(m, x):
        h = m.act(m.bn(m.conv(x)))
        other = alias(h)
        h.mul_(2)
        return m.last(h) + other.detach().sum()

    _, converted = models("norm", nn.SiLU(), reading([]))
    with pytest.raises(RuntimeError, match="the output of bn has been modified in place"):
        trained(converted, run)


def test_a_late_write_keeps_attributes_of_the_tensor():
    seen = []

    def run(m, x):
        h = m.act(m.bn(m.conv(x)))
        h.label = "h"
        seen.append(h.mul_(2).label)
        return m.last(h)

    trained(models("norm", nn.SiLU(), reading([]))[1], run)
    assert set(seen) == {"h"}


def test_a_late_write_in_inference_mode_is_an_error_in_backward():
    def run(m, x):
        h = m.act(m.bn(m.conv(x)))
        with torch.inference_mode():
            h.mul_(2)
        return m.last(h)

    with pytest.raises(RuntimeError, match="the output of bn has been modified in place"):
        trained(models("norm", nn.SiLU(), reading([]))[1], run)


def test_transforms_may_close_over_a_late_result():
    def run(m, x):
        h = m.act(m.bn(m.conv(x)))
        constant = h.detach()
        g = torch.func.grad(lambda t: (constant.view(-1) * t.view(-1)).sum().sin())(constant + 1)
        return m.last(h) * g.mean() + torch.func.jvp(lambda t: (t * constant).sum(), (constant,), (constant,))[1]

    states = [trained(model, run) for model in models("norm", nn.SiLU(), reading([]))]
    for key, value in states[0].items():
        torch.testing.assert_close(states[1][key], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.SiLU(), nn.Identity()], ids=str)
def test_a_compiled_part_may_follow_a_layer_in_steps_that_nobody_watches(activation):
    """A compiled region met the class of what is offered, and torch refused it."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), activation)
    model = nn.Sequential(body, nn.Sequential(nn.Conv2d(4, 2, 1), nn.Tanh())).double()
    losses = []
    for net in (model, convert(copy.deepcopy(model))):
        net[1] = torch.compile(net[1], backend="aot_eager")
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for i in range(5):
            torch.manual_seed(i)
            optimizer.zero_grad()
            loss = net(images().double()).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[5:] == pytest.approx(losses[:5], rel=1e-6)


def skipping(m, x):
    skip = m.conv(x)
    h = m.act(m.bn(m.last(skip)) + skip)
    skip += 1.0
    return h * skip.mean() + m.last(h)


@pytest.mark.parametrize("kept", ["activated", "a sum"])
@pytest.mark.parametrize("since", [0, 6])
def test_under_checkpoints_a_residual_that_is_written_to_is_right_or_an_error(since, kept):
    """The recomputation handed out the residual as it was after the write."""

    def late(m, x):
        if kept == "activated":
            return checkpoint(lambda t: skipping(m, t), x, use_reentrant=False)

        def summed(t):
            skip = m.conv(t)
            y = m.bn(m.last(skip)) + skip
            z = m.last(y)
            skip += 1.0
            return z * skip.mean()

        return checkpoint(summed, x, use_reentrant=False)

    model, converted = models("norm", nn.SiLU(), reading([]))
    expected = trained(model, late, since=since)
    try:
        found = trained(converted, late, since=since)
    except RuntimeError as error:
        assert since > 0
        assert "the residual of bn has been modified in place" in str(error)
        return
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.SiLU()], ids=str)
def test_a_write_that_fails_changes_nothing(activation):
    """In a watched step the tags were gone, although nothing was written."""

    def run(m, x):
        h = m.act(m.bn(m.conv(x)))
        with pytest.raises(RuntimeError):
            h.mul_(torch.ones(5, 7, 11))
        return m.last(h)

    states = [trained(model, run, since=0) for model in models("norm", activation, reading([]))]
    for key, value in states[0].items():
        torch.testing.assert_close(states[1][key], value, rtol=1e-5, atol=1e-6)


def test_a_write_that_the_watch_does_not_see_is_an_error_even_if_the_layer_saves_nothing():
    """The layer was given up at the end of the watched step, which took what was written for what was kept."""

    def run(m, x):
        h = m.act(m.conv(x))
        thread = threading.Thread(target=lambda: h.detach().mul_(2))
        thread.start()
        thread.join()
        return h + 1

    model = convert(Wired(lambda m, x: run(m, x), nn.SiLU()).double())
    model.conv = model.fc1
    with pytest.raises(RuntimeError, match="the output of act has been modified in place"):
        model(tokens().double()).sum().backward()
