"""An activation module without a norm before it keeps its result, and recovers its input from it in backward."""

import copy
import functools
import logging
import pickle

import pytest
import torch
import torch.nn.functional as F
from one_norm import OneNorm, images, plain
from torch import nn
from torch.utils.checkpoint import checkpoint
from training import check_training

from inplace_abn import convert, guard, report, revert, set_guard, verify

ACTIVATIONS = {
    "gelu": nn.GELU(),
    "gelu_tanh": nn.GELU("tanh"),
    "silu": nn.SiLU(),
    "mish": nn.Mish(),
    "hardswish": nn.Hardswish(),
    "elu": nn.ELU(),
    "elu of alpha 0.3": nn.ELU(0.3),
    "leaky_relu": nn.LeakyReLU(0.1),
}
LINEAR = {"a matrix": (6, 8), "tokens": (2, 5, 8), "an image of tokens": (2, 4, 3, 8)}


class Wired(nn.Module):
    """Two linear layers, and what a test does between them. ``run(net, x)`` is the forward pass."""

    def __init__(self, run, act=None):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 16), nn.Linear(16, 8)
        self.act = nn.GELU() if act is None else act
        self.drop = nn.Dropout(0.5)
        self.run = run

    def forward(self, x):
        return self.run(self, x)


def mlp(m, x):
    return m.fc2(m.act(m.fc1(x)))


def tokens():
    return torch.randn(2, 5, 8)


def layer_of(model):
    (layer,) = report(model).layers
    return layer


def stepped(model, x=None):
    """One training step of a converted model."""
    model(tokens() if x is None else x).square().sum().backward()
    guard.generations.advance()
    return model


@pytest.mark.parametrize("shape", LINEAR)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_between_linear_layers_it_trains_as_torchs_and_keeps_its_result_only(name, shape):
    trained = check_training(Wired(mlp, copy.deepcopy(ACTIVATIONS[name])), torch.randn(LINEAR[shape]), tolerance=1e-7)
    layer = layer_of(trained)
    assert layer.in_place
    assert not layer.is_norm
    assert layer.bytes_saved == torch.Size(LINEAR[shape]).numel() * 2 * 8


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_between_convolutions_it_trains_as_torchs(name, memory_format):
    act = ACTIVATIONS[name]
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), copy.deepcopy(act), nn.Conv2d(8, 8, 3), copy.deepcopy(act), nn.Conv2d(8, 2, 1)
    )
    x = torch.randn(2, 3, 12, 12).contiguous(memory_format=memory_format)
    trained = check_training(model, x, tolerance=1e-7)
    assert [layer.in_place for layer in report(trained).layers] == [True, True]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_its_gradient_is_as_exact_as_torchs_in_every_dtype(name, dtype):
    """The gradient is correlated with the input. The error counts beside that of torch, relative to float64."""
    act = ACTIVATIONS[name]
    converted = convert(copy.deepcopy(act))
    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(0)) * 3
    errors = []
    for module in (act, converted):
        given = x.to(dtype, copy=True).requires_grad_()
        z = module(given * 1)
        assert z.dtype == dtype
        z.backward(given.detach() + 1)
        wide = given.detach().double().requires_grad_()
        act(wide).backward(wide.detach() + 1)
        errors.append(float((given.grad.double() - wide.grad).norm() / wide.grad.norm()))
    native, own = errors
    # In float64 torch is compared with itself.
    assert own <= max(6 * native, 64 * torch.finfo(torch.float64).eps), errors


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_its_result_is_torchs_but_for_the_last_bits(name):
    act = ACTIVATIONS[name]
    x = torch.randn(64, 64, requires_grad=True) * 2
    wide = act(x.double())
    own, native = ((z - wide).abs() for z in (convert(copy.deepcopy(act))(x), act(x)))
    # Zeros may be tiny numbers.
    assert bool((own <= native + 8 * torch.finfo(torch.float32).eps * wide.abs() + 1e-12).all())


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gradients_of_gradients_are_right(name):
    act = convert(copy.deepcopy(ACTIVATIONS[name]))
    x = (torch.randn(3, 4, 5, dtype=torch.float64) * 2).requires_grad_()
    assert torch.autograd.gradcheck(lambda t: act(t * 1), (x,))
    assert torch.autograd.gradgradcheck(lambda t: act(t * 1), (x,))


def dropped(m, x):
    return m.fc2(m.drop(m.act(m.fc1(x))))


