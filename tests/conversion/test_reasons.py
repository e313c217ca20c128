"""analyze gives each reason to refuse a BatchNorm, or to keep its input, in words."""

import copy

import pytest
import torch
import torch.nn.functional as F
from analyzed_nets import Net, images, layer_of, plain
from foreign_nets import BatchNormAct2d, conv, spread
from torch import nn
from torch.utils.checkpoint import checkpoint

from inplace_abn import analyze, convert, verify
from inplace_abn.conversion.norms import InPlaceBatchNorm2d, InPlaceNorm
from inplace_abn.memory import measure


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, g):
        return 2 * g


class Subclass(nn.BatchNorm2d):
    def forward(self, x):
        return super().forward(x) + x


def skipped(m, x):
    x = m.conv(x)
    return m.last(m.relu(m.bn(x))) + x


def concatenated(m, x):
    x = m.conv(x)
    return torch.cat([m.last(m.relu(m.bn(x))), x], 1)


def stored(m, x):
    m.feature = m.conv(x)
    return m.last(m.relu(m.bn(m.feature)))


def called_twice(m, x):
    return m.last(m.relu(m.bn(m.last(m.relu(m.bn(m.conv(x)))))))


def of_one_part(m, x):
    return m.last(m.relu(m.bn(torch.cat([m.conv(x)] * 2, 1).chunk(2, 1)[0])))


def of_a_split_that_is_whole(m, x):
    return m.last(m.relu(m.bn(m.conv(x).split(4, 1)[0])))


def returned(m, x):
    y = m.conv(x)
    return m.last(m.relu(m.bn(y))), y


def returned_in_an_object(m, x):
    y = m.conv(x)
    return {"features": [y], "logits": m.last(m.relu(m.bn(y)))}


def activated_twice(m, x):
    y = m.bn(m.conv(x))
    return m.last(m.relu(y)) + y


def returned_before_activation(m, x):
    y = m.bn(m.conv(x))
    return m.last(m.relu(y)), y


def modified(m, x):
    y = m.relu(m.bn(m.conv(x)))
    y += 1
    return m.last(y)


def multiplied(m, x):
    y = m.bn(m.conv(x))
    y *= 2
    return m.last(y)


def in_a_checkpoint(m, x):
    return m.last(checkpoint(lambda x: m.relu(m.bn(m.conv(x))), x, use_reentrant=False))


def without_grad(m, x):
    with torch.no_grad():
        y = m.relu(m.bn(m.conv(x)))
    return m.last(y)


def saved_by_reshaped_producer(m, x):
    return m.last(m.relu(m.bn(torch.sigmoid(m.conv(x).flatten(1)).view(2, 4, 8, 8))))


KEPT = [
    (called_twice, "it is called 2 times in a forward pass"),
    (lambda m, x: m.last(m.relu(m.bn(x[:, :1].expand(-1, 4, -1, -1)))), "its input is an input of the model"),
    (lambda m, x: m.relu(m.bn(m.last.weight)), "its input is a parameter or buffer"),
    (returned, "its input is an output of the model"),
    (returned_in_an_object, "its input is an output of the model"),
    (of_one_part, "its input is a partial view of other memory"),
    (of_a_split_that_is_whole, "its input is a leaf or view that autograd protects"),
    (lambda m, x: m.last(m.relu(m.bn(torch.sigmoid(m.conv(x))))), "its input is also kept for backward by sigmoid"),
    (saved_by_reshaped_producer, "its input is also kept for backward by sigmoid"),
    (lambda m, x: m.last(m.relu(m.bn(m.conv(x).exp()))), "its input is also kept for backward by exp"),
    (skipped, "its input is read afterwards by add"),
    (concatenated, "its input is read afterwards by cat"),
    (lambda m, x: torch.cat([m.relu(m.bn(y := m.conv(x))), y], 1), "its input is read afterwards by cat"),
    (stored, "its input is kept by somebody after the forward pass"),
    (lambda m, x: m.last(m.relu(m.bn(Doubled.apply(m.conv(x))))), "comes from a custom autograd Function, Doubled"),
    (lambda m, x: m.last(m.relu(m.bn(Doubled.apply(m.conv(x)).view(2, 4, 64, 1)))), "custom autograd Function"),
]
REASONS = [
    (activated_twice, "its pre-activation is also read by add"),
    (returned_before_activation, "its pre-activation is an output of the model"),
    (modified, "its output is modified in place by add_; use the out-of-place form (y = y + x instead of y += x)"),
    (multiplied, "its output is modified in place by mul_; use the out-of-place form (y = y * x instead of y *= x)"),
    (lambda m, x: m.last(F.relu6(m.bn(m.conv(x)), inplace=True)), "modified in place by hardtanh_; use"),
    (lambda m, x: m.bn(m.conv(x)), "nothing would be gained"),
    (in_a_checkpoint, "nothing would be gained"),
    (without_grad, "nothing would be gained"),
    (lambda m, x: m.last(m.conv(x)), "it was not called in the recorded forward pass"),
]


