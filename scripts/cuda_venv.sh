# shellcheck shell=bash
# Sourced by the other scripts. Finds the CUDA toolkit, sets CUDA_HOME, and enters a virtual environment that has a
# torch with CUDA. Makes the virtual environment if it is missing.
#
#   CUDA_HOME  the toolkit; by default that of the nvcc on the path
#   CUDA_VENV  the virtual environment; by default build/cuda-venv
source scripts/progress.sh
nvcc="${CUDA_HOME:+$CUDA_HOME/bin/}nvcc"
if ! command -v "$nvcc" >/dev/null; then
  echo "cuda_venv: there is no nvcc (install the CUDA toolkit or set CUDA_HOME): nothing is compiled for CUDA"
  exit 1
fi
# The nvcc on the path may be a wrapper or a link. Its dry run names the folder of the toolkit.
home=$("$nvcc" --dryrun -x cu /dev/null 2>&1 | sed -n 's/^#\$ TOP=//p')
CUDA_HOME=$(cd "$home" && pwd -P)
export CUDA_HOME
"$CUDA_HOME/bin/nvcc" --version | tail -n 2

venv=${CUDA_VENV:-build/cuda-venv}
if [ ! -d "$venv" ]; then
  say "making $venv"
  "${PYTHON:-python3}" -m venv "$venv"
fi
# shellcheck source=/dev/null
source "$venv/bin/activate"
toolkit=$("$CUDA_HOME/bin/nvcc" --version | sed -n 's/.*release \([0-9]*\)\..*/\1/p')
# Torch's CUDA and the toolkit must have the same major release. The minor release does not matter.
python -c "import torch; assert (torch.version.cuda or '').split('.')[0] == '$toolkit'" 2>/dev/null ||
  waiting "installing torch==2.11.0, up to 5.4 GB" pip install --quiet torch==2.11.0
waiting "installing what the build and the tests need, 40 MB" pip install --quiet "setuptools>=77,<82" ninja pytest pytest-xdist hypothesis \
  numpy expecttest
python=python
source scripts/cuda_headers.sh
