"""The modules' constructors, attributes, state dicts and subclasses."""

import copy
import importlib
import inspect
import io
import warnings

import pytest
import torch
from cases import param_of, relative_error
from torch import nn

import inplace_abn
from inplace_abn import ABN, InPlaceABN, InPlaceABNSync, InPlaceGroupNorm, InPlaceInstanceNorm, distributed, functions
from inplace_abn.autograd import nodes
from inplace_abn.autograd import plain as out_of_place

MODULES = [ABN, InPlaceABN, InPlaceABNSync]


def test_positional_order_is_the_one_other_libraries_use():
    constructor = ["num_features", "eps", "momentum", "affine", "track_running_stats", "activation", "activation_param"]
    for module in MODULES:
        positional = [
            p.name
            for p in list(inspect.signature(module).parameters.values())
            if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        ]
        assert positional == constructor + (["group"] if module is InPlaceABNSync else [])
    call = ["x", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps", "activation"]
    call += ["activation_param"]
    for function, tail in [(functions.inplace_abn, []), (functions.inplace_abn_sync, ["group"])]:
        parameters = inspect.signature(function).parameters.values()
        assert [p.name for p in parameters if p.kind is not inspect.Parameter.KEYWORD_ONLY] == call + tail
    assert all(hasattr(inplace_abn, name) for name in inplace_abn.__all__)


def test_a_star_import_leaves_the_name_of_the_package_to_the_package():
    """``from inplace_abn import *`` made `inplace_abn` the function of that name, so `inplace_abn.convert` failed."""
    names = {}
    exec("import inplace_abn\nfrom inplace_abn import *", names)
    assert names["inplace_abn"] is inplace_abn
    assert names["InPlaceABN"] is InPlaceABN
    assert callable(inplace_abn.inplace_abn)


@pytest.mark.parametrize("module", [InPlaceABN, InPlaceABNSync])
def test_both_in_place_modules_are_abns(module):
    assert issubclass(module, ABN)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("activation", ["identity", "none", "leaky_relu", "elu", "relu"])
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("tracking", [True, False])
@pytest.mark.filterwarnings("ignore:.*not initialised")
def test_abn_and_its_in_place_twins_agree(tracking, momentum, activation, training, device):
    options = {"momentum": momentum, "track_running_stats": tracking, "activation": activation}
    options["activation_param"] = param_of(activation, 0.5)
    results = []
    for module in MODULES:
        torch.manual_seed(3)
        m = module(5, **options, device=device, dtype=torch.float64).train(training)
        with torch.no_grad():
            m.weight.uniform_(0.5, 1.5)
            m.bias.normal_()
            if module is not ABN:
                m.weight -= m.eps
        for _ in range(3):
            leaf = torch.randn(4, 5, 3, 6, dtype=torch.float64, device=device, requires_grad=True)
            z = m(leaf * 1)
        z.square().sum().backward()
        results.append([z, leaf.grad, m.weight.grad, m.bias.grad, *(b.double() for b in m.buffers())])
    for other in results[1:]:
        for a, b in zip(other, results[0], strict=True):
            assert relative_error(a, b) < 1e-10


OF_FOUR = {
    "batch norm": lambda: InPlaceABN(4, dtype=torch.float64),
    "instance norm": lambda: InPlaceInstanceNorm(4, affine=True, dtype=torch.float64),
    "group norm": lambda: InPlaceGroupNorm(2, 4, dtype=torch.float64),
}


@pytest.mark.parametrize("name", OF_FOUR)
def test_a_bias_without_a_weight_has_its_gradient_out_of_place(name, device, monkeypatch):
    """torch's group norm raised in backward, and on CUDA all of torch's norms did."""
    module = OF_FOUR[name]().to(device)
    module.weight = None
    nn.init.normal_(module.bias)
    x, results = torch.randn(3, 4, 5, 6, dtype=torch.float64, device=device, requires_grad=True), []
    for disabled in (False, True):
        monkeypatch.setattr(out_of_place, "DISABLED", disabled)
        if disabled:
            monkeypatch.setattr(nodes, "cpp", None)
        given = x * 1
        z = module(given)
        assert (z is given) is not disabled
        results.append([z.detach().clone(), *torch.autograd.grad(z.square().sum(), (x, module.bias))])
    torch.testing.assert_close(*results)


def test_momentum_none_averages_all_batches(device):
    m = InPlaceABN(3, momentum=None, device=device, dtype=torch.float64)
    batches = [torch.randn(8, 3, 4, dtype=torch.float64, device=device) + i for i in range(4)]
    for batch in batches:
        m(batch.clone())
    assert relative_error(m.running_mean, torch.stack([b.mean((0, 2)) for b in batches]).mean(0)) < 1e-12
    assert relative_error(m.running_var, torch.stack([b.var((0, 2)) for b in batches]).mean(0)) < 1e-12
    assert m.num_batches_tracked.item() == 4


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.filterwarnings("ignore:.*not initialised")
def test_attributes_may_be_set_after_construction(module):
    m = module(4)
    x = torch.randn(5, 4, 3)
    m.activation = "identity"
    identity = m(x.clone())
    m.activation, m.activation_param = "leaky_relu", 0.5
    leaky = m(x.clone())
    assert torch.allclose(leaky, nn.functional.leaky_relu(identity, 0.5), atol=1e-6)
    m.eps = 10.0
    assert not torch.allclose(m(x.clone()), leaky, atol=0.1)


def test_group_is_readable_and_settable():
    m = InPlaceABNSync(4)
    assert m.group is None
    marker = object()
    m.set_group(marker)
    assert m.group is marker
    m.group = None
    assert m.group is None
    assert InPlaceABNSync(4, 1e-5, 0.1, True, True, "elu", 1.0, marker).group is marker
    network = nn.Sequential(InPlaceABNSync(4), nn.Sequential(InPlaceABNSync(2), ABN(2)))
    inplace_abn.set_active_group(network, marker)
    assert network[0].group is marker
    assert network[1][0].group is marker


@pytest.mark.parametrize("module", MODULES)
def test_state_dicts_are_exchangeable_with_batch_norm(module):
    bn = nn.BatchNorm2d(4)
    bn(torch.randn(3, 4, 2, 2))
    m = module(4)
    assert list(m.state_dict()) == list(bn.state_dict())
    m.load_state_dict(bn.state_dict())
    for key, value in bn.state_dict().items():
        assert torch.equal(m.state_dict()[key], value)
    fresh = nn.BatchNorm2d(4)
    fresh.load_state_dict(m.state_dict())
    assert fresh.num_batches_tracked.item() == 1


@pytest.mark.parametrize("module", MODULES)
def test_version_1_state_dicts_without_a_counter_load(module):
    m = module(4)
    state = {key: value for key, value in m.state_dict().items() if "num_batches" not in key}
    assert m.state_dict()._metadata[""]["version"] == 2
    m.load_state_dict(dict(state))
    assert m.num_batches_tracked.item() == 0
    state = module(4).state_dict()
    del state["num_batches_tracked"]
    with pytest.raises(RuntimeError, match="num_batches_tracked"):
        m.load_state_dict(state)


@pytest.mark.parametrize("module", MODULES)
def test_modules_copy_pickle_and_move(module):
    m = module(4, activation="elu", activation_param=0.7)
    copied = copy.deepcopy(m)
    buffer = io.BytesIO()
    torch.save(m, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    for other in (copied, loaded):
        assert repr(other) == repr(m)
        assert "elu[0.7]" in repr(other)
    assert module(4, device="meta").weight.device.type == "meta"
    assert module(4, dtype=torch.bfloat16).running_var.dtype == torch.bfloat16
    assert m.double().weight.dtype == torch.float64


class OwnReset(InPlaceABN):
    def reset_parameters(self):
        nn.init.constant_(self.weight, self.activation_param)
        nn.init.constant_(self.bias, self.eps)


class NoRunningStatistics(InPlaceABNSync):
    def reset_parameters(self):
        del self.running_mean, self.running_var, self.num_batches_tracked
        self.marker = self.group


@pytest.mark.filterwarnings("ignore:.*not initialised")
def test_subclasses_may_override_reset_parameters_or_drop_running_statistics():
    m = OwnReset(3, activation_param=0.25)
    assert torch.equal(m.weight, torch.full((3,), 0.25))
    m = NoRunningStatistics(3)
    nn.init.ones_(m.weight)
    nn.init.zeros_(m.bias)
    x = torch.randn(4, 3, 5)
    assert torch.equal(m(x.clone()), m.eval()(x.clone()))


def test_weight_or_bias_alone_may_be_removed():
    for name in ("weight", "bias"):
        m = InPlaceABN(3)
        setattr(m, name, None)
        leaf = torch.randn(4, 3, 5, requires_grad=True)
        m(leaf * 1).square().sum().backward()
        assert all(p.grad is not None for p in m.parameters())
        assert len(list(m.parameters())) == 1


def test_an_uninitialised_process_group_means_local_statistics_and_one_warning():
    distributed.warn_not_initialised.cache_clear()
    x = torch.randn(4, 3, 5)
    m = InPlaceABNSync(3)
    with pytest.warns(UserWarning, match="not initialised") as caught:
        first = m(x.clone())
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        m(x.clone())
    assert torch.equal(first, InPlaceABN(3)(x.clone()))


@pytest.mark.filterwarnings("ignore:.*not initialised")
def test_an_input_that_is_kept_is_not_overwritten_where_statistics_are_local():
    """Without a process group ``keeps_input`` was ignored, and x was overwritten."""
    x = torch.randn(4, 3, 5, requires_grad=True) * 1
    values = x.detach().clone()
    z = inplace_abn.inplace_abn_sync(x, None, None, None, None, activation="identity", keeps_input=True)
    assert z is not x
    assert torch.equal(x, values)
    torch.testing.assert_close(z, torch.nn.functional.batch_norm(values, None, None, training=True))


def test_the_result_is_the_input_overwritten():
    x = torch.randn(4, 3, 5)
    values, version = x.clone(), x._version
    z = InPlaceABN(3)(x)
    assert z is x
    assert not torch.equal(x, values)
    assert x._version > version


def test_a_parametrised_weight_is_used_and_trained():
    class Doubled(torch.nn.Module):
        def forward(self, weight):
            return 2 * weight

    x = torch.randn(2, 3, 4, 4)
    plain, parametrised = (InPlaceABN(3, activation="identity") for _ in range(2))
    with torch.no_grad():
        plain.weight.fill_(2.0)
    torch.nn.utils.parametrize.register_parametrization(parametrised, "weight", Doubled())
    expected, actual = plain(x.clone()), parametrised(x.clone())
    assert torch.equal(actual, expected)
    for z in (expected, actual):
        (z * x).sum().backward()
    gradient = parametrised.parametrizations.weight.original.grad
    torch.testing.assert_close(gradient, 2 * plain.weight.grad)


@pytest.mark.parametrize(
    ("file", "names"),
    [("abn", "ABN InPlaceABN InPlaceABNSync"), ("functions", "inplace_abn inplace_abn_sync"),
     ("group", "active_group set_active_group")],
)  # fmt: skip
def test_files_have_the_names_of_the_pypi_package(file, names):
    module = importlib.import_module(f"inplace_abn.{file}")
    for name in names.split():
        assert getattr(module, name) is getattr(inplace_abn, name)
