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
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

PHASES = ("forward", "backward", "both")
FLOOR_TRANSFERS = (3, 5, 8)
"""How often `floor_iteration` moves the tensor, by phase."""
WARM_UP_ROUNDS = 2
MAX_ROUNDS = 100
MAX_POOL = 32
COLD_CACHES = 2
"""How many times the L2 cache the x of one turn are, on CUDA."""


class Clock:
    """Marks are points in time, or on CUDA events on the current stream of the thread that leaves the mark."""

    def __init__(self, device: torch.device) -> None:
        self.on_cuda = device.type == "cuda"
        self.marks: list[Any] = []

    def mark(self) -> None:
        if self.on_cuda:
            self.marks.append(torch.cuda.Event(enable_timing=True))
            self.marks[-1].record()
        else:
            self.marks.append(time.perf_counter())

    def durations(self) -> list[float]:
        """Milliseconds from each mark with an even index to the next, on CUDA once the device has got there."""
        pairs = zip(self.marks[::2], self.marks[1::2], strict=True)
        if self.on_cuda:
            self.marks[-1].synchronize()
            return [start.elapsed_time(end) for start, end in pairs]
        return [1e3 * (end - start) for start, end in pairs]


Make = Callable[[], Tensor]
Iteration = Callable[[Make, Make, Clock], Iterator[None]]
"""Called with what makes x, what makes the gradient, and a clock, on which it leaves two marks in forward and, after it
has yielded, two in backward."""


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


def pool_size(nbytes: int, cache: int) -> int:
    """How many tensors of a turn are prepared together so that the first is out of the cache when its turn comes."""
    return min(MAX_POOL, math.ceil(COLD_CACHES * cache / max(nbytes, 1)) + 1)


def turn(iteration: Iteration, x: Tensor, dz: Tensor, lead_ms: float = 0.0) -> list[tuple[float, float]]:
    """Milliseconds of forward and of backward in a contender's turn: one pair on the CPU, on CUDA as many as make the
    cache cold. ``lead_ms`` is for how long the device is kept busy first.
    """
    size = 1
    make_x: Make = x.clone
    make_dz: Make = dz.clone
    if x.device.type == "cuda":
        size = pool_size(x.nbytes, torch.cuda.get_device_properties(x.device).L2_cache_size)
        make_x, make_dz = (deque([tensor.clone() for _ in range(size)]).popleft for tensor in (x, dz))
        if lead_ms:
            torch.cuda._sleep(int(lead_ms * _cycles_per_ms(x.device)))
    clock = Clock(x.device)
    iterations = [iteration(make_x, make_dz, clock) for _ in range(size)]
    for started in iterations:
        next(started)
    for started in iterations:
        finish(started)
    ms = clock.durations()
    return list(zip(ms[:size], ms[size:], strict=True))


def finish(iteration: Iterator[None]) -> None:
    """Runs what is left of it."""
    deque(iteration, maxlen=0)


@functools.cache
def _cycles_per_ms(device: torch.device) -> float:
    """Of `torch.cuda._sleep`."""
    cycles = 10**7
    torch.cuda._sleep(cycles)
    clock = Clock(device)
    clock.mark()
    torch.cuda._sleep(cycles)
    clock.mark()
    return cycles / clock.durations()[0]


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def interleaved(
    iterations: dict[str, Iteration], x: Tensor, dz: Tensor, seconds: float, min_rounds: int
) -> dict[str, Tensor]:
    """Milliseconds of each contender: a row for each sample, the i-th of all of them from the same round, and a column
    for each phase.

    Rounds go on for ``seconds``, but there are at least ``min_rounds``. x and dz are copied, never written.
    """
    order = list(iterations)
    collected: dict[str, list[tuple[float, float]]] = {name: [] for name in order}
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
        while rounds < MAX_ROUNDS and (rounds < min_rounds or time.perf_counter() < end):
            draw.shuffle(order)
            for name in order:
                collected[name] += turn(iterations[name], x, dz, lead_ms[name])
            rounds += 1
    return {
        name: torch.tensor([(f, b, f + b) for f, b in pairs], dtype=torch.float64) for name, pairs in collected.items()
    }


def quartiles(values: Sequence[float] | Tensor) -> list[Any]:
    """Lower quartile, median, upper quartile; those of each column where there are columns."""
    at = torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)
    return torch.quantile(torch.as_tensor(values, dtype=torch.float64), at, dim=0).movedim(0, -1).tolist()


def by_phase(samples: Tensor) -> dict[str, list[float]]:
    """Quartiles of what `interleaved` gives, or of a ratio of such."""
    return dict(zip(PHASES, quartiles(samples), strict=True))


def reason(error: BaseException) -> str:
    """In one line: the error's kind and first line, and the second one if the first only introduces it."""
    first, *more = str(error).strip().splitlines() or ["no message"]
    return f"{type(error).__name__}: {first}" + (f" {more[0]}" if first.endswith(":") and more else "")
