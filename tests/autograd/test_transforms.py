"""torch.func, torch.export and torch.jit.trace: the same results as eager; torch.library.opcheck of the ops."""

import maths
import pytest
import torch
from cases import parameters
from compiled_nets import SHAPE, WIRINGS, abn, assert_same, drawn, expected_abn, net
from torch import nn
from torch.library import opcheck

from inplace_abn import InPlaceABN, inplace_abn
from inplace_abn.kernels import ops
from inplace_abn.settings import MAGNITUDE, Channels

pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.filterwarnings("ignore:.*torch.jit"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec"),
]


# --- torch.func ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wiring", WIRINGS)
def test_wirings_under_grad_transforms_are_right_or_refused(wiring, device):
    leaves = drawn(device)

    def loss(abn):
        def f(*leaves):
            y = WIRINGS[wiring](abn, *leaves)
            return (y * y.detach().cos()).sum()

        return torch.func.grad(f, argnums=(0, 1, 2))

    try:
        actual = loss(abn)(*leaves)
    except (RuntimeError, ValueError) as error:
        assert wiring not in ("used_after_being_overwritten", "part", "with_residual")
        assert "inplace" in str(error)
    else:
        assert_same(actual, loss(expected_abn)(*leaves))


def test_functional_call_and_grad(device):
    module = net(device).eval()
    x = torch.randn(SHAPE, dtype=torch.float64, device=device)
    values = {name: t.detach() for name, t in module.named_parameters()}

    def loss(values):
        return torch.func.functional_call(module, values, (x,)).square().sum()

    actual, value = torch.func.grad_and_value(loss)(values)
    expected = torch.autograd.grad(module(x).square().sum(), list(module.parameters()))
    assert_same(list(actual.values()), list(expected))
    assert_same(value, module(x).square().sum().detach())


def test_functional_call_updates_the_statistics_it_is_given(device):
    module = nn.Sequential(nn.Conv2d(6, 6, 1), InPlaceABN(6)).to(device, torch.float64)
    x = torch.randn(SHAPE, dtype=torch.float64, device=device)
    state = {name: t.detach().clone() for name, t in module.state_dict().items()}
    before = {name: t.clone() for name, t in module.state_dict().items()}
    y = torch.func.functional_call(module, state, (x,))
    torch.testing.assert_close(dict(module.state_dict()), before, rtol=0, atol=0)
    assert_same(y, module(x))
    assert_same(state, dict(module.state_dict()))


@pytest.mark.parametrize("argnums", [0, 1, 2, (0, 1, 2)])
@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
def test_grad_and_vjp_of_the_functional_form(training, argnums, device):
    x, weight, bias = drawn(device)
    mean, var = parameters(SHAPE[1], torch.float64, device)[2:]

    def loss(function):
        def f(x, weight, bias):
            return function(x * 1, weight, bias, mean.clone(), var.clone(), training).pow(3).sum()

        return f

    for transform in (torch.func.grad, lambda f, n: lambda *t: torch.func.vjp(f, *t)[1](torch.ones_like(t[0].sum()))):
        actual, expected = (transform(loss(f), argnums)(x, weight, bias) for f in (inplace_abn, maths.forward))
        assert_same(actual, expected)


def test_gradients_in_batches_are_an_error(device):
    x = drawn(device)[0]

    def f(x):
        return inplace_abn(x * 1, None, None, None, None).square().sum((1, 2, 3))

    for transform in (torch.func.jacrev, torch.func.jacfwd, torch.func.hessian, torch.func.vmap):
        with pytest.raises((RuntimeError, ValueError), match="inplace_abn"):
            transform(f)(x)


# --- torch.export ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strict", [False, True])
def test_a_net_in_eval_mode_exports_with_a_dynamic_batch(strict, device):
    module = net(device).eval()
    x = torch.randn(SHAPE, dtype=torch.float64, device=device)
    # On CUDA torch's batch norm chooses its kernel by the batch, with this limit.
    samples = torch.export.Dim("samples", max=65535 if device.type == "cuda" else None)
    with torch.no_grad():
        exported = torch.export.export(module, (x,), dynamic_shapes=({0: samples},), strict=strict)
        names = {str(node.target) for node in exported.graph.nodes}
        assert not [name for name in names if "inplace_abn" in name]
        for batch in (4, 7):
            x = torch.randn(batch, *SHAPE[1:], dtype=torch.float64, device=device)
            assert_same(exported.module()(x.clone()), module(x.clone()))
        decomposed = exported.run_decompositions()
        assert_same(decomposed.module()(x.clone()), module(x.clone()))


