"""The private names of torch that ``inplace_abn/_torch.py`` uses do what the package needs. A test that fails here
shows what a release of torch has changed.

Names that are for tracers and compilers are in ``tests/compiling/test_private_names_of_compilers.py``.
"""

import ast
import functools
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from inplace_abn import _torch, inplace_abn
from inplace_abn.autograd import nodes
from inplace_abn.autograd.backward import input_edge


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


def test_shared_memory_is_told():
    t = torch.ones(3)
    assert not _torch.is_shared(t)
    assert _torch.is_shared(t.share_memory_())
    if torch.version.cuda is not None or torch.version.hip is not None:
        assert _torch._is_as_allocated is not None
    if torch.cuda.is_available():
        t = torch.ones(3, device="cuda")
        assert not _torch.is_shared(t)
        t.untyped_storage()._share_cuda_()
        assert _torch.is_shared(t)


def test_transforms_active():
    seen = []
    torch.func.grad(lambda x: (seen.append(_torch.transforms_active()), x.sum())[1])(torch.ones(2))
    assert seen == [True]
    assert not _torch.transforms_active()


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


def test_take_for_tensors():
    """Without it the mode that looks at the first run of a compiled region refuses the class."""
    import torch._dynamo
    from torch.fx.experimental import proxy_tensor

    class Kind(torch.Tensor):
        pass

    modules = [proxy_tensor, sys.modules["torch._functorch._aot_autograd.runtime_wrappers"]]
    known = [module.HANDLED_TYPES for module in modules if hasattr(module, "HANDLED_TYPES")]
    assert known
    _torch.take_for_tensors(Kind)
    for module in modules:
        if hasattr(module, "HANDLED_TYPES"):
            assert Kind in module.HANDLED_TYPES
            module.HANDLED_TYPES = module.HANDLED_TYPES[:-1]


def test_base_of():
    x = torch.ones(3)
    assert _torch.base_of(x[1:].view(2, 1)) is x
    assert _torch.base_of(x) is None


def test_has_global_hooks():
    assert not _torch.has_global_hooks()
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert _torch.has_global_hooks()
    handle.remove()


def test_is_capturing():
    assert not _torch.is_capturing(torch.ones(1))
    if torch.cuda.is_available():
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            x = torch.ones(1, device="cuda")
            assert _torch.is_capturing(x)


def test_is_lazy_copy():
    x = torch.ones(2)
    copied = torch._lazy_clone(x)
    assert _torch.is_lazy_copy(copied)
    assert not _torch.is_lazy_copy(torch.ones(2))


def test_is_plain():
    with torch.inference_mode():
        made_in_inference = torch.ones(2)
    unusual = {
        "zero tensor": torch._efficientzerotensor((2, 3)),
        "negative bit": torch._neg_view(torch.ones(2)),
        "conjugate bit": torch.ones(2, dtype=torch.complex64).conj(),
        "sparse": torch.ones(2).to_sparse(),
        "inference": made_in_inference,
        "meta": FakeTensorMode().from_tensor(torch.ones(2)),
    }
    assert [name for name, t in unusual.items() if _torch.is_plain(t)] == []
    seen = []
    torch.func.vmap(lambda t: (seen.append(_torch.is_plain(t)), t)[1])(torch.ones(2))
    torch.func.grad(lambda t: (seen.append(_torch.is_plain(t)), t.sum())[1])(torch.ones(2))
    assert seen == [False, False]
    for t in (torch.ones(2), torch.ones(2, device="meta"), nn.Parameter(torch.ones(2)), torch.ones(3, 2).t()[1:]):
        assert _torch.is_plain(t)


def test_no_mode_sees_what_is_made_without_dispatch():
    with FakeTensorMode(), _torch.NoDispatch():
        assert type(torch.empty(0)) is torch.Tensor


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


