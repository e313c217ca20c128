"""convert gives the same losses and gradients in less memory, and leaves everything else as it was."""

import copy
import io
import logging
import pickle
import time

import pytest
import torch
import torch.nn.functional as F
from cases import relative_error
from convertible_nets import HELD, images, make
from foreign_nets import BasicBlock, BatchNormAct2d, CalledActivation, conv, spread
from torch import nn
from torch.utils.checkpoint import checkpoint
from training import check_training

from inplace_abn import analyze, convert, report, revert, verify
from inplace_abn.conversion.classes import InPlaceBatchNorm2d
from inplace_abn.conversion.norms import InPlaceNorm
from inplace_abn.memory import measure


@pytest.mark.parametrize("name", HELD)
def test_a_converted_model_trains_as_the_original_does_and_holds_less(name):
    model, x = make(name), images(64)
    check_training(model, x, tolerance=1e-7)
    converted = convert(copy.deepcopy(model))
    verification = verify(model, converted, x)
    assert verification, str(verification)
    assert all(isinstance(m, InPlaceNorm) for m in converted.modules() if isinstance(m, nn.BatchNorm2d))
    others = [(type(m), type(n)) for m, n in zip(model.modules(), converted.modules(), strict=True)]
    assert all(a is b or issubclass(b, (a, InPlaceNorm)) for a, b in others)
    native, held = (measure(m, x).held for m in (model, converted))
    assert held <= (HELD[name] + 0.005) * native


def test_converting_runs_nothing_and_takes_milliseconds(monkeypatch):
    model = make("resnet bottleneck")
    monkeypatch.setattr(nn.Module, "__call__", None)
    start = time.perf_counter()
    convert(model)
    # It takes two milliseconds on a machine that has nothing else to do.
    assert time.perf_counter() - start < 1


def test_parameters_settings_flags_and_optimizers_stay():
    model = spread(nn.Sequential(conv(3, 4), nn.BatchNorm2d(4, 1e-3, 0.7), nn.ReLU(), conv(4, 4))).double()
    model[1].weight.requires_grad_(False)
    model[1].eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model[1], model[1].weight, model[1].bias, model[1].running_mean, model[1].num_batches_tracked
    state = {key: value.clone() for key, value in model.state_dict().items()}
    result = convert(model)
    assert result is model
    abn = model[1]
    assert type(abn) is InPlaceBatchNorm2d
    assert "InPlaceBatchNorm2d(4, eps=0.001" in repr(abn)
    assert type(model[2]) is nn.ReLU
    assert (abn, abn.weight, abn.bias, abn.running_mean, abn.num_batches_tracked) == before
    assert (abn.eps, abn.momentum) == (1e-3, 0.7)
    assert (abn.training, model.training) == (False, True)
    assert not abn.weight.requires_grad
    assert abn.weight.dtype == torch.float64
    for key, value in model.state_dict().items():
        assert torch.equal(value, state[key])
    model(images().double()).sum().backward()
    bias = abn.bias.clone()
    optimizer.step()
    assert not torch.equal(abn.bias, bias)


@pytest.mark.parametrize("name", ["resnet", "timm silu", "inception"])
def test_state_dicts_load_both_ways(name):
    model = make(name)
    converted = convert(copy.deepcopy(model))
    converted.train()(images())
    model.load_state_dict(converted.state_dict())
    converted.load_state_dict(model.state_dict())
    model.eval()
    converted.eval()
    x = images()
    assert torch.allclose(model(x), converted(x), atol=1e-5)


def test_converted_models_copy_pickle_and_compile():
    model, x = make("resnet"), images()
    converted = convert(copy.deepcopy(model))
    again = copy.deepcopy(converted)
    assert verify(model, again, x)
    assert again.layer1[0].bn1.weight is not converted.layer1[0].bn1.weight
    assert isinstance(again.layer1[0], BasicBlock)
    buffer = io.BytesIO()
    torch.save(converted, buffer)
    buffer.seek(0)
    assert verify(model, torch.load(buffer, weights_only=False), x)
    assert verify(model, pickle.loads(pickle.dumps(again)), x)
    assert verify(model, revert(again), x)
    torch._dynamo.reset()
    compiled = torch.compile(copy.deepcopy(converted), fullgraph=True, backend="aot_eager")
    loss, expected = compiled(x).square().sum(), converted(x).square().sum()
    assert torch.allclose(loss, expected, rtol=1e-4)
    loss.backward()


