"""InPlaceInstanceNorm in nets: state dicts, holders of memory, compilers, autocast, checkpoints and transforms."""

import copy
import logging
import pickle
import types

import buffers
import compiled_nets
import fresh
import pytest
import torch
import torch.nn.functional as F
import wired_nets
from buffers import kept_gradients, used_by
from cases import INDUCTOR, parameters, relative_error
from compiled_nets import assert_same, gradients, step
from evaluation import CONTEXTS, evaluate
from maths import exactly
from test_reuse import REUSE
from torch import nn
from torch.utils.checkpoint import checkpoint
from wired_nets import Row
from wirings import WIRINGS

from inplace_abn import InPlaceABN, InPlaceInstanceNorm, guard, inplace_instance_norm, set_guard
from inplace_abn.autograd import nodes, plain
from inplace_abn.settings import Operands, Settings

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore:.*torch.jit")]
NATIVE = {3: nn.InstanceNorm1d, 4: nn.InstanceNorm2d, 5: nn.InstanceNorm3d}
SHAPES = [(3, 5, 12), (3, 5, 4, 6), (2, 5, 3, 4, 5)]


def oracle(x, weight, bias, mean, var, training=True, *, eps=1e-5, activation, activation_param, residual=None):
    """Instance norm by its formula. The second derivatives and channels-last gradients of torch's own are less
    exact."""
    dims = tuple(range(2, x.dim()))
    shape = [1, -1] + [1] * len(dims)
    own_mean, own_var = x.mean(dims, keepdim=True), x.var(dims, unbiased=False, keepdim=True)
    if not training:
        own_mean, own_var = mean.view(shape), var.view(shape)
    y = (x - own_mean) * torch.rsqrt(own_var + eps) * weight.view(shape) + bias.view(shape)
    return exactly(y if residual is None else y + residual, activation, activation_param)


def twins(shape, **options):
    """Returns torch's module and ours, with the same state."""
    torch.manual_seed(4)
    native = NATIVE[len(shape)](shape[1], dtype=torch.float64, **options)
    for t in (native.weight, native.running_var):
        if t is not None:
            nn.init.uniform_(t, 0.5, 1.5)
    for t in (native.bias, native.running_mean):
        if t is not None:
            nn.init.normal_(t)
    ours = InPlaceInstanceNorm(shape[1], dtype=torch.float64, **options)
    ours.load_state_dict(native.state_dict())
    return native, ours


def test_arguments_and_defaults_are_torchs():
    ours, native = InPlaceInstanceNorm(4), nn.InstanceNorm3d(4)
    for name in ("num_features", "eps", "momentum", "affine", "track_running_stats", "weight", "running_mean"):
        assert getattr(ours, name) == getattr(native, name)
    assert (ours.activation, ours.activation_param) == ("leaky_relu", 0.01)
    assert InPlaceInstanceNorm(4, 1e-3, 0.2, True, True, "elu", 1.0).running_var is not None
    assert "leaky_relu[0.01]" in repr(InPlaceInstanceNorm(4))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("momentum", [0.1, 1.0, None])
@pytest.mark.parametrize("tracking", [False, True])
@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_module_does_what_torchs_does(shape, affine, tracking, momentum, training, device):
    native, ours = twins(shape, affine=affine, track_running_stats=tracking, momentum=momentum)
    native, ours = native.to(device).train(training), ours.to(device).train(training)
    for _ in range(3):
        x = torch.randn(shape, dtype=torch.float64, device=device).mul(2).add(1).requires_grad_()
        own = x.detach().clone().requires_grad_()
        z, expected = ours(own * 1), F.leaky_relu(native(x), 0.01)
        dz = torch.randn_like(x) + 2 * x.detach()
        z.backward(dz)
        expected.backward(dz)
    assert relative_error(z, expected.detach()) < 1e-12
    assert relative_error(own.grad, x.grad) < 1e-10
    for p, other in zip(ours.parameters(), native.parameters(), strict=True):
        assert relative_error(p.grad, other.grad) < 1e-10
    torch.testing.assert_close(ours.state_dict(), native.state_dict(), rtol=1e-12, atol=1e-12)
    NATIVE[len(shape)](5, affine=affine, track_running_stats=tracking).load_state_dict(ours.state_dict())


