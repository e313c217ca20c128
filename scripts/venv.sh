# shellcheck shell=bash
# Sourced by the other scripts. Enters .venv (see torch_venv.sh), and builds the package in it.
source "$(dirname "${BASH_SOURCE[0]}")/torch_venv.sh"
# A build takes minutes, so the package is built again only if one of its sources has changed.
if [ ! -e .venv/installed ] || ! ls inplace_abn/_kernels.so >/dev/null 2>&1 ||
  [ -n "$(find build_backend.py setup.py pyproject.toml include src -newer .venv/installed)" ]; then
  waiting "compiling the package, which takes some minutes" build build/build.log python -u setup.py build_ext --inplace
  waiting "installing what the demo and the tests and lint need, 0.2 GB" \
    pip install --no-build-isolation --quiet --editable ".[demo,test,lint]"
  touch .venv/installed
fi
python -c "import inplace_abn, torch; print('inplace_abn', inplace_abn.__version__, 'on torch', torch.__version__)"
