"""Checks the CUDA backend on a machine with a GPU, with that machine's Python and torch and without a network.

``scripts/gpu_check.sh`` runs this program. The most important steps come first, and steps run until time is up. After
each step the folder ``--out`` has summary.json, summary.txt and the logs of all steps so far (logs.tar.gz). Each
benchmark adds a folder of its own, with bench.md, bench.json and, for ops, bench.png.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any, NamedTuple

PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "cuda")
OPS = (
    *(
        f"tests/ops/test_{name}.py"
        for name in ("ops", "schemas", "activations", "dead_positions", "norms_of_rows", "cuda")
    ),
    *(f"tests/autograd/test_{name}.py" for name in ("functions", "residual")),
)
# These tests run all activations, with and without a residual, in few shapes of any alignment.
CHECKED = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/ops/test_cuda.py")
CHECKED += ("-k", "test_small_tensors_of_any_alignment and (float32 or bfloat16)")
BENCH = (sys.executable, "scripts/bench.py", "--device", "cuda", "--time-limit", "{limit}")
# Nets are trained on GPUs in this dtype and layout.
NETS = (*BENCH, "--groups", "--overhead", "0", "--settings", "bf16:channels_last", "--net-size", "224", "--nets")
PUBLIC = ("torchvision:resnet50", "demo:silu", "torchvision:efficientnet_b0", "smp:DeepLabV3Plus-resnet50")
PROBE = (sys.executable, "-c", "import torch; torch.zeros(1, device='cuda')")
# Seconds that a tool has after an interrupt to write its report.
GRACE = 15

PLAN = """\
Calls of less than ten minutes each; on a machine that stays, all but the first find the build of the first.

Whether it is right, on a lease of half an hour:

  OUT=... scripts/gpu_check.sh build sass ops memcheck racecheck synccheck
  OUT=... scripts/gpu_check.sh build huge
  OUT=... scripts/gpu_check.sh build suite

How fast it is and what it holds, on another one; the folders ops, nets and batches go to scripts/results/cuda-DATE:

  OUT=... scripts/gpu_check.sh build bench
  OUT=... scripts/gpu_check.sh build nets
  OUT=... scripts/gpu_check.sh build batches
