"""The functional form against the reference in float64, for all shapes, layouts, dtypes and activations."""

import copy

import maths
import pytest
import torch
from cases import (
    ACTIVATIONS,
    ALL_ACTIVATIONS,
    DTYPES,
    LAYOUTS,
    SHAPES,
    TOLERANCE,
    assert_matches,
    covering,
    laid_out,
    oracle,
    parameters,
    relative_error,
    stats_dtype,
    tolerance,
)
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch.autograd import gradcheck

from inplace_abn import inplace_abn


def run(x, dz, weight, bias, running_mean, running_var, **settings):
    """Returns what `cases.oracle` returns, computed by the op. x and dz keep their values and layouts."""
    source = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    leaves = [None if t is None else t.detach().clone().requires_grad_() for t in (weight, bias)]
    running = [t.clone() for t in (running_mean, running_var)]
    # The op gets a tensor with the strides of x.
    produced = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(source)
    z = inplace_abn(produced, *leaves, *running, **settings)
    assert z is produced
    z.backward(dz)
    dweight, dbias = [None if t is None else t.grad for t in leaves]
    return {
        "z": z,
        "dx": source.grad,
        "dweight": dweight,
        "dbias": dbias,
        "running_mean": running[0],
        "running_var": running[1],
    }


@covering(3, shape=SHAPES, layout=LAYOUTS, activation=ACTIVATIONS, training=[True, False])
def test_results_match_the_formulas_in_float64(shape, layout, activation, training, device):
    x = laid_out(torch.randn(shape, dtype=torch.float64, device=device), layout)
    dz = torch.randn_like(x)
    tensors = (x, dz, *parameters(shape[1], torch.float64, device))
    name, param = activation
    settings = {"activation": name, "activation_param": param, "training": training, "momentum": 0.3}
    assert_matches(run(*tensors, **settings), oracle(*tensors, **settings), TOLERANCE[torch.float64])


@covering(
    3,
    dtype=DTYPES[1:],
    shape=[(64, 6), (8, 70, 5, 5), (2, 3, 75, 67)],
    layout=["contiguous", "channels_last", "channel slice"],
    activation=ACTIVATIONS,
    training=[True, False],
    narrow_parameters=[False, True],
)
def test_results_match_the_formulas_in_every_dtype(
    dtype, shape, layout, activation, training, narrow_parameters, device
):
    x = laid_out(torch.randn(shape, device=device).to(dtype), layout)
    dz = torch.randn_like(x)
    weight, bias, *running = parameters(shape[1], stats_dtype(dtype), device)
    # dz has one sign, so that gradients do not cancel by accident. Cancellation would make relative errors meaningless.
    dz = dz.abs()
    if narrow_parameters:
        weight, bias = weight.to(dtype), bias.to(dtype)
        running = [t.to(dtype) for t in running]
    activation, param = activation
    settings = {"activation": activation, "activation_param": param, "training": training}
    tensors = (x, dz, weight, bias, *running)
    actual, expected = run(*tensors, **settings), oracle(*tensors, **settings)
    assert actual["z"].dtype == actual["dx"].dtype == dtype
    assert actual["dweight"].dtype == weight.dtype
    allowed = tolerance(dtype, activation)
    if dtype in (torch.bfloat16, torch.float16):
        # dweight sums terms of both signs, which the rounding of z has changed. Its error is relative to the size of
        # the terms.
        scale = expected["dbias"].abs().max()
        assert (actual["dweight"].double() - expected["dweight"]).abs().max() < allowed * scale
        del expected["dweight"]
    assert relative_error(actual.pop("z"), expected.pop("z")) < TOLERANCE[dtype]
    assert_matches(actual, expected, allowed)


@pytest.mark.parametrize("signed_weight", [False, True])
@pytest.mark.parametrize("affine", ["both", "weight", "bias", "none"])
@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize(("activation", "param"), ACTIVATIONS)
def test_weight_and_bias_are_optional_independently(activation, param, layout, training, affine, signed_weight, device):
    shape = (4, 6, 5, 3)
    x = laid_out(torch.randn(shape, dtype=torch.float64, device=device), layout)
    tensors = (x, torch.randn_like(x), *parameters(shape[1], torch.float64, device, affine))
    settings = {
        "activation": activation,
        "activation_param": param,
        "training": training,
        "signed_weight": signed_weight,
    }
    assert_matches(run(*tensors, **settings), oracle(*tensors, **settings), TOLERANCE[torch.float64])


