"""Readers of tags that come in other steps than those in which their norm was first looked at."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import inplace_abn


class TwoConsumers(nn.Module):
    """A norm whose result in one of two places is counted. It is not called in step 1."""

    def __init__(self, writes):
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1)
        self.writes = writes

    def forward(self, x, step):
        y = self.conv(x)
        if step == 1:
            return y.mean()
        # torch keeps the input of this relu, so its result may be written to.
        a, h = F.silu(self.norm(y)), F.leaky_relu(self.norm(y.flip(2)), 0.0)
        if self.writes:
            h = h.add_(a.detach())
            return self.head(h * a).mean()
        return self.head(h * a).mean() + h.sum() / (h != 0).sum()


class Counted(nn.Module):
    """A norm whose activated result is counted."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1)

    def forward(self, x, step):
        h = torch.relu(self.norm(self.conv(x)))
        return self.head(h).mean() + h.sum() / ((h != 0).sum() + 1)


def losses(model, before=lambda model, step: None, steps=7):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(1)
    found = []
    for step in range(steps):
        before(model, step)
        optimizer.zero_grad()
        loss = model(torch.randn(4, 3, 8, 8, dtype=torch.float64), step)
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("writes", [False, True])
def test_a_second_consumer_is_watched_even_if_the_norm_is_not_called_in_the_step_after(writes):
    """A consumer that came second in the first step was put in place in a step that nobody watched."""
    torch.manual_seed(0)
    model = TwoConsumers(writes).double()
    converted = inplace_abn.convert(copy.deepcopy(model))
    assert losses(converted) == pytest.approx(losses(model), rel=1e-10)


def test_a_norm_whose_weight_is_set_after_it_was_zero_is_in_place_in_watched_steps_only():
    """A norm of zeros was put in place, unwatched, in the step in which somebody gave it other weights."""
    torch.manual_seed(0)
    model = Counted().double()

    @torch.no_grad()
    def before(model, step):
        if step in (0, 3):
            model.norm.weight.fill_(float(step))

    converted = inplace_abn.convert(copy.deepcopy(model))
    assert losses(converted, before, 9) == pytest.approx(losses(model, before, 9), rel=1e-10)


@pytest.mark.parametrize("adds", [lambda h, y: h + y, lambda h, y: y + h], ids=["first", "second"])
@pytest.mark.parametrize("norm", [nn.BatchNorm2d, nn.InstanceNorm2d, lambda size: nn.GroupNorm(2, size)])
@pytest.mark.parametrize("follows", [nn.Identity, nn.ReLU, nn.GELU])
def test_a_reader_of_what_was_added_to_a_norm_sees_zeros(follows, norm, adds):
    class Added(nn.Module):
        def __init__(self):
            super().__init__()
            self.convs = nn.ModuleList(nn.Conv2d(3, 4, 3) for _ in range(2))
            self.norms = nn.ModuleList(norm(4) for _ in range(2))
            self.follows, self.head = follows(), nn.Conv2d(4, 2, 1)

        def forward(self, x, step):
            h, y = torch.relu(self.norms[0](self.convs[0](x))), self.norms[1](self.convs[1](x))
            out = self.head(self.follows(adds(h, y))).square().mean()
            return out if step < 2 else out + (h == 0).double().mean() + h.sign().mean()

    torch.manual_seed(0)
    model = Added().double()
    converted = inplace_abn.convert(copy.deepcopy(model))
    assert losses(converted) == pytest.approx(losses(model), rel=1e-9)


READERS = {
    "ge": lambda h: (h >= 0).double(),
    "not_equal": lambda h: torch.not_equal(h, 0).double(),
    "sign": torch.sign,
    "count_nonzero": lambda h: h + torch.count_nonzero(h) / 100,
    "floor": lambda h: (h * 1).add(h.floor()),
    "bool": lambda h: h.bool().double(),
    "to a bool": lambda h: h.to(torch.bool).double(),
    "where": lambda h: h.sum() + torch.where(h)[0].numel() / 100,
    "divides": lambda h: (torch.ones_like(h) / h).detach().clamp(-2, 2),
    "a number divided": lambda h: (1 / h).detach().clamp(-2, 2),
    "a power": lambda h: (h**-1.0).detach().clamp(-2, 2),
}


class Reading(Counted):
    """A norm whose activated result a function reads from a step on."""

    def __init__(self, activation, first):
        super().__init__()
        self.activation, self.first = activation, first

    def forward(self, x, step):
        h = self.activation(self.norm(self.conv(x)))
        out = self.head(h).square().mean()
        return out if step < self.first else out + self.read(h).double().mean()


def losses_of_both(activation, read, first, **settings):
    """The losses of a native net and of a converted one, with a compiled function that reads from this step on."""
    torch.manual_seed(0)
    native = Reading(activation, first).double()
    converted = inplace_abn.convert(copy.deepcopy(native))
    for model in (native, converted):
        model.read = torch.compile(read, backend="aot_eager", **settings)
    return losses(native, steps=5), losses(converted, steps=5)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize("activation", [nn.ReLU, nn.Hardswish, nn.GELU])
def test_a_compiled_reader_that_comes_between_watched_steps_sees_zeros(activation, first, reader):
    native, converted = losses_of_both(activation(), READERS[reader], first)
    assert converted == pytest.approx(native, rel=1e-9)


@pytest.mark.usefixtures("fresh_compiler")
def test_a_compiled_reader_without_a_graph_break_that_comes_between_watched_steps_is_an_error():
    with pytest.raises(torch._dynamo.exc.Unsupported):
        losses_of_both(nn.ReLU(), READERS["ge"], 2, fullgraph=True)


OPERATORS = {
    "a number less it": lambda h: 2 - h,
    "a number divided by a sum": lambda h: 1 / (h + 1),
    "its square": lambda h: h**2,
    "half of it": lambda h: h / 2,
    "a product": lambda h: 3 * h,
    "its mean": lambda h: h.mean((2, 3)),
}


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("first", [0, 2])
def test_a_compiled_function_of_one_graph_calculates_with_an_activated_output(name, first):
    native, converted = losses_of_both(nn.ReLU(), OPERATORS[name], first, fullgraph=True)
    assert converted == pytest.approx(native, rel=1e-9)


FUNCTIONS = {
    "a power of a number": lambda h: 2**h,
    "split": lambda h: h.split(2, 1)[0],
    "norm": lambda h: h.norm(),
    "flatten": lambda h: h.flatten(1).softmax(1),
    "interpolate": lambda h: F.interpolate(h, scale_factor=2.0),
    "attention": lambda h: F.scaled_dot_product_attention(h, h, h),
    "iterate": lambda h: sum(each.mean() for each in h),
    "ge": READERS["ge"],
}


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_compiled_function_of_one_graph_that_was_seen_in_the_first_step_gets_a_plain_tensor(name):
    native, converted = losses_of_both(nn.ReLU(), FUNCTIONS[name], 0, fullgraph=True)
    assert converted == pytest.approx(native, rel=1e-9)
