"""Compiled by torch.compile, modules have the results of eager mode."""

import copy
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from cases import INDUCTOR, covering, needs_compiler
from compiled_nets import SHAPE, WIRINGS, abn, assert_same, drawn, expected_abn, gradients, net, step
from fresh import CONTEXT
from torch import nn

from inplace_abn import ABN, InPlaceABN, convert
from inplace_abn.autograd import nodes

pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.filterwarnings("ignore:.*torch.jit"),
]

# inductor does what aot_eager does, and then generates and compiles code. That takes seconds, so few cases use it.
BACKENDS = ["eager", "aot_eager"]


class Small(nn.Module):
    """A net that a backend compiles to C++ or Triton in a few seconds."""

    def __init__(self):
        super().__init__()
        self.conv, self.abn = nn.Conv2d(6, 6, 1), InPlaceABN(6)

    def forward(self, x):
        return self.abn(self.conv(x)) + x


def net_for(backend, device):
    return Small().to(device, torch.float64) if backend == "inductor" else net(device)


@pytest.mark.parametrize(
    ("training", "backend"),
    [*((t, b) for t in (True, False) for b in BACKENDS), pytest.param(False, "inductor", marks=needs_compiler)],
)
def test_nets_compile_in_one_graph_and_train_as_in_eager(training, backend, device):
    eager = net_for(backend, device).train(training)
    module = copy.deepcopy(eager)
    compiled = torch.compile(module, backend=backend, fullgraph=True)
    for seed in range(2):
        torch.manual_seed(seed)
        x = torch.randn(SHAPE, dtype=torch.float64, device=device)
        assert_same(step(compiled, module, x), step(eager, eager, x))
    counts = [b.item() for name, b in module.named_buffers() if name.endswith("num_batches_tracked")]
    assert set(counts) == {2 if training else 0}


@pytest.mark.parametrize("backend", ["aot_eager", INDUCTOR])
def test_dynamic_shapes(backend, device):
    eager = net_for(backend, device)
    module = copy.deepcopy(eager)
    compiled = torch.compile(module, backend=backend, fullgraph=True, dynamic=True)
    for shape in [(4, 6, 5, 7), (3, 6, 8, 4)]:
        x = torch.randn(shape, dtype=torch.float64, device=device)
        assert_same(step(compiled, module, x), step(eager, eager, x))


@covering(2, options=[{"momentum": None}, {"track_running_stats": False}, {"affine": False}], dynamic=[True, False])
def test_module_options(options, dynamic, device):
    eager = nn.Sequential(nn.Conv2d(6, 6, 1), InPlaceABN(6, **options)).to(device, torch.float64)
    module = copy.deepcopy(eager)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for _ in range(3):
        x = torch.randn(SHAPE, dtype=torch.float64, device=device)
        assert_same(step(compiled, module, x), step(eager, eager, x))


def test_without_grad(device):
    eager = net(device).eval()
    module = copy.deepcopy(eager)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    x = torch.randn(SHAPE, dtype=torch.float64, device=device)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert_same(compiled(x), eager(x))


def test_autocast(device):
    """Roundings of 16 bits differ, so both are compared with float64."""
    exact = net(device)
    eager = copy.deepcopy(exact).float()
    module = copy.deepcopy(eager)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    x = torch.randn(SHAPE, device=device)
    with torch.autocast(device.type, torch.bfloat16):
        actual, other = step(compiled, module, x), step(eager, eager, x)
    assert actual[0].dtype == other[0].dtype == torch.bfloat16
    for a, b, expected in zip(actual, other, step(exact, exact, x.double()), strict=True):
        error, eager_error = ((t.double() - expected).norm() for t in (a, b))
        assert error <= 2 * eager_error + 1e-3 * (1 + expected.double().norm())


def test_out_of_place_twin_compiles_and_exports(device):
    eager = nn.Sequential(nn.Conv2d(6, 6, 1), ABN(6), nn.Conv2d(6, 6, 1)).to(device, torch.float64)
    module = copy.deepcopy(eager)
    x = torch.randn(SHAPE, dtype=torch.float64, device=device)
    assert_same(step(torch.compile(module, backend="aot_eager", fullgraph=True), module, x), step(eager, eager, x))


def test_channels_last_compiles(device):
    eager = net(device).to(memory_format=torch.channels_last)
    module = copy.deepcopy(eager)
    x = torch.randn(SHAPE, dtype=torch.float64, device=device).contiguous(memory_format=torch.channels_last)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    assert_same(step(compiled, module, x), step(eager, eager, x))
    assert F.relu(compiled(x)).isfinite().all()


# --- Wirings that eager allows or refuses: compiled, they are right or refused ---------------------------------------


REFUSABLE = ("needed_by_the_producer", "needed_by_another", "chunks", "leaf", "view_of_leaf")


def compiled_gradients(wiring, backend, device):
    compiled = torch.compile(lambda *leaves: WIRINGS[wiring](abn, *leaves), backend=backend, fullgraph=True)
    return gradients(compiled, device)


def assert_right(wiring, actual, device):
    assert_same(actual, gradients(lambda *leaves: WIRINGS[wiring](expected_abn, *leaves), device))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("wiring", [name for name in WIRINGS if name not in REFUSABLE])
def test_compiled_wirings_are_right(wiring, backend, device):
    assert_right(wiring, compiled_gradients(wiring, backend, device), device)


