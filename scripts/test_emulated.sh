#!/usr/bin/env bash
# Runs the CUDA kernels on the CPU: first all tests on the emulated device and a rehearsal of the check of a GPU. Then the
# ops and random calls with kernels that fuse products and sums, and random calls under the address sanitizer and the
# undefined-behaviour sanitizer. Arguments go to pytest, e.g. --fuzz 50 for fifty times as many random calls.
set -euo pipefail
source "$(dirname "$0")/venv.sh"
(cd tests && python -m emulation.build)
python -m pytest -n auto --dist worksteal -m emulated "$@" \
  tests/ops/test_{activations,dead_positions,ops,schemas}.py \
  tests/autograd/test_{functions,instance_norm,residual}.py tests/emulation tests/scripts/test_gpu_check.py
contracted=$(cd tests && python -m emulation.build contracted)
INPLACE_ABN_EMULATED=$contracted python -m pytest -n auto --dist worksteal -m emulated "$@" \
  tests/ops/test_{activations,ops}.py tests/emulation/test_fuzz.py
(cd tests && python -m emulation.sanitize)
