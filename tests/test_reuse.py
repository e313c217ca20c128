"""Backward reuses memory where nobody else can see it, and only there: what is kept keeps its content, however it is
kept, and the allocator is asked for nothing of an activation's size where reuse is possible."""

import ctypes
import os
import subprocess
import sys
import threading
from contextlib import contextmanager, nullcontext

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from inplace_abn import InPlaceABN, collectives, inplace_abn, inplace_abn_sync, ownership
from inplace_abn.autograd import marked_as_overwritten
from inplace_abn.ops import backend

SHAPE = (3, 4, 5, 6)


def leaf(device="cpu", shape=SHAPE):
    return torch.randn(shape, dtype=torch.float64, device=device, requires_grad=True)


def unit(a, **options):
    """A fresh activation, overwritten."""
    weight = a.new_tensor([1.0, -0.5, 2.0, 0.7]).requires_grad_()
    return inplace_abn(a * 2, weight, None, None, None, **options)


def ramp(t):
    return torch.linspace(-1, 1, t.numel(), dtype=t.dtype, device=t.device).view(t.shape).cos()


class Buffers(TorchDispatchMode):
    """Where each backward step writes dx (and the residual's gradient): over dz, over z, or to fresh memory."""

    def __init__(self):
        super().__init__()
        self.used = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.inplace_abn.local_backward.default:
            inputs = {args[0].data_ptr(): "z", args[1].data_ptr(): "dz"}
            self.used.extend(
                inputs.get(kwargs[name].data_ptr(), "fresh")
                for name in ("dx", "dresidual")
                if kwargs.get(name) is not None
            )
        return func(*args, **kwargs)


def used_by(backward):
    with Buffers() as buffers:
        backward()
    return buffers.used


# --- Where memory is reused ------------------------------------------------------------------------------------------


def after(consume, keep=None, watch=None, **options):
    """Backward of sum(consume(z)); ``keep`` may hold z, ``watch`` hooks it."""

    def make(device):
        a = leaf(device)
        z = unit(a, **options)
        held = keep(z) if keep else None
        if watch:
            watch(z)
        loss = consume(z).sum()

        def backward(held=held, **more):
            loss.backward(**more)

        return backward

    return make


def retained(make):
    def make_retained(device):
        backward = make(device)
        return lambda: backward(retain_graph=True)

    return make_retained


def under(context, make):
    def make_under(device):
        with context():
            return make(device)

    return make_under


def sum_of_two(device):
    a = leaf(device)
    loss = ((unit(a) + unit(a)) * 2).sum()
    return loss.backward


def in_checkpoint(consume):
    def make(device):
        a = leaf(device)
        return checkpoint(lambda a: consume(unit(a)).sum(), a, use_reentrant=False).backward

    return make


def with_residual(consume):
    def make(device):
        a = leaf(device)
        return consume(unit(a, residual=a.sin())).sum().backward

    return make


def identity_hooks():
    return saved_tensors_hooks(lambda t: t, lambda t: t)


def keep_gradient(z):
    z.register_hook(lambda g: kept_gradients.append(g))


kept_gradients = []

