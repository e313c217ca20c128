# shellcheck shell=bash
# Sourced by the other scripts. Enters .venv, makes it if it is missing, and builds the package in it. PYTHON is the
# interpreter that makes .venv. TORCH is the torch to install if .venv has none.
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
if [ ! -d .venv ]; then
  "${PYTHON:-python3}" -m venv .venv
fi
# shellcheck source=/dev/null
source .venv/bin/activate
export PIP_DISABLE_PIP_VERSION_CHECK=1
python -c "import torch" 2>/dev/null || pip install --quiet "${TORCH:-torch==2.13.0}"
# A build takes minutes, so the package is built again only if one of its sources has changed.
if [ ! -e .venv/installed ] || ! ls inplace_abn/_kernels.so >/dev/null 2>&1 ||
  [ -n "$(find setup.py pyproject.toml include src -newer .venv/installed)" ]; then
  pip install --quiet "setuptools>=77" ninja numpy
  pip install --no-build-isolation --quiet --editable ".[demo,test,lint]"
  touch .venv/installed
fi
python -c "import inplace_abn, torch; print('inplace_abn', inplace_abn.__version__, 'on torch', torch.__version__)"
