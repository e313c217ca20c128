"""Who is compared: the same function, batch norm in training and an activation, by different means."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmark.cases import Case
from benchmark.notes import reason
from benchmark.timing import Iteration, floor_iteration, module_iteration, with_threads
from inplace_abn import InPlaceABN
from inplace_abn.activations import TYPICAL, native

OURS, EAGER, NO_CUDNN, COMPILE = "in-place", "eager", "eager-no-cudnn", "compile"
CHECKPOINT, PEER, FLOOR = "checkpoint", "peer", "floor"
CONTENDERS = {
    OURS: "InPlaceABN",
    EAGER: "torch's BatchNorm2d and activation, in place where torch saves memory by that",
    NO_CUDNN: "the same with torch's own CUDA kernels",
    COMPILE: "the same under torch.compile, activation out of place: in place, its code is twice as slow",
    CHECKPOINT: "the same under torch.utils.checkpoint",
    PEER: "the public package's InPlaceABN, in a separate process",
    FLOOR: "forward x.sum(); x.mul_(s), backward x.sum(); g.sum(); g.add_(x)",
}

ACTIVATIONS = dict(TYPICAL)
Apply = Callable[[Tensor], Tensor]


class NativeNorm(nn.BatchNorm2d):
    """torch's BatchNorm2d and activation; with ``inplace`` in place where that saves memory."""

    def __init__(self, channels: int, activation: str, inplace: bool = True) -> None:
        super().__init__(channels)
        self.activate = native(activation, ACTIVATIONS[activation], inplace)

    def forward(self, x: Tensor) -> Tensor:
        return self.activate(super().forward(x))


def in_place_norm(channels: int, activation: str) -> nn.Module:
    """With the weights of torch's BatchNorm."""
    param = ACTIVATIONS[activation]
    return InPlaceABN(channels, activation=activation, activation_param=param, signed_weight=True)


def make_contender(
    name: str, channels: int, activation: str, device: torch.device, backend: str = "inductor"
) -> tuple[nn.Module, Apply]:
    """The module that has the parameters, and what is called; ``backend`` is torch.compile's."""
    make = in_place_norm if name == OURS else partial(NativeNorm, inplace=name != COMPILE)
    module = make(channels, activation).to(device)
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
                notes.append(f"{COMPILE} left out: {reason(error)}")
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