REUSE = {
    "gradient made by the consumer": (after(lambda z: z * 2), ["dz"]),
    "gradient of a convolution": (after(lambda z: F.conv2d(z, z.new_ones(2, 4, 3, 3))), ["dz"]),
    "gradient summed from two consumers": (after(lambda z: z * 2 + z * 3), ["dz"]),
    "retain_graph": (retained(after(lambda z: z * 2)), ["dz"]),
    "expanded gradient": (after(lambda z: z), ["z"]),
    "expanded gradient, z kept": (after(lambda z: z, keep=lambda z: z), ["fresh"]),
    "expanded gradient, z kept detached": (after(lambda z: z, keep=lambda z: z.detach()), ["fresh"]),
    "expanded gradient, retain_graph": (retained(after(lambda z: z)), ["fresh"]),
    "gradient in another layout": (after(lambda z: z.permute(0, 2, 3, 1).contiguous() * 2), ["z"]),
    "gradient kept by a hook": (after(lambda z: z * 2, watch=keep_gradient), ["z"]),
    "gradient kept by a hook, z kept": (after(lambda z: z * 2, lambda z: z, keep_gradient), ["fresh"]),
    "gradient of a view": (after(lambda z: (z * 2).flatten(1)), ["dz"]),
    "sum of two": (sum_of_two, ["z", "dz"]),
    "identity hooks": (under(identity_hooks, after(lambda z: z * 2)), ["dz"]),
    "identity hooks, expanded gradient": (under(identity_hooks, after(lambda z: z)), ["fresh"]),
    "save_on_cpu, expanded gradient": (under(save_on_cpu, after(lambda z: z)), ["fresh"]),
    "checkpoint": (in_checkpoint(lambda z: z * 2), ["dz"]),
    "checkpoint, expanded gradient": (in_checkpoint(lambda z: z), ["fresh"]),
    "anomaly mode": (under(lambda: torch.autograd.set_detect_anomaly(True), after(lambda z: z * 2)), ["dz"]),
    "eval": (after(lambda z: z * 2, training=False), ["dz"]),
    "residual": (with_residual(lambda z: z * 2), ["dz", "z"]),
    "residual, expanded gradient": (with_residual(lambda z: z), ["fresh", "z"]),
}


@pytest.mark.parametrize("case", REUSE)
def test_memory_is_reused_where_it_can_be(case, device):
    make, expected = REUSE[case]
    kept_gradients.clear()
    used = used_by(make(device))
    assert sorted(used) == sorted(expected)


@pytest.fixture
def process_group(monkeypatch):
    """Of one process, taken for one of several."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    monkeypatch.setattr(collectives, "participating_group", lambda group: torch.distributed.group.WORLD)
    yield
    torch.distributed.destroy_process_group()


class SynchronisedBuffers(TorchDispatchMode):
    """Where the synchronised backward writes xhat, dy and dx."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.inplace_abn.backward_reduce.out:
            self.inputs = {args[0].data_ptr(): "z", args[1].data_ptr(): "dz"}
            self.used = [self.inputs.get(kwargs[name].data_ptr(), "fresh") for name in ("xhat", "dy")]
        if func is torch.ops.inplace_abn.backward.out:
            self.used.append({args[0].data_ptr(): "xhat", args[1].data_ptr(): "dy"}[kwargs["dx"].data_ptr()])
        return func(*args, **kwargs)


def hooked_after_forward(z):
    packed = []
    z.grad_fn._raw_saved_tensors[0].register_hooks(packed.append, lambda _: packed[0].view_as(packed[0]))


SYNCHRONISED_REUSE = {
    "gradient made by the consumer": (lambda z, _: None, lambda z: z * 2, {}, ["z", "dz", "dy"]),
    "expanded gradient": (lambda z, _: None, lambda z: z, {}, ["z", "fresh", "dy"]),
    "z kept": (lambda z, kept: kept.append(z), lambda z: z * 2, {}, ["fresh", "dz", "dy"]),
    "retain_graph": (lambda z, _: None, lambda z: z * 2, {"retain_graph": True}, ["fresh", "dz", "dy"]),
    "gradient kept by a hook": (lambda z, _: keep_gradient(z), lambda z: z * 2, {}, ["z", "fresh", "dy"]),
    "hooks registered after forward": (
        lambda z, _: hooked_after_forward(z),
        lambda z: z * 2,
        {},
        ["fresh", "dz", "dy"],
    ),
}


@pytest.mark.parametrize("case", SYNCHRONISED_REUSE)
@pytest.mark.parametrize("with_residual", [False, True])
def test_the_synchronised_backward_reuses_memory_where_it_can(with_residual, case, process_group, device):
    watch, consume, options, expected = SYNCHRONISED_REUSE[case]
    kept_gradients.clear()
    gradients = []
    for function in (inplace_abn_sync, inplace_abn):
        torch.manual_seed(1)
        a, kept = leaf(device), []
        r = a.detach().cos().requires_grad_() if with_residual else None
        z = function(a * 1, None, None, None, None, residual=r)
        if function is inplace_abn_sync:
            watch(z, kept)
        values = z.detach().clone()
        loss = consume(z).sum()
        del z
        with SynchronisedBuffers() as buffers:
            loss.backward(**options)
        if function is inplace_abn_sync:
            assert buffers.used == ([*expected[:2], "xhat"] if with_residual else expected)
            assert all(torch.equal(z, values) for z in kept)
        gradients.append([a.grad, r.grad if with_residual else a.grad])
    torch.testing.assert_close(*gradients)
    assert all(torch.equal(g, torch.full_like(g, 2)) for g in kept_gradients)


