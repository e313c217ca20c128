"""The contenders. They compute the same function, batch norm in training and an activation, in different ways."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmark.cases import Case
from benchmark.timing import Clock, Iteration, finish, floor_iteration, module_iteration, reason
from inplace_abn import InPlaceABN
from inplace_abn.activations import TYPICAL, find

OURS, EAGER, NO_CUDNN, COMPILE = "in-place", "eager", "eager-no-cudnn", "compile"
CHECKPOINT, PEER, FLOOR = "checkpoint", "peer", "floor"
CONTENDERS = {
    OURS: "InPlaceABN",
    EAGER: "torch's BatchNorm2d and activation, in place where torch saves memory by that",
    NO_CUDNN: "the same with torch's own CUDA kernels",
    COMPILE: "the same under torch.compile, activation out of place: in place, its code is several times slower",
    CHECKPOINT: "the same under torch.utils.checkpoint",
    PEER: "the public package's InPlaceABN",
    FLOOR: "forward x.sum(); x.mul_(s), backward x.sum(); g.sum(); g.add_(x)",
}
MAY_FAIL = (COMPILE, PEER)
"""There may be no compiler, and the public package has few dtypes and activations."""
SUBSTITUTES = {"leaky_relu": "leaky_relu", "relu": "leaky_relu", "elu": "elu", "identity": "identity"}
"""For each activation of ours, the one of the public package that is timed. It has no in-place relu."""
ACTIVATIONS = dict(TYPICAL)


def native(activation: str, inplace: bool) -> nn.Module:
    """torch's module. With ``inplace`` it is in place where that saves memory: others would keep a copy of what they
    overwrite."""
    entry = find(activation)
    module = nn.Identity() if entry.module is None else entry.module(ACTIVATIONS[activation])
    if "inplace" in module.__dict__:
        module.__dict__["inplace"] = inplace and not entry.special
    return module


class NativeNorm(nn.BatchNorm2d):
    """Torch's BatchNorm2d and activation. With ``inplace`` the activation is in place if that saves memory."""

    def __init__(self, channels: int, activation: str, inplace: bool) -> None:
        super().__init__(channels)
        self.activate = native(activation, inplace)

    def forward(self, x: Tensor) -> Tensor:
        return self.activate(super().forward(x))


def load_peer(folder: Path) -> ModuleType:
    """Imports the public package, which is in ``folder``, under another name than ours. Its own imports are
    relative."""
    spec: Any = importlib.util.spec_from_file_location("peer", folder / "inplace_abn" / "__init__.py")
    package = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)
    return package


def make_contender(
    name: str,
    channels: int,
    activation: str,
    device: torch.device,
    backend: str = "inductor",
    peer: ModuleType | None = None,
) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    """Returns the module that has the parameters, and the function to call. ``backend`` is for torch.compile, ``peer``
    is the public package."""
    if name == OURS:
        # A signed weight makes it the same function as torch's BatchNorm.
        param = ACTIVATIONS[activation]
        ours = InPlaceABN(channels, activation=activation, activation_param=param, signed_weight=True, device=device)
        return ours, ours
    if name == PEER:
        if activation not in SUBSTITUTES:
            raise ValueError(f"it has no {activation}")
        theirs = peer.InPlaceABN(channels, activation=SUBSTITUTES[activation]).to(device)  # type: ignore[union-attr]
        return theirs, theirs
    module = NativeNorm(channels, activation, inplace=name != COMPILE).to(device)
    if name == COMPILE:
        # Otherwise the modules of other cases count towards the limit of recompilations.
        torch._dynamo.reset()
        return module, torch.compile(module, dynamic=False, backend=backend)
    if name == CHECKPOINT:
        return module, lambda x: checkpoint(module, x, use_reentrant=False, preserve_rng_state=False)

    def without_cudnn(x: Tensor) -> Tensor:
        with torch.backends.cudnn.flags(enabled=False):
            return module(x)

    return module, without_cudnn if name == NO_CUDNN else module


def make_iterations(
    names: Sequence[str], case: Case, device: torch.device, peer: ModuleType | None = None
) -> tuple[dict[str, Iteration], list[str]]:
    """Returns what to time, and a note for each contender of `MAY_FAIL` that fails."""
    iterations: dict[str, Iteration] = {}
    notes = []
    x = case.random(device)
    for name in names:
        try:
            if name == FLOOR:
                iteration = floor_iteration
            else:
                iteration = module_iteration(*make_contender(name, case.shape[1], case.activation, device, peer=peer))
            if name in MAY_FAIL:
                finish(iteration(x.clone, x.clone, Clock(device)))
        except Exception as error:
            if name not in MAY_FAIL:
                raise
            notes.append(f"{name} left out: {reason(error)}")
            continue
        iterations[name] = iteration
    return iterations, notes
