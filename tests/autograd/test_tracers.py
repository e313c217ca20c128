"""A traced program trains as the original net does. Tracers record torch's own ops, out of place, because a record of
the in-place op would have no gradients."""

import copy

import pytest
import torch
from cases import covering
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from inplace_abn import ABN, InPlaceABN, InPlaceABNSync, InPlaceInstanceNorm, inplace_abn

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit"),
    pytest.mark.filterwarnings("ignore:.*not initialised"),
    pytest.mark.filterwarnings("ignore:.*TracerWarning"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]


class Residual(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 1)
        self.abn = InPlaceABN(4, activation="relu", **options)

    def forward(self, x):
        return self.abn(self.conv(x), residual=x)


NETS = {
    "leaky_relu": lambda: InPlaceABN(4),
    "relu, signed": lambda: InPlaceABN(4, activation="relu", signed_weight=True),
    "silu": lambda: InPlaceABN(4, activation="silu"),
    "hardswish": lambda: InPlaceABN(4, activation="hardswish"),
    "elu": lambda: InPlaceABN(4, activation="elu", activation_param=0.7),
    "identity": lambda: InPlaceABN(4, activation="identity"),
    "cumulative average": lambda: InPlaceABN(4, momentum=None),
    "no running statistics": lambda: InPlaceABN(4, track_running_stats=False),
    "not affine": lambda: InPlaceABN(4, affine=False),
    "residual": Residual,
    "synchronised, alone": lambda: InPlaceABNSync(4),
}


def exported(net, x):
    return torch.export.export(net, (x,)).module()


def traced(net, x):
    return torch.jit.trace(net, x, check_trace=False)


def by_make_fx(net, x, **options):
    state = {**dict(net.named_parameters()), **dict(net.named_buffers())}

    def run(state, x):
        return torch.func.functional_call(net, state, (x,))

    graph = make_fx(run, **options)(state, x)
    return lambda x: graph(state, x)


TRACERS = {
    "export": exported,
    "strict export": lambda net, x: torch.export.export(net, (x,), strict=True).module(),
    "jit.trace": traced,
    "make_fx": by_make_fx,
    "make_fx, symbolic": lambda net, x: by_make_fx(net, x, tracing_mode="symbolic"),
    "make_fx, before dispatch": lambda net, x: by_make_fx(net, x, pre_dispatch=True),
}


def step(call, named, x):
    z = call(x)
    loss = (z * torch.linspace(-1, 1, z.numel(), dtype=z.dtype).view(z.shape) + z.square()).sum()
    loss.backward()
    return z.detach(), {name: p.grad for name, p in named.items()}


