"""torch.compile, torch.export, torch.func and torch.library.opcheck: the same results as eager."""

import copy

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from cases import parameters
from torch import nn
from torch.library import opcheck

from inplace_abn import ABN, InPlaceABN, inplace_abn, ops, reference

# What inductor adds over aot_eager is generating and compiling code, which takes seconds: a few cases.
BACKENDS = ["eager", "aot_eager"]
SHAPE = (4, 6, 5, 7)


pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec"),
]


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    torch._dynamo.reset()


class Block(nn.Module):
    """A residual block with every kind of use: a chain, an add, the residual argument."""

    def __init__(self, **options):
        super().__init__()
        self.first, self.second = (nn.Conv2d(6, 6, 3, padding=1, bias=False) for _ in range(2))
        self.a = InPlaceABN(6, activation="elu", **options)
        self.b = InPlaceABN(6, activation="identity", **options)
        self.c = InPlaceABN(6, activation="relu", signed_weight=True, **options)

    def forward(self, r):
        z = self.b(self.second(self.a(self.first(r))))
        return self.c(self.second(z + r), residual=r) + z


def net(device, **options):
    torch.manual_seed(1)
    layers = [nn.Conv2d(6, 6, 3, padding=1), InPlaceABN(6, **options), Block(**options), nn.Conv2d(6, 2, 1)]
    return nn.Sequential(*layers).to(device, torch.float64)


class Small(nn.Module):
    """What a backend that compiles C++ or Triton can do in a few seconds."""

    def __init__(self):
        super().__init__()
        self.conv, self.abn = nn.Conv2d(6, 6, 1), InPlaceABN(6)

    def forward(self, x):
        return self.abn(self.conv(x)) + x


def net_for(backend, device):
    return Small().to(device, torch.float64) if backend == "inductor" else net(device)


def step(function, module, x):
    x = x.clone().requires_grad_()
    module.zero_grad()
    y = function(x)
    if y.requires_grad:
        (y * y.detach().cos()).sum().backward()
    return [y, x.grad, *(p.grad for p in module.parameters()), *module.buffers()]


def assert_same(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("training", "backend"), [*((t, b) for t in (True, False) for b in BACKENDS), (False, "inductor")]
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


@pytest.mark.parametrize("backend", [*BACKENDS, "inductor"])
def test_dynamic_shapes(backend, device):
    eager = net_for(backend, device)
    module = copy.deepcopy(eager)
    compiled = torch.compile(module, backend=backend, fullgraph=True, dynamic=True)
    for shape in [(4, 6, 5, 7), (3, 6, 8, 4)]:
        x = torch.randn(shape, dtype=torch.float64, device=device)
        assert_same(step(compiled, module, x), step(eager, eager, x))


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("options", [{"momentum": None}, {"track_running_stats": False}, {"affine": False}], ids=str)
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
    eager = net(device).float()
    module = copy.deepcopy(eager)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    x = torch.randn(SHAPE, device=device)
    with torch.autocast(device.type, torch.bfloat16):
        actual, expected = step(compiled, module, x), step(eager, eager, x)
    assert actual[0].dtype == expected[0].dtype == torch.bfloat16
    torch.testing.assert_close(actual, expected, rtol=3e-2, atol=3e-2)


# --- Wirings that eager allows or refuses: compiled, they are right or refused ---------------------------------------


def abn(x, weight, bias, **options):
    return inplace_abn(x, weight, bias, None, None, activation="elu", **options)


def expected_abn(x, weight, bias, **options):
    return reference.forward(x, weight, bias, None, None, activation="elu", activation_param=0.01, **options)


def modified_afterwards(abn, x, *affine):
    z = abn(x * 2, *affine)
    z += 1
    return z.mul_(2)


def modified_through_a_view(abn, x, *affine):
    z = abn(x * 2, *affine)
    z[1:].mul_(3)
    return z


def used_after_being_overwritten(abn, x, *affine):
    h = x * 2
    z = abn(h, *affine)
    return z + (h if abn is not expected_abn else z)


def twice(abn, x, *affine):
    return abn(abn(x * 2, *affine), *affine)


def needed_by_the_producer(abn, x, *affine):
    return abn(torch.sigmoid(x), *affine)


def needed_by_another(abn, x, *affine):
    h = x * 2
    return h * h + abn(h, *affine)


def part(abn, x, *affine):
    return abn((x * 2)[1:], *affine)


def chunks(abn, x, *affine):
    return torch.cat([abn(part, *affine) for part in (x * 2).chunk(2)])


def leaf(abn, x, *affine):
    return abn(x, *affine)


def view_of_leaf(abn, x, *affine):
    return abn(x.flatten(2), *affine)


def with_residual(abn, x, *affine):
    return abn(x * 2, *affine, residual=x)


WIRINGS = {
    f.__name__: f
    for f in (
        modified_afterwards,
        modified_through_a_view,
        used_after_being_overwritten,
        twice,
        needed_by_the_producer,
        needed_by_another,
        part,
        chunks,
        leaf,
        view_of_leaf,
        with_residual,
    )
}


def gradients(function, device):
    torch.manual_seed(2)
    leaves = [torch.randn(SHAPE, dtype=torch.float64, device=device)]
    leaves += parameters(SHAPE[1], torch.float64, device)[:2]
    for t in leaves:
        t.requires_grad_()
    y = function(*leaves)
    (y * y.detach().cos()).sum().backward()
    return [y, *(t.grad for t in leaves)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("wiring", WIRINGS)
@pytest.mark.filterwarnings("ignore:Error detected")
def test_compiled_wirings_are_right_or_refused(wiring, backend, device):
    compiled = torch.compile(lambda *leaves: WIRINGS[wiring](abn, *leaves), backend=backend, fullgraph=True)
    may_refuse = wiring in ("needed_by_the_producer", "needed_by_another", "chunks", "leaf", "view_of_leaf")
    try:
        actual = gradients(compiled, device)
    except RuntimeError as error:
        assert may_refuse
        assert any(text in str(error) for text in ("inplace", "in-place", "overwritten"))
    else:
        assert wiring not in ("leaf", "view_of_leaf")
        assert_same(actual, gradients(lambda *leaves: WIRINGS[wiring](expected_abn, *leaves), device))


@pytest.mark.parametrize("backend", [*BACKENDS, "inductor"])
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


def drawn(device):
    torch.manual_seed(2)
    return [torch.randn(SHAPE, dtype=torch.float64, device=device), *parameters(SHAPE[1], torch.float64, device)[:2]]


@pytest.mark.parametrize("consume", [lambda z: z * 2, lambda z: z], ids=["weighted", "expanded"])
def test_an_eager_graph_under_compiled_autograd(consume, device):
    def function(a, *affine):
        return consume(abn(a * 2, *affine))

    expected = gradients(lambda a, *affine: consume(expected_abn(a * 2, *affine)), device)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
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
        actual, expected = (transform(loss(f), argnums)(x, weight, bias) for f in (inplace_abn, reference.forward))
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
    with torch.no_grad():
        exported = torch.export.export(module, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},), strict=strict)
        names = {str(node.target) for node in exported.graph.nodes}
        assert "inplace_abn.forward.default" in names
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


