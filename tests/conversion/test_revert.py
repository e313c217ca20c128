"""revert, and the conversion to synchronised statistics."""

import copy
import io

import pytest
import torch
from cases import relative_error
from convertible_nets import ALL, images, make
from foreign_nets import conv, spread
from torch import nn
from torch.fx.experimental.optimization import fuse
from torch.nn.utils import parametrizations, parametrize, prune

from inplace_abn import InPlaceABN, InPlaceABNSync, convert, report, revert, set_active_group, verify
from inplace_abn.activations import TYPICAL
from inplace_abn.conversion.classes import InPlaceBatchNorm2d


@pytest.mark.parametrize("name", ALL)
def test_a_reverted_model_is_the_original_with_identical_output(name):
    model, x = make(name).double(), images().double()
    reverted = convert(copy.deepcopy(model))
    with torch.no_grad():
        reverted(x)
        expected = reverted.eval()(x)
        actual = revert(reverted)(x)
    for a, b in zip(*([o] if isinstance(o, torch.Tensor) else o.values() for o in (actual, expected)), strict=True):
        assert relative_error(a, b) < 1e-9
    assert [type(m) for m in reverted.modules()] == [type(m) for m in model.modules()]
    assert list(reverted.state_dict()) == list(model.state_dict())
    assert not any(m._forward_hooks for m in reverted.modules() if isinstance(m, nn.BatchNorm2d))
    norms = [[m for m in net.modules() if isinstance(m, nn.BatchNorm2d)] for net in (reverted, model)]
    assert [set(vars(m)) for m in norms[0]] == [set(vars(m)) for m in norms[1]]
    assert not reverted._forward_hooks


@pytest.mark.parametrize("sync", [False, True])
@pytest.mark.filterwarnings("ignore:.*not initialised")
def test_synchronised_batch_norm_stays_synchronised(sync):
    model = spread(nn.Sequential(conv(3, 4), nn.BatchNorm2d(4), nn.ReLU(), conv(4, 4), nn.SyncBatchNorm(4), nn.ReLU()))
    converted = convert(copy.deepcopy(model), sync=sync)
    assert type(converted[1]) is InPlaceBatchNorm2d
    assert converted[1]._synchronised is sync
    assert isinstance(converted[4], nn.SyncBatchNorm)
    reverted = revert(copy.deepcopy(converted))
    assert [type(m) for m in reverted] == [type(m) for m in model]
    x = images()
    assert torch.allclose(reverted.eval()(x), converted.eval()(x), atol=1e-6)


@pytest.mark.filterwarnings("ignore:.*not initialised")
def test_modules_that_were_built_in_place_become_synchronised_and_subclasses_are_refused():
    model = nn.Sequential(conv(3, 4), InPlaceABN(4, activation="relu", signed_weight=True), conv(4, 4), InPlaceABN(4))
    weight = model[1].weight
    expected = model(images(8))
    marker = object()
    assert InPlaceABNSync.convert_sync_abn(model, marker) is model
    assert [type(model[i]) for i in (1, 3)] == [InPlaceABNSync] * 2
    assert model[1].group is marker
    assert model[1].signed_weight
    assert model[1].weight is weight
    assert InPlaceABNSync.convert_sync_abn(model)[1].group is None
    assert model(images(8)).shape == expected.shape

    class Mine(InPlaceABN):
        pass

    mixed = nn.Sequential(InPlaceABN(3), Mine(3))
    with pytest.raises(TypeError, match="expected no subclass, got Mine"):
        InPlaceABNSync.convert_sync_abn(mixed)
    assert type(mixed[0]) is InPlaceABN


@pytest.mark.filterwarnings("ignore:.*not initialised")
def test_a_converted_model_may_be_synchronised_and_reverted():
    model, x = make("resnet"), images()
    converted = convert(convert(copy.deepcopy(model)), sync=True)
    assert converted.bn1._synchronised
    assert verify(model, converted, x)
    marker = object()
    set_active_group(converted, marker)
    assert converted.bn1._group is marker
    reverted = revert(converted)
    assert [type(m) for m in reverted.modules()] == [type(m) for m in model.modules()]
    assert not convert(reverted).bn1._synchronised


