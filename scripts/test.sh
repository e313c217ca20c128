#!/usr/bin/env bash
# Runs lint and all tests but those on the emulated device (see test_emulated.sh) in .venv (see venv.sh). One process for
# each processor shares the tests.
#
#   scripts/test.sh [PYTEST ARGUMENTS...]      e.g. -k guard, --cov for the coverage, -n 0 for one process
set -euo pipefail
source "$(dirname "$0")/venv.sh"
say "ruff"
ruff format --check .
ruff check .
waiting "mypy" mypy
say "clang-format"
git ls-files '*.h' '*.cpp' '*.cu' '*.cuh' | xargs clang-format --dry-run -Werror
waiting "running the tests" python -m pytest -n auto --dist worksteal -m "not emulated" "$@"
