"""The private names of torch that ``inplace_abn/_torch.py`` uses do what the package needs. A test that fails here
shows what a release of torch has changed."""

import ast
from pathlib import Path

import pytest
import torch
import torch._dynamo.compiled_autograd
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from inplace_abn import _torch, autograd, functions


def test_below_autograd_makes_no_graph_and_bumps_no_version():
    x = torch.ones(3, requires_grad=True) * 1
    with _torch.BelowAutograd():
        y = x * 2
        x.add_(1)
    assert y.grad_fn is None
    assert x._version == 0


def test_increment_version_bumps_and_leaves_inference_tensors_alone():
    x = torch.ones(3)
    torch.autograd.graph.increment_version([x])
    assert x._version == 1
    with torch.inference_mode():
        torch.autograd.graph.increment_version([torch.ones(3)])


def test_transforms_active():
    seen = []
    torch.func.grad(lambda x: (seen.append(_torch.transforms_active()), x.sum())[1])(torch.ones(2))
    assert seen == [True]
    assert not _torch.transforms_active()


def test_outside_of_transforms():
    seen = []

    def look(x):
        with _torch.outside_of_transforms():
            seen.append(_torch.transforms_active())
        seen.append(_torch.transforms_active())
        return x.sum()

    torch.func.grad(look)(torch.ones(2))
    assert seen == [False, True]


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


def test_wrappers_of_transforms_are_told():
    seen = []

    def look(x):
        seen.append(_torch.kinds_of_wrappers(x))
        return x.sum()

    torch.func.vmap(torch.func.grad(look))(torch.ones(2, 3))
    torch.func.jvp(look, (torch.ones(2),), (torch.ones(2),))
    torch.func.hessian(look)(torch.ones(2))
    assert seen == [{"vmap", "grad"}, {"jvp"}, {"jvp", "grad"}]
    assert _torch.kinds_of_wrappers(torch.ones(2)) == set()


def test_batched_gradients_are_told():
    seen = []
    x = torch.ones(2, requires_grad=True) * 1
    x.register_hook(lambda g: seen.append(_torch.is_batched(g)))
    torch.autograd.grad(x.sum(), x, torch.ones(3), is_grads_batched=True, retain_graph=True)
    torch.func.vmap(lambda g: (seen.append(_torch.is_batched(g)), g)[1])(torch.ones(2))
    x.sum().backward()
    assert seen == [True, True, False]


def test_current_node_is_the_one_that_the_engine_runs():
    seen = []

    class Looks(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, g):
            seen.append(_torch.current_node() is ctx)
            return g

    y = Looks.apply(torch.ones(2, requires_grad=True))
    y.grad_fn.apply(torch.ones(2))
    y.sum().backward()
    assert seen == [False, True]


def test_keeps_graph():
    seen = []
    for retain in (True, False):
        x = torch.ones(2, requires_grad=True) * 1
        x.register_hook(lambda g: seen.append(_torch.keeps_graph()))
        x.sum().backward(retain_graph=retain)
    assert seen == [True, False]


def test_creation_meta_tells_views_that_must_not_be_written():
    x = torch.ones(4, 2, requires_grad=True) * 1
    assert _torch.creation_meta(x[1:]) == _torch.CREATED_BY_DEFAULT
    assert _torch.creation_meta(x.chunk(2)[0]) != _torch.CREATED_BY_DEFAULT
    assert _torch.is_view(x[1:])
    assert not _torch.is_view(x)
    assert x[1:]._base is x


def test_is_lazy_copy():
    x = torch.ones(2)
    copied = torch._lazy_clone(x)
    assert _torch.is_lazy_copy(copied)
    assert not _torch.is_lazy_copy(torch.ones(2))


def test_is_zero_tensor():
    assert _torch.is_zero_tensor(torch._efficientzerotensor((2, 3)))
    assert not _torch.is_zero_tensor(torch.zeros(2, 3))


def test_top_saved_tensors_hooks():
    assert _torch.top_saved_tensors_hooks(True) is None
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        assert _torch.top_saved_tensors_hooks(True) is not None