def summed(m, x):
    return m.act(m.fc1(x)).sum(-1)


def input_kept(m, x):
    h = m.fc1(x)
    return m.fc2(m.act(h).sum(0)) + m.fc2(h).sum(0)


def gated_by_itself(m, x):
    h = m.fc1(x)
    return m.fc2(m.act(h) * h)


def input_returned(m, x):
    h = m.fc1(x)
    return h, m.fc2(m.act(h))


def input_saved_by_what_made_it(m, x):
    return m.fc2(m.act(m.fc1(x).sigmoid()))


@pytest.mark.parametrize("act", ["gelu", "hardswish", "silu", "elu"])
@pytest.mark.parametrize("run", [dropped, summed, input_kept, gated_by_itself, input_saved_by_what_made_it])
def test_where_it_saves_nothing_it_is_torchs_from_the_second_step_on(run, act):
    layer = layer_of(check_training(Wired(run, copy.deepcopy(ACTIVATIONS[act])), tokens(), tolerance=1e-7))
    assert not layer.in_place
    assert "it saves nothing" in layer.why


def test_an_input_that_the_model_returns_is_as_with_torch():
    check_training(Wired(input_returned), tokens(), tolerance=1e-7)


def of_one_input(m, x):
    h = m.fc1(x)
    return m.fc2(m.act(h)) + m.fc2(m.other(h))


def of_two_parts(m, x):
    a, b = m.fc1(x).chunk(2, 0)
    return m.fc2(m.act(a)) + m.fc2(m.other(b))


@pytest.mark.parametrize("run", [of_one_input, of_two_parts])
def test_two_that_share_an_input_are_right(run):
    model = Wired(run)
    model.other = nn.SiLU()
    check_training(model, torch.randn(64, 8), tolerance=1e-7)


def added_to(m, x):
    h = m.act(m.fc1(x))
    h += 1
    return m.fc2(h)


@pytest.mark.parametrize("write", [torch.Tensor.mul_, lambda t, c: t.detach().mul_(c), lambda t, c: t.data.mul_(c)])
@pytest.mark.parametrize("act", [nn.GELU(), nn.SiLU(), nn.ELU()], ids=str)
def test_the_models_output_may_be_written_to_after_the_first_step_too(act, write):
    """Nothing keeps it, so the activation is torch's, and the first step has a copy."""
    native = nn.Sequential(nn.Linear(4, 4), act).double()
    model = convert(copy.deepcopy(native))
    x = torch.randn(6, 4, dtype=torch.float64)
    for _ in range(3):
        for net in (native, model):
            net.zero_grad()
            z = net(x)
            write(z, 2.0)
            (z * x).sum().backward()
        torch.testing.assert_close(model[0].weight.grad, native[0].weight.grad)
        guard.generations.advance()


def multiplied_later(m, x):
    h = m.act(m.fc1(x))
    y = m.fc2(h)
    h.mul_(0.5)
    return y


def test_a_result_that_is_written_to_is_as_with_torch_and_the_write_is_named():
    layer = layer_of(check_training(Wired(added_to), tokens(), tolerance=1e-7))
    assert not layer.in_place
    assert "add writes to its output" in layer.why


def test_a_write_that_torch_refuses_is_refused():
    for make in (nn.Module, convert):
        model = Wired(multiplied_later) if make is nn.Module else convert(Wired(multiplied_later))
        with pytest.raises(RuntimeError, match="modified"):
            model(tokens()).sum().backward()


def written_to_by_a_view(m, x):
    h = m.act(m.fc1(x))
    h.view(-1).mul_(0.5)
    return m.fc2(h)


def test_a_write_that_is_not_seen_is_an_error_that_names_the_module_and_the_next_step_works():
    model = convert(Wired(mlp))
    set_guard(model, interval=1000)
    for _ in range(3):
        stepped(model)
    model.run = written_to_by_a_view
    with pytest.raises(RuntimeError, match=r"the output of act has been modified in place.*filter_fn"):
        stepped(model)
    stepped(model)
    assert "its output was written to" in layer_of(model).why


def reading(m, x):
    h = m.act(m.fc1(x) - 30)
    return m.fc2(h) + (h == 0).sum()


