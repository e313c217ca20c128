"""Compiled converted norms have native gradients, whatever the program around them does."""

import copy

import pytest
import torch
import torch._dynamo
import torch._functorch.config
import torch.nn.functional as F
from cases import covering
from compiled_converted_nets import ACTIVATIONS, batch, compiled_pair, held, made
from compiled_nets import assert_same, step
from foreign_nets import spread
from modes import start_over
from one_norm import OneNorm
from torch import nn

from inplace_abn import convert

pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.filterwarnings("ignore:.*torch.jit"),
]


def wired(wiring, device):
    """A net that does this with its norm's output."""
    torch.manual_seed(5)
    net = OneNorm(lambda m, x: m.last(wiring(m.bn(m.conv(x)))), channels=8)
    return spread(net).to(device, torch.float64)


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
    native, x = wired(wiring, device), batch(device)
    module, compiled = compiled_pair(native)
    assert_same(step(compiled, module, x), step(native, native, x))


def test_a_graph_break_between_norm_and_activation(device):
    def broken(y):
        torch._dynamo.graph_break()
        return F.relu(y)

    native, x = wired(broken, device), batch(device)
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


BORDERS = {
    "batch norm": lambda: nn.BatchNorm2d(4),
    "instance norm": lambda: nn.InstanceNorm2d(4, affine=True),
    "group norm": lambda: nn.GroupNorm(2, 4),
    "layer norm": lambda: nn.LayerNorm(6),
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "linear": lambda: nn.Linear(6, 6),
    "convolution": lambda: nn.Conv2d(4, 4, 1),
}


@pytest.mark.parametrize("eager", BORDERS)
@pytest.mark.parametrize("compiled", BORDERS)
@pytest.mark.parametrize("eager_steps", [0, 2])
def test_a_compiled_part_of_one_graph_takes_the_output_of_any_eager_layer(compiled, eager, eager_steps, device):
    torch.manual_seed(0)
    parts = nn.Conv2d(3, 4, 3), BORDERS[eager](), BORDERS[compiled](), nn.Conv2d(4, 4, 2)
    native, x = spread(nn.Sequential(*parts)).to(device, torch.float64), batch(device)[..., :8, :8]
    module = convert(copy.deepcopy(native))
    second = torch.compile(module[2:], backend="aot_eager", fullgraph=True)
    for number in range(4):
        last = module[2:] if number < eager_steps else second
        assert_same(step(lambda x, last=last: last(module[:2](x)), module, x), step(native, native, x))
        for model in (module, native):
            torch.optim.SGD(model.parameters(), 1e-3).step()


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(2))

    def forward(self, x):
        return F.relu(x + self.norms[1](self.convs[1](F.relu(self.norms[0](self.convs[0](x))))))


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.fc1, self.act, self.fc2 = nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.fc2(self.act(self.fc1(self.norm(x))))


@pytest.mark.parametrize("block", [Residual, Mlp])
def test_blocks_that_are_compiled_one_by_one_hold_less(block, device):
    """The first step runs compiled functions as they are written, and all norms in them were given up."""
    torch.manual_seed(0)
    first, last = (nn.Conv2d(3, 8, 1), nn.Conv2d(8, 2, 1)) if block is Residual else (nn.Linear(10, 8), nn.Linear(8, 2))
    native, x = nn.Sequential(first, block(), block(), last).to(device, torch.float64), batch(device)
    models = [convert(copy.deepcopy(native)) for _ in range(2)]
    by_blocks, whole = models[0], torch.compile(models[1], backend="aot_eager", fullgraph=True)
    for each in (by_blocks, native):
        for part in each[1:3]:
            part.compile(backend="aot_eager", fullgraph=True)
    for _ in range(4):
        expected = step(native, native, x)
        for function, model in zip((by_blocks, whole), models, strict=True):
            assert_same(step(function, model, x), expected)
        for model in (native, *models):
            torch.optim.SGD(model.parameters(), 1e-3).step()
    assert held(whole, x) <= held(by_blocks, x) < 0.85 * held(native, x)


class Block(nn.Module):
    def __init__(self, activation):
        super().__init__()
        self.conv, self.norm, self.activation = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), activation

    def forward(self, x):
        return self.activation(self.norm(self.conv(x)))


