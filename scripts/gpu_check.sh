#!/usr/bin/env bash
# Checks the CUDA backend on a machine with a GPU, with that machine's Python and torch and without a network: builds in
# place, reads the machine code, runs the tests on the device, the memory, race and barrier checkers, and benchmarks, in
# this order, in less than ten minutes. gpu_check.py has the steps; arguments are names of steps, or --plan.
#
#   OUT     where summary.json, summary.txt, logs.tar.gz and the results of the benchmarks go; by default build/gpu
#   PYTHON  by default python3; it has torch with CUDA, setuptools, ninja, numpy, pytest, hypothesis, matplotlib, and
#           pytest-xdist if tests are to run side by side
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
source scripts/cuda_headers.sh
exec "$python" scripts/gpu_check.py --out "${OUT:-build/gpu}" "$@"
