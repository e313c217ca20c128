#!/usr/bin/env bash
# Checks the CUDA backend on a machine with a GPU, in less than ten minutes. Uses that machine's Python and torch, and no
# network. It uses what gpu_prebuilt.sh has compiled, or else builds in place. Then it tries every op, times every kernel,
# runs the tests of the ops, benchmarks, runs the memory, race and barrier checkers, and whatever else there is time for.
# gpu_check.py defines the steps. Arguments are names of steps, --plan, or --device emulated for a rehearsal without GPU.
#
#   OUT     the folder of summary.txt, summary.json and results.tar.gz; by default build/gpu
#   PYTHON  an interpreter that has torch with CUDA, setuptools, ninja, numpy, pytest, hypothesis and matplotlib, and
#           pytest-xdist if tests are to run side by side; by default python3
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
source scripts/cuda_headers.sh
exec "$python" scripts/gpu_check.py --out "${OUT:-build/gpu}" "$@"
