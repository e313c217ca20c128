"""convert gives the same losses and gradients in less memory, and leaves everything else as it was."""

import copy
import io
import logging
import pickle
import re

import pytest
import torch
import torch.nn.functional as F
from cases import relative_error
from convertible_nets import ALL, NETS, images, make
from foreign_nets import BasicBlock, BatchNormAct2d, CalledActivation, conv, spread
from torch import nn
from torch.utils.checkpoint import checkpoint

from inplace_abn import Example, Plan, analyze, convert, revert, verify
from inplace_abn.conversion.norms import InPlaceBatchNorm2d, InPlaceNorm
from inplace_abn.memory import measure


# With residual=False the small nets suffice.
@pytest.mark.parametrize(("name", "residual"), [*((n, True) for n in ALL), *((n, False) for n in NETS)])
def test_a_converted_model_has_the_losses_and_gradients_of_the_original_and_saves_what_was_predicted(name, residual):
    model, x = make(name), images(64)
    plan = analyze(model, x)
    predicted = plan.bytes_saved + (plan.residual_bytes_saved if residual else 0)
    if name == "mobilenet relu6 in place":
        assert "hardtanh_, or" not in str(plan)
        assert predicted == 0
        return
    assert predicted > 0
    converted = convert(copy.deepcopy(model), plan, residual=residual)
    kinds = [layer.activation for layer in plan.convertible]
    kinds += [layer.residual.activation for layer in plan.residuals if residual]
    exact = not {"silu", "hardswish"} & set(kinds)
    verification = verify(model, converted, x)
    assert verification, str(verification)
    assert verification.tolerance == (1e-9 if exact else 1e-6)
    held = [measure(m, x).held for m in (model, converted)]
    assert held[0] - held[1] == pytest.approx(predicted, rel=0.02)
    assert sum(isinstance(m, InPlaceNorm) for m in converted.modules()) >= len(plan.convertible)
    others = [(type(m), type(n)) for m, n in zip(model.modules(), converted.modules(), strict=True)]
    assert all(a is b or issubclass(b, (a, InPlaceNorm)) for a, b in others)
    # Without an example the norms keep their inputs. Where an activation follows, as much is saved all the same.
    kept = convert(copy.deepcopy(model), residual=residual)
    assert verify(model, kept, x)
    activated = sum(layer.bytes_saved for layer in plan.convertible if layer.activation != "identity")
    activated += plan.residual_bytes_saved if residual else 0
    assert held[0] - measure(kept, x).held >= 0.98 * activated


def test_parameters_settings_flags_and_optimizers_stay():
    model = spread(nn.Sequential(conv(3, 4), nn.BatchNorm2d(4, 1e-3, 0.7), nn.ReLU(), conv(4, 4))).double()
    model[1].weight.requires_grad_(False)
    model[1].eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model[1], model[1].weight, model[1].bias, model[1].running_mean, model[1].num_batches_tracked
    state = {key: value.clone() for key, value in model.state_dict().items()}
    result = convert(model, images().double())
    assert result is model
    abn = model[1]
    assert type(abn) is InPlaceBatchNorm2d
    assert "InPlaceBatchNorm2d(4, eps=0.001" in repr(abn)
    assert "in place" in repr(abn)
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
    converted = convert(copy.deepcopy(model), images(), residual=True)
    converted.train()(images())
    model.load_state_dict(converted.state_dict())
    converted.load_state_dict(model.state_dict())
    model.eval()
    converted.eval()
    x = images()
    assert torch.allclose(model(x), converted(x), atol=1e-5)


@pytest.mark.parametrize("residual", [False, True])
def test_converted_models_copy_pickle_and_compile(residual):
    model, x = make("resnet"), images()
    converted = convert(copy.deepcopy(model), x, residual=residual)
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
    plan = analyze(model, x)
    assert [layer.activation for layer in plan.convertible] == ["silu", "silu"]
    converted = convert(copy.deepcopy(model), plan)
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
    converted = convert(copy.deepcopy(model), images(8))
    assert type(converted[0].bn) is InPlaceBatchNorm2d
    assert verify(model, converted, images(8))


def test_a_plan_may_be_applied_in_part():
    model, x = spread(Twice()), images(8)
    plan = analyze(model, x)
    converted = convert(copy.deepcopy(model), Plan(plan.layers[1:]))
    assert type(converted.bn1) is nn.BatchNorm2d
    assert type(converted.bn2) is InPlaceBatchNorm2d
    assert verify(model, converted, x)


def test_norms_without_weights_or_running_statistics_are_converted():
    norms = nn.BatchNorm2d(4, affine=False), nn.BatchNorm2d(4, track_running_stats=False, momentum=None)
    model = nn.Sequential(conv(3, 4), norms[0], nn.ReLU(), conv(4, 4), spread(norms[1]), nn.ELU(), conv(4, 4))
    converted = convert(copy.deepcopy(model), images())
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
        plan = analyze(model, x)
        converted = convert(copy.deepcopy(model), plan, residual=True)
        for m in (model, converted):
            m(x).float().square().sum().backward()
    assert sum(isinstance(m, InPlaceNorm) for m in converted.modules()) > 5
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
                convert(model, x, residual=True)
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        results.append(loss)
    assert relative_error(results[1], results[0]) < 1e-9


