#!/usr/bin/env bash
# Builds the wheel with the CUDA kernels and checks their machine code. Then installs the wheel and tests that it loads,
# its ops, their errors and the partition. The machine needs nvcc but no GPU. The CPU kernels are those of the wheel
# without CUDA, on which test_wheel.sh runs the suite, so this script does not run it again. With --optional, the script
# succeeds on a machine without nvcc. The environment variables are those of build_wheel.sh.
#
#   scripts/build_cuda.sh [--optional] [OUTDIR]      OUTDIR is build/cuda-wheel unless given
#
#   TORCH_CUDA_ARCH_LIST  by default 9.0+PTX
set -euo pipefail
cd "$(dirname "$0")/.."

if [ "${1:-}" = --optional ]; then
  shift
  if ! command -v "${CUDA_HOME:+$CUDA_HOME/bin/}nvcc" >/dev/null; then
    echo "build_cuda: there is no nvcc (install the CUDA toolkit or set CUDA_HOME): the CUDA backend was not compiled"
    exit 0
  fi
fi
source scripts/cuda_venv.sh

out=${1:-build/cuda-wheel}
rm -f "$out"/*-1cu*.whl
# ptxas reports the registers of a kernel only when it compiles it, so everything is compiled again.
rm -rf build/cuda/_kernels/src/kernels/cuda
PYTHON=python TORCH_CUDA_ARCH_LIST="${TORCH_CUDA_ARCH_LIST:-9.0+PTX}" INPLACE_ABN_NVCC_FLAGS="-Xptxas=-v" \
  scripts/build_wheel.sh --cuda "$out"
waiting "installing the wheel" pip install --quiet --quiet --no-index --no-deps --force-reinstall "$out"/*-1cu*.whl
# Lines that begin with "warning: " come from setuptools. They are dropped.
grep -v '^warning: ' build/wheel.log >build/nvcc.log
python scripts/check_sass.py build/nvcc.log "$(python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/inplace_abn/_kernels.so"

tree=$(mktemp -d)
trap 'rm -rf "$tree"' EXIT
cp -r tests scripts pyproject.toml include src "$tree"
cd "$tree"
python -c "import torch; from inplace_abn.kernels import ops; assert ops.with_cuda; print('build_cuda: torch', torch.__version__)"
waiting "running the tests" python -m pytest --quiet --exitfirst -p no:cacheprovider -n auto \
  tests/ops/test_{ops,schemas,errors,cuda,partition}.py -m "not slow and not emulated"
echo "build_cuda: done in $SECONDS s"
