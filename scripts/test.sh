#!/usr/bin/env bash
# Runs the tests, on every processor; arguments go to pytest (`-m slow` for the slow ones, `-n 0` for one process).
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh
exec .venv/bin/python -m pytest -n "$(nproc)" --dist loadgroup "$@"
