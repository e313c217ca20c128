"""Calls every op in every dtype and memory layout, and compares its results with the CPU's. Takes seconds.

``--device emulated`` runs the kernels' sources on the CPU (tests/emulation), with few activations unless told
otherwise. Each line of the output is a dtype and a layout, with the worst error in units of what is allowed.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests/helpers")]

from cases import ALL_ACTIVATIONS, DTYPES, LAYOUTS, laid_out, parameters, stats_dtype, tolerance  # noqa: E402

from inplace_abn.activations import find  # noqa: E402
from inplace_abn.kernels import ops  # noqa: E402

Ops = Mapping[str, Callable[..., Any]]
SHAPES = ((3, 16, 8, 8), (4, 19, 6, 7))
"""Planes and rows of whole vectors, and such that are not."""
EPS = 1e-5
FEW = ("leaky_relu", "silu")
"""One activation that takes a multiplication, and one that is inverted once in 16 bits."""


class Case:
    """The tensors of one call of each op, on the CPU."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, layout: str, activation: tuple[str, float]) -> None:
        self.layout, self.activation, self.param = layout, *activation
        self.x, self.dz, self.residual = (
            laid_out(torch.randn(shape, dtype=torch.float64).to(dtype), layout) for _ in range(3)
        )
        self.weight, self.bias, self.mean, self.var = parameters(shape[1], stats_dtype(dtype))

    def results(self, run: Ops, device: torch.device) -> dict[str, Tensor]:
        """What every op computes of tensors on the device, by the op's name and the result's."""
        results: dict[str, Tensor] = {}

        def placed(t: Tensor) -> Tensor:
            return laid_out(t.to(device), self.layout) if t.dim() > 1 else t.to(device, copy=True)

        def place() -> Tensor:
            return placed(torch.full_like(self.x, torch.nan))

        def keep(op: str, **tensors: Tensor) -> None:
            results.update({f"{op}: {name}": t.clone() for name, t in tensors.items()})

        weight, bias = placed(self.weight), placed(self.bias)
        arithmetic = (EPS, True, find(self.activation).code, self.param)
        x, residual = placed(self.x), placed(self.residual)
        run["check"](x, weight, bias, residual, placed(self.mean), placed(self.var))
        mean, var = run["statistics"](x)
        keep("statistics", mean=mean, var=var)
        shares = torch.stack([torch.cat([mean + n, var, var.new_full((1,), n)]) for n in (3, 0, 5)])
        running = placed(self.mean), placed(self.var)
        merged = run["combine"](shares, *running, 0.3, None)
        names = ("mean", "var", "count", "running_mean", "running_var")
        keep("combine", **dict(zip(names, (*merged, *running), strict=True)))
        z = placed(self.x)
        run["forward"](z, mean, var, weight, bias, None, *arithmetic, True)
        keep("forward", z=z)
        z = place()
        run["forward_out"](x, mean, var, weight, bias, residual, *arithmetic, False, z=z)
        keep("forward_out", z=z)
        z = place()
        statistics = run["local_forward_out"](x, weight, bias, None, None, None, 0.3, None, *arithmetic, True, z=z)
        keep("local_forward_out", z=z, mean=statistics[0], var=statistics[1])
        z, running = placed(self.x), (placed(self.mean), placed(self.var))
        _, var = run["local_forward"](z, weight, bias, residual, *running, 0.3, None, *arithmetic, True)
        keep("local_forward", z=z, var=var, running_mean=running[0], running_var=running[1])
        keep("inverse", y=run["inverse"](z, *arithmetic[2:]))

        dz, xhat, dy = placed(self.dz), place(), place()
        sums = run["backward_reduce_out"](z, dz, weight, bias, residual, *arithmetic, xhat=xhat, dy=dy)
        keep("backward_reduce_out", xhat=xhat, dy=dy, sum_dy=sums[0], sum_xhat_dy=sums[1])
        xhat, dy = placed(z), placed(dz)
        sums = run["backward_reduce"](xhat, dy, weight, bias, residual, *arithmetic)
        keep("backward_reduce", xhat=xhat, dy=dy, sum_dy=sums[0], sum_xhat_dy=sums[1])
        means = [t / (x.numel() / x.shape[1]) for t in sums]
        dx = place()
        run["backward_out"](xhat, dy, var, weight, EPS, True, *means, dx=dx)
        keep("backward_out", dx=dx)
        run["backward"](xhat, dy, var, weight, EPS, True, *means)
        keep("backward", dx=dy)
        outputs = {"dx": place(), "dresidual": place(), "dweight": weight.clone(), "dbias": bias.clone()}
        xhat = place()
        run["local_backward"](z, dz, var, weight, bias, residual, *arithmetic, True, **outputs, xhat=xhat)
        keep("local_backward", **outputs)

        samples = len(x)
        z, (weights, biases) = placed(self.x), (t.repeat(samples) for t in (weight, bias))
        _, var = run["local_forward"](z, weights, biases, None, None, None, 0.3, None, *arithmetic, True, 1)
        keep("local_forward, each sample", z=z, var=var)
        outputs = {"dx": place(), "dweight": weights.clone(), "dbias": biases.clone()}
        run["local_backward"](z, dz, var, weights, biases, None, *arithmetic, True, 1, **outputs)
        keep("local_backward, each sample", **outputs)
        rows = [placed(t).reshape(-1, x.shape[1]).contiguous() for t in (self.x, self.dz)]
        rstd = torch.rand_like(rows[0][:, 0]).to(var.dtype).fill_(0.7)
        outputs = {"dx": torch.empty_like(rows[0]), "dweight": weight.clone(), "dbias": bias.clone()}
        run["rows_backward"](*rows, rstd, weight, bias, 1e-5, True, False, **outputs)
        keep("rows_backward", **outputs)
        return results