def test_another_number_of_channels_is_a_warning_where_it_makes_no_difference():
    with pytest.warns(UserWarning, match=r"of 4 channels, got \(2, 3, 5\)"):
        z = InPlaceInstanceNorm(4)(torch.randn(2, 3, 5))
    assert z.shape == (2, 3, 5)
    with pytest.raises(ValueError, match=r"expected x of 4 channels"):
        InPlaceInstanceNorm(4, affine=True)(torch.randn(2, 3, 5))
    with pytest.raises(ValueError, match="more than 1 spatial element"):
        InPlaceInstanceNorm(4)(torch.randn(2, 4, 1, 1))


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("loss", ["weighted", "sum"])
@pytest.mark.parametrize("wiring", [wiring for wiring in WIRINGS if wiring != "two-dimensional x"])
def test_however_it_is_wired_gradients_are_right(wiring, loss, layout, monkeypatch, device):
    monkeypatch.setattr(wired_nets, "inplace_abn", inplace_instance_norm)
    monkeypatch.setattr(wired_nets, "maths", types.SimpleNamespace(forward=oracle))
    row = Row(wiring, loss=loss, layout=layout)
    expected, actual = evaluate(row, False, device), evaluate(row, True, device)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("wiring", ["chain", "residual block", "abn(a) + abn(b)", "z + z"])
def test_in_whatever_context_it_is_wired_gradients_are_right(wiring, context, monkeypatch, device):
    monkeypatch.setattr(wired_nets, "inplace_abn", inplace_instance_norm)
    monkeypatch.setattr(wired_nets, "maths", types.SimpleNamespace(forward=oracle))
    row = Row(wiring, context=context)
    expected, actual = evaluate(row, False, device), evaluate(row, True, device)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("case", REUSE)
def test_memory_is_reused_where_it_can_be(case, monkeypatch, device):
    monkeypatch.setattr(buffers, "inplace_abn", inplace_instance_norm)
    make, expected = REUSE[case]
    kept_gradients.clear()
    assert sorted(used_by(make(device))) == sorted(expected)


