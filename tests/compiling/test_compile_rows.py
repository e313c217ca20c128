"""Compiled layer norms, RMS norms, group norms, instance norms, LayerScale and activations without a norm: gradients
are the native ones, and no more is held than in eager mode, or than compiled native nets hold."""

import copy
import logging
import math

import pytest
import torch
import torch.nn.functional as F
from cases import covering, needs_compiler
from compiled_converted_nets import held
from compiled_nets import assert_same, step
from compiled_rows_nets import NETS, Chain, assert_native, batch, made, measured
from layer_norms import RMSNormOfLlama
from torch import nn
from torch.utils.checkpoint import checkpoint

from inplace_abn import _torch, convert
from inplace_abn.compiling import joint

pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.filterwarnings("ignore:.*torch.jit"),
]
COMPILED_LONG = ("layer norm, gelu", "Llama's norm, hardswish", "group norm, silu", "layer scale, permuted")


def compiled(module, backend="aot_eager", **options):
    return torch.compile(module, backend=backend, fullgraph=True, **options)


# Compiling to code takes long, and the graph is that of aot_eager_decomp_partition. Other tests have aot_eager.
BACKENDS = [("aot_eager_decomp_partition", name) for name in NETS]
BACKENDS += [("aot_eager", name) for name in COMPILED_LONG]
BACKENDS += [pytest.param("inductor", name, marks=needs_compiler) for name in COMPILED_LONG[::2]]


@pytest.mark.parametrize(("backend", "name"), BACKENDS)
def test_gradients_are_native_and_no_more_is_held_than_in_eager(backend, name, device):
    native, x = made(name, device), batch(device)
    module = convert(copy.deepcopy(native))
    function, natively = compiled(module, backend), compiled(copy.deepcopy(native), backend)
    for _ in range(2):
        assert_native(name, step(function, module, x), step(native, native, x))
    eager = measured(native, x)
    if name not in ("norms of channels by hand", "group norm, sum, silu"):
        assert held(function, x) < held(natively, x)
    assert held(function, x) <= min(held(eager, x), held(natively, x))


@pytest.mark.parametrize("name", NETS)
def test_after_eager_steps_no_more_is_held_than_in_them(name, device):
    native, x = made(name, device), batch(device)
    module = measured(native, x)
    function = compiled(module)
    for _ in range(4):
        step(native, native, x)
    assert_native(name, step(function, module, x), step(native, native, x))
    assert held(function, x) <= held(module, x)


# Other norms are computed as in training.
@pytest.mark.parametrize("name", [*COMPILED_LONG, "norms of channels", "instance norm, leaky relu"])
def test_evaluation_is_native(name, device):
    native, x = made(name, device), batch(device)
    step(native, native, x)
    module = convert(copy.deepcopy(native.eval()))
    function = compiled(module)
    assert_native(name, step(function, module, x), step(native, native, x))
    with torch.no_grad():
        assert_native(name, function(x), native(x))


@pytest.mark.parametrize("name", ["layer norm, gelu", "RMS norm, mish", "group norm, silu", "layer scale"])
def test_dynamic_shapes(name, device):
    native = made(name, device)
    module = convert(copy.deepcopy(native))
    function = compiled(module, dynamic=True)
    for samples in (2, 5):
        x = batch(device, samples)
        assert_same(step(function, module, x), step(native, native, x))


@pytest.mark.parametrize("name", ["layer norm, gelu", "group norm, silu"])
def test_without_the_pass_gradients_are_native(name, device, monkeypatch):
    monkeypatch.setattr(joint, "install", lambda: None)
    native, x = made(name, device), batch(device)
    module = convert(copy.deepcopy(native))
    with torch._functorch.config.patch(joint_custom_pass=None):
        assert_same(step(compiled(module), module, x), step(native, native, x))


def test_a_torch_without_the_pass_is_told_once_and_gradients_are_native(device, monkeypatch, logged):
    told = logged(logging.INFO)
    joint._tell_once.cache_clear()
    monkeypatch.setattr(_torch, "call_on_joint_graphs", lambda wrap: False)
    native, x = made("layer norm, gelu", device), batch(device)
    module = convert(copy.deepcopy(native))
    with torch._functorch.config.patch(joint_custom_pass=None):
        assert_same(step(compiled(module), module, x), step(native, native, x))
    assert sum("call no pass" in record.getMessage() for record in told) == 1


