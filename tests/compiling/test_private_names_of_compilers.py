"""The private names of torch that ``inplace_abn/_torch.py`` uses for tracers and compilers do what it needs."""

import pytest
import torch
import torch._dynamo.compiled_autograd
import torch.distributed as dist
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from inplace_abn import _torch


@pytest.mark.parametrize("strict", [False, True])
def test_exporting_is_told_from_compiling(strict, fresh_compiler):
    class Looks(torch.nn.Module):
        def forward(self, x):
            seen.append(_torch.is_exporting())
            return x * 2

    seen = []
    torch.export.export(Looks(), (torch.ones(2),), strict=strict)
    assert seen[0] if seen else strict
    doubled = torch.compile(lambda x: x * (2 if _torch.is_exporting() else 3), backend="eager", fullgraph=True)
    assert doubled(torch.ones(1)).item() == 3
    assert not _torch.is_exporting()


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_tracers_are_told():
    seen = []

    def look(x):
        seen.append(_torch.is_captured())
        return x * 2

    x = torch.ones(2)
    for options in ({}, {"tracing_mode": "symbolic"}, {"pre_dispatch": True}):
        make_fx(look, **options)(x)
    torch.jit.trace(look, x, check_trace=False)
    assert seen == [True] * 4
    assert not _torch.is_captured()


def test_autograd_is_compiled_nowhere_within(fresh_compiler):
    def backward():
        (torch.ones(2, requires_grad=True) * 2).sum().backward()

    compiled = []

    def compiler(graph):
        compiled.append(graph)
        return graph

    with torch._dynamo.compiled_autograd._enable(compiler):
        with _torch.uncompiled_autograd():
            backward()
        assert compiled == []
        backward()
        assert len(compiled) == 1


def test_foreign_modes_and_traced_code_are_told():
    seen = []

    def look(x):
        seen.append(_torch.is_in_foreign_mode() or _torch.is_transformed())
        return x * 2

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    x = torch.ones(2)
    look(x)
    with Mode():
        look(x)
    make_fx(look)(x)
    make_fx(look, pre_dispatch=True)(x)
    torch.jit.trace(look, x, check_trace=False)
    torch.func.vmap(look)(x)
    assert seen == [False, *[True] * 5]


def test_what_is_read_while_tracing_is_a_constant_of_the_program(fresh_compiler):
    class Module(torch.nn.Module):
        def forward(self, x):
            return x * self.doubled()

        @_torch.read_while_tracing
        def doubled(self):
            return float(self.weight.sum()) * 2

    module = Module()
    module.weight = torch.nn.Parameter(torch.ones(3))
    assert torch.equal(torch.compile(module, backend="eager", fullgraph=True)(torch.ones(2)), torch.full((2,), 6.0))


def test_joint_graphs_are_passed_on_with_backward_marked(fresh_compiler):
    seen = {}

    class Pass:
        def __init__(self, before):
            self.before = before

        def __call__(self, module, inputs):
            for node in module.graph.nodes:
                seen[str(node.target)] = _torch.is_backward(node)
            return module if self.before is None else self.before(module, inputs)

    with torch._functorch.config.patch(joint_custom_pass=None):
        _torch.call_on_joint_graphs(Pass)
        _torch.call_on_joint_graphs(Pass)
        assert torch._functorch.config.joint_custom_pass.before is None
        torch.compile(torch.sin, backend="aot_eager")(torch.ones(2, requires_grad=True)).sum().backward()
    assert not seen["aten.sin.default"]
    assert seen["aten.cos.default"]


class Double(torch.autograd.Function):
    """Its backward pass multiplies matrices that the forward pass has, too."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * (x @ x)


@pytest.mark.parametrize("told", [False, True])
def test_what_is_costly_is_computed_in_backward_if_compilers_are_told(fresh_compiler, told):
    graphs = []

    class Pass:
        def __init__(self, before):
            pass

        def __call__(self, module, inputs):
            for node in module.graph.nodes:
                if told and node.target is torch.ops.aten.mm.default:
                    _torch.compute_in_backward(node)
            return module

    def keep(module, inputs):
        graphs.append({node.target for node in module.graph.nodes})
        return make_boxed_func(module.forward)

    backend = aot_autograd(fw_compiler=keep, partition_fn=min_cut_rematerialization_partition)
    with torch._functorch.config.patch(joint_custom_pass=None):
        _torch.call_on_joint_graphs(Pass)
        torch.compile(Double.apply, backend=backend)(torch.ones(2, 2, requires_grad=True)).sum().backward()
    assert [torch.ops.aten.mm.default in graph for graph in graphs] == [not told, told]


def test_decompositions_take_silu_apart():
    import torch._inductor.decomposition

    table = _torch.decompositions()
    assert table is not None
    assert torch.ops.aten.silu.default in table


def test_a_process_group_is_found_by_its_name():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert _torch.process_group(dist.group.WORLD.group_name) is dist.group.WORLD
    finally:
        dist.destroy_process_group()


def test_what_is_called_uncompiled_is_not_traced_and_the_graph_goes_on_after_it(fresh_compiler):
    traced, compiled = [], []

    def called(x):
        traced.append(torch.compiler.is_compiling())
        return x + 1

    def function(x):
        return _torch.call_uncompiled(called, x * 2) * 3

    def backend(graph, _):
        compiled.append(graph)
        return graph

    x = torch.ones(3)
    for _ in range(2):
        assert torch.equal(torch.compile(function, backend=backend)(x), (x * 2 + 1) * 3)
    assert traced == [False, False]
    assert len(compiled) == 2
