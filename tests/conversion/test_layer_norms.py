"""A layer norm or an RMS norm keeps its output for backward, where what follows keeps it as well."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from blocks_of_rows import (
    CHANNELS_FIRST,
    DTYPES,
    NORMS,
    SIZE,
    Block,
    averaged,
    dropped,
    inputs,
    layer_of,
    stepped,
)
from layer_norms import RMSNormOfLlama
from torch import nn
from torch.utils.checkpoint import checkpoint
from training import check_training

from inplace_abn import convert, guard, report, revert, set_guard, verify
from inplace_abn.conversion.layer_norms import ConvertedLayerNorm
from inplace_abn.memory import measure


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


def input_kept(m, x):
    return m.last(m.norm(x)) * x.sigmoid() + m.last(x)


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


def a_view_is_returned(m, x):
    return m.norm(m.last(x))[:, 0]


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