@pytest.mark.parametrize("name", ["gelu", "hardswish"])
def test_who_tells_its_zeros_from_tiny_numbers_gets_zeros_and_is_named(name):
    layer = layer_of(check_training(Wired(reading, copy.deepcopy(ACTIVATIONS[name])), tokens(), tolerance=1e-7))
    assert not layer.in_place
    assert "eq compares them with zero" in layer.why


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("run", [mlp, dropped, added_to, reading])
def test_under_checkpoints_it_trains_as_torchs(run, reentrant):
    def repeated(m, x):
        return checkpoint(lambda t: run(m, t), x, use_reentrant=reentrant)

    check_training(Wired(repeated), tokens(), tolerance=1e-7)


def test_what_was_never_watched_is_watched_in_the_next_step():
    """A part of a model may be trained from some later step on."""
    model = convert(Wired(lambda m, x: m.fc2(m.act(m.fc1(x))) if m.trains else m.fc2(m.fc1(x))))
    model.trains = False
    set_guard(model, interval=1000)
    for _ in range(3):
        stepped(model)
    model.trains = True
    assert layer_of(stepped(model)).bytes_saved is None
    assert layer_of(stepped(model)).bytes_saved > 0
    assert layer_of(stepped(model)).in_place


def test_after_a_norm_it_is_part_of_the_norm():
    model = check_training(OneNorm(plain, nn.SiLU()), images(), tolerance=1e-6)
    layer = layer_of(model)
    assert layer.is_norm
    assert layer.follows == "silu"
    assert "part of the norm before it" in repr(model.act)


def test_one_module_may_activate_a_norm_and_a_convolution():
    def run(m, x):
        return m.last(m.act(m.last(m.act(m.bn(m.conv(x))))))

    check_training(OneNorm(run, nn.SiLU()), images(), tolerance=1e-6)


@pytest.mark.parametrize(
    "act", [nn.SiLU(inplace=True), nn.LeakyReLU(0.0), nn.ReLU(), nn.CELU(), nn.Softplus()], ids=str
)
def test_what_gains_nothing_or_has_no_inverse_is_left_as_it_is(act):
    kind = type(act)
    model = convert(Wired(mlp, act))
    assert type(model.act) is kind
    assert not report(model).layers


def test_float16_leaves_flat_tails_to_torch_where_no_norm_limits_the_input():
    x = (torch.tensor([[-20.0, -100.0, -3000.0, -6e4]], dtype=torch.float16)).requires_grad_()
    for act in (nn.GELU(), nn.GELU("tanh"), nn.Hardswish()):
        assert convert(copy.deepcopy(act))(x * 1).count_nonzero() == 0
    wide = x.detach().float().requires_grad_()
    assert float(convert(nn.GELU())(wide * 1).abs().max()) < 1e-9


@pytest.mark.parametrize("act", [nn.ELU(2.0), nn.ELU(float("inf")), nn.LeakyReLU(float("inf"))], ids=str)
def test_parameters_that_cost_digits_are_left_to_torch(act):
    assert type(convert(Wired(mlp, act)).act) is type(act)


def test_without_measurements_it_keeps_its_result_from_the_first_step_on():
    model = set_guard(convert(Wired(mlp)), interval=0)
    for _ in range(3):
        stepped(model)
        assert model.act.outcome().in_place


def test_one_that_is_made_to_write_to_its_input_later_does_so():
    model = stepped(convert(Wired(mlp, nn.SiLU())))
    model.act.inplace = True
    h = torch.randn(2, 3, requires_grad=True) * 1
    assert model.act(h) is h
    assert "writes to its input" in stepped(model).act.outcome().why


def test_it_follows_its_attributes():
    model = Wired(mlp, nn.ELU(0.5))
    native = copy.deepcopy(model)
    stepped(convert(model))
    for alpha in (1.0, 2.0):
        model.act.alpha = native.act.alpha = alpha
        assert verify(native, model, tokens())


def test_it_is_left_alone_without_a_graph_and_works_on_every_input_that_torch_takes():
    act = convert(nn.GELU())
    for shape in ((3,), (), (0, 4), (4, 6), (2, 3, 4)):
        x = torch.randn(shape, dtype=torch.float64)
        x = x.t() if len(shape) == 2 else x[:, ::2] if len(shape) == 3 else x
        for needs in (False, True):
            given, other = (x.clone(memory_format=torch.preserve_format).requires_grad_(needs) for _ in range(2))
            z, native = act(given), F.gelu(other)
            assert z.stride() == native.stride()
            torch.testing.assert_close(z, native)
            if needs:
                z.sum().backward()
                native.sum().backward()
                torch.testing.assert_close(given.grad, other.grad)
    nested = torch.nested.nested_tensor([torch.randn(3, 8), torch.randn(5, 8)], requires_grad=True)
    assert act(nested).is_nested
    with torch.no_grad():
        assert not act(torch.randn(2, 3)).requires_grad
    assert act(torch.randn(2, 3, device="meta", requires_grad=True)).is_meta


