"""Checks the machine code of the CUDA kernels, without a GPU: ``check_sass.py BUILD_LOG EXTENSION``.

Fails on warnings of nvcc, on register spills, on local memory and on loads through the read-only path. Kernels that go
through tensors in vectors must load 16 bytes at a time. If they write tensors, they must store 16 bytes at a time.
BUILD_LOG is the output of a build with ``-Xptxas=-v``.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import NamedTuple

STORING = ("Transform<", "Combine<", "InvertAndCombine<")


class Kernel(NamedTuple):
    """The machine code of one kernel. ``name`` is readable. ``accesses`` counts the instructions that access memory."""

    name: str
    accesses: Counter[str]

    @property
    def walks_vectors(self) -> bool:
        """Whether the kernel goes through tensors in vectors of more than one element."""
        return re.match(r"(planes|rows)_kernel<.*, [248](, (true|false))?>", self.name) is not None

    @property
    def stores(self) -> bool:
        op = self.name.split("_kernel<", 1)[1]
        return op.startswith(STORING) or re.match(r"Reduce<.*, true>, \d", op) is not None


def find_tool(name: str) -> str:
    """The path of a program of the CUDA toolkit. Triton has a copy of some of them."""
    folders = [Path(os.environ["CUDA_HOME"]) / "bin"] if "CUDA_HOME" in os.environ else []
    folders += [Path(path) / "triton/backends/nvidia/bin" for path in sys.path]
    found = shutil.which(name) or next((str(f / name) for f in folders if (f / name).exists()), None)
    if found is None:
        raise SystemExit(f"check_sass: there is no {name}, neither on the path nor in CUDA_HOME or triton")
    return found


def readable(names: list[str]) -> list[str]:
    text = subprocess.run(["c++filt"], input="\n".join(names), text=True, capture_output=True, check=True).stdout
    noise = re.compile(r"^void |inplace_abn::|cuda::|\(anonymous namespace\)::|c10::|\(long.*$")
    return [noise.sub("", line).replace("> >", ">>").replace("> >", ">>") for line in text.splitlines()]


def kernels(extension: str) -> list[Kernel]:
    """All kernels in the extension, for every architecture for which it holds machine code."""
    sass = subprocess.run(
        [find_tool("cuobjdump"), "--dump-sass", extension], capture_output=True, text=True, check=True
    )
    names: list[str] = []
    counts: list[Counter[str]] = []
    access = re.compile(r"\b((?:LD|ST)[GLS]?)(\.[A-Z0-9_.]*)?\s")
    for line in sass.stdout.splitlines():
        if "Function :" in line:
            names.append(line.split(":", 1)[1].strip())
            counts.append(Counter())
        elif names and (match := access.search(line)):
            counts[-1][match[1] + (match[2] or "")] += 1
    return [Kernel(name, count) for name, count in zip(readable(names), counts, strict=True)]


def check_log(log: str) -> tuple[list[str], dict[str, int]]:
    """Returns complaints, and the number of registers of each kernel."""
    complaints = [line for line in log.splitlines() if re.search(r"\bwarning\b.*:|: warning\b", line)]
    entries = re.findall(
        r"Compiling entry function '(\S+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
        r".*?Used (\d+) registers",
        log,
        flags=re.DOTALL,
    )
    if not entries:
        complaints.append("the build log tells nothing about registers: was it built with -Xptxas=-v?")
    registers = {}
    for name, (_, stack, stores, loads, used) in zip(readable([e[0] for e in entries]), entries, strict=True):
        registers[name] = int(used)
        if int(stack) or int(stores) or int(loads):
            complaints.append(f"{name}: {stack} bytes of stack, {stores} bytes spilled, {loads} bytes reloaded")
    return complaints, registers


def check_kernel(kernel: Kernel) -> list[str]:
    accesses = kernel.accesses
    complaints = [f"{a} (local memory)" for a in accesses if a.startswith(("LDL", "STL"))]
    complaints += [f"{a} (read-only path)" for a in accesses if "CONSTANT" in a]
    if kernel.walks_vectors:
        if not accesses["LDG.E.128"]:
            complaints.append("no 16-byte loads")
        if kernel.stores != bool(accesses["STG.E.128"]):
            complaints.append("16-byte stores" if not kernel.stores else "no 16-byte stores")
    return [f"{kernel.name}: {complaint}" for complaint in complaints]


def main(log_path: str, extension: str) -> int:
    complaints, registers = check_log(Path(log_path).read_text())
    found = kernels(extension)
    if not any(k.walks_vectors for k in found):
        complaints.append("the extension holds none of the expected kernels")
    groups: dict[str, list[Kernel]] = defaultdict(list)
    for kernel in found:
        complaints += check_kernel(kernel)
        match = re.match(r"(\w+)_kernel<(?:(\w+)<([\w:]+))?", kernel.name)
        if kernel.walks_vectors and match:
            groups[f"{match[1]:7} {match[2]:17} {match[3]}"].append(kernel)
    print(f"{'hot kernels':40} number registers")
    for group, members in sorted(groups.items()):
        used = [registers[k.name] for k in members if k.name in registers]
        print(f"{group:40} {len(members):6} {min(used, default=0):4}-{max(used, default=0)}")
    for complaint in complaints:
        print("check_sass:", complaint)
    print(f"check_sass: {len(found)} kernels, {len(complaints)} complaints")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
