"""convert, revert, convert_sync, verify and checkpoints of the public package."""

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from cases import relative_error
from foreign_nets import (
    BasicBlock,
    BatchNormAct2d,
    CalledActivation,
    ResNet,
    conv,
    hugging_face,
    mobilenet,
    spread,
    timm_net,
)
from torch import nn
from torch.fx.experimental.optimization import fuse
from torch.fx.proxy import TraceError
from torch.utils.checkpoint import checkpoint

from inplace_abn import (
    Example,
    InPlaceABN,
    InPlaceABNSync,
    Plan,
    analyze,
    convert,
    convert_sync,
    load_public_state_dict,
    revert,
    verify,
)
from inplace_abn.memory import measure


def images(size=32):
    return torch.randn(2, 3, size, size)


def inception():
    activations = [F.relu, lambda y: F.relu(y, inplace=True), lambda y: F.silu(y), lambda y: y.relu_()]
    blocks = [CalledActivation(3 if i == 0 else 8, 8, activation) for i, activation in enumerate(activations)]
    return nn.Sequential(*blocks, nn.Conv2d(8, 4, 1))


NETS = {
    "resnet": ResNet,
    "mobilenet relu6 in place": lambda: mobilenet(lambda: nn.ReLU6(inplace=True)),
    "mobilenet relu6": lambda: mobilenet(nn.ReLU6),
    "mobilenet hardswish": lambda: mobilenet(lambda: nn.Hardswish(inplace=True)),
    "mobilenet silu": lambda: mobilenet(nn.SiLU),
    "inception": inception,
    "timm silu": timm_net,
    "timm relu": lambda: timm_net(nn.ReLU),
}
ALL = [*NETS, *(pytest.param(name, id=name) for name in ["resnet basic", "resnet bottleneck", "upernet", "segformer"])]
ALL += ["regnet x", "regnet y", "mobilenet_v2"]


