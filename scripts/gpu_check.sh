#!/usr/bin/env bash
# Tests and measures what only a GPU decides; meant for four minutes on one large GPU. Appends to results/gpu/.
#   bash scripts/gpu_check.sh [--part profile|correctness|resident|offload|peers]
# PYTHON=/path/to/python uses an environment that is there; without it, scripts/setup.sh makes one.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ -z "${PYTHON:-}" ]; then
    bash scripts/setup.sh
    PYTHON=.venv/bin/python
fi
PYTHONPATH=. exec "$PYTHON" scripts/gpu_check.py "$@"