def test_an_exported_net_can_be_saved_and_loaded(tmp_path, device):
    module = net(device).eval()
    x = torch.randn(SHAPE, dtype=torch.float64, device=device)
    with torch.no_grad():
        torch.export.save(torch.export.export(module, (x,)), tmp_path / "net.pt2")
        assert_same(torch.export.load(tmp_path / "net.pt2").module()(x.clone()), module(x.clone()))


def test_jit_trace_of_a_net_in_eval_mode(device):
    module = net(device).eval()
    x = torch.randn(SHAPE, dtype=torch.float64, device=device)
    with torch.no_grad():
        traced = torch.jit.trace(module, (x.clone(),))
        y = torch.randn(SHAPE, dtype=torch.float64, device=device)
        assert_same(traced(y.clone()), module(y.clone()))


# --- The ops ---------------------------------------------------------------------------------------------------------


def op_arguments(name, device, dtype):
    """Arguments of an op, by its schema."""
    x, weight, bias = (t.to(dtype) for t in drawn(device))
    x = x.flatten(2)[..., 0].contiguous() if name == "rows_backward" else x
    mean, var = (t.to(dtype) for t in parameters(SHAPE[1], torch.float64, device)[2:])
    channels = SHAPE[1]
    known = {
        "x": x,
        "y_act": x,
        "xhat": x,
        "dy_act": torch.randn_like(x),
        "dy": torch.randn_like(x),
        "weight": weight,
        "bias": bias,
        "residual": torch.randn_like(x),
        "mean": mean,
        "var": var,
        "running_mean": mean.clone(),
        "running_var": var.clone(),
        "gathered": torch.rand(3, 2 * channels + 1, dtype=dtype, device=device) + 2,
        "mean_dy": mean.clone(),
        "mean_xhat_dy": var.clone(),
        "momentum": 0.1,
        "momentum_tensor": None,
        "eps": 1e-5,
        "scale": MAGNITUDE,
        "activation": 1,
        "activation_param": 0.1,
        "invertible": True,
        "training": True,
        "shared": 0,
        "dx": torch.empty_like(x),
        "dweight": torch.empty_like(weight),
        "dbias": torch.empty_like(bias),
        "dresidual": torch.empty_like(x),
        "y": x,
        "rstd": torch.ones(len(x), dtype=dtype, device=device),
        "centred": True,
        "is_xhat": False,
        "z": x if name == "inverse" else torch.empty_like(x),
        "rows": Channels([1], channels).rows(torch.device(device)),
        "verbatim": torch.randn_like(x[:, :1]),
    }
    schema = getattr(ops, name)._schema
    written_out = {"xhat", "dy"} if name == "backward_reduce_out" else set()
    values = {
        argument.name: torch.empty_like(x) if argument.name in written_out else known[argument.name]
        for argument in schema.arguments
    }
    positional = [values[a.name] for a in schema.arguments if not a.kwarg_only]
    return tuple(positional), {a.name: values[a.name] for a in schema.arguments if a.kwarg_only}


OPS = ops.NAMES


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", OPS)
def test_opcheck(name, dtype, device):
    args, kwargs = op_arguments(name, device, dtype)
    opcheck(getattr(ops, name), args, kwargs)


@pytest.mark.parametrize("name", OPS)
def test_opcheck_without_optional_arguments(name, device):
    args, kwargs = op_arguments(name, device, torch.float32)
    schema = getattr(ops, name)._schema.arguments
    optional = {a.name for a in schema if isinstance(a.type, torch._C.OptionalType)}
    args = tuple(None if a.name in optional else value for a, value in zip(schema, args, strict=False))
    kwargs = {k: v if k == "dx" or k not in optional else None for k, v in kwargs.items()}
    opcheck(getattr(ops, name), args, kwargs)
