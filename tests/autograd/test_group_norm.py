"""inplace_group_norm and InPlaceGroupNorm: gradients, errors, what the guard predicts, and reports."""

import pytest
import torch
import torch.nn.functional as F
from cases import ACTIVATIONS, DTYPES, covering, laid_out, parameters, relative_error, stats_dtype, tolerance
from sample_norms import GROUPS, KINDS, correlated, group_norm, group_oracle
from torch import nn
from torch.autograd import gradcheck, gradgradcheck

from inplace_abn import InPlaceGroupNorm, inplace_group_norm, report, revert, set_guard
from inplace_abn.guard import measuring
from inplace_abn.guard.figures import unpacked

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore:.*torch.jit")]
LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


def twins(shape, groups=GROUPS, dtype=torch.float64, **options):
    """Returns torch's module and ours, with the same state."""
    torch.manual_seed(4)
    native = nn.GroupNorm(groups, shape[1], dtype=dtype, **options)
    module = InPlaceGroupNorm(groups, shape[1], dtype=dtype, **options)
    if native.affine:
        nn.init.uniform_(native.weight, 0.5, 1.5)
        nn.init.normal_(native.bias)
    module.load_state_dict(native.state_dict())
    return native, module


def test_arguments_and_defaults_are_torchs():
    module, native = InPlaceGroupNorm(2, 4), nn.GroupNorm(2, 4)
    for name in ("num_groups", "num_channels", "eps", "affine"):
        assert getattr(module, name) == getattr(native, name)
    assert (module.activation, module.activation_param) == ("leaky_relu", 0.01)
    assert module.state_dict().keys() == native.state_dict().keys()
    assert "2, 4, eps=1e-05, affine=True, activation=leaky_relu[0.01]" in repr(module)


@pytest.mark.parametrize("groups", [1, 3, 6])
@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("shape", [(3, 6, 12), (3, 6, 4, 6), (2, 6, 3, 4, 5), (1, 6, 4, 4)], ids=str)
def test_a_module_does_what_torchs_does(shape, affine, groups, device):
    native, module = twins(shape, groups, affine=affine)
    for p in (*native.parameters(), *module.parameters()):
        p.data = p.data.to(device)
    for _ in range(3):
        x = torch.randn(shape, dtype=torch.float64, device=device).mul(2).add(1).requires_grad_()
        own = x.detach().clone().requires_grad_()
        given = own * 1
        z, expected = module(given), F.leaky_relu(native(x), 0.01)
        assert z is given
        dz = correlated(x.detach())
        z.backward(dz)
        expected.backward(dz)
        assert relative_error(z, expected.detach()) < 1e-12
        assert relative_error(own.grad, x.grad) < 1e-10
    for p, other in zip(module.parameters(), native.parameters(), strict=True):
        assert relative_error(p.grad, other.grad) < 1e-10
    assert relative_error(module.eval()(x.detach().clone()), expected.detach()) < 1e-12


