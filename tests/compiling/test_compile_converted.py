"""Converted models under torch.compile: gradients are the native ones, and no more memory is held than in eager
mode."""

import copy

import pytest
import torch
import torch._dynamo
import torch._functorch.config
import torch.nn.functional as F
from cases import INDUCTOR
from torch import nn

from inplace_abn import InPlaceABN, convert
from inplace_abn.compiling import joint

pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.filterwarnings("ignore:.*torch.jit"),
]

ACTIVATIONS = {
    "relu": nn.ReLU(),
    "relu in place": nn.ReLU(inplace=True),
    "functional relu": lambda y: F.relu(y),
    "leaky_relu": nn.LeakyReLU(0.2),
    "leaky_relu of slope 0": nn.LeakyReLU(0.0),
    "elu": nn.ELU(),
    "silu": nn.SiLU(inplace=True),
    "hardswish": nn.Hardswish(),
    "gelu": nn.GELU(),
    "gelu tanh": nn.GELU("tanh"),
    "mish": nn.Mish(),
    "identity": nn.Identity(),
}
PLANE = 4 * 9 * 10
"""The number of values of a channel in the batches of the tests. A tensor with fewer values is no activation."""


class Net(nn.Module):
    """A chain, and two residual blocks. The other branch of the first block is a norm, too. All share one
    activation."""

    def __init__(self, activation):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(3 if i == 0 else 8, 8, 3, padding=1, bias=False) for i in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(4))
        self.last = nn.Conv2d(8, 4, 1)
        self.activation = activation
        for norm in self.norms:
            nn.init.uniform_(norm.weight, 0.5, 1.5)
            nn.init.normal_(norm.bias, std=0.3)
            with torch.no_grad():
                norm.weight[0] *= -1

    def block(self, i, x):
        return self.norms[i](self.convs[i](x))

    def forward(self, x):
        a = self.activation(self.block(0, x))
        b = self.activation(self.block(1, a) + self.block(2, a))
        return self.last(self.activation(self.block(3, b) + b))


def made(activation="relu", device="cpu", kind=Net):
    torch.manual_seed(3)
    return kind(ACTIVATIONS[activation]).to(device, torch.float64)


def batch(device="cpu", shape=(4, 3, 9, 10)):
    torch.manual_seed(4)
    return torch.randn(shape, dtype=torch.float64, device=device)


def step(function, module, x):
    module.zero_grad()
    x = x.clone().requires_grad_()
    y = function(x)
    (y * y.detach().cos()).sum().backward()
    return [y.detach(), x.grad, *(p.grad.clone() for p in module.parameters()), *(b.clone() for b in module.buffers())]


def assert_same(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


def held(function, x):
    """Bytes of activations that autograd keeps."""
    sizes = {}

    def pack(t):
        storage = t.untyped_storage()
        if storage.nbytes() >= PLANE * t.element_size():
            sizes[storage._cdata] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = function(x)
    del y
    return sum(sizes.values())


def compiled_pair(native, backend="aot_eager", **options):
    """Returns a converted copy, and the same copy compiled."""
    module = convert(copy.deepcopy(native))
    return module, torch.compile(module, backend=backend, fullgraph=True, **options)


@pytest.mark.parametrize("backend", ["aot_eager", INDUCTOR])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_are_native_and_no_more_is_held_than_in_eager(activation, backend, device):
    if backend == "inductor" and activation not in ("relu", "silu"):
        pytest.skip("compiling takes long, and the graph is that of aot_eager")
    native, x = made(activation, device), batch(device)
    module, compiled = compiled_pair(native, backend)
    eager = convert(copy.deepcopy(native))
    for _ in range(2):
        assert_same(step(compiled, module, x), step(native, native, x))
    step(eager, eager, x)
    assert held(compiled, x) <= held(eager, x)


@pytest.mark.parametrize("activation", ACTIVATIONS)
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


@pytest.mark.parametrize("activation", ["relu", "leaky_relu", "elu", "silu", "hardswish"])
@pytest.mark.parametrize("backend", ["aot_eager", INDUCTOR])
def test_dynamic_shapes(activation, backend, device):
    if backend == "inductor" and activation != "relu":
        pytest.skip("compiling takes long, and the graph is that of aot_eager")
    native = made(activation, device)
    module, compiled = compiled_pair(native, backend, dynamic=True)
    eager = convert(copy.deepcopy(native))
    for shape in [(4, 3, 9, 10), (3, 3, 12, 8)]:
        x = batch(device, shape)
        assert_same(step(compiled, module, x), step(native, native, x))
    step(eager, eager, x)
    assert held(compiled, x) <= held(eager, x)


# --- Wirings ----------------------------------------------------------------------------------------------------------


class Wired(nn.Module):
    """A norm between convolutions. ``wiring`` is what a test does with the norm's output."""

    def __init__(self, wiring):
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 1)
        self.norm = nn.BatchNorm2d(8)
        self.wiring = wiring
        nn.init.uniform_(self.norm.weight, 0.5, 1.5)
        nn.init.normal_(self.norm.bias, std=0.3)

    def forward(self, x):
        return self.last(self.wiring(self.norm(self.first(x))))


