"""verify catches a model that is not equal, and leaves the models alone."""

import copy
import math

import pytest
import torch
from convertible_nets import images, make
from foreign_nets import conv, spread
from one_norm import OneNorm
from torch import nn

from inplace_abn import convert, verify
from inplace_abn.conversion.classes import InPlaceBatchNorm2d


def wrong_activation(model):
    model.relu = nn.LeakyReLU()


def wrong_sign(model):
    with torch.no_grad():
        model.bn1.weight.abs_()


def wrong_weight(model):
    with torch.no_grad():
        model.fc.weight[0, 0] += 1e-6


def forgotten_activation(model):
    model.layer1[1].relu = nn.Identity()


def wrong_statistics(model):
    model.bn1.momentum = 0.2


def wrong_in_evaluation(model):
    model.bn1.running_mean += 1e-3


def detached(model):
    model.fc.register_forward_pre_hook(lambda m, args: args[0].detach())


@pytest.mark.parametrize(
    "spoil",
    [
        wrong_activation,
        wrong_sign,
        wrong_weight,
        forgotten_activation,
        wrong_statistics,
        wrong_in_evaluation,
        detached,
    ],
)
def test_verify_catches_a_wrong_model(spoil):
    model, x = make("resnet"), images()
    converted = convert(copy.deepcopy(model))
    assert verify(model, converted, x)
    spoil(converted)
    verification = verify(model, converted, x)
    assert not verification
    assert str(verification).startswith("THE MODELS DIFFER")
    assert verification.worst[1] > 1e-9


def test_verify_leaves_models_and_random_state_alone():
    model, x = make("resnet"), images()
    converted = convert(copy.deepcopy(model))
    states = [{k: v.clone() for k, v in m.state_dict().items()} for m in (model, converted)]
    random_state = torch.get_rng_state()
    assert "The models agree" in str(verify(model, converted, x))
    assert torch.equal(torch.get_rng_state(), random_state)
    for m, state in zip((model, converted), states, strict=True):
        assert all(torch.equal(v, state[k]) for k, v in m.state_dict().items())
        assert all(p.grad is None for p in m.parameters())
        assert m.training
    with pytest.raises(ValueError, match=r"same parameters, got .*conv1\.weight"):
        verify(model.bn1, model, x)


def test_verify_follows_dropout_and_every_output():
    class TwoHeads(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(conv(3, 4), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5))
            self.a, self.b = conv(4, 2), conv(4, 2)

        def forward(self, x):
            y = self.body(x)
            return {"a": self.a(y), "b": [self.b(y)]}

    model = spread(TwoHeads())
    converted = convert(copy.deepcopy(model))
    assert type(converted.body[1]) is InPlaceBatchNorm2d
    assert verify(model, converted, images())
    with torch.no_grad():
        converted.b.weight[0] += 0.1
    assert verify(model, converted, images()).gradient_errors["a.weight"] < 1e-9
    assert not verify(model, converted, images())


def shifted(by):
    """A net whose norm gets an input of this mean, and of a deviation of about one."""
    return spread(OneNorm(lambda m, x: m.last(m.act(m.bn(m.conv(x) + by)))))


def test_an_ill_conditioned_model_is_no_wrong_one_and_a_wrong_one_is_still_told():
    """An ill-conditioned model differs from itself if its sums are made in another order. This one's norm loses six
    digits of its input."""
    model, x = shifted(5e6), images()
    converted = convert(copy.deepcopy(model))
    verification = verify(model, converted, x)
    assert verification, str(verification)
    assert max(verification.errors.values()) > 1e-9
    assert not verify(model, converted, x, tolerance=1e-9)
    name, _ = verification.worst
    assert 1e-10 < verification.sensitivity[name] < 1e-6
    assert "the original differs from itself by" in str(verification)
    with torch.no_grad():
        converted.last.weight[0, 0] *= 1 + 1e-4
    wrong = verify(model, converted, x)
    assert not wrong
    assert wrong.worst[1] > 1e-6
    assert wrong.worst[0] in str(wrong)


def test_however_ill_conditioned_a_model_is_a_millionth_is_told():
    model = shifted(1e14)
    verification = verify(model, convert(copy.deepcopy(model)), images())
    assert not verification
    assert verification.accepted(verification.worst[0]) <= 1e-6