@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
@pytest.mark.parametrize(
    ("dtype", "allowed"), [(torch.float64, 1e-10), (torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 4e-3)]
)
def test_silu_is_inverted_once_where_both_buffers_are_owned_with_the_same_gradients(
    dtype, allowed, training, with_residual, device
):
    a = torch.randn(4, 6, 5, 7, device=device).to(dtype).requires_grad_()
    r = torch.randn_like(a).requires_grad_() if with_residual else None
    affine = [torch.rand(6, device=device, dtype=torch.promote_types(dtype, torch.float32)) + 0.5 for _ in range(2)]
    running = [torch.rand(6, device=device, dtype=affine[0].dtype) + 0.5 for _ in range(2)]
    leaves = [a, *(t.requires_grad_() for t in affine), *([r] if with_residual else [])]
    results, ops_run = [], []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.namespace == "inplace_abn":
                ops_run.append((func._opname, (kwargs or {}).get("xhat") is not None))
            return func(*args, **(kwargs or {}))

    for retain in (False, True):
        z = inplace_abn(a * 1, *affine, *(t.clone() for t in running), training=training, activation="silu", residual=r)
        loss = (z * ramp(z)).sum()
        del z
        with Record():
            results.append(torch.autograd.grad(loss, leaves, retain_graph=retain))
    assert ops_run == [("local_backward", True), ("local_backward", False)]
    for ours, others in zip(*results, strict=True):
        assert (ours - others).abs().max() <= allowed * others.abs().max()


@pytest.mark.parametrize("case", REUSE)
def test_gradients_are_no_part_of_the_graph(case, device, monkeypatch):
    make, _ = REUSE[case]
    seen = []

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, g):
            seen.append((g.requires_grad, g.grad_fn))
            return g

    def watched(a, **options):
        weight = a.new_tensor([1.0, -0.5, 2.0, 0.7]).requires_grad_()
        return inplace_abn(Watched.apply(a), weight, None, None, None, **options)

    monkeypatch.setitem(globals(), "unit", watched)
    make(device)()
    assert seen
    assert all(s == (False, None) for s in seen)


@pytest.mark.parametrize("consume", [lambda z: z, lambda z: z * 2], ids=["over z", "over dz"])
def test_intermediate_gradients_asked_for_are_no_part_of_the_graph(consume, device):
    x = leaf(device) * 1
    before = torch.autograd.graph.get_gradient_edge(x)
    inplace_abn(x, None, None, None, None)
    loss = consume(x).sum()
    del x
    (g,) = torch.autograd.grad(loss, before)
    assert not g.requires_grad
    assert g.grad_fn is None


# --- Whatever is kept keeps its content ------------------------------------------------------------------------------


class Subclass(torch.Tensor):
    pass


def through_set(t):
    return torch.empty(0, dtype=t.dtype, device=t.device).set_(
        t.untyped_storage(), t.storage_offset(), t.size(), t.stride()
    )


def as_c_array(t):
    array = np.require(t.numpy(), requirements="C")
    return (ctypes.c_double * t.numel()).from_buffer(array)