@pytest.mark.parametrize("affine", ["both", "weight", "bias", "none"])
@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "transposed"])
@pytest.mark.parametrize(("activation", "param"), ALL_ACTIVATIONS)
def test_gradcheck(activation, param, layout, training, affine, device):
    shape = (3, 2, 2, 3)
    weight, bias, mean, var = parameters(shape[1], torch.float64, device, affine)
    x = laid_out(torch.randn(shape, dtype=torch.float64, device=device), layout)
    leaves = [None if t is None else t.requires_grad_() for t in (x, weight, bias)]

    def op(x, weight, bias):
        return inplace_abn(
            x * 1.0, weight, bias, mean.clone(), var.clone(), training, activation=activation, activation_param=param
        )

    assert gradcheck(op, leaves)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_variance_survives_a_mean_that_dwarfs_it(layout, dtype, device):
    shape, mean = (8, 4, 33, 31), 4096.0 if dtype == torch.float32 else 32.0
    x = laid_out((mean + torch.randn(shape, device=device)).to(dtype), layout)
    expected = torch.nn.functional.batch_norm(x.double(), None, None, training=True)
    running = torch.zeros(4, device=device), torch.zeros(4, device=device)
    var = x.double().var(dim=(0, 2, 3))
    inplace_abn(x, None, None, *running, activation="identity", momentum=1.0)
    assert relative_error(running[1], var) < 1e-5
    assert relative_error(x, expected) < TOLERANCE[dtype] * 10


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("shape", [(16, 3, 40, 41), (4, 40, 30, 7), (2, 1, 128, 64), (5000, 7)], ids=str)
def test_results_do_not_depend_on_the_number_of_threads(shape, layout):
    x = laid_out(torch.randn(shape), layout)
    tensors = (x, torch.randn_like(x), *parameters(shape[1], torch.float32))
    results, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(run(*tensors))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        for name, value in results[0].items():
            assert torch.equal(value, other[name]), name


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_frozen_parameters_get_no_gradient_and_change_no_other(layout, device):
    x = laid_out(torch.randn(3, 4, 5, 6, dtype=torch.float64, device=device), layout)
    dz = torch.randn_like(x)
    tensors = parameters(4, torch.float64, device)
    expected = oracle(x, dz, *tensors)
    for frozen in ("x", "weight", "bias", "x weight", "weight bias", "x bias"):
        source = x.clone().requires_grad_("x" not in frozen.split())
        weight = tensors[0].clone().requires_grad_("weight" not in frozen)
        bias = tensors[1].clone().requires_grad_("bias" not in frozen)
        z = inplace_abn(source.clone(), weight, bias, *[t.clone() for t in tensors[2:]])
        z.backward(dz)
        for name, leaf in {"dx": source, "dweight": weight, "dbias": bias}.items():
            if leaf.requires_grad:
                assert relative_error(leaf.grad, expected[name]) < 1e-10, (frozen, name)
            else:
                assert leaf.grad is None


def test_batch_of_zero_and_space_of_zero_work_in_eval(device):
    for shape in [(0, 3, 4, 4), (2, 3, 0, 4), (0, 3)]:
        weight, bias, mean, var = parameters(3, torch.float32, device)
        leaf = torch.empty(shape, device=device, requires_grad=True)
        weight.requires_grad_()
        z = inplace_abn(leaf * 1, weight, bias, mean, var, training=False)
        assert z.shape == shape
        z.sum().backward()
        assert leaf.grad.shape == shape
        assert torch.equal(weight.grad, torch.zeros(3, device=device))


def test_no_running_statistics_means_batch_statistics_in_eval(device):
    x = torch.randn(4, 3, 5, device=device)
    expected = inplace_abn(x.clone(), None, None, None, None, training=True)
    assert torch.equal(inplace_abn(x.clone(), None, None, None, None, training=False), expected)


def test_relu_without_gradient_is_torch_relu_and_with_gradient_zero_to_the_next_layer(device):
    for dtype, bound in [
        (torch.float64, 1e-60),
        (torch.float32, 1e-14),
        (torch.bfloat16, 1e-14),
        (torch.float16, 1e-4),
    ]:
        x = torch.randn(64, 3, 5, 5, device=device).to(dtype)
        with torch.no_grad():
            y = inplace_abn(x.clone(), None, None, None, None, activation="identity")
            assert torch.equal(inplace_abn(x.clone(), None, None, None, None, activation="relu"), torch.relu(y))
        leaf = x.clone().requires_grad_()
        z = inplace_abn(leaf.clone(), None, None, None, None, activation="relu")
        assert (z - torch.relu(y)).abs().max() <= bound * y.abs().max()


@hypothesis_settings(max_examples=60, deadline=None)
@given(
    shape=st.lists(st.integers(1, 9), min_size=2, max_size=5),
    order=st.randoms(use_true_random=False),
    steps=st.lists(st.integers(1, 3), min_size=5, max_size=5),
    training=st.booleans(),
)
def test_any_shape_and_strides_give_the_result_of_the_contiguous_tensor(shape, order, steps, training):
    if training and shape[0] * torch.Size(shape[2:]).numel() < 2:
        shape[0] += 1
    dims = list(range(len(shape)))
    order.shuffle(dims)
    memory = torch.zeros([shape[d] * steps[d] for d in dims], dtype=torch.float64)
    view = memory.permute([dims.index(d) for d in range(len(shape))])
    view = view[tuple(slice(None, None, step) for step in steps[: len(shape)])]
    values = torch.randn(shape, dtype=torch.float64)
    dz = torch.randn(shape, dtype=torch.float64)
    tensors = parameters(shape[1], torch.float64)
    expected = oracle(values, dz, *tensors, training=training)
    actual = run(view.copy_(values), dz, *tensors, training=training)
    assert_matches(actual, expected, 1e-7)


def test_the_call_is_deterministic(device):
    x = torch.randn(8, 5, 17, 19, device=device)
    tensors = (x, torch.randn_like(x), *parameters(5, torch.float32, device))
    first, second = run(*copy.deepcopy(tensors)), run(*tensors)
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def test_the_formulas_take_a_momentum_of_one_value_on_the_device():
    """It had to have no dimension, or the dtype of the running statistics."""
    found = []
    for momentum in (0.25, torch.tensor([0.25], dtype=torch.float64)):
        running_mean, running_var = torch.zeros(3), torch.ones(3)
        x = torch.arange(24.0).view(2, 3, 4)
        maths.forward(x, None, None, running_mean, running_var, momentum=momentum)
        found.append((running_mean, running_var))
    for numbers, tensors in zip(*found, strict=True):
        assert torch.equal(numbers, tensors)
        assert numbers.count_nonzero() == 3
