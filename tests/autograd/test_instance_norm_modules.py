"""InPlaceInstanceNorm: state dicts, holders of memory, messages and transforms."""

import logging

import buffers
import fresh
import pytest
import torch
import torch.nn.functional as F
from buffers import kept_gradients, used_by
from cases import covering, parameters, relative_error
from sample_norms import instance_oracle
from test_reuse import REUSE
from torch import nn

from inplace_abn import InPlaceABN, InPlaceInstanceNorm, guard, inplace_instance_norm
from inplace_abn.autograd import nodes, plain
from inplace_abn.settings import Operands, Settings

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore:.*torch.jit")]
NATIVE = {3: nn.InstanceNorm1d, 4: nn.InstanceNorm2d, 5: nn.InstanceNorm3d}
SHAPES = [(3, 5, 12), (3, 5, 4, 6), (2, 5, 3, 4, 5)]


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


@covering(
    2,
    shape=SHAPES,
    affine=[False, True],
    tracking=[False, True],
    momentum=[0.1, 1.0, None],
    training=[True, False],
)
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


@pytest.mark.parametrize("case", REUSE)
def test_memory_is_reused_where_it_can_be(case, monkeypatch, device):
    monkeypatch.setattr(buffers, "inplace_abn", inplace_instance_norm)
    make, expected = REUSE[case]
    kept_gradients.clear()
    assert sorted(used_by(make(device))) == sorted(expected)


def test_gradients_of_gradients_are_those_of_the_formulas(device):
    x = torch.randn(2, 3, 4, 5, dtype=torch.float64, device=device).to(memory_format=torch.channels_last)
    weight, bias, *_ = parameters(3, torch.float64, device)
    results = []
    for function in (instance_oracle, inplace_instance_norm):
        leaves = [t.detach().clone().requires_grad_() for t in (x, weight, bias)]
        z = function(leaves[0] * 1, *leaves[1:], None, None, True, activation="silu", activation_param=0.0)
        gradients = torch.autograd.grad(z.pow(3).sum(), leaves, create_graph=True)
        results.append(torch.autograd.grad(sum(g.square().sum() for g in gradients), leaves))
    torch.testing.assert_close(results[1], results[0], rtol=1e-8, atol=1e-8)


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
    instance_oracle(expected, x.new_ones(3), x.new_zeros(3), None, None, **what).backward(dz)
    settings = Settings("identity", 0.0, 1e-5, True, True, None)
    for function in (
        lambda t: plain.of_samples(t, Operands(None, None), settings),
        lambda t: inplace_instance_norm(t, None, None, None, None, **what),
    ):
        leaf = x.clone().requires_grad_()
        function(leaf * 1).backward(dz)
        torch.testing.assert_close(leaf.grad, expected.grad)