def net(blocks=3, **options):
    torch.manual_seed(1)
    layers: list[nn.Module] = []
    for inputs, outputs in [(2, 6), (6, 6), (6, 6)][:blocks]:
        layers += [nn.Conv3d(inputs, outputs, 3, padding=1), InPlaceInstanceNorm(outputs, affine=True, **options)]
    return nn.Sequential(*layers, nn.Conv3d(6, 2, 1))


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("tracking", [False, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager", INDUCTOR])
def test_a_net_compiles_in_one_graph_and_trains_as_in_eager(backend, tracking, device):
    # A third block is compiled as the second is.
    eager = net(blocks=2, track_running_stats=tracking).to(device, torch.float64)
    module = copy.deepcopy(eager)
    compiled = torch.compile(module, backend=backend, fullgraph=True)
    x = torch.randn(2, 2, 4, 5, 6, dtype=torch.float64, device=device)
    assert_same(step(compiled, module, x), step(eager, eager, x))
    module.eval()
    torch.testing.assert_close(compiled(x), eager.eval()(x), rtol=1e-9, atol=1e-9)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("wiring", [w for w in compiled_nets.WIRINGS if w not in ("leaf", "view_of_leaf", "chunks")])
def test_compiled_wirings_are_right(wiring, device):
    what = {"activation": "elu", "activation_param": 0.01}

    def ours(x, weight, bias, **options):
        return inplace_instance_norm(x, weight, bias, None, None, **what, **options)

    def expected(x, weight, bias, **options):
        return oracle(x, weight, bias, None, None, **what, **options)

    wired = compiled_nets.WIRINGS[wiring]
    if wiring.startswith("needed_by"):
        pytest.skip("compiled, it is right or refused")
    if wiring == "used_after_being_overwritten":

        def wired(norm, x, *affine):
            z = norm(h := x * 2, *affine)
            return z + (h if norm is ours else z)

    compiled = torch.compile(lambda *leaves: wired(ours, *leaves), backend="aot_eager", fullgraph=True)
    assert_same(gradients(compiled, device), gradients(lambda *leaves: wired(expected, *leaves), device))


def native(module):
    """A copy of ``module`` in which torch's norms, each with a ReLU, replace ours."""
    layers = []
    for layer in module:
        if isinstance(layer, InPlaceInstanceNorm):
            twin = nn.InstanceNorm3d(layer.num_features, affine=True).to(layer.weight)
            twin.load_state_dict(layer.state_dict())
            layers += [twin, nn.ReLU()]
        else:
            layers.append(copy.deepcopy(layer))
    return nn.Sequential(*layers)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_net_trains_under_autocast(dtype, device):
    torch.manual_seed(0)
    module = net(activation="relu").to(device)
    x = torch.randn(2, 2, 6, 6, 6, device=device)
    double = copy.deepcopy(module).double()
    exact = step(double, double, x.double())

    def autocast(module):
        with torch.autocast(device.type, dtype):
            y = module(x)
        assert y.dtype == dtype
        return y.float()

    def errors(module):
        found = step(lambda _: autocast(module), module, x)
        return [relative_error(t, e) for t, e in zip(found[2:], exact[2:], strict=True) if e.norm() > 1e-9]

    # The two nets round in different places, so a few values are on the other side of a kink.
    for ours, torchs in zip(errors(module), errors(native(module)), strict=True):
        assert ours < 1.3 * torchs + 0.03


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_compute_it_again(reentrant, device):
    module = net(track_running_stats=False).to(device, torch.float64)
    x = torch.randn(2, 2, 4, 5, 6, dtype=torch.float64, device=device)
    actual = step(lambda x: checkpoint(module, x, use_reentrant=reentrant), module, x)
    assert_same(actual, step(module, module, x))


def test_gradients_of_gradients_are_those_of_the_formulas(device):
    x = torch.randn(2, 3, 4, 5, dtype=torch.float64, device=device).to(memory_format=torch.channels_last)
    weight, bias, *_ = parameters(3, torch.float64, device)
    results = []
    for function in (oracle, inplace_instance_norm):
        leaves = [t.detach().clone().requires_grad_() for t in (x, weight, bias)]
        z = function(leaves[0] * 1, *leaves[1:], None, None, True, activation="silu", activation_param=0.0)
        gradients = torch.autograd.grad(z.pow(3).sum(), leaves, create_graph=True)
        results.append(torch.autograd.grad(sum(g.square().sum() for g in gradients), leaves))
    torch.testing.assert_close(results[1], results[0], rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last_3d])
@pytest.mark.parametrize("why", ["small weights", "saturated"])
def test_while_the_output_does_not_tell_the_input_it_is_torchs(why, layout, logged, device):
    records = logged(logging.INFO)
    activation = "elu" if why == "saturated" else "leaky_relu"
    module = InPlaceInstanceNorm(4, affine=True, activation=activation, device=device)
    with torch.no_grad():
        module.weight.fill_(30.0 if why == "saturated" else 0.0)
    twin = nn.InstanceNorm3d(4, affine=True, device=device)
    twin.load_state_dict(module.state_dict())
    x = torch.randn(2, 4, 5, 6, 7, device=device).contiguous(memory_format=layout).requires_grad_()
    own = x.detach().clone().requires_grad_()
    given = own * 1
    z = module(given)
    assert z.data_ptr() != given.data_ptr()
    assert any("its input is not recoverable from its output" in record.getMessage() for record in records)
    assert module.shares_saved() == {torch.float32: 1.0}
    y = twin(x)
    expected = F.elu(y, 0.01) if why == "saturated" else F.leaky_relu(y)
    dz = torch.randn_like(x) + 2 * x.detach()
    z.backward(dz)
    expected.backward(dz)
    for a, e in ((z, expected.detach()), (own.grad, x.grad), (module.weight.grad, twin.weight.grad)):
        assert torch.equal(a, e) if not e.any() else relative_error(a, e.double()) < 1e-5
    set_guard(module, interval=0)
    assert (module(again := own * 1) is again) == (why == "saturated" or not again.is_cpu)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last_3d])
