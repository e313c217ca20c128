"""Converted models under torch.compile: gradients are the native ones, and no more memory is held than in eager
mode."""

import copy
import logging

import pytest
import torch
import torch._functorch.config
from cases import INDUCTOR, needs_compiler
from compiled_converted_nets import ACTIVATIONS, ChainAndBlock, ChainAndBlocks, batch, compiled_pair, held, made
from compiled_nets import assert_same, step
from modes import distrust, start_over
from torch import nn
from torch.utils.checkpoint import checkpoint

from inplace_abn import InPlaceABN, convert, guard
from inplace_abn.compiling import joint

pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.filterwarnings("ignore:.*torch.jit"),
]


@pytest.mark.parametrize(
    ("backend", "activation", "kind"),
    [
        *(("aot_eager", activation, ChainAndBlock) for activation in ACTIVATIONS),
        ("aot_eager", "relu", ChainAndBlocks),
        pytest.param("inductor", "relu", ChainAndBlocks, marks=needs_compiler),
        pytest.param("inductor", "silu", ChainAndBlock, marks=needs_compiler),
    ],
)
def test_gradients_are_native_and_no_more_is_held_than_in_eager(backend, activation, kind, device):
    native, x = made(activation, device, kind), batch(device)
    module, compiled = compiled_pair(native, backend)
    eager = convert(copy.deepcopy(native))
    for _ in range(2):
        assert_same(step(compiled, module, x), step(native, native, x))
    step(eager, eager, x)
    assert held(compiled, x) <= held(eager, x)


@pytest.mark.parametrize("activation", ["leaky_relu", "silu", "identity"])
def test_after_an_eager_step_no_more_is_held_than_in_eager(activation, device):
    native, x = made(activation, device), batch(device)
    module, compiled = compiled_pair(native)
    for _ in range(2):
        assert_same(step(module, module, x), step(native, native, x))
    assert_same(step(compiled, module, x), step(native, native, x))
    assert held(compiled, x) <= held(module, x)


@pytest.mark.parametrize("activation", ["relu", "leaky_relu", "silu", "identity"])
def test_evaluation_with_grad_is_native(activation, device):
    native, x = made(activation, device), batch(device)
    step(native, native, x)
    module, compiled = compiled_pair(native.eval())
    assert_same(step(compiled, module, x), step(native, native, x))


def test_without_grad_it_is_native_bit_for_bit(device):
    native, x = made("silu", device).eval(), batch(device)
    _, compiled = compiled_pair(native)
    expected = torch.compile(native, backend="aot_eager")
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert torch.equal(compiled(x), expected(x))


def test_training_without_grad_is_one_graph_and_native_bit_for_bit(device):
    """The watch, which compiled code does not have, broke the graph."""
    native, x = made("silu", device), batch(device)
    _, compiled = compiled_pair(native)
    with torch.no_grad():
        assert torch.equal(compiled(x), torch.compile(native, backend="aot_eager")(x))


@pytest.mark.parametrize(
    ("backend", "activation"),
    [*(("aot_eager", a) for a in ("elu", "silu")), pytest.param("inductor", "relu", marks=needs_compiler)],
)
def test_dynamic_shapes(backend, activation, device):
    native = made(activation, device)
    module, compiled = compiled_pair(native, backend, dynamic=True)
    eager = convert(copy.deepcopy(native))
    for shape in [(4, 3, 9, 10), (3, 3, 12, 8)]:
        x = batch(device, shape)
        assert_same(step(compiled, module, x), step(native, native, x))
    step(eager, eager, x)
    assert held(compiled, x) <= held(eager, x)


# --- Trust ------------------------------------------------------------------------------------------------------------


def test_weights_of_zero_are_exact(device):
    native, x = made(device=device, kind=ChainAndBlocks), batch(device)
    with torch.no_grad():
        native.norms[3].weight.zero_()
        native.norms[1].weight[2] = 0
    module, compiled = compiled_pair(native)
    assert_same(step(compiled, module, x), step(native, native, x))


