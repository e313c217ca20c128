"""analyze gives each reason to refuse a BatchNorm in words, and leaves the model as it was."""

import copy
import json
import random
import time

import pytest
import torch
import torch.nn.functional as F
from foreign_nets import BatchNormAct2d, ResNet, conv, spread
from torch import nn
from torch.utils.checkpoint import checkpoint

from inplace_abn import Example, InPlaceABN, analyze, convert, verify
from inplace_abn.conversion.norms import InPlaceBatchNorm2d, InPlaceNorm
from inplace_abn.memory import measure


class Net(nn.Module):
    """A convolution, a BatchNorm and another convolution. ``forward`` says how they are wired."""

    def __init__(self, forward, norm=None):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.bn = nn.BatchNorm2d(4) if norm is None else norm
        self.relu = nn.ReLU()
        self.last = nn.Conv2d(4, 4, 1)
        self.run = forward

    def forward(self, x):
        return self.run(self, x)


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


def images():
    return torch.randn(2, 3, 8, 8)


def layer_of(forward, norm=None, name="bn"):
    (layer,) = [layer for layer in analyze(Net(forward, norm), images()).layers if layer.name == name]
    return layer


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


def plain(m, x):
    return m.last(m.relu(m.bn(m.conv(x))))


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


def test_a_reason_in_one_of_several_examples_is_enough():
    class Branching(Net):
        def forward(self, x, skip=False):
            x = self.conv(x)
            y = self.last(self.relu(self.bn(x)))
            return y + x if skip else y

    model = Branching(None)
    assert analyze(model, images()).layers[0].convertible
    plan = analyze(model, Example(images()), Example(images(), skip=True))
    assert plan.layers[0].kept == ("its input is read afterwards by add",)
    assert analyze(model, images(), skip=True).layers[0].kept == plan.layers[0].kept
    with pytest.raises(TypeError, match="got both"):
        analyze(model, Example(images()), images())


def test_what_only_evaluation_does_is_seen():
    def forward(m, x):
        x = m.conv(x)
        y = m.last(m.relu(m.bn(x)))
        return y if m.training else y + x

    assert layer_of(forward).kept == ("its input is read afterwards by add",)
    # Each call of Net draws other weights, so these two models differ.
    assert verify(Net(forward), convert(Net(forward), images()), images()).ok is False


def test_values_that_the_model_asks_for_make_it_run_on_its_real_tensors():
    def forward(m, x):
        y = m.conv(x)
        factor = 1.0 if y.mean().item() > 1e9 else 2.0
        return m.last(m.relu(m.bn(y))) * factor

    assert layer_of(forward).reasons == ()

    def reading(m, x):
        y = m.conv(x)
        z = m.last(m.relu(m.bn(y)))
        return z * (1.0 if y.mean().item() > 1e9 else 2.0)

    assert layer_of(reading).kept == ("its input is read afterwards by mean",)


@pytest.mark.parametrize("real", [False, True])
def test_a_model_is_left_as_it_was(real):
    def forward(m, x):
        y = F.dropout(m.relu(m.bn(m.conv(x))), 0.5)
        m.feature = y
        m.history.append(y)
        if real:
            y.sum().item()
        random.random()
        return m.last(y)

    model = Net(forward)
    model.history = []
    model.feature = None
    model.last.eval()
    states = torch.get_rng_state(), random.getstate(), {k: v.clone() for k, v in model.state_dict().items()}
    attributes = set(vars(model))
    analyze(model, images_like := torch.ones(2, 3, 8, 8))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    for key, value in model.state_dict().items():
        assert torch.equal(value, states[2][key])
    assert [model.training, model.bn.training, model.last.training] == [True, True, False]
    assert set(vars(model)) == attributes
    assert model.feature is None
    assert model.history == []
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(images_like, torch.ones(2, 3, 8, 8))


def test_a_model_whose_forward_pass_fails_raises_its_own_error_and_is_left_as_it_was():
    def forward(m, x):
        raise KeyError("mine")

    model = Net(forward).eval()
    with pytest.raises(KeyError, match="mine"):
        analyze(model, images())
    assert not model.training
    with pytest.raises(TypeError, match=r"expected model to be a torch\.nn\.Module, got int"):
        analyze(3, images())


def test_views_hide_neither_producer_nor_readers():
    def forward(m, x):
        y = m.conv(x)
        flat = y.flatten(2).transpose(1, 2)
        z = m.last(m.relu(m.bn(y)))
        return z + flat.transpose(1, 2).view(2, 4, 8, 8)

    assert layer_of(forward).kept == ("its input is read afterwards by add",)

    def harmless(m, x):
        return m.last(m.relu(m.bn(m.conv(x).flatten(2).view(2, 4, 8, 8))))

    layer = layer_of(harmless)
    assert layer.convertible
    assert layer.producer == "convolution in conv"


def test_a_storage_freed_and_allocated_anew_is_not_confused():
    """A new storage may have the address of a freed one."""

    def forward(m, x):
        for _ in range(20):
            y = m.conv(x).exp()
            del y
        return m.last(m.relu(m.bn(m.conv(x))))

    assert layer_of(forward).convertible


def test_a_plan_prints_a_table_and_totals_and_is_json():
    plan = analyze(ResNet(), torch.randn(2, 3, 32, 32))
    text = str(plan)
    assert text.splitlines()[0].split()[0] == "name"
    assert "layer[1-2].[0-1].bn1" in text
    assert "residual=True converts 4 residual blocks" in text
    assert "5 of 10 norms go in place" in text
    found = json.loads(json.dumps(plan.to_dict()))
    assert found["bytes_saved"] == sum(layer["bytes_saved"] for layer in found["layers"] if layer["convertible"])
    assert found["converted"] == 5
    assert found["residual_bytes_saved"] == plan.residual_bytes_saved > 0


def test_a_model_that_is_in_place_already_can_be_analyzed():
    model = nn.Sequential(conv(3, 4), InPlaceABN(4), conv(4, 4), nn.BatchNorm2d(4), nn.ReLU(), conv(4, 4))
    plan = analyze(model, images())
    assert [(layer.name, layer.convertible) for layer in plan.layers] == [("3", True)]


def test_one_dimension_two_and_three_and_vectors_are_converted():
    for norm, layer, shape in (
        (nn.BatchNorm1d(4), nn.Linear(3, 4), (8, 3)),
        (nn.BatchNorm1d(4), nn.Conv1d(3, 4, 1), (2, 3, 8)),
        (nn.BatchNorm3d(4), nn.Conv3d(3, 4, 1), (2, 3, 4, 4, 4)),
    ):
        last = nn.Linear(4, 4) if len(shape) == 2 else type(layer)(4, 4, 1)
        model = nn.Sequential(layer, spread(norm), nn.ReLU(), last)
        assert analyze(model, torch.randn(shape)).layers[0].convertible


def test_synchronised_batch_norm_is_analyzed_without_a_process_group():
    model = Net(plain, nn.SyncBatchNorm(4))
    (layer,) = analyze(model, images()).layers
    assert layer.convertible
    assert type(model.bn) is nn.SyncBatchNorm


def test_a_resnet_50_is_analyzed_in_seconds_whatever_the_size_of_its_images():
    transformers = pytest.importorskip("transformers")
    model = transformers.ResNetForImageClassification(transformers.ResNetConfig())
    x = torch.empty(8, 3, 512, 512)
    start = time.perf_counter()
    plan = analyze(model, x)
    # It takes two seconds on a machine that has nothing else to do.
    assert time.perf_counter() - start < 20
    assert len(plan.convertible) == 33
    assert plan.bytes_saved == 652 * 2**20
