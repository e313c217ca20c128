#!/usr/bin/env bash
# Trains the segmentation net of the demo twice, native and converted, and compares the two. Runs in .venv (see
# venv.sh). Arguments go to demo.py, e.g. --steps 100 or --activation relu.
set -euo pipefail
source "$(dirname "$0")/venv.sh"
python scripts/demo.py "$@"
