#!/usr/bin/env python
"""Prints how exact results and gradients are: relative error against float64, ours beside torch's own BatchNorm and
activation in the same dtype, for every activation, dtype and a few kinds of parameters. Markdown on standard output.
"""

import argparse
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from inplace_abn import inplace_abn
from inplace_abn.activations import activate

ACTIVATIONS = {"identity": 0.0, "leaky_relu": 0.01, "elu": 1.0, "relu": 0.0, "silu": 0.0, "hardswish": 0.0}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SHAPE = (8, 32, 32, 32)
EPS = 1e-5


def typical(channels: int) -> tuple[Tensor, Tensor]:
    return 0.5 + torch.rand(channels), 0.5 * torch.randn(channels)


def large_bias(channels: int) -> tuple[Tensor, Tensor]:
    weight, bias = typical(channels)
    return weight, 20 * weight * bias.sign()


def tiny_weight(channels: int) -> tuple[Tensor, Tensor]:
    weight, bias = typical(channels)
    return 1e-3 * weight, 1e-3 * bias


def negative_weight(channels: int) -> tuple[Tensor, Tensor]:
    weight, bias = typical(channels)
    return -weight, bias


PARAMETERS: dict[str, Callable[[int], tuple[Tensor, Tensor]]] = {
    "typical": typical,
    "beta/gamma = 20": large_bias,
    "gamma 1e-3": tiny_weight,
    "gamma < 0": negative_weight,
}


def results(x: Tensor, dz: Tensor, weight: Tensor, bias: Tensor, activation: str, native: bool) -> list[Tensor]:
    """z, dx, dweight, dbias."""
    leaf, weight, bias = (t.clone().requires_grad_() for t in (x, weight, bias))
    param = ACTIVATIONS[activation]
    if native:
        y = F.batch_norm(leaf, None, None, weight, bias, True, 0.1, EPS)
        z = activate(y, activation, param)
    else:
        z = inplace_abn(leaf.clone(), weight, bias, None, None, True, 0.1, EPS, activation, param, signed_weight=True)
    kept = z.detach().clone()
    return [kept, *torch.autograd.grad(z, (leaf, weight, bias), dz)]


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return ((actual.double() - expected).norm() / expected.norm()).item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--parameters", choices=PARAMETERS, nargs="*", default=list(PARAMETERS))
    args = parser.parse_args()
    names = ["z", "dx", "dweight", "dbias"]
    print(f"Relative error against float64, ours / torch's; x of shape {SHAPE}, torch {torch.__version__}.\n")
    print("| parameters | activation | dtype | " + " | ".join(names) + " |")
    print("| --- " * (3 + len(names)) + "|")
    for kind in args.parameters:
        for activation in ACTIVATIONS:
            for label, dtype in DTYPES.items():
                torch.manual_seed(0)
                x, dz = torch.randn(2, *SHAPE).to(args.device, dtype)
                weight, bias = (t.to(args.device) for t in PARAMETERS[kind](SHAPE[1]))
                exact = results(x.double(), dz.double(), weight.double(), bias.double(), activation, native=True)
                pairs = [
                    [
                        relative_error(a, e)
                        for a, e in zip(results(x, dz, weight, bias, activation, n), exact, strict=True)
                    ]
                    for n in (False, True)
                ]
                cells = " | ".join(f"{ours:.1e} / {native:.1e}" for ours, native in zip(*pairs, strict=True))
                print(f"| {kind} | {activation} | {label} | {cells} |")


if __name__ == "__main__":
    main()
