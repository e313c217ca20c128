"""Layer norms and RMS norms whose output does not determine all of the input, or is kept in another dtype."""

import copy

import pytest
import torch
from blocks_of_rows import DTYPES, NORMS, SIZE, Block, errors, inputs, layer_of, stepped
from layer_norms import RMSNormOfT5
from torch import nn
from torch.utils.checkpoint import checkpoint
from training import check_training

from inplace_abn import convert, guard
from inplace_abn.conversion.offered import Offered
from inplace_abn.guard.figures import THRESHOLDS
from inplace_abn.memory import measure


def some_values_masked(m, x):
    mask = torch.ones(SIZE, dtype=x.dtype)
    mask[2] = 0
    return m.last(m.norm(x * mask)) + m.last(m.norm(x))


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


def test_values_that_are_to_be_saved_are_so_from_the_next_step_on():
    """A checkpoint's recomputation saves what its forward pass saved."""
    model = Block(NORMS["layer norm"](), lambda m, x: checkpoint(lambda t: m.last(m.norm(t)), x, use_reentrant=False))
    with torch.no_grad():
        model.norm.weight[0], model.norm.bias[0] = 1e-6, 0.5
    check_training(model, torch.randn(2, 15, SIZE))


def ill(norm, count):
    """Makes some values of each row have a weight that is tiny beside the bias."""
    with torch.no_grad():
        norm.weight.uniform_(0.5, 1.5)
        norm.bias.fill_(0.1)
        norm.weight[: norm.weight.numel() // 2 : norm.weight.numel() // 2 // count] = 1e-4
    return norm


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
