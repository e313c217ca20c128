"""Memory that somebody holds keeps its content, however it is held. Also: who counts as a holder."""

import ctypes
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from buffers import SHAPE, after, leaf, ramp, unit, used_by
from torch import nn

from inplace_abn import _torch
from inplace_abn.autograd import ownership


class Subclass(torch.Tensor):
    pass


def through_set(t):
    return torch.empty(0, dtype=t.dtype, device=t.device).set_(
        t.untyped_storage(), t.storage_offset(), t.size(), t.stride()
    )


def as_c_array(t):
    array = np.require(t.numpy(), requirements="C")
    return (ctypes.c_double * t.numel()).from_buffer(array)


def in_another_process(t):
    """The memory of a tensor as another process maps it: by a storage of its own, which torch does not count."""
    storage = t.untyped_storage()
    storage.share_memory_()
    mapped = torch.UntypedStorage._new_shared_fd_cpu(*storage._share_fd_cpu_())
    return torch.empty(0, dtype=t.dtype).set_(mapped, t.storage_offset(), t.size(), t.stride())


class Sent:
    """The address of a tensor on a GPU that was sent to another process. It holds nothing."""

    def __init__(self, t):
        t.untyped_storage()._share_cuda_()
        self.__cuda_array_interface__ = dict(t.detach().__cuda_array_interface__)


# For each kind of holder: how to hold the memory of a tensor, and how to read the holder.
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
    "another process": (lambda t: in_another_process(t.detach()), lambda h: h),
}
CUDA_HOLDERS = {"another process": (Sent, lambda h: torch.as_tensor(h, device="cuda"))}


class Backward(torch.autograd.Function):
    """The identity. Its backward is ``make``."""

    @staticmethod
    def forward(ctx, z, make):
        ctx.make = make
        return z * 1.0

    @staticmethod
    def backward(ctx, g):
        return ctx.make(g), None


def numpy_memory(g):
    return torch.from_numpy(g.cpu().numpy() * 1.5).to(g.device)


# These functions decide where the gradient comes from.
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
    holders = HOLDERS | (CPU_HOLDERS if device.type == "cpu" else CUDA_HOLDERS)
    for name, (take, read) in holders.items():
        held, impossible = [], []

        def hold(t, name=name, take=take, read=read, held=held, impossible=impossible):
            # Some holders do not exist for some tensors, such as a typed storage of an expanded one.
            try:
                before = read(take(t)).clone()
                held.append((take(t), before))
            except (TypeError, RuntimeError, BufferError, ValueError) as error:
                if name in EVERYWHERE:
                    raise
                impossible.append(error)

        z = unit(leaf(device))
        out = ORIGINS[origin](z)
        where(z, out, hold)
        loss = out if out.dim() == 0 else (out * ramp(out)).sum()
        del z, out
        loss.backward()
        assert held or impossible or where is hold_after_consumer
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
    "another process",
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
    """Interpreters rewrite code that has run often. References must be counted as before."""
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


def counted(t):
    return ownership.counts(t, sys.getrefcount(t))


def test_nothing_is_concluded_from_tensors_whose_memory_has_other_rules():
    t = torch.ones(2, 3)
    for other in (
        t.as_subclass(Subclass),
        torch.eye(3).to_sparse(),
        torch.from_numpy(np.ones((2, 3))),
        torch.ones(2, 3, dtype=torch.complex64).conj(),
        torch._neg_view(torch.ones(2, 3)),
        torch._lazy_clone(torch.ones(2, 3)),
        torch._efficientzerotensor((2, 3)),
        torch.ones(2, 3).share_memory_(),
    ):
        assert counted(other) is None
    assert counted(t) is not None


@pytest.mark.parametrize("is_as_allocated", [True, False, None], ids=["allocated", "sent", "unknown"])
def test_memory_of_a_gpu_has_one_owner_only_if_it_was_never_sent_to_another_process(is_as_allocated, monkeypatch):
    """The sender's storage can be resized and has one holder, as if nobody else could see it."""
    t = SimpleNamespace(is_cpu=False, untyped_storage=lambda: SimpleNamespace(_cdata=7))
    asked = []
    tell = None if is_as_allocated is None else lambda address: (asked.append(address), is_as_allocated)[1]
    monkeypatch.setattr(_torch, "_is_as_allocated", tell)
    assert _torch.is_shared(t) == (not is_as_allocated)
    assert asked == ([] if is_as_allocated is None else [7])


def test_each_tensor_on_a_storage_is_a_holder():
    t = torch.ones(4, 6)
    before = counted(t)
    alias = t.detach()
    assert counted(t) == (*before[:2], before[2] + 1)
    del alias
    assert counted(t) == before
