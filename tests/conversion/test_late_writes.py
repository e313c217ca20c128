"""A norm keeps its output where a reader keeps it, and a residual because it adds that itself. Whoever writes to them,
where torch allows it, gets torch's gradients or an error, in watched steps as in others."""

import copy

import pytest
import torch
from modes import start_over
from torch import nn

from inplace_abn import convert


class Net(nn.Module):
    def __init__(self, run, norm, act=None):
        super().__init__()
        self.first, self.side, self.out = (nn.Linear(8, 8) for _ in range(3))
        self.norm, self.act, self.run = norm, act or nn.ReLU(inplace=True), run

    def forward(self, x):
        return self.run(self, x)


def led_nowhere(net, x):
    """A reader that keeps the norm's output, and whose result is not used, as that of an auxiliary head."""
    h = net.norm(net.first(x))
    net.side(h)
    return h


def written_after(net, x):
    h = net(x)
    h.mul_(2)
    return net.out(h)


def residual(net, x):
    r = net.side(x)
    return net.out(net.act(net.norm(net.first(x)) + r)), r


def residual_kept(net, x):
    r = net.side(x)
    return net.out(net.norm(net.first(x)) + r), r


def residual_written_after(net, x):
    z, r = net(x)
    with torch.no_grad():
        r.mul_(2)
    return z


class RMS(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), 1e-6

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


NORMS = {
    "batch norm": nn.BatchNorm1d,
    "layer norm": nn.LayerNorm,
    "layer norm without bias": lambda size: nn.LayerNorm(size, bias=False),
    "RMS norm by hand": RMS,
}


def steps(native, net, run):
    """The gradient of the first layer in a step of each net, or the error; step after step."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(4):
        native.load_state_dict(net.state_dict())
        x, found = torch.randn(16, 8).double(), []
        for each in (native, net):
            each.zero_grad()
            z = run(each, x)
            try:
                z.square().mean().backward()
                found.append(each.first.weight.grad.clone())
            except RuntimeError as error:
                found.append(str(error))
        yield found
        optimizer.step()


def nets(run, norm, act=None):
    start_over()
    native = Net(run, norm, act).double()
    return native, convert(copy.deepcopy(native))


@pytest.mark.parametrize("name", NORMS)
def test_an_output_whose_reader_leads_nowhere_may_be_written_to_in_the_forward_pass(name):
    native, net = nets(lambda m, x: m.out(m.act(led_nowhere(m, x))), NORMS[name](8))
    for expected, found in steps(native, net, lambda net, x: net(x)):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("run", "write", "norm", "act"),
    [
        *((led_nowhere, written_after, norm, None) for norm in NORMS),
        *((residual, residual_written_after, "batch norm", act) for act in (nn.ReLU(), nn.SiLU(), nn.ReLU(True))),
        (residual_kept, residual_written_after, "batch norm", None),
    ],
)
def test_a_write_after_the_forward_pass_is_told_in_the_first_step_too(run, write, norm, act):
    native, net = nets(run, NORMS[norm](8), act)
    errors = 0
    for expected, found in steps(native, net, write):
        if isinstance(found, str):
            assert "has been modified in place" in found
            errors += 1
        else:
            torch.testing.assert_close(found, expected)
    # The layer is told, and torch's from then on.
    assert errors <= 2
