#!/usr/bin/env bash
# Builds the documentation into build/docs. A warning is an error. The script makes .venv-docs if it is missing and runs
# in it. It needs neither torch nor a compiler. Arguments go to mkdocs build.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ ! -d .venv-docs ]; then
  "${PYTHON:-python3}" -m venv .venv-docs
fi
# Only the packages of the extra "docs" are installed: installing our package would compile it.
.venv-docs/bin/python - <<'PYTHON' | xargs .venv-docs/bin/pip install --quiet --disable-pip-version-check
import re
with open("pyproject.toml", encoding="utf-8") as file:
    print(*re.findall(r'"([^"]+)"', re.search(r"^docs = \[(.+)\]$", file.read(), re.MULTILINE)[1]))
PYTHON
NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict "$@"
