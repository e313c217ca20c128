"""Tests that need a CUDA device: sizes past 2^31, streams, graphs, synchronisation and mixed devices.

Values and gradients on CUDA are tested together with those on the CPU, by the fixture ``device``.
"""

import pytest
import torch
import torch.nn.functional as F
from cases import ALL_ACTIVATIONS, DTYPES, TOLERANCE, relative_error
from nets import inplace_norm, resnet

from inplace_abn import InPlaceABN, inplace_abn
from inplace_abn.activations import find
from inplace_abn.kernels import ops

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(not ops.with_cuda, reason="built without CUDA"),
]

CUDA = torch.device("cuda")


def step(norm, x, dz):
    """Returns z and the gradients of x, weight and bias, for fresh leaves."""
    leaf = x.detach().clone().requires_grad_()
    for parameter in norm.parameters():
        parameter.grad = None
    z = norm(leaf * 1)
    z.backward(dz)
    return [t.detach().clone() for t in (z, leaf.grad, *(p.grad for p in norm.parameters()))]


def make(channels, activation="leaky_relu", dtype=torch.float32, **options):
    norm = InPlaceABN(channels, activation=activation, **options).to(CUDA, dtype)
    with torch.no_grad():
        norm.weight.uniform_(0.5, 1.5)
        norm.bias.normal_(0, 0.5)
    return norm


def channel_slice(t, memory_format):
    """A slice that does not start where a vector starts. Other channels follow it."""
    return F.pad(t, (0, 0, 0, 0, 1, 2)).clone(memory_format=memory_format)[:, 1:-2]