def test_ops_are_seen_by_foreign_modes_tracers_and_transforms():
    class PassOn(_torch.OwnMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    class Foreign(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    seen = []

    def look(x):
        seen.append((_torch.is_in_foreign_mode(), _torch.is_transformed(), _torch.tracing_state() is not None))
        return x + 1

    look(torch.ones(2))
    with PassOn():
        look(torch.ones(2))
    with Foreign():
        look(torch.ones(2))
    torch.jit.trace(look, torch.ones(2), check_trace=False)
    torch.func.vmap(look)(torch.ones(2))
    nobody, mode, tracer, transform = (False,) * 3, (True, False, False), (False, True, True), (False, True, False)
    assert seen == [nobody, nobody, mode, tracer, transform]


def test_builtin_of_an_op_is_called_like_the_op_and_seen_by_modes():
    class Count(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            Count.calls += func is torch.ops.aten.add.Tensor
            return func(*args, **(kwargs or {}))

    add = _torch.builtin_of(torch.ops.aten.add.Tensor)
    with Count():
        assert add(torch.ones(2), torch.ones(2), alpha=2).tolist() == [3, 3]
    assert Count.calls == 1


@pytest.mark.parametrize("sees_measurements", [True, False])
def test_unwatched_ops_are_hidden_from_own_modes_that_do_not_see_measurements(sees_measurements):
    seen = []

    class Own(_torch.OwnMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    class Foreign(TorchDispatchMode):
        __torch_dispatch__ = Own.__torch_dispatch__

    Own.sees_measurements = sees_measurements
    x = torch.ones(2, requires_grad=True)
    with Own():
        with _torch.unwatched():
            y = x * 2
        assert bool(seen) == sees_measurements
        y.sum().backward()
        assert x.grad.tolist() == [2, 2]
        seen.clear()
        with Foreign(), _torch.unwatched():
            torch.ones(2)
        assert seen
    with _torch.unwatched():
        assert torch.ones(2).sum() == 2


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


def test_raw_saved_tensors_tell_hooks(monkeypatch):
    monkeypatch.setattr(nodes, "cpp", None)
    z = inplace_abn(torch.ones(2, 3, requires_grad=True) * torch.rand(2, 3), None, None, None, None)
    assert not nodes._is_hooked(z.grad_fn)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        hooked = inplace_abn(torch.ones(2, 3, requires_grad=True) * torch.rand(2, 3), None, None, None, None)
    assert nodes._is_hooked(hooked.grad_fn)


def test_hooks_of_checkpoints_are_told():
    found = []

    def look(x):
        found.append(_torch.checkpoint_of(_torch.top_saved_tensors_hooks(True)))
        return x.sin()

    x = torch.ones(2, requires_grad=True)
    checkpoint(look, x, use_reentrant=False).sum().backward()
    with torch.autograd.graph.save_on_cpu():
        look(x)
    with torch.autograd.graph.saved_tensors_hooks(functools.partial(lambda t: t), lambda t: t):
        look(x)
    assert found[0] is found[1] is not None
    assert found[2:] == [None, None]


def test_recomputations_run_in_a_context():
    found = []

    @contextmanager
    def context():
        found.append("begins")
        # A recomputation may end early, by an exception.
        try:
            yield
        finally:
            found.append("ends")

    def look(x):
        hooks = _torch.top_saved_tensors_hooks(True)
        if not found:
            _torch.recompute_in(_torch.checkpoint_of(hooks), context)
        found.append("computed")
        return x.sin()

    checkpoint(look, torch.ones(2, requires_grad=True), use_reentrant=False).sum().backward()
    assert found == ["computed", "begins", "computed", "ends"]


def test_compiled_functions_are_seen_on_the_stack():
    found = []

    def look(x):
        found.append(_torch.in_compiled_function())
        return x

    def checkpointed(x):
        return checkpoint(look, x, use_reentrant=False)

    never = torch.compiler.disable(look)
    with torch.compiler.set_stance("force_eager"):
        for function in (
            look,
            torch.compile(look),
            never,
            torch.compile(lambda x: never(x)),
            torch.compile(checkpointed),
        ):
            function(torch.ones(2))
    assert found == [False, True, False, False, True]


def test_unsafe_split_gives_a_place_in_the_graph_that_overwriting_leaves_alone():
    x = torch.ones(2, 3, requires_grad=True) * 1
    before = x.grad_fn
    edge = input_edge(x)
    x.mul_(2)
    assert edge.numel() == 0
    assert edge.grad_fn.next_functions[0][0] is before


def test_every_private_name_is_tested():
    tree = ast.parse(Path(_torch.__file__).read_text())
    names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    names += [t.id for node in tree.body if isinstance(node, ast.Assign) for t in node.targets]
    tests = Path(__file__).parents[1].rglob("test_private_names*.py")
    text = "".join(path.read_text() for path in tests)
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


def test_the_base_of_torchs_norms_is_what_ours_has():
    assert issubclass(nn.BatchNorm2d, _torch.NormBase)
    assert issubclass(nn.InstanceNorm2d, _torch.NormBase)
    module = _torch.NormBase(3, 1e-5, 0.1, True, True, device="cpu", dtype=torch.float64)
    assert [*module.state_dict()] == [*nn.BatchNorm2d(3).state_dict()]
    assert {t.dtype for t in module.parameters()} == {torch.float64}


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


def test_autograd_removes_hooks_of_what_a_custom_function_modified_through_the_subclass():
    seen = []

    class Seeing(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            seen.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.mark_dirty(x)
            return x

        @staticmethod
        def backward(ctx, g):
            return g

    x = (torch.ones(2, requires_grad=True) * 1).as_subclass(Seeing)
    seen.clear()
    Function.apply(x)
    assert [func in _torch.HOOKS for func in seen] == [True]