@pytest.mark.parametrize("before", ["eager steps", "nothing"])
def test_columns_that_the_output_does_not_determine_are_kept(before, device):
    native, x = made("layer norm, gelu", device), batch(device)
    with torch.no_grad():
        native.norm.weight[[2, 5]] = 1e-12
        native.norm.weight[7] = 0
    module = measured(native, x) if before == "eager steps" else convert(copy.deepcopy(native))
    function, natively = compiled(module), compiled(native)
    assert_same(step(function, module, x), step(native, native, x))
    assert held(function, x) < held(natively, x)


def test_several_norms_may_keep_columns_of_their_own(device):
    """The compiler refused two constants of the same name."""
    native, x = made("layer norm, gelu", device), batch(device)
    with torch.no_grad():
        native.norm.weight[2] = 0
        native.other.weight[[2, 5]] = 0
    module = convert(copy.deepcopy(native))
    function, natively = compiled(module), compiled(native)
    assert_same(step(function, module, x), step(native, native, x))
    assert held(function, x) < held(natively, x)


def test_a_norm_with_many_such_columns_is_torchs(device):
    native, x = made("layer norm, gelu", device), batch(device)
    with torch.no_grad():
        native.norm.weight[::2] = 0
        native.other.weight[::2] = 0
    module = convert(copy.deepcopy(native))
    assert_same(step(compiled(module), module, x), step(native, native, x))


def test_weights_that_become_zero_while_training_are_noticed(device):
    native, x = made("layer norm, gelu", device), batch(device)
    module = convert(copy.deepcopy(native))
    function = compiled(module)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.0) for net in (native, module)]
    for weight in (1.0, 0.0, 1.0):
        for net in (native, module):
            nn.init.constant_(net.norm.weight, weight)
        step(function, module, x)
        for optimizer in optimizers:
            optimizer.step()
        assert_same(step(function, module, x), step(native, native, x))


WIRINGS = {
    "read by a mask": lambda m, x: (lambda z: m.last(z * (z > 0.1)))(F.silu(m.up(x))),
    "compared with zero": lambda m, x: (lambda z: m.last(z) + (z == 0).sum())(F.gelu(m.up(x))),
    "activated twice": lambda m, x: (lambda y: m.last(F.gelu(y)) + m.last(F.silu(y)))(m.up(x)),
    "input read again": lambda m, x: (lambda y: m.last(F.gelu(y) + y))(m.up(x)),
    "input kept by a product": lambda m, x: (lambda y: m.last(F.gelu(y)) + m.last(y))(m.up(x)),
    "in place": lambda m, x: m.last(F.silu(m.up(x), inplace=True)),
    "written to": lambda m, x: m.last(F.gelu(m.up(x)).add_(1)),
    "returned": lambda m, x: (lambda z: torch.cat([m.last(z), z]))(F.gelu(m.up(x))),
    "norm twice": lambda m, x: m.last(m.norm(m.norm(m.up(x)))),
    "norm of one input twice": lambda m, x: (lambda y: m.last(m.norm(y)) + m.up(m.norm(y)))(m.up(x)),
    "norm written to": lambda m, x: m.last(m.norm(m.up(x)).mul_(2)),
    "norm of a view": lambda m, x: m.last(m.norm(m.up(x)[:, ::2])),
    "norm without readers that keep it": lambda m, x: m.norm(m.up(x)) + x,
    "norm of an activation": lambda m, x: m.last(m.norm(F.gelu(m.up(x)))),
    "scaled twice": lambda m, x: (lambda u: m.last(u * m.gamma) + m.last(u * m.gamma))(m.up(x)),
    "scaled and read": lambda m, x: (lambda u: m.last(u * m.gamma) + u)(m.up(x)),
    "scaled in two ways": lambda m, x: (lambda u: u * m.gamma + u * (m.gamma + 1))(m.up(x)),
    "scaled by a row": lambda m, x: m.up(x) * m.gamma[:1] + m.up(x) * m.gamma.view(1, 1, 16),
    "scaled along another dimension": lambda m, x: m.up(x[:, :16]) * m.gamma.view(1, 16, 1),
    "scaled, tied": lambda m, x: m.up(m.up(x) * m.gamma) * m.gamma,
    "scaled without a gradient of gamma": lambda m, x: m.last(m.up(x) * m.gamma.detach()),
    "frozen": lambda m, x: m.last(F.gelu(m.up(m.norm(x.detach())))),
}


