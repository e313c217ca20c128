"""The inputs of the ranks of a process group, and what one process computes from the whole batch."""

import maths
import torch
import torch.distributed as dist

from inplace_abn import inplace_abn_sync as abn_sync
from inplace_abn import reference

CHANNELS = 5
ACTIVATIONS = {"identity": 0.0, "leaky_relu": 0.01, "elu": 1.3, "relu": 0.0, "silu": 0.0, "hardswish": 0.0}
SHAPES = {
    "equal": [(3, CHANNELS, 4, 6)] * 3,
    "batch sizes differ": [(3, CHANNELS, 4, 6), (1, CHANNELS, 4, 6), (5, CHANNELS, 4, 6)],
    "spatial sizes differ": [(3, CHANNELS, 4, 6), (2, CHANNELS, 7, 3), (1, CHANNELS, 1, 9)],
    "numbers of dimensions differ": [(7, CHANNELS), (2, CHANNELS, 3), (2, CHANNELS, 2, 3, 2)],
    "first rank is empty": [(0, CHANNELS, 4, 6), (3, CHANNELS, 4, 6), (2, CHANNELS, 4, 6)],
    "other ranks are empty": [(2, CHANNELS, 4, 6), (0, CHANNELS, 4, 6), (2, CHANNELS, 0, 6)],
    "one rank has a single value": [(1, CHANNELS, 1, 1), (3, CHANNELS, 4, 6), (2, CHANNELS, 4, 6)],
    "every rank has a single value": [(1, CHANNELS)] * 3,
}


def batches(shapes, dtype=torch.float64):
    """Every rank's x and dz, with statistics that differ between ranks and channels."""
    drawn = []
    for rank, shape in zip(range(dist.get_world_size()), shapes, strict=False):
        draw = torch.Generator().manual_seed(rank)
        noise, dz = torch.randn((2, *shape), generator=draw, dtype=torch.float64)
        offset = reference.per_channel(torch.linspace(-2, 2, shape[1], dtype=torch.float64), noise)
        drawn.append((((1 + rank) * noise + rank + offset).to(dtype), dz.to(dtype)))
    return drawn


def own(drawn):
    x, dz = drawn[dist.get_rank()]
    return x.clone(), dz.clone()


def parameters(dtype=torch.float64):
    weight = torch.tensor([1.0, -0.7, 0.3, 2.0, -0.05], dtype=dtype)
    return weight.requires_grad_(), torch.linspace(-0.5, 0.5, CHANNELS, dtype=dtype).requires_grad_()


def running_statistics(dtype=torch.float64):
    return torch.linspace(-1, 1, CHANNELS, dtype=dtype), torch.linspace(0.5, 2, CHANNELS, dtype=dtype)


def rows(t):
    """``t`` as (values, channels). In this form tensors of ranks with different sizes can be concatenated."""
    return t.movedim(1, -1).flatten(0, -2)


def own_share(whole, drawn):
    """The part of ``whole``, the concatenated rows of all ranks, that belongs to this rank's x."""
    shapes = [x.movedim(1, -1).shape for x, _ in drawn]
    rank = dist.get_rank()
    return whole.detach().split([shape[:-1].numel() for shape in shapes])[rank].view(shapes[rank]).movedim(-1, 1)


def single_process(drawn, weight, bias, running=(None, None), **options):
    """Returns z and dx of this rank's share, dweight and dbias, computed from the whole batch. Updates ``running``."""
    x = torch.cat([rows(x.double()) for x, _ in drawn]).requires_grad_()
    weight, bias = (t if t is None else t.detach().clone().requires_grad_() for t in (weight, bias))
    z = maths.forward(x, weight, bias, *running, **options)
    z.backward(torch.cat([rows(dz.double()) for _, dz in drawn]))
    gradients = [t if t is None else t.grad for t in (weight, bias)]
    return own_share(z, drawn), own_share(x.grad, drawn), *gradients


def synchronised(x, dz, weight, bias, running=(None, None), **options):
    """Returns z and dx of this rank, and dweight and dbias over all ranks, computed by `inplace_abn_sync`."""
    leaf = x.requires_grad_()
    buffer = leaf.clone(memory_format=torch.preserve_format)
    z = abn_sync(buffer, weight, bias, *running, **options)
    kept = z.detach().clone()
    z.backward(dz)
    gradients = [t if t is None else over_ranks(t.grad) for t in (weight, bias)]
    return kept, leaf.grad, *gradients


def over_ranks(t):
    total = t.clone()
    dist.all_reduce(total)
    return total


def check(actual, expected, tolerance=1e-12):
    for a, e in zip(actual, expected, strict=True):
        assert (a is None) == (e is None)
        if a is not None:
            torch.testing.assert_close(a, e, rtol=tolerance, atol=tolerance, check_dtype=False)
