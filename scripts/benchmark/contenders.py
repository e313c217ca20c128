"""Who is compared: the same function, batch norm in training and an activation, by different means."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmark.cases import Case
from benchmark.timing import Iteration, floor_iteration, module_iteration, with_threads
from inplace_abn import InPlaceABN

SLOPE = 0.01
OURS, EAGER, NO_CUDNN, COMPILE = "in-place", "eager", "eager-no-cudnn", "compile"
CHECKPOINT, PEER, FLOOR = "checkpoint", "peer", "floor"
CONTENDERS = {
    OURS: "InPlaceABN",
    EAGER: "torch's BatchNorm2d and activation, in place where torch saves memory by that",
    NO_CUDNN: "the same with torch's own CUDA kernels",
    COMPILE: "the same under torch.compile",
    CHECKPOINT: "the same under torch.utils.checkpoint",
    PEER: "the public package's InPlaceABN, in a separate process",
    FLOOR: "forward x.sum(); x.mul_(s), backward x.sum(); g.sum(); g.add_(x)",
}

Apply = Callable[[Tensor], Tensor]


def activate(y: Tensor, activation: str) -> Tensor:
    """In place where that saves memory: silu and hardswish keep a copy of what they overwrite."""
    if activation == "relu":
        return F.relu_(y)
    if activation == "leaky_relu":
        return F.leaky_relu_(y, SLOPE)
    if activation == "elu":
        return F.elu_(y)
    if activation == "silu":
        return F.silu(y)
    if activation == "hardswish":
        return F.hardswish(y)
    if activation == "identity":
        return y
    raise ValueError(f"unknown activation {activation!r}")


class NativeNorm(nn.BatchNorm2d):
    """torch's BatchNorm2d, an optional residual, and activation."""

    def __init__(self, channels: int, activation: str) -> None:
        super().__init__(channels)
        self.activation = activation

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        y = super().forward(x)
        return activate(y if residual is None else y.add_(residual), self.activation)


def in_place_norm(channels: int, activation: str) -> nn.Module:
    """With the weights of torch's BatchNorm."""
    param = SLOPE if activation == "leaky_relu" else 1.0
    return InPlaceABN(channels, activation=activation, activation_param=param, signed_weight=True)


def make_contender(
    name: str, channels: int, activation: str, device: torch.device, backend: str = "inductor"
) -> tuple[nn.Module, Apply]:
    """The module that has the parameters, and what is called; ``backend`` is torch.compile's."""
    module = (in_place_norm if name == OURS else NativeNorm)(channels, activation).to(device)
    if name in (OURS, EAGER):
        return module, module
    if name == NO_CUDNN:

        def without_cudnn(x: Tensor) -> Tensor:
            with torch.backends.cudnn.flags(enabled=False):
                return module(x)

        return module, without_cudnn
    if name == COMPILE:
        return module, torch.compile(module, dynamic=False, backend=backend)
    if name == CHECKPOINT:
        return module, lambda x: checkpoint(module, x, use_reentrant=False, preserve_rng_state=False)
    raise ValueError(f"unknown contender {name!r}")


def make_iterations(names: Sequence[str], case: Case, device: torch.device) -> tuple[dict[str, Iteration], list[str]]:
    """What to time, and a note on each contender that cannot take part: one that torch.compile fails on."""
    iterations: dict[str, Iteration] = {}
    notes = []
    for name in names:
        if name == FLOOR:
            iterations[name] = floor_iteration
            continue
        module, call = make_contender(name, case.channels, case.activation, device)
        if name == COMPILE:
            # Otherwise the modules of other cases count towards the limit of recompilations.
            torch._dynamo.reset()
            try:
                call(case.random(device).requires_grad_()).sum().backward()
            except Exception as error:
                reason = next(iter(str(error).strip().splitlines()), "no message")
                notes.append(f"{COMPILE} left out: {type(error).__name__}: {reason}")
                continue
        iterations[name] = module_iteration(module, call)
    return iterations, notes


def scaling_iterations(case: Case, device: torch.device, threads: Sequence[int]) -> dict[str, Iteration]:
    """Ours and the floor on each number of threads."""
    module, call = make_contender(OURS, case.channels, case.activation, device)
    iteration = module_iteration(module, call)
    return {
        f"{name} @{count}": with_threads(body, count)
        for name, body in ((OURS, iteration), (FLOOR, floor_iteration))
        for count in threads
    }