def worst(actual: dict[str, Tensor], expected: dict[str, Tensor], allowed: float) -> tuple[float, str]:
    """The largest error in units of what is allowed, and what has it. NaN is an infinite error."""
    found = (0.0, "")
    for name, value in expected.items():
        terms = value.numel() if value.dim() > 1 else 256
        scale = value.double().norm().clamp_min(terms**0.5)
        error = ((actual[name].cpu().double() - value.double()).norm() / scale).item() / allowed
        found = max(found, (error if error == error else float("inf"), name))
    return found


def device_ops(name: str) -> tuple[Ops, torch.device]:
    """The ops of a device, and where their tensors are."""
    if name != "emulated":
        return {op: getattr(ops, op) for op in ops.NAMES}, torch.device(name)
    from emulation import emulated

    return emulated.load().ops, torch.device("cpu")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--activations", nargs="+", metavar="NAME", help="all by default")
    args = parser.parse_args(arguments)
    run, device = device_ops(args.device)
    names = args.activations or (FEW if args.device == "emulated" else [name for name, _ in ALL_ACTIVATIONS])
    activations = [activation for activation in ALL_ACTIVATIONS if activation[0] in names]
    called: set[str] = set()

    def counted(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            called.add(name)
            return run[name](*args, **kwargs)

        return call

    counting = {name: counted(name) for name in ops.NAMES}
    own = {name: getattr(ops, name) for name in ops.NAMES}
    cpu, failed = torch.device("cpu"), 0
    for dtype, layout in itertools.product(DTYPES, LAYOUTS):
        found = (0.0, "")
        for shape, activation in itertools.product(SHAPES, activations):
            case = Case(shape, dtype, layout, activation)
            # 16 bits have a wide tolerance already.
            allowed = (2 if dtype.itemsize == 2 else 8) * tolerance(dtype, activation[0])
            if device.type == "cuda" and activation[0] == "hardswish":
                # torch's own kernel, which makes z, multiplies doubles by a sixth in float's precision.
                allowed = max(allowed, 2.0**-24)
            error, what = worst(case.results(counting, device), case.results(own, cpu), allowed)
            found = max(found, (error, f"{what} of {activation[0]}, {shape}"))
        failed += found[0] > 1
        told = "FAILS" if found[0] > 1 else "agrees"
        print(f"{dtype} {layout}: {told}, {found[0]:.2g} of what is allowed in {found[1]}", flush=True)
    missed = sorted(set(ops.NAMES) - called)
    if missed:
        print(f"never called: {', '.join(missed)}")
    print(f"smoke: {len(called)} ops, {failed} of {len(DTYPES) * len(LAYOUTS)} dtypes and layouts fail")
    return 1 if failed or missed else 0


if __name__ == "__main__":
    sys.exit(main())
