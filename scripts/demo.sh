#!/usr/bin/env bash
# Trains the segmentation net of the demo twice, native and converted, and compares the two. This takes some minutes.
# Runs in .venv (see venv.sh). Arguments go to demo.py, e.g. --steps 100 or --activation relu.
set -euo pipefail
source "$(dirname "$0")/venv.sh"
# Where other programs run, a thread often waits for one that has no processor. If it spins meanwhile, it takes
# processors away, and steps of these small layers take six times as long or more.
export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-passive}"
python scripts/demo.py "$@"
