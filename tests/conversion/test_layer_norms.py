"""A layer norm or an RMS norm keeps its output for backward, where what follows keeps it as well."""

import copy
import logging
import pickle

import pytest
import torch
import torch.nn.functional as F
from layer_norms import (
    DOING_MORE,
    NEAR_MISSES,
    ChannelsFirstNorm,
    ContiguousNorm2d,
    LayerNorm2d,
    NormOfTokens,
    RMSNormOfDiffusers,
    RMSNormOfGemma,
    RMSNormOfLlama,
    RMSNormOfT5,
    UnbiasedNorm,
    Weighted,
)
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint
from training import check_training

from inplace_abn import convert, guard, report, revert, set_guard, verify
from inplace_abn.conversion.layer_norms import ConvertedLayerNorm
from inplace_abn.conversion.offered import Offered
from inplace_abn.guard.figures import THRESHOLDS
from inplace_abn.memory import measure

SIZE = 16
CHANNELS_FIRST = (LayerNorm2d, ChannelsFirstNorm)


def spread(norm):
    """Gives a norm a weight and a bias that are different everywhere."""
    with torch.no_grad():
        for i, p in enumerate(norm.parameters()):
            p.copy_((1 - i) + 0.3 * torch.randn(p.shape))
    return norm


NORMS = {
    "layer norm": lambda: spread(nn.LayerNorm(SIZE)),
    "without bias": lambda: spread(nn.LayerNorm(SIZE, bias=False)),
    "without parameters": lambda: nn.LayerNorm(SIZE, elementwise_affine=False),
    "rms norm": lambda: spread(nn.RMSNorm(SIZE)),
    "rms norm with eps": lambda: spread(nn.RMSNorm(SIZE, eps=1e-3)),
    "rms norm without weight": lambda: nn.RMSNorm(SIZE, elementwise_affine=False),
    "llama": lambda: RMSNormOfLlama(SIZE),
    "gemma": lambda: RMSNormOfGemma(SIZE),
    "layer norm 2d": lambda: spread(LayerNorm2d(SIZE)),
    "by hand": lambda: ChannelsFirstNorm(SIZE),
}
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


class Block(nn.Module):
    """A residual stream, a norm of it, and what keeps the norm's output. ``run(block, x)`` is the forward pass."""

    def __init__(self, norm, run=None):
        super().__init__()
        kind = nn.Conv2d if isinstance(norm, CHANNELS_FIRST) else nn.Linear
        size = (SIZE, SIZE, 1) if kind is nn.Conv2d else (SIZE, SIZE)
        self.first, self.norm, self.last, self.run = kind(*size), norm, kind(*size), run
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        x = self.first(x) + x
        return x + self.last(self.norm(x)) if self.run is None else self.run(self, x)


def inputs(norm, dtype=torch.float32):
    shape = (2, SIZE, 5, 3) if isinstance(norm, CHANNELS_FIRST) else (2, 15, SIZE)
    return (torch.randn(shape) * 1.7 + 0.4).to(dtype)


def layer_of(model):
    (layer,) = report(model).layers
    return layer


def stepped(model, x=None):
    model(inputs(model.norm) if x is None else x).float().square().sum().backward()
    guard.generations.advance()
    return model


@pytest.mark.parametrize("name", NORMS)
def test_before_a_linear_layer_it_trains_as_torchs_and_keeps_its_output_only(name):
    norm = NORMS[name]()
    trained = check_training(Block(norm), inputs(norm))
    layer = layer_of(trained)
    assert layer.in_place, layer.why
    assert layer.is_norm
    assert layer.bytes_saved == 2 * 15 * SIZE * 8


@pytest.mark.parametrize("name", NORMS)
def test_it_holds_less_than_torchs_by_one_tensor(name):
    torch.manual_seed(0)
    model = Block(NORMS[name]())
    x = inputs(model.norm).repeat_interleave(64, 0)
    native = measure(model, x).held
    converted = convert(model)
    for _ in range(3):
        stepped(converted, x)
    assert native - measure(converted, x).held > 0.95 * x.nbytes