# How to hold a tensor's memory, and how to read what is held.
HOLDERS = {
    "tensor": (lambda t: t, lambda h: h),
    "in a tuple in a list": (lambda t: [(t,)], lambda h: h[0][0]),
    "in a closure": (lambda t: lambda: t, lambda h: h()),
    "detach": (lambda t: t.detach(), lambda h: h),
    "data": (lambda t: t.data, lambda h: h),
    "alias": (lambda t: torch.ops.aten.alias(t.detach()), lambda h: h),
    "part": (lambda t: t.detach()[1:], lambda h: h),
    "one value": (lambda t: t.detach()[0, 0, 0, 0], lambda h: h),
    "transposed": (lambda t: t.detach().transpose(0, 1), lambda h: h),
    "chunks": (lambda t: t.detach().chunk(2), lambda h: torch.cat(h)),
    "as_strided": (lambda t: t.detach().as_strided((1,), (1,)), lambda h: h),
    "as integers": (lambda t: t.detach().view(torch.int64), lambda h: h),
    "parameter": (lambda t: nn.Parameter(t.detach()), lambda h: h),
    "subclass": (lambda t: t.detach().as_subclass(Subclass), lambda h: h.as_subclass(torch.Tensor)),
    "storage": (lambda t: t.untyped_storage(), lambda h: torch.tensor(list(h))),
    "typed storage": (lambda t: t.storage(), lambda h: torch.tensor(h.tolist())),
    "set_": (lambda t: through_set(t.detach()), lambda h: h),
    "lazy clone": (lambda t: torch._lazy_clone(t.detach()), lambda h: h),
    "iterator": (lambda t: (r for r in [t]), lambda h: next(h)),
}
CPU_HOLDERS = {
    "numpy": (lambda t: t.detach().numpy(), torch.from_numpy),
    "numpy view": (lambda t: t.detach().numpy()[1:], lambda h: torch.from_numpy(h.copy())),
    "memoryview": (lambda t: memoryview(t.detach().numpy()), lambda h: torch.from_numpy(np.array(h))),
    "dlpack": (lambda t: torch.from_dlpack(t.detach()), lambda h: h),
    "numpy by dlpack": (lambda t: np.from_dlpack(t.detach()), lambda h: torch.tensor(h)),
    "C array": (lambda t: as_c_array(t.detach()), lambda h: torch.tensor(list(h))),
}


class Backward(torch.autograd.Function):
    """Identity whose backward is ``make``."""

    @staticmethod
    def forward(ctx, z, make):
        ctx.make = make
        return z * 1.0

    @staticmethod
    def backward(ctx, g):
        return ctx.make(g), None


def numpy_memory(g):
    return torch.from_numpy(g.cpu().numpy() * 1.5).to(g.device)


# How the gradient comes about.
ORIGINS = {
    "mul": lambda z: z * 1.5,
    "add": lambda z: z + 0,
    "neg": torch.neg,
    "expanded": torch.sum,
    "reshaped": lambda z: z.view(3, -1) * 2,
    "clone": torch.clone,
    "cat": lambda z: torch.cat([z, z]),
    "pad": lambda z: F.pad(z, (1, 1)),
    "index": lambda z: z[:, [0, 1, 2, 3]],
    "pool": lambda z: F.max_pool2d(z, 2),
    "two consumers": lambda z: z * 2 + z * 3,
    "three consumers": lambda z: z * 2 + z * 3 + z.sin(),
    "square": lambda z: z * z,
    "convolution": lambda z: F.conv2d(z, z.new_ones(2, 4, 3, 3)),
    "other layout": lambda z: z.permute(0, 2, 3, 1).contiguous() * 2,
    "python: fresh": lambda z: Backward.apply(z, lambda g: g * 1.5),
    "python: the same": lambda z: Backward.apply(z, lambda g: g),
    "python: clone": lambda z: Backward.apply(z, torch.clone),
    "python: view": lambda z: Backward.apply(z, lambda g: (g * 1.5).view_as(g)),
    "python: numpy": lambda z: Backward.apply(z, numpy_memory),
    "python, twice": lambda z: Backward.apply(Backward.apply(z, lambda g: g * 2), lambda g: g * 1.5),
}


def hold_gradient(z, out, hold):
    z.register_hook(lambda g: hold(g))


def hold_before_node(z, out, hold):
    z.grad_fn.register_prehook(lambda gradients: hold(gradients[0]))


def hold_after_node(z, out, hold):
    z.grad_fn.register_hook(lambda gradients, outgoing: hold(outgoing[0]))


