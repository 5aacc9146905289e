#!/usr/bin/env bash
# Check and time everything on the GPU at hand in under ten minutes: JSON into a folder, then a table.
#   bash scripts/gpu_check.sh [FOLDER]          PYTHON=... another interpreter     DRY=1 tiny shapes on any backend
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
out=${1:-gpu_check}
dry=${DRY:+--dry}
export XLA_PYTHON_CLIENT_PREALLOCATE=false PYTHONUNBUFFERED=1 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
status=0
# A part that breaks or hangs leaves the others their time.
for part_limit in torch:50 checks:140 kernels:140 peers:80 engine:180; do
    part=${part_limit%:*}
    command=(scripts/gpu_check.py "$part")
    if [[ $part == checks ]]; then command=(-m tests.kernels.on_device); fi
    echo "== $part"
    timeout "${part_limit#*:}" "$python" "${command[@]}" --out "$out" $dry || { echo "$part: failed ($?)"; status=1; }
done
"$python" scripts/gpu_check.py report --out "$out" | tee "$out/report.txt"
exit $status