VIEWS = {
    "contiguous": lambda t: t.clone(),
    "channels_last": lambda t: t.clone(memory_format=torch.channels_last),
    "slice": lambda t: channel_slice(t, torch.contiguous_format),
    "channels_last slice": lambda t: channel_slice(t, torch.channels_last),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("with_residual", [False, True], ids=["alone", "residual"])
@pytest.mark.parametrize(("activation", "param"), ALL_ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_small_tensors_of_any_alignment_agree_with_the_cpu(dtype, activation, param, with_residual, view):
    for shape in [(3, 16, 9, 7), (5, 19, 8, 8), (2, 3, 65, 64)]:
        x, dz, added = (torch.randn(shape, dtype=torch.float64).to(dtype) for _ in range(3))
        weight, bias = torch.rand(shape[1]).to(dtype) + 0.5, torch.randn(shape[1]).to(dtype)
        results = []
        for device in ("cpu", CUDA):
            z, dx = VIEWS[view](x.to(device)), VIEWS[view](dz.to(device))
            w, b = weight.to(device), bias.to(device)
            residual = VIEWS[view](added.to(device)) if with_residual else None
            arithmetic = (1e-3, False, find(activation).code, param)
            _, var = ops.local_forward(z, w, b, residual, None, None, 0.0, None, *arithmetic, True)
            outputs = {"dx": dx, "dweight": torch.empty_like(w), "dbias": torch.empty_like(b)}
            if residual is not None:
                outputs["dresidual"] = torch.empty_like(z)
            forward = z.clone()
            ops.local_backward(z, dx, var, w, b, residual, *arithmetic, True, **outputs)
            results.append([t.cpu().double() for t in (forward, *outputs.values())])
        for on_cpu, on_cuda in zip(*results, strict=True):
            assert relative_error(on_cuda, on_cpu) < TOLERANCE[dtype]


# (memory order, shape, how often the first sample is repeated along the batch)
HUGE = {
    "planes": (lambda t: t, (1, 64, 512, 512), 129),
    "rows": (lambda t: t.to(memory_format=torch.channels_last), (1, 64, 512, 512), 129),
    "one plane": (lambda t: t, (1, 1, 2**31 + 2**20 + 3), 1),
    "many rows": (lambda t: t, (2**31 + 2**20 + 3, 1), 1),
}


@pytest.mark.slow
@pytest.mark.huge
@pytest.mark.parametrize("case", HUGE)
def test_more_elements_than_32_bits_can_count(case):
    arrange, shape, repeat = HUGE[case]
    elements = torch.Size(shape).numel() * repeat
    assert elements > 2**31
    free, _ = torch.cuda.mem_get_info()
    if free < 8 * 2 * elements:
        pytest.skip(f"needs {8 * 2 * elements / 2**30:.0f} GiB of free device memory, there are {free / 2**30:.0f}")
    period = 2**20 if repeat == 1 else torch.Size(shape).numel()
    values, gradients = (torch.randn(period, device=CUDA).bfloat16() for _ in range(2))

    def fill(pattern):
        if repeat > 1:
            return arrange(pattern.view(shape).expand(repeat, *shape[1:]).contiguous())
        t = torch.empty(elements, dtype=torch.bfloat16, device=CUDA)
        whole = elements // period * period
        t[:whole].view(-1, period).copy_(pattern.expand(elements // period, period))
        t[whole:] = pattern[: elements - whole]
        return t.view(shape)

    def pieces(t):
        """The first and the last sample, or period."""
        if repeat > 1:
            return t[0], t[-1]
        flat = t.view(-1)
        last = (elements // period - 1) * period
        return flat[:period], flat[last : last + period]

    x, dz = fill(values), fill(gradients)
    channels = shape[1]
    weight, bias = torch.ones(channels, device=CUDA), torch.zeros(channels, device=CUDA)
    arithmetic = (1e-5, False, find("leaky_relu").code, 0.2)
    expected_mean, expected_var = ops.statistics(values.view(shape) if repeat > 1 else values.view(1, 1, period))
    mean, var = ops.local_forward(x, weight, bias, None, None, None, 0.0, None, *arithmetic, True)
    torch.testing.assert_close(mean, expected_mean, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(var, expected_var, rtol=1e-4, atol=1e-5)
    first, last = pieces(x)
    assert torch.equal(first, last)
    sample = values.view(shape)[0] if repeat > 1 else values.view(1, period)
    y = (sample.double().view(channels, -1) - mean.double()[:, None]) / (var.double()[:, None] + 1e-5).sqrt()
    assert relative_error(last.double().reshape(channels, -1), F.leaky_relu(y, 0.2)) < TOLERANCE[torch.bfloat16]

    dbias = torch.empty_like(bias)
    ops.local_backward(x, dz, var, weight, bias, None, *arithmetic, True, dx=dz, dbias=dbias)
    first, last = pieces(dz)
    assert torch.equal(first, last)
    dy = (gradients.double().view(channels, -1)) * torch.where(y > 0, 1.0, 0.2)
    xhat = y
    dx = (dy - dy.mean(1, True) - xhat * (dy * xhat).mean(1, True)) / (var.double()[:, None] + 1e-5).sqrt()
    assert relative_error(last.double().reshape(channels, -1), dx) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_results_are_the_same_in_every_run(layout):
    norm = make(64, "elu")
    x, dz = (torch.randn(8, 64, 57, 57, device=CUDA).to(memory_format=layout) for _ in range(2))
    first = step(norm, x, dz)
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(first, step(norm, x, dz), strict=True))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_tensors_larger_than_the_cache_agree_with_float64(layout):
    # The second pass reads most of such tensors from device memory again.
    cache = torch.cuda.get_device_properties(CUDA).L2_cache_size
    channels, side = 1024, 32
    batch = max(2, 2 * cache // (channels * side * side * 4) + 1)
    norm = make(channels)
    x, dz = (torch.randn(batch, channels, side, side, device=CUDA).to(memory_format=layout) for _ in range(2))
    actual = step(norm, x, dz)
    exact = make(channels, dtype=torch.float64)
    exact.load_state_dict({k: v.double() if v.is_floating_point() else v for k, v in norm.state_dict().items()})
    expected = step(exact, x.double(), dz.double())
    for a, b in zip(actual, expected, strict=True):
        assert relative_error(a, b) < 1e-4


def test_work_goes_to_the_current_stream():
    norm = make(8)
    x, dz = (torch.randn(4, 8, 33, 33, device=CUDA) for _ in range(2))
    expected = step(norm, x, dz)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        late = torch.zeros_like(x)
        torch.cuda._sleep(200_000_000)
        late.copy_(x)
        actual = step(norm, late, dz)
    # Work on the default stream would have seen the zeros.
    stream.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("training", [True, False])
def test_nothing_waits_for_the_device(training, momentum):
    norm = make(8, momentum=momentum).train(training)
    x, dz = (torch.randn(4, 8, 9, 9, device=CUDA) for _ in range(2))
    step(norm, x, dz)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(norm, x, dz)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_captured_graph_replays_with_new_data(layout, momentum):
    captured, eager = make(16, "silu", momentum=momentum), make(16, "silu", momentum=momentum)
    eager.load_state_dict(captured.state_dict())
    shape = (4, 16, 20, 20)
    x, dz = (torch.randn(shape, device=CUDA).to(memory_format=layout) for _ in range(2))
    x.requires_grad_()

    def iteration():
        z = captured(x * 1)
        gradients = torch.autograd.grad(z, [x, *captured.parameters()], dz)
        return z, *gradients

    warm_up = torch.cuda.Stream()
    warm_up.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm_up):
        for _ in range(2):
            iteration()
    torch.cuda.current_stream().wait_stream(warm_up)
    captured.reset_running_stats()
    eager.reset_running_stats()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = iteration()
    captured.reset_running_stats()
    for _ in range(3):
        with torch.no_grad():
            x.normal_()
            dz.normal_()
        graph.replay()
        for actual, expected in zip(results, step(eager, x, dz), strict=True):
            assert relative_error(actual, expected.double()) < 1e-6
    for name, buffer in captured.named_buffers():
        torch.testing.assert_close(buffer, eager.get_buffer(name))


@pytest.mark.parametrize("name", ["weight", "bias", "running_mean", "running_var"])
def test_an_argument_on_another_device_is_named_and_nothing_is_modified(name):
    arguments = {n: torch.ones(3, device=CUDA) for n in ("weight", "bias", "running_mean", "running_var")}
    arguments[name] = arguments[name].cpu()
    x = torch.randn(2, 3, 4, 4, device=CUDA)
    before = x.clone()
    with pytest.raises(ValueError, match=rf"{name} on cuda:\d+.*got cpu"):
        inplace_abn(x, **arguments)
    assert torch.equal(x, before)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device")
def test_tensors_need_not_be_on_the_current_device():
    other = torch.device("cuda", 1)
    x, dz = (torch.randn(4, 8, 9, 9, device=CUDA) for _ in range(2))
    norm = make(8)
    expected = step(norm, x, dz)
    actual = step(norm.to(other), x.to(other), dz.to(other))
    assert torch.cuda.current_device() == 0
    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(actual, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_autocast_with_scaled_gradients_trains(layout, dtype):
    net = resnet(inplace_norm, "relu").to(CUDA).to(memory_format=layout)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10)
    x = torch.randn(16, 3, 16, 16, device=CUDA).to(memory_format=layout)
    target = torch.randint(0, 5, (16,), device=CUDA)
    losses = []
    for _ in range(20):
        with torch.autocast("cuda", dtype=dtype):
            loss = F.cross_entropy(net(x), target)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    assert all(torch.isfinite(p).all() for p in net.parameters())
    assert losses[-1] < 0.7 * losses[0]


def test_backward_allocates_the_incoming_gradient_only():
    norm = make(64, "relu")
    x, weights = (torch.randn(8, 64, 128, 128, device=CUDA) for _ in range(2))
    z = norm(x.requires_grad_().clone())
    loss = (z * weights).sum()
    del z
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss.backward()
    assert torch.cuda.max_memory_allocated() - before < 1.5 * x.numel() * x.element_size()