# --- The ops ---------------------------------------------------------------------------------------------------------


def op_arguments(name, device, dtype):
    """Arguments of an op, by its schema."""
    x, weight, bias = (t.to(dtype) for t in drawn(device))
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
        "signed_weight": False,
        "activation": 1,
        "activation_param": 0.1,
        "invertible": True,
        "training": True,
        "dx": torch.empty_like(x),
        "dweight": torch.empty_like(weight),
        "dbias": torch.empty_like(bias),
        "dresidual": torch.empty_like(x),
    }
    schema = getattr(ops, name)._schema
    written_out = {"xhat", "dy"} if name == "backward_reduce_out" else set()
    values = {
        argument.name: torch.empty_like(x) if argument.name in written_out else known[argument.name]
        for argument in schema.arguments
    }
    positional = [values[a.name] for a in schema.arguments if not a.kwarg_only]
    return tuple(positional), {a.name: values[a.name] for a in schema.arguments if a.kwarg_only}


OPS = [name for name in vars(ops) if isinstance(getattr(ops, name), torch._ops.OpOverload)]


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


def test_out_of_place_twin_compiles_and_exports(device):
    eager = nn.Sequential(nn.Conv2d(6, 6, 1), ABN(6), nn.Conv2d(6, 6, 1)).to(device, torch.float64)
    module = copy.deepcopy(eager)
    x = torch.randn(SHAPE, dtype=torch.float64, device=device)
    assert_same(step(torch.compile(module, backend="aot_eager", fullgraph=True), module, x), step(eager, eager, x))


def test_jit_trace_of_a_net_in_eval_mode(device):
    module = net(device).eval()
    x = torch.randn(SHAPE, dtype=torch.float64, device=device)
    with torch.no_grad():
        traced = torch.jit.trace(module, (x.clone(),))
        y = torch.randn(SHAPE, dtype=torch.float64, device=device)
        assert_same(traced(y.clone()), module(y.clone()))


def test_channels_last_compiles(device):
    eager = net(device).to(memory_format=torch.channels_last)
    module = copy.deepcopy(eager)
    x = torch.randn(SHAPE, dtype=torch.float64, device=device).contiguous(memory_format=torch.channels_last)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    assert_same(step(compiled, module, x), step(eager, eager, x))
    assert F.relu(compiled(x)).isfinite().all()