def test_dispatch_modes_are_counted():
    class PassOn(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    assert _torch.count_dispatch_modes() == 0
    with PassOn():
        assert _torch.count_dispatch_modes() == 1
        assert not _torch.is_checkpointed_selectively()


def test_selective_checkpointing_is_told_in_both_passes():
    seen = []

    def look(x):
        seen.append(_torch.is_checkpointed_selectively())
        return x.sin()

    x = torch.ones(2, requires_grad=True)
    contexts = lambda: create_selective_checkpoint_contexts([torch.ops.aten.sin.default])  # noqa: E731
    checkpoint(look, x, use_reentrant=False, context_fn=contexts).sum().backward()
    assert seen == [True, True]


def test_use_counts_tell_holders():
    x = torch.ones(2)
    before = _torch.use_count(x), _torch.storage_use_count(x)
    alias = x.detach()
    assert (_torch.use_count(x), _torch.storage_use_count(x)) == (before[0], before[1] + 1)
    del alias
    handle = x.untyped_storage()
    assert _torch.storage_use_count(x) > before[1]
    del handle
    assert _torch.storage_use_count(x) == before[1]
    y = torch.ones(2, requires_grad=True)
    held = y * 2
    before = _torch.use_count(held)
    consumer = held * held
    assert _torch.use_count(held) >= before
    assert consumer.grad_fn is not None


def test_saves_its_result():
    x = torch.ones(2, requires_grad=True)
    assert _torch.saves_its_result(torch.sigmoid(x))
    assert not _torch.saves_its_result(x * 2)
    assert not _torch.saves_its_result(x)


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


def test_tangents_are_told():
    assert not _torch.in_forward_mode()
    with torch.autograd.forward_ad.dual_level():
        assert _torch.in_forward_mode()
        dual = torch.autograd.forward_ad.make_dual(torch.ones(2), torch.ones(2))
        assert _torch.kinds_of_wrappers(dual) == {"jvp"}
        assert _torch.kinds_of_wrappers(torch.ones(2)) == set()


def test_ops_go_on_below_autograd_with_the_keys_that_come_after_it():
    assert not _torch.BELOW_AUTOGRAD.has(torch._C.DispatchKey.ADInplaceOrView)
    assert _torch.BELOW_AUTOGRAD.has(torch._C.DispatchKey.CPU)


def test_kernels_of_a_backend_are_told():
    assert _torch.has_kernel("inplace_abn::forward", "CPU")
    assert not _torch.has_kernel("inplace_abn::forward", "XPU")


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


def test_raw_saved_tensors_tell_hooks(monkeypatch):
    monkeypatch.setattr(functions, "_node", None)
    z = functions.inplace_abn(torch.ones(2, 3, requires_grad=True) * torch.rand(2, 3), None, None, None, None)
    assert not autograd._is_hooked(z.grad_fn)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        hooked = functions.inplace_abn(torch.ones(2, 3, requires_grad=True) * torch.rand(2, 3), None, None, None, None)
    assert autograd._is_hooked(hooked.grad_fn)


def test_unsafe_split_gives_a_place_in_the_graph_that_overwriting_leaves_alone():
    x = torch.ones(2, 3, requires_grad=True) * 1
    before = x.grad_fn
    edge = functions.gradients.input_edge(x)
    x.mul_(2)
    assert edge.numel() == 0
    assert edge.grad_fn.next_functions[0][0] is before


def test_every_private_name_is_tested():
    tree = ast.parse(Path(_torch.__file__).read_text())
    names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    names += [t.id for node in tree.body if isinstance(node, ast.Assign) for t in node.targets]
    text = Path(__file__).read_text()
    assert len(names) > 15
    assert [n for n in names if not n.startswith("_") and f"_torch.{n}" not in text] == []


def test_nobody_else_uses_private_names_of_torch():
    package = Path(_torch.__file__).parent
    # These names are for everybody: the documentation of torch.library has them.
    public = {"_check", "_check_value", "_check_type"}
    found = []
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.attr] if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch.") else []
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch."):
                names = node.module.split(".") + [alias.name for alias in node.names]
            found += [(path.name, n) for n in names if n.startswith("_") and not n.startswith("__") and n not in public]
    # These modules are public, although their names begin with an underscore.
    allowed = {"_python_dispatch", "_pytree", "_functional_collectives"}
    assert [(file, name) for file, name in found if name not in allowed and file != "_torch.py"] == []


def test_a_schema_names_arguments_and_says_what_is_written():
    op = torch.ops.aten.add_.Tensor
    assert isinstance(op, _torch.OpOverload)
    schema = _torch.schema_of(op)
    assert schema.name == "aten::add_"
    assert [argument.name for argument in schema.arguments] == ["self", "other", "alpha"]
    assert [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write] == ["self"]


def test_a_storage_has_one_key():
    t = torch.ones(3)
    assert _torch.storage_key(t.untyped_storage()) == _torch.storage_key(t.view(1, 3).untyped_storage())
    assert _torch.storage_key(t.untyped_storage()) != _torch.storage_key(torch.ones(3).untyped_storage())


def test_functions_behind_the_functional_ones():
    assert torch.equal(_torch.nn_functions.silu(torch.ones(2)), torch.nn.functional.silu(torch.ones(2)))


def test_fake_tensors_have_no_values():
    with _torch.FakeTensorMode():
        t = torch.ones(2, 3) @ torch.ones(3, 4)
    assert t.shape == (2, 4)
    with pytest.raises(RuntimeError):
        t.tolist()


def test_no_torch_function_mode_sees_a_call():
    class Loud(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            raise AssertionError

    t = torch.ones(2)
    with Loud(), _torch.NoTorchFunctionModes():
        assert t.add(1).shape == (2,)


def test_in_backward():
    seen = []
    x = torch.ones(2, requires_grad=True) * 1
    x.register_hook(lambda g: seen.append(_torch.in_backward()))
    x.sum().backward()
    assert seen == [True]
    assert not _torch.in_backward()


def test_no_torch_function_asks_a_subclass_without_its_own_functions():
    class Loud(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            raise AssertionError

    t = torch.ones(2, 3).as_subclass(Loud)
    with _torch.NoTorchFunction():
        assert t.shape == (2, 3)


def test_stand_in_like_has_no_memory_and_may_be_an_output_of_a_node():
    class Standing(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            raise AssertionError

    like = torch.ones(2, 3, 4, 5, dtype=torch.float64).to(memory_format=torch.channels_last)
    t = _torch.stand_in_like(Standing, like)
    assert (t.shape, t.stride(), t.dtype) == (like.shape, like.stride(), like.dtype)

    class Made(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, hidden):
            return hidden[0]

        @staticmethod
        def backward(ctx, g):
            return g, None

    x = torch.ones_like(like, requires_grad=True)
    for _ in range(2):  # In the second pass the tensor moves to another place in the graph.
        assert Made.apply(x, (t,)) is t
        (g,) = torch.autograd.grad(t, x, torch.ones_like(like))
        assert torch.equal(g, torch.ones_like(g))


def test_is_watched():
    seen = []

    def look(x):
        seen.append(_torch.is_watched())
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