def test_it_works_under_transforms_tracers_and_in_copies():
    native = Wired(mlp)
    model = stepped(convert(copy.deepcopy(native)))
    x = tokens()
    parameters = dict(native.named_parameters())

    def loss(net):
        return lambda given: torch.func.functional_call(net, given, x).square().sum()

    gradients = [torch.func.grad(loss(net))(parameters) for net in (native, model)]
    torch.testing.assert_close(*gradients)
    per_sample = [torch.func.vmap(net)(x) for net in (native, model)]
    torch.testing.assert_close(*per_sample)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model.act)), torch.jit.trace(model, x)):
        given = native.fc1(x)
        if isinstance(other, nn.GELU):
            torch.testing.assert_close(other(given), native.act(given))
        else:
            torch.testing.assert_close(other(x), native(x))
    graph = torch.fx.symbolic_trace(convert(nn.Sequential(nn.Linear(2, 3), nn.GELU())))
    assert [node.target for node in graph.graph.nodes] == ["input", "0", "1", "output"]


def test_compiled_it_trains_as_torchs():
    native = Wired(mlp).double()
    model = convert(copy.deepcopy(native))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = tokens().double()
    for net in (native, compiled):
        net(x).square().sum().backward()
    for own, other in zip(model.parameters(), native.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad)


def test_revert_gives_it_back_as_it_was():
    act = nn.GELU("tanh")
    before = dict(act.__dict__)
    model = Wired(mlp, act)
    revert(stepped(convert(model)))
    assert type(model.act) is nn.GELU
    assert model.act.__dict__ == before
    assert not model._forward_hooks


def test_filter_fn_is_asked_and_the_line_counts_them(logged):
    records = logged(logging.INFO)
    model = convert(nn.Sequential(nn.Linear(2, 2), nn.GELU(), nn.BatchNorm1d(2), nn.SiLU()))
    assert records[-1].getMessage() == "converted 1 of 1 norms, and 2 activations"
    model = convert(Wired(mlp), filter_fn=lambda module, name: name != "act")
    assert type(model.act) is nn.GELU


class GELUActivation(nn.Module):
    """As transformers has it."""

    def __init__(self, act=F.gelu):
        super().__init__()
        self.act = act

    def forward(self, input):
        return self.act(input)


GELUActivation.__module__ = "transformers.activations"


def test_an_activation_of_another_package_is_known_by_its_name_and_by_what_it_calls():
    trained = check_training(Wired(mlp, GELUActivation()), tokens(), tolerance=1e-7)
    assert layer_of(trained).in_place
    assert isinstance(trained.act, GELUActivation)
    assert type(copy.deepcopy(trained).act) is type(trained.act)
    assert type(convert(Wired(mlp, GELUActivation(torch.tanh))).act) is GELUActivation


class GELUTanh(GELUActivation):
    """As transformers has it."""


GELUTanh.__module__ = "transformers.activations"
GELUTanh.__qualname__ = "GELUTanh"


@pytest.mark.parametrize(
    "options", [{"approximate": "tanh"}, {"approximate": "none"}, {}, {"approximate": "other"}], ids=str
)
def test_a_partial_gelu_is_read_by_its_arguments(options):
    model = Wired(mlp, GELUTanh(functools.partial(F.gelu, **options)))
    kind = type(convert(copy.deepcopy(model)).act)
    assert (kind is not GELUTanh) == (options.get("approximate") in ("tanh", "none"))
    if kind is not GELUTanh:
        assert layer_of(check_training(model, tokens(), tolerance=1e-7)).in_place


def gated(m, x):
    return m.fc2(m.act(m.fc1(x)) * m.drop(m.fc1(x)))


def test_a_gate_keeps_its_result_too():
    """The product keeps both of its factors, as in a SwiGLU."""
    assert layer_of(check_training(Wired(gated, nn.SiLU()), tokens(), tolerance=1e-7)).in_place
