"""Checks the CUDA backend on a machine with a GPU, with that machine's Python and torch and without a network.

``scripts/gpu_check.sh`` runs this program. The most important steps come first, each with a time limit, and steps run
until time is up. After each step the folder ``--out`` has summary.txt, summary.json and results.tar.gz, which holds the
log and the tables of every step so far. The running step has running.log, and its tables in the folder running.

``--device emulated`` rehearses the same steps without a GPU, on a small part of the work.
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
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gpu_prebuilt import ROOT, SITE

PYTHON = sys.executable
PYTEST = (PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider")
OPS = (
    *(
        f"tests/ops/test_{name}.py"
        for name in (
            *("ops", "schemas", "activations", "dead_positions", "norms_of_rows", "cuda"),
            *("verbatim", "infinities", "shared_statistics"),
        )
    ),
    *(f"tests/autograd/test_{name}.py" for name in ("functions", "residual", "instance_norm")),
)
# Tests of few shapes of any alignment, with and without a residual, of saved channels and of rows.
CHECKED = (
    *("tests/ops/test_cuda.py", "tests/ops/test_verbatim.py", "tests/ops/test_norms_of_rows.py", "-k"),
    "(any_alignment and (float32 or bfloat16) and (leaky_relu or silu)) or (cuda and dx_is_torchs and bfloat16)"
    " or (cuda and xhat_is_saved and channels_last and some and silu)",
)
BENCH = (PYTHON, "scripts/bench.py", "--time-limit", "{limit}")
ON_GPU = ("--device", "cuda")
# Nets are trained on GPUs in this dtype and layout.
NETS = (*BENCH, *ON_GPU, "--groups", "--overhead", "0", "--settings", "bf16:channels_last")
RESNET, *OTHERS = PUBLIC = (
    "torchvision:resnet50",
    "timm:vit_small_patch16_224",
    "smp:Unet-resnet18",
    "diffusers:UNet2D",
)
# Fewer images take a GPU of this size less time than the host needs to start the kernels.
LARGE = ("--net-size", "224", "--net-batch", "256")
BOTH = ("--weights", "initialised", "trained")
SMALL = ("--malloc", "default", "--groups", "core", "--shapes", "2x8x6x6", "--settings", "fp32:contiguous")
TINY_NET = ("--malloc", "default", "--groups", "--overhead", "0", "--settings", "fp32:channels_last")
TINY_NET += ("--nets", "demo:relu", "--net-size", "32", "--net-batch", "2", "--steps", "2")
BUILD_EMULATOR = "import sys; sys.path.insert(0, 'tests'); from emulation import build; print(build.build())"
# Seconds that a tool has after an interrupt to write its report.
GRACE = 15

PLAN = """\
Calls of less than ten minutes each. build/prebuilt, which scripts/gpu_prebuilt.sh makes on a machine with nvcc, saves
the build; without it the first step of each call is a build of some minutes.

  OUT=... scripts/gpu_check.sh
  OUT=... scripts/gpu_check.sh prebuilt build compiled others
  OUT=... scripts/gpu_check.sh prebuilt build huge batches suite

