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


READERS = {
    "ge": lambda h: (h >= 0).double(),
    "not_equal": lambda h: torch.not_equal(h, 0).double(),
    "sign": torch.sign,
    "count_nonzero": lambda h: h + torch.count_nonzero(h) / 100,
    "floor": lambda h: (h * 1).add(h.floor()),
}


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize("activation", [nn.ReLU, nn.Hardswish, nn.GELU])
def test_a_compiled_reader_that_comes_between_watched_steps_sees_zeros(activation, first, reader):
    class Read(Counted):
        def forward(self, x, step):
            h = self.activation(self.norm(self.conv(x)))
            out = self.head(h).square().mean()
            return out if step < first else out + self.read(h).mean()

    torch.manual_seed(0)
    native = Read().double()
    native.activation = activation()
    converted = inplace_abn.convert(copy.deepcopy(native))
    for model in (native, converted):
        model.read = torch.compile(READERS[reader], backend="aot_eager")
    assert losses(converted, steps=5) == pytest.approx(losses(native, steps=5), rel=1e-9)


@pytest.mark.usefixtures("fresh_compiler")
def test_a_compiled_reader_without_a_graph_break_is_an_error():
    class Read(Counted):
        def forward(self, x, step):
            h = torch.relu(self.norm(self.conv(x)))
            return self.head(h).mean() + (0 if step < 2 else self.read(h))

    torch.manual_seed(0)
    model = inplace_abn.convert(Read().double())
    model.read = torch.compile(lambda h: (h >= 0).double().mean(), backend="aot_eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        losses(model)
