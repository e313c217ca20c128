"""Trial runs of a model that leave it as it was."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def preserved(model: nn.Module) -> Iterator[None]:
    """Restores buffers, attributes, hooks, training flags and the state of random generators at the end."""
    attributes = [(module, dict(vars(module))) for module in model.modules()]
    # Buffers, hooks and submodules are entries of dicts. What models collect is mostly in lists.
    containers = [
        (value, copy.copy(value))
        for _, values in attributes
        for value in values.values()
        if isinstance(value, (dict, list, set))
    ]
    # A scripted module keeps its training flag elsewhere.
    flags = [(module, module.training) for module in model.modules()]
    values = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    devices = [*{t.device for t in (*model.parameters(), *model.buffers()) if t.device.type == "cuda"}]
    numpy = sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy else None
    python_state = random.getstate()
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(python_state)
        if numpy:
            numpy.random.set_state(numpy_state)
        for module, was in attributes:
            now = vars(module)
            for name in now.keys() - was.keys():
                del now[name]
            now.update(was)
        for module, training in flags:
            if module.training is not training:
                module.training = training
        for container, content in containers:
            if isinstance(container, list):
                container[:] = content
            else:
                container.clear()
                container.update(content)
        with torch.no_grad():
            for buffer, value in values:
                if buffer.device.type != "meta" and not torch.equal(buffer, value):
                    buffer.copy_(value)


class _LocalStatistics(nn.modules.batchnorm._BatchNorm):
    """The class of a SyncBatchNorm during the recording.

    It has no collectives, in which one rank would wait for ever.
    """

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")


@contextmanager
def local_statistics(model: nn.Module) -> Iterator[None]:
    synchronised = [module for module in model.modules() if type(module) is nn.SyncBatchNorm]
    for module in synchronised:
        module.__class__ = _LocalStatistics  # type: ignore[assignment]
    try:
        yield
    finally:
        for module in synchronised:
            module.__class__ = nn.SyncBatchNorm
