"""Layer norms and RMS norms as other packages write them, and near misses, which compute something else."""

import torch
import torch.nn.functional as F
from torch import nn


class Weighted(nn.Module):
    """A norm's parameters, spread so that the gradients of all of them matter."""

    has_bias = False

    def __init__(self, size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(1 + 0.3 * torch.randn(size))
        if self.has_bias:
            self.bias = nn.Parameter(0.5 * torch.randn(size))
        self.eps = eps


class RMSNormOfLlama(nn.Module):
    """As transformers writes it: computed in float32, and another name for eps."""

    def __init__(self, size):
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(1 + 0.3 * torch.randn(size)), 1e-6

    def forward(self, hidden_states):
        dtype = hidden_states.dtype
        wide = hidden_states.to(torch.promote_types(dtype, torch.float32))
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * wide.to(dtype)


class RMSNormOfGemma(Weighted):
    """The scale is one more than the weight."""

    def forward(self, x):
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide * (1.0 + self.weight.to(wide.dtype))).type_as(x)


class LayerNorm2d(nn.LayerNorm):
    """As timm writes it: over the channels of an image."""

    def forward(self, x):
        x = x.permute(0, 2, 3, 1)
        x = F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        return x.permute(0, 3, 1, 2)


class ChannelsFirstNorm(Weighted):
    """As ConvNeXt's authors write it: by hand."""

    has_bias = True

    def forward(self, x):
        mean = x.mean(1, keepdim=True)
        var = (x - mean).pow(2).mean(1, keepdim=True)
        x = (x - mean) / torch.sqrt(var + self.eps)
        return self.weight[:, None, None] * x + self.bias[:, None, None]


class RMSNormOfT5(Weighted):
    """With a weight in float32 the output is in float32, whatever the input is."""

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.eps))


class RMSNormOfDiffusers(nn.Module):
    """It has an attribute with the name of a method of tensors, and None for a bias."""

    def __init__(self, size, affine=True):
        super().__init__()
        self.eps, self.dim, self.weight, self.bias = 1e-6, torch.Size([size]), None, None
        if affine:
            self.weight = nn.Parameter(1 + 0.3 * torch.randn(size))

    def forward(self, x):
        y = x * torch.rsqrt(x.to(torch.float32).pow(2).mean(-1, keepdim=True) + self.eps)
        return y if self.weight is None else y * self.weight


class NormWithEpsOutside(Weighted):
    def forward(self, x):
        return x / (x.square().mean(-1, keepdim=True).sqrt() + self.eps) * self.weight


class NormOfUnbiasedVariance(Weighted):
    def forward(self, x):
        return (x - x.mean(-1, keepdim=True)) / torch.sqrt(x.var(-1, keepdim=True) + self.eps) * self.weight


class L2Norm(Weighted):
    def forward(self, x):
        return F.normalize(x, dim=-1) * self.weight


class HalvedNorm(Weighted):
    def forward(self, x):
        return 0.5 * F.rms_norm(x, x.shape[-1:], self.weight, self.eps)


class ScaledNorm(Weighted):
    """The size of the weight decides."""

    def forward(self, x):
        return F.rms_norm(x, x.shape[-1:], self.weight / self.weight.norm(), self.eps)


class NormWithMemory(Weighted):
    """It computes something else in each call."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return F.rms_norm(x, x.shape[-1:], self.weight, self.eps) * self.calls


NEAR_MISSES = [NormWithEpsOutside, NormOfUnbiasedVariance, L2Norm, HalvedNorm, ScaledNorm, NormWithMemory]


class DetachedNorm(Weighted):
    """The gradient is another one (arXiv 1911.07013)."""

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True).detach() + self.eps) * self.weight


class HookedNorm(Weighted):
    def forward(self, x):
        y = F.rms_norm(x, x.shape[-1:], self.weight, self.eps)
        if y.requires_grad:
            y.register_hook(lambda g: 2 * g)
        return y


class StoringNorm(Weighted):
    def forward(self, x):
        self.size = x.square().mean()
        return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)


class NoisyNorm(Weighted):
    def forward(self, x):
        y = F.rms_norm(x, x.shape[-1:], self.weight, self.eps)
        return y + torch.randn_like(y) if self.training else y


class TemperedNorm(Weighted):
    factor = 1.0

    def forward(self, x):
        return F.rms_norm(x, x.shape[-1:], self.weight, self.eps) * self.factor


class WritingNorm(Weighted):
    def forward(self, x):
        x = x * 1.0
        x -= x.mean(-1, keepdim=True)
        return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)


class NormOfTokens(Weighted):
    """Over all tokens, which is the same as over one if there is one."""

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean((1, 2), keepdim=True) + self.eps) * self.weight


class NormWithOutcomes(Weighted):
    """It has a method of a name that converted modules have, too."""

    def outcome(self, x):
        return x

    def forward(self, x):
        return F.rms_norm(self.outcome(x), x.shape[-1:], self.weight, self.eps)


class NormWithAMethodOfATensorsName(Weighted):
    def forward(self, x):
        return self.mul(F.rms_norm(x, x.shape[-1:], self.weight, self.eps))

    def mul(self, y):
        self.factor = 2
        return y


class NormWithDefaults(Weighted):
    def forward(self, x, factors=(1.0,)):
        return F.rms_norm(x, x.shape[-1:], self.weight, self.eps) * factors[0]


class RMSNormOfAnotherPackage(nn.RMSNorm):
    """It changes what the forward pass of its base may call."""

    def mean(self, x):
        return x.mean()


DOING_MORE = [
    NormWithAMethodOfATensorsName,
    NormWithDefaults,
    RMSNormOfAnotherPackage,
    DetachedNorm,
    HookedNorm,
    StoringNorm,
    NoisyNorm,
    TemperedNorm,
    WritingNorm,
    NormWithOutcomes,
]


class UnbiasedNorm(Weighted):
    """In bfloat16 its output is near that of a layer norm."""

    def forward(self, x):
        return (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.var(-1, keepdim=True) + self.eps) * self.weight


class ContiguousNorm2d(LayerNorm2d):
    def forward(self, x):
        return super().forward(x).contiguous()
