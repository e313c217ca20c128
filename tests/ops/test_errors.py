"""Bad input is answered with a clear error before anything is modified."""

import math

import pytest
import torch

from inplace_abn import (
    ABN,
    InPlaceABN,
    InPlaceABNSync,
    InPlaceInstanceNorm,
    guard,
    inplace_abn,
    inplace_abn_sync,
)
from inplace_abn.autograd import nodes
from inplace_abn.kernels import ops
from inplace_abn.settings import Channels


def arguments(device="cpu", **changes):
    values = {
        "x": torch.randn(4, 3, 5, 5, device=device),
        "weight": torch.ones(3, device=device),
        "bias": torch.zeros(3, device=device),
        "running_mean": torch.zeros(3, device=device),
        "running_var": torch.ones(3, device=device),
        "training": True,
    }
    return values | changes


SHARED = torch.randn(4, 3, 5)
ONE_VECTOR = torch.ones(3)


def version_of(t):
    return None if t.is_inference() else t._version


def graph():
    return leaf() * 1


def inference(*shape):
    """A tensor of inference mode. Autograd refuses to save it, so it must be refused before x is overwritten."""
    with torch.inference_mode():
        return torch.ones(shape)


def negative():
    """A tensor with torch's negative bit."""
    return torch.randn(2, 3, 8, dtype=torch.cfloat).conj().imag


def leaf():
    return torch.randn(4, 3, 5, 5, requires_grad=True)


