"""Memory of one training step, by the allocator's own events."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from inplace_abn import guard
from inplace_abn.trial import loss, tensors_in

_BACKWARD = "inplace_abn.memory: backward"


@dataclass(frozen=True)
class Usage:
    """Memory of one training step, in bytes above what was allocated before it.

    Attributes:
        held: what the forward pass holds for backward.
        peak: the most at any moment of forward and backward.
        timeline: (milliseconds since the start, bytes allocated), at each event of the allocator.
        backward_start: when backward starts, in milliseconds since the start.
        first_held: what the model's first step holds, in which norms are measured; zero if they were measured before.
        first_peak: the peak of that step, with what libraries allocate once.
    """

    held: int
    peak: int
    timeline: tuple[tuple[float, int], ...]
    backward_start: float
    first_held: int = 0
    first_peak: int = 0


def measure(model: nn.Module, /, *args: Any, **kwargs: Any) -> Usage:
    """Measures the memory of one training step of ``model``.

    The loss is the sum of the outputs. The step runs twice: figures are those of the second one, but for the two of the
    first. Buffers are updated, and gradients are set to None. On CUDA the bytes are those of the caching allocator.

    Args:
        model: on the device of its inputs. It is in training mode during the step.
        args, kwargs: arguments of the forward pass.

    Returns:
        Bytes held after the forward pass, the peak of the step, and the timeline.

    Raises:
        ValueError: no output requires grad.
    """
    cuda = any(t.device.type == "cuda" for t in (*model.parameters(), *tensors_in((args, kwargs))))
    training = [(module, module.training) for module in model.modules()]
    model.train()
    with _quiet():
        try:
            first = None
            if any(layer._guard is not None and layer._guard.modes for _, layer in guard.layers_of(model)):
                # The profiler warns of what was allocated before it and is freed in its step.
                loss(model, args, kwargs).backward()
            else:
                first = _step(model, args, kwargs, cuda)
            # The guard measures in few steps only, so the measured step is one without.
            with guard.paused():
                later = _step(model, args, kwargs, cuda)
        finally:
            model.zero_grad(set_to_none=True)
            for module, flag in training:
                module.training = flag
    return later if first is None else replace(later, first_held=first.held, first_peak=first.peak)


def _step(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], cuda: bool) -> Usage:
    model.zero_grad(set_to_none=True)
    gc.collect()
    # The step must make its own copies of the weights for autocast.
    torch.clear_autocast_cache()
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_allocated()
    with torch.profiler.profile(
        profile_memory=True, acc_events=True, activities=[torch.profiler.ProfilerActivity.CPU]
    ) as profile:
        total = loss(model, args, kwargs)
        held = torch.cuda.memory_allocated() - start if cuda else 0
        with torch.profiler.record_function(_BACKWARD):
            pass
        total.backward()
    peak = torch.cuda.max_memory_allocated() - start if cuda else 0
    timeline, backward_start = _timeline(profile, "cuda" if cuda else "cpu")
    if not cuda:
        held = next((size for time, size in reversed(timeline) if time <= backward_start), 0)
        peak = max((size for _, size in timeline), default=0)
    return Usage(held, peak, tuple(timeline), backward_start)


def _timeline(profile: Any, device: str) -> tuple[list[tuple[float, int]], float]:
    """Bytes over time, and when backward starts, in milliseconds since the first event."""
    events = profile.profiler.kineto_results.events()
    changes = sorted(
        (event.start_ns(), event.nbytes())
        for event in events
        if event.name() == "[memory]" and str(event.device_type()).split(".")[-1].lower() == device
    )
    (backward_start,) = [event.start_ns() for event in events if event.name() == _BACKWARD]
    start = changes[0][0] if changes else 0
    size = 0
    timeline = []
    for time, change in changes:
        size += change
        timeline.append(((time - start) / 1e6, size))
    return timeline, (backward_start - start) / 1e6


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences the profiler, which writes a line to standard error each time it starts or stops."""
    before = os.environ.get("KINETO_LOG_LEVEL")
    os.environ["KINETO_LOG_LEVEL"] = "6"
    try:
        yield
    finally:
        if before is None:
            del os.environ["KINETO_LOG_LEVEL"]
        else:
            os.environ["KINETO_LOG_LEVEL"] = before
