#!/usr/bin/env bash
# Compiles the CUDA backend, on a machine with or without a GPU, and checks what the compiler made of it; then runs the
# tests with that build. Works in a virtual environment and in a copy of the source tree of its own, so that a build
# in place stays as it is. With --optional, a machine without nvcc is no failure.
#
#   CUDA_HOME             the toolkit; by default that of the nvcc on the path
#   CUDA_VENV             the virtual environment, made if there is none; by default build/cuda-venv
#   CUDA_TREE             the copy of the source tree; by default build/cuda-tree
#   TORCH_CUDA_ARCH_LIST  by default 9.0+PTX
#   MAX_JOBS              by default the number of processors
set -euo pipefail
cd "$(dirname "$0")/.."

nvcc="${CUDA_HOME:+$CUDA_HOME/bin/}nvcc"
if ! command -v "$nvcc" >/dev/null; then
  echo "build_cuda: there is no nvcc (install the CUDA toolkit or set CUDA_HOME): the CUDA backend was not compiled"
  [ "${1:-}" = --optional ]
  exit
fi
# The nvcc on the path may be a wrapper or a link; it knows where it is at home.
home=$("$nvcc" --dryrun -x cu /dev/null 2>&1 | sed -n 's/^#\$ TOP=//p')
CUDA_HOME=$(cd "$home" && pwd -P)
export CUDA_HOME
"$CUDA_HOME/bin/nvcc" --version | tail -n 2

venv=${CUDA_VENV:-build/cuda-venv}
if [ ! -d "$venv" ]; then
  "${PYTHON:-python3}" -m venv "$venv"
fi
source "$venv/bin/activate"
export PIP_DISABLE_PIP_VERSION_CHECK=1
python -c "import torch; assert torch.version.cuda" 2>/dev/null || pip install --quiet torch==2.11.0
pip install --quiet "setuptools>=77,<82" wheel ninja pybind11 pytest hypothesis numpy expecttest
python=python
source scripts/cuda_headers.sh

tree=${CUDA_TREE:-build/cuda-tree}
mkdir -p "$tree"
(cd "$tree" && rm -rf src include inplace_abn tests scripts)
tar --create --exclude=./build --exclude=./.git --exclude='./.venv*' --exclude=./runs --exclude='*.so' . |
  tar --extract --directory="$tree"
cd "$tree"
export TORCH_CUDA_ARCH_LIST="${TORCH_CUDA_ARCH_LIST:-9.0+PTX}" MAX_JOBS="${MAX_JOBS:-$(nproc)}"
INPLACE_ABN_FORCE_CUDA=1 INPLACE_ABN_NVCC_FLAGS="-Xptxas=-v" python setup.py build_ext --inplace --force \
  >build.log 2>&1 || { grep -E -A 4 'error|Error' build.log || tail -n 40 build.log; exit 1; }
echo "build_cuda: compiled for $TORCH_CUDA_ARCH_LIST in $SECONDS s; the log is $tree/build.log"
python scripts/check_sass.py build.log inplace_abn/_kernels.so

python scripts/check_symbols.py inplace_abn/_kernels.so
python -c "import torch; from inplace_abn import ops; assert ops.with_cuda; print('build_cuda: torch', torch.__version__)"
python -m pytest --quiet --exitfirst tests -m "not slow"
echo "build_cuda: done in $SECONDS s"