CASES = {
    "integer x": ({"x": torch.ones(4, 3, 5, dtype=torch.int64)}, TypeError, "expected x of dtype .*got Long"),
    "complex x": ({"x": torch.ones(4, 3, 5, dtype=torch.complex64)}, TypeError, "expected x of dtype"),
    "0-d x": ({"x": torch.tensor(1.0)}, ValueError, r"expected x of shape \(batch, channel, \*\)"),
    "1-d x": ({"x": torch.ones(3)}, ValueError, r"expected x of shape \(batch, channel, \*\)"),
    "sparse x": ({"x": torch.eye(3).to_sparse()}, ValueError, "strided x"),
    "wrong channel count": (
        {"x": torch.ones(4, 5, 2)},
        ValueError,
        r"expected x of 3 channels, the size of weight, bias, running_mean, running_var; got x of 5 channels",
    ),
    "wrong channel count and one vector": (
        {"x": torch.ones(4, 5, 2), "bias": None, "running_mean": None, "running_var": None},
        ValueError,
        r"expected weight of shape \(5,\) for x of shape \(4, 5, 2\), got \(3,\)",
    ),
    "weight of two dimensions": ({"weight": torch.ones(3, 1)}, ValueError, "expected weight of shape"),
    "bias too long": ({"bias": torch.ones(4)}, ValueError, "expected bias of shape"),
    "running_mean too long": ({"running_mean": torch.ones(4)}, ValueError, "expected (running_)?mean of shape"),
    "weight on another device": ({"weight": torch.ones(3, device="meta")}, ValueError, "expected weight on cpu"),
    "float64 weight": (
        {"weight": torch.ones(3).double()},
        TypeError,
        r"dtype torch.float32 for x of torch.float32, got torch.float64\. Give",
    ),
    "bfloat16 bias": (
        {"bias": torch.ones(3).bfloat16()},
        TypeError,
        r"dtype torch.float32 for x of torch.float32, got torch.bfloat16\. Give",
    ),
    "leaf": ({"x": leaf()}, ValueError, r"leaf that requires grad.*overwrite_input=False"),
    "view of a leaf": ({"x": leaf().view(4, 3, 25)}, ValueError, r"view of a leaf.*overwrite_input=False"),
    "several views": ({"x": (leaf() * 1).chunk(2)[0]}, ValueError, "several views"),
    "overlap": ({"x": torch.ones(4, 3, 1).expand(4, 3, 5)}, ValueError, r"internal overlap.*x\.clone\(\)"),
    "partial overlap": ({"x": torch.ones(40).as_strided((4, 3, 5), (3, 3, 1))}, ValueError, "internal overlap"),
    "one value per channel": ({"x": torch.ones(1, 3, 1, 1)}, ValueError, "Expected more than 1 value per channel"),
    "running_mean that overlaps itself": (
        {"running_mean": torch.zeros(1).expand(3)},
        ValueError,
        "expected running_mean without internal overlap",
    ),
    "running_var that overlaps itself": (
        {"running_var": torch.ones(1).expand(3)},
        ValueError,
        "expected running_var without internal overlap",
    ),
    "negative bit": ({"x": negative()}, ValueError, r"negative or conjugate bit.*x\.resolve_neg\(\)"),
    "negative bit of the residual": (
        {"x": torch.randn(2, 3, 8), "residual": negative()},
        ValueError,
        r"residual without torch's negative.*residual\.resolve_neg\(\)",
    ),
    "weight that is a part of x": (
        {"x": SHARED, "weight": SHARED[0, :, 0]},
        ValueError,
        r"expected weight in memory of its own.*weight\.clone\(\)",
    ),
    "bias that is a part of x": (
        {"x": SHARED, "bias": SHARED[1, :, 0]},
        ValueError,
        "expected bias in memory of its own",
    ),
    "running_mean that is a part of x": (
        {"x": SHARED, "running_mean": SHARED[1, :, 0]},
        ValueError,
        "expected (running_)?mean in memory of its own",
    ),
    "weight that is the running_mean": (
        {"weight": ONE_VECTOR, "running_mean": ONE_VECTOR},
        ValueError,
        "expected weight in memory of its own, because running_mean",
    ),
    "inference weight": ({"x": graph(), "weight": inference(3)}, ValueError, "weight was made under torch.inference"),
    "inference bias": ({"x": graph(), "bias": inference(3)}, ValueError, "bias was made under torch.inference"),
    "inference residual": (
        {"x": graph(), "residual": inference(4, 3, 5, 5)},
        ValueError,
        "residual was made under torch.inference",
    ),
    "negative bit of running_mean": (
        {"running_mean": torch._neg_view(torch.zeros(3))},
        ValueError,
        r"running_mean without torch's negative",
    ),
    "running_mean alone": ({"running_var": None}, ValueError, "both or neither"),
    "running_var alone": ({"running_mean": None}, ValueError, "both or neither"),
    "eps of zero": ({"eps": 0.0}, ValueError, "eps > 0, got 0"),
    "negative eps": ({"eps": -1e-5}, ValueError, "eps > 0"),
    "NaN eps": ({"eps": math.nan}, ValueError, "eps > 0, got nan"),
    "NaN momentum": ({"momentum": math.nan}, ValueError, "finite momentum, got nan"),
    "unknown activation": ({"activation": "celu"}, ValueError, "expected activation to be one of .*got 'celu'"),
    "negative slope": ({"activation_param": -0.1}, ValueError, "slope >= 0, got -0.1"),
    "NaN slope": ({"activation_param": math.nan}, ValueError, "slope >= 0, got nan"),
    "alpha of zero": ({"activation": "elu", "activation_param": 0.0}, ValueError, "alpha > 0, got 0"),
    "producer that needs its output": (
        {"x": torch.sigmoid(leaf())},
        RuntimeError,
        "inplace_abn.*SigmoidBackward.*overwrite_input",
    ),
}


@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
@pytest.mark.parametrize("function", [inplace_abn, inplace_abn_sync])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:.*not initialised")
def test_bad_input_raises_and_nothing_is_modified(case, function, training):
    changes, error, message = CASES[case]
    in_training_only = "Expected more than 1" in message or ("running" in message and "overlap" in message)
    if not training and (in_training_only or "because running_mean" in message):
        pytest.skip("an error in training only: evaluation takes any number of values, and reads running statistics")
    call = arguments(**changes, training=training)
    tensors = {name: t for name, t in call.items() if isinstance(t, torch.Tensor) and t.device.type != "meta"}
    before = {name: (t.detach().clone(), version_of(t)) for name, t in tensors.items()}
    with pytest.raises(error, match=message):
        function(**call)
    for name, t in tensors.items():
        values, version = before[name]
        assert version_of(t) == version, name
        assert torch.equal(t.detach().to_dense(), values.to_dense()), name


