# shellcheck shell=bash
# Sourced by the other scripts: enters .venv, made if there is none, with the package built in it. TORCH names the torch
# to install where .venv has none, PYTHON the interpreter to make it with.
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
if [ ! -d .venv ]; then
  "${PYTHON:-python3}" -m venv .venv
fi
# shellcheck source=/dev/null
source .venv/bin/activate
export PIP_DISABLE_PIP_VERSION_CHECK=1
python -c "import torch" 2>/dev/null || pip install --quiet "${TORCH:-torch==2.13.0}"
# Building takes minutes, so it is done again only where something that is built from has changed.
if [ ! -e .venv/installed ] || ! ls inplace_abn/_kernels.so >/dev/null 2>&1 ||
  [ -n "$(find setup.py pyproject.toml include src -newer .venv/installed)" ]; then
  pip install --quiet "setuptools>=77" ninja numpy
  pip install --no-build-isolation --quiet --editable ".[demo,test,lint]"
  touch .venv/installed
fi
python -c "import inplace_abn, torch; print('inplace_abn', inplace_abn.__version__, 'on torch', torch.__version__)"