def pre_activation_is_read_again(y):
    return F.silu(y) + y


def pre_activation_is_read_by_a_mask(y):
    return F.relu(y) * (y > 0.5)


def activated_twice(y):
    return F.relu(y) + F.silu(y)


def zeros_are_compared(y):
    z = F.relu(y)
    return z + (z == 0)


def zeros_are_compared_behind_a_view(y):
    z = F.relu(y)
    return z + (z.flatten(2).flip(2) != 0).view_as(z)


def modified_in_place(y):
    z = F.silu(y)
    z += 1
    return z.mul_(2)


def scaled_sum(y):
    return F.relu(torch.add(y, y.detach(), alpha=0.5))


def sum_with_itself(y):
    return F.relu(y + y)


def broadcast_sum(y):
    return F.relu(y + y.mean((2, 3), keepdim=True))


def sum_with_a_view(y):
    return F.relu(y + y.transpose(2, 3).reshape(y.shape))


def own_spelling_of_silu(y):
    return y * torch.sigmoid(y)


def own_spelling_of_leaky_relu(y):
    return torch.where(y > 0, y, 0.2 * y)


WIRINGS = [
    pre_activation_is_read_again,
    pre_activation_is_read_by_a_mask,
    activated_twice,
    zeros_are_compared,
    zeros_are_compared_behind_a_view,
    modified_in_place,
    scaled_sum,
    sum_with_itself,
    broadcast_sum,
    sum_with_a_view,
    own_spelling_of_silu,
    own_spelling_of_leaky_relu,
]


@pytest.mark.parametrize("wiring", WIRINGS, ids=lambda wiring: wiring.__name__)
def test_wirings_are_native(wiring, device):
    torch.manual_seed(5)
    native, x = Wired(wiring).to(device, torch.float64), batch(device)
    module, compiled = compiled_pair(native)
    assert_same(step(compiled, module, x), step(native, native, x))


def test_a_graph_break_between_norm_and_activation(device):
    def broken(y):
        torch._dynamo.graph_break()
        return F.relu(y)

    torch.manual_seed(5)
    native, x = Wired(broken).to(device, torch.float64), batch(device)
    module = convert(copy.deepcopy(native))
    assert_same(step(torch.compile(module, backend="aot_eager"), module, x), step(native, native, x))


@pytest.mark.parametrize("part", ["first", "second", "both"])
def test_compiled_and_eager_parts_of_one_model(part, device):
    native, x = nn.Sequential(made(device=device), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 1)), batch(device)
    native.to(device, torch.float64)
    module = convert(copy.deepcopy(native))
    first, second = module[0], module[1:]
    if part != "second":
        first = torch.compile(first, backend="aot_eager", fullgraph=True)
    if part != "first":
        second = torch.compile(second, backend="aot_eager", fullgraph=True)
    assert_same(step(lambda x: second(first(x)), module, x), step(native, native, x))


@pytest.mark.parametrize("activation", ["relu", "silu", "identity"])
def test_an_output_that_is_modified_afterwards_is_right_or_an_error(activation, device):
    act = ACTIVATIONS[activation]
    native = nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8)).to(device, torch.float64)
    module, x = convert(copy.deepcopy(native)), batch(device)
    compiled = torch.compile(lambda x: act(module(x)), backend="aot_eager", fullgraph=True)
    expected = step(lambda x: act(native(x)).clone().mul_(2), native, x)
    try:
        actual = step(lambda x: compiled(x).mul_(2), module, x)
    except RuntimeError as error:
        assert "inplace operation" in str(error)
    else:
        assert_same(actual, expected)


def test_a_retained_graph_gives_the_same_gradients_again(device):
    native, x = made(device=device), batch(device)
    module, compiled = compiled_pair(native)
    module.zero_grad()
    # A graph of AOT autograd that reuses memory cannot be run twice.
    with torch._functorch.config.patch(donated_buffer=False):
        loss = compiled(x).square().sum()
        loss.backward(retain_graph=True)
        first = [p.grad.clone() for p in module.parameters()]
        loss.backward()
    native.zero_grad()
    native(x).square().sum().backward()
    assert_same(first, [p.grad for p in native.parameters()])
    assert_same([p.grad for p in module.parameters()], [2 * p.grad for p in native.parameters()])


def test_compiled_autograd(device):
    native, x = made(device=device), batch(device)
    module, compiled = compiled_pair(native)
    expected = step(native, native, x)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
        actual = step(compiled, module, x)
    assert_same(actual, expected)


def test_a_checkpointed_region(device):
    native, x = made(device=device), batch(device)
    module = convert(copy.deepcopy(native))

    def function(x):
        return torch.utils.checkpoint.checkpoint(module, x, use_reentrant=False)

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    assert_same(step(compiled, module, x), step(native, native, x))


# --- Trust ------------------------------------------------------------------------------------------------------------


def test_weights_of_zero_are_exact(device):
    native, x = made(device=device), batch(device)
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
        norm.__dict__["_trusted"] = False
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