"""


class Step(NamedTuple):
    command: tuple[str, ...]
    seconds: int
    """The time limit of the step."""
    side_by_side: bool = False
    """Whether the step is a pytest whose tests may share the device."""


def sanitizer(tool: str, *options: str) -> tuple[str, ...]:
    return "compute-sanitizer", "--tool", tool, *options, "--error-exitcode", "1", "--kernel-name", "kns=inplace_abn"


STEPS = {
    "build": Step((sys.executable, "setup.py", "build_ext", "--inplace"), 270),
    "sass": Step((sys.executable, "scripts/check_sass.py", "{build}", "inplace_abn/_kernels.so"), 60),
    "ops": Step((*PYTEST, "-m", "not slow and not huge", *OPS), 150, True),
    # Torch makes calls that may fail without harm, to find out what the driver has. Their errors are not reported.
    "memcheck": Step((*sanitizer("memcheck", "--report-api-errors", "no"), *CHECKED), 120),
    "racecheck": Step((*sanitizer("racecheck"), *CHECKED), 120),
    "synccheck": Step((*sanitizer("synccheck"), *CHECKED), 90),
    "bench": Step((*BENCH, "--out", "{out}/ops"), 260),
    "nets": Step((*NETS, *PUBLIC, "--net-batch", "64", "--out", "{out}/nets"), 510),
    "batches": Step((*NETS, *PUBLIC[:1], "--net-batch", "32", "128", "--out", "{out}/batches"), 510),
    "huge": Step((*PYTEST, "-m", "huge", "tests"), 180),
    "suite": Step((*PYTEST, "-m", "not huge", "tests"), 500, True),
}


class Result(NamedTuple):
    step: str
    result: str
    seconds: int
    last_line: str


def run(command: tuple[str, ...], seconds: float, log: Path, environment: dict[str, str]) -> str:
    """Runs a command and returns its result. After ``seconds`` the command is interrupted, so that a pytest can write
    its report. `GRACE` seconds later it is killed, with all processes that it has started."""
    with log.open("w") as file:
        process = subprocess.Popen(
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
            # Background jobs of a shell ignore interrupts, and the processes that they start inherit this.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        in_time = True
        for sent, patience in ((signal.SIGINT, seconds), (signal.SIGKILL, GRACE)):
            try:
                process.wait(patience)
                break
            except subprocess.TimeoutExpired:
                in_time = False
                os.killpg(process.pid, sent)
        code = process.wait()
    if not in_time:
        return "timed out"
    return "passed" if code == 0 else f"failed ({code})"


def why_no_sanitizer(logs: Path) -> str:
    """The reason why compute-sanitizer does not work here. Empty if it works."""
    if shutil.which("compute-sanitizer") is None:
        return "there is no compute-sanitizer"
    log = logs / "sanitizer.log"
    result = run((*sanitizer("memcheck", "--report-api-errors", "no"), *PROBE), 60, log, dict(os.environ))
    return "" if result == "passed" else f"compute-sanitizer does not work here ({result}): {last_line(log)}"


def last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").split("\n") if log.exists() else []
    return next((line for line in reversed(lines) if line.strip()), "")


def environment_of(name: str, step: Step) -> dict[str, str]:
    environment = dict(os.environ)
    if name == "build":
        # The file that takes longest is done sooner if its kernels are split over the processors.
        environment |= {"INPLACE_ABN_FORCE_CUDA": "1", "INPLACE_ABN_NVCC_FLAGS": "--split-compile=0 -Xptxas=-v"}
        environment |= {"MAX_JOBS": str(os.cpu_count())}
    if name == "memcheck":
        # Without the caching allocator the memory of a tensor ends where the tensor ends.
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    if step.side_by_side and importlib.util.find_spec("xdist") is not None:
        workers = min(8, os.cpu_count() or 1)
        # All workers compute the expected results on the CPU at the same time, so they share its processors.
        environment |= {"PYTEST_ADDOPTS": f"-n {workers}", "OMP_NUM_THREADS": str((os.cpu_count() or 1) // workers)}
    return environment


def command_of(name: str, step: Step, logs: Path, out: Path, seconds: float) -> tuple[str, ...]:
    """The command of a step that runs for at most ``seconds``. A benchmark begins nothing in the last quarter of that
    time. It compiles and finishes there what it has begun."""
    limit = int(0.75 * seconds)
    command = tuple(word.format(build=logs / "build.log", out=out, limit=limit) for word in step.command)
    return (*command, f"--junitxml={logs / name}.xml") if "pytest" in command else command


def counts(report: Path) -> dict[str, int] | None:
    if not report.exists():
        return None
    suite = next(ElementTree.parse(report).iter("testsuite"))
    return {key: int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped")}


def described_gpu() -> str:
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError) as error:
        return f"unknown ({error})"


def write(out: Path, logs: Path, results: list[Result], gpu: str) -> str:
    """Writes all results so far to summary.json, summary.txt and logs.tar.gz. Returns the text of summary.txt."""
    # torch is imported here, because printing the plan does not need it.
    import torch

    summary: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "gpu_and_driver": gpu,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": sys.version.split()[0],
        "steps": [result._asdict() for result in results],
    }
    for result in results:
        found = counts(logs / f"{result.step}.xml")
        if found is not None:
            summary[f"tests of {result.step}"] = found
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    lines = [f"{key}: {value}" for key, value in summary.items() if key != "steps"]
    lines += [f"{r.step:10} {r.result:12} {r.seconds:4} s  {r.last_line}" for r in results]
    text = "\n".join(lines) + "\n"
    (out / "summary.txt").write_text(text)
    with tarfile.open(out / "logs.tar.gz", "w:gz") as archive:
        archive.add(logs, arcname="logs")
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("steps", nargs="*", metavar="STEP", help=f"of {' '.join(STEPS)}; all of them by default")
    parser.add_argument("--seconds", type=int, default=540, help="for all steps together")
    parser.add_argument("--out", type=Path, default=Path("build/gpu"))
    parser.add_argument(
        "--plan", action="store_true", help="print the calls of a check of half an hour, and run nothing"
    )
    args = parser.parse_args()
    if args.plan:
        print(PLAN, end="")
        return 0
    unknown = set(args.steps) - STEPS.keys()
    if unknown:
        parser.error(f"there is no step {', '.join(sorted(unknown))}: there are {', '.join(STEPS)}")
    started = time.monotonic()
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    results: list[Result] = []
    gpu = described_gpu()
    with tempfile.TemporaryDirectory() as folder:
        logs = Path(folder)
        no_sanitizer = None
        for name in args.steps or STEPS:
            step = STEPS[name]
            if step.command[0] == "compute-sanitizer" and no_sanitizer is None:
                no_sanitizer = why_no_sanitizer(logs)
            left = args.seconds - (time.monotonic() - started) - GRACE
            log = logs / f"{name}.log"
            if step.command[0] == "compute-sanitizer" and no_sanitizer:
                results.append(Result(name, "skipped", 0, no_sanitizer))
            elif left < 5:
                results.append(Result(name, "skipped", 0, "no time left"))
            else:
                seconds = min(step.seconds, left)
                command = command_of(name, step, logs, out, seconds)
                print(f"gpu_check: {name}: {shlex.join(command)}", flush=True)
                begun = time.monotonic()
                result = run(command, seconds, log, environment_of(name, step))
                results.append(Result(name, result, round(time.monotonic() - begun), last_line(log)))
                if result != "passed":
                    print(
                        f"--- {name}: the end of its log", *log.read_text(errors="replace").split("\n")[-40:], sep="\n"
                    )
            text = write(out, logs, results, gpu)
            if name == "build" and results[-1].result != "passed":
                break
    print(text, end="")
    return 0 if all(result.result in ("passed", "skipped") for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
