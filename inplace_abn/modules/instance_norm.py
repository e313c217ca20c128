"""Instance norm and activation in place: batch norm with statistics per sample and channel.

The ops treat a batch as one sample with batch * channel channels. Vectors are repeated for each sample.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from inplace_abn import functions, guard
from inplace_abn.modules.abn import InPlaceActivatedNorm
from inplace_abn.settings import AT_LEAST_EPS, Operands, Settings


def inplace_instance_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    activation: str = "leaky_relu",
    activation_param: float = 0.01,
    *,
    residual: Tensor | None = None,
    overwrite_input: bool = True,
) -> Tensor:
    """z = act(weight * (x - mean) / sqrt(var + eps) + bias + residual) of each sample, written over ``x``.

    Args:
        x: activations of shape (batch, channel, space, \\*); otherwise as for `inplace_abn.inplace_abn`.
        weight: (channel,) or None; the scale, with a magnitude of at least ``eps``. float32 or x's dtype.
        bias: (channel,) or None. float32 or x's dtype.
        running_mean: (channel,) or None; updated in training with the mean over the batch, used otherwise.
        running_var: (channel,) or None; updated in training (with the unbiased variance), used otherwise.
        training: normalise with the statistics of ``x``; otherwise with the running ones, if there are any.
        momentum: share of the new statistics in the running ones.
        eps: added to the variance; also the smallest magnitude of the scale. Positive.
        activation, activation_param, residual, overwrite_input: as for `inplace_abn.inplace_abn`.

    Returns:
        What `inplace_abn.inplace_abn` returns.

    Raises:
        ValueError: a wrong value or shape, only one value per channel and sample in training, or an ``x`` that autograd
            forbids to overwrite. Nothing has been modified.
        TypeError: a dtype that is not supported or does not combine with x's.
        RuntimeError: the op that made ``x`` needs it for its own backward.
    """
    training = training or running_mean is None
    settings = Settings(activation, activation_param, eps, AT_LEAST_EPS, training, None, int(training))
    operands = Operands(weight, bias, residual, running_mean, running_var, momentum)
    return functions.run(x, operands, settings, overwrite_input)


class InPlaceInstanceNorm(InPlaceActivatedNorm):
    """Instance normalisation and activation that write the result over the input and keep nothing else for backward.

    Input, output and the optional residual have shape (batch, channel, space, \\*), with any number of spatial
    dimensions, contiguous or channels-last. The residual is added before the activation. Mathematics, defaults, running
    statistics, evaluation and state dicts are those of torch's InstanceNorm1d, 2d and 3d: the scale is the weight
    itself, running statistics are means over the batch, and batches are not counted. Unlike in torch, the input must
    have a batch dimension.

    The guard of `InPlaceABN` measures whether the input can be recovered exactly enough.

    Args:
        num_features: number of channels.
        eps: added to the variance. Positive.
        momentum: share of a batch's statistics in the running ones; None means 0.
        affine: whether there are a ``weight`` (initially 1) and a ``bias`` (initially 0). Either may be set to None.
        track_running_stats: whether there are ``running_mean`` and ``running_var``, which evaluation uses. Otherwise,
            or if it is set to False later, evaluation uses each sample's own statistics.
        activation, activation_param, overwrite_input, guard_interval, device, dtype: as for `InPlaceABN`.

    Raises:
        ValueError: an argument is out of range.

    The errors of a call are those of `inplace_instance_norm`. Without parameters and running statistics any number of
    channels is accepted. If it is not ``num_features``, a warning is given, as by torch.
    """

    per_instance = True

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = False,
        track_running_stats: bool = False,
        activation: str = "leaky_relu",
        activation_param: float = 0.01,
        *,
        overwrite_input: bool = True,
        guard_interval: int = 100,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        guard.check_interval(guard_interval)
        of_norm = (num_features, eps, momentum, affine, track_running_stats, activation, activation_param)
        super().__init__(*of_norm, device=device, dtype=dtype)
        self.overwrite_input = overwrite_input
        self.guard_interval = guard_interval

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """``act(norm(x) + residual)``, written over x of shape (batch, channel, space, \\*) if ``overwrite_input``."""
        absent = self.weight is self.bias is self.running_mean is None
        if isinstance(x, Tensor) and x.dim() > 1 and x.shape[1] != self.num_features and absent:
            warnings.warn(
                f"inplace_abn: expected x of {self.num_features} channels, got {tuple(x.shape)}; without parameters "
                "and running statistics it makes no difference",
                stacklevel=2,
            )
        return super().forward(x, residual)