@covering(2, kind=NETS, tracer=TRACERS, training=[True, False])
def test_traced_programs_have_the_results_gradients_and_statistics_of_eager(kind, tracer, training):
    eager = nn.Sequential(nn.Conv2d(3, 4, 1), NETS[kind](), nn.Conv2d(4, 2, 1)).double().train(training)
    with torch.no_grad():
        for p in eager[1].parameters():
            p.add_(torch.randn_like(p) * 0.1)
    x = torch.randn(5, 3, 6, 7, dtype=torch.float64)
    net = copy.deepcopy(eager)
    before = {name: b.clone() for name, b in net.named_buffers()}
    captured = TRACERS[tracer](net, x)
    with torch.no_grad():
        for name, b in net.named_buffers():
            b.copy_(before[name])
    if isinstance(captured, nn.Module):
        named, buffers = dict(captured.named_parameters()), dict(captured.named_buffers())
        with torch.no_grad():
            for name, b in buffers.items():
                b.copy_(before[name])
    else:
        named, buffers = dict(net.named_parameters()), dict(net.named_buffers())
    values, gradients = step(captured, named, x)
    expected, expected_gradients = step(eager, dict(eager.named_parameters()), x)
    torch.testing.assert_close(values, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(gradients, expected_gradients, rtol=1e-9, atol=1e-9)
    for name, b in eager.named_buffers():
        if name in buffers:
            torch.testing.assert_close(buffers[name], b, rtol=1e-9, atol=1e-9)


def test_the_functional_form_is_recorded_out_of_place_too():
    x = torch.randn(4, 3, 5)
    graph = make_fx(lambda x: inplace_abn(x * 1, None, None, None, None))(x)
    assert not [node for node in graph.graph.nodes if "inplace_abn" in str(node.target)]


# --- Selective checkpointing -----------------------------------------------------------------------------------------


def save_ours(context, op, *args, **kwargs):
    ours = op.namespace == "inplace_abn"
    return CheckpointPolicy.MUST_SAVE if ours else CheckpointPolicy.PREFER_RECOMPUTE


def save_convolutions(context, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if "convolution" in str(op) else CheckpointPolicy.PREFER_RECOMPUTE


def save_all_results(context, op, *args, **kwargs):
    return CheckpointPolicy.PREFER_RECOMPUTE if op._schema.is_mutable else CheckpointPolicy.MUST_SAVE


@pytest.mark.parametrize("policy", [save_ours, save_convolutions, save_all_results])
@pytest.mark.parametrize("module", [InPlaceABN, InPlaceABNSync])
def test_selective_checkpointing_has_the_gradients_of_eager(module, policy):
    """Recomputation does not run an op again whose result was saved. The values that such an op writes in place would
    be missing."""
    net = nn.Sequential(nn.Conv2d(3, 4, 1), module(4, activation="relu"), nn.Conv2d(4, 4, 1), module(4)).double()
    x = torch.randn(5, 3, 6, 7, dtype=torch.float64, requires_grad=True)
    results = []
    for selective in (False, True):
        net.zero_grad()
        x.grad = None
        if selective:
            contexts = lambda: create_selective_checkpoint_contexts(policy)  # noqa: E731
            z = checkpoint(net, x, use_reentrant=False, context_fn=contexts)
        else:
            z = net(x)
        z.square().sum().backward()
        results.append([x.grad, *(p.grad for p in net.parameters())])
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-9)


class Symbolic(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 1), norm

    def forward(self, x):
        return self.norm(self.conv(x), residual=x) + self.norm(self.conv(x + 1))


SYMBOLIC = {
    "ABN": lambda: ABN(4),
    "InPlaceABN": lambda: InPlaceABN(4, activation="silu"),
    "InPlaceABNSync": lambda: InPlaceABNSync(4),
    "InPlaceInstanceNorm": lambda: InPlaceInstanceNorm(4, affine=True),
}


@pytest.mark.parametrize("name", SYMBOLIC)
def test_norms_are_nodes_of_symbolic_traces_and_train_as_before(name):
    """Tracing ended in an error of pybind11, or in one of torch.fx about control flow."""
    torch.manual_seed(0)
    net = Symbolic(SYMBOLIC[name]()).double()
    traced = torch.fx.symbolic_trace(copy.deepcopy(net))
    assert [node.target for node in traced.graph.nodes if node.op == "call_module"] == ["conv", "norm", "conv", "norm"]
    x = torch.randn(2, 4, 5, 5, dtype=torch.float64)
    for each in (net, traced):
        z = each(x)
        (z * x.sin()).sum().backward()
    assert torch.equal(traced(x), net(x))
    for p, other in zip(traced.parameters(), net.parameters(), strict=True):
        assert p.grad is not None
        assert torch.equal(p.grad, other.grad)


@pytest.mark.parametrize("name", SYMBOLIC)
def test_quantization_of_norms_that_are_not_torchs_is_refused(name):
    quantize_fx = pytest.importorskip("torch.ao.quantization.quantize_fx")
    mapping = torch.ao.quantization.get_default_qat_qconfig_mapping("x86")
    with pytest.raises(RuntimeError, match=rf"the module 'norm' is {name}, and torch\.ao\.quantization"):
        quantize_fx.prepare_qat_fx(Symbolic(SYMBOLIC[name]()), mapping, (torch.randn(2, 4, 5, 5),))
