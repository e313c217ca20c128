"""A check of a model's parameters: which of its in-place modules would have inexact gradients."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from inplace_abn.abn import InPlaceABN
from inplace_abn.instance_norm import InPlaceInstanceNorm
from inplace_abn.recovery import predicted


class Conditioning(NamedTuple):
    """A layer whose gradients would be inexact."""

    name: str
    """The layer's qualified name."""
    channel: int
    """Its worst channel."""
    expected_error: float
    """The error of dx or of that channel's dweight, whichever is larger."""


def check_conditioning(
    model: nn.Module, dtype: torch.dtype = torch.float32, threshold: float = 1e-2
) -> list[Conditioning]:
    """The in-place modules of ``model`` whose predicted gradient error is larger than ``threshold``, worst first.

    Only modules that were built in place are checked, not converted ones. The prediction uses the parameters alone. The
    guard measures real values in training, and makes such layers keep their input.

    Args:
        model: any module.
        dtype: of the activations in training (that of autocast, if it is used).
        threshold: relative error of dx, or of a channel's dweight, that is still acceptable.
    """
    found = []
    for name, module in model.named_modules():
        if isinstance(module, (InPlaceABN, InPlaceInstanceNorm)):
            how = (module.activation, module.activation_param, module.eps, module.signed_weight)
            errors = predicted(module.weight, module.bias, dtype, *how)
            error = errors.worst().item()
            if error > threshold:
                found.append(Conditioning(name, int(errors.weight.argmax()), error))
    return sorted(found, key=lambda c: -c.expected_error)
