"""The machine, its bandwidth, and the settings of the C library's malloc.

By default glibc maps each large block anew and unmaps it when it is freed. Code that allocates an activation then also
waits for the kernel to zero its pages. Code that works in place allocates nothing. In the mode "warmed" malloc keeps
freed blocks and reuses them, as allocators other than glibc's do. Malloc reads its settings when a process starts.
"""

from __future__ import annotations

import os
import platform
import resource
import statistics
from pathlib import Path
from typing import Any

import torch

import inplace_abn
from benchmark.timing import Clock

MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 40),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    # glibc before 2.35 ignores thresholds above 32 MiB.
    "MALLOC_MMAP_MAX_": "0",
}
MODES = {
    "default": "default: glibc's settings, large blocks are mapped anew each time",
    "warmed": "warmed: " + " ".join(f"{name}={value}" for name, value in MALLOC.items()),
}
COPY_BYTES = 1 << 30


def environment(mode: str) -> dict[str, str]:
    """The environment of this process, with the variables of malloc set for ``mode``.

    In it Python finds the package that this process has imported.
    """
    inherited = {name: value for name, value in os.environ.items() if name not in MALLOC}
    folders = [str(Path(inplace_abn.__file__).parents[1]), os.environ.get("PYTHONPATH")]
    path = {"PYTHONPATH": os.pathsep.join(filter(None, folders))}
    return inherited | path | (MALLOC if mode == "warmed" else {})


def warm(nbytes: int) -> None:
    """Allocates, touches and frees ``nbytes`` bytes. A malloc that keeps freed blocks can reuse them."""
    torch.empty(nbytes, dtype=torch.uint8).fill_(1)


def page_faults(nbytes: int = 1 << 26) -> float:
    """The median number of pages that the kernel provides for a block of ``nbytes`` bytes, after such blocks were
    freed. It shows whether the settings of malloc have an effect."""
    counts = []
    for _ in range(16):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        warm(nbytes)
        counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return statistics.median(counts[-5:])


def describe(device: torch.device, threads: int) -> dict[str, Any]:
    info = Path("/proc/cpuinfo")
    models = [line for line in info.read_text().splitlines() if "model name" in line] if info.exists() else []
    machine = {
        "cpu": models[0].partition(":")[2].strip() if models else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": threads,
        "torch": torch.__version__,
        "inplace_abn": inplace_abn.__version__,
        "python": platform.python_version(),
        "capability": torch.backends.cpu.get_cpu_capability(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        machine |= {"gpu": properties.name, "gpu_memory": properties.total_memory, "l2": properties.L2_cache_size}
        machine |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    return machine


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second, read and written, of a copy on the device that is larger than its caches; the median."""
    free, _ = torch.cuda.mem_get_info(device)
    source = torch.randn(min(COPY_BYTES, free // 4) // 4, device=device)
    target = torch.empty_like(source)
    clock = Clock(device)
    for _ in range(23):
        clock.mark()
        target.copy_(source)
        clock.mark()
    # The first three copies warm up.
    return 2e3 * source.nbytes / statistics.median(clock.durations()[3:])
