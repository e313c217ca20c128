"""Recognises a product of a linear layer's output and a vector, as in LayerScale (`inplace_abn.autograd.scale`)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from inplace_abn import _torch
from inplace_abn.autograd.scale import Exchange, Linear
from inplace_abn.conversion.converted import may_have_node

PRODUCTS: frozenset[Any] = frozenset(
    [torch.mul, torch.multiply, Tensor.mul, Tensor.multiply, Tensor.__mul__, Tensor.__rmul__]
)
PERMUTING: frozenset[Any] = frozenset([torch.permute, Tensor.permute])
VIEWING: frozenset[Any] = PERMUTING | frozenset(
    [
        *(Tensor.view, Tensor.reshape, Tensor.flatten, Tensor.transpose, Tensor.unsqueeze, Tensor.squeeze),
        *(torch.reshape, torch.flatten, torch.transpose, torch.unsqueeze, torch.squeeze, Tensor.contiguous),
        *(Tensor.__getitem__, Tensor.select, torch.select),
    ]
)
"""Functions that mostly return a view, or what they are given."""


class Origin(NamedTuple):
    """What is known of a linear layer's output, or of a permutation of it."""

    linear: Linear
    versions: tuple[int, ...]
    """Those of what the output was computed from, and of the output."""
    exchange: Exchange | None
    """None if the linear layer has torch's node."""
    dims: tuple[int, ...]
    """The output's dimensions, in their present order."""

    def permuted(self, dims: Any) -> Origin:
        """What is known of a permutation."""
        dims = dims[0] if len(dims) == 1 else dims
        return self._replace(dims=tuple(self.dims[dim] for dim in dims))

    @property
    def back(self) -> tuple[int, ...]:
        """The permutation that makes the output."""
        return tuple(self.dims.index(i) for i in range(len(self.dims)))

    def vector(self, t: Tensor, factor: Any) -> Tensor | None:
        """The factor of ``t`` as a vector that belongs to the outputs of the layer.

        None if it is something else, needs no gradient, or if a tensor is not the same any more.
        """
        if type(factor) not in (Tensor, nn.Parameter) or not (factor.requires_grad and t.requires_grad):
            return None
        if t.numel() == 0:
            return None
        # The product that stands for the output is not scaled by the factor, and may be too large for float16. In
        # bfloat16 it has less digits than the output has, unless autocast takes these from the output, too.
        is_narrow = t.dtype == torch.float16 or (t.dtype == torch.bfloat16 == self.linear.weight.dtype)
        if is_narrow or not factor.is_floating_point():
            return None
        count, place = self.linear.weight.shape[0], self.dims.index(len(self.dims) - 1) - len(self.dims)
        is_vector = 1 < count == factor.numel() and -place <= factor.dim() <= len(self.dims)
        if not is_vector or factor.shape[place] != count or _versions(self.linear, t) != self.versions:
            return None
        return factor.reshape(-1)  # type: ignore[no-any-return]


def of_output(module: Any, args: tuple[Any, ...], u: Tensor, exchange: Exchange | None) -> Origin | None:
    """What is known of a module's output; None if it is not certain that it is that of a linear layer.

    Only what torch keeps for the linear layer may be kept for the product.
    """
    kind = type(module)
    if kind.forward is not nn.Linear.forward or "forward" in vars(module) or len(args) != 1:
        return None
    # Hooks may replace the output, and see what the node of the linear layer returns.
    others = [hook for hook in module._forward_hooks.values() if not _is_own(hook)]
    if others or module._backward_hooks or _torch.has_global_hooks():
        return None
    given = module._parameters
    # Parameters that are computed are not looked at, because that would compute them once more.
    if not given.keys() >= {"weight", "bias"} or module._modules:
        return None
    h, weight, bias = args[0], given["weight"], given["bias"]
    if type(h) is not Tensor or not may_have_node(u) or module.weight is not weight or module.bias is not bias:
        return None
    # torch keeps a copy of what is not contiguous.
    is_plain = h.layout is torch.strided and not h.is_nested and h.is_contiguous() and h.dim() > 1
    is_plain = is_plain and u.is_floating_point()
    if not is_plain or type(weight) is not nn.Parameter or h.dtype != u.dtype or h.is_inference():
        return None
    if h.shape[:-1] != u.shape[:-1] or not (h.requires_grad and weight.requires_grad and u.requires_grad):
        return None
    linear = Linear(h, weight, bias)
    return Origin(linear, _versions(linear, u), exchange, tuple(range(u.dim())))


def _is_own(hook: Any) -> bool:
    """Whether a hook is one of this package, which returns what it is given or nothing."""
    return str(getattr(hook, "__module__", "")).startswith("inplace_abn.")


def _versions(linear: Linear, t: Tensor) -> tuple[int, ...]:
    return tuple(0 if each is None else each._version for each in (*linear, t))