@pytest.mark.parametrize("small", [0.0, 3e-5])
def test_where_the_output_does_not_tell_some_channels_these_are_saved(small, layout, logged, device):
    records = logged(logging.INFO)
    module = InPlaceInstanceNorm(4, affine=True, device=device)
    with torch.no_grad():
        module.weight[2], module.bias[2] = small, 0.5
    twin = nn.InstanceNorm3d(4, affine=True, device=device, dtype=torch.float64)
    twin.load_state_dict(module.state_dict())
    with torch.no_grad():
        # In place the magnitude is at least eps.
        twin.weight[2] = max(small, module.eps)
    x = torch.randn(2, 4, 5, 6, 7, device=device).contiguous(memory_format=layout).requires_grad_()
    own, exact = x.detach().clone().requires_grad_(), x.detach().double().requires_grad_()
    given = own * 1
    z = module(given)
    assert z is given
    assert module.shares_saved() == {torch.float32: 0.25}
    assert guard.mode_of(module, torch.float32).decisions[-1].verbatim.numbers == (2,)
    assert not records
    expected = F.leaky_relu(twin(exact))
    kept, dz = z.detach().clone(), torch.randn_like(x) + 2 * x.detach()
    z.backward(dz)
    expected.backward(dz.double())
    assert relative_error(kept, expected.detach()) < 1e-5
    for actual, theirs in ((own, exact), (module.weight, twin.weight), (module.bias, twin.bias)):
        assert relative_error(actual.grad, theirs.grad) < 1e-5
    assert relative_error(own.grad[:, 2], exact.grad[:, 2]) < 1e-5
    assert relative_error(module.weight.grad[2:3], twin.weight.grad[2:3]) < 1e-5


def test_the_guard_names_the_channel_and_not_the_sample(logged):
    records = logged(logging.INFO)
    module = InPlaceInstanceNorm(4, affine=True)
    nn.init.constant_(module.bias, 10.0)
    with torch.no_grad():
        module.weight[3] = 1e-4
    module(torch.randn(3, 4, 9, 9, requires_grad=True) * 1)
    assert guard.mode_of(module, torch.float32).decisions[-1].verbatim.numbers == (3,)
    assert not records
    nn.init.constant_(module.weight[:3], 2e-4)
    module(torch.randn(3, 4, 9, 9, requires_grad=True) * 1)
    assert any("in channel 3" in record.getMessage() for record in records)