@pytest.mark.parametrize("wiring", WIRINGS)
def test_gradients_are_native_whatever_the_program_does(wiring, device):
    torch.manual_seed(5)
    linears = {"up": nn.Linear(16, 16), "last": nn.Linear(16, 16)}
    native = Chain(WIRINGS[wiring], norm=nn.LayerNorm(16), **linears)
    native.gamma = nn.Parameter(torch.rand(16))
    native, x = native.to(device).double(), batch(device)
    module = convert(copy.deepcopy(native))
    assert_same(step(compiled(module, "aot_eager_decomp_partition"), module, x), step(native, native, x))


def test_one_block_that_is_compiled_serves_all_layers(device):
    torch.manual_seed(6)
    native = nn.Sequential(*(made("layer norm, gelu", device) for _ in range(3)))
    x = batch(device)
    module = convert(copy.deepcopy(native))
    for part in module:
        part.compile(backend="aot_eager", fullgraph=True)
    for _ in range(2):
        assert_same(step(module, module, x), step(native, native, x))


def test_training_after_evaluation_compiles_nothing_again(device):
    native, x = made("group norm, silu", device), batch(device)
    module = convert(copy.deepcopy(native))
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    function = torch.compile(module, backend=backend)
    for training in (True, False, True, False):
        function.train(training)
        function(x.clone().requires_grad_())
    assert len(graphs) <= 2


def test_a_norm_in_a_dtype_that_its_class_does_not_keep_is_native(device):
    """The class returns its weight's dtype."""
    torch.manual_seed(7)
    native = nn.Sequential(nn.Linear(16, 16).bfloat16(), RMSNormOfLlama(16), nn.Linear(16, 16)).to(device)
    x = batch(device).bfloat16()
    module = convert(copy.deepcopy(native))
    ours, torchs = step(compiled(module), module, x), step(compiled(native), native, x)
    for t, expected in zip(ours, torchs, strict=True):
        assert t.dtype == expected.dtype
        assert (t - expected).norm() <= 0.02 * expected.norm()


def before_conversion(native, x):
    module = copy.deepcopy(native)
    function = torch.compile(module, backend="aot_eager")
    step(function, copy.deepcopy(native), x)
    convert(module)
    return module, function


def under_compiled_autograd(native, x):
    module = convert(copy.deepcopy(native))
    inner = compiled(module)

    def function(x):
        torch._dynamo.config.compiled_autograd = True
        return inner(x)

    return module, function


def with_hooks(native, x):
    module = convert(copy.deepcopy(native))
    for net in (native, module):
        for part in net.children():
            part.register_forward_hook(lambda part, args, output: output * 1.1)
    return module, compiled(module)


def with_checkpoints(native, x):
    module = convert(copy.deepcopy(native))
    return module, compiled(lambda x: checkpoint(module, x, use_reentrant=False))


def with_breaks(native, x):
    module = convert(copy.deepcopy(native))
    for part in module.children():
        part.register_forward_pre_hook(lambda part, args: torch._dynamo.graph_break())
    return module, torch.compile(module, backend="aot_eager")


def with_a_budget(native, x):
    module = convert(copy.deepcopy(native))
    function = compiled(module, "aot_eager_decomp_partition")

    def within(x):
        with torch._functorch.config.patch(activation_memory_budget=0.3):
            return function(x)

    return module, within


WAYS = {
    f.__name__: f
    for f in (before_conversion, under_compiled_autograd, with_hooks, with_checkpoints, with_breaks, with_a_budget)
}