@pytest.mark.parametrize(("forward", "reason"), KEPT, ids=[reason for _, reason in KEPT])
def test_an_input_that_somebody_needs_is_kept_and_the_reason_told(forward, reason):
    layer = layer_of(forward)
    assert any(reason in r for r in layer.kept), layer.kept
    model = spread(Net(forward))
    converted = convert(copy.deepcopy(model), images())
    assert isinstance(converted.bn, InPlaceNorm) == layer.convertible
    assert not getattr(converted.bn, "_overwrites", False)
    assert verify(model, converted, images())


@pytest.mark.parametrize(("forward", "reason"), REASONS, ids=[reason for _, reason in REASONS])
def test_a_hazard_is_refused_with_its_reason_in_words(forward, reason):
    layer = layer_of(forward)
    assert not layer.convertible
    assert any(reason in r for r in layer.reasons), layer.reasons


@pytest.mark.parametrize(("forward", "reason"), REASONS, ids=[reason for _, reason in REASONS])
def test_a_model_with_a_refused_layer_is_left_alone(forward, reason):
    model = Net(forward)
    convert(model, images())
    assert type(model.bn) is nn.BatchNorm2d
    assert not model._forward_hooks


@pytest.mark.parametrize(("forward", "reason"), KEPT + REASONS, ids=[reason for _, reason in KEPT + REASONS])
def test_without_an_example_a_model_of_any_wiring_is_what_it_was(forward, reason):
    if forward is modified:
        pytest.skip("torch itself refuses to differentiate it")
    model = spread(Net(forward))
    converted = convert(copy.deepcopy(model))
    assert type(converted.bn) is InPlaceBatchNorm2d
    assert type(converted.relu) is nn.ReLU
    assert verify(model, converted, images())


def test_what_one_layer_keeps_in_place_is_not_overwritten_by_another():
    model = nn.Sequential(conv(3, 4), nn.BatchNorm2d(4), nn.SiLU(), nn.BatchNorm2d(4), nn.SiLU(), conv(4, 4))
    plan = analyze(model, images())
    assert [layer.convertible for layer in plan.layers] == [True, True]
    assert [layer.kept for layer in plan.layers] == [(), ("its input is kept in place by 1",)]
    # The second norm's input is held in any case, because it is the first norm's output.
    assert plan.layers[1].bytes_saved == plan.layers[0].bytes_saved / 2


class Siblings(nn.Module):
    """Two norms of one input, which is held as long as one of them needs it."""

    def __init__(self, second=None):
        super().__init__()
        self.conv, self.last = conv(3, 4), conv(8, 4)
        self.first, self.second = nn.BatchNorm2d(4), second or nn.BatchNorm2d(4)

    def forward(self, x):
        x = self.conv(x)
        return self.last(torch.cat([F.relu(self.first(x)), F.relu(self.second(x))], 1))