def test_residual_blocks_go_in_place_unless_that_is_declined():
    model, x = make("resnet"), images()
    plan = analyze(model, x)
    assert [layer.name for layer in plan.residuals] == [f"layer{i}.{j}.bn2" for i in (1, 2) for j in (0, 1)]
    assert plan.residuals[2].residual.partner == "layer2.0.downsample.1"
    declined = convert(copy.deepcopy(model), plan, residual=False)
    assert type(declined.layer1[0].bn2) is nn.BatchNorm2d
    converted = convert(copy.deepcopy(model), plan)
    assert all(isinstance(m, InPlaceNorm) == isinstance(m, nn.BatchNorm2d) for m in converted.modules())
    assert type(converted.layer1[0]) is BasicBlock

    class Branching(BasicBlock):
        def forward(self, x, scale=None):
            return super().forward(x)

    block = spread(nn.Sequential(conv(3, 4), nn.ReLU(), Branching(4, 4)))
    assert [layer.name for layer in analyze(block, x).residuals] == ["2.bn2"]
    assert verify(block, convert(copy.deepcopy(block), x), x)


def test_a_filter_chooses_and_one_line_tells(logged):
    records = logged(logging.INFO)
    model, x = make("resnet"), images()
    seen = []

    def first_layer(module, name):
        seen.append(type(module))
        return name.startswith("layer1")

    convert(model, filter_fn=first_layer)
    assert set(seen) == {nn.BatchNorm2d}
    chosen = [name for name, m in model.named_modules() if isinstance(m, InPlaceNorm)]
    assert chosen == [f"layer1.{i}.bn{j}" for i in (0, 1) for j in (1, 2)]
    convert(make("resnet"), x)
    lines = [record.getMessage() for record in records]
    assert lines[0] == "4 of 10 norms"
    assert re.fullmatch(r"10 of 10 norms, [\d.]+ KiB", lines[1])


def test_converting_twice_adds_what_is_new_and_reverting_takes_all_away():
    model, x = make("resnet"), images()
    original = copy.deepcopy(model)
    convert(model, filter_fn=lambda _, name: name == "bn1")
    convert(model, x)
    assert verify(original, model, x)
    assert len(model._forward_hooks) == 1
    revert(model)
    assert [type(m) for m in model.modules()] == [type(m) for m in original.modules()]
    assert [set(vars(m)) for m in model.modules()] == [set(vars(m)) for m in original.modules()]
    assert not model._forward_hooks


def test_a_residual_that_is_not_kept_otherwise_saves_nothing():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.bn = conv(3, 4), nn.BatchNorm2d(4)

        def forward(self, x):
            return F.relu(self.bn(self.conv(x)) + x[:, :1].expand(-1, 4, -1, -1).clone())

    (layer,) = analyze(nn.Sequential(Block(), conv(4, 4)), images()).layers
    assert layer.residual.reasons == ("nothing would be gained, because the residual is not kept otherwise",)


def test_a_plan_of_another_model_is_refused_before_anything_is_touched():
    model = make("resnet")
    plan = analyze(model, images())
    other = nn.Sequential(conv(3, 4), nn.BatchNorm2d(4))
    with pytest.raises(
        ValueError, match="the plan is not this model's: it has a BatchNorm2d 'bn1', the model has none"
    ):
        convert(other, plan)
    assert type(other[1]) is nn.BatchNorm2d
    converted = convert(make("resnet"), plan)
    with pytest.raises(ValueError, match="a InPlaceBatchNorm2d"):
        convert(converted, plan)
    for wrong in (3, "x"):
        with pytest.raises(TypeError, match="expected a Plan, or an example"):
            convert(make("resnet"), wrong)
    with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
        convert(3, plan)


@pytest.mark.parametrize("example", [images(), (images(),), Example(images()), {"x": images()}], ids=type)
def test_an_example_does_instead_of_a_plan(example):
    assert type(convert(make("resnet"), example).bn1) is InPlaceBatchNorm2d


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
    converted = convert(copy.deepcopy(model), images())
    assert type(converted.layers[1]) is InPlaceBatchNorm2d
    assert verify(model, converted, images())


def test_a_batch_norm_act_stays_one():
    model, x = make("timm silu"), images()
    converted = convert(copy.deepcopy(model), x)
    assert isinstance(converted[1], BatchNormAct2d)
    assert isinstance(converted[1], InPlaceNorm)
    assert type(converted[1].act) is nn.SiLU
    for again in (copy.deepcopy(converted), pickle.loads(pickle.dumps(converted))):
        assert type(again[1]) is type(converted[1])
        assert verify(model, again, x)
    assert type(revert(converted)[1]) is BatchNormAct2d