@covering(2, name=COMPILED_LONG, way=WAYS)
def test_gradients_are_native_whatever_the_way_of_compiling(name, way, device):
    native, x = made(name, device), batch(device)
    with torch._dynamo.config.patch(compiled_autograd=False):
        module, function = WAYS[way](native, x)
        for _ in range(2):
            assert_native(name, step(function, module, x), step(native, native, x))


@pytest.mark.parametrize("name", COMPILED_LONG)
def test_an_exported_program_has_ops_of_torch_only(name, device):
    native, x = made(name, device), batch(device)
    module = convert(copy.deepcopy(native))
    step(compiled(module), module, x)
    program = torch.export.export(module, (x,))
    assert not [node for node in program.graph.nodes if "inplace_abn" in str(node.target)]
    assert_same(program.module()(x), native(x))


@pytest.mark.parametrize("name", ["layer norm, gelu", "Llama's norm, hardswish", "group norm, silu"])
def test_an_eps_that_changes_is_seen(name, device):
    native, x = made(name, device), batch(device)
    module = convert(copy.deepcopy(native))
    function = compiled(module)
    for eps in (1e-5, 0.5, 2.0):
        for net in (native, module):
            for norm in (net.norm, net.other):
                setattr(norm, "variance_epsilon" if hasattr(norm, "variance_epsilon") else "eps", eps)
        assert_native(name, step(function, module, x), step(native, native, x))


def test_a_default_device_changes_nothing(device):
    """With one a group norm could not be compiled, and the first measurement on CUDA raised."""
    layers = nn.Conv2d(4, 8, 3), nn.GroupNorm(2, 8), nn.SiLU(), nn.Conv2d(8, 4, 1), nn.BatchNorm2d(4), nn.ReLU()
    native = nn.Sequential(*layers, nn.Conv2d(4, 2, 1)).to(device, torch.float64)
    x = torch.randn(3, 4, 8, 9, dtype=torch.float64, device=device)
    module, eager = (convert(copy.deepcopy(native)) for _ in range(2))
    function, natively = compiled(module), compiled(copy.deepcopy(native))
    optimizer = torch.optim.SGD(eager.parameters(), lr=0.0)
    with torch.device("meta"):
        for _ in range(5):
            expected = step(native, native, x)
            assert_same(step(function, module, x), expected)
            assert_same(step(eager, eager, x), expected)
            optimizer.step()
        assert held(function, x) < held(natively, x)


@pytest.mark.parametrize(
    ("name", "part"),
    [(name, part) for name in ("layer norm, gelu", "layer scale") for part in ("norm", "act", "up")]
    + [("group norm, silu", part) for part in ("conv", "norm", "last")],
)
def test_a_part_that_is_compiled_works_in_eager_mode_with_the_rest(name, part, device):
    native, x = made(name, device), batch(device)
    module = convert(copy.deepcopy(native))
    getattr(module, part).compile(backend="aot_eager")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    for _ in range(5):
        assert_same(step(module, module, x), step(native, native, x))
        optimizer.step()


def test_what_an_activation_after_a_linear_layer_keeps_is_not_transposed():
    """Near convolutions inductor gave it the strides of channels-last images."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.conv = nn.Conv2d(3, 32, 4, 4), nn.Conv2d(32, 32, 7, padding=3, groups=32)
            self.norm, self.fc1, self.fc2 = nn.LayerNorm(32), nn.Linear(32, 128), nn.Linear(128, 32)
            self.last = nn.Conv2d(32, 64, 2, 2)

        def forward(self, x):
            x = self.stem(x)
            h = self.fc2(F.gelu(self.fc1(self.norm(self.conv(x).permute(0, 2, 3, 1)))))
            return self.last(x + h.permute(0, 3, 1, 2))

    torch.manual_seed(0)
    model, x, kept = convert(Net()), torch.randn(2, 3, 32, 48), []
    for _ in range(2):
        model(x).sum().backward()
    compiled = torch.compile(model)

    def pack(t):
        kept.append((tuple(t.shape), t.stride()))
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        compiled(x).sum().backward()
    hidden = [(shape, strides) for shape, strides in kept if math.prod(shape) == 2 * 8 * 12 * 128]
    assert hidden
    assert all(strides[-2:] == (128, 1) for _, strides in hidden), hidden
