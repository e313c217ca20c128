"""Group norm and activation in place: statistics of each sample, which neighbouring channels share."""

from __future__ import annotations

import torch
from torch import Tensor

from inplace_abn import functions, guard
from inplace_abn.modules.abn import InPlaceActivatedNorm
from inplace_abn.settings import AT_LEAST_EPS, Operands, Settings


def inplace_group_norm(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    activation: str = "leaky_relu",
    activation_param: float = 0.01,
    *,
    residual: Tensor | None = None,
    overwrite_input: bool = True,
) -> Tensor:
    """z = act(weight * (x - mean) / sqrt(var + eps) + bias + residual) of each group, written over ``x``.

    Args:
        x: activations of shape (batch, channel, \\*); otherwise as for `inplace_abn.inplace_abn`.
        num_groups: into how many groups of neighbouring channels each sample is divided. It divides the channels.
        weight: (channel,) or None; the scale, with a magnitude of at least ``eps``. float32 or x's dtype.
        bias: (channel,) or None. float32 or x's dtype.
        eps: added to the variance; also the smallest magnitude of the scale. Positive.
        activation, activation_param, residual, overwrite_input: as for `inplace_abn.inplace_abn`.

    Returns:
        What `inplace_abn.inplace_abn` returns.

    Raises:
        ValueError: a wrong value or shape, only one value per group, or an ``x`` that autograd forbids to overwrite.
            Nothing has been modified.
        TypeError: a dtype that is not supported or does not combine with x's.
        RuntimeError: the op that made ``x`` needs it for its own backward.
    """
    shared = _shared(x, num_groups)
    settings = Settings(activation, activation_param, eps, AT_LEAST_EPS, True, None, shared)
    return functions.run(x, Operands(weight, bias, residual), settings, overwrite_input)


def _shared(x: Tensor, num_groups: int) -> int:
    """The number of channels in a group."""
    if x.dim() < 2:
        raise ValueError(f"inplace_abn: expected x of shape (batch, channel, *), got {tuple(x.shape)}")
    if num_groups < 1 or x.shape[1] % num_groups or x.shape[1] == 0:
        raise ValueError(f"inplace_abn: expected num_groups to divide the {x.shape[1]} channels of x, got {num_groups}")
    return x.shape[1] // num_groups


class InPlaceGroupNorm(InPlaceActivatedNorm):
    """Group normalisation and activation that write the result over the input and keep nothing else for backward.

    Input, output and the optional residual have shape (batch, channel, \\*), contiguous or channels-last. The residual
    is added before the activation. Mathematics, defaults and state dicts are those of `torch.nn.GroupNorm`: the scale
    is the weight itself, and evaluation does what training does.

    The guard of `InPlaceABN` measures whether the input can be recovered exactly enough.

    Args:
        num_groups: into how many groups of neighbouring channels each sample is divided.
        num_channels: number of channels, a multiple of ``num_groups``.
        eps: added to the variance. Positive.
        affine: whether there are a ``weight`` (initially 1) and a ``bias`` (initially 0). Either may be set to None.
        activation, activation_param, overwrite_input, guard_interval, device, dtype: as for `InPlaceABN`.

    Raises:
        ValueError: an argument is out of range.

    The errors of a call are those of `inplace_group_norm`.
    """

    per_instance = True

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        activation: str = "leaky_relu",
        activation_param: float = 0.01,
        *,
        overwrite_input: bool = True,
        guard_interval: int = 100,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        guard.check_interval(guard_interval)
        if num_groups < 1 or num_channels < 1 or num_channels % num_groups:
            raise ValueError(
                f"inplace_abn: expected num_channels to be a multiple of num_groups, got {num_channels} and "
                f"{num_groups}"
            )
        super().__init__(
            num_channels, eps, None, affine, False, activation, activation_param, device=device, dtype=dtype
        )
        self.num_groups = num_groups
        self.num_channels = num_channels
        self.overwrite_input = overwrite_input
        self.guard_interval = guard_interval

    @property
    def shared(self) -> int:
        return self.num_channels // self.num_groups

    def _shared_by(self, x: Tensor) -> int:
        return _shared(x, self.num_groups)

    def extra_repr(self) -> str:
        return f"{self.num_groups}, {self.num_channels}, eps={self.eps}, affine={self.affine}, {self._end_of_repr()}"