def hold_after_consumer(z, out, hold):
    def hook(gradients, outgoing):
        for g in gradients:
            if g is not None and g.shape == SHAPE:
                hold(g)

    out.grad_fn.register_hook(hook)


def hold_output(z, out, hold):
    hold(z)


@pytest.mark.parametrize(
    "where",
    [hold_gradient, hold_before_node, hold_after_node, hold_after_consumer, hold_output],
    ids=lambda f: f.__name__,
)
@pytest.mark.parametrize("origin", ORIGINS)
@pytest.mark.filterwarnings("ignore:TypedStorage")
def test_what_is_held_keeps_its_content(origin, where, device):
    holders = HOLDERS | (CPU_HOLDERS if device.type == "cpu" else {})
    for name, (take, read) in holders.items():
        held = []

        def hold(t, take=take, read=read, held=held):
            before = read(take(t)).clone()
            held.append((take(t), before))

        # Some holders do not exist for some tensors, such as a typed storage of an expanded one.
        try:
            take(torch.zeros(SHAPE, dtype=torch.float64, device=device))
            z = unit(leaf(device))
            out = ORIGINS[origin](z)
            where(z, out, hold)
            loss = out if out.dim() == 0 else (out * ramp(out)).sum()
            del z, out
            loss.backward()
        except (TypeError, RuntimeError, BufferError, ValueError):
            if name in EVERYWHERE:
                raise
            continue
        assert held or where is hold_after_consumer
        for h, before in held:
            assert torch.equal(read(h), before), name


EVERYWHERE = [
    "tensor",
    "in a tuple in a list",
    "in a closure",
    "detach",
    "data",
    "part",
    "numpy",
    "parameter",
    "storage",
]


def test_a_gradient_from_memory_that_lives_on_keeps_its_content(device):
    mine = torch.randn(SHAPE, dtype=torch.float64, device=device)
    for make in (
        lambda g: mine,
        lambda g: mine.detach(),
        lambda g: mine.view_as(mine),
        lambda g: torch.cat([mine, mine])[: SHAPE[0]],
        lambda g: mine.as_strided(mine.shape, mine.stride()),
    ):
        before = mine.clone()
        out = Backward.apply(unit(leaf(device)), make)
        out.sum().backward()
        assert torch.equal(mine, before)


def test_gradients_in_a_numpy_array_keep_their_content():
    array = np.random.default_rng(0).standard_normal(SHAPE)
    before = array.copy()
    Backward.apply(unit(leaf()), lambda g: torch.from_numpy(array)).sum().backward()
    assert (array == before).all()


def test_gradients_in_shared_memory_keep_their_content():
    shared = torch.randn(SHAPE, dtype=torch.float64).share_memory_()
    before = shared.clone()
    Backward.apply(unit(leaf()), lambda g: shared).sum().backward()
    assert torch.equal(shared, before)


def test_memory_is_told_apart_also_after_many_calls(device):
    """Interpreters rewrite code that has run often; references must go on being counted alike."""
    for _ in range(1500):
        kept = []
        z = unit(leaf(device, (2, 4)))
        z.register_hook(lambda g, kept=kept: kept.append((g, g.clone())))
        loss = (z * 2).sum()
        del z
        loss.backward()
        assert torch.equal(*kept[0])
    assert used_by(after(lambda z: z * 2)(device)) == ["dz"]
    assert used_by(after(lambda z: z)(device)) == ["z"]


# --- What counts as a holder -----------------------------------------------------------------------------------------


def test_nothing_is_concluded_from_tensors_whose_memory_has_other_rules():
    t = torch.ones(2, 3)
    for other in (
        t.as_subclass(Subclass),
        torch.eye(3).to_sparse(),
        torch.from_numpy(np.ones((2, 3))),
        torch.ones(2, 3, dtype=torch.complex64).conj(),
        torch._neg_view(torch.ones(2, 3)),
        torch._efficientzerotensor((2, 3)),
        torch._lazy_clone(torch.ones(2, 3)),
        t[:, 0],
        torch.ones(1).expand(5),
    ):
        assert backend.holders(other) is None
    assert backend.holders(t) is not None
    shared = torch.ones(2, 3).share_memory_()
    assert backend.holders(shared) != backend.holders(t)