def test_two_norms_of_one_input_save_it_together():
    """Each norm by itself saves nothing. Both together save their input."""
    model, x = spread(Siblings()), torch.randn(4, 3, 32, 32)
    plan = analyze(model, x)
    size = 4 * 4 * 4 * 32 * 32
    assert [layer.bytes_saved for layer in plan.convertible] == [size / 2, size / 2]
    converted = convert(copy.deepcopy(model), plan)
    assert verify(model, converted, x)
    assert measure(model, x).held - measure(converted, x).held == pytest.approx(size, rel=0.02)


def test_a_norm_of_an_input_that_another_one_keeps_saves_nothing():
    plan = analyze(Siblings(Subclass(4)), images())
    assert [layer.convertible for layer in plan.layers] == [False, False]
    assert "nothing would be gained" in plan.layers[0].reasons[0]


def test_a_branch_that_leads_nowhere_saves_nothing():
    def forward(m, x):
        m.relu(m.bn(m.conv(x))).sum()
        return m.last(m.conv(x))

    assert "nothing would be gained" in layer_of(forward).reasons[0]


def with_own_forward(norm):
    norm.forward = norm.forward
    return norm


def with_weight(value, bias=0.0):
    norm = nn.BatchNorm2d(4)
    nn.init.constant_(norm.weight, value)
    nn.init.constant_(norm.bias, bias)
    return norm


@pytest.mark.parametrize(
    ("norm", "reason"),
    [
        (Subclass(4), "Subclass is a subclass whose forward pass is unknown"),
        (with_own_forward(nn.BatchNorm2d(4)), "it has a forward pass of its own"),
        (BatchNormAct2d(4, nn.Hardtanh), "its output is modified in place by hardtanh_ in bn.act"),
        (BatchNormAct2d(4, nn.SELU), "its output is modified in place by elu_ in bn.act"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_unfit_layer_is_refused_with_its_reason_in_words(norm, reason):
    layer = layer_of(plain, norm)
    assert not layer.convertible
    assert any(reason in r for r in layer.reasons), layer.reasons


@pytest.mark.parametrize(
    ("norm", "note"),
    [
        (with_weight(0.0), "in place once its weights have grown: 4 of 4 are within eps of zero"),
        (with_weight(1e-3, 1e3), "in place once its output tells its input: expected error of dx 0.0"),
        (with_weight(1.0), ""),
    ],
    ids=["zero", "offset", "new"],
)
def test_a_layer_that_the_guard_will_not_trust_at_first_is_converted_with_a_note(norm, note):
    layer = layer_of(plain, norm)
    assert layer.convertible
    assert layer.note.startswith(note)
    assert bool(note) == bool(layer.note)


def test_a_hook_on_the_producer_that_keeps_its_output_is_noticed():
    model, kept = Net(plain), []
    model.conv.register_forward_hook(lambda module, args, y: kept.append(y))
    (layer,) = analyze(model, images()).layers
    assert layer.kept == ("its input is kept by somebody after the forward pass",)
    kept.clear()


def test_backward_hooks_of_the_producer_are_noticed():
    model = Net(plain)
    model.conv.register_full_backward_hook(lambda *_: None)
    (layer,) = analyze(model, images()).layers
    assert "custom autograd Function" in layer.kept[0] or "protects" in layer.kept[0]


def test_hooks_and_forward_passes_of_their_own_on_activations_change_nothing():
    model, seen = spread(Net(plain)), []
    model.relu.register_forward_hook(lambda module, args, z: seen.append(z.shape))
    model.bn.register_forward_hook(lambda *_: None)
    model.relu.forward = model.relu.forward
    (layer,) = analyze(model, images()).layers
    assert layer.convertible
    seen.clear()
    converted = convert(copy.deepcopy(model), images())
    assert verify(model, converted, images())
    assert len(set(seen)) == 1