READERS = {
    "zeros": lambda h: h + (h == 0),
    "signs": lambda h: h + torch.sign(h),
    "a write": lambda h: h.mul_(2),
    "a write to a view": lambda h: h.flatten(1).mul_(2).view(h.shape),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("activation", [nn.ReLU, nn.GELU, nn.SiLU, nn.Hardswish, nn.ELU])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_the_output_of_a_compiled_block_is_torchs_for_whoever_reads_it_later(is_compiled, activation, reader, device):
    if activation in (nn.ReLU, nn.ELU) and "write" in reader:
        pytest.skip("torch's activation needs its result")
    torch.manual_seed(0)
    native, x = nn.Sequential(nn.Conv2d(3, 8, 1), Block(activation()), nn.Conv2d(8, 2, 1)), batch(device)
    native.to(device, torch.float64)
    module = convert(copy.deepcopy(native))
    found = []
    for model in (native, module):
        read = READERS[reader]
        if is_compiled:
            read = torch.compile(read, backend="aot_eager", fullgraph=True)
        model[1].compile(backend="aot_eager", fullgraph=True)
        for number in range(4):
            late = read if number > 1 else nn.Identity()
            found.append(step(lambda x, m=model, late=late: m[2](late(m[1](m[0](x)))), model, x))
            torch.optim.SGD(model.parameters(), 1e-3).step()
    for own, other in zip(found[4:], found[:4], strict=True):
        assert_same(own, other)


def test_a_norm_that_is_never_compiled_gives_a_compiled_function_a_plain_tensor(device):
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
            self.inner = torch.compile(
                lambda h: h.split(2, 1)[0] * (h >= 0).double().mean(), backend="aot_eager", fullgraph=True
            )

        @torch.compiler.disable
        def both(self, x):
            return self.inner(self.norm(self.conv(x)))

        def forward(self, x):
            return self.both(x)

    torch.manual_seed(0)
    native, x = nn.Sequential(Outer()).to(device, torch.float64), batch(device)
    module = convert(copy.deepcopy(native))
    for model in (native, module):
        model[0].compile(backend="aot_eager")
    for _ in range(3):
        assert_same(step(module, module, x), step(native, native, x))
        for model in (native, module):
            torch.optim.SGD(model.parameters(), 1e-3).step()


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


class Doubled(torch.autograd.Function):
    """Code that gets what stands for a norm's output, and not its values."""

    @staticmethod
    def forward(x):
        return 2 * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, g):
        return 2 * g


def half_trained():
    norm = nn.BatchNorm2d(4)
    norm.weight.requires_grad = False
    return norm


READ_BY_CUSTOM_CODE = {
    "batch norm": lambda: nn.BatchNorm2d(4),
    "without parameters": lambda: nn.BatchNorm2d(4, affine=False),
    "a weight without a gradient": half_trained,
    "frozen": lambda: nn.BatchNorm2d(4).eval(),
    "group norm": lambda: nn.GroupNorm(2, 4),
    "instance norm": lambda: nn.InstanceNorm2d(4, affine=True),
}


@covering(2, norm=READ_BY_CUSTOM_CODE, adds=[False, True])
def test_compiled_autograd_of_a_norm_that_custom_code_reads(norm, adds, device):
    def forward(m, x):
        x = m.conv(x)
        y = m.bn(x)
        return m.last(Doubled.apply(y + x if adds else y))

    native = OneNorm(forward)
    native.bn = READ_BY_CUSTOM_CODE[norm]()
    native = spread(native).to(device, torch.float64)
    module, x = convert(copy.deepcopy(native)), batch(device)
    for _ in range(3):
        expected = step(native, native, x)
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
            actual = step(module, module, x)
        assert_same(actual, expected)


@covering(2, norm=["batch norm", "group norm", "instance norm"], adds=[False, True])
def test_compiled_autograd_of_a_norm_whose_output_a_convolution_keeps(norm, adds, device):
    """In the first step, which is watched, backward knows the output and what was added by aliases."""
    start_over()
    native = OneNorm(lambda m, x: m.last(m.bn(m.conv(x)) + x if adds else m.bn(m.conv(x))), inputs=4)
    native.bn = READ_BY_CUSTOM_CODE[norm]()
    native = spread(native).to(device, torch.float64)
    module, x = convert(copy.deepcopy(native)), torch.randn(4, 4, 6, 5, dtype=torch.float64, device=device)
    expected = step(native, native, x)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
        actual = step(module, module, x)
    assert_same(actual, expected)


def test_a_checkpointed_region(device):
    native, x = made(device=device), batch(device)
    module = convert(copy.deepcopy(native))

    def function(x):
        return torch.utils.checkpoint.checkpoint(module, x, use_reentrant=False)

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    assert_same(step(compiled, module, x), step(native, native, x))
