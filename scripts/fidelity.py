#!/usr/bin/env python
"""Prints how exact the gradients are that backward recovers from the output, and what the guard decides.

There is a row for every activation, dtype, gamma and beta. "in place" are the largest relative errors of dx and dweight
against float64, of a layer that is in place even where the guard would refuse. "torch" are those of torch's own
BatchNorm and activation in the same dtype. "measured" are the errors as the guard measures them. "sums" are the largest
errors of a channel's mean of dx and of dx times xhat, in place and of torch. The layer before sums dx over its inputs,
which may all be positive: an error of many elements that has a direction is not averaged out there. Gradients are
correlated with the input, as those of a squared loss are. With a dz that is independent of x, lost information does not
show. The table is Markdown on standard output. All errors are in unit roundoffs of the dtype.
"""

import argparse
import operator
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from inplace_abn import inplace_abn, reference
from inplace_abn.activations import TYPICAL, activate, activation_backward
from inplace_abn.guard import recovery
from inplace_abn.guard.figures import THRESHOLDS
from inplace_abn.kernels import ops
from inplace_abn.settings import Operands, Settings

ACTIVATIONS = dict(TYPICAL)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SHAPE = (32, 4, 32, 32)
"""The shape of x. It has as many values as the guard looks at."""
EPS = 1e-5


class Pair(NamedTuple):
    """Relative errors of dx and dweight."""

    x: float
    weight: float


