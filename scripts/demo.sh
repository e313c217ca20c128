#!/usr/bin/env bash
# Trains the demo's segmentation net with native and with in-place batch norm, in .venv (see venv.sh), and compares
# them. Arguments go to train_segmentation.py, e.g. --steps 100 or --amp bf16.
set -euo pipefail
source "$(dirname "$0")/venv.sh"
for norm in native inplace; do
  python scripts/train_segmentation.py --norm "$norm" --out "runs/$norm" "$@"
done
python scripts/compare_runs.py runs/native runs/inplace
