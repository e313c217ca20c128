"""The oracle: a norm and an activation by their formulas, differentiable, in the precision of the inputs."""

import math

import torch

from inplace_abn import reference
from inplace_abn.activations import TANH_CUBIC, TANH_SCALE, activate


def forward(
    x,
    weight,
    bias,
    running_mean,
    running_var,
    training=True,
    momentum=0.1,
    eps=1e-5,
    activation="leaky_relu",
    activation_param=0.01,
    signed_weight=False,
    residual=None,
):
    """z for x of shape (batch, channel, *). Updates the running statistics in place."""
    if training or running_mean is None or running_var is None:
        count = x.numel() // x.shape[1]
        mean = reference.channel_mean(x)
        var = reference.channel_mean((x - reference.per_channel(mean, x)).square())
        reference.update(running_mean, running_var, mean, var, count, momentum)
    else:
        mean, var = running_mean, running_var
    scale = None if weight is None else reference.gamma(weight, eps, signed_weight)
    y = reference.scaled(reference.standardised(x, mean, var, eps), scale, bias, residual)
    return exactly(y, activation, activation_param)


def exactly(y, activation, param):
    """act(y) in the precision of y's dtype.

    Torch's kernels are less exact. The kernel of hardswish for CUDA multiplies even doubles by a sixth in float's
    precision. The kernels of gelu lose its tail in 1 + erf and 1 + tanh.
    """
    if activation == "hardswish":
        return y * (y + 3).clamp(0, 6) / 6
    if activation == "gelu":
        return 0.5 * y * torch.erfc(-math.sqrt(0.5) * y)
    if activation == "gelu_tanh":
        return y * torch.sigmoid(y * (TANH_SCALE + TANH_SCALE * TANH_CUBIC * y * y))
    return activate(y, activation, param)
