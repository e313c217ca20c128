"""Checks that a kernel library uses only the stable ABI of torch: ``check_symbols.py LIBRARY``.

Undefined symbols may be those of the C shims, ``aoti_torch_*`` and ``torch_*``, and those of the C, C++ and CUDA
runtimes. The library may ask the loader for these runtimes, libtorch and libtorch_cpu. Everything else is an error.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter

# A symbol belongs to the first kind whose pattern matches it. The symbols of the runtimes have versions.
KINDS = {
    "torch's stable ABI": r"(aoti_torch|torch)_\w+",
    "C and C++ runtime": r"\w+@{1,2}(GLIBC|GLIBCXX|CXXABI|GCC)_[\w.]+",
    "toolchain": r"__gmon_start__|_ITM_\w+|__cxa_finalize|__cxa_thread_atexit_impl",
    "CUDA runtime": r"(__)?cuda[A-Z]\w*(@{1,2}[\w.]+)?",
}
LIBRARIES = r"lib(torch|torch_cpu|c|m|dl|rt|pthread|stdc\+\+|gcc_s|cudart)\.so.*|ld-linux.*"


def output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def undefined_symbols(library: str) -> list[str]:
    return [line.split()[-1] for line in output("nm", "-D", "--undefined-only", library).splitlines()]


def needed_libraries(library: str) -> list[str]:
    return re.findall(r"\(NEEDED\).*\[(.+)\]", output("readelf", "--dynamic", "--wide", library))


def kind(symbol: str) -> str | None:
    return next((name for name, pattern in KINDS.items() if re.fullmatch(pattern, symbol)), None)


def main(library: str) -> int:
    symbols, needed = undefined_symbols(library), needed_libraries(library)
    refused = [symbol for symbol in symbols if kind(symbol) is None]
    for name, number in Counter(kind(symbol) or "refused" for symbol in symbols).items():
        print(f"{number:4} {name}")
    print("stable ABI:", ", ".join(s for s in symbols if kind(s) == "torch's stable ABI"))
    print("needs:", ", ".join(needed))
    if refused:
        readable = subprocess.run(["c++filt"], input="\n".join(refused), text=True, capture_output=True, check=True)
        print("check_symbols: not part of the stable ABI:", *readable.stdout.splitlines(), sep="\n  ")
    foreign = [name for name in needed if not re.fullmatch(LIBRARIES, name)]
    if foreign:
        print("check_symbols: libraries it must not need:", ", ".join(foreign))
    return 1 if refused or foreign else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