def test_weights_that_training_took_close_to_zero_are_left_as_they_are():
    converted = convert(make("resnet"))
    with torch.no_grad():
        converted.bn1.weight[:3] = torch.tensor([0.0, 1e-9, -1e-9])
    x = images()
    # The guard does not trust such a layer, so the layer scales by the weight itself.
    expected = converted(x)
    assert torch.allclose(revert(converted)(x), expected, atol=1e-5)
    assert converted.bn1.weight[0] == 0


@pytest.fixture
def reverted():
    model = make("resnet").eval()
    return model, revert(convert(copy.deepcopy(model))).eval()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_reverted_model_is_scripted(reverted):
    x = images()
    assert torch.allclose(torch.jit.script(reverted[1])(x), reverted[0](x), atol=1e-5)


def test_a_reverted_model_has_its_batch_norms_fused_into_convolutions(reverted):
    x = images()
    fused = fuse(reverted[1])
    assert not any(isinstance(m, nn.BatchNorm2d) for m in fused.modules())
    assert torch.allclose(fused(x), reverted[0](x), atol=1e-4)


@pytest.mark.parametrize("kind", ["prepare_fx", "prepare_qat_fx"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_quantization_refuses_a_converted_model_and_fuses_a_reverted_one(kind):
    """Quantization fuses norms by their exact classes. It left converted ones unfused, without a word."""
    quantization = pytest.importorskip("torch.ao.quantization")
    quantize_fx = pytest.importorskip("torch.ao.quantization.quantize_fx")
    qat = kind == "prepare_qat_fx"
    qconfig = (quantization.get_default_qat_qconfig_mapping if qat else quantization.get_default_qconfig_mapping)("x86")
    model, x = nn.Sequential(nn.Sequential(conv(3, 4), nn.BatchNorm2d(4), nn.ReLU()), conv(4, 4)).train(qat), images()
    converted = convert(model)
    assert [n.target for n in torch.fx.symbolic_trace(converted).graph.nodes][2] == "0.1"
    with pytest.raises(
        RuntimeError, match=r"module '0\.1' is InPlaceBatchNorm2d, and torch\.ao\.quantization .*abn\.revert does"
    ):
        getattr(quantize_fx, kind)(converted, qconfig, (x,))
    prepared = getattr(quantize_fx, kind)(revert(converted), qconfig, (x,))
    assert not any(isinstance(module, nn.BatchNorm2d) for module in prepared.children())
    assert "ConvBnReLU2d" in str(prepared) if qat else "ConvReLU2d" in str(prepared)


def test_a_reverted_model_is_exported(reverted):
    x = images()
    assert torch.allclose(torch.export.export(reverted[1], (x,)).module()(x), reverted[0](x), atol=1e-5)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_reverted_model_is_exported_to_onnx(reverted):
    onnx = pytest.importorskip("onnx.reference")
    x, buffer = images(), io.BytesIO()
    torch.onnx.export(reverted[1], (x,), buffer, dynamo=False)
    evaluator = onnx.ReferenceEvaluator(buffer.getvalue())
    (output,) = evaluator.run(None, {evaluator.input_names[0]: x.numpy()})
    assert torch.allclose(torch.from_numpy(output), reverted[0](x), atol=1e-5)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("activation", [name for name, _ in TYPICAL])
def test_in_place_modules_that_were_built_as_such_become_batch_norm_and_activation(activation, signed):
    model = nn.Sequential(conv(3, 4), InPlaceABN(4, activation=activation, signed_weight=signed), conv(4, 4)).eval()
    with torch.no_grad():
        model[1].weight.copy_(torch.tensor([-1.0, 0.5, 2.0, -0.1]))
        model[1].bias.normal_()
        x = images(8)
        expected = model(x)
        reverted = revert(model)
        assert torch.allclose(reverted(x), expected, atol=1e-6)
    assert not any(isinstance(m, InPlaceABN) for m in reverted.modules())
    assert any(type(m) is nn.BatchNorm2d for m in reverted.modules())
    assert "BatchNorm2d" in repr(reverted)
    torch.jit.script(reverted)
    assert not any(isinstance(m, nn.BatchNorm2d) for m in fuse(reverted).modules())
    assert type(revert(InPlaceABN(3), nn.BatchNorm1d)[0]) is nn.BatchNorm1d


class Halved(nn.Module):
    def forward(self, w):
        return w * 0.5

    def right_inverse(self, w):
        return w * 2


PARAMETRIZATIONS = {
    "weight": lambda bn: parametrize.register_parametrization(bn, "weight", Halved()),
    "bias": lambda bn: parametrize.register_parametrization(bn, "bias", Halved()),
    "weight_norm": lambda bn: parametrizations.weight_norm(bn, "weight"),
    "spectral_norm": lambda bn: parametrizations.spectral_norm(bn, "weight"),
    "weight_norm by hooks": lambda bn: torch.nn.utils.weight_norm(bn, "weight"),
    "pruned": lambda bn: prune.identity(bn, "weight"),
}


@pytest.mark.parametrize("name", PARAMETRIZATIONS)
@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
def test_what_was_parametrized_after_conversion_stays_so(name):
    """torch gives a module that it parametrizes a class of its own. revert must keep what that class does."""
    x = images().double()
    converted = convert(make("resnet").double())
    for norm in (converted.bn1, converted.layer1[0].bn1, converted.layer1[0].bn2):
        PARAMETRIZATIONS[name](norm)
    converted.train()(x).sum().backward()
    converted.eval()
    expected, keys = converted(x), list(converted.state_dict())
    reverted = revert(converted)
    assert relative_error(reverted(x), expected) < 1e-9
    assert list(reverted.state_dict()) == keys
    assert isinstance(reverted.bn1, nn.BatchNorm2d)
    reverted.train()(x).sum().backward()
    assert all(p.grad is not None for p in reverted.parameters())
    if parametrize.is_parametrized(reverted.bn1):
        again = copy.deepcopy(reverted).eval()
        assert torch.equal(again(x), reverted.eval()(x))
        for tensor in list(reverted.bn1.parametrizations):
            parametrize.remove_parametrizations(reverted.bn1, tensor)
        assert type(reverted.bn1) is nn.BatchNorm2d


@pytest.mark.parametrize("name", PARAMETRIZATIONS)
@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
def test_what_was_parametrized_before_is_what_it_was(name):
    model, x = make("resnet").double(), images().double()
    PARAMETRIZATIONS[name](model.bn1)
    kind = type(model.bn1)
    expected = model.train()(x)
    converted = convert(model)
    assert (report(converted).layers[0].why == "it was not called in training") == (kind is nn.BatchNorm2d)
    assert isinstance(converted.bn1, kind)
    assert torch.allclose(converted(x), expected, atol=1e-9)


class Other(InPlaceBatchNorm2d):
    """A subclass such as fully_shard makes."""


def of_another_class(model):
    model.layer2[1].bn1.__class__ = Other
    return "'?layer2.1.bn1'? has become a Other"


def built_as_such(model):
    model.layer2[1].conv1 = nn.Sequential(model.layer2[1].conv1, InPlaceABN(16))
    parametrize.register_parametrization(model.layer2[1].conv1[1], "weight", Halved())
    return "layer2.1.conv1.1 is parametrized, and not a module that was converted"


@pytest.mark.parametrize("change", [of_another_class, built_as_such])
def test_revert_refuses_before_anything_is_modified(change):
    converted = convert(make("resnet"))
    message = change(converted)
    before = [(type(m), dict(vars(m))) for m in converted.modules()]
    state = {key: value.clone() for key, value in converted.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        revert(converted)
    assert [(type(m), dict(vars(m))) for m in converted.modules()] == before
    assert all(torch.equal(value, state[key]) for key, value in converted.state_dict().items())
