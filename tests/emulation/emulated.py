"""The emulated device, as ops for CPU tensors that can replace the package's own ops."""

from __future__ import annotations

import ctypes
import functools
import os
import zlib
from typing import Any, NamedTuple

import pytest
import torch

from emulation import build
from inplace_abn.autograd import nodes
from inplace_abn.kernels import fakes, ops

NAMESPACE = "inplace_abn_emulated"
CAPABILITIES = (75, 86, 90)
"""Of the devices that tests run on."""
OVERLOADS = {name.replace("_out", ".out"): name for name in ops.NAMES}
"""The names of ops in their library, with those in ``ops``."""


class Launch(NamedTuple):
    kernel: str
    blocks: int
    held: int
    """How many blocks a multiprocessor holds, by the kernel's launch bounds; 0 if they do not say."""


class Emulator:
    """The built library. Its ops do what the package's ops do, by the CUDA kernels."""

    def __init__(self, path: str) -> None:
        torch.ops.load_library(path)
        self._library = ctypes.CDLL(path)
        self._library.emulation_set.argtypes = [
            ctypes.c_uint64,
            ctypes.c_int,
            ctypes.c_int,
            ctypes.c_int64,
            ctypes.c_int,
        ]
        self._library.emulation_device_name.restype = ctypes.c_char_p
        self._library.emulation_fault.restype = ctypes.c_char_p
        self._library.emulation_launched.restype = ctypes.c_char_p
        self.ops: dict[str, Any] = {}
        self._versions = torch.library.Library(NAMESPACE, "IMPL")
        for overload, name in OVERLOADS.items():
            base, _, variant = overload.partition(".")
            self.ops[name] = getattr(getattr(getattr(torch.ops, NAMESPACE), base), variant or "default")
            torch.library.register_fake(self.ops[name], fakes.fake(self.ops[name]))
            ops._bump_versions(self._versions, self.ops[name])
        self.set()

    def set(self, seed: int = 0, orders: int = 2, device: int = 0, sample: int = 0, capability: int = 90) -> None:
        """Sets how launches run.

        Args:
            seed: for the random orders.
            orders: in how many random orders each launch runs. Results must not depend on them.
            device: the number of the emulated device.
            sample: run at most so many blocks of each launch, the first and the last among them; 0 runs all.
            capability: that of the device, 75 for 7.5.
        """
        self._library.emulation_set(seed, orders, device, sample, capability)

    def devices(self) -> list[str]:
        names = []
        while (name := self._library.emulation_device_name(len(names))) is not None:
            names.append(name.decode())
        return names

    def launched(self) -> list[Launch]:
        """What ran since `set`, in order."""
        lines = self._library.emulation_launched().decode().splitlines()
        return [Launch(name, int(blocks), int(held)) for name, blocks, held in (line.split("\t") for line in lines)]

    def fault(self, name: str) -> str:
        """The error that the kernel of this name ends in, or an empty string if there is none."""
        return self._library.emulation_fault(name.encode()).decode()


@functools.cache
def load() -> Emulator:
    """The emulator, which is built if it is missing. ``INPLACE_ABN_EMULATED`` may name another library, as of changed
    kernels."""
    return Emulator(os.environ.get("INPLACE_ABN_EMULATED") or str(build.build()))


def install(monkeypatch: pytest.MonkeyPatch, test: str) -> None:
    """Makes the package call an emulated device. The name ``test`` decides which device, of which capability, and in
    which order it runs."""
    emulator = load()
    number = zlib.crc32(test.encode())
    place, of_capability = number % len(emulator.devices()), number // 7 % len(CAPABILITIES)
    emulator.set(seed=number, device=place, capability=CAPABILITIES[of_capability])
    for name, op in emulator.ops.items():
        monkeypatch.setattr(ops, name, op)
    # The node in C++ always calls the package's own ops.
    monkeypatch.setattr(nodes, "cpp", None)
