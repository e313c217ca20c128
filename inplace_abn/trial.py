"""Trial steps: copies of models are run, and nothing of the original is written."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

LEAVES = frozenset([Tensor, nn.Parameter, int, float, bool, str, type(None)])
"""Types of most arguments of functions, which have no tensors in them."""


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in a value: in lists, tuples, sets, mappings and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif type(value) in LEAVES:
        return
    elif isinstance(value, (Mapping, list, tuple, set)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(item)
    elif hasattr(value, "__dataclass_fields__"):
        yield from tensors_in(vars(value))


def copied(model: nn.Module) -> nn.Module:
    """A copy of the model.

    Raises:
        RuntimeError: the model cannot be copied.
    """
    try:
        return copy.deepcopy(model)
    except Exception as error:
        raise RuntimeError(
            f"inplace_abn: {type(model).__name__} cannot be copied for a trial ({type(error).__name__}: {error}). "
            "Convert the model itself, train a step, and call inplace_abn.report"
        ) from error


def trainable(model: nn.Module) -> nn.Module:
    """A copy in training mode, without gradients. Raises the errors of `copied`."""
    made = copied(model).train()
    made.zero_grad(set_to_none=True)
    return made


@contextmanager
def randomness_restored(model: nn.Module) -> Iterator[None]:
    """Restores the state of random generators at the end."""
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


def loss(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """The sum of all outputs that require grad.

    Raises:
        ValueError: there are none.
    """
    outputs = [t for t in tensors_in(model(*args, **kwargs)) if t.requires_grad]
    if not outputs:
        raise ValueError("inplace_abn: expected an output that requires grad, got none, so there is no training step")
    return torch.stack([t.float().sum() for t in outputs]).sum()