class Twice(nn.Module):
    """Two norms and a convolution share one silu. A silu that is applied twice would change the results."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1, self.conv2, self.bn2 = conv(3, 4), nn.BatchNorm2d(4), conv(4, 4), nn.BatchNorm2d(4)
        self.last, self.act = conv(4, 4), nn.SiLU(inplace=True)

    def forward(self, x):
        return self.act(self.last(self.act(self.bn2(self.conv2(self.act(self.bn1(self.conv1(x))))))))


def test_a_shared_activation_activates_all_compiled_and_checkpointed_too():
    model, x = spread(Twice()), images(8)
    assert [(layer.follows, layer.in_place) for layer in analyze(model, x).layers] == [("silu", True)] * 2
    converted = convert(copy.deepcopy(model))
    assert verify(model, converted, x)
    expected = model(x)
    torch._dynamo.reset()
    for backend in ("eager", "aot_eager"):
        assert torch.allclose(torch.compile(converted, fullgraph=True, backend=backend)(x), expected, atol=1e-5)
    assert torch.allclose(checkpoint(converted, x, use_reentrant=False), expected, atol=1e-5)
    model.load_state_dict(converted.state_dict())
    assert torch.allclose(converted.eval()(x), model.eval()(x), atol=1e-5)
    graph = torch.fx.symbolic_trace(converted)
    assert [n.target for n in graph.graph.nodes if n.op == "call_module"].count("bn1") == 1
    assert torch.allclose(graph(x), model(x), atol=1e-5)
    with pytest.raises(RuntimeError, match=r"cannot be scripted; call inplace_abn\.revert"):
        torch.jit.script(converted)


def test_a_forward_pass_keeps_what_is_in_place_in_place():
    """``+=`` changes the tensor itself, so all names of the tensor see the change."""

    class Aliased(CalledActivation):
        def forward(self, x):
            y = self.conv(x)
            z = y
            z += 1
            return self.activation(self.bn(self.conv.weight.sum() + y * 1.0)) + y

    model = spread(nn.Sequential(Aliased(3, 3, F.relu), conv(3, 4)))
    converted = convert(copy.deepcopy(model))
    assert type(converted[0].bn) is InPlaceBatchNorm2d
    assert verify(model, converted, images(8))


def test_norms_without_weights_or_running_statistics_are_converted():
    norms = nn.BatchNorm2d(4, affine=False), nn.BatchNorm2d(4, track_running_stats=False, momentum=None)
    model = nn.Sequential(conv(3, 4), norms[0], nn.ReLU(), conv(4, 4), spread(norms[1]), nn.ELU(), conv(4, 4))
    converted = convert(copy.deepcopy(model))
    assert [type(converted[i]) for i in (1, 4)] == [InPlaceBatchNorm2d] * 2
    assert verify(model, converted, images())
    assert verify(model, revert(converted), images())


def test_a_converted_model_trains_under_autocast():
    model, x = make("resnet"), images(64)
    with torch.no_grad():
        for m in model.modules():
            if isinstance(m, nn.BatchNorm2d):
                m.bias *= 0.1  # large biases are ill-conditioned in bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        converted = convert(copy.deepcopy(model))
        for m in (model, converted):
            m(x).float().square().sum().backward()
    assert len(report(converted).in_place) > 5
    difference = relative_error(converted.fc.weight.grad, model.fc.weight.grad.double())
    assert difference < 0.05


def test_training_goes_on_as_before():
    results = []
    x = torch.randn(4, 3, 32, 32, dtype=torch.float64)
    for converted in (False, True):
        model = make("resnet").double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        for step in range(4):
            if converted and step == 1:
                convert(model)
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        results.append(loss)
    assert relative_error(results[1], results[0]) < 1e-9


def test_residual_blocks_go_in_place():
    model, x = make("resnet"), images()
    layers = {layer.name: layer for layer in analyze(model, x).layers}
    assert all(layer.in_place for layer in layers.values())
    assert [layers[f"layer{i}.{j}.bn2"].follows for i in (1, 2) for j in (0, 1)] == ["add, relu"] * 4
    # The norm of the shortcut keeps its output, which is the residual of the other norm.
    assert layers["layer2.0.downsample.1"].follows == "add"

    class Branching(BasicBlock):
        def forward(self, x, scale=None):
            return super().forward(x)

    block = spread(nn.Sequential(conv(3, 4), nn.ReLU(), Branching(4, 4)))
    assert [(layer.name, layer.in_place) for layer in analyze(block, x).layers] == [("2.bn1", True), ("2.bn2", True)]
    check_training(block, x)


def test_a_filter_chooses_and_one_line_tells(logged):
    """Converting what is converted already, or has no norms, said "0 of 0"."""
    records = logged(logging.INFO)
    model = make("resnet")
    seen = []

    def first_layer(module, name):
        seen.append(type(module))
        return name.startswith("layer1")

    convert(model, filter_fn=first_layer)
    assert set(seen) == {nn.BatchNorm2d, nn.Conv2d, nn.Linear}
    chosen = [name for name, m in model.named_modules() if isinstance(m, InPlaceNorm)]
    assert chosen == [f"layer1.{i}.bn{j}" for i in (0, 1) for j in (1, 2)]
    convert(model)
    convert(model)
    convert(nn.Sequential(nn.BatchNorm2d(3), nn.LayerNorm(3), nn.LocalResponseNorm(2), nn.LocalResponseNorm(2)))
    convert(nn.Sequential(nn.ReLU()))
    assert [record.getMessage() for record in records] == [
        "converted 4 of 10 norms",
        "converted 6 of 6 norms, 4 are converted already",
        "10 norms are converted already",
        "converted 2 of 2 norms; not supported: 2 LocalResponseNorm",
        "no norms to convert",
    ]


def test_converting_twice_adds_what_is_new_and_reverting_takes_all_away():
    model, x = make("resnet"), images()
    original = copy.deepcopy(model)
    convert(model, filter_fn=lambda _, name: name == "bn1")
    convert(model)
    assert verify(original, model, x)
    assert len(model._forward_hooks) == 1
    revert(model)
    assert [type(m) for m in model.modules()] == [type(m) for m in original.modules()]
    assert [set(vars(m)) for m in model.modules()] == [set(vars(m)) for m in original.modules()]
    assert not model._forward_hooks


def test_what_is_no_model_is_refused():
    for call in (convert, report, lambda model: analyze(model, images())):
        with pytest.raises(TypeError, match=r"expected model to be a torch\.nn\.Module, got int"):
            call(3)


def test_a_module_that_is_referred_to_from_elsewhere_is_converted_there_too():
    class Listed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = [conv(3, 4), nn.BatchNorm2d(4), nn.ReLU(), conv(4, 4)]
            for i, layer in enumerate(self.layers):
                self.add_module(str(i), layer)

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    model = spread(Listed())
    converted = convert(copy.deepcopy(model))
    assert type(converted.layers[1]) is InPlaceBatchNorm2d
    assert verify(model, converted, images())


def test_a_batch_norm_act_stays_one():
    model, x = make("timm silu"), images()
    converted = convert(copy.deepcopy(model))
    assert isinstance(converted[1], BatchNormAct2d)
    assert isinstance(converted[1], InPlaceNorm)
    assert type(converted[1].act) is nn.SiLU
    for again in (copy.deepcopy(converted), pickle.loads(pickle.dumps(converted))):
        assert type(again[1]) is type(converted[1])
        assert verify(model, again, x)
    assert type(revert(converted)[1]) is BatchNormAct2d
