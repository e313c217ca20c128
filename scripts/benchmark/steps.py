"""Measures whole training steps of a net, native and converted, in eager mode and compiled.

Results are the time and the memory that the allocator reports. All contenders have the same initial weights and the
same batch, and they take turns. Before it is measured, each contender runs one small step in eager mode, in which the
guard of converted norms decides. Then it runs `WARM_UP` steps, the first of which compiles. The activation modules of
compiled contenders are out of place.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._functorch import config as functorch

from benchmark.cases import DTYPES, LAYOUTS, Setting
from benchmark.timing import Clock, no_garbage_collection, quartiles, reason
from inplace_abn import convert, guard
from inplace_abn.memory import measure
from inplace_abn.trial import tensors_in

_NEVER = 1 << 30
WARM_UP = 2


class Contender(NamedTuple):
    """How a net is trained. ``budget`` is torch.compile's ``activation_memory_budget``, whose default is 1."""

    converted: bool = False
    compiled: bool = False
    budget: float = 1.0
    checkpointed: bool = False
    """By ``set_grad_checkpointing``, which timm's nets have."""

    def prepared(self, net: nn.Module) -> nn.Module:
        """``net``, which is changed to what this contender trains, but not compiled."""
        for module in net.modules():
            if self.compiled and getattr(module, "inplace", False):
                module.inplace = False  # type: ignore[assignment]
        if self.checkpointed:
            net.set_grad_checkpointing()  # type: ignore[operator]
        return convert(net) if self.converted else net

    def compile(self, net: nn.Module) -> nn.Module:
        def backend(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            # This call decides what is kept for backward. The setting is needed in no other place.
            with functorch.patch(activation_memory_budget=self.budget):
                return torch._inductor.compile(graph, inputs)  # type: ignore[arg-type, return-value]

        return torch.compile(net, dynamic=False, backend=backend) if self.compiled else net


EAGER_NATIVE, EAGER_CONVERTED = "eager native", "eager converted"
CONTENDERS = {
    EAGER_NATIVE: Contender(),
    EAGER_CONVERTED: Contender(converted=True),
    "compiled native": Contender(compiled=True),
    "compiled native, budget 0.5": Contender(compiled=True, budget=0.5),
    "compiled converted": Contender(converted=True, compiled=True),
    "compiled converted, budget 0.5": Contender(converted=True, compiled=True, budget=0.5),
}
CHECKPOINTED = {
    EAGER_NATIVE: CONTENDERS[EAGER_NATIVE],
    EAGER_CONVERTED: CONTENDERS[EAGER_CONVERTED],
    "checkpointed native": Contender(checkpointed=True),
    "checkpointed converted": Contender(converted=True, checkpointed=True),
}


@dataclass
class Training:
    """A net, the module to call for its forward pass, its optimiser, one batch and a dtype.

    With a dtype other than float32, the forward pass is under autocast to it, as in mixed-precision training.
    """

    net: nn.Module
    call: nn.Module
    optimizer: torch.optim.Optimizer
    images: Tensor
    dtype: torch.dtype

    def loss(self) -> Tensor:
        with autocast(self.images.device, self.dtype):
            outputs = [output for output in tensors_in(self.call(self.images)) if output.requires_grad]
            return torch.stack([output.float().square().mean() for output in outputs]).sum()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.loss().backward()
        self.optimizer.step()


def autocast(device: torch.device, dtype: torch.dtype) -> torch.autocast:
    return torch.autocast(device.type, dtype, enabled=dtype != torch.float32)


class Course:
    """What the contenders of one net share. ``net`` stays unchanged, on the CPU."""

    def __init__(self, net: nn.Module, setting: Setting, size: int, device: torch.device) -> None:
        self.net, self.size, self.device = net.train(), size, device
        self.dtype, self.layout = DTYPES[setting.dtype], LAYOUTS[setting.layout]

    def images(self, batch: int) -> Tensor:
        images = torch.randn(batch, 3, self.size, self.size, generator=torch.Generator().manual_seed(batch))
        return images.to(self.device, memory_format=self.layout)

    def copy(self) -> nn.Module:
        return copy.deepcopy(self.net).to(self.device, memory_format=self.layout)

    def training(self, contender: Contender, batch: int, warm_up: int = 0) -> Training:
        """The training of a contender, after its small step and after ``warm_up`` steps with ``batch`` images."""
        net = contender.prepared(self.copy())
        training = Training(net, net, torch.optim.SGD(net.parameters(), 1e-3, 0.9), self.images(2), self.dtype)
        training.step()
        training.optimizer.zero_grad()
        training.call, training.images = contender.compile(net), self.images(batch)
        for _ in range(warm_up):
            training.step()
        return training


def _measure_no_more(net: nn.Module) -> None:
    """Makes the guard go on as it has decided. It measures in one step of a hundred, and such a step would stand out.

    While it is paused calls take longer, because they are not compared with earlier ones.
    """
    for _, layer in guard.layers_of(net):
        layer.guard_interval = _NEVER
        for mode in layer._guard.modes.values() if layer._guard is not None else ():
            mode.gap = _NEVER


def time_steps(trainings: dict[str, Training], steps: int, notes: dict[str, str]) -> dict[str, list[float]]:
    """Milliseconds of the steps of each training. The trainings take turns. If a step fails, its training is removed
    from ``trainings``, and ``notes`` gets the reason."""
    clocks = {name: Clock(training.images.device) for name, training in trainings.items()}
    for training in trainings.values():
        _measure_no_more(training.net)
    with no_garbage_collection():
        for i in range(steps):
            names = list(trainings)
            turn = i % max(1, len(names))
            for name in names[turn:] + names[:turn]:
                clocks[name].mark()
                try:
                    trainings[name].step()
                except Exception as error:
                    del trainings[name]
                    notes[name] = reason(error)
                    continue
                clocks[name].mark()
    return {name: clocks[name].durations() for name in trainings}


def memory(training: Training) -> dict[str, int]:
    """Bytes above those held between two steps: ``held`` between forward and backward, ``peak`` during the step."""
    training.optimizer.zero_grad()
    with autocast(training.images.device, training.dtype):
        usage = measure(training.call, training.images)
    return {"held": usage.held, "peak": usage.peak}


def measure_net(
    course: Course,
    batch: int,
    steps: int,
    contenders: Sequence[str] = tuple(CONTENDERS),
    has_time: Callable[[str], bool] = lambda _: True,
    batch_memory: float = 0.0,
) -> dict[str, Any]:
    """Measures all contenders of one net.

    Returns:
        For each contender its memory, and the quartiles of its milliseconds per step and of their ratio to eager
        native's. With ``batch_memory``, GiB of a CUDA device, the largest batch of eager contenders, too. Also a note
        on each contender that failed.
    """
    measured: dict[str, dict[str, Any]] = {}
    notes: dict[str, str] = {}
    trainings: dict[str, Training] = {}
    # Otherwise the nets of other calls count towards the limit of recompilations.
    torch._dynamo.reset()
    for name in filter(has_time, contenders):
        try:
            trainings[name] = course.training(CONTENDERS[name], batch, WARM_UP)
        except Exception as error:
            notes[name] = reason(error)
    timed = time_steps(trainings, steps, notes)
    for name, ms in timed.items():
        try:
            measured[name] = {"ms": quartiles(ms)} | memory(trainings[name])
        except Exception as error:
            notes[name] = reason(error)
            continue
        if EAGER_NATIVE in timed:
            measured[name]["ratio"] = quartiles([a / b for a, b in zip(ms, timed[EAGER_NATIVE], strict=True)])
    if course.device.type == "cuda" and batch_memory:
        trainings.clear()
        for name in measured:
            if not CONTENDERS[name].compiled and has_time(f"{name}, largest batch"):
                measured[name]["largest"] = largest_batch(course, CONTENDERS[name], batch, batch_memory)
    return {"contenders": measured, "notes": notes}


def largest(fits: Callable[[int], bool], start: int, precision: float = 1 / 16) -> int:
    """The largest number that fits, up to ``precision`` of itself too small. 0 if 1 does not fit."""
    low, high = 0, max(1, start)
    while fits(high):
        low, high = high, 2 * high
    while high - low > max(1, int(precision * low)):
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low


def largest_batch(course: Course, contender: Contender, start: int, gib: float) -> int:
    """The largest batch with which a step takes no more than so much memory of a CUDA device."""
    training = course.training(contender, start)
    total = torch.cuda.get_device_properties(course.device).total_memory

    def fits(batch: int) -> bool:
        training.optimizer.zero_grad()
        training.images = torch.empty(0, device=course.device)
        torch.cuda.empty_cache()
        try:
            training.images = course.images(batch)
            training.step()
        except torch.OutOfMemoryError:
            return False
        return True

    torch.cuda.set_per_process_memory_fraction(min(1.0, gib * 2**30 / total), course.device)
    try:
        with guard.paused():
            return largest(fits, start)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, course.device)
