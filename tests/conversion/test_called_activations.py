"""An activation that is called as a function keeps its result, if a linear layer or a convolution made its input."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from training import check_training

from inplace_abn import analyze, convert, guard, report, revert, set_guard, verify
from inplace_abn.conversion.offered import Offered
from inplace_abn.memory import measure

FUNCTIONS = {
    "gelu": F.gelu,
    "gelu_tanh": lambda t: F.gelu(t, approximate="tanh"),
    "silu": F.silu,
    "mish": F.mish,
    "hardswish": F.hardswish,
    "elu": F.elu,
    "leaky_relu": lambda t: F.leaky_relu(t, 0.1),
}


class Called(nn.Module):
    """Two linear layers, and what a test calls between them. ``run(net, x)`` is the forward pass."""

    def __init__(self, run):
        super().__init__()
        self.fc1, self.fc2, self.drop = nn.Linear(8, 16), nn.Linear(16, 8), nn.Dropout(0.5)
        self.run = run

    def forward(self, x):
        return self.run(self, x)


def mlp(m, x):
    return m.fc2(F.gelu(m.fc1(x)))


def tokens():
    return torch.randn(2, 5, 8)


def stepped(model, x=None):
    """One training step of a converted model."""
    model(tokens() if x is None else x).square().sum().backward()
    guard.generations.advance()
    return model


def layer_of(model):
    (layer,) = report(model).layers
    return layer


def offers(model):
    """The modules whose output is offered in passes that nobody watches."""
    makers = [(name, module) for name, module in model.named_modules() if guard.CARRIED in module.__dict__]
    return [name for name, module in makers if module._forward_hooks]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_between_linear_layers_it_trains_as_torchs_and_keeps_its_result_only(name):
    function = FUNCTIONS[name]
    trained = check_training(Called(lambda m, x: m.fc2(function(m.fc1(x)))), tokens(), tolerance=1e-7)
    layer = layer_of(trained)
    assert (layer.name, layer.kind, layer.follows) == ("fc1", "Linear", name)
    assert layer.in_place
    assert not layer.is_norm
    assert layer.bytes_saved == 2 * 5 * 16 * 8
    assert offers(trained) == ["fc1"]


class Convolutions(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function
        self.convs = nn.ModuleList([nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.ConvTranspose2d(8, 2, 2)])

    def forward(self, x):
        for conv in self.convs[:-1]:
            x = self.function(conv(x))
        return self.convs[-1](x)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_between_convolutions_it_trains_as_torchs(name, memory_format):
    x = torch.randn(2, 3, 12, 12).contiguous(memory_format=memory_format)
    trained = check_training(Convolutions(FUNCTIONS[name]), x, tolerance=1e-7)
    assert [layer.in_place for layer in report(trained).layers] == [True, True]


def test_relus_functions_in_place_and_large_elus_are_torchs():
    for function in (
        F.relu,
        lambda t: F.silu(t, inplace=True),
        lambda t: F.elu(t, 2.0),
        lambda t: F.leaky_relu(t, 0.0),
    ):
        trained = check_training(Called(lambda m, x, f=function: m.fc2(f(m.fc1(x)))), tokens())
        assert not report(trained).layers
        assert not offers(trained)


def summed(m, x):
    return m.fc2(F.gelu(m.fc1(x) + m.fc1(-x)))


def with_a_number(m, x):
    return m.fc2(F.gelu(1 + m.fc1(x)))


def activated_twice(m, x):
    return m.fc2(F.gelu(m.fc1(x))) + m.fc2(F.silu(m.fc1(x)))


def method(m, x):
    return m.fc2(torch.nn.functional.gelu(input=m.fc1(x)))


def metadata_first(m, x):
    h = m.fc1(x)
    assert h.shape == (2, 5, 16)
    assert h.dtype == x.dtype
    return m.fc2(F.gelu(h))


def seen_by_hooks(m, x):
    h = m.fc1(x)
    h.register_hook(lambda g: g * 2)
    h.retain_grad()
    z = m.fc2(F.gelu(h))
    z.register_hook(lambda g: g * h.detach().mean())
    return z


def gated(m, x):
    return m.fc2(F.silu(m.fc1(x)) * m.fc1(-x))


IN_PLACE = [summed, with_a_number, activated_twice, method, metadata_first, gated]


@pytest.mark.parametrize("run", [*IN_PLACE, seen_by_hooks])
def test_it_is_in_place_after_sums_questions_about_metadata_and_hooks(run):
    trained = check_training(Called(run), tokens(), tolerance=1e-7)
    (layer,) = report(trained).layers
    # The hook keeps the input.
    assert layer.in_place == (run is not seen_by_hooks)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t):
        return t * 2

    @staticmethod
    def backward(ctx, g):
        return g * 2


@torch.jit.script
def scripted(t: torch.Tensor) -> torch.Tensor:
    return torch.tanh(t)


def looked_at_first(m, x):
    h = m.fc1(x)
    total = h.sum()
    assert type(h) is torch.Tensor
    return m.fc2(F.gelu(h)) + total


def by_a_custom_function(m, x):
    return m.fc2(F.gelu(Doubled.apply(m.fc1(x))))


def by_scripted_code(m, x):
    return m.fc2(F.gelu(scripted(m.fc1(x))))


def in_a_list(m, x):
    return m.fc2(F.gelu(torch.cat([m.fc1(x), m.fc1(-x)])))


def written_to(m, x):
    h = m.fc1(x)
    h += 1
    h[0] = 0
    return m.fc2(F.gelu(h))


def input_used_later(m, x):
    h = m.fc1(x)
    z = F.gelu(h)
    return m.fc2(z) + m.fc2(h * h)


def dropped(m, x):
    return m.fc2(m.drop(F.gelu(m.fc1(x))))


def input_written_later(m, x):
    h = m.fc1(x)
    z = F.leaky_relu(h, 0.2)
    h2 = h.detach()
    h2 += 1
    return m.fc2(z)


def result_written_later(m, x):
    z = F.gelu(m.fc1(x))
    z += 1
    return m.fc2(z)


def compared(m, x):
    z = F.hardswish(m.fc1(8 * x))
    return m.fc2(z) * (1 + (z == 0).sum())


def returned(m, x):
    return m.fc1(x), m.fc2(x.new_ones(2, 16)), {"nested": [m.fc1(x)]}


OTHERS = [looked_at_first, by_a_custom_function, by_scripted_code, in_a_list, written_to, input_used_later, dropped]
OTHERS += [result_written_later, compared, returned]


@pytest.mark.parametrize("run", OTHERS)
def test_whatever_else_is_done_with_input_or_result_it_trains_as_torchs(run):
    trained = check_training(Called(run), tokens(), tolerance=1e-7)
    assert not any(layer.in_place for layer in report(trained).layers)
    assert not offers(trained)


def test_no_offered_tensor_leaves_the_model():
    model = convert(Called(returned))
    for _ in range(2):
        outputs = model(tokens())
        assert type(outputs[0]) is type(outputs[1]) is type(outputs[2]["nested"][0]) is torch.Tensor
        guard.generations.advance()


def test_modules_without_an_activation_cost_nothing_once_the_model_was_watched():
    model = convert(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU()))
    stepped(model, torch.randn(4, 8))
    assert not offers(model)


def test_a_converted_norm_behind_a_linear_layer_is_in_place_in_watched_steps_too():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 2, 1))
    trained = check_training(model, torch.randn(2, 3, 8, 8))
    assert layer_of(trained).in_place
    assert layer_of(trained).name == "1"


class Block(nn.Module):
    """The output of a norm is added to that of a convolution."""

    def __init__(self):
        super().__init__()
        self.left, self.right, self.last = nn.Conv2d(3, 8, 1), nn.Conv2d(3, 8, 1), nn.Conv2d(8, 2, 1)
        self.norm = nn.BatchNorm2d(8)

    def forward(self, x):
        return self.last(F.relu(self.norm(self.left(x)) + self.right(x)))


def test_the_output_of_a_convolution_may_be_the_residual_of_a_norm():
    trained = check_training(Block(), torch.randn(2, 3, 8, 8))
    assert layer_of(trained).follows == "add, relu"
    assert layer_of(trained).in_place


@pytest.mark.parametrize("reentrant", [False, True])
def test_it_works_under_checkpoints_around_both_modules(reentrant):
    def run(m, x):
        return checkpoint(lambda t: mlp(m, t), x, use_reentrant=reentrant)

    trained = check_training(Called(run), tokens(), tolerance=1e-7)
    assert layer_of(trained).in_place


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_that_begins_between_module_and_function_recomputes_the_same(reentrant):
    """In the recomputation the function gets another tensor, which nobody has offered."""

    def run(m, x):
        return checkpoint(lambda h: m.fc2(F.gelu(h)), m.fc1(x), use_reentrant=reentrant)

    check_training(Called(run), tokens(), tolerance=1e-7)


def test_a_checkpoint_that_ends_between_module_and_function_recomputes_the_same():
    def run(m, x):
        return m.fc2(F.gelu(checkpoint(m.fc1, x, use_reentrant=False)))

    check_training(Called(run), tokens(), tolerance=1e-7)


def test_gradients_of_gradients_are_right():
    model = convert(Called(mlp).double())
    x = tokens().double().requires_grad_()
    assert torch.autograd.gradcheck(model, (x,))
    assert torch.autograd.gradgradcheck(model, (x,))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_under_autocast_it_does_what_torch_does(dtype):
    model = Called(mlp)
    converted, x = convert(copy.deepcopy(model)), tokens()
    for m in (model, converted):
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            m(x).square().sum().backward()
    # Next to the minimum a rounding of z moves the input by more than a rounding.
    tolerance = max(4 * torch.finfo(dtype).eps, 1e-5)
    for own, native in zip(converted.parameters(), model.parameters(), strict=True):
        assert own.grad.dtype == native.grad.dtype
        assert (own.grad - native.grad).norm() <= tolerance * native.grad.norm()


def test_it_holds_one_tensor_less_in_the_first_step_already():
    model = Called(mlp)
    x = torch.randn(64, 50, 8)
    size = 64 * 50 * 16 * 4
    native, converted = measure(model, x).held, measure(convert(copy.deepcopy(model)), x).held
    assert native - converted >= 0.9 * size


def test_analyze_and_verify_see_it():
    model = Called(mlp)
    (layer,) = analyze(model, tokens()).layers
    assert layer.in_place
    assert verify(model, convert(copy.deepcopy(model)), tokens()).ok
    assert guard.CARRIED not in model.fc1.__dict__


def test_the_filter_is_asked_about_the_module_that_makes_the_input():
    model = stepped(convert(Called(mlp), filter_fn=lambda module, name: name != "fc1"))
    assert not report(model).layers


def test_copies_pickles_and_reverted_models_work():
    model = stepped(convert(Called(mlp)))
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert layer_of(stepped(other)).in_place
    keys = list(model.state_dict())
    reverted = stepped(revert(model))
    assert list(reverted.state_dict()) == keys
    assert not report(reverted).layers
    assert all(guard.CARRIED not in module.__dict__ and not module._forward_hooks for module in reverted.modules())


def test_with_an_interval_of_zero_nothing_is_found():
    """Without measurements no pass is watched, so nobody finds out what follows a module."""
    model = set_guard(convert(Called(mlp)), interval=0)
    assert not report(stepped(model)).layers


def test_without_gradients_nothing_is_offered():
    model = stepped(convert(Called(mlp)))
    model.fc1.register_forward_hook(lambda _, __, output: kinds.append(type(output)))
    for context, expected in ((torch.no_grad(), torch.Tensor), (torch.enable_grad(), Offered)):
        kinds = []
        with context:
            model(tokens())
        assert kinds == [expected]


@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_compiled_function_behind_a_module_in_eager_mode_works(fullgraph):
    for function in (F.gelu, lambda h: F.gelu(h) * 2, lambda h: h * 2):
        compiled = torch.compile(function, backend="eager", fullgraph=fullgraph)
        net = Called(lambda m, x, f=compiled: m.fc2(f(m.fc1(x))))
        assert not offers(check_training(net, tokens(), tolerance=1e-7))


@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_module_whose_output_compiled_code_reads_is_left_alone(fullgraph):
    """The first reader of its output is an activation in one call, and compiled code in the next one."""
    compiled = torch.compile(lambda h: torch.tanh(h) * 2, backend="aot_eager", fullgraph=fullgraph)

    def run(m, x):
        return m.fc2(F.gelu(m.fc1(x))) + m.fc2(compiled(m.fc1(-x)))

    trained = check_training(Called(run), tokens(), tolerance=1e-7)
    assert not offers(trained)
    assert layer_of(trained).why == "compiled code reads its input"


def test_a_compiled_model_trains_as_torchs():
    model = Called(mlp)
    converted, x = torch.compile(convert(copy.deepcopy(model)), backend="aot_eager"), tokens()
    for m in (model, converted):
        m(x).square().sum().backward()
    assert torch.allclose(converted.fc1.weight.grad, model.fc1.weight.grad, rtol=1e-5, atol=1e-6)


def written_in_a_checkpoint(m, x):
    z = F.silu(m.fc1(x))
    z *= 2
    return m.fc2(z)


@pytest.mark.parametrize("run", [written_in_a_checkpoint, compared, dropped])
def test_a_checkpoint_recomputes_what_was_given_up_as_it_was(run):
    """The module's output was not offered any more in the recomputation of the same step: CheckpointError."""

    def checkpointed(m, x):
        return checkpoint(lambda t: run(m, t), x, use_reentrant=False)

    check_training(Called(checkpointed), tokens(), tolerance=1e-7)


def test_a_trained_model_can_be_traced():
    model, x = stepped(convert(Called(mlp))), tokens()
    traced = torch.jit.trace(model, x)
    assert torch.allclose(traced(x), model(x), atol=1e-6)
