#!/usr/bin/env bash
# Trains the demo's segmentation net as it is and converted, in .venv (see venv.sh), and compares them. Arguments go to
# demo.py, e.g. --steps 100 or --activation relu.
set -euo pipefail
source "$(dirname "$0")/venv.sh"
python scripts/demo.py "$@"
