#!/usr/bin/env bash
# Installs one wheel on several releases of torch and Python, runs the suite on each, and prints the table of
# docs/install.md. No compiler is on the path, and the source tree is not imported. Fails if a test fails, or if none of
# the releases could be used.
#
#   scripts/test_wheel.sh [WHEEL [PYTEST ARGUMENTS...]]      WHEEL is the newest one in dist/ unless given, or empty
#   scripts/test_wheel.sh --torch-only                       makes the virtual environments, and tests nothing
#
#   ON          the releases to run on, by default "2.11.0:3.10 2.12.1:3.12 2.13.0:3.11 2.14.1:3.12 2.15.0:3.13". Each
#               entry is a release of torch, or "newest", and after a colon a release of Python. An entry may also be
#               the path of an interpreter that has torch. The default release of Python is the latest one on this
#               machine that is not python3's. An entry is left out if the machine does not have its Python.
#   TORCH_ENVS  the folder of the virtual environments that hold torch alone, each named after its release. Missing ones
#               are made (5 GB each). By default build/torch
#   WORKERS     the number of processes that share the tests; by default the number of processors
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/progress.sh
export PIP_DISABLE_PIP_VERSION_CHECK=1
# The wheel must work without the variables that a build needs and without those that a user has set.
unset CC CXX CUDA_HOME PYTHONPATH INPLACE_ABN_NODE

on=${ON:-2.11.0:3.10 2.12.1:3.12 2.13.0:3.11 2.14.1:3.12 2.15.0:3.13}
envs=${TORCH_ENVS:-build/torch}
workers=${WORKERS:-$(nproc)}
# Prints the interpreter of a release of Python, from the path or from pyenv's folder.
find_python() {
  local candidate
  for candidate in "python$1" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$1".*/bin/python; do
    if "$candidate" -c "import sys; assert '%d.%d' % sys.version_info[:2] == '$1'" 2>/dev/null; then
      "$candidate" -c "import sys; print(sys.executable)"
      return
    fi
  done
  return 1
}

latest_python() {
  local own release
  own=$(python3 -c "import sys; print('%d.%d' % sys.version_info[:2])")
  for release in 3.13 3.12 3.11 3.10; do
    if [ "$release" != "$own" ] && find_python "$release" >/dev/null; then
      echo "$release"
      return
    fi
  done
  echo "$own"
}

