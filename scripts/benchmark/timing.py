"""How forward and backward of one operation are timed, fairly to those that work in place and to those that do not.

An iteration builds a graph of three nodes, ``source -> operation -> sink``, and leaves four marks on a clock:

* ``source`` stands for the convolution before: it hands the operation an x that was just made and that nobody else
  holds, so that it may be overwritten. Making it (a copy of a prepared tensor) is not timed.
* Forward is what happens between the call of the operation and its return. What it allocates, it pays for.
* z is then dropped, as by a net whose next convolution has done its backward.
* ``sink`` stands for the convolution after: its backward returns a gradient that was just made and that nobody else
  holds. An operation may overwrite it or not. Making it is not timed; the clock is marked when it is handed over.
* Backward is everything until autograd calls ``source``'s backward with dx: all nodes of the operation, the gradients
  of its parameters, what it allocates, and what it frees because it is no longer needed. The engine's own cost of
  going from one node to the next is in everybody's time.

Parameter gradients are None at the start of each backward. All contenders of a case take turns, in an order drawn
anew for each round, so that what the machine does at the same time meets all of them, and ratios are taken round by
round.

On CUDA the marks are events. A turn has so many iterations that their x exceed twice the L2 cache (unless they are so
small that this would take more than `MAX_POOL`): all x and all gradients are prepared, then all forwards run, then all
backwards, each finding the cache full of the others' tensors. The device is kept busy while the host queues the turn,
so that events measure the device and not the host.

Needs torch alone, for it is also imported by other interpreters.
"""

from __future__ import annotations

import functools
import gc
import math
import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

PHASES = ("forward", "backward", "both")
WARM_UP_ROUNDS = 2
MAX_POOL = 32
COLD_CACHES = 2
"""How many times the L2 cache the x of one turn are, on CUDA."""

Make = Callable[[], Tensor]


class Silent:
    """A clock that is not read."""

    def mark(self) -> None:
        pass


class HostClock:
    """Marks are points in time."""

    def __init__(self) -> None:
        self.marks: list[float] = []

    def mark(self) -> None:
        self.marks.append(time.perf_counter())

    def durations(self) -> list[float]:
        """Milliseconds from each mark with an even index to the next."""
        return [1e3 * (end - start) for start, end in zip(self.marks[::2], self.marks[1::2], strict=True)]


class DeviceClock:
    """Marks are events on the current stream, that of the thread which leaves the mark."""

    def __init__(self) -> None:
        self.marks: list[torch.cuda.Event] = []

    def mark(self) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self.marks.append(event)

    def durations(self) -> list[float]:
        """Milliseconds from each mark with an even index to the next, once the device has got there."""
        self.marks[-1].synchronize()
        return [start.elapsed_time(end) for start, end in zip(self.marks[::2], self.marks[1::2], strict=True)]


Clock = Silent | HostClock | DeviceClock
Iteration = Callable[[Make, Make, Clock], Iterator[None]]
"""Called with what makes x, what makes the gradient, and a clock, on which it leaves two marks in forward and, after it
has yielded, two in backward."""


class Sample(NamedTuple):
    """Milliseconds of one iteration."""

    forward: float
    backward: float

    def phase(self, name: str) -> float:
        return sum(self) if name == "both" else getattr(self, name)


class _Source(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, trigger: Tensor, make_x: Make, clock: Clock) -> Tensor:
        ctx.clock = clock
        return make_x()

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[None, ...]:
        ctx.clock.mark()
        return None, None, None


class _Sink(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, make_dz: Make, clock: Clock) -> Tensor:
        ctx.make_dz, ctx.clock = make_dz, clock
        return z.new_empty(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None, None]:
        dz = ctx.make_dz()
        ctx.clock.mark()
        return dz, None, None


@functools.cache
def _one(device: torch.device, dtype: torch.dtype, requires_grad: bool) -> Tensor:
    return torch.ones((), device=device, dtype=dtype, requires_grad=requires_grad)


def module_iteration(module: nn.Module, call: Callable[[Tensor], Tensor] | None = None) -> Iteration:
    """One forward and backward of ``call``, by default the module itself, whose parameters are ``module``'s."""
    call = module if call is None else call
    parameters = list(module.parameters())
    device = parameters[0].device

    def iterate(make_x: Make, make_dz: Make, clock: Clock) -> Iterator[None]:
        x = _Source.apply(_one(device, torch.float32, True), make_x, clock)
        clock.mark()
        z = call(x)
        clock.mark()
        loss = _Sink.apply(z, make_dz, clock)
        dtype = z.dtype
        del x, z
        yield
        for parameter in parameters:
            parameter.grad = None
        loss.backward(_one(device, dtype, False))

    return iterate


