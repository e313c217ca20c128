#!/usr/bin/env bash
# Builds the documentation into build/docs. A warning is an error. The script makes .venv-docs if it is missing and runs
# in it. It needs neither torch nor a compiler. Arguments go to mkdocs build.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/progress.sh
if [ ! -d .venv-docs ]; then
  say "making .venv-docs"
  "${PYTHON:-python3}" -m venv .venv-docs
fi
# Only the packages of the extra "docs" are installed: installing our package would compile it.
mapfile -t packages < <(.venv-docs/bin/python scripts/extras.py docs)
waiting "installing what the documentation needs, 40 MB" \
  .venv-docs/bin/pip install --quiet --disable-pip-version-check "${packages[@]}"
NO_MKDOCS_2_WARNING=1 waiting "building the documentation" .venv-docs/bin/mkdocs build --strict "$@"
