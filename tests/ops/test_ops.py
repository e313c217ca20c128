"""The ops by themselves: what they compute, and the contract of the step-wise ops."""

import pytest
import torch
from cases import (
    ACTIVATIONS,
    ALL_ACTIVATIONS,
    DTYPES,
    TOLERANCE,
    laid_out,
    oracle,
    parameters,
    relative_error,
    stats_dtype,
)
from forward_results import EPS, code, forward_result

from inplace_abn import reference
from inplace_abn.activations import activation_backward
from inplace_abn.kernels import ops

LAYOUTS = ["contiguous", "channels_last", "channel slice", "transposed"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(5, 3), (4, 19, 6, 7), (2, 3, 90, 71), (0, 4, 2), (3, 4, 0)], ids=str)
def test_statistics_are_the_mean_and_biased_variance(shape, dtype, layout, device):
    x = laid_out((3 + torch.randn(shape, device=device)).to(dtype), layout)
    mean, var = ops.statistics(x)
    assert mean.dtype == var.dtype == stats_dtype(dtype)
    if x.numel() == 0:
        assert torch.equal(mean, torch.zeros_like(mean))
        assert torch.equal(var, torch.zeros_like(var))
        return
    tolerance = 1e-13 if dtype == torch.float64 else 1e-6
    assert relative_error(mean, reference.channel_mean(x.double())) < tolerance
    expected = x.double().transpose(0, 1).flatten(1).var(dim=1, unbiased=False)
    assert relative_error(var, expected) < tolerance


