#!/usr/bin/env bash
# Checks the CUDA backend on a machine with a GPU. Uses that machine's Python and torch, and no network. In less than
# ten minutes it builds in place, reads the machine code, runs the tests on the device, runs the memory, race and
# barrier checkers, and benchmarks, in this order. gpu_check.py defines the steps. Arguments are names of steps, or
# --plan.
#
#   OUT     the folder of summary.json, summary.txt, logs.tar.gz and the results of the benchmarks; by default build/gpu
#   PYTHON  an interpreter that has torch with CUDA, setuptools, ninja, numpy, pytest, hypothesis and matplotlib, and
#           pytest-xdist if tests are to run side by side; by default python3
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
source scripts/cuda_headers.sh
exec "$python" scripts/gpu_check.py --out "${OUT:-build/gpu}" "$@"
