#!/usr/bin/env bash
# Checks the CUDA backend on a machine with a GPU, with that machine's Python and torch and without a network: builds in
# place, runs the tests on the device, the memory and race checkers over a few of them, and a short benchmark. Takes
# less than 9 minutes. Writes summary.json, summary.txt, logs.tar.gz, bench.json and bench.png.
#
#   OUT     where to; by default build/gpu
#   PYTHON  by default python3; it has torch with CUDA, setuptools, ninja, numpy, pytest, hypothesis, matplotlib, and
#           pytest-xdist if tests are to run side by side
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
out=${OUT:-build/gpu}
python=${PYTHON:-python3}
mkdir -p "$out"
out=$(cd "$out" && pwd)
logs=$(mktemp -d)
limit=525 # seconds for all steps together
steps=()

# step NAME SECONDS COMMAND...: runs the command in at most that time, and in what is left of the limit.
step() {
  local name=$1 seconds=$2 start=$SECONDS status
  shift 2
  [ "$seconds" -gt $((limit - SECONDS)) ] && seconds=$((limit - SECONDS))
  if [ "$seconds" -lt 5 ]; then
    skip "$name" "no time left"
    return 1
  fi
  timeout --kill-after=5 "$seconds" "$@" >"$logs/$name.log" 2>&1
  status=$?
  steps+=("$name" "$status" $((SECONDS - start)) "$(tail -n 1 "$logs/$name.log")")
  [ "$status" = 0 ] || { echo "--- $name: the end of its log" && tail -n 40 "$logs/$name.log"; }
  return $status
}

skip() { steps+=("$1" skipped 0 "$2"); }

source scripts/cuda_headers.sh

# The machine code for the GPU that is there; splitting a file's kernels over the processors shortens the longest one.
build() {
  INPLACE_ABN_FORCE_CUDA=1 INPLACE_ABN_NVCC_FLAGS="--split-compile=0" MAX_JOBS=$(nproc) \
    "$python" setup.py build_ext --inplace && "$python" -c \
    "import torch; from inplace_abn import ops; assert ops.with_cuda and torch.cuda.is_available()"
}
export -f build
export python

test_options=(-q -p no:cacheprovider)
if "$python" -c "import xdist" 2>/dev/null; then
  workers=$(($(nproc) < 8 ? $(nproc) : 8))
  test_options+=(-n "$workers")
  # What the tests compare with is computed on the CPU, by all of them at once.
  export OMP_NUM_THREADS=$(($(nproc) / workers))
fi

if step build 200 bash -c build; then
  step tests 240 "$python" -m pytest "${test_options[@]}" --junitxml="$logs/tests.xml" -k cuda tests
  unset OMP_NUM_THREADS
  step bench 120 "$python" scripts/bench.py --device cuda --quick --time-limit 80 --out "$out"
  if ! command -v compute-sanitizer >/dev/null; then
    skip memcheck "there is no compute-sanitizer"
    skip racecheck "there is no compute-sanitizer"
  elif ! timeout 60 compute-sanitizer "$python" -c "import torch; torch.zeros(1, device='cuda')" >"$logs/sanitizer.log" 2>&1; then
    skip memcheck "compute-sanitizer does not work here: $(tail -n 1 "$logs/sanitizer.log")"
    skip racecheck "compute-sanitizer does not work here"
  else
    options=(--error-exitcode 1 --kernel-name kns=inplace_abn)
    checked=("$python" -m pytest -q -p no:cacheprovider tests/test_cuda.py
      -k "test_small_tensors_of_any_alignment and leaky_relu")
    # Without the caching allocator, so that a tensor's end is the end of its memory. Calls that fail without harm, as
    # torch's own do when it looks for what the driver has, are no errors.
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 step memcheck 75 \
      compute-sanitizer --tool memcheck --report-api-errors no "${options[@]}" "${checked[@]}"
    step racecheck 75 compute-sanitizer --tool racecheck "${options[@]}" "${checked[@]}"
  fi
fi

tar --create --gzip --file="$out/logs.tar.gz" --directory="$logs" .
"$python" - "$out" "$logs" "${steps[@]}" <<'PYTHON'
import datetime, json, subprocess, sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import torch

out, logs, fields = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
names = ("step", "result", "seconds", "last_line")
steps = [dict(zip(names, fields[i : i + 4])) for i in range(0, len(fields), 4)]
for step in steps:
    code = step["result"]
    step["seconds"] = int(step["seconds"])
    step["result"] = {"0": "passed", "124": "timed out", "137": "timed out", "skipped": "skipped"}.get(code, f"failed ({code})")
query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
try:
    gpu = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
except (OSError, subprocess.CalledProcessError) as error:
    gpu = f"unknown ({error})"
summary = {
    "date": datetime.date.today().isoformat(),
    "gpu_and_driver": gpu,
    "torch": torch.__version__,
    "cuda": torch.version.cuda,
    "python": sys.version.split()[0],
    "steps": steps,
}
report = logs / "tests.xml"
if report.exists():
    suite = next(ElementTree.parse(report).iter("testsuite"))
    summary["tests"] = {key: int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped")}
(out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
lines = [f"{key}: {value}" for key, value in summary.items() if key != "steps"]
lines += [f"{s['step']:10} {s['result']:12} {s['seconds']:4} s  {s['last_line']}" for s in steps]
(out / "summary.txt").write_text("\n".join(lines) + "\n")
print("\n".join(lines))
built = bool(steps) and steps[0]["result"] == "passed"
sys.exit(0 if built and all(s["result"] in ("passed", "skipped") for s in steps) else 1)
PYTHON
