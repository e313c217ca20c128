"""When recovering xhat from z loses digits.

Backward computes xhat = (y - beta) / gamma from a y that z's rounding has disturbed by u * |y|, u being the unit
roundoff of z's dtype. With |y| about |beta| + |gamma|, the error of xhat, and with it dweight's relative to the terms
it sums, is about u * (1 + |beta| / |gamma|). The other gradients are less sensitive.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from inplace_abn import reference
from inplace_abn.abn import InPlaceABN

# Halley's method and the stolen bit of silu and hardswish cost about as much as two roundings.
_ROUNDINGS = {"silu": 3.0, "hardswish": 3.0}


class Conditioning(NamedTuple):
    """A layer whose weight gradient is inexact."""

    name: str
    """The layer's qualified name."""
    channel: int
    """Its worst channel."""
    ratio: float
    """|beta| / |gamma| there."""
    expected_error: float
    """Of dweight, relative to the size of the terms it sums."""


def expected_error(ratio: float, activation: str, dtype: torch.dtype) -> float:
    """dweight's expected error at |beta| / |gamma| = ``ratio`` for activations of ``dtype``, relative to its terms."""
    return _ROUNDINGS.get(activation, 1.0) * torch.finfo(dtype).eps / 2 * (1 + ratio)


def check_conditioning(
    model: nn.Module, dtype: torch.dtype = torch.float32, threshold: float = 1e-2
) -> list[Conditioning]:
    """The `InPlaceABN` layers of ``model`` whose dweight is expected to be off by more than ``threshold``, worst first.

    Args:
        model: any module.
        dtype: of the activations in training (that of autocast, if it is used).
        threshold: relative error of dweight that is still acceptable.
    """
    found = []
    for name, module in model.named_modules():
        if not isinstance(module, InPlaceABN) or module.weight is None or module.bias is None:
            continue
        gamma = reference.gamma(module.weight.detach().double(), module.eps, module.signed_weight)
        ratios = module.bias.detach().double().abs() / gamma.abs()
        ratio, channel = ratios.max(dim=0)
        error = expected_error(ratio.item(), module.activation, dtype)
        if error > threshold:
            found.append(Conditioning(name, int(channel), ratio.item(), error))
    return sorted(found, key=lambda c: -c.expected_error)