@pytest.mark.parametrize("chosen", [lambda y: y[:, 0], lambda y: y.select(1, 0)])
def test_a_linear_layer_that_gets_one_token_keeps_the_whole_output(chosen):
    """So do the heads of vision transformers. torch keeps the norm's input beside it."""
    torch.manual_seed(0)
    model = Block(nn.LayerNorm(SIZE), lambda m, x: m.last(chosen(m.norm(x))))
    x = inputs(model.norm).repeat_interleave(64, 0)
    check_training(model, inputs(model.norm))
    native = measure(model, x).held
    converted = convert(model)
    for _ in range(3):
        stepped(converted, x)
    assert native - measure(converted, x).held > 0.95 * x.nbytes


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_its_output_is_torchs_bit_for_bit_and_its_gradients_are_as_exact(name, dtype):
    """The gradient follows the input. Errors count beside those of torch, relative to float64."""
    torch.manual_seed(0)
    native = Block(NORMS[name](), lambda m, x: m.last(m.norm(x))).to(dtype)
    converted, exact = convert(copy.deepcopy(native)), copy.deepcopy(native).double()
    x = inputs(native.norm, dtype)
    found = []
    for _ in range(3):
        found = []
        for model in (native, converted, exact):
            model.zero_grad()
            given = x.to(next(model.parameters()).dtype, copy=True).requires_grad_()
            z = model(given)
            z.backward((x + torch.randn(x.shape, generator=torch.Generator().manual_seed(1))).to(z.dtype))
            found.append((z, given.grad, *(p.grad for p in model.parameters())))
        guard.generations.advance()
        assert torch.equal(found[0][0], found[1][0])
    # Half the range of float16 is too small for the squares of this class.
    assert layer_of(converted).in_place or (name == "by hand" and dtype == torch.float16)
    for torchs, own, right in zip(*found, strict=True):
        errors = [float((t.double() - right).norm() / right.norm()) for t in (torchs, own)]
        assert errors[1] <= 6 * errors[0], errors


@pytest.mark.parametrize("name", NORMS)
def test_gradients_of_gradients_are_right(name):
    model = set_guard(convert(Block(NORMS[name]()).double()), interval=0)
    x = inputs(model.norm, torch.float64)[:, :, :2].requires_grad_()
    if not isinstance(model.norm, CHANNELS_FIRST):
        x = inputs(model.norm, torch.float64)[:, :3].detach().requires_grad_()
    parameters = [*model.norm.parameters()]

    def function(x, *values):
        return torch.func.functional_call(model, dict(zip(names, values, strict=True)), (x,))

    names = [f"norm.{key}" for key, _ in model.norm.named_parameters()]
    assert torch.autograd.gradcheck(function, (x, *parameters))
    assert model.norm.outcome().in_place
    assert torch.autograd.gradgradcheck(function, (x, *parameters))


@pytest.mark.parametrize("kind", NEAR_MISSES)
def test_a_class_that_computes_something_else_is_left_to_torch(kind):
    norm = kind(SIZE)
    native = Block(copy.deepcopy(norm)).double()
    assert not any(layer.in_place for layer in report(check_training(native, inputs(norm))).layers)


@pytest.mark.parametrize("kind", DOING_MORE)
def test_a_class_whose_code_does_more_is_not_tried(kind):
    norm = kind(SIZE)
    converted = check_training(Block(norm), inputs(norm))
    assert type(converted.norm) is kind
    assert report(converted).unsupported == {kind.__name__: 1}


def test_in_16_bits_a_norm_of_another_variance_is_no_layer_norm():
    model = nn.Sequential(nn.Linear(8, 128), UnbiasedNorm(128), nn.Linear(128, 8)).bfloat16()
    converted = convert(model)
    for _ in range(2):
        converted(torch.randn(4, 8).bfloat16()).sum().backward()
        guard.generations.advance()
    assert layer_of(converted).why == "its forward pass is not that of a layer norm or an RMS norm"


