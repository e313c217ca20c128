#!/usr/bin/env bash
# Runs lint and all tests in .venv (see venv.sh). One process for each processor shares the tests. Arguments go to
# pytest, e.g. --cov for the coverage, or -n 0 for one process.
set -euo pipefail
source "$(dirname "$0")/venv.sh"
ruff format --check .
ruff check .
mypy
git ls-files '*.h' '*.cpp' '*.cu' '*.cuh' | xargs clang-format --dry-run -Werror
python -m pytest -n auto --dist worksteal "$@"
