"""Functions whose calls a subclass of Tensor does not see: custom functions of autograd, and scripted functions."""

import torch


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * 2 + 0 * x


class DoubledInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x.mul_(2)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx, g):
        return g * 2


class Halved(torch.autograd.Function):
    """Saves nothing."""

    @staticmethod
    def forward(ctx, x):
        return x * 0.5

    @staticmethod
    def backward(ctx, g):
        return g * 0.5


class Passed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return g


class Gated(torch.autograd.Function):
    """An activation that saves its input, like memory-efficient swish."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return g * (s * (1 + x * (1 - s)))


@torch.jit.script
def scripted_relu(x):
    return torch.relu(x)


@torch.jit.script
def scripted_relu_in_place(x):
    return torch.relu_(x)


@torch.jit.script
def scripted_gate(x):
    return x * torch.sigmoid(x)
