"""The contenders. They compute the same function, batch norm in training and an activation, in different ways."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmark.cases import Case
from benchmark.timing import Clock, Iteration, Make, floor_iteration, module_iteration, reason
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


class NativeNorm(nn.BatchNorm2d):
    """Torch's BatchNorm2d and activation. With ``inplace`` the activation is in place if that saves memory."""

    def __init__(self, channels: int, activation: str, inplace: bool) -> None:
        super().__init__(channels)
        self.activate = native(activation, ACTIVATIONS[activation], inplace)

    def forward(self, x: Tensor) -> Tensor:
        return self.activate(super().forward(x))


def make_contender(
    name: str, channels: int, activation: str, device: torch.device, backend: str = "inductor"
) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    """Returns the module that has the parameters, and the function to call. ``backend`` is for torch.compile."""
    if name == OURS:
        # A signed weight makes it the same function as torch's BatchNorm.
        param = ACTIVATIONS[activation]
        ours = InPlaceABN(channels, activation=activation, activation_param=param, signed_weight=True, device=device)
        return ours, ours
    module = NativeNorm(channels, activation, inplace=name != COMPILE).to(device)
    if name == COMPILE:
        return module, torch.compile(module, dynamic=False, backend=backend)
    if name == CHECKPOINT:
        return module, lambda x: checkpoint(module, x, use_reentrant=False, preserve_rng_state=False)

    def without_cudnn(x: Tensor) -> Tensor:
        with torch.backends.cudnn.flags(enabled=False):
            return module(x)

    return module, without_cudnn if name == NO_CUDNN else module


def make_iterations(names: Sequence[str], case: Case, device: torch.device) -> tuple[dict[str, Iteration], list[str]]:
    """Returns what to time, and a note for each contender that is left out because torch.compile fails."""
    iterations: dict[str, Iteration] = {}
    notes = []
    for name in names:
        if name == FLOOR:
            iterations[name] = floor_iteration
            continue
        module, call = make_contender(name, case.shape[1], case.activation, device)
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


def with_threads(iteration: Iteration, threads: int) -> Iteration:
    """``iteration``, run on ``threads`` threads."""

    def iterate(make_x: Make, make_dz: Make, clock: Clock) -> Iterator[None]:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            yield from iteration(make_x, make_dz, clock)
        finally:
            torch.set_num_threads(before)

    return iterate
