"""Chooses channels whose xhat a layer saves as it is, because its output hardly determines it."""

from __future__ import annotations

import torch
from torch import Tensor

_LARGEST_RATIO = {torch.bfloat16: 8.0, torch.float16: 8.0, torch.float32: 64.0, torch.float64: 4096.0}
"""The largest |beta| / |gamma| + 1 of a channel whose xhat is recovered, if xhat of others is saved."""
_LARGEST_IN_FLOAT16 = 8.0
"""The largest |beta| + |gamma| of such a channel in float16, where tags are a share of y instead of zero."""
_SHARE = 4
"""At most one channel in so many is saved."""


def chosen(weight: Tensor | None, bias: Tensor | None, dtype: torch.dtype) -> tuple[int, ...]:
    """The channels that may be why a layer with inputs of this dtype is not trusted; none if that does not help.

    The weights are read, so the host waits for the device. Layers that are trusted do not ask.
    """
    if weight is None:
        return ()
    size = weight.detach().abs().double()
    offset = torch.zeros_like(size) if bias is None else bias.detach().abs().double()
    is_found = ~(size + offset <= _LARGEST_RATIO[dtype] * size)
    found = tuple(is_found.nonzero().flatten().tolist())
    has_large_tags = dtype == torch.float16 and bool((is_found & (offset + size > _LARGEST_IN_FLOAT16)).any())
    return () if has_large_tags or len(found) * _SHARE > len(size) else found
