"""Runs random calls of the kernels under the address sanitizer and the undefined-behaviour sanitizer.

In ``tests``: ``python -m emulation.sanitize [arguments for pytest ...]``. The sanitizers see what the emulator does not
see: the kernels' own variables, and arithmetic without a meaning. The kernels are built as `mutate.py` builds them.
"""

from __future__ import annotations

import os
import subprocess
import sys

from emulation import build, mutate

SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")


def main() -> int:
    few = [flag for flag in mutate.FEW if flag not in build.CALLS]
    type_, dtype = mutate.BFLOAT16
    kernels = build.kernel_objects((type_,), flags=(*SANITIZERS, *few))
    objects = [
        *build.device_objects(),
        *kernels,
        *mutate.unchanged_rest(type_),
        build.faulty_object(),
        *build.op_objects(),
    ]
    library = build.link("sanitized", objects, SANITIZERS)
    names = ("libasan.so", "libubsan.so")
    runtimes = [
        subprocess.run([*build.compiler(), f"-print-file-name={name}"], capture_output=True, text=True, check=True)
        for name in names
    ]
    environment = os.environ | {
        "LD_PRELOAD": ":".join(done.stdout.strip() for done in runtimes),
        # Python and torch keep some of their memory until the end.
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "INPLACE_ABN_EMULATED": str(library),
        "INPLACE_ABN_EMULATED_FEW": dtype,
    }
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", str(build.HERE / "test_fuzz.py")]
    return subprocess.run([*command, *sys.argv[1:]], cwd=build.ROOT, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
