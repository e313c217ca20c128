#!/usr/bin/env python
"""Builds a batch norm from the step-wise ops, for a batch that consists of several tensors.

Images of different sizes do not fit into one tensor. The micro-batches of gradient accumulation are several tensors,
too. ``MicroBatchNorm`` takes a list of tensors and normalises all of them with the mean and variance of the whole list.
The ops of `inplace_abn.kernels.ops` allow this, because your own code may run between two of them. The forward pass
calls `statistics` of each tensor, then your code, then `forward` over each tensor. The backward pass calls
`backward_reduce` of each tensor, then your code, then `backward` of each tensor. In this example your code is a sum
over the list. A sum over some ranks of a process group goes into the same two places.

The example needs no other package. ``python examples/low_level_ops.py`` compares it with torch's BatchNorm of the
concatenated list, in float64, and prints:

    loss 1.088015, torch's 1.088015; 1.007851 if each tensor were normalised by itself
    largest relative difference: outputs 1.8e-15, gradients 8.4e-15, running statistics 1.8e-16
    held for backward: 1.36 MiB, torch's 3.63 MiB with the concatenated lists
"""

from __future__ import annotations

import argparse
import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from inplace_abn.activations import ACTIVATIONS
from inplace_abn.kernels import ops
from inplace_abn.memory import measure

SLOPE = 0.01
# These arguments of the ops mean a signed weight, as torch's BatchNorm has, and leaky ReLU.
ACTIVATION = (True, ACTIVATIONS["leaky_relu"].code, SLOPE)


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        bias: Tensor,
        running_mean: Tensor,
        running_var: Tensor,
        momentum: float,
        eps: float,
        *xs: Tensor,
    ) -> tuple[Tensor, ...]:
        shares = []
        for x in xs:
            mean, var = ops.statistics(x)
            shares.append(torch.cat([mean, var, mean.new_tensor([x.numel() / x.shape[1]])]))
        # Your own collective may gather the shares of other ranks here.
        mean, var, count = ops.combine(torch.stack(shares), running_mean, running_var, momentum, None)
        for x in xs:
            # The result overwrites x. The last argument asks for a result that backward can invert.
            ops.forward(x, mean, var, weight, bias, None, eps, *ACTIVATION, True)
        ctx.mark_dirty(*xs)
        ctx.save_for_backward(weight, bias, var, count, *xs)
        ctx.eps = eps
        return xs

    @staticmethod
    def backward(ctx: Any, *dzs: Tensor) -> tuple[Tensor | None, ...]:
        weight, bias, var, count, *zs = ctx.saved_tensors
        # `ops.backward_reduce` would overwrite z and dz. Others may hold them, so the results go to new memory.
        pairs = [(torch.empty_like(z), torch.empty_like(z)) for z in zs]
        sums = torch.zeros(2, var.numel(), dtype=var.dtype, device=var.device)
        for z, dz, (xhat, dy) in zip(zs, dzs, pairs, strict=True):
            sums += torch.stack(
                ops.backward_reduce_out(z, dz, weight, bias, None, ctx.eps, *ACTIVATION, xhat=xhat, dy=dy)
            )
        # The sums of one rank are the gradients of its weight and bias. Your own collective may add up the sums of all
        # ranks here, if the shares of all ranks were gathered in forward.
        mean_dy, mean_xhat_dy = (sums / count).unbind()
        for xhat, dy in pairs:
            ops.backward(xhat, dy, var, weight, ctx.eps, True, mean_dy, mean_xhat_dy)
        return (sums[1], sums[0], *[None] * 4, *[dy for _, dy in pairs])


class MicroBatchNorm(nn.BatchNorm2d):
    """BatchNorm and leaky ReLU of a list of tensors (batch, channel, height, width). Training overwrites them."""

    def forward(self, xs: list[Tensor]) -> list[Tensor]:
        if not self.training:
            return [F.leaky_relu(super(MicroBatchNorm, self).forward(x), SLOPE) for x in xs]
        self.num_batches_tracked.add_(1)
        statistics = (self.running_mean, self.running_var, self.momentum, self.eps)
        return list(_Normalise.apply(self.weight, self.bias, *statistics, *xs))


class Concatenated(nn.BatchNorm1d):
    """The same function with torch's BatchNorm, which gets the values of all tensors as the rows of one tensor."""

    def forward(self, xs: list[Tensor]) -> list[Tensor]:
        rows = [x.movedim(1, -1).flatten(0, -2) for x in xs]
        zs = F.leaky_relu(super().forward(torch.cat(rows)), SLOPE).split([len(r) for r in rows])
        return [z.view(x.movedim(1, -1).shape).movedim(-1, 1) for z, x in zip(zs, xs, strict=True)]


class Net(nn.Module):
    def __init__(self, norm: type[nn.Module], width: int) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(c, width, 3, padding=1, bias=False) for c in (3, width, width))
        self.norms = nn.ModuleList(norm(width) for _ in self.convolutions)

    def forward(self, xs: list[Tensor]) -> list[Tensor]:
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            xs = norm([convolution(x) for x in xs])
        return xs


def loss_of(zs: list[Tensor], xs: list[Tensor]) -> Tensor:
    losses = [(z * x.mean(1, keepdim=True) + z.square()).sum() for z, x in zip(zs, xs, strict=True)]
    return torch.stack(losses).sum() / sum(z.numel() for z in zs)


def step(net: Net, xs: list[Tensor]) -> tuple[float, list[Tensor]]:
    """Returns the loss of one step, and three vectors: all outputs, all gradients, all running statistics."""
    zs = net(xs)
    loss = loss_of(zs, xs)
    loss.backward()
    gradients = [p.grad for p in net.parameters() if p.grad is not None]
    parts = (zs, gradients, list(net.buffers()))
    return loss.item(), [torch.cat([t.detach().double().flatten() for t in part]) for part in parts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--width", type=int, default=16, help="channels")
    parser.add_argument("--sizes", type=int, nargs="+", default=[16, 24, 32], help="of the images of each micro-batch")
    args = parser.parse_args()
    torch.manual_seed(0)
    xs = [(i + 1) * torch.randn(2, 3, s, s, dtype=torch.float64) + i for i, s in enumerate(args.sizes)]
    net, reference = Net(MicroBatchNorm, args.width).double(), Net(Concatenated, args.width).double()
    reference.load_state_dict(net.state_dict())
    separate = loss_of([copy.deepcopy(net)([x])[0] for x in xs], xs).item()
    held = [measure(copy.deepcopy(n), xs).held / 2**20 for n in (net, reference)]
    (loss, ours), (torchs_loss, torchs) = step(net, xs), step(reference, xs)
    print(f"loss {loss:.6f}, torch's {torchs_loss:.6f}; {separate:.6f} if each tensor were normalised by itself")
    errors = [((a - b).norm() / b.norm()).item() for a, b in zip(ours, torchs, strict=True)]
    print("largest relative difference: outputs {:.1e}, gradients {:.1e}, running statistics {:.1e}".format(*errors))
    print("held for backward: {:.2f} MiB, torch's {:.2f} MiB with the concatenated lists".format(*held))


if __name__ == "__main__":
    main()