def make(name):
    torch.manual_seed(0)
    if name not in NETS:
        pytest.importorskip("transformers")
    return spread(NETS[name]() if name in NETS else hugging_face()[name]())


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("name", ALL)
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
    exact = not {"silu", "hardswish"} & set(kinds)
    verification = verify(model, converted, x)
    assert verification, str(verification)
    assert verification.tolerance == (1e-9 if exact else 1e-6)
    held = [measure(m, x).held for m in (model, converted)]
    assert held[0] - held[1] >= 0.95 * predicted
    assert {type(m) for m in converted.modules() if isinstance(m, InPlaceABN)} == {InPlaceABN}
    assert sum(isinstance(m, InPlaceABN) for m in converted.modules()) >= len(plan.convertible)
    assert all(m.signed_weight for m in converted.modules() if isinstance(m, InPlaceABN))


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
    assert type(abn) is InPlaceABN
    assert type(model[2]) is nn.Identity
    assert (abn, abn.weight, abn.bias, abn.running_mean, abn.num_batches_tracked) == before
    assert (abn.eps, abn.momentum, abn.activation, abn.signed_weight) == (1e-3, 0.7, "relu", True)
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
    """One silu for two norms and for what has none: to activate twice would show."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1, self.conv2, self.bn2 = conv(3, 4), nn.BatchNorm2d(4), conv(4, 4), nn.BatchNorm2d(4)
        self.last, self.act = conv(4, 4), nn.SiLU(inplace=True)

    def forward(self, x):
        return self.act(self.last(self.act(self.bn2(self.conv2(self.act(self.bn1(self.conv1(x))))))))


def test_what_is_activated_passes_a_shared_activation_compiled_and_checkpointed_too():
    model, x = spread(Twice()), images(8)
    plan = analyze(model, x)
    assert [layer.site for layer in plan.layers] == ["shared", "shared"]
    converted = convert(copy.deepcopy(model), plan)
    assert verify(model, converted, x)
    expected = model(x)
    torch._dynamo.reset()
    for backend in ("eager", "aot_eager"):
        assert torch.allclose(torch.compile(converted, fullgraph=True, backend=backend)(x), expected, atol=1e-5)
    assert torch.allclose(checkpoint(converted, x, use_reentrant=False), expected, atol=1e-5)
    model.load_state_dict(converted.state_dict())
    assert torch.allclose(converted.eval()(x), model.eval()(x), atol=1e-5)
    with pytest.raises((TypeError, RuntimeError, TraceError)):
        torch.fx.symbolic_trace(converted)


def test_a_rewritten_forward_pass_keeps_what_is_in_place_in_place():
    """torch.fx alone makes ``+`` of ``+=``, which other names of the tensor would not see."""

    class Aliased(CalledActivation):
        def forward(self, x):
            y = self.conv(x)
            z = y
            z += 1
            return self.activation(self.bn(self.conv.weight.sum() + y * 1.0)) + y

    model = spread(nn.Sequential(Aliased(3, 3, F.relu), conv(3, 4)))
    converted = convert(copy.deepcopy(model), images(8))
    assert type(converted[0].bn) is InPlaceABN
    assert verify(model, converted, images(8))


def test_a_plan_may_be_applied_in_part():
    model, x = spread(Twice()), images(8)
    plan = analyze(model, x)
    converted = convert(copy.deepcopy(model), Plan(plan.layers[1:]))
    assert type(converted.bn1) is nn.BatchNorm2d
    assert type(converted.bn2) is InPlaceABN
    assert verify(model, converted, x)


def test_norms_without_weights_or_running_statistics_are_converted():
    norms = nn.BatchNorm2d(4, affine=False), nn.BatchNorm2d(4, track_running_stats=False, momentum=None)
    model = nn.Sequential(conv(3, 4), norms[0], nn.ReLU(), conv(4, 4), spread(norms[1]), nn.ELU(), conv(4, 4))
    converted = convert(copy.deepcopy(model), images())
    assert [type(converted[i]) for i in (1, 4)] == [InPlaceABN] * 2
    assert verify(model, converted, images())
    assert verify(model, revert(converted), images())


def test_a_converted_model_trains_under_autocast():
    model, x = make("resnet"), images(64)
    with torch.no_grad():
        for m in model.modules():
            if isinstance(m, nn.BatchNorm2d):
                m.bias *= 0.1  # Large ones are ill-conditioned in bfloat16.
    with torch.autocast("cpu", torch.bfloat16):
        plan = analyze(model, x)
        converted = convert(copy.deepcopy(model), plan, residual=True)
        for m in (model, converted):
            m(x).float().square().sum().backward()
    assert sum(isinstance(m, InPlaceABN) for m in converted.modules()) > 5
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


def test_a_shared_activation_still_activates_what_no_layer_has():
    converted = convert(make("resnet"), images())
    relu = converted.layer1[0].relu
    x = torch.randn(2, 8, 4, 4)
    assert torch.equal(relu(x.clone()), F.relu(x))
    z = converted.layer1[0].bn1(x.clone())
    passed = relu(z)
    assert passed is z
    # Only once.
    assert (relu(-z) >= 0).all()
    assert (relu(z) >= 0).all()


def test_residual_blocks_go_in_place_only_if_asked_for_and_where_they_can():
    model, x = make("resnet"), images()
    plan = analyze(model, x)
    assert [layer.name for layer in plan.residuals] == [f"layer{i}.{j}.bn2" for i in (1, 2) for j in (0, 1)]
    assert plan.residuals[2].residual.partner == "layer2.0.downsample.1"
    plain = convert(copy.deepcopy(model), plan)
    assert type(plain.layer1[0].bn2) is nn.BatchNorm2d
    rewritten = convert(copy.deepcopy(model), plan, residual=True)
    assert rewritten.layer1[0].bn2.activation == "relu"
    assert rewritten.layer2[0].downsample[1].activation == "identity"
    assert type(rewritten.layer1[0]) is not BasicBlock
    assert isinstance(rewritten.layer1[0], BasicBlock)

    class Branching(BasicBlock):
        def forward(self, x, scale=None):
            return super().forward(x)

    layers = analyze(nn.Sequential(conv(3, 4), nn.ReLU(), Branching(4, 4)), x).layers
    assert layers[1].residual.reasons == ("Branching.forward has optional arguments",)
    assert "residual= would save" in str(analyze(nn.Sequential(conv(3, 4), nn.ReLU(), Branching(4, 4)), x))


def test_a_residual_that_is_not_kept_otherwise_saves_nothing():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.bn = conv(3, 4), nn.BatchNorm2d(4)

        def forward(self, x):
            return F.relu(self.bn(self.conv(x)) + x[:, :1].expand(-1, 4, -1, -1).clone())

    (layer,) = analyze(nn.Sequential(Block(), conv(4, 4)), images()).layers
    assert layer.residual.reasons == ("nothing would be gained, because the residual is not kept otherwise",)


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


def public_checkpoint(channels=4):
    """As the public package saves it, without batch counters."""
    return {
        "0.weight": torch.randn(channels, 3, 3, 3),
        "1.weight": torch.tensor([-1.0, 0.5, 2.0, -1e-7]),
        "1.bias": torch.randn(channels),
        "1.running_mean": torch.randn(channels),
        "1.running_var": torch.rand(channels) + 0.5,
    }


@pytest.mark.parametrize("kind", ["converted", "reverted", "in place", "in place, reverted"])
def test_checkpoints_of_the_public_package_load(kind):
    state = public_checkpoint()
    x = images(8)
    y = F.batch_norm(
        F.conv2d(x, state["0.weight"], padding=1),
        state["1.running_mean"],
        state["1.running_var"],
        state["1.weight"].abs() + 1e-5,
        state["1.bias"],
    )
    if kind in ("converted", "reverted"):
        model = nn.Sequential(conv(3, 4), nn.BatchNorm2d(4), nn.LeakyReLU(0.01), nn.MaxPool2d(1))
        convert(model, x)
        assert type(model[1]) is InPlaceABN
    else:
        model = nn.Sequential(conv(3, 4), InPlaceABN(4), nn.Identity())
    if kind.endswith("reverted"):
        model = revert(model)
    kept = {key: value.clone() for key, value in state.items()}
    result = load_public_state_dict(model, state)
    assert not result.missing_keys
    assert not result.unexpected_keys
    assert all(torch.equal(value, kept[key]) for key, value in state.items())
    with torch.no_grad():
        assert torch.allclose(model.eval()(x), F.leaky_relu(y, 0.01), atol=1e-5)


def test_a_public_checkpoint_may_have_standard_layers_too():
    model = nn.Sequential(conv(3, 4), nn.BatchNorm2d(4))
    load_public_state_dict(model, public_checkpoint(), layers=[])
    assert model[1].weight[0] == -1
    with pytest.raises(ValueError, match=r"the model has no norms \['0'\]"):
        load_public_state_dict(model, public_checkpoint(), layers=["0"])
    with pytest.raises(RuntimeError, match="Unexpected key"):
        load_public_state_dict(model, public_checkpoint() | {"more": torch.zeros(1)})
    assert load_public_state_dict(model, public_checkpoint() | {"more": torch.zeros(1)}, strict=False).unexpected_keys


def test_a_plan_of_another_model_is_refused_before_anything_is_touched():
    model = make("resnet")
    plan = analyze(model, images())
    other = nn.Sequential(conv(3, 4), nn.BatchNorm2d(4))
    with pytest.raises(
        ValueError, match="the plan is not this model's: it has a BatchNorm2d 'bn1', the model has none"
    ):
        convert(other, plan)
    model.layer2[1].relu = nn.GELU()
    with pytest.raises(ValueError, match=r"expected 'layer2.1.relu' to be relu, as planned, got GELU"):
        convert(model, plan)
    assert type(model.bn1) is nn.BatchNorm2d
    converted = convert(make("resnet"), plan)
    with pytest.raises(ValueError, match="a InPlaceABN"):
        convert(converted, plan)
    for wrong in (3, "x", None):
        with pytest.raises(TypeError, match="expected a Plan, or an example"):
            convert(make("resnet"), wrong)
    with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
        convert(3, plan)


@pytest.mark.parametrize("example", [images(), (images(),), Example(images()), {"x": images()}], ids=type)
def test_an_example_does_instead_of_a_plan(example):
    assert type(convert(make("resnet"), example).bn1) is InPlaceABN


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
    assert type(converted.layers[1]) is InPlaceABN
    assert verify(model, converted, images())


def test_a_batch_norm_act_is_one_in_place_module():
    model = make("timm silu")
    converted = convert(copy.deepcopy(model), images())
    assert type(converted[1]) is InPlaceABN
    assert converted[1].activation == "silu"
    assert type(revert(converted)[1]) is BatchNormAct2d


def wrong_activation(model):
    model.bn1.activation = "leaky_relu"


def wrong_sign(model):
    model.bn1.signed_weight = False


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
    converted = convert(copy.deepcopy(model), x)
    assert verify(model, converted, x)
    spoil(converted)
    verification = verify(model, converted, x)
    assert not verification
    assert str(verification).startswith("THE MODELS DIFFER")
    assert verification.worst[1] > 1e-9


def test_verify_leaves_models_and_random_state_alone():
    model, x = make("resnet"), images()
    converted = convert(copy.deepcopy(model), x)
    states = [{k: v.clone() for k, v in m.state_dict().items()} for m in (model, converted)]
    random_state = torch.get_rng_state()
    assert "The models agree" in str(verify(model, converted, x))
    assert torch.equal(torch.get_rng_state(), random_state)
    for m, state in zip((model, converted), states, strict=True):
        assert all(torch.equal(v, state[k]) for k, v in m.state_dict().items())
        assert all(p.grad is None for p in m.parameters())
        assert m.training
    with pytest.raises(ValueError, match=r"only one model has the parameters .*conv1\.weight"):
        verify(model.bn1, model, x)


def test_verify_follows_dropout_and_every_output():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(conv(3, 4), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5))
            self.a, self.b = conv(4, 2), conv(4, 2)

        def forward(self, x):
            y = self.body(x)
            return {"a": self.a(y), "b": [self.b(y)]}

    model = spread(Net())
    converted = convert(copy.deepcopy(model), images())
    assert type(converted.body[1]) is InPlaceABN
    assert verify(model, converted, images())
    with torch.no_grad():
        converted.b.weight[0] += 0.1
    assert verify(model, converted, images()).gradient_errors["a.weight"] < 1e-9
    assert not verify(model, converted, images())
