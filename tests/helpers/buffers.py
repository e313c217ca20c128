"""An activation that is overwritten, and a record of the memory that its backward writes to."""

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from inplace_abn import inplace_abn
from inplace_abn.kernels import ops

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
    """Records where each backward step writes dx and the residual's gradient: over dz, over z, or to fresh memory."""

    def __init__(self):
        super().__init__()
        self.used = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is ops.local_backward:
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


def after(consume, keep=None, watch=None, **options):
    """Makes the backward of sum(consume(z)). ``keep`` may hold z, and ``watch`` may hook it."""

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


def identity_hooks():
    return saved_tensors_hooks(lambda t: t, lambda t: t)


def keep_gradient(z):
    z.register_hook(lambda g: kept_gradients.append(g))


kept_gradients = []