# Prints the interpreter that an entry of ON names. Makes its virtual environment if that is missing.
with_torch() {
  local torch=${1%%:*} release=${1#*:} python
  if [ -x "$1" ]; then
    realpath --no-symlinks "$1"
    return
  fi
  [ "$torch" = "$1" ] && release=$(latest_python)
  python=$(find_python "$release") || { echo "test_wheel: there is no Python $release here: $1 is left out" >&2; return 1; }
  if [ ! -x "$envs/$torch/bin/python" ]; then
    "$python" -m venv "$envs/$torch"
    local wanted=torch==$torch
    [ "$torch" = newest ] && wanted=torch
    waiting "installing torch ($torch) for Python $release, up to 5.4 GB with CUDA" \
      "$envs/$torch/bin/pip" install --quiet "$wanted" >&2 || return 1
  fi
  realpath --no-symlinks "$envs/$torch/bin/python"
}

if [ "${1:-}" = --torch-only ]; then
  for each in $on; do
    with_torch "$each" >/dev/null || [ ! -x "$envs/${each%%:*}/bin/python" ]
  done
  exit
fi

wheel=${1:-}
[ $# -eq 0 ] || shift
[ -n "$wheel" ] || wheel=$(find dist -name '*.whl' -printf '%T@ %p\n' | sort -n | tail -n 1 | cut -d' ' -f2-)
if [ ! -f "$wheel" ]; then
  echo "test_wheel: there is no wheel${wheel:+ $wheel}: scripts/build_wheel.sh --all-torches makes one"
  exit 1
fi
wheel=$(realpath "$wheel")
echo "test_wheel: $wheel"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p build
logs=$PWD/build/test-wheel
rm -rf "$logs"
mkdir -p "$logs"

status=0
rows=()
number=0
for each in $on; do
  base=$(with_torch "$each") || continue
  number=$((number + 1))
  env=$work/env$number
  # The environment that has torch stays unchanged. The wheel goes into a new environment of the same Python, which
  # finds the packages of the first one through torch.pth.
  "$("$base" -c "import os, sys; print(os.path.realpath(sys.executable))")" -m venv "$env"
  "$base" -c "import sysconfig; print(sysconfig.get_path('purelib'))" \
    >"$("$env/bin/python" -c "import sysconfig; print(sysconfig.get_path('purelib'))")/torch.pth"
  torch=$("$base" -c "import torch; print(torch.__version__)" 2>/dev/null)
  python=$("$base" -c "import platform; print(platform.python_version())")
  "$base" -c "import importlib.metadata as m; print('torch==' + m.version('torch'))" >"$work/constraints"
  "$env/bin/pip" install -qq --no-index --no-deps --force-reinstall "$wheel"
  waiting "installing what the tests need for torch $torch, 0.2 GB" \
    "$env/bin/pip" install -qq --constraint "$work/constraints" "${wheel}[demo,test]"

  tree=$work/tree$number
  mkdir "$tree"
  cp -r tests scripts pyproject.toml "$tree"
  started=$SECONDS
  options=(-q -p no:cacheprovider "--junitxml=$logs/$number.xml")
  [ "$workers" -gt 1 ] && options+=(-n "$workers" --dist worksteal)
  run_tests() (
    exec >"$logs/$number.log" 2>&1
    # With active waiting, idle threads of one process would take processor time from the other processes.
    export OMP_WAIT_POLICY=passive
    cd "$tree"
    export PATH=$env/bin
    for compiler in cc c++ gcc g++ clang clang++ nvcc; do
      if type "$compiler" >/dev/null 2>&1; then
        echo "test_wheel: $compiler is on the path"
        exit 1
      fi
    done
    "$env/bin/python" -c "
import sys, inplace_abn
from pathlib import Path
import torch
folder = Path(inplace_abn.__file__).parent
assert str(folder).startswith(sys.prefix), folder
release = '_'.join(torch.__version__.split('.')[:2])
assert (inplace_abn.autograd.nodes.cpp is not None) == (folder / f'_node_{release}.so').exists()
print('test_wheel: nodes are made in', 'Python' if inplace_abn.autograd.nodes.cpp is None else 'C++')" || exit 1
    exec "$env/bin/python" -m pytest "${options[@]}" "$@"
  )
  waiting "running the tests on torch $torch and Python $python" run_tests "$@" ||
    { status=1; grep -E '^(FAILED|ERROR)|Error' "$logs/$number.log" || tail -n 20 "$logs/$number.log"; }
  grep '^test_wheel: nodes' "$logs/$number.log" || true
  row=$("$base" - "$logs/$number.xml" "$torch" "$python" $((SECONDS - started)) <<'PYTHON'
import sys
import xml.etree.ElementTree as ElementTree

path, torch, python, seconds = sys.argv[1:]
suite = next(ElementTree.parse(path).iter("testsuite"))
tests, failed, errors, skipped = (int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped"))
minutes = f"{int(seconds) // 60} min {int(seconds) % 60:02} s"
print(f"| {torch} | {python} | {tests - failed - errors - skipped} | {failed + errors} | {skipped} | {minutes} |")
PYTHON
  ) || row="| $torch | $python | did not run | | | |"
  rows+=("$row")
  echo "test_wheel: $row"
done

echo "test_wheel: the logs are in build/test-wheel"
echo "| torch | Python | passed | failed | skipped | time |"
echo "| --- | --- | --- | --- | --- | --- |"
printf '%s\n' "${rows[@]}"
[ ${#rows[@]} -gt 0 ] && exit "$status"