def test_each_tensor_on_a_storage_is_a_holder():
    t = torch.ones(4, 6)
    before = backend.holders(t)
    alias = t.detach()
    assert backend.holders(t) == (*before[:2], before[2] + 1)
    del alias
    assert backend.holders(t) == before


def test_a_gradients_holders_are_known_to_the_backward_that_was_given_it_only(device):
    seen = []

    def look(gradients):
        seen.append(backend.gradient_holders(gradients[0]))

    z = marked_as_overwritten(leaf(device) * 1)
    z.grad_fn.register_prehook(look)
    (z * 2).sum().backward()
    assert seen == [None]
    assert backend.gradient_holders(z) is None


def test_references_are_counted_alike_where_a_compiler_evaluates_frames():
    """A compilation that failed left its frame evaluator in place, under which calls hold one reference more."""

    def refused(x):
        return inplace_abn(x, None, None, None, None)

    with pytest.raises(RuntimeError, match="leaf"):
        torch.compile(refused, backend="eager", fullgraph=True)(leaf())
    check_reuse()


# --- Calibration -----------------------------------------------------------------------------------------------------


@contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class PassOn(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class PassOnFunctions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@contextmanager
def traced():
    """A debugger that looks at all local variables."""

    def look(frame, event, argument):
        frame.f_locals  # noqa: B018
        return look

    sys.settrace(look)
    try:
        yield
    finally:
        sys.settrace(None)


SURROUNDINGS = {
    "nothing": nullcontext,
    "inference_mode": torch.inference_mode,
    "no_grad": torch.no_grad,
    "meta device": lambda: torch.device("meta"),
    "identity hooks": identity_hooks,
    "save_on_cpu": save_on_cpu,
    "hooks disabled": lambda: torch.autograd.graph.disable_saved_tensors_hooks("disabled"),
    "fake tensors": FakeTensorMode,
    "dispatch mode": PassOn,
    "function mode": PassOnFunctions,
    "default dtype half": lambda: default_dtype(torch.half),
    "default dtype bfloat16": lambda: default_dtype(torch.bfloat16),
    "default dtype double": lambda: default_dtype(torch.double),
    "anomaly mode": lambda: torch.autograd.set_detect_anomaly(True),
    "autocast": lambda: torch.autocast("cpu"),
    "debugger": traced,
}


def forget(monkeypatch):
    monkeypatch.setattr(ownership, "_sole_gradients", frozenset())
    monkeypatch.setattr(ownership, "_sole_output", None)
    backend.set_sole_holders([], None)


def calibrate():
    ownership.calibrate(inplace_abn, marked_as_overwritten)


@pytest.fixture
def uncalibrated(monkeypatch):
    before = ownership._sole_gradients, ownership._sole_output
    forget(monkeypatch)
    assert used_by(after(lambda z: z * 2)("cpu")) == ["fresh"]
    assert used_by(after(lambda z: z)("cpu")) == ["fresh"]
    yield
    monkeypatch.undo()
    calibrate()
    assert (ownership._sole_gradients, ownership._sole_output) == before


def check_reuse():
    assert ownership._sole_gradients
    assert ownership._sole_output
    assert used_by(after(lambda z: z * 2)("cpu")) == ["dz"]
    assert used_by(after(lambda z: z)("cpu")) == ["z"]
    assert used_by(after(lambda z: z * 2, watch=keep_gradient)("cpu")) == ["z"]
    assert used_by(after(lambda z: z * 2, lambda z: z, keep_gradient)("cpu")) == ["fresh"]
    kept_gradients.clear()


@pytest.mark.parametrize("surroundings", SURROUNDINGS)
def test_calibration_does_not_depend_on_where_it_happens(surroundings, uncalibrated):
    with SURROUNDINGS[surroundings]():
        calibrate()
    check_reuse()


def test_calibration_in_a_thread_in_a_backward_and_in_transforms(uncalibrated, monkeypatch):
    def again(*_):
        forget(monkeypatch)
        calibrate()

    thread = threading.Thread(target=again)
    thread.start()
    thread.join()
    check_reuse()
    y = leaf() * 2
    y.register_hook(again)
    y.sum().backward()
    check_reuse()
    torch.func.grad(lambda x: (again(), x.sum())[1])(torch.ones(3))
    check_reuse()
    torch.func.vmap(lambda x: (again(), x)[1])(torch.ones(3))
    check_reuse()


def test_a_calibration_that_cannot_tell_leaves_reuse_off(uncalibrated, monkeypatch):
    monkeypatch.setattr(backend, "holders", lambda t: (1, 1, 1))
    monkeypatch.setattr(backend, "gradient_holders", lambda t: (1, 1, 1))
    monkeypatch.setattr(backend, "last_observed", lambda: ((1, 1, 1), 1))
    calibrate()
    assert not ownership._sole_gradients
    assert ownership._sole_output is None
    assert used_by(after(lambda z: z * 2)("cpu")) == ["fresh"]
    assert used_by(after(lambda z: z)("cpu")) == ["fresh"]


IMPORT_IN_INFERENCE_MODE = """
import torch
with torch.inference_mode(), torch.device("meta"):
    import inplace_abn
a = torch.randn(4, 3, 5, requires_grad=True)
z = inplace_abn.InPlaceABN(3)(a * 2)
z.square().sum().backward()
from inplace_abn import ownership
assert ownership._sole_gradients and ownership._sole_output
assert a.grad.isfinite().all()
"""

DISABLED = """
import torch
from inplace_abn import ABN, InPlaceABN, InPlaceABNSync
torch.manual_seed(0)
a = torch.randn(4, 3, 5, dtype=torch.float64)
for module in (InPlaceABN, InPlaceABNSync):
    results = []
    for norm in (module(3, signed_weight=True), ABN(3)):
        x = torch.sigmoid(a.clone().requires_grad_())
        x.retain_grad()
        before = x.detach().clone()
        z = norm.double()(x)
        assert torch.equal(x.detach(), before) and z is not x
        z.pow(2).sum().backward()
        results.append([z, x.grad, norm.weight.grad, norm.bias.grad, norm.running_mean, norm.running_var])
    for ours, theirs in zip(*results):
        torch.testing.assert_close(ours, theirs)
"""


@pytest.mark.parametrize(
    ("code", "environment"), [(IMPORT_IN_INFERENCE_MODE, {}), (DISABLED, {"INPLACE_ABN_DISABLE": "1"})]
)
def test_in_a_process_of_its_own(code, environment):
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], env=os.environ | environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr


