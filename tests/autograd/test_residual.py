"""z = act(BN(x) + residual): results, gradients, reuse of memory, and what is refused."""

import maths
import pytest
import torch
from cases import ACTIVATIONS, DTYPES, TOLERANCE, laid_out, parameters, relative_error, stats_dtype, tolerance
from torch.autograd import gradcheck, gradgradcheck
from torch.utils._python_dispatch import TorchDispatchMode

from inplace_abn import ABN, InPlaceABN, inplace_abn
from inplace_abn.kernels import ops

SHAPE = (4, 6, 7, 5)


def tensors(dtype, layout, device):
    x, residual = (laid_out(torch.randn(SHAPE, device=device).to(dtype), layout) for _ in range(2))
    return x, residual, *parameters(SHAPE[1], stats_dtype(dtype), device)


@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "channel slice", "transposed"])
@pytest.mark.parametrize(("activation", "param"), ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_results_match_the_formulas(dtype, activation, param, layout, training, device):
    x, residual, weight, bias, mean, var = tensors(dtype, layout, device)
    dz = laid_out(torch.rand(SHAPE, device=device).to(dtype), layout)
    settings = {"training": training, "activation": activation, "activation_param": param}

    exact = [t.detach().double().clone().requires_grad_() for t in (x, residual, weight, bias)]
    expected = maths.forward(
        exact[0], exact[2], exact[3], mean.double().clone(), var.double().clone(), residual=exact[1], **settings
    )
    expected.backward(dz.double())

    leaves = [t.detach().clone().requires_grad_() for t in (x, residual, weight, bias)]
    produced = torch.empty_strided(x.shape, x.stride(), dtype=dtype, device=device).copy_(leaves[0])
    z = inplace_abn(produced, leaves[2], leaves[3], mean.clone(), var.clone(), residual=leaves[1], **settings)
    allowed = tolerance(dtype, activation)
    assert relative_error(z, expected) < TOLERANCE[dtype]
    z.backward(dz)
    for name, leaf, other in zip(["dx", "dresidual", "dweight", "dbias"], leaves, exact, strict=True):
        if name == "dweight" and dtype in (torch.bfloat16, torch.float16):
            scale = exact[3].grad.abs().max()
            assert (leaf.grad.double() - other.grad).abs().max() < 2 * allowed * scale
        else:
            assert relative_error(leaf.grad, other.grad) < allowed, name


@pytest.mark.parametrize("frozen", ["", "x", "residual", "weight bias", "x weight bias", "residual weight bias"])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("training", [True, False])
def test_gradients_that_are_not_needed_change_no_other(training, layout, frozen, device):
    x, residual, weight, bias, mean, var = tensors(torch.float64, layout, device)
    named = {"x": x, "residual": residual, "weight": weight, "bias": bias}
    for t in named.values():
        t.requires_grad_()
    maths.forward(x, weight, bias, mean.clone(), var.clone(), training, residual=residual).square().sum().backward()
    leaves = {name: t.detach().clone().requires_grad_(name not in frozen.split()) for name, t in named.items()}
    z = inplace_abn(
        leaves["x"].clone(), leaves["weight"], leaves["bias"], mean, var, training, residual=leaves["residual"]
    )
    z.square().sum().backward()
    for name, leaf in leaves.items():
        assert (leaf.grad is None) == (name in frozen.split())
        if leaf.grad is not None:
            assert relative_error(leaf.grad, named[name].grad) < 1e-10, name


@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
@pytest.mark.parametrize(("activation", "param"), ACTIVATIONS)
def test_gradcheck_and_gradgradcheck(activation, param, training, device):
    _, _, weight, bias, mean, var = tensors(torch.float64, "contiguous", device)
    x, residual = torch.randn(2, 3, 6, 2, dtype=torch.float64, device=device)
    leaves = [t.requires_grad_() for t in (x, weight, bias, residual)]

    def op(x, weight, bias, residual):
        return inplace_abn(
            x * 1.0,
            weight,
            bias,
            mean.clone(),
            var.clone(),
            training,
            activation=activation,
            activation_param=param,
            residual=residual,
        )

    assert gradcheck(op, leaves)
    assert gradgradcheck(op, leaves)


@pytest.mark.parametrize("keep", ["nothing", "gradient", "output", "graph"])
def test_both_gradients_are_written_over_backwards_own_memory_and_nobody_elses(keep, device):
    x, residual, *_ = tensors(torch.float64, "contiguous", device)
    residual.requires_grad_()
    x.requires_grad_()
    calls = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is ops.local_backward:
                calls.append([t.data_ptr() for t in (args[0], args[1], kwargs["dx"], kwargs["dresidual"])])
            return func(*args, **(kwargs or {}))

    z = inplace_abn(x * 1, None, None, None, None, residual=residual)
    kept = []
    if keep == "gradient":
        z.register_hook(kept.append)
    if keep == "output":
        kept.append(z)
    loss = (z * 2).sum()
    values = z.detach().clone()
    del z
    with Record():
        loss.backward(retain_graph=keep == "graph")
    z_pointer, dz_pointer, dx, dresidual = calls[0]
    assert dx != dresidual
    if keep == "nothing":
        assert {dx, dresidual} == {z_pointer, dz_pointer}
    elif keep == "gradient":
        assert z_pointer in (dx, dresidual)
        assert dz_pointer not in (dx, dresidual)
        assert torch.equal(kept[0], torch.full_like(values, 2))
    else:
        assert dz_pointer in (dx, dresidual)
        assert z_pointer not in (dx, dresidual)
        if kept:
            assert torch.equal(kept[0], values)


def test_overlapping_memory_and_tensors_that_do_not_fit_are_refused(device):
    x = torch.randn(4, 6, 5, device=device)
    wide = torch.randn(4, 9, 5, device=device)
    cases = [
        (x, x, "memory of its own"),
        (x, x.view_as(x), "memory of its own"),
        (wide[:, :6], wide[:, 3:], "memory of its own"),
        (x, x[:2].clone(), "expected residual of shape"),
    ]
    for target, residual, message in cases:
        values = target.clone()
        with pytest.raises(ValueError, match=message):
            inplace_abn(target, None, None, None, None, residual=residual)
        assert torch.equal(target, values)
    with pytest.raises(TypeError, match="expected residual of dtype"):
        inplace_abn(x, None, None, None, None, residual=x.double())


def test_a_residual_modified_before_backward_is_noticed(device):
    residual = torch.randn(4, 3, 5, device=device)
    z = inplace_abn(
        torch.randn(4, 3, 5, device=device, requires_grad=True) * 1, None, None, None, None, residual=residual
    )
    residual.add_(1)
    with pytest.raises(RuntimeError, match=r"the residual of an in-place ABN has been modified in place.*filter_fn"):
        z.sum().backward()


def test_modules_take_a_residual(device):
    x, residual = torch.randn(2, 4, 3, 6, device=device)
    plain = ABN(3, activation="relu", device=device)(x, residual)
    inplace = InPlaceABN(3, activation="relu", signed_weight=True, device=device)(x.clone(), residual=residual)
    assert torch.allclose(plain, inplace, atol=1e-6)
