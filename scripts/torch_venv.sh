# shellcheck shell=bash
# Sourced by the other scripts. Enters .venv, makes it if it is missing, and installs torch and what builds need in it.
#
#   PYTHON  the interpreter that makes .venv; by default python3
#   TORCH   the torch to install if .venv has none; by default torch==2.13.0
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
source scripts/progress.sh
if [ ! -d .venv ]; then
  say "making .venv"
  "${PYTHON:-python3}" -m venv .venv
fi
# shellcheck source=/dev/null
source .venv/bin/activate
export PIP_DISABLE_PIP_VERSION_CHECK=1
if ! python -c "import torch" 2>/dev/null; then
  waiting "installing ${TORCH:-torch==2.13.0}, which is 0.2 GB for the CPU and up to 5.4 GB with CUDA" \
    pip install --quiet "${TORCH:-torch==2.13.0}"
fi
if ! python -c "import build_backend, numpy" 2>/dev/null; then
  waiting "installing what a build needs, 25 MB" pip install --quiet "setuptools>=77" ninja numpy
fi