The folders ops, nets, compiled, others and batches in results.tar.gz go to scripts/results/cuda-DATE.
"""


class Step(NamedTuple):
    command: tuple[str, ...]
    rehearsal: tuple[str, ...]
    """The same on the emulated device or the CPU, with less work. Empty: there is nothing to rehearse."""
    seconds: int
    """The time limit of the step."""
    reserved: int = 0
    """Seconds that steps before this one leave to it."""
    side_by_side: bool = False
    """Whether the step is a pytest whose tests may share the device."""


def checker(tool: str) -> Step:
    command = (PYTHON, "scripts/gpu_sanitizer.py", tool)
    tests = ("tests/emulation/test_fuzz.py", "-k", "test_random_calls_on_rows_agree_with_the_cpu and 0")
    return Step((*command, *CHECKED), (*command, "--device", "emulated", *tests), 60, reserved=30)


def script(name: str, seconds: int, *options: str) -> Step:
    command = (PYTHON, f"scripts/gpu_{name}.py", *options)
    return Step((*command, *ON_GPU), (*command, "--device", "emulated"), seconds)


STEPS = {
    "prebuilt": Step((PYTHON, "scripts/gpu_prebuilt.py"), (), 60),
    "build": Step((PYTHON, "setup.py", "build_ext", "--inplace"), (PYTHON, "-c", BUILD_EMULATOR), 270),
    "smoke": script("smoke", 60),
    "waits": Step(
        (*PYTEST, "-k", "cuda and host", "tests/guard/test_host_waits.py"),
        (*PYTEST, "-k", "cpu and host", "tests/guard/test_host_waits.py"),
        40,
        side_by_side=True,
    ),
    "profile": script("profile", 60, "--out", "{tables}"),
    "nets": Step(
        (*NETS, "--nets", *PUBLIC, *LARGE, *BOTH, "--eager-nets", "--batch-memory", "16", "--out", "{tables}"),
        (*BENCH, *TINY_NET, *BOTH, "--eager-nets", "--out", "{tables}"),
        100,
    ),
    "ops": Step(
        (*PYTEST, "-k", "cuda", "-m", "not slow and not huge", *OPS),
        (*PYTEST, "-m", "emulated", "tests/ops/test_infinities.py"),
        90,
        side_by_side=True,
    ),
    "bench": Step(
        (*BENCH, *ON_GPU, "--groups", "core", "--overhead", "3", "--seconds", "0.3", "--out", "{tables}"),
        (*BENCH, *SMALL, "--seconds", "0", "--overhead", "0", "--out", "{tables}"),
        60,
    ),
    **{tool: checker(tool) for tool in ("memcheck", "racecheck", "synccheck")},
    "compiled": Step(
        (*NETS, "--nets", RESNET, *LARGE, "--out", "{tables}"),
        (*BENCH, *TINY_NET, "--eager-nets", "--out", "{tables}"),
        150,
    ),
    "others": Step((*NETS, "--nets", *OTHERS, *LARGE, "--out", "{tables}"), (), 510),
    "huge": Step((*PYTEST, "-k", "cuda", "-m", "huge", "tests"), (), 180),
    "batches": Step(
        (*NETS, "--nets", RESNET, "--net-size", "224", "--net-batch", "64", "128", "--out", "{tables}"),
        (),
        510,
    ),
    "suite": Step((*PYTEST, "-k", "cuda", "-m", "not huge", "tests"), (), 500, side_by_side=True),
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


def last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").split("\n") if log.exists() else []
    return next((line for line in reversed(lines) if line.strip()), "")


def environment_of(name: str, step: Step) -> dict[str, str]:
    environment = dict(os.environ)
    if name == "build":
        # The file that takes longest is done sooner if its kernels are split over the processors.
        environment |= {"INPLACE_ABN_FORCE_CUDA": "1", "INPLACE_ABN_NVCC_FLAGS": "--split-compile=0 -Xptxas=-v"}
        environment |= {"MAX_JOBS": str(os.cpu_count())}
    # The package is not installed there.
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), environment.get("PYTHONPATH"), str(SITE)]))
    if step.side_by_side and importlib.util.find_spec("xdist") is not None:
        workers = min(8, os.cpu_count() or 1)
        # All workers compute the expected results on the CPU at the same time, so they share its processors.
        environment |= {"PYTEST_ADDOPTS": f"-n {workers}", "OMP_NUM_THREADS": str((os.cpu_count() or 1) // workers)}
    return environment


def command_of(name: str, command: tuple[str, ...], logs: Path, tables: Path, seconds: float) -> tuple[str, ...]:
    """The command of a step that runs for at most ``seconds``, and writes what it measures to the folder ``tables``. A
    benchmark begins nothing in the last quarter of that time. It compiles and finishes there what it has begun."""
    limit = int(0.75 * seconds)
    words = tuple(word.format(tables=tables, limit=limit) for word in command)
    return (*words, f"--junitxml={logs / name}.xml") if "pytest" in words else words


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
    """Writes all results so far to summary.json, summary.txt and results.tar.gz. Returns the text of summary.txt."""
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
    with tarfile.open(out / "results.tar.gz.part", "w:gz") as archive:
        archive.add(logs, arcname="results")
    # A run that is killed while it writes leaves the archive of the step before.
    (out / "results.tar.gz.part").rename(out / "results.tar.gz")
    return text


class Check:
    """Runs steps until time is up."""

    def __init__(self, device: str, seconds: float, out: Path, logs: Path) -> None:
        self.rehearses, self.out, self.logs = device == "emulated", out, logs
        self.ends = time.monotonic() + seconds
        self.results: list[Result] = []

    def seconds_for(self, step: Step, later: Sequence[Step]) -> float:
        """The time limit of a step, which leaves to later ones what is reserved for them."""
        left = self.ends - time.monotonic() - GRACE
        return min(step.seconds, left - sum(other.reserved for other in later))

    def outcome(self, name: str) -> str:
        return next((result.result for result in self.results if result.step == name), "")

    def run(self, name: str, later: Sequence[Step]) -> Result:
        step = STEPS[name]
        command = step.rehearsal if self.rehearses else step.command
        seconds = self.seconds_for(step, later)
        if not command:
            return Result(name, "skipped", 0, "there is nothing to rehearse")
        if name == "build" and self.outcome("prebuilt") == "passed":
            return Result(name, "skipped", 0, "what was built before is used")
        if seconds < 5:
            return Result(name, "skipped", 0, "no time left")
        tables = self.out / "running"
        words = command_of(name, command, self.logs, tables, seconds)
        print(f"gpu_check: {name}: {shlex.join(words)}", flush=True)
        begun, log = time.monotonic(), self.out / "running.log"
        result = run(words, seconds, log, environment_of(name, step))
        taken = round(time.monotonic() - begun)
        text = log.read_text(errors="replace")
        if result != "passed":
            print(f"--- {name}: the end of its log", *text.split("\n")[-40:], sep="\n", flush=True)
            # A build makes up for it.
            result = "not used" if name == "prebuilt" else result
        shutil.move(log, self.logs / f"{name}.log")
        if tables.exists():
            shutil.move(tables, self.logs / name)
        return Result(name, result, taken, last_line(self.logs / f"{name}.log"))

    def run_all(self, names: Sequence[str], gpu: str) -> str:
        """Returns the text of the summary."""
        text = ""
        for i, name in enumerate(names):
            self.results.append(self.run(name, [STEPS[later] for later in names[i + 1 :]]))
            text = write(self.out, self.logs, self.results, gpu)
            if name == "build" and self.results[-1].result not in ("passed", "skipped"):
                break
        return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("steps", nargs="*", metavar="STEP", help=f"of {' '.join(STEPS)}; all of them by default")
    parser.add_argument("--device", choices=["cuda", "emulated"], default="cuda")
    parser.add_argument("--seconds", type=int, default=585, help="for all steps together")
    parser.add_argument("--out", type=Path, default=Path("build/gpu"))
    parser.add_argument("--plan", action="store_true", help="print the calls of a full check, and run nothing")
    args = parser.parse_args()
    if args.plan:
        print(PLAN, end="")
        return 0
    unknown = set(args.steps) - STEPS.keys()
    if unknown:
        parser.error(f"there is no step {', '.join(sorted(unknown))}: there are {', '.join(STEPS)}")
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as logs:
        check = Check(args.device, args.seconds, out, Path(logs))
        text = check.run_all(args.steps or list(STEPS), described_gpu())
    print(text, end="")
    return 0 if all(result.result in ("passed", "skipped", "not used") for result in check.results) else 1


if __name__ == "__main__":
    sys.exit(main())
