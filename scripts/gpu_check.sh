#!/usr/bin/env bash
# One of seven calls on the GPU at hand, each under ten minutes and of use alone: see gpu_check.py.
#   bash scripts/gpu_check.sh marks|kernels|engine|quantised|adapters|programs|states|report [FOLDER]     PYTHON=... another interpreter     DRY=1 tiny shapes
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-python3}" scripts/gpu_check.py "${1:-marks}" "${2:-gpu_check}" ${DRY:+--dry}
