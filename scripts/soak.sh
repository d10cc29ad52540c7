#!/usr/bin/env bash
# Looks for what only time brings to light: memory, descriptors and threads that creep up, and lines that kills lose.
#   scripts/soak.sh [SECONDS [KILLS]]    600 seconds (an hour: 3600) and 50 kills, if nothing else is asked for
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh
export SOAK_SECONDS=${1:-600} KILLS=${2:-50}
exec .venv/bin/python -m pytest -m slow -s tests/jobs/test_soak.py
