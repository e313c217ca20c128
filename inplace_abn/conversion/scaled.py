"""Recognises a product of a linear layer's output and a vector, as in LayerScale (`inplace_abn.autograd.scale`)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from inplace_abn import _torch
from inplace_abn.autograd.scale import Exchange, Linear

PRODUCTS: frozenset[Any] = frozenset(
    [torch.mul, torch.multiply, Tensor.mul, Tensor.multiply, Tensor.__mul__, Tensor.__rmul__]
)
PERMUTING: frozenset[Any] = frozenset([torch.permute, Tensor.permute])


class Origin(NamedTuple):
    """What is known of a linear layer's output u, or of a permutation of it."""

    linear: Linear
    versions: tuple[int, ...]
    exchange: Exchange | None
    """None if u has torch's node."""
    u: Tensor | None
    """None if the tensor itself is u."""
    dims: tuple[int, ...]
    """The dimensions of u, in their present order."""

    def permuted(self, t: Tensor, dims: Any) -> Origin:
        """What is known of ``t.permute(*dims)``."""
        dims = dims[0] if len(dims) == 1 else dims
        return self._replace(u=t if self.u is None else self.u, dims=tuple(self.dims[dim] for dim in dims))

    def vector(self, factor: Any) -> Tensor | None:
        """The factor as a vector that belongs to the outputs of the layer.

        None if it is something else, needs no gradient, or if what u was computed from is not the same any more.
        """
        if type(factor) not in (Tensor, nn.Parameter) or not factor.requires_grad:
            return None
        count, place = self.linear.weight.shape[0], self.dims.index(len(self.dims) - 1) - len(self.dims)
        is_vector = 1 < count == factor.numel() and -place <= factor.dim() <= len(self.dims)
        if not is_vector or factor.shape[place] != count or _versions(self.linear) != self.versions:
            return None
        return factor.reshape(-1)  # type: ignore[no-any-return]


def of_output(module: Any, args: tuple[Any, ...], u: Tensor, exchange: Exchange | None) -> Origin | None:
    """What is known of a module's output; None if it is not certain that it is that of a linear layer."""
    if type(module).forward is not nn.Linear.forward or "forward" in vars(module) or len(args) != 1:
        return None
    # Other hooks may have replaced the output.
    if len(module._forward_hooks) != 1 or _torch.has_global_hooks():
        return None
    h, weight, bias = args[0], module._parameters.get("weight"), module._parameters.get("bias")
    is_plain = type(h) is Tensor and h.dtype == u.dtype and type(weight) is nn.Parameter and h.dim() > 1
    if not is_plain or h.shape[:-1] != u.shape[:-1] or (bias is None) != (module.bias is None):
        return None
    linear = Linear(h, weight, bias)
    return Origin(linear, _versions(linear), exchange, None, tuple(range(u.dim())))


def _versions(linear: Linear) -> tuple[int, ...]:
    return tuple(-1 if t is None or t.is_inference() else t._version for t in linear)
