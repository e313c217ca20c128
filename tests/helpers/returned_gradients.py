"""Functions whose backward pass returns a gradient that somebody else holds, or whose memory is not its own."""

import torch


class SameToBoth(torch.autograd.Function):
    """x + y, whose backward hands one tensor to both inputs and keeps it."""

    @staticmethod
    def forward(ctx, x, y, kept):
        ctx.kept = kept
        return x + y

    @staticmethod
    def backward(ctx, g):
        g = g * 1.5
        ctx.kept.append(g)
        ctx.g = g
        return g, g, None


class GradientFrom(torch.autograd.Function):
    """The identity. Its backward returns ``make(g, kept)``."""

    @staticmethod
    def forward(ctx, x, make, kept):
        ctx.make, ctx.kept = make, kept
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return ctx.make(g, ctx.kept), None, None


class ReturnsItsInput(torch.autograd.Function):
    """sum(x^2) / 2. Its gradient is the very tensor that was saved."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.square().sum() / 2

    @staticmethod
    def backward(ctx, g):
        return ctx.saved_tensors[0]


def keep_and_return(g, kept):
    g = g * 1.5
    kept.append(g)
    return g


def keep_view_and_return(g, kept):
    g = g * 1.5
    kept.append(g.view(-1) if g.is_contiguous() else g.permute(0, 2, 3, 1))
    return g


def return_view_of_kept(g, kept):
    kept.append(g * 1.5)
    return kept[-1].view_as(kept[-1])


def return_numpy_memory(g, kept):
    kept.append((g * 1.5).cpu().numpy())
    return torch.from_numpy(kept[-1]).to(g.device)


def return_part_of_larger(g, kept):
    larger = torch.cat([g, g])
    kept.append(larger)
    return larger[: len(g)]


def return_strided(g, kept):
    return torch.stack([g, g], dim=-1)[..., 0]


def return_expanded(g, kept):
    return g.sum((0, 2, 3), keepdim=True).expand_as(g)


def return_negated_lazily(g, kept):
    return torch._neg_view(g * 1.5)


def return_conjugate_part(g, kept):
    return torch.complex(g, -g).conj().imag


def return_zero_tensor(g, kept):
    return torch._efficientzerotensor(g.shape, dtype=g.dtype, device=g.device)


def return_lazy_clone(g, kept):
    kept.append(g * 1.5)
    return torch._lazy_clone(kept[-1])


RETURNED = (
    keep_and_return,
    keep_view_and_return,
    return_view_of_kept,
    return_numpy_memory,
    return_part_of_larger,
    return_strided,
    return_expanded,
    return_negated_lazily,
    return_conjugate_part,
    return_zero_tensor,
    return_lazy_clone,
)