@pytest.mark.parametrize("tokens", [1, 5])
def test_a_norm_over_several_dimensions_is_no_norm_of_rows(tokens):
    assert not layer_of(check_training(Block(NormOfTokens(SIZE)), torch.randn(2, tokens, SIZE))).in_place


def test_a_norm_that_ends_in_a_copy_returns_the_same_strides():
    model = Block(ContiguousNorm2d(SIZE), lambda m, x: m.last(m.norm(m.last(x))).view(2, -1))
    assert layer_of(check_training(model, inputs(model.norm))).in_place


class Odd(nn.Module):
    """Modules whose names are those of norms."""

    def __init__(self, **attributes):
        super().__init__()
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x):
        return x


class NormThatRefusesSubclasses(Weighted):
    def __init_subclass__(cls, *, key):
        super().__init_subclass__()

    def forward(self, x):
        return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)


@pytest.mark.parametrize(
    "norm",
    [
        type("OddNorm", (Odd,), {})(weight=0.5),
        type("OddNorm", (Odd,), {})(weight=[1, 2], bias=True),
        type("OddNorm", (Odd,), {})(weight=nn.UninitializedParameter()),
        type("OddNorm", (Odd,), {})(weight=nn.Parameter(torch.ones(SIZE)), eps="small"),
        type("OddNorm", (Odd,), {})(normalized_shape=("a",)),
        NormThatRefusesSubclasses(SIZE),
    ],
)
def test_modules_with_odd_attributes_are_left_as_they_are(norm):
    kind = type(norm)
    model = convert(nn.Sequential(nn.Linear(4, SIZE), norm, nn.Linear(SIZE, 4)))
    model(torch.randn(3, 4)).sum().backward()
    assert isinstance(model[1], kind)


def test_a_parametrized_norm_is_torchs():
    class Doubled(nn.Module):
        def forward(self, weight):
            return 2 * weight

    native = Block(NORMS["layer norm"]()).double()
    converted = convert(copy.deepcopy(native))
    found = []
    for model in (native, converted):
        parametrize.register_parametrization(model.norm, "weight", Doubled())
        model(inputs(native.norm, torch.float64).fill_(0.3).cumsum(-1)).square().sum().backward()
        found.append(model.norm.parametrizations.weight.original.grad)
    torch.testing.assert_close(*found)


def test_what_a_class_computes_is_found_out_without_a_trace():
    model = convert(Block(RMSNormOfLlama(SIZE)))
    weight, attributes, state = model.norm.weight.clone(), {*vars(model.norm)}, torch.get_rng_state()
    x = inputs(model.norm)
    torch.set_rng_state(state)
    stepped(model, x)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(model.norm.weight, weight)
    assert model.norm.weight.grad is not None
    assert {*vars(model.norm)} == attributes | {"_guard"}


def test_a_class_that_takes_more_arguments_is_torchs_when_it_is_given_more():
    class GatedNorm(RMSNormOfGemma):
        def forward(self, x, gate=None):
            return super().forward(x if gate is None else x * F.silu(gate))

    def gated(m, x):
        return m.last(m.norm(x, x) + m.norm(x, gate=x) + m.norm(x))

    check_training(Block(GatedNorm(SIZE), gated), torch.randn(2, 15, SIZE))


def dropped(m, x):
    return m.last(m.drop(m.norm(x)))


def averaged(m, x):
    return m.last(m.norm(x).mean(1))


def input_kept(m, x):
    return m.last(m.norm(x)) * x.sigmoid() + m.last(x)


@pytest.mark.parametrize("run", [dropped, averaged])
def test_where_nothing_keeps_its_output_it_is_torchs(run):
    layer = layer_of(check_training(Block(NORMS["layer norm"](), run), torch.randn(2, 15, SIZE)))
    assert not layer.in_place
    assert layer.why == "what follows does not keep the norm's output for backward"


def added_to(m, x):
    y = m.norm(x)
    y += 1
    return m.last(y)


