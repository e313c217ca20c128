"""Norms of samples, which are instance norms and group norms: their formulas, and nets of their modules."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from maths import exactly
from torch import nn

from inplace_abn import InPlaceGroupNorm, InPlaceInstanceNorm, inplace_group_norm, inplace_instance_norm

GROUPS = 2


def correlated(x):
    """A gradient that is correlated with x, as that of a squared loss is."""
    return torch.randn_like(x) + 2 * x


def of_channels(t, x):
    return t.view(1, -1, *[1] * (x.dim() - 2))


def scaled_and_activated(x, weight, bias, activation, param, residual):
    y = x * of_channels(weight, x) + of_channels(bias, x)
    return exactly(y if residual is None else y + residual, activation, param)


def instance_oracle(
    x, weight, bias, mean, var, training=True, *, eps=1e-5, activation, activation_param, residual=None
):
    """Instance norm by its formula. The second derivatives and channels-last gradients of torch's own are less
    exact."""
    dims = tuple(range(2, x.dim()))
    own_mean, own_var = x.mean(dims, keepdim=True), x.var(dims, unbiased=False, keepdim=True)
    if not training:
        own_mean, own_var = of_channels(mean, x), of_channels(var, x)
    xhat = (x - own_mean) * torch.rsqrt(own_var + eps)
    return scaled_and_activated(xhat, weight, bias, activation, activation_param, residual)


def groups_of(x):
    return GROUPS if x.shape[1] % GROUPS == 0 else 1


def group_oracle(x, weight, bias, *_, eps=1e-5, activation, activation_param=0.0, residual=None):
    """Group norm by its formula. All samples have even channels, or one group."""
    groups = groups_of(x)
    parts = x.reshape(x.shape[0], groups, -1)
    # Per channel, so that the result has x's memory format.
    per_channel = (*x.shape[:2], *[1] * (x.dim() - 2))
    mean, var = (
        t.repeat_interleave(x.shape[1] // groups, dim=1).view(per_channel)
        for t in (parts.mean(2), parts.var(2, unbiased=False))
    )
    xhat = (x - mean) * torch.rsqrt(var + eps)
    return scaled_and_activated(xhat, weight, bias, activation, activation_param, residual)


def group_norm(x, weight, bias, *_, eps=1e-5, activation, activation_param=0.0, **options):
    """`inplace_group_norm` with the arguments of `inplace_abn`."""
    options.pop("signed_weight", None)
    return inplace_group_norm(x, groups_of(x), weight, bias, eps, activation, activation_param, **options)


class Kind(NamedTuple):
    oracle: Callable[..., torch.Tensor]
    function: Callable[..., torch.Tensor]
    module: Callable[..., nn.Module]
    """A module of so many channels."""
    native: Callable[..., nn.Module]
    layer: Any
    """The module's class."""

    def net(self, blocks=3, **options):
        torch.manual_seed(1)
        layers: list[nn.Module] = []
        for inputs, outputs in [(2, 6), (6, 6), (6, 6)][:blocks]:
            layers += [nn.Conv3d(inputs, outputs, 3, padding=1), self.module(outputs, **options)]
        return nn.Sequential(*layers, nn.Conv3d(6, 2, 1))

    def native_net(self, net):
        """A copy of a net in which torch's norms, each with a ReLU, replace ours."""
        layers = []
        for layer in net:
            if isinstance(layer, self.layer):
                native = self.native(len(layer.weight)).to(layer.weight)
                native.load_state_dict(layer.state_dict())
                layers += [native, nn.ReLU()]
            else:
                layers.append(layer)
        return nn.Sequential(*layers)


KINDS = {
    "instance": Kind(
        instance_oracle,
        inplace_instance_norm,
        lambda channels, **options: InPlaceInstanceNorm(channels, affine=True, **options),
        lambda channels, **options: nn.InstanceNorm3d(channels, affine=True, **options),
        InPlaceInstanceNorm,
    ),
    "group": Kind(
        group_oracle,
        group_norm,
        lambda channels, **options: InPlaceGroupNorm(GROUPS, channels, **options),
        lambda channels, **options: nn.GroupNorm(GROUPS, channels, **options),
        InPlaceGroupNorm,
    ),
}