def test_what_is_no_number_is_told_wherever_it_is():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.scale = conv(3, 4), 1.0

        def forward(self, x):
            y = self.body(x)
            return y, (y if self.training else y * self.scale)

    model = Two()
    wrong = copy.deepcopy(model)
    wrong.scale = float("nan")
    assert verify(model, copy.deepcopy(model), images())
    assert verify(model, wrong, images()).worst[0] == "evaluation"
    assert not verify(model, wrong, images())


def test_outputs_that_have_no_gradient_are_compared_too():
    class Masking(nn.Module):
        def __init__(self, least):
            super().__init__()
            self.body, self.least = conv(3, 4), least

        def forward(self, x):
            y = self.body(x)
            return y, (y > self.least if self.training else y)

    model, other = Masking(0.0), Masking(0.1)
    other.load_state_dict(model.state_dict())
    assert verify(model, other, images()).worst[0] == "outputs without gradient"
    assert verify(model, copy.deepcopy(model), images())


def test_outputs_of_another_number_or_shape_are_told_in_words():
    """Where models return other outputs, the verdict was an error of inf, which says nothing of shapes."""

    class Returning(nn.Module):
        def __init__(self, of_training, of_evaluation):
            super().__init__()
            self.body, self.ways = conv(3, 4), (of_evaluation, of_training)

        def forward(self, x):
            return self.ways[self.training](self.body(x))

    def same(y):
        return y

    x = torch.randn(2, 3, 6, 6)
    model = Returning(same, same)
    for other, told in (
        (
            Returning(lambda y: y[:, :2], same),
            ["outputs with a gradient: 1 of shape (2, 4, 6, 6) in the original, 1 of"],
        ),
        (
            Returning(lambda y: (y, y.detach()), lambda y: (y, y[0])),
            [
                "outputs without gradient: none in the original, 1 of shape (2, 4, 6, 6) in the other model",
                "outputs in evaluation: 1 of shape (2, 4, 6, 6) in the original, "
                "2 of shape (2, 4, 6, 6), (4, 6, 6) in the other model",
            ],
        ),
    ):
        other.load_state_dict(model.state_dict())
        found = verify(model, other, x)
        assert not found
        assert not verify(model, other, x, tolerance=math.inf)
        first, *lines = str(found).splitlines()
        assert first == "THE MODELS DIFFER: they return other outputs"
        assert len(lines) == len(told)
        assert all(line.startswith(words) for line, words in zip(lines, told, strict=True))


def test_a_running_mean_of_zero_is_not_compared_by_what_rounding_left_of_it():
    """Behind a norm without bias, a running mean of zero is nothing but rounding."""
    mixed = nn.Conv2d(4, 8, 1, bias=False)
    model = nn.Sequential(conv(3, 4), nn.BatchNorm2d(4), mixed, nn.BatchNorm2d(8), nn.ReLU(), conv(8, 4)).double()
    x = torch.randn(4, 3, 8, 8)
    converted = convert(copy.deepcopy(model))
    found = verify(model, converted, x)
    assert found, str(found)
    converted[3].running_mean += 1e-13  # hundreds of roundings
    found = verify(model, converted, x)
    assert not found
    assert found.worst[0] == "buffer 3.running_mean"


def test_one_model_is_not_compared_with_itself():
    """convert returns the model that it was given, which then agreed with itself."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    x = torch.randn(2, 3, 8, 8)
    with pytest.raises(ValueError, match=r"got one object twice.*deepcopy"):
        verify(model, convert(model), x)
    with pytest.raises(ValueError, match="got a converted model"):
        verify(model, copy.deepcopy(model), x)


class RMSNormOfFloats(nn.Module):
    """An RMS norm as transformers has it."""

    def __init__(self, size):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(size) + 0.5), 1e-6

    def forward(self, x):
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * y.to(x.dtype)


def test_norms_that_cannot_be_compared_in_float64_are_named():
    """A norm that computes in float32 is in place for floats only, and verify said that all agrees."""
    net = nn.Sequential(nn.Linear(8, 8), RMSNormOfFloats(8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 2))
    result = verify(net, convert(copy.deepcopy(net)), torch.randn(6, 8))
    assert result.ok
    assert result.not_compared == ("1",)
    assert "not compared: 1 norms that do in float64 what they did before (1)" in str(result)


def test_nothing_is_named_where_all_is_compared():
    net = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 2))
    result = verify(net, convert(copy.deepcopy(net)), torch.randn(6, 8))
    assert result.ok
    assert result.not_compared == ()
    assert "not compared" not in str(result)