# --- The allocator's account -----------------------------------------------------------------------------------------


def allocations(step, at_least):
    """Sizes of the blocks of ``at_least`` bytes allocated within each ABN's backward node, and all events' sizes."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    events = profiler.profiler.kineto_results.events()
    memory = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    nodes = sorted(
        (e.start_ns(), e.end_ns())
        for e in events
        if "evaluate_function" in e.name() and "InPlaceABNFunction" in e.name()
    )
    within = [[size for time, size in memory if start <= time <= end and size >= at_least] for start, end in nodes]
    return within, [size for _, size in memory]


def peak(sizes):
    held = most = 0
    for size in sizes:
        held += size
        most = max(most, held)
    return most


def activation(device, layout="contiguous"):
    x = torch.randn(8, 16, 24, 24, device=device)
    return x.contiguous(memory_format=torch.channels_last) if layout == "channels_last" else x


def conv(bias=False):
    return nn.Conv2d(16, 16, 3, padding=1, bias=bias)


def in_place(activation="leaky_relu"):
    return [InPlaceABN(16, activation=activation)]


def native():
    return [nn.BatchNorm2d(16), nn.LeakyReLU(0.01)]


class Chain(nn.Sequential):
    def __init__(self, units, norm=in_place):
        super().__init__(*[m for _ in range(units) for m in (conv(), *norm())], conv())


class AddBlock(nn.Module):
    """y = ABN(conv(ABN(conv(r)))) + r"""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(conv(), *in_place(), conv(), *in_place("identity"))

    def forward(self, r):
        return self.body(r) + r


class ResidualArgumentBlock(nn.Module):
    """y = act(BN(conv(ABN(conv(r)))) + r) by the residual argument."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(conv(), *in_place(), conv())
        self.last = InPlaceABN(16)

    def forward(self, r):
        return self.last(self.body(r), residual=r)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("loss", [lambda y: y.square().mean(), torch.sum], ids=["weighted", "sum"])