@pytest.mark.parametrize("way", ["C++ node", "Python node", "not trusted", "compiled", "evaluation"])
@pytest.mark.parametrize("kind", [ABN, InPlaceABN, InPlaceABNSync, InPlaceInstanceNorm])
@pytest.mark.filterwarnings("ignore:.*not initialised")
def test_a_module_given_another_number_of_channels_says_that_x_is_wrong(kind, way, monkeypatch):
    """A module made for 8 channels and given 7 asked for a running mean of 7, which is nothing that its user passes."""
    module = kind(8, affine=True, track_running_stats=True)
    call = module.eval() if way == "evaluation" else module
    if way == "Python node":
        monkeypatch.setattr(nodes, "cpp", None)
    elif way == "not trusted":
        monkeypatch.setattr(guard, "decide", lambda *_: (False, Channels()))
    elif way == "compiled":
        torch._dynamo.reset()
        call = torch.compile(module, backend="eager")
    x = torch.randn(2, 7, 4, 4, requires_grad=True) * 1
    before, state = x.detach().clone(), {name: t.clone() for name, t in module.state_dict().items()}
    with pytest.raises(ValueError, match=r"expected x of 8 channels, the size of weight, .*; got x of 7 channels, of"):
        call(x)
    assert torch.equal(x, before)
    assert all(torch.equal(t, state[name]) for name, t in module.state_dict().items())


@pytest.mark.parametrize("module", [ABN, InPlaceABN, InPlaceABNSync])
def test_constructors_refuse_what_calls_would_refuse(module):
    for options, message in [
        ({"activation": "celu"}, "activation"),
        ({"activation": "leaky_relu", "activation_param": -1.0}, "slope"),
        ({"activation": "elu", "activation_param": 0.0}, "alpha"),
        ({"eps": 0.0}, "eps"),
        ({"momentum": math.nan}, "momentum"),
    ]:
        with pytest.raises(ValueError, match=message):
            module(4, **options)


def test_ops_name_themselves_the_argument_and_both_sides():
    z, dz, var = torch.randn(2, 3, 4), torch.randn(2, 3, 4), torch.ones(3)
    tail = (1e-5, False, 1, 0.1)
    with pytest.raises(ValueError, match=r"inplace_abn::backward_reduce: expected dy_act of shape \[2, 3, 4\], got"):
        ops.backward_reduce(z, dz[:1], None, None, None, *tail)
    with pytest.raises(TypeError, match=r"inplace_abn::backward_reduce: expected dy_act of dtype Float, got Double"):
        ops.backward_reduce(z, dz.double(), None, None, None, *tail)
    with pytest.raises(ValueError, match=r"inplace_abn::backward: expected mean_dy and mean_xhat_dy both or neither"):
        ops.backward(z, dz, var, None, 1e-5, False, var, None)
    with pytest.raises(ValueError, match=r"inplace_abn::backward: expected var of shape \(3,\)"):
        ops.backward(z, dz, torch.ones(4), None, 1e-5, False, None, None)
    with pytest.raises(ValueError, match="unknown activation 99"):
        ops.backward_reduce(z, dz, None, None, None, 1e-5, False, 99, 0.1)
    with pytest.raises(ValueError, match="without a weight"):
        ops.local_backward(z, dz, var, None, None, None, *tail, True, dweight=var)
    with pytest.raises(ValueError, match="without a residual"):
        ops.local_backward(z, dz, var, None, None, None, *tail, True, dresidual=torch.empty_like(z))
    with pytest.raises(ValueError, match="expected gathered of shape"):
        ops.combine(torch.ones(2, 4), None, None, 0.1, None)
    with pytest.raises(TypeError, match="expected momentum as one float64 value"):
        ops.combine(torch.ones(2, 5), None, None, 0.1, torch.ones(1))


def test_outputs_that_partly_overlap_inputs_are_refused():
    memory = torch.randn(3 * 3 * 4 + 1)
    z, shifted = memory[:-1].view(3, 3, 4), memory[1:].view(3, 3, 4)
    with pytest.raises(RuntimeError, match="memory"):
        ops.local_backward(z, z.clone(), torch.ones(3), None, None, None, 1e-5, False, 0, 0.0, True, dx=shifted)
    with pytest.raises(RuntimeError, match="memory"):
        ops.backward_reduce(z, z, None, None, None, 1e-5, False, 0, 0.0)