def test_a_constant_sample_is_normalised_to_its_bias(device):
    """A constant sample is a patch of background. Its variance is zero, and so is its share of the weight's
    gradient."""
    x = torch.randn(2, 3, 4, 4, dtype=torch.float64, device=device)
    x[1] = 7.0
    native, ours = twins(x.shape, affine=True)
    native, ours = native.to(device), ours.to(device)
    own, x = x.clone().requires_grad_(), x.requires_grad_()
    z, expected = ours(own * 1), F.leaky_relu(native(x), 0.01)
    dz = torch.randn_like(x)
    z.backward(dz)
    expected.backward(dz)
    torch.testing.assert_close(z, expected)
    torch.testing.assert_close(own.grad, x.grad, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(ours.weight.grad, native.weight.grad)


def test_modules_are_copied_pickled_and_scripted_state_stays(device):
    module = InPlaceInstanceNorm(4, affine=True, track_running_stats=True, overwrite_input=False, device=device)
    x = torch.randn(2, 4, 5, 6, device=device)
    module(x)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(other.eval()(x), module.eval()(x))


def test_it_is_no_module_whose_statistics_are_synchronised():
    assert not issubclass(InPlaceInstanceNorm, InPlaceABN)


def test_switched_off_it_is_out_of_place():
    code = (
        "import torch; from inplace_abn import InPlaceInstanceNorm as N; x = torch.randn(2, 3, 5); y = x.clone();"
        "z = N(3)(x); assert torch.equal(x, y) and z is not x;"
        "torch.testing.assert_close(z, torch.nn.functional.leaky_relu(torch.nn.InstanceNorm1d(3)(x)))"
    )
    result = fresh.run_code(code, INPLACE_ABN_DISABLE="1")
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tracers_record_torchs_own_ops(shape):
    module = InPlaceInstanceNorm(5, affine=True)
    exported = torch.export.export(module, (torch.randn(shape),))
    assert not any("inplace_abn" in str(node.target) for node in exported.graph.nodes)
    x = torch.randn(shape)
    torch.testing.assert_close(exported.module()(x), module(x.clone()))


def test_the_node_in_cpp_takes_it_where_there_is_one(monkeypatch):
    if nodes.cpp is None:
        pytest.skip("the node is in Python")
    z = InPlaceInstanceNorm(3)(torch.randn(2, 3, 5, requires_grad=True) * 1)
    z = InPlaceInstanceNorm(3)(torch.randn(2, 3, 5, requires_grad=True) * 1)
    assert "InPlaceABNFunction" in z.grad_fn.name()
    assert not isinstance(z.grad_fn, torch.autograd.function.BackwardCFunction)


def test_transforms_of_torch_func_are_right_or_refused(device):
    module = InPlaceInstanceNorm(3, affine=True, track_running_stats=True, dtype=torch.float64, device=device)
    x = torch.randn(2, 3, 4, 5, dtype=torch.float64, device=device)
    state = {name: t.detach().clone() for name, t in module.state_dict().items()}

    def loss(weight, state, x):
        values = {**state, "weight": weight}
        return torch.func.functional_call(module, values, (x * 1,)).pow(3).sum(), state

    gradient, (_, updated) = torch.func.grad_and_value(loss, has_aux=True)(state["weight"], state, x)
    module(x.clone()).pow(3).sum().backward()
    torch.testing.assert_close(gradient, module.weight.grad)
    torch.testing.assert_close(updated["running_var"], module.running_var)
    given = x.clone()
    with pytest.raises(RuntimeError, match="captured"):
        torch.func.grad(lambda weight: torch.func.functional_call(module, {"weight": weight}, (given,)).sum())(
            state["weight"]
        )
    assert torch.equal(given, x)
    with pytest.raises(ValueError, match="vmap"):
        torch.func.vmap(lambda x: inplace_instance_norm(x, None, None, None, None))(torch.randn(2, 2, 3, 4))


@pytest.mark.parametrize("trusted", [True, False])
@pytest.mark.parametrize("shape", [(3, 4), (3, 4, 1), (3, 4, 1, 1)], ids=str)
def test_evaluation_with_running_statistics_takes_any_number_of_values(shape, trusted, device):
    module = InPlaceInstanceNorm(4, affine=True, track_running_stats=True, device=device).eval()
    if not trusted:
        nn.init.zeros_(module.weight)
    x = torch.randn(shape, device=device, requires_grad=True)
    z = module(x * 1)
    vectors = (module.running_mean, module.running_var, module.weight, module.bias)
    torch.testing.assert_close(z, F.leaky_relu(F.instance_norm(x, *vectors, False)))
    z.sum().backward()
    assert x.grad.isfinite().all()


def test_one_channels_last_sample_has_the_gradient_of_the_formulas_in_place_or_not(device):
    """On the CPU, torch's own instance norm has another gradient."""
    x = torch.randn(1, 3, 4, 5, dtype=torch.float64, device=device).contiguous(memory_format=torch.channels_last)
    dz, what = torch.randn_like(x), {"activation": "identity", "activation_param": 0.0}
    expected = x.clone().requires_grad_()
    oracle(expected, x.new_ones(3), x.new_zeros(3), None, None, **what).backward(dz)
    settings = Settings("identity", 0.0, 1e-5, True, True, None)
    for function in (
        lambda t: plain.of_samples(t, Operands(None, None), settings),
        lambda t: inplace_instance_norm(t, None, None, None, None, **what),
    ):
        leaf = x.clone().requires_grad_()
        function(leaf * 1).backward(dz)
        torch.testing.assert_close(leaf.grad, expected.grad)
