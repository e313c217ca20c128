"""What only CUDA has: the bandwidth that bounds everything, and replays of captured graphs."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
from torch import Tensor

from benchmark.notes import reason
from benchmark.timing import FLOOR_TRANSFERS, DeviceClock, Iteration, Sample, Silent, quartiles, run

COPY_BYTES = 1 << 30
REPLAYS = 20
"""How many replays there are between two events."""


def copy_bandwidth(device: torch.device, repeats: int = 20) -> float:
    """Bytes per second, those read and those written, of a copy on the device that no cache holds; the median."""
    free, _ = torch.cuda.mem_get_info(device)
    source = torch.randn(min(COPY_BYTES, free // 4) // 4, device=device)
    target = torch.empty_like(source)
    clock = DeviceClock()
    for i in range(repeats + 3):
        if i >= 3:
            clock.mark()
        target.copy_(source)
        if i >= 3:
            clock.mark()
    return copied_per_second(source.nbytes, clock.durations())


def copied_per_second(nbytes: int, milliseconds: list[float]) -> float:
    return 2e3 * nbytes / statistics.median(milliseconds)


def floor_ms(nbytes: int, bandwidth: float) -> Sample:
    """The time that the bytes of a two-pass algorithm take at ``bandwidth``."""
    return Sample(*(1e3 * transfers * nbytes / bandwidth for transfers in FLOOR_TRANSFERS))


def replay_ms(body: Callable[[], None], rounds: int = 15) -> list[float]:
    """Quartiles of the milliseconds of one replay of ``body``, captured as a graph."""
    device_stream = torch.cuda.current_stream()
    side = torch.cuda.Stream()
    side.wait_stream(device_stream)
    with torch.cuda.stream(side):
        for _ in range(3):
            body()
    device_stream.wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    graph.replay()
    clock = DeviceClock()
    for _ in range(rounds):
        clock.mark()
        for _ in range(REPLAYS):
            graph.replay()
        clock.mark()
    return quartiles([ms / REPLAYS for ms in clock.durations()])


def replays(iterations: dict[str, Iteration], x: Tensor, dz: Tensor) -> tuple[dict[str, list[float]], list[str]]:
    """`replay_ms` of forward and backward of each contender, and notes on those that cannot be captured.

    A replay must make its own x and dz, which are overwritten, so two copies are part of it; "copies" are these alone.
    Caches are warm.
    """

    def copies() -> None:
        x.clone()
        dz.clone()

    bodies: dict[str, Callable[[], None]] = {"copies": copies}
    for name, iteration in iterations.items():
        bodies[name] = lambda iteration=iteration: run(iteration(x.clone, dz.clone, Silent()))
    milliseconds: dict[str, list[float]] = {}
    notes = []
    for name, body in bodies.items():
        try:
            milliseconds[name] = replay_ms(body)
        except RuntimeError as error:
            notes.append(f"{name} not captured as a graph: {reason(error)}")
    return milliseconds, notes
