"""Times forward and backward of one operation, with the same rules for operations that work in place and for others.

An iteration builds a graph of three nodes, ``source -> operation -> sink``, and leaves four marks on a clock:

* ``source`` stands for the convolution before the operation. It hands over an x that was just made and that nobody else
  holds, so that the operation may overwrite it. Making x, a copy of a prepared tensor, is not timed.
* Forward is the time from the call of the operation to its return. It includes the operation's allocations.
* z is then dropped, as in a net whose next convolution has done its backward.
* ``sink`` stands for the convolution after the operation. Its backward returns a gradient that was just made and that
  nobody else holds, so that the operation may overwrite it. Making the gradient is not timed. The clock is marked when
  the gradient is handed over.
* Backward is the time until autograd calls ``source``'s backward with dx. It includes all nodes of the operation, the
  gradients of its parameters, its allocations, and the release of memory that it no longer needs. Autograd's own cost
  of going from one node to the next is in the time of every contender.

Parameter gradients are None at the start of each backward. All contenders of a case take turns, in an order that is
drawn anew for each round, so that the other load of the machine affects all of them. Ratios are taken round by round.

On CUDA the marks are events. A turn has so many iterations that their x exceed twice the L2 cache, but at most
`MAX_POOL` iterations. All x and all gradients are prepared first. Then all forwards run, then all backwards. Each finds
the cache full of the tensors of the others. The device is kept busy while the host queues the turn, so that events
measure the device and not the host.
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
"""On CUDA the x of one turn are together this many times as large as the L2 cache."""


class Clock:
    """Collects marks. A mark is a point in time, or on CUDA an event on the current stream of the thread that leaves
    it."""

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
        """Milliseconds from each mark with an even index to the next one. On CUDA this waits until the device has
        reached the last mark."""
        pairs = zip(self.marks[::2], self.marks[1::2], strict=True)
        if self.on_cuda:
            self.marks[-1].synchronize()
            return [start.elapsed_time(end) for start, end in pairs]
        return [1e3 * (end - start) for start, end in pairs]


Make = Callable[[], Tensor]
Iteration = Callable[[Make, Make, Clock], Iterator[None]]
"""The arguments are a function that makes x, a function that makes the gradient, and a clock. The iteration leaves two
marks in forward, yields, and leaves two marks in backward."""


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


def module_iteration(module: nn.Module, call: Callable[[Tensor], Tensor]) -> Iteration:
    """One forward and backward of ``call``. The parameters are those of ``module``."""
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
    """Moves the bytes that any algorithm of two passes moves. Forward reads x twice and writes once. Backward reads x
    and dz twice and writes once."""
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
    """How many tensors of ``nbytes`` bytes to prepare for a turn, so that the first has left the cache when it is
    used."""
    return min(MAX_POOL, math.ceil(COLD_CACHES * cache / max(nbytes, 1)) + 1)


def turn(iteration: Iteration, x: Tensor, dz: Tensor, lead_ms: float = 0.0) -> list[tuple[float, float]]:
    """Milliseconds of forward and of backward in one turn of a contender. On the CPU there is one pair, on CUDA there
    are as many as make the cache cold. On CUDA the device is first kept busy for ``lead_ms`` milliseconds."""
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
    """Runs the rest of an iteration."""
    deque(iteration, maxlen=0)


@functools.cache
def _cycles_per_ms(device: torch.device) -> float:
    """How many cycles of `torch.cuda._sleep` take a millisecond."""
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
    """Times all contenders in turns.

    Rounds go on for ``seconds``, but there are at least ``min_rounds``. x and dz are copied, never written.

    Returns:
        The milliseconds of each contender, with a row for each sample and a column for each phase. The i-th rows of all
        contenders are from the same round.
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
                # The host needs less time to queue a turn than the whole turn took, because that includes the wait for
                # the device.
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
    """Lower quartile, median and upper quartile of ``values``, or of each column of a matrix."""
    at = torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)
    return torch.quantile(torch.as_tensor(values, dtype=torch.float64), at, dim=0).movedim(0, -1).tolist()


def by_phase(samples: Tensor) -> dict[str, list[float]]:
    """Quartiles for each phase of a result of `interleaved`, or of a ratio of two results."""
    return dict(zip(PHASES, quartiles(samples), strict=True))


def reason(error: BaseException) -> str:
    """An error in one line: its class and its first line, and the second line if the first one ends with a colon."""
    first, *more = str(error).strip().splitlines() or ["no message"]
    return f"{type(error).__name__}: {first}" + (f" {more[0]}" if first.endswith(":") and more else "")
