"""Of what a compiled norm may be one with: decided when it is compiled, from the weights that it has then."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from inplace_abn import joint, recovery
from inplace_abn.figures import THRESHOLDS, Threshold

_CANDIDATES = {
    "identity": ("identity", 0.0),
    "relu": ("relu", 0.0),
    "leaky_relu": ("leaky_relu", 0.01),
    "elu=1.0": ("elu", 1.0),
    "silu": ("silu", 0.0),
    "hardswish": ("hardswish", 0.0),
}
_RESIDUAL = 4.0
"""Standard deviation that a residual is taken to have."""


def trusted_now(module: Any, dtype: torch.dtype) -> str:
    """What `compiled.normalised` is to be told of a converted norm. A compiler compiles anew when it changes."""
    if not module._trusted:
        return ""
    return _predicted(module, dtype)


@torch._dynamo.assume_constant_result
def _predicted(module: Any, dtype: torch.dtype) -> str:
    joint.install()
    return " ".join(_CANDIDATES)+" residual"
