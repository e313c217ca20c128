"""How the C library's malloc is set, which is known when a process starts.

By default glibc maps large blocks from the kernel each time and gives them back when they are freed, so that whoever
allocates an activation pays for its pages being zeroed; in place, nothing is allocated. Warmed, freed blocks are kept
and reused, as allocators other than glibc's do.
"""

from __future__ import annotations

import os
import statistics
import sys

import torch

VARIABLES = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 40),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    # glibc before 2.35 ignores thresholds above 32 MiB.
    "MALLOC_MMAP_MAX_": "0",
}
MODES = ("default", "warmed")


def environment(mode: str) -> dict[str, str]:
    """This process's environment, with malloc's variables as ``mode`` has them."""
    inherited = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    return inherited | (VARIABLES if mode == "warmed" else {})


def describe(mode: str) -> str:
    if mode == "warmed":
        return "warmed: " + " ".join(f"{name}={value}" for name, value in VARIABLES.items())
    return "default: glibc's settings, large blocks are mapped anew each time"


def warm(nbytes: int) -> None:
    """Leaves so many bytes, touched, to a malloc that keeps what is freed."""
    torch.empty(nbytes, dtype=torch.uint8).fill_(1)


def page_faults(nbytes: int = 1 << 26) -> float | None:
    """How often the kernel typically has to provide a page for a block of this size, blocks like it having been
    allocated and freed before; None where that is not known. Tells whether the settings had their effect."""
    if not sys.platform.startswith("linux"):
        return None
    import resource

    counts = []
    for _ in range(16):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        warm(nbytes)
        counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return statistics.median(counts[-5:])