def test_a_layer_that_is_no_longer_trusted_keeps_its_input(device):
    native, x = made(device=device), batch(device)
    module, compiled = compiled_pair(native)
    step(compiled, module, x)
    before = held(compiled, x)
    for norm in module.norms:
        distrust(norm, x.dtype)
    after = held(compiled, x)
    assert after > before


def test_weights_that_are_loaded_are_looked_at(device):
    native, x = made(device=device), batch(device)
    module, compiled = compiled_pair(native)
    step(compiled, module, x)
    with torch.no_grad():
        native.norms[0].weight.zero_()
    module.load_state_dict(native.state_dict())
    assert_same(step(compiled, module, x), step(native, native, x))


def test_weights_are_looked_at_again_while_training(device):
    native, x = made(device=device), batch(device)
    module, compiled = compiled_pair(native)
    small, large = held(compiled, x), held(torch.compile(native, backend="aot_eager"), x)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    for norm in module.norms:
        norm.guard_interval = 1
    for weights, expected in ((0.0, large), (1.0, small)):
        for norm in module.norms:
            nn.init.constant_(norm.weight, weights)
        step(compiled, module, x)
        optimizer.step()
        assert held(compiled, x) == expected


@pytest.mark.parametrize("kind", ["converted", "in place", "in place, measured before"])
def test_weights_that_somebody_else_writes_to_are_looked_at_at_the_next_step(device, kind, logged):
    """Compiled code does not see who writes. It scaled by eps until the weights were looked at, without a word."""
    told = logged(logging.WARNING)
    if kind == "converted":
        native, x = made(device=device), batch(device)
        module, compiled = compiled_pair(native)
        norms = native.norms, module.norms
    else:
        native = nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.LeakyReLU(0.01)).to(device).double()
        module = nn.Sequential(copy.deepcopy(native[0]), InPlaceABN(8, signed_weight=True).to(device).double())
        x, norms = batch(device), ([native[1]], [module[1]])
        if kind == "in place, measured before":
            step(module, module, x)
        compiled = torch.compile(module, backend="aot_eager")
    # Nothing is looked at because the interval has passed.
    while guard.generations.current % 100 != 1:
        guard.generations.advance()
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.0) for net in (native, module)]
    for index, weight in ((None, 1.0), (2, 0.0), (None, 1.0)):
        with torch.no_grad():
            for norm in norms[0]:
                # An in-place module moves a weight to a magnitude of at least eps.
                of_native = weight if kind == "converted" else max(weight, norm.eps)
                (norm.weight if index is None else norm.weight[index]).fill_(of_native)
            for norm in norms[1]:
                (norm.weight if index is None else norm.weight[index]).fill_(weight)
        step(compiled, module, x), step(native, native, x)
        told.clear()
        for optimizer in optimizers:
            optimizer.step()
        if index is not None:
            assert told
            assert all("which compiled code sees only now" in record.getMessage() for record in told)
        count = 2 + len([*native.parameters()])
        assert_same(step(compiled, module, x)[:count], step(native, native, x)[:count])


# --- The pass ---------------------------------------------------------------------------------------------------------


def test_a_pass_of_the_users_own_is_called_too(device):
    called = []

    def own(module, inputs):
        called.append(module)
        return module

    native, x = made(device=device), batch(device)
    module, compiled = compiled_pair(native)
    eager = convert(copy.deepcopy(native))
    with torch._functorch.config.patch(joint_custom_pass=own):
        assert_same(step(compiled, module, x), step(native, native, x))
        assert len(called) == 1
    step(eager, eager, x)
    assert held(compiled, x) <= held(eager, x)


def test_norms_that_no_pass_sees_are_native(device, monkeypatch):
    monkeypatch.setattr(joint, "install", lambda: None)
    native, x = made("silu", device), batch(device)
    module, compiled = compiled_pair(native)
    with torch._functorch.config.patch(joint_custom_pass=None):
        assert_same(step(compiled, module, x), step(native, native, x))