def floor_iteration(make_x: Make, make_dz: Make, clock: Clock) -> Iterator[None]:
    """The bytes that any algorithm of two passes moves: forward reads x twice and writes once, backward reads x and dz
    twice and writes once."""
    x = make_x()
    clock.mark()
    x.sum()
    x.mul_(0.999)
    clock.mark()
    yield
    dz = make_dz()
    clock.mark()
    x.sum()
    dz.sum()
    dz.add_(x)
    clock.mark()


FLOOR_TRANSFERS = Sample(3, 5)
"""How often `floor_iteration` moves the tensor."""


def with_threads(iteration: Iteration, threads: int) -> Iteration:
    """``iteration`` on so many threads."""

    def iterate(make_x: Make, make_dz: Make, clock: Clock) -> Iterator[None]:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            yield from iteration(make_x, make_dz, clock)
        finally:
            torch.set_num_threads(before)

    return iterate


def pool_size(nbytes: int, cache: int) -> int:
    """How many tensors of a turn are prepared together so that the first is out of the cache when its turn comes."""
    return min(MAX_POOL, math.ceil(COLD_CACHES * cache / max(nbytes, 1)) + 1) if cache else 1


def turn(iteration: Iteration, x: Tensor, dz: Tensor, lead_ms: float = 0.0) -> list[Sample]:
    """A contender's turn: one sample on the CPU, on CUDA as many as make the cache cold.

    ``lead_ms`` is for how long the device is kept busy first.
    """
    if x.device.type != "cuda":
        clock = HostClock()
        run(iteration(x.clone, dz.clone, clock))
        return samples(clock)
    size = pool_size(x.nbytes, torch.cuda.get_device_properties(x.device).L2_cache_size)
    xs, gradients = deque(x.clone() for _ in range(size)), deque(dz.clone() for _ in range(size))
    if lead_ms:
        torch.cuda._sleep(int(lead_ms * _cycles_per_ms(x.device)))
    device_clock = DeviceClock()
    iterations = [iteration(xs.popleft, gradients.popleft, device_clock) for _ in range(size)]
    for started in iterations:
        next(started)
    for started in iterations:
        run(started)
    return samples(device_clock)


def run(iteration: Iterator[None]) -> None:
    """What is left of it."""
    for _ in iteration:
        pass


@functools.cache
def _cycles_per_ms(device: torch.device) -> float:
    """Of `torch.cuda._sleep`."""
    cycles = 10**7
    torch.cuda._sleep(cycles)
    clock = DeviceClock()
    clock.mark()
    torch.cuda._sleep(cycles)
    clock.mark()
    return cycles / clock.durations()[0]


def samples(clock: HostClock | DeviceClock) -> list[Sample]:
    """Of a clock that was marked by all forwards and then by all backwards, in the same order."""
    durations = clock.durations()
    half = len(durations) // 2
    return [Sample(*pair) for pair in zip(durations[:half], durations[half:], strict=True)]


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def interleaved(
    iterations: dict[str, Iteration], x: Tensor, dz: Tensor, seconds: float, min_rounds: int = 5, max_rounds: int = 100
) -> dict[str, list[Sample]]:
    """The samples of each contender, the i-th of all of them from the same round.

    Rounds go on for ``seconds``, but there are at least ``min_rounds``. x and dz are copied, never written.
    """
    order = list(iterations)
    collected: dict[str, list[Sample]] = {name: [] for name in order}
    lead_ms = dict.fromkeys(order, 0.0)
    draw = random.Random(0)
    with no_garbage_collection():
        for _ in range(WARM_UP_ROUNDS):
            for name in order:
                start = time.perf_counter()
                turn(iterations[name], x, dz)
                # Generous: the host is slower to queue than the whole turn, waiting included, was.
                lead_ms[name] = 1.5e3 * (time.perf_counter() - start)
        end = time.perf_counter() + seconds
        rounds = 0
        while rounds < max_rounds and (rounds < min_rounds or time.perf_counter() < end):
            draw.shuffle(order)
            for name in order:
                collected[name] += turn(iterations[name], x, dz, lead_ms[name])
            rounds += 1
    return collected


def quartiles(values: Sequence[float]) -> list[float]:
    """Lower quartile, median, upper quartile."""
    if len(values) == 1:
        return [values[0]] * 3
    return statistics.quantiles(values, n=4, method="inclusive")


def phase_quartiles(collected: Sequence[Sample]) -> dict[str, list[float]]:
    """Of the milliseconds, by phase."""
    return {phase: quartiles([sample.phase(phase) for sample in collected]) for phase in PHASES}


def ratio_quartiles(numerator: Sequence[Sample], denominator: Sequence[Sample]) -> dict[str, list[float]]:
    """Of the ratio of the two samples of each round, by phase."""
    pairs = list(zip(numerator, denominator, strict=True))
    return {phase: quartiles([a.phase(phase) / b.phase(phase) for a, b in pairs]) for phase in PHASES}
