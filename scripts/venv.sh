# shellcheck shell=bash
# Sourced by the other scripts. Enters .venv (see torch_venv.sh), and builds the package in it.
source "$(dirname "${BASH_SOURCE[0]}")/torch_venv.sh"
# A build takes minutes, so the package is built again only if one of its sources has changed.
if [ ! -e .venv/installed ] || ! ls inplace_abn/_kernels.so >/dev/null 2>&1 ||
  [ -n "$(find build_backend.py setup.py pyproject.toml include src -newer .venv/installed)" ]; then
  # pip waits for the network most of the time, so it runs while the compiler does. Most of what it installs is never
  # imported, so it compiles none of it.
  mapfile -t packages < <(python scripts/extras.py demo test lint)
  say "installing what the demo, the tests and lint need, 0.2 GB, meanwhile"
  pip install --quiet --no-compile "${packages[@]}" &
  installing=$!
  waiting "compiling the package, which takes some minutes" build build/build.log python -u setup.py build_ext --inplace
  waiting "waiting for what is installed meanwhile" wait "$installing"
  waiting "installing the package" pip install --no-build-isolation --no-deps --quiet --editable .
  touch .venv/installed
fi
python -c "import inplace_abn, torch; print('inplace_abn', inplace_abn.__version__, 'on torch', torch.__version__)"
