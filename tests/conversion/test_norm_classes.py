"""Which classes are taken for layer norms and RMS norms, and what is left to torch."""

import copy
import logging

import pytest
import torch
import torch.nn.functional as F
from blocks_of_rows import NORMS, SIZE, Block, averaged, dropped, inputs, layer_of, stepped
from layer_norms import (
    DOING_MORE,
    NEAR_MISSES,
    ContiguousNorm2d,
    NormOfTokens,
    RMSNormOfDiffusers,
    RMSNormOfGemma,
    RMSNormOfLlama,
    UnbiasedNorm,
    Weighted,
)
from torch import nn
from torch.nn.utils import parametrize
from training import check_training

from inplace_abn import convert, guard, report


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


@pytest.mark.parametrize("run", [dropped, averaged])
def test_where_nothing_keeps_its_output_it_is_torchs(run):
    layer = layer_of(check_training(Block(NORMS["layer norm"](), run), torch.randn(2, 15, SIZE)))
    assert not layer.in_place
    assert layer.why == "what follows does not keep the norm's output for backward"


def test_a_message_says_what_was_converted(logged):
    records = logged(logging.INFO)
    convert(nn.Sequential(nn.LayerNorm(4), nn.RMSNorm(4), RMSNormOfGemma(4), nn.LayerNorm((2, 4)), nn.GELU()))
    (record,) = records
    assert record.getMessage() == "converted 3 of 3 norms; not supported: 1 LayerNorm, and 1 activations"


@pytest.mark.parametrize("affine", [True, False])
def test_an_attribute_that_is_called_like_a_method_of_tensors_is_no_obstacle(affine):
    """diffusers' own RMSNorm, which has an attribute ``dim``, was never converted."""
    model = Block(RMSNormOfDiffusers(SIZE, affine))
    check_training(model, inputs(model.norm))
    assert layer_of(stepped(convert(Block(RMSNormOfDiffusers(SIZE, affine))))).in_place
