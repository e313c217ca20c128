"""Nets of norms of rows, norms of groups, and activations without a norm, which are converted and then compiled."""

import torch
import torch.nn.functional as F
from cases import relative_error
from compiled_nets import assert_same
from layer_norms import ChannelsFirstNorm, LayerNorm2d, RMSNormOfGemma, RMSNormOfLlama
from torch import nn

from inplace_abn import convert


class Chain(nn.Module):
    """Modules, and what a net does with them."""

    def __init__(self, run, **modules):
        super().__init__()
        self.run = run
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, x):
        return self.run(self, x)


def spread(net):
    """Gives vectors other values than ones and zeros, so that all gradients matter."""
    for name, t in net.named_parameters():
        if t.dim() == 1:
            nn.init.normal_(t, mean=float(not name.endswith("bias")), std=0.3)
    return net


def block(norm, act):
    def run(m, x):
        h = x + m.proj(m.norm(x))
        return m.last(h + m.down(m.act(m.up(m.other(h)))))

    modules = {"proj": nn.Linear(16, 16), "up": nn.Linear(16, 48), "down": nn.Linear(48, 16), "last": nn.Linear(16, 16)}
    return Chain(run, norm=norm(), other=norm(), act=act, **modules)


def function_block():
    def run(m, x):
        return x + m.down(F.gelu(m.up(m.norm(x))))

    return Chain(run, norm=nn.LayerNorm(16), up=nn.Linear(16, 48), down=nn.Linear(48, 16))


def of_images(norm, act):
    def run(m, x):
        x = x.transpose(1, 2).unflatten(2, (5, 8))
        return m.last(m.act(m.norm(m.conv(x)) + m.conv(x)) + x)

    convs = {"conv": nn.Conv2d(16, 16, 3, padding=1), "last": nn.Conv2d(16, 16, 1)}
    return Chain(run, norm=norm, act=act, **convs)


def chain_of_images(norm, act):
    def run(m, x):
        x = x.transpose(1, 2).unflatten(2, (5, 8))
        return m.last(m.act(m.other(m.conv(m.act(m.norm(m.conv(x)))))))

    convs = {"conv": nn.Conv2d(16, 16, 3, padding=1), "last": nn.Conv2d(16, 16, 1)}
    return Chain(run, norm=norm(), other=norm(), act=act, **convs)


def layer_scaled(permuted):
    def run(m, x):
        u = m.down(m.act(m.up(m.norm(x))))
        return x + (u.permute(0, 2, 1) * m.gamma.reshape(1, -1, 1)).permute(0, 2, 1) if permuted else x + u * m.gamma

    linears = {"up": nn.Linear(16, 48), "down": nn.Linear(48, 16)}
    net = Chain(run, norm=nn.LayerNorm(16), act=nn.GELU(), **linears)
    net.gamma = nn.Parameter(torch.rand(16) + 0.1)
    return net


NETS = {
    "layer norm, gelu": lambda: block(lambda: nn.LayerNorm(16), nn.GELU()),
    "layer norm without bias, gelu tanh": lambda: block(lambda: nn.LayerNorm(16, bias=False), nn.GELU("tanh")),
    "layer norm without weight, silu": lambda: block(lambda: nn.LayerNorm(16, elementwise_affine=False), nn.SiLU()),
    "RMS norm, mish": lambda: block(lambda: nn.RMSNorm(16), nn.Mish()),
    "Llama's norm, hardswish": lambda: block(lambda: RMSNormOfLlama(16), nn.Hardswish()),
    "Gemma's norm, elu": lambda: block(lambda: RMSNormOfGemma(16), nn.ELU()),
    "a function": function_block,
    "norms of channels": lambda: chain_of_images(lambda: LayerNorm2d(16), nn.LeakyReLU(0.1)),
    "norms of channels by hand": lambda: chain_of_images(lambda: ChannelsFirstNorm(16), nn.GELU()),
    "group norm, silu": lambda: chain_of_images(lambda: nn.GroupNorm(4, 16), nn.SiLU()),
    "group norm of all channels, relu": lambda: chain_of_images(lambda: nn.GroupNorm(1, 16), nn.ReLU()),
    "group norm of single channels, gelu": lambda: chain_of_images(lambda: nn.GroupNorm(16, 16), nn.GELU()),
    "instance norm, leaky relu": lambda: chain_of_images(
        lambda: nn.InstanceNorm2d(16, affine=True, track_running_stats=True), nn.LeakyReLU(0.1)
    ),
    "instance norm without parameters, silu": lambda: chain_of_images(lambda: nn.InstanceNorm2d(16), nn.SiLU()),
    "group norm, sum, silu": lambda: of_images(nn.GroupNorm(4, 16), nn.SiLU()),
    "layer scale": lambda: layer_scaled(False),
    "layer scale, permuted": lambda: layer_scaled(True),
}


def made(name, device="cpu"):
    torch.manual_seed(3)
    return spread(NETS[name]()).to(device, torch.float64)


def assert_native(name, actual, expected):
    """As `assert_same` for what a net and a native one give.

    On CUDA torch's kernel of hardswish multiplies doubles by a sixth in float's precision. What takes its place in
    compiled code does not.
    """
    if "hardswish" in name and expected[0].is_cuda:
        assert all(relative_error(ours, torchs) < 3e-8 for ours, torchs in zip(actual, expected, strict=True))
    else:
        assert_same(actual, expected)


def batch(device="cpu", samples=3):
    torch.manual_seed(4)
    return torch.randn(samples, 40, 16, dtype=torch.float64, device=device)


def measured(net, x, steps=4):
    """A converted copy after some steps in eager mode."""
    import copy

    from compiled_nets import step

    module = convert(copy.deepcopy(net))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    for _ in range(steps):
        step(module, module, x)
        optimizer.step()
    return module