def assert_right_or_refused(backend, device, compiled_node):
    torch.set_num_threads(1)
    if not compiled_node:
        nodes.cpp = None
    refused = []
    for wiring in REFUSABLE:
        torch._dynamo.reset()
        try:
            actual = compiled_gradients(wiring, backend, device)
        except RuntimeError as error:
            assert any(text in str(error) for text in ("inplace", "in-place", "overwritten"))
            refused.append(wiring)
        else:
            assert_right(wiring, actual, device)
    assert {"leaf", "view_of_leaf"} <= set(refused)


@pytest.fixture(scope="module")
def another_process():
    with ProcessPoolExecutor(1, CONTEXT) as pool:
        yield pool


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_wirings_are_right_or_refused(backend, device, another_process):
    """Runs in another process, because torch leaves its frame evaluator in place for good after a compilation that
    failed."""
    another_process.submit(assert_right_or_refused, backend, device, nodes.cpp is not None).result()


@pytest.mark.parametrize("backend", [*BACKENDS, INDUCTOR])
def test_an_input_of_the_compiled_region_is_overwritten_as_in_eager(backend, device):
    compiled = torch.compile(abn, backend=backend, fullgraph=True)

    def function(a, *affine):
        x = a * 2
        z = compiled(x, *affine)
        assert torch.equal(x.detach(), z.detach())
        return z + x.sin()

    def expected(a, *affine):
        z = expected_abn(a * 2, *affine)
        return z + z.sin()

    assert_same(gradients(function, device), gradients(expected, device))


@pytest.mark.parametrize("backend", ["aot_eager", INDUCTOR])
@pytest.mark.parametrize("activation", [nn.ReLU, nn.ELU, nn.Hardswish, nn.GELU])
def test_infinities_come_out_as_in_torch_and_zeros_are_finite(activation, backend, device):
    """hardswish and gelu of -inf were finite numbers. A zero must not be taken for what -inf leaves."""
    x = torch.randn(SHAPE, device=device)
    x[1, 2, 3] = -torch.inf
    x[:, 4] = 0.0
    model = nn.Sequential(nn.BatchNorm2d(SHAPE[1]), activation(), nn.Conv2d(SHAPE[1], 2, 1)).to(device).eval()
    ours = copy.deepcopy(model)
    convert(ours)
    found = []
    for function, module in ((torch.compile(ours, backend=backend), ours), (model, model)):
        leaf = x.clone().requires_grad_()
        function(leaf).sum().backward()
        found.append([leaf.grad, *(p.grad for p in module.parameters())])
    for actual, expected in zip(*found, strict=True):
        finite = actual.isfinite()
        if activation is nn.Hardswish:
            # z is NaN. It does not tell whether y was -inf, where torch's slope is zero, or NaN.
            finite |= expected.isfinite()
        assert torch.equal(finite, expected.isfinite())


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_output_of_the_compiled_region_may_be_kept_or_modified(backend, device):
    compiled = torch.compile(lambda a, *affine: abn(a * 2, *affine), backend=backend, fullgraph=True)
    kept = []

    def function(a, *affine):
        z = compiled(a, *affine)
        kept.append((z, z.detach().clone()))
        return z * 3

    assert_same(gradients(function, device), gradients(lambda a, *affine: expected_abn(a * 2, *affine) * 3, device))
    assert torch.equal(*[t.detach() for t in kept[0]])

    def modified(a, *affine):
        return compiled(a, *affine).mul_(2)

    try:
        actual = gradients(modified, device)
    except RuntimeError as error:
        assert "inplace operation" in str(error)
    else:
        assert_same(actual, gradients(lambda a, *affine: expected_abn(a * 2, *affine) * 2, device))


def test_retain_graph_and_compiled_autograd(device):
    compiled = torch.compile(lambda a, *affine: abn(a * 2, *affine).square().sum(), backend="aot_eager", fullgraph=True)
    expected = gradients(lambda a, *affine: expected_abn(a * 2, *affine).square().sum(), device)

    leaves = [torch.zeros_like(t).copy_(t).requires_grad_() for t in drawn(device)]
    loss = compiled(*leaves)
    scale = loss.detach().cos()
    (loss * scale).backward(retain_graph=True)
    (loss * scale).backward()
    assert_same([t.grad for t in leaves], [2 * g for g in expected[1:]])


@pytest.mark.parametrize("consume", [lambda z: z * 2, lambda z: z], ids=["weighted", "expanded"])
@pytest.mark.parametrize("node", ["C++ node", "Python node"], indirect=True)
def test_an_eager_graph_under_compiled_autograd(consume, device):
    def function(a, *affine):
        return consume(abn(a * 2, *affine))

    expected = gradients(lambda a, *affine: consume(expected_abn(a * 2, *affine)), device)
    # The node in C++ is called as it is.
    compiler = torch.compile(backend="eager", fullgraph=nodes.cpp is None)
    with torch._dynamo.compiled_autograd._enable(compiler):
        actual = gradients(function, device)
    assert_same(actual, expected)


def test_a_graph_break_around_the_layer(device):
    def function(a, *affine):
        h = a * 2
        torch._dynamo.graph_break()
        z = abn(h, *affine)
        torch._dynamo.graph_break()
        return z * 3 + h.sin()

    def expected(a, *affine):
        z = expected_abn(a * 2, *affine)
        return z * 3 + z.sin()

    assert_same(gradients(torch.compile(function, backend="aot_eager"), device), gradients(expected, device))
