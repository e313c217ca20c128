"""What torch is told of the ops: their schemas and fakes, versions of what they write, and no node in the graph."""

import pytest
import torch
from cases import relative_error
from forward_results import EPS, code, forward_result

from inplace_abn.kernels import ops


def test_every_write_is_noticed_by_autograd(device):
    x = torch.randn(4, 3, 5, device=device, requires_grad=True)
    y = torch.sigmoid(x)
    ops.local_forward(y.detach(), None, None, None, None, None, 0.1, None, EPS, False, code("identity"), 0.0, True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def op_samples(dtype, device):
    x, z, weight, bias, mean, var = forward_result((3, 4, 5, 2), dtype, "contiguous", "leaky_relu", 0.2, device)
    dz, tail = torch.randn_like(z), (EPS, False, code("leaky_relu"), 0.2)
    running = torch.zeros_like(mean), torch.ones_like(var)
    outputs = {"dx": torch.empty_like(z), "dweight": torch.empty_like(weight), "dbias": torch.empty_like(bias)}
    momentum = torch.tensor(0.5, dtype=torch.float64, device=device)
    gathered = torch.rand(3, 9, dtype=mean.dtype, device=device)
    return {
        "statistics": ((x,), {}),
        "combine": ((gathered, *running, 0.1, None), {}),
        "forward": ((x, mean, var, weight, bias, None, *tail, True), {}),
        "local_forward": ((x, weight, bias, dz, *running, 0.1, None, *tail, True), {}),
        "local_forward, cumulative": ((x, None, None, None, *running, 0.0, momentum, *tail, False), {}),
        "local_forward, no statistics": ((x, weight, None, None, None, None, 0.1, None, *tail, True), {}),
        "backward_reduce": ((z, dz, weight, bias, None, *tail), {}),
        "backward_reduce_out": (
            (z, dz, weight, bias, None, *tail),
            {"xhat": torch.empty_like(z), "dy": torch.empty_like(z)},
        ),
        "backward": ((z, dz, var, weight, EPS, False, mean, var), {}),
        "backward_out": ((z, dz, var, weight, EPS, False, mean, var), {"dx": torch.empty_like(z)}),
        "backward, frozen": ((z, dz, var, None, EPS, False, None, None), {}),
        "local_backward": ((z, dz, var, weight, bias, None, *tail, True), outputs),
        "local_backward, residual": (
            (z, dz, var, weight, bias, x, *tail, True),
            outputs | {"dresidual": torch.empty_like(z)},
        ),
        "local_backward, xhat": (
            (z, dz, var, weight, bias, None, *tail, True),
            outputs | {"xhat": torch.empty_like(z)},
        ),
        "local_backward, dx only": (
            (z, dz, var, weight, bias, None, *tail, False),
            {"dx": torch.empty_like(z)},
        ),
        "rows_backward": (
            (
                x[..., 0, 0].contiguous(),
                dz[..., 0, 0].contiguous(),
                torch.ones_like(var[:3]),
                weight,
                bias,
                EPS,
                True,
                False,
            ),
            {"dx": torch.empty_like(x[..., 0, 0].contiguous()), "dweight": weight.clone(), "dbias": bias.clone()},
        ),
        **per_instance_samples(x, dz, weight, tail),
    }


def per_instance_samples(x, dz, weight, tail):
    weights = weight.repeat(len(x))
    mean, var = ops.statistics(x, 1)
    running, outputs = (mean.clone(), var.clone()), {"dx": torch.empty_like(x), "dweight": torch.empty_like(weights)}
    return {
        "statistics, per instance": ((x, 1), {}),
        "local_forward, per instance": ((x, weights, None, dz, *running, 0.1, None, *tail, True, 1), {}),
        "local_forward_out, per instance": (
            (x, weights, None, None, *running, 0.1, None, *tail, True, 1),
            {"z": torch.empty_like(x)},
        ),
        "local_backward, per instance": ((x, dz, var, weights, None, None, *tail, True, 1), outputs),
        "statistics, of groups": ((x, 2), {}),
        "local_forward, of groups": ((x, weights, None, dz, None, None, 0.1, None, *tail, True, 2), {}),
        "local_backward, of groups": ((x, dz, var, weights, None, None, *tail, True, 2), outputs),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", op_samples(torch.float32, "cpu"))
def test_schemas_and_fakes_tell_the_truth(name, dtype, device):
    args, kwargs = op_samples(dtype, device)[name]
    torch.library.opcheck(getattr(ops, name.split(",")[0]), args, kwargs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", op_samples(torch.float32, "cpu"))
def test_exactly_what_is_written_gets_another_version(name, dtype, device):
    args, kwargs = op_samples(dtype, device)[name]
    op = getattr(ops, name.split(",")[0])
    given = dict(zip([a.name for a in op._schema.arguments], args, strict=False)) | kwargs
    before = {key: t._version for key, t in given.items() if isinstance(t, torch.Tensor)}
    op(*args, **kwargs)
    written = {a.name for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    for key, version in before.items():
        assert (given[key]._version > version) == (key in written), key


@pytest.mark.parametrize("strides", ["dense", "every other"])
def test_a_call_that_fails_changes_neither_values_nor_versions(strides, device):
    memory = torch.randn(4, 3, 10, device=device)
    x = memory if strides == "dense" else memory[..., ::2]
    kept, version = x.clone(), x._version
    statistics = torch.zeros(3, device=device), torch.ones(3, device=device)
    tail = (None, None, None, EPS, False, code("silu"), 0.0, False)
    for wrong, error in [(torch.ones(4), ValueError), (torch.ones(3).double(), TypeError)]:
        with pytest.raises(error, match="inplace_abn::forward: expected var of"):
            ops.forward(x, statistics[0], wrong.to(device), *tail)
        with torch._C._AutoDispatchBelowADInplaceOrView(), pytest.raises((ValueError, RuntimeError)):
            ops.forward(x, statistics[0], wrong.to(device), *tail)
    assert x._version == version
    assert torch.equal(x, kept)


def test_tensors_without_versions_are_written_too(device):
    with torch.inference_mode():
        x = torch.randn(4, 3, 5, device=device)
        expected = torch.nn.functional.silu(torch.nn.functional.batch_norm(x, None, None, training=True))
        running = torch.zeros(3, device=device), torch.ones(3, device=device)
        ops.local_forward(x, None, None, None, *running, 0.1, None, EPS, False, code("silu"), 0.0, False)
        assert relative_error(x, expected) < 1e-6


def test_ops_leave_no_trace_in_the_graph(device):
    """This holds also where the ops call torch's own, to copy what kernels cannot walk, and for silu."""
    leaf = torch.randn(4, 3, 10, device=device, requires_grad=True)
    statistics = torch.zeros(3, device=device), torch.ones(3, device=device)
    for step in (1, 2):
        base = leaf * 1
        node = base.grad_fn
        ops.forward(base[..., ::step], *statistics, None, None, None, EPS, False, code("silu"), 0.0, False)
        assert base.grad_fn is node
        assert torch.is_grad_enabled()