def a_view_written_to(m, x):
    y = m.norm(x)
    y[:, 0] = x[:, 0]
    return m.last(y)


def stream_added_to(m, x):
    y = m.norm(x)
    x += m.last(y)
    return x * 2


def after_another(m, x):
    return m.last(m.norm(m.norm(x)))


def called_twice(m, x):
    x = x + m.last(m.norm(x))
    return x + m.last(m.norm(x))


def scaled_and_shifted(m, x):
    """As adaptive norms of diffusion transformers are."""
    scale, shift = m.first(x.mean(1, keepdim=True)).chunk(2, -1)
    return m.last(torch.cat([m.norm(x)[..., : SIZE // 2] * (1 + scale) + shift, x[..., SIZE // 2 :]], -1))


def post_norm(m, x):
    x = m.norm(x + m.last(x))
    return m.norm(x + m.last(x))


def returned(m, x):
    y = m.norm(x)
    return y, m.last(y)


def activated(m, x):
    return m.last(F.gelu(m.norm(m.last(x))))


PROGRAMS = [added_to, a_view_written_to, after_another, called_twice, scaled_and_shifted, post_norm]
PROGRAMS += [returned, activated, dropped, averaged, input_kept]


@pytest.mark.parametrize("run", PROGRAMS)
@pytest.mark.parametrize("name", ["layer norm", "gemma", "without parameters"])
def test_whatever_follows_it_trains_as_torchs(name, run):
    check_training(Block(NORMS[name](), run), torch.randn(2, 15, SIZE))


def test_a_stream_that_is_written_to_is_no_error_because_it_is_not_needed():
    model = stepped(convert(Block(NORMS["layer norm"](), stream_added_to)))
    out_of_place = copy.deepcopy(model)
    out_of_place.run = lambda m, x: (x + m.last(m.norm(x))) * 2
    x = inputs(model.norm)
    for _ in range(3):
        for net in (model, out_of_place):
            net.zero_grad()
            net(x).square().sum().backward()
        torch.testing.assert_close(model.norm.weight.grad, out_of_place.norm.weight.grad)
        guard.generations.advance()


@pytest.mark.parametrize("run", [added_to, a_view_written_to])
def test_where_its_output_is_written_to_first_it_is_torchs(run):
    layer = layer_of(check_training(Block(NORMS["layer norm"](), run), torch.randn(2, 15, SIZE)))
    assert not layer.in_place
    assert layer.why == "what follows does not keep the norm's output for backward"


def some_values_masked(m, x):
    mask = torch.ones(SIZE, dtype=x.dtype)
    mask[2] = 0
    return m.last(m.norm(x * mask)) + m.last(m.norm(x))


def a_view_is_returned(m, x):
    return m.norm(m.last(x))[:, 0]


@pytest.mark.parametrize("norm", [nn.LayerNorm(SIZE), nn.RMSNorm(SIZE, eps=1e-6)], ids=["layer norm", "rms norm"])
@pytest.mark.parametrize("weight", [0.0, 1e-310, 1e-100, 1e-31, 1e-29])
def test_a_weight_of_zero_is_right_whatever_the_first_call_has_in_its_place(norm, weight):
    for run in (some_values_masked, None):
        model = Block(copy.deepcopy(norm), run)
        with torch.no_grad():
            model.norm.double().weight[2] = weight
        check_training(model, torch.randn(2, 15, SIZE))


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 1e-9), (torch.bfloat16, 1e-5)])
def test_where_eps_is_most_of_the_variance_gradients_of_the_weight_are_right(dtype, size):
    torch.manual_seed(0)
    model = Wide(4).to(dtype)
    nn.init.ones_(model.norm.weight)
    converted, x = convert(copy.deepcopy(model)), (torch.randn(200, 128) * size).to(dtype)
    for _ in range(3):
        stepped(converted, x)
    for torchs, own in zip(*errors(model, converted, x), strict=True):
        assert own <= 6 * torchs


def test_a_returned_view_may_be_written_to_in_the_first_step():
    native = Block(NORMS["layer norm"](), a_view_is_returned).double()
    converted = convert(copy.deepcopy(native))
    x = inputs(native.norm, torch.float64)
    for _ in range(3):
        for model in (native, converted):
            model.zero_grad()
            y = model(x)
            y *= 2
            y.square().sum().backward()
        torch.testing.assert_close(converted.norm.weight.grad, native.norm.weight.grad)
        guard.generations.advance()


def test_values_that_are_to_be_saved_are_so_from_the_next_step_on():
    """A checkpoint's recomputation saves what its forward pass saved."""
    model = Block(NORMS["layer norm"](), lambda m, x: checkpoint(lambda t: m.last(m.norm(t)), x, use_reentrant=False))
    with torch.no_grad():
        model.norm.weight[0], model.norm.bias[0] = 1e-6, 0.5
    check_training(model, torch.randn(2, 15, SIZE))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("run", [None, *PROGRAMS])
def test_under_checkpoints_it_trains_as_torchs(run, reentrant):
    def repeated(m, x):
        passed = (lambda t: t + m.last(m.norm(t))) if run is None else (lambda t: run(m, t))
        return checkpoint(passed, x, use_reentrant=reentrant)

    check_training(Block(NORMS["layer norm"](), repeated), torch.randn(2, 15, SIZE))


def test_a_batch_norm_before_it_keeps_one_output_for_both():
    model = nn.Sequential(nn.Linear(SIZE, SIZE), nn.BatchNorm1d(SIZE), nn.LayerNorm(SIZE), nn.Linear(SIZE, 4))
    first, second = report(check_training(model, torch.randn(64, SIZE))).layers
    assert first.in_place
    assert first.follows == "layer_norm"
    assert second.in_place
    x = torch.randn(64, SIZE)
    assert measure(convert(copy.deepcopy(model)), x).held <= measure(model, x).held


def ill(norm, count):
    """Makes some values of each row have a weight that is tiny beside the bias."""
    with torch.no_grad():
        norm.weight.uniform_(0.5, 1.5)
        norm.bias.fill_(0.1)
        norm.weight[: norm.weight.numel() // 2 : norm.weight.numel() // 2 // count] = 1e-4
    return norm


def errors(model, converted, x):
    """The errors of the gradients of both, relative to float64."""
    found = []
    for net in (copy.deepcopy(model).double(), model, converted):
        net.zero_grad()
        given = x.to(next(net.parameters()).dtype, copy=True).requires_grad_()
        z = net(given)
        z.backward((x + 1).to(z.dtype))
        found.append((given.grad, *(p.grad for p in net.norm.parameters())))
    right, *others = found
    return [[float((t.double() - r).norm() / r.norm()) for t, r in zip(each, right, strict=True)] for each in others]


class Wide(nn.Module):
    """A layer norm with some ill values, and a matrix."""

    def __init__(self, count):
        super().__init__()
        self.norm, self.last = ill(nn.LayerNorm(128), count), nn.Linear(128, 128)

    def forward(self, x):
        return self.last(self.norm(x * 1.0))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_whose_weight_is_tiny_beside_the_bias_are_saved_as_they_are(dtype):
    torch.manual_seed(0)
    model = Wide(4).to(dtype)
    converted = convert(copy.deepcopy(model))
    x = torch.randn(200, 128).to(dtype)
    for _ in range(4):
        stepped(converted, x)
    (mode,) = converted.norm._guard.modes.values()
    assert converted.norm.outcome().in_place
    # In more than 16 bits there are digits enough.
    assert len(mode.decisions[-1].verbatim) == (4 if dtype.itemsize == 2 else 0)
    for torchs, own in zip(*errors(model, converted, x), strict=True):
        assert own <= max(6 * torchs + 1e-7, THRESHOLDS[dtype].x if dtype == torch.float32 else 0.0)


def test_where_too_many_values_are_ill_it_keeps_its_input():
    model = Wide(64)
    with torch.no_grad():
        model.norm.weight[:100] = 1e-7
    layer = layer_of(check_training(model, torch.randn(200, 128)))
    assert layer.in_place
    converted = convert(copy.deepcopy(model))
    for _ in range(4):
        stepped(converted, torch.randn(200, 128))
    assert "its input is not recoverable" in layer_of(converted).why


def test_values_that_have_no_weight_are_right_too():
    model = Wide(4)
    with torch.no_grad():
        model.norm.weight[:4] = 0.0
        model.norm.weight.requires_grad_(False)
    assert layer_of(check_training(model, torch.randn(200, 128))).in_place
    nn.init.zeros_(model.norm.weight)
    assert "its input is not recoverable" in layer_of(check_training(model, torch.randn(200, 128))).why


def test_without_a_bias_it_is_always_recoverable():
    norm = nn.RMSNorm(SIZE)
    with torch.no_grad():
        norm.weight.copy_(torch.logspace(-10, 3, SIZE))
    assert layer_of(check_training(Block(norm), torch.randn(2, 15, SIZE))).in_place


class Under(nn.Module):
    """A model under autocast."""

    def __init__(self, run=None):
        super().__init__()
        self.first, self.norm, self.run = nn.Linear(64, 64), nn.LayerNorm(64), run
        self.query, self.key = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            x = x + self.first(x)
            if self.run is not None:
                return self.run(self, x)
            y = self.norm(x)
            return x + self.query(y) * self.key(y)


def settled(model, x):
    for _ in range(3):
        stepped(model, x)
    return model


def test_under_autocast_the_output_is_kept_in_16_bits_once_for_all_that_cast_it():
    torch.manual_seed(0)
    native = Under()
    x = torch.randn(64, 32, 64)
    converted = settled(convert(copy.deepcopy(native)), x)
    # torch keeps the input, and a copy of the output for each linear layer.
    assert measure(native, x).held - measure(converted, x).held > 0.95 * (x.nbytes + x.nbytes // 2)
    found = []
    for model in (copy.deepcopy(native).double(), native, converted):
        model.zero_grad()
        given = x.to(next(model.parameters()).dtype).requires_grad_()
        z = model.forward(given) if model is not converted else converted(given)
        z.backward((x + z.detach().float()).to(z.dtype))
        found.append((z, given.grad, *(p.grad for p in model.norm.parameters())))
    assert torch.equal(found[1][0], found[2][0])
    for right, torchs, own in zip(*found, strict=True):
        assert (own - right).norm() <= 2 * (torchs - right).norm()


def read_in_float32(m, x):
    y = m.norm(x)
    return m.query(y) + y


def read_later(m, x):
    y = m.norm(x)
    z = m.query(y)
    return z * 2 if m.training_steps < 2 else z + y


@pytest.mark.parametrize("run", [read_in_float32, read_later])
def test_under_autocast_what_reads_float32_gets_torchs_values(run):
    torch.manual_seed(0)
    native = Under(run)
    native.training_steps = 0
    converted = convert(copy.deepcopy(native))
    x = torch.randn(4, 8, 64)
    for _ in range(4):
        for model in (native, converted):
            z = model(x)
            model.training_steps += 1
            assert type(z) is not Offered
            z.float().square().sum().backward()
        assert torch.equal(native(x), converted(x))
        guard.generations.advance()
        for p, q in zip(native.parameters(), converted.parameters(), strict=True):
            if p.grad is not None:
                torch.testing.assert_close(p.grad, q.grad, rtol=0.05, atol=0.05 * float(p.grad.abs().max()))


@pytest.mark.parametrize("norm_first", [True, False])
def test_a_transformer_of_torch_trains_as_before(norm_first):
    layer = nn.TransformerEncoderLayer(SIZE, 2, 32, 0.0, "gelu", batch_first=True, norm_first=norm_first)
    model = nn.Sequential(nn.Linear(SIZE, SIZE), layer)
    trained = check_training(model, torch.randn(3, 6, SIZE))
    assert sum(layer.in_place for layer in report(trained).layers if layer.is_norm) >= 1
    trained.eval()
    with torch.no_grad():
        assert torch.allclose(
            revert(copy.deepcopy(trained))(torch.ones(1, 2, SIZE).double()), trained(torch.ones(1, 2, SIZE).double())
        )


def test_it_copies_pickles_reverts_and_verifies():
    model = stepped(convert(Block(RMSNormOfLlama(SIZE))))
    assert isinstance(model.norm, RMSNormOfLlama)
    assert isinstance(model.norm, ConvertedLayerNorm)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert layer_of(stepped(other)).in_place
        assert type(other.norm) is type(model.norm)
    keys = model.state_dict().keys()
    revert(model)
    assert type(model.norm) is RMSNormOfLlama
    assert model.state_dict().keys() == keys
    original = Block(NORMS["layer norm"]())
    assert verify(original, convert(copy.deepcopy(original)), inputs(original.norm))


def test_a_message_says_what_was_converted(logged):
    records = logged(logging.INFO)
    convert(nn.Sequential(nn.LayerNorm(4), nn.RMSNorm(4), RMSNormOfGemma(4), nn.LayerNorm((2, 4)), nn.GELU()))
    (record,) = records
    assert record.getMessage() == "converted 3 of 3 norms; not supported: 1 LayerNorm, and 1 activations"


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(SIZE),
        torch.randn(0, SIZE),
        torch.randn(3, 2, 2, SIZE),
        torch.randn(SIZE, 5, 4).permute(1, 2, 0),
        torch.randn(1, 4, SIZE).expand(3, 4, SIZE),
        torch.randn(SIZE, SIZE, SIZE),
        torch.randn(2, SIZE, SIZE, SIZE),
    ],
    ids=lambda x: str(tuple(x.shape)),
)
@pytest.mark.parametrize("name", ["layer norm", "llama"])
def test_inputs_of_every_shape_and_stride(name, x):
    native = nn.Sequential(NORMS[name](), nn.Linear(SIZE, 4))
    converted = convert(copy.deepcopy(native))
    for _ in range(3):
        found = []
        for model in (native, converted):
            model.zero_grad()
            given = x.clone(memory_format=torch.preserve_format).requires_grad_()
            z = model(given * 2)
            (z * z.detach()).sum().backward()
            found.append((z, given.grad, *(p.grad for p in model.parameters())))
        for torchs, own in zip(*found, strict=True):
            torch.testing.assert_close(own, torchs, rtol=1e-5, atol=1e-5)
        guard.generations.advance()


def test_an_eps_that_is_changed_counts_from_then_on():
    native = Block(NORMS["layer norm"]()).double()
    converted = convert(copy.deepcopy(native))
    x = inputs(native.norm, torch.float64) * 1e-3
    for step in range(4):
        for model in (native, converted):
            model.zero_grad()
            model.norm.eps = 10.0**-step
            model(x).square().sum().backward()
        guard.generations.advance()
        torch.testing.assert_close(converted.first.weight.grad, native.first.weight.grad)
    assert layer_of(converted).in_place


@pytest.mark.parametrize("affine", [True, False])
def test_an_attribute_that_is_called_like_a_method_of_tensors_is_no_obstacle(affine):
    """diffusers' own RMSNorm, which has an attribute ``dim``, was never converted."""
    model = Block(RMSNormOfDiffusers(SIZE, affine))
    check_training(model, inputs(model.norm))
    assert layer_of(stepped(convert(Block(RMSNormOfDiffusers(SIZE, affine))))).in_place


def test_an_output_wider_than_the_input_is_kept_as_it_is():
    """The output in float32 of an input in bfloat16 was kept in bfloat16, and gradients of the weight were 1e-3 off."""
    torch.manual_seed(0)
    native = Block(RMSNormOfT5(SIZE), lambda m, x: m.last(m.norm((m.first(x) + x).bfloat16())))
    converted, x = convert(copy.deepcopy(native)), torch.randn(64, SIZE)
    for model in (native, converted):
        for _ in range(3):
            model.zero_grad()
            y = model(x)
            (y * (y + 1)).sum().backward()
            guard.generations.advance()
    assert layer_of(converted).in_place
    torch.testing.assert_close(converted.norm.weight.grad, native.norm.weight.grad, rtol=1e-6, atol=1e-5)


def test_a_weight_whose_products_overflow_has_the_gradient_that_torchs_has():
    """Sums of the output times its gradient overflowed float32, where sums of the normalised values do not."""
    for norm in (nn.LayerNorm(SIZE), nn.RMSNorm(SIZE)):
        native = Block(norm)
        nn.init.constant_(native.norm.weight, 1e28)
        converted, x = convert(copy.deepcopy(native)), inputs(native.norm)
        for model in (native, converted):
            (model(x) * 1e25).sum().backward()
        torch.testing.assert_close(converted.norm.weight.grad, native.norm.weight.grad)


def test_nested_tensors_are_torchs():
    """Nested tensors of strided layout have no shape, for which the norm asked."""
    torch.manual_seed(0)
    x = [torch.randn(n, SIZE) for n in (3, 5)]
    native = nn.Sequential(nn.Linear(SIZE, SIZE), nn.LayerNorm(SIZE), nn.Linear(SIZE, SIZE))
    converted = convert(copy.deepcopy(native))
    for _ in range(2):
        for model in (native, converted):
            model.zero_grad()
            torch.nested.to_padded_tensor(model(torch.nested.nested_tensor(x)), 0.0).square().sum().backward()
        for own, torchs in zip(converted.parameters(), native.parameters(), strict=True):
            torch.testing.assert_close(own.grad, torchs.grad)


@pytest.mark.parametrize("kind", [lambda: nn.LayerNorm(SIZE), lambda: nn.GroupNorm(2, SIZE)], ids=["layer", "group"])
def test_vmap_without_gradients_is_torchs_in_a_step_that_is_watched(kind):
    """The watch asked a tensor that vmap had made for its memory."""
    native = Block(kind(), lambda m, x: F.gelu(torch.vmap(m.norm)(m.first(x))))
    converted, x = convert(copy.deepcopy(native)), torch.randn(5, 2, SIZE)
    with torch.no_grad():
        torch.testing.assert_close(converted(x), native(x))
    torch.testing.assert_close(converted(x), native(x))


def masked(m, h):
    h[h.detach() < -0.4] = 0
    return h


@pytest.mark.parametrize("write", [masked, lambda m, h: h.mul_(0.5), lambda m, h: F.dropout(h, 0.0, inplace=True)])
def test_a_write_to_the_output_of_a_norm_that_was_not_trusted_in_the_watched_step_is_no_error(write):
    """What follows counted as seen, although the norm was torch's when it was seen."""
    native = Block(NORMS["layer norm"](), lambda m, x: x + m.last(write(m, m.norm(m.first(x)))))
    nn.init.zeros_(native.norm.weight)
    converted, found = convert(copy.deepcopy(native.double())), []
    for model in (native, converted):
        optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.3), []
        for step in range(12):
            optimizer.zero_grad()
            loss = (
                model(torch.randn(3, 5, SIZE, generator=torch.Generator().manual_seed(step)).double()).square().mean()
            )
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        found.append([*losses, *(p.detach() for p in model.parameters())])
    for own, torchs in zip(*found[::-1], strict=True):
        torch.testing.assert_close(own, torchs, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("make", [lambda: nn.LayerNorm(SIZE), lambda: nn.BatchNorm1d(SIZE)], ids=["layer", "batch"])
def test_a_bias_without_a_weight_has_a_gradient_where_nothing_keeps_the_output(make):
    """torch's op for the gradients of a norm has none of such a bias."""
    norm = make()
    norm.weight = None
    nn.init.normal_(norm.bias)
    check_training(nn.Sequential(nn.Linear(SIZE, SIZE), norm, nn.Dropout(0.5)), torch.randn(6, SIZE), tolerance=1e-9)
