"""Runs tests under a tool of compute-sanitizer, after the tool has shown that it sees faults.

``python scripts/gpu_sanitizer.py memcheck [arguments for pytest ...]``. First the tool runs faulty kernels
(tests/emulation/device/faults.cu): it must name at least one of those in `CONTROLS`, and nothing in the kernel without
fault. A tool that is missing, or that does not work here, is a failure.

With ``--device emulated`` the tool is the emulator of tests/emulation, which knows the same faults.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FAULTS = "tests/emulation/device/faults.cu"
CONTROLS = {
    "memcheck": ("writes_behind_x", "reads_a_misaligned_vector"),
    "racecheck": ("misses_a_barrier",),
    "synccheck": ("leaves_before_a_barrier", "has_two_barriers_for_one", "shuffles_without_a_lane"),
}
"""Kernels with faults that a tool is for. Not every release of synccheck reports each of its three."""
CLEAN = "none"
SECONDS = 30
"""For one faulty kernel."""

Check = Callable[[str], str]
"""What a tool says of the faulty kernel of this name; empty if it finds nothing."""


def sanitizer(tool: str) -> list[str]:
    # Torch makes calls that may fail without harm, to find out what the driver has. Their errors are not reported.
    options = ["--report-api-errors", "no"] if tool == "memcheck" else []
    return ["compute-sanitizer", "--tool", tool, *options, "--error-exitcode", "1", "--kernel-name", "kns=inplace_abn"]


def faulty_program() -> Path:
    """The program of faulty kernels, which is compiled if `gpu_prebuilt.sh` has not done that."""
    prebuilt = ROOT / "build/prebuilt/faults"
    if prebuilt.exists():
        return prebuilt
    program = ROOT / "build/faults"
    program.parent.mkdir(exist_ok=True)
    subprocess.run(["nvcc", "-std=c++20", "-arch=native", "-lineinfo", "-o", program, ROOT / FAULTS], check=True)
    return program


def on_cuda(tool: str) -> Check:
    program = faulty_program()

    def check(kernel: str) -> str:
        command = [*sanitizer(tool), str(program), kernel]
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
        print(done.stdout, done.stderr, sep="", flush=True)
        if "ERROR SUMMARY" not in done.stdout and "RACECHECK SUMMARY" not in done.stdout:
            raise RuntimeError(f"compute-sanitizer does not work here, it exits with {done.returncode}")
        return done.stdout if done.returncode != 0 else ""

    return check


def on_emulator(_tool: str) -> Check:
    sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests/helpers")]
    from emulation import emulated

    return emulated.load().fault


def why_untrusted(tool: str, check: Check) -> str:
    """Why the tool is not to be trusted. Empty if it names faults and nothing else."""
    said = check(CLEAN)
    if said:
        return f"{tool} finds a fault in a kernel that has none: {said.strip().splitlines()[0]}"
    named = [kernel for kernel in CONTROLS[tool] if kernel in check(kernel)]
    print(f"{tool} names {', '.join(named) or 'no faulty kernel'} of {', '.join(CONTROLS[tool])}", flush=True)
    return "" if named else f"{tool} sees none of the faults that were planted"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tool", choices=CONTROLS)
    parser.add_argument("--device", default="cuda")
    args, tests = parser.parse_known_args(arguments)
    if args.device != "emulated" and shutil.which("compute-sanitizer") is None:
        print("there is no compute-sanitizer")
        return 1
    try:
        reason = why_untrusted(args.tool, (on_emulator if args.device == "emulated" else on_cuda)(args.tool))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        reason = f"{args.tool}: {error}"
    if reason:
        print(reason)
        return 1
    under = [] if args.device == "emulated" else sanitizer(args.tool)
    # Without the caching allocator the memory of a tensor ends where the tensor ends.
    environment = os.environ | ({"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if args.tool == "memcheck" else {})
    command = [*under, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
