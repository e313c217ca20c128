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
    few = mutate.BFLOAT16
    kernels = build.kernel_objects((few.type_,), flags=(*SANITIZERS, *few.flags))
    objects = [
        *build.device_objects(),
        *kernels,
        *mutate.unchanged_rest(few.type_),
        build.faulty_object(),
        *build.op_objects(),
    ]
    library = build.link("sanitized", objects, SANITIZERS)
    names = ("libasan.so", "libubsan.so")
    runtimes = [
        subprocess.run([*build.compiler(), f"-print-file-name={name}"], capture_output=True, text=True, check=True)
        for name in names
    ]
    environment = os.environ | few.environment(library)
    environment |= {
        "LD_PRELOAD": ":".join(done.stdout.strip() for done in runtimes),
        # Python and torch keep some of their memory until the end.
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", str(build.HERE / "test_fuzz.py")]
    return subprocess.run([*command, *sys.argv[1:]], cwd=build.ROOT, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