class Layer(NamedTuple):
    """A layer whose channels all have the same gamma and the same beta, and its inputs."""

    x: Tensor
    gamma: float
    beta: float
    activation: str
    residual: Tensor | None = None

    @property
    def parameters(self) -> tuple[Tensor, Tensor]:
        like = self.x.new_ones(self.x.shape[1], dtype=torch.promote_types(self.x.dtype, torch.float32))
        return self.gamma * like, self.beta * like

    def settings(self) -> Settings:
        return Settings(self.activation, ACTIVATIONS[self.activation], EPS, True, True, None)

    def output(self, native: bool, dtype: torch.dtype) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Returns z, computed in ``dtype``, and its leaves x and weight."""
        x, residual = self.x.to(dtype), None if self.residual is None else self.residual.to(dtype)
        weight, bias = (t.to(torch.promote_types(dtype, torch.float32)).requires_grad_() for t in self.parameters)
        leaf, param = x.clone().requires_grad_(), ACTIVATIONS[self.activation]
        if native:
            y = F.batch_norm(leaf, None, None, weight, bias, True, 0.1, EPS)
            z = activate(y if residual is None else y + residual, self.activation, param)
        else:
            how = (True, 0.1, EPS, self.activation, param)
            z = inplace_abn(leaf.clone(), weight, bias, None, None, *how, signed_weight=True, residual=residual)
        return z, (leaf, weight)

    def gradients(self, dzs: Sequence[Tensor], native: bool, dtype: torch.dtype) -> list[Sequence[Tensor]]:
        """Returns dx and dweight for each of ``dzs``, computed in ``dtype``."""
        if not native:
            # Each dz gets a graph of its own, as in training. Backward reuses the memory of a graph that is not kept.
            return [torch.autograd.grad(*self.output(False, dtype), dz.to(dtype)) for dz in dzs]
        z, leaves = self.output(True, dtype)
        return [torch.autograd.grad(z, leaves, dz.to(dtype), retain_graph=True) for dz in dzs]


class Errors(NamedTuple):
    """The relative errors for several gradients dz: of dx, of the dweight of each channel, and of its sums of dx."""

    x: list[Tensor]
    weight: list[Tensor]
    sums: list[Tensor]

    def worst(self) -> Pair:
        """The largest errors of dx and dweight."""
        return Pair(max(self.x).item(), max(each.max().item() for each in self.weight))

    def worst_sum(self) -> float:
        return max(each.max().item() for each in self.sums)


def errors(layer: Layer) -> tuple[Errors, Errors]:
    """Returns the errors of dx and dweight, in place and of torch, for gradients that are correlated with xhat.

    The error of dx is relative to gamma / sqrt(var + eps) * dy over the layer, that of its sums to the same in the
    channel. The error of dweight is relative to the size of xhat * dy in its channel. For dweight one dz is
    proportional to the error of the recovery, which is the worst case.
    """
    x, (weight, bias) = layer.x, layer.parameters
    mean, var = ops.statistics(x.double())
    inv_std = torch.rsqrt(var + EPS)
    xhat = (x.double() - reference.per_channel(mean, x)) * reference.per_channel(inv_std, x)
    y = xhat * layer.gamma + layer.beta
    y = y if layer.residual is None else y + layer.residual
    activation = layer.activation, ACTIVATIONS[layer.activation]
    slope, rounded = (activation_backward(t, torch.ones_like(t), *activation) for t in (y, y.to(x.dtype).double()))
    z, recovered = x.clone(), torch.ones_like(x)
    arithmetic = layer.settings().arithmetic()
    statistics = [t.to(weight.dtype) for t in (mean, var)]
    ops.forward(z, *statistics, weight, bias, layer.residual, *arithmetic, True)
    ops.backward_reduce_out(z, recovered, weight, bias, layer.residual, *arithmetic, xhat=z, dy=recovered)
    # The rounding errors of the terms that dweight sums, in place and of torch.
    ours, torchs = z.double() * recovered.double() - xhat * slope, xhat * (rounded - slope)
    least = torch.finfo(x.dtype).smallest_normal
    noise = torch.randn_like(xhat) + 2 * x.double()
    dx, dweight, in_place, native = 0, 1, False, True
    cases = [
        (xhat, (dx, dweight), (in_place, native)),
        (xhat * slope, (dx,), (in_place, native)),
        (noise, (dx,), (in_place, native)),
        (ours, (dweight,), (in_place,)),
        (torchs, (dweight,), (native,)),
    ]
    dzs = []
    for direction, _, _ in cases:
        sizes = reference.channel_mean(direction.square()).clamp_min(1e-300).sqrt()
        dzs.append((direction / reference.per_channel(sizes, x)).to(x.dtype))
    exact = layer.gradients(dzs, True, torch.float64)
    scale, counts = (reference.per_channel(inv_std, x) * layer.gamma).abs(), x.numel() // x.shape[1]
    spread = reference.channel_mean(slope.square()).add(least**2).sqrt()
    found = Errors([], [], []), Errors([], [], [])
    for contender in (in_place, native):
        chosen = [i for i, (_, _, contenders) in enumerate(cases) if contender in contenders]
        gradients = layer.gradients([dzs[i] for i in chosen], contender, x.dtype)
        for i, given in zip(chosen, gradients, strict=True):
            dz = dzs[i].double()
            for which in cases[i][1]:
                off = given[which].double() - exact[i][which]
                if which == dx:
                    whole = reference.channel_mean((scale * ((slope * dz).abs() + least)).square()).sqrt()
                    sums = (reference.channel_mean(off * other).abs() for other in (torch.ones_like(off), xhat))
                    found[contender].sums.extend(each / whole for each in sums)
                    off, size = off.norm(), scale.mul((slope * dz).abs() + least).norm()
                else:
                    off, size = off.abs(), counts * reference.channel_mean(dz.square()).sqrt() * spread
                # A relative error is zero where the error is zero, even if the size is zero, too.
                found[contender][which].append(torch.where(off == 0, 0.0, off / size))
    return found


def measured(layer: Layer) -> Pair:
    """The errors that the guard measures."""
    mean, var = ops.statistics(layer.x)
    residual = None if layer.residual is None else recovery.sample(layer.residual)
    operands = Operands(*layer.parameters, residual)
    errors = recovery.measured(recovery.sample(layer.x), mean, var, operands, layer.settings())
    return Pair(errors.dx.sum(dim=1).max().sqrt().item(), errors.weight.max().item())


def inputs(dtype: torch.dtype, tails: str = "normal", device: str = "cpu") -> Tensor:
    """Random x of `SHAPE`. "heavy" has Student's t distribution with four degrees of freedom."""
    values = torch.randn(SHAPE)
    if tails == "heavy":
        values = values / (torch.randn(4, *SHAPE).square().mean(0)).sqrt()
    return values.to(device, dtype)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--activations", choices=ACTIVATIONS, nargs="*", default=list(ACTIVATIONS))
    parser.add_argument("--dtypes", choices=DTYPES, nargs="*", default=list(DTYPES))
    parser.add_argument(
        "--gammas", type=float, nargs="*", default=[1e-4, 1e-2, 0.1, 1.0, 2.0, 3.0, 5.0, 10.0, 30.0, 100.0]
    )
    parser.add_argument("--ratios", type=float, nargs="*", default=[0.0, -2.0, 2.0, -20.0, 20.0], help="beta / gamma")
    parser.add_argument(
        "--residuals", type=float, nargs="*", default=[], help="sizes of a residual, in a table of its own"
    )
    args = parser.parse_args()
    print(f"Errors of dx and dweight in unit roundoffs; x of shape {SHAPE}, torch {torch.__version__}.\n")
    head = ("activation", "dtype", "x", "residual", "gamma", "beta / gamma", "in place", "torch", "measured", "sums")
    print("| " + " | ".join((*head, "guard")) + " |\n" + "| --- " * (len(head) + 1) + "|")
    for activation in args.activations:
        for label in args.dtypes:
            dtype = DTYPES[label]
            for tails, size in [("normal", 0.0), *((t, s) for t in ("normal", "heavy") for s in args.residuals)]:
                for gamma in args.gammas:
                    for ratio in args.ratios:
                        torch.manual_seed(0)
                        x = inputs(dtype, tails, args.device)
                        residual = (size * torch.randn(SHAPE)).to(args.device, dtype) if size else None
                        layer = Layer(x, gamma, ratio * gamma, activation, residual)
                        both, said = errors(layer), measured(layer)
                        unit = torch.finfo(dtype).eps / 2
                        pairs = (*(found.worst() for found in both), said)
                        cells = [f"{pair.x / unit:.2g}, {pair.weight / unit:.2g}" for pair in pairs]
                        cells.append(", ".join(f"{found.worst_sum() / unit:.2g}" for found in both))
                        is_above = any(map(operator.gt, said, THRESHOLDS[dtype]))
                        verdict = "keeps x" if is_above else "in place"
                        where = (activation, label, tails, f"{size:g}", f"{gamma:g}", f"{ratio:g}")
                        print("| " + " | ".join((*where, *cells, verdict)) + " |", flush=True)


if __name__ == "__main__":
    main()