@pytest.mark.parametrize(("activation", "param"), ACTIVATIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_backward_reduce_overwrites_y_act_with_xhat_and_dy_act_with_dy(dtype, layout, activation, param, device):
    shape = (4, 6, 9, 5)
    x, z, weight, bias, mean, var = forward_result(shape, dtype, layout, activation, param, device)
    dz = laid_out(torch.rand(shape, device=device).to(dtype), layout)
    dz_before = dz.double().clone()
    addresses, versions = (z.data_ptr(), dz.data_ptr()), (z._version, dz._version)

    sum_dy, sum_xhat_dy = ops.backward_reduce(z, dz, weight, bias, None, EPS, False, code(activation), param)

    centred = x.double() - reference.per_channel(mean, x)
    xhat = centred * reference.per_channel(torch.rsqrt(var.double() + EPS), x)
    y = xhat * reference.per_channel(weight.double().abs() + EPS, x) + reference.per_channel(bias.double(), x)
    dy = activation_backward(y, dz_before, activation, param)
    tolerance = 10 * TOLERANCE[dtype]
    assert relative_error(z, xhat) < tolerance
    assert relative_error(dz, dy) < tolerance
    assert relative_error(sum_dy, reference.channel_sum(dy)) < tolerance
    assert (sum_xhat_dy - reference.channel_sum(xhat * dy)).norm() < tolerance * sum_dy.norm()
    assert addresses == (z.data_ptr(), dz.data_ptr())
    assert z._version > versions[0]
    assert dz._version > versions[1]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_out_of_place_reduce_writes_the_same_values_elsewhere(dtype, layout, device):
    shape = (3, 5, 8, 7)
    _, z, weight, bias, _, _ = forward_result(shape, dtype, layout, "leaky_relu", 0.2, device)
    dz = laid_out(torch.randn(shape, device=device).to(dtype), layout)
    arguments = (weight, bias, None, EPS, False, code("leaky_relu"), 0.2)
    kept = z.clone(), dz.clone()
    xhat, dy = torch.full_like(z, torch.nan), torch.full_like(dz, torch.nan)
    sums = ops.backward_reduce_out(z, dz, *arguments, xhat=xhat, dy=dy)
    assert torch.equal(z, kept[0])
    assert torch.equal(dz, kept[1])
    in_place = ops.backward_reduce(z, dz, *arguments)
    assert torch.equal(z, xhat)
    assert torch.equal(dz, dy)
    for a, b in zip(sums, in_place, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("activation", "param"), ACTIVATIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_step_by_step_backward_equals_the_local_one(layout, activation, param, training, device):
    shape, dtype = (4, 6, 9, 5), torch.float64
    x, z, weight, bias, _, var = forward_result(shape, dtype, layout, activation, param, device)
    dz = laid_out(torch.randn(shape, dtype=dtype, device=device), layout)
    arithmetic = (EPS, False, code(activation), param)
    dx, dweight, dbias = torch.empty_like(dz), torch.empty_like(weight), torch.empty_like(bias)
    ops.local_backward(z, dz, var, weight, bias, None, *arithmetic, training, dx=dx, dweight=dweight, dbias=dbias)

    sum_dy, sum_xhat_dy = ops.backward_reduce(z, dz, weight, bias, None, *arithmetic)
    count = x.numel() / x.shape[1]
    means = (sum_dy / count, sum_xhat_dy / count) if training else (None, None)
    ops.backward(z, dz, var, weight, EPS, False, *means)

    assert relative_error(dz, dx) < 1e-10
    assert relative_error(torch.where(weight < 0, -sum_xhat_dy, sum_xhat_dy), dweight) < 1e-10
    assert relative_error(sum_dy, dbias) < 1e-12


@pytest.mark.parametrize("output", ["dz", "z", "fresh"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_local_backward_may_write_dx_over_either_input(layout, output, device):
    shape = (4, 6, 9, 5)
    _, z, weight, bias, _, var = forward_result(shape, torch.float64, layout, "elu", 1.0, device)
    dz = laid_out(torch.randn(shape, dtype=torch.float64, device=device), layout)
    arguments = (var, weight, bias, None, EPS, False, code("elu"), 1.0, True)
    expected = torch.empty_like(z)
    ops.local_backward(z.clone(), dz.clone(), *arguments, dx=expected)
    dx = {"dz": dz, "z": z, "fresh": torch.full_like(z, torch.nan)}[output]
    ops.local_backward(z, dz, *arguments, dx=dx)
    assert torch.allclose(dx, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("shape", [(4, 6, 9, 5), (2, 70, 3, 3), (2, 3, 75, 67), (50, 5)], ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "channel slice", "transposed"])
@pytest.mark.parametrize(("activation", "param"), [("silu", 0.0), ("leaky_relu", 0.2)])
def test_local_backward_with_memory_for_xhat_gives_the_same(
    activation, param, layout, shape, with_residual, training, device
):
    x, z, weight, bias, _, var = forward_result(shape, torch.float64, layout, activation, param, device)
    residual = torch.zeros_like(x) if with_residual else None
    dz = laid_out(torch.randn(shape, dtype=torch.float64, device=device), layout)
    arguments = (var, weight, bias, residual, EPS, False, code(activation), param, training)

    def outputs(**activations):
        return activations | {"dweight": torch.full_like(weight, torch.nan), "dbias": torch.full_like(bias, torch.nan)}

    fresh = {name: torch.full_like(z, torch.nan) for name in ["dx", "dresidual"][: 1 + with_residual]}
    expected = outputs(**fresh)
    ops.local_backward(z, dz, *arguments, **expected)
    # Backward reuses its buffers like this. With a residual, its gradient goes over dz, and dx over z, which also takes
    # xhat.
    actual = outputs(**({"dx": z, "dresidual": dz} if with_residual else {"dx": dz}))
    ops.local_backward(z, dz, *arguments, **actual, xhat=z)
    for name, value in expected.items():
        assert relative_error(actual[name], value) < 1e-10, name


def test_memory_for_xhat_that_cannot_serve_is_an_error_and_nothing_is_written(device):
    _, z, weight, bias, _, var = forward_result((4, 6, 9, 5), torch.float32, "contiguous", "silu", 0.0, device)
    dz = torch.randn_like(z)
    kept = z.clone(), dz.clone()
    arguments = (var, weight, bias, None, EPS, False, code("silu"), 0.0, True)
    with pytest.raises(ValueError, match="no dx was asked for"):
        ops.local_backward(z, dz, *arguments, dweight=torch.empty_like(weight), xhat=z)
    with pytest.raises(RuntimeError, match=r"overlap|memory"):
        ops.local_backward(z, dz, *arguments, dx=z, xhat=z)
    with pytest.raises(ValueError, match="expected xhat of shape"):
        ops.local_backward(z, dz, *arguments, dx=dz, xhat=z[:1].clone())
    assert torch.equal(z, kept[0])
    assert torch.equal(dz, kept[1])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_combined_statistics_are_those_of_the_whole_batch(dtype, device):
    x = (5 + torch.randn(12, 7, 6, device=device)).to(dtype)
    shares = [x[:3], x[3:3], x[3:4], x[4:]]
    rows = [
        torch.cat([*ops.statistics(s), torch.full((1,), float(s.shape[0] * 6), dtype=dtype, device=device)])
        for s in shares
    ]
    running = torch.zeros(7, dtype=dtype, device=device), torch.ones(7, dtype=dtype, device=device)
    mean, var, count = ops.combine(torch.stack(rows), *running, 0.25, None)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-6
    expected = x.double().transpose(0, 1).flatten(1)
    assert count.item() == 72
    assert relative_error(mean, expected.mean(1)) < tolerance
    assert relative_error(var, expected.var(1, unbiased=False)) < tolerance
    assert relative_error(running[0], 0.25 * expected.mean(1)) < tolerance
    assert relative_error(running[1], 0.75 + 0.25 * expected.var(1)) < tolerance


@pytest.mark.parametrize("strides", ["dense", "every other", "permuted"])
@pytest.mark.parametrize("name", ["statistics", "local_forward", "local_backward"])
def test_running_statistics_and_parameters_may_have_gaps(name, strides, device):
    shape = (3, 4, 6, 8)
    dense = torch.randn(shape, dtype=torch.float64, device=device)
    x = {
        "dense": dense,
        "every other": torch.stack([dense, dense], -1)[..., 0],
        "permuted": dense.permute(2, 0, 3, 1).contiguous().permute(1, 3, 0, 2),
    }[strides]
    assert torch.equal(x, dense)
    weight, bias, mean, var = (torch.rand(4, 2, dtype=torch.float64, device=device)[:, 0] for _ in range(4))
    tail = (EPS, False, code("leaky_relu"), 0.2)

    def run(x, weight, bias, mean, var):
        if name == "statistics":
            return ops.statistics(x)
        x, mean, var = (
            torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device).copy_(t) for t in (x, mean, var)
        )
        _, batch_var = ops.local_forward(x, weight, bias, None, mean, var, 0.1, None, *tail, True)
        if name == "local_forward":
            return x, mean, var
        outputs = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device) for t in (x, weight, bias)]
        names = ["dx", "dweight", "dbias"]
        ops.local_backward(
            x, x * 2, batch_var, weight, bias, None, *tail, True, **dict(zip(names, outputs, strict=True))
        )
        return outputs

    expected = run(dense, *(t.contiguous() for t in (weight, bias, mean, var)))
    for actual, wanted in zip(run(x, weight, bias, mean, var), expected, strict=True):
        assert torch.allclose(actual, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("activation", ["leaky_relu", "silu"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_planes_of_any_length_are_walked_to_their_end(dtype, activation, with_residual, device):
    """Results in place equal those in separate memory, where nothing can be overwritten too early. They also equal
    those in the other memory order."""
    weight, bias, *_ = parameters(17, stats_dtype(dtype), device)
    tail = (EPS, False, code(activation), 0.2)

    def run(x, dz, residual, in_place):
        z = x.clone(memory_format=torch.preserve_format)
        _, var = ops.local_forward(z, weight, bias, residual, None, None, 0.1, None, *tail, True)
        forward = z.clone()
        dy = dz.clone(memory_format=torch.preserve_format)
        memory = {"dx": dy, "xhat": z}
        if residual is not None:
            memory = {"dx": z, "dresidual": dy}
        if not in_place:
            memory = {name: torch.full_like(t, torch.nan) for name, t in memory.items()}
        dweight, dbias = torch.empty_like(weight), torch.empty_like(bias)
        ops.local_backward(z, dy, var, weight, bias, residual, *tail, True, dweight=dweight, dbias=dbias, **memory)
        names = [name for name in memory if name != "xhat"]
        return {"z": forward, "dweight": dweight, "dbias": dbias} | {name: memory[name] for name in names}

    for length in range(1, 71):
        x, dz, residual = (torch.randn(3, 17, length, device=device).to(dtype) for _ in range(3))
        tensors = x, dz, residual if with_residual else None
        actual, apart = run(*tensors, in_place=True), run(*tensors, in_place=False)
        rows = run(*(t if t is None else laid_out(t, "channels_last") for t in tensors), in_place=False)
        for name, value in actual.items():
            assert torch.equal(value, apart[name]), (length, name)
            assert relative_error(value, rows[name].double()) < TOLERANCE[dtype], (length, name)


def test_oracle_agrees_with_torch_batch_norm(device):
    x, dz = torch.randn(2, 4, 3, 5, 6, dtype=torch.float64, device=device)
    weight, bias, mean, var = parameters(3, torch.float64, device)
    leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
    running = mean.clone(), var.clone()
    y = torch.nn.functional.batch_norm(leaves[0], *running, leaves[1].abs() + EPS, leaves[2], True, 0.1, EPS)
    z = torch.nn.functional.leaky_relu(y, 0.3)
    z.backward(dz)
    expected = oracle(x, dz, weight, bias, mean, var, activation_param=0.3)
    for actual, name in [(z, "z"), *zip([t.grad for t in leaves], ["dx", "dweight", "dbias"], strict=True)]:
        assert relative_error(actual, expected[name]) < 1e-12, name
    assert relative_error(running[0], expected["running_mean"]) < 1e-12
    assert relative_error(running[1], expected["running_var"]) < 1e-12


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("activation", "param"), ALL_ACTIVATIONS)
def test_inverse_returns_the_y_of_z(activation, param, dtype, layout, device):
    y = laid_out(torch.linspace(-3, 3, 2 * 5 * 21 * 19, device=device).view(2, 5, 21, 19).to(dtype), layout)
    z, before = laid_out(y, layout), y.clone()
    mean, var = torch.zeros(5, device=device), torch.ones(5, device=device)
    mean, var = mean.to(stats_dtype(dtype)), var.to(stats_dtype(dtype))
    ops.forward(z, mean, var, None, None, None, 1e-30, False, code(activation), param, True)
    stored, version = z.clone(), z._version
    back = ops.inverse(z, code(activation), param)
    assert back.dtype == stats_dtype(dtype)
    assert back.stride() == torch.empty_like(z).stride()
    assert torch.equal(z, stored)
    assert z._version == version
    assert relative_error(back, before.double()) < 10 * TOLERANCE[dtype]


def test_inverse_of_nothing_is_nothing(device):
    assert ops.inverse(torch.empty(2, 0, 3, device=device), code("silu"), 0.0).shape == (2, 0, 3)
