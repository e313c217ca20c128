"""Whole training steps: time, memory by the allocator's own account, and the largest batch that fits."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from benchmark.cases import DTYPES, LAYOUTS, Setting
from benchmark.contenders import EAGER, OURS, NativeNorm, in_place_norm
from benchmark.nets import Recipe
from benchmark.timing import DeviceClock, HostClock, no_garbage_collection, quartiles

NORMS = {OURS: in_place_norm, EAGER: NativeNorm}


@dataclass
class Training:
    """A net, its optimiser and one batch. Other dtypes than float32 are autocast to, as in mixed-precision training."""

    net: nn.Module
    optimizer: torch.optim.Optimizer
    images: Tensor
    labels: Tensor
    dtype: torch.dtype

    def forward(self) -> Tensor:
        """The loss."""
        with torch.autocast(self.images.device.type, self.dtype, enabled=self.dtype != torch.float32):
            return F.cross_entropy(self.net(self.images), self.labels)

    def step(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.forward().backward()
        self.optimizer.step()

    def forget(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def resident(self) -> int:
        """Bytes of parameters, buffers, momenta and the batch."""
        tensors = [*self.net.parameters(), *self.net.buffers(), self.images, self.labels]
        for state in self.optimizer.state.values():
            tensors += [value for value in state.values() if isinstance(value, Tensor)]
        return sum(tensor.nbytes for tensor in tensors)


def make_training(recipe: Recipe, norm: str, setting: Setting, batch: int, size: int, device: torch.device) -> Training:
    """With the same initial weights for every norm."""
    torch.manual_seed(0)
    layout = LAYOUTS[setting.layout]
    net = recipe.make(NORMS[norm], recipe.classes).to(device=device, memory_format=layout)
    images = torch.randn(batch, 3, size, size, device=device).contiguous(memory_format=layout)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9)
    return Training(net, optimizer, images, recipe.labels(batch, size, device), DTYPES[setting.dtype])


def time_steps(trainings: dict[str, Training], steps: int, warm_up: int = 2) -> dict[str, list[float]]:
    """Milliseconds of each one's steps, which take turns."""
    device = next(iter(trainings.values())).images.device
    clocks: dict[str, Any] = {name: DeviceClock() if device.type == "cuda" else HostClock() for name in trainings}
    for training in trainings.values():
        for _ in range(warm_up):
            training.step()
    with no_garbage_collection():
        for i in range(steps):
            names = list(trainings)
            for name in names[i % len(names) :] + names[: i % len(names)]:
                clocks[name].mark()
                trainings[name].step()
                clocks[name].mark()
    return {name: clock.durations() for name, clock in clocks.items()}


def allocator_changes(run: Callable[[], object]) -> tuple[list[int], object]:
    """Bytes, in order, that the CPU's allocator gave and took (negative) during ``run``; and what ``run`` returned."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        kept = run()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]  # type: ignore[union-attr]
    return [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())], kept


def highest(changes: list[int]) -> int:
    """The most that is held at once."""
    held = most = 0
    for change in changes:
        held += change
        most = max(most, held)
    return most


def cpu_peak(training: Training) -> int:
    """Bytes that a step takes at most above those held before it."""
    training.forget()
    return highest(allocator_changes(training.step)[0])


def memory(training: Training) -> dict[str, int]:
    """Bytes above those held between two steps: ``held`` between forward and backward, ``peak`` during the step."""
    device = training.images.device
    training.forget()
    if device.type != "cuda":
        changes, loss = allocator_changes(training.forward)
        del loss
        return {"held": sum(changes), "peak": cpu_peak(training)}
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    loss = training.forward()
    held = torch.cuda.memory_allocated(device) - before
    del loss
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    training.step()
    torch.cuda.synchronize(device)
    return {"held": held, "peak": torch.cuda.max_memory_allocated(device) - before}


def largest(fits: Callable[[int], bool], least: int, limit: int) -> int:
    """The largest number from ``least`` to ``limit`` that fits, if smaller ones do too; 0 if ``least`` does not.

    The answer is exact to an eighth of itself: doubled first, then halved in between.
    """
    good, bad = 0, least
    while bad <= limit and fits(bad):
        good, bad = bad, 2 * bad
    bad = min(bad, limit + 1)
    while good and bad - good > max(1, good // 8):
        middle = (good + bad) // 2
        if fits(middle):
            good = middle
        else:
            bad = middle
    return good


@contextlib.contextmanager
def memory_limit(device: torch.device, budget: int) -> Iterator[None]:
    """Lets the CUDA allocator of this process have ``budget`` bytes."""
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(min(1.0, budget / total), device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


def out_of_memory(error: RuntimeError) -> bool:
    """Also where cuDNN found no algorithm whose workspace could be allocated."""
    return isinstance(error, torch.cuda.OutOfMemoryError) or "unable to find an engine" in str(error)


def fits_budget(make: Callable[[], Training], device: torch.device, budget: int) -> bool:
    """Whether two training steps get by with ``budget`` bytes: on CUDA with the allocator limited to that, on the CPU
    by the allocator's account."""
    if device.type != "cuda":
        training = make()
        training.step()
        return training.resident() + cpu_peak(training) <= budget
    fits = True
    with memory_limit(device, budget):
        try:
            training = make()
            training.step()
            training.step()
            torch.cuda.synchronize(device)
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            fits = False
        training = None  # type: ignore[assignment]
        gc.collect()
        torch.cuda.empty_cache()
    return fits


def measure_net(
    recipe: Recipe, setting: Setting, batch: int, size: int, device: torch.device, steps: int, budget: int | None
) -> dict[str, Any]:
    """For each norm quartiles of the milliseconds per step, images per second, memory and, with a budget in bytes, the
    largest batch."""
    trainings = {name: make_training(recipe, name, setting, batch, size, device) for name in NORMS}
    timed = time_steps(trainings, steps)
    result: dict[str, Any] = {}
    for name, durations in timed.items():
        ms = quartiles(durations)
        # Together they need the memory of both, hence one after the other.
        training = trainings.pop(name)
        result[name] = {"ms": ms, "images_per_s": 1e3 * batch / ms[1], **memory(training)}
        del training
    if budget is not None:
        for name in NORMS:

            def make(batch: int, name: str = name) -> Training:
                return make_training(recipe, name, setting, batch, size, device)

            result[name]["largest_batch"] = largest(
                lambda batch, make=make: fits_budget(lambda: make(batch), device, budget), 2, 1 << 16
            )
    return result