def test_in_place_modules_hold_their_outputs_only(device):
    torch.manual_seed(6)
    layers = [
        nn.Conv2d(3, 8, 1),
        InPlaceABN(8, activation="silu"),
        nn.Conv2d(8, 8, 1),
        InPlaceABN(8),
        nn.Conv2d(8, 4, 1),
    ]
    eager, x = nn.Sequential(*layers).to(device, torch.float64), batch(device)
    module = copy.deepcopy(eager)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    assert_same(step(compiled, module, x), step(eager, eager, x))
    assert held(compiled, x) <= held(eager, x)


class WrittenTo(nn.Module):
    """A compiled part, whose output is written to outside of it."""

    def __init__(self, write, backend=None):
        super().__init__()
        self.part = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.SiLU())
        self.run = torch.compile(self.part, backend=backend) if backend else self.part
        self.write = write

    def forward(self, x):
        y = self.run(x)
        return self.write(y, x) * 2


def added_to(y, x):
    return y.add_(x)


def compared_with_zero(y, x):
    return y + (y == 0).to(y.dtype)


def trained(model, x):
    found, optimizer = [], torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        found += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
    return found


@pytest.mark.parametrize("write", [added_to, compared_with_zero])
@pytest.mark.parametrize("backend", ["aot_eager", INDUCTOR])
def test_what_the_watch_gave_up_is_torchs_when_it_is_compiled(backend, write, device):
    """The log said that the norm does as torch does, and each compiled step failed with an error of torch's."""
    start_over()
    x = torch.randn(2, 4, 6, 6, dtype=torch.float64, device=device)
    models = []
    for given in (None, backend):
        torch.manual_seed(0)
        models.append(WrittenTo(write, given).double().to(device))
    native, converted = models
    if write is compared_with_zero:
        native.part[2] = converted.part[2] = nn.Hardswish()
    convert(converted)
    torch.testing.assert_close(trained(converted, x), trained(native, x), rtol=1e-9, atol=1e-12)


class Copied(nn.Module):
    """What is copied for a layer is written to after a break of the graph."""

    def __init__(self, source):
        super().__init__()
        self.first, self.norm, self.last, self.source = nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 6), source

    def forward(self, x):
        x = x * 1.5
        torch._dynamo.graph_break()
        y = self.norm(self.first(x.clone()))
        copied = y if self.source == "result" else x
        z = self.last(copied.clone()) + y
        torch._dynamo.graph_break()
        copied.mul_(0.5)
        return z + copied


@pytest.mark.parametrize("source", ["result", "input"])
def test_a_copy_of_what_others_may_write_to_stays_a_copy(source, device):
    """Copies were replaced by what they copy, which was then written to where torch allows it."""
    native = Copied(source).double().to(device)
    converted = convert(copy.deepcopy(native))
    x = torch.randn(3, 5, 6, dtype=torch.float64, device=device)
    expected = trained(native, x)
    compiled = torch.compile(converted, backend="aot_eager")
    torch.testing.assert_close(trained(compiled, x), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("place", ["before the norm", "before the activation", "after it"])
def test_a_graph_break_in_a_checkpointed_part_is_no_error_in_the_first_step(place, device):
    class Part(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm, self.last = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 3, 1)

        def forward(self, x):
            x = self.conv(x)
            for name, layer in (("before the norm", self.norm), ("before the activation", nn.functional.silu)):
                if place == name:
                    torch._dynamo.graph_break()
                x = layer(x)
            if place == "after it":
                torch._dynamo.graph_break()
            return self.last(x)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList(Part() for _ in range(2))

        def forward(self, x):
            for part in self.parts:
                x = checkpoint(part, x, use_reentrant=False)
            return x

    torch.manual_seed(0)
    native, x = Net().to(device).double(), batch(device)
    module = convert(copy.deepcopy(native))
    compiled = torch.compile(module, backend="aot_eager")
    for _ in range(3):
        assert_same(step(compiled, module, x), step(native, native, x))
        for model in (module, native):
            torch.optim.SGD(model.parameters(), 1e-3).step()
