"""analyze sees what a model does in all its examples and modes, and leaves the model as it was."""

import json
import random
import time

import pytest
import torch
import torch.nn.functional as F
from analyzed_nets import Net, images, layer_of, plain
from foreign_nets import ResNet, conv, spread
from torch import nn

from inplace_abn import Example, InPlaceABN, analyze, convert, verify


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
