"""Backward reuses memory where nobody else can see it, and only there."""

import sys

import buffers
import pytest
import torch
import torch.nn.functional as F
from buffers import after, identity_hooks, keep_gradient, kept_gradients, leaf, ramp, unit, used_by
from cases import param_of
from torch.autograd.graph import save_on_cpu
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from inplace_abn import distributed, inplace_abn, inplace_abn_sync
from inplace_abn.activations import TYPICAL


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
    """A process group of one process. The package takes it for a group of several."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    monkeypatch.setattr(distributed, "participating_group", lambda group: torch.distributed.group.WORLD)
    yield
    torch.distributed.destroy_process_group()


class SynchronisedBuffers(TorchDispatchMode):
    """Records where the synchronised backward writes xhat, dy and dx."""

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


@pytest.mark.parametrize("activation", [name for name, _ in TYPICAL])
def test_memory_for_xhat_is_given_if_z_and_its_gradient_are_backwards_own(activation, device):
    a, given = torch.randn(4, 6, 5, 7, device=device, requires_grad=True), []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.namespace == "inplace_abn":
                given.append((kwargs or {}).get("xhat") is not None)
            return func(*args, **(kwargs or {}))

    z = inplace_abn(a * 1, None, None, None, None, activation=activation, activation_param=param_of(activation, 1.0))
    loss = (z * ramp(z)).sum()
    del z
    with Record():
        loss.backward()
    assert given == [True]


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

    for module in (buffers, sys.modules[__name__]):
        monkeypatch.setattr(module, "unit", watched)
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
