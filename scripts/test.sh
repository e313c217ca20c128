#!/usr/bin/env bash
# Runs lint and all tests but those on the emulated device (see test_emulated.sh) in .venv (see venv.sh). One process for
# each processor shares the tests.
#
#   scripts/test.sh [--quick] [PYTEST ARGUMENTS...]      e.g. -k guard, --cov for the coverage, -n 0 for one process
#
# With --quick it runs lint and what an edit breaks first, in less than two minutes once the package is built: the tests of
# ops, gradients and the guard, some of conversion, and those of names and of the order of modules. It leaves out what is
# slow, several ranks, and most of conversion and of what is compiled.
set -euo pipefail
tests=(-m "not emulated")
if [ "${1:-}" = --quick ]; then
  shift
  tests=(-m "not slow and not emulated" tests/ops tests/autograd tests/guard
    tests/conversion/test_{analyze,consumers,report,results,revert,verify}.py
    tests/scripts/test_{layers,public_names}.py)
fi
source "$(dirname "$0")/venv.sh"
say "ruff"
ruff format --check .
ruff check .
waiting "mypy" mypy
say "clang-format"
git ls-files '*.h' '*.cpp' '*.cu' '*.cuh' | xargs clang-format --dry-run -Werror
waiting "running the tests" python -m pytest -n auto --dist worksteal "${tests[@]}" "$@"
