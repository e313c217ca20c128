"""Instance norm and activation in place: statistics per sample and channel, otherwise as batch norm.

What a sample's channels are to instance norm, channels are to batch norm. So all of a batch are further channels of one
sample, whose parameters are repeated, and whose gradients autograd adds up.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from inplace_abn import _torch, checks, functions, guard, plain, reference
from inplace_abn.abn import ActivatedNorm
from inplace_abn.activations import check_activation
from inplace_abn.settings import Operands, Settings, check_hyperparameters


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
    keep_input: bool = False,
) -> Tensor:
    """z = act(weight * (x - mean) / sqrt(var + eps) + bias + residual) of each sample, written over ``x``.

    Args:
        x: activations of shape (batch, channel, space, \\*), dtype float64, float32, bfloat16 or float16, in any
            strides without internal overlap. Overwritten with the result, unless ``keep_input``.
        weight: (channel,) or None; scales as it is, but by at least ``eps`` in magnitude. float32 or x's dtype.
        bias: (channel,) or None. float32 or x's dtype.
        running_mean: (channel,) or None; updated in training with the mean over the batch, used otherwise.
        running_var: (channel,) or None; updated in training (with the unbiased variance), used otherwise.
        training: normalise with the statistics of ``x``; otherwise with the running ones, if there are any.
        momentum: share of the new statistics in the running ones.
        eps: added to the variance, and the least that scales. Positive.
        activation, activation_param, residual, keep_input: as of `inplace_abn.inplace_abn`.

    Returns:
        ``x``, which now holds the result; or with ``keep_input`` a new tensor of its shape, dtype and memory format.

    Raises:
        ValueError: a wrong value or shape, one value per channel and sample in training, or an ``x`` that autograd does
            not let be overwritten. Nothing has been modified.
        TypeError: a dtype that is not supported or does not combine.
        RuntimeError: ``x``'s producer needs it for its own backward.
    """
    check_activation(activation, activation_param)
    check_hyperparameters(eps, momentum)
    if not training and running_mean is not None:
        return functions.inplace_abn(
            x,
            weight,
            bias,
            running_mean,
            running_var,
            False,
            momentum,
            eps,
            activation,
            activation_param,
            signed_weight=True,
            residual=residual,
            keep_input=keep_input,
        )
    checks.check_instances(x, weight=weight, bias=bias, running_mean=running_mean, running_var=running_var)
    if functions.is_plain():
        scale = None if weight is None else reference.gamma(weight, eps, True)
        what = (momentum, eps, activation, activation_param, residual)
        return plain.instance_norm(x, scale, bias, running_mean, running_var, True, *what)
    if running_mean is not None and not torch.compiler.is_compiling() and _torch.transforms_active():
        # A statistic that the transform has captured is an error, before anything is written.
        running_mean.add_(0)
    settings = Settings(activation, activation_param, eps, True, True, None, per_instance=True)
    samples = x.shape[0]
    operands = Operands(weight, bias, residual, running_mean, running_var, momentum)
    of_samples = repeated(operands, samples)
    z = functions.local(x, of_samples, settings, keep_input)
    take_means(operands, of_samples, samples)
    return z


def repeated(operands: Operands, samples: int) -> Operands:
    """With each vector once for each sample."""
    weight, bias, residual, running_mean, running_var, momentum = operands
    weight, bias, running_mean, running_var = (
        None if t is None else t.repeat(samples) for t in (weight, bias, running_mean, running_var)
    )
    return Operands(weight, bias, residual, running_mean, running_var, momentum)


def take_means(operands: Operands, of_samples: Operands, samples: int) -> None:
    """Makes the running statistics the means of those of samples; without a sample they stay as they were."""
    if samples == 0:
        return
    for name in ("running_mean", "running_var"):
        t, each = getattr(operands, name), getattr(of_samples, name)
        if t is not None:
            with torch.no_grad():
                t.copy_(each.view(samples, -1).mean(dim=0))


class InPlaceInstanceNorm(guard.Guarded, ActivatedNorm):
    """Instance normalisation and activation that write their result over the input and keep nothing else for backward.

    Input and output have shape (batch, channel, space, \\*), of any number of dimensions, contiguous or channels-last,
    and so has the optional residual, which is added before the activation. Mathematics, defaults, running statistics,
    evaluation and state dicts are those of torch's InstanceNorm1d, 2d and 3d, but that there has to be a batch: the
    weight scales as it is, running statistics are those of the mean over the batch, batches are not counted.

    While its output would not tell what the input was, the layer keeps its input, as torch does, and returns a new
    tensor: `inplace_abn.set_guard` says how that is watched.

    Args:
        num_features: number of channels.
        eps: added to the variance. Positive.
        momentum: share of a batch's statistics in the running ones; None for none.
        affine: whether there are a ``weight`` (initially 1) and a ``bias`` (initially 0). Either may be set to None.
        track_running_stats: whether there are ``running_mean`` and ``running_var``, which evaluation uses;
            without them it uses the sample's statistics too.
        activation: "identity" (or "none"), "leaky_relu", "elu", "relu", "silu", "hardswish",
            "gelu", "gelu_tanh", "mish".
        activation_param: slope of leaky_relu (>= 0; zero means relu), alpha of elu (> 0).
        keep_input: write the result to new memory, and leave the input as it is; it is not kept for backward.
        guard_interval: optimizer steps between two measurements of whether the output tells the input; 0 for none.
        device, dtype: of parameters and running statistics.

    Raises:
        ValueError: for an argument out of range.

    See `inplace_instance_norm` for the errors of a call. Without parameters and running statistics any number of
    channels is right; another one than ``num_features`` is a warning, as of torch's.
    """

    signed_weight = True
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
        keep_input: bool = False,
        guard_interval: int = 100,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        guard.check_interval(guard_interval)
        super().__init__(
            num_features,
            eps,
            momentum,
            affine,
            track_running_stats,
            activation,
            activation_param,
            device=device,
            dtype=dtype,
        )
        self.keep_input = keep_input
        self.guard_interval = guard_interval

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """``act(norm(x) + residual)``, written over x of shape (batch, channel, space, \\*) unless ``keep_input``."""
        weight, bias, running_mean, running_var = self.weight, self.bias, self.running_mean, self.running_var
        if x.dim() > 1 and x.shape[1] != self.num_features and weight is bias is running_mean is None:
            warnings.warn(
                f"inplace_abn: expected x of {self.num_features} channels, got {tuple(x.shape)}; without parameters "
                "and running statistics it makes no difference",
                stacklevel=2,
            )
        training = self.training or running_mean is None
        momentum = 0.0 if self.momentum is None else self.momentum
        what = (running_mean, running_var, training, momentum, self.eps, self.activation, self.activation_param)
        if guard.lets(self, x, residual):
            return inplace_instance_norm(x, weight, bias, *what, residual=residual, keep_input=self.keep_input)
        if training:
            checks.check_instances(x, weight=weight, bias=bias, running_mean=running_mean, running_var=running_var)
        operands = Operands(weight, bias, residual, running_mean, running_var)
        functions.check_kept(x, operands, training, self.keep_input)
        return plain.instance_norm(x, weight, bias, *what, residual)

    def extra_repr(self) -> str:
        return super().extra_repr() + (", keep_input=True" if self.keep_input else "")
