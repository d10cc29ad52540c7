#!/usr/bin/env bash
# Runs the tests; arguments go to pytest (`-m slow` for the slow ones).
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh
exec .venv/bin/python -m pytest "$@"