@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
def test_backward_of_abn_between_convolutions_allocates_nothing(training, loss, layout):
    net = Chain(3).train(training)
    x = activation("cpu", layout)
    value = loss(net(x))
    within, _ = allocations(value.backward, x.nbytes)
    assert within == [[], [], []]


# Blocks of an activation's size that each ABN of a block allocates in backward, from the last to the first.
# AddBlock: the add hands one gradient to the block and to what is around it, so it is not the last ABN's to overwrite;
# but nobody needs that ABN's output any more (the add saves nothing), and dx takes its memory.
# ResidualArgumentBlock: two results, dx and the residual's gradient, and two buffers that are its own, dz and z. The
# block's output is the next one's input, whose convolution has been differentiated by then.
RESIDUAL = {
    "add": (AddBlock, [[], []]),
    "residual argument": (ResidualArgumentBlock, [[], []]),
}


@pytest.mark.parametrize("block", RESIDUAL)
def test_backward_of_residual_blocks_allocates_what_sharing_forces(block):
    kind, expected = RESIDUAL[block]
    net = nn.Sequential(conv(), *in_place(), kind(), kind(), conv())
    x = activation("cpu")
    value = net(x).square().mean()
    within, _ = allocations(value.backward, x.nbytes)
    assert within == [*expected, *expected, []]


def test_an_output_that_is_kept_costs_one_block_where_the_gradient_is_shared_too():
    net = nn.Sequential(conv(), *in_place(), AddBlock(), conv())
    kept = []
    net[2].body[3].register_forward_hook(lambda module, args, output: kept.append(output))
    x = activation("cpu")
    value = net(x).square().mean()
    within, _ = allocations(value.backward, x.nbytes)
    assert within == [[x.nbytes], [], []]


@pytest.mark.parametrize("units", [2, 5, 9])
def test_a_chain_keeps_one_activation_per_unit(units):
    x = activation("cpu")
    held = []

    def forward(net):
        def step():
            held.append(net(x))

        return step

    _, ours = allocations(forward(Chain(units)), 0)
    _, theirs = allocations(forward(Chain(units, native)), 0)
    # One per unit, and the last convolution's result; BatchNorm and its activation keep an input each.
    assert round(sum(ours) / x.nbytes, 1) == units + 1
    assert round(sum(theirs) / x.nbytes, 1) == 3 * units + 1


def test_a_training_step_needs_no_more_than_the_activations_and_a_few_at_a_time():
    x = activation("cpu")
    peaks = {}
    for units in (4, 8):
        net = Chain(units)
        net(x).square().mean().backward()
        net.zero_grad(set_to_none=True)
        _, sizes = allocations(lambda net=net: net(x).square().mean().backward(), 0)
        peaks[units] = peak(sizes) / x.nbytes
    assert peaks[8] - peaks[4] == pytest.approx(4, abs=0.1)
    assert peaks[4] < 4 + 5.5


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_a_chain_on_cuda_keeps_one_activation_per_unit_and_backward_adds_none(layout):
    x = torch.randn(8, 16, 64, 64, device="cuda").contiguous(
        memory_format=torch.channels_last if layout == "channels_last" else torch.contiguous_format
    )
    used = {}
    for units in (4, 8):
        net = Chain(units).cuda().to(memory_format=torch.channels_last if layout == "channels_last" else None)
        net(x).square().mean().backward()
        net.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        value = net(x).square().mean()
        held = torch.cuda.memory_allocated() - before
        value.backward()
        used[units] = held / x.nbytes, (torch.cuda.max_memory_allocated() - before) / x.nbytes
    assert used[8][0] - used[4][0] == pytest.approx(4, abs=0.1)
    assert used[8][1] - used[4][1] == pytest.approx(4, abs=0.1)
