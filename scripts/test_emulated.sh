#!/usr/bin/env bash
# Runs the CUDA kernels on the CPU: first all tests on the emulated device and a rehearsal of the check of a GPU. Then the
# ops and random calls with kernels that fuse products and sums, and random calls under the address sanitizer and the
# undefined-behaviour sanitizer. Arguments go to pytest, e.g. --fuzz 50 for fifty times as many random calls.
set -euo pipefail
source "$(dirname "$0")/venv.sh"
emulation() {
  (cd tests && python -m "emulation.$1" "${@:2}")
}
waiting "compiling the emulated device" emulation build
waiting "running the tests" python -m pytest -n auto --dist worksteal -m emulated "$@" \
  tests/ops/test_{activations,dead_positions,ops,schemas}.py \
  tests/autograd/test_{functions,instance_norm,residual}.py tests/emulation tests/scripts/test_gpu_check.py
waiting "compiling the emulated device with fused products and sums" emulation build contracted
contracted=$(emulation build contracted)
INPLACE_ABN_EMULATED=$contracted waiting "running the tests with fused products and sums" python -m pytest -n auto --dist worksteal -m emulated "$@" \
  tests/ops/test_{activations,ops}.py tests/emulation/test_fuzz.py
waiting "running random calls under the sanitizers" emulation sanitize