@pytest.mark.parametrize("narrow_parameters", [False, True], ids=["fp32 parameters", "x's dtype"])
@pytest.mark.parametrize("with_residual", [False, True], ids=["", "residual"])
@pytest.mark.parametrize(("activation", "param"), ACTIVATIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_are_those_of_the_formula_in_every_dtype(
    dtype, layout, activation, param, with_residual, narrow_parameters, device
):
    shape = (3, 16, 5, 6)
    x, residual = (laid_out(torch.randn(shape, device=device).to(dtype), layout) for _ in range(2))
    weight, bias, *_ = parameters(16, dtype if narrow_parameters else stats_dtype(dtype), device)
    dz = x.abs() + 0.5
    results = []
    for function, wide in ((group_oracle, True), (group_norm, False)):
        given = (x, residual, weight, bias)
        leaves = [(t.double() if wide else t).clone().requires_grad_() for t in given]
        options = {"activation": activation, "activation_param": param}
        if with_residual:
            options["residual"] = leaves[1]
        z = function(leaves[0] * 1, leaves[2], leaves[3], **options)
        z.backward(dz.to(z.dtype))
        results.append([z.detach(), leaves[0].grad, *([leaves[1].grad] if with_residual else []), leaves[3].grad])
        results[-1].append(leaves[2].grad)
    *expected, dweight = results[0]
    *actual, own_dweight = results[1]
    allowed = tolerance(dtype, activation)
    for value, other in zip(actual, expected, strict=True):
        assert relative_error(value, other) < allowed
    # dweight sums terms of both signs. Its error is relative to the size of the terms.
    assert (own_dweight.double() - dweight).abs().max() < 2 * allowed * dz.double().sum((0, 2, 3)).max()


@covering(
    2,
    activation=[a for a in ACTIVATIONS if a != ("leaky_relu", 0.0)],
    layout=["contiguous", "channels_last"],
    affine=["both", "none"],
)
def test_gradcheck_and_gradgradcheck(activation, layout, affine, device):
    shape = (2, 4, 2, 2)
    x, residual = (laid_out(torch.randn(shape, dtype=torch.float64, device=device), layout) for _ in range(2))
    weight, bias, *_ = parameters(shape[1], torch.float64, device, affine)
    leaves = [t.requires_grad_() for t in (x, residual, weight, bias) if t is not None]

    def function(x, residual, weight=None, bias=None):
        return inplace_group_norm(x * 1.0, 2, weight, bias, 1e-3, *activation, residual=residual)

    assert gradcheck(function, leaves)
    assert gradgradcheck(function, leaves)


@pytest.mark.parametrize(
    ("shape", "groups", "words"),
    [
        ((2, 6, 4), 4, "expected num_groups to divide the 6 channels of x, got 4"),
        ((2, 6, 4), 0, "got 0"),
        ((6,), 2, r"expected x of shape \(batch, channel, \*\), got \(6,\)"),
        ((2, 6), 6, "expected x of shape"),
        ((2, 6, 1, 1), 6, "more than 1 spatial element"),
        ((2, 5, 4), 5, r"expected weight of shape \(5,\)"),
    ],
    ids=str,
)
def test_a_wrong_call_is_an_error_and_changes_nothing(shape, groups, words, device):
    x = torch.randn(shape, device=device)
    kept = x.clone()
    with pytest.raises(ValueError, match=words):
        inplace_group_norm(x, groups, torch.ones(6, device=device))
    assert torch.equal(x, kept)


def test_a_wrong_module_is_an_error():
    with pytest.raises(ValueError, match="a multiple of num_groups, got 6 and 4"):
        InPlaceGroupNorm(4, 6)
    with pytest.raises(ValueError, match="expected x of 4 channels"):
        InPlaceGroupNorm(2, 4)(torch.randn(2, 6, 5))


@pytest.mark.parametrize("overwrite_input", [True, False])
def test_the_input_is_overwritten_only_if_it_may_be(overwrite_input, device):
    module = InPlaceGroupNorm(2, 4, overwrite_input=overwrite_input, device=device)
    x = torch.randn(2, 4, 5, device=device, requires_grad=True)
    if overwrite_input:
        with pytest.raises(ValueError, match="a leaf that requires grad"):
            module(x)
        return
    kept = x.detach().clone()
    module(x).sum().backward()
    assert torch.equal(x, kept)


@pytest.mark.parametrize("small", [1.0, 1e-2, 1e-3, 1e-5])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_the_error_that_the_guard_predicts_is_that_of_the_gradient(dtype, groups, small):
    """Where one weight is small, all channels of its group pay for it."""
    torch.manual_seed(3)
    module = InPlaceGroupNorm(groups, 8, activation="silu")
    with torch.no_grad():
        module.weight[0] = small
        module.bias.normal_()
    x = torch.randn(4, 8, 16, 16).to(dtype)
    exact = x.double().requires_grad_()
    weight, bias = (t.detach() for t in (module.weight, module.bias))
    dz = correlated(x)
    F.silu(F.group_norm(exact, groups, weight.double(), bias.double(), 1e-5)).backward(dz.double())
    own = x.clone().requires_grad_()
    # Whatever the guard says.
    inplace_group_norm(own * 1, groups, weight, bias, 1e-5, "silu").backward(dz)
    error = relative_error(own.grad, exact.grad)
    said = unpacked(measuring.measure(module, x, None)).dx.sum(dim=1).max().sqrt().item()
    assert 0.5 * error < said < 2 * error


@pytest.mark.parametrize("activation", ["identity", "leaky_relu", "silu"])
def test_it_is_reverted_to_torchs_norm_and_activation(activation):
    model = nn.Sequential(nn.Conv2d(1, 4, 3), InPlaceGroupNorm(2, 4, activation=activation))
    nn.init.uniform_(model[1].weight, 0.5, 1.5)
    x = torch.randn(2, 1, 8, 8)
    expected = model(x)
    reverted = revert(model)
    norm = reverted[1] if activation == "identity" else reverted[1].norm
    assert type(norm) is nn.GroupNorm
    assert vars(norm).keys() == vars(nn.GroupNorm(2, 4)).keys()
    torch.testing.assert_close(reverted(x), expected)


def test_a_report_counts_it_as_built_in_place():
    assert "1" in str(report(KINDS["group"].net(blocks=1)))


def test_without_the_guard_a_weight_is_never_smaller_than_eps():
    module = InPlaceGroupNorm(2, 4, activation="identity", guard_interval=0)
    set_guard(module, interval=0)
    with torch.no_grad():
        module.weight[0] = 0.0
    z = module(torch.randn(2, 4, 5))
    assert 0 < z[:, 0].abs().max() < 1e-4
