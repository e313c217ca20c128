"""revert and convert_sync."""

import copy
import io

import pytest
import torch
from cases import relative_error
from convertible_nets import ALL, images, make
from foreign_nets import conv, spread
from torch import nn
from torch.fx.experimental.optimization import fuse

from inplace_abn import InPlaceABN, InPlaceABNSync, convert, convert_sync, revert, verify


@pytest.mark.parametrize("name", ALL)
def test_a_reverted_model_is_the_original_with_identical_output(name):
    model, x = make(name).double(), images().double()
    reverted = convert(copy.deepcopy(model), x, residual=True)
    with torch.no_grad():
        reverted(x)
        expected = reverted.eval()(x)
        actual = revert(reverted)(x)
    for a, b in zip(*([o] if isinstance(o, torch.Tensor) else o.values() for o in (actual, expected)), strict=True):
        assert relative_error(a, b) < 1e-9
    assert [type(m) for m in reverted.modules()] == [type(m) for m in model.modules()]
    assert list(reverted.state_dict()) == list(model.state_dict())
    assert not any(m._forward_hooks for m in reverted.modules() if isinstance(m, nn.BatchNorm2d))
    ours = {"_inplace_abn_original", "activation_param", "signed_weight", "group"}
    assert not any(ours & set(vars(m)) for m in reverted.modules())


@pytest.mark.parametrize("sync", [False, True])
@pytest.mark.filterwarnings("ignore:.*not initialised")
def test_synchronised_batch_norm_stays_synchronised(sync):
    model = spread(nn.Sequential(conv(3, 4), nn.BatchNorm2d(4), nn.ReLU(), conv(4, 4), nn.SyncBatchNorm(4), nn.ReLU()))
    converted = convert(copy.deepcopy(model), images(), sync=sync)
    assert type(converted[1]) is (InPlaceABNSync if sync else InPlaceABN)
    assert type(converted[4]) is InPlaceABNSync
    assert converted[4].group is None
    reverted = revert(copy.deepcopy(converted))
    assert [type(m) for m in reverted] == [type(m) for m in model]
    x = images()
    assert torch.allclose(reverted.eval()(x), converted.eval()(x), atol=1e-6)


@pytest.mark.filterwarnings("ignore:.*not initialised")
def test_convert_sync_goes_both_ways_and_refuses_subclasses():
    model = nn.Sequential(conv(3, 4), InPlaceABN(4, activation="relu", signed_weight=True), conv(4, 4), InPlaceABN(4))
    weight = model[1].weight
    expected = model(images(8))
    marker = object()
    assert convert_sync(model, group=marker) is model
    assert [type(model[i]) for i in (1, 3)] == [InPlaceABNSync] * 2
    assert model[1].group is marker
    assert model[1].signed_weight
    model[1].group = model[3].group = None
    convert_sync(model, sync=False)
    assert [type(model[i]) for i in (1, 3)] == [InPlaceABN] * 2
    assert model[1].weight is weight
    assert model(images(8)).shape == expected.shape

    class Mine(InPlaceABN):
        pass

    with pytest.raises(TypeError, match="expected no subclass, got Mine"):
        convert_sync(nn.Sequential(InPlaceABN(3), Mine(3)))


@pytest.mark.filterwarnings("ignore:.*not initialised")
def test_a_converted_model_may_be_synchronised_and_reverted():
    model, x = make("resnet"), images()
    converted = convert_sync(convert(copy.deepcopy(model), x, residual=True))
    assert verify(model, converted, x)
    assert [type(m) for m in revert(converted).modules()] == [type(m) for m in model.modules()]


def test_weights_that_training_took_close_to_zero_are_reverted_as_they_scale():
    converted = convert(make("resnet"), images()).eval()
    with torch.no_grad():
        converted.bn1.weight[:3] = torch.tensor([0.0, 1e-9, -1e-9])
        x = images()
        expected = converted(x)
        revert(converted)
        assert torch.allclose(converted(x), expected, atol=1e-6)
    assert converted.bn1.weight[0] == converted.bn1.eps


@pytest.fixture
def reverted():
    model = make("resnet").eval()
    return model, revert(convert(copy.deepcopy(model), images(), residual=True)).eval()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_reverted_model_is_scripted(reverted):
    x = images()
    assert torch.allclose(torch.jit.script(reverted[1])(x), reverted[0](x), atol=1e-5)


def test_a_reverted_model_has_its_batch_norms_fused_into_convolutions(reverted):
    x = images()
    fused = fuse(reverted[1])
    assert not any(isinstance(m, nn.BatchNorm2d) for m in fused.modules())
    assert torch.allclose(fused(x), reverted[0](x), atol=1e-4)


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
@pytest.mark.parametrize("activation", ["relu", "leaky_relu", "elu", "silu", "hardswish", "identity"])
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
