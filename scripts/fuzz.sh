#!/usr/bin/env bash
# Searches for files and command lines that end in anything but a sentence.
#   scripts/fuzz.sh [SECONDS]    600 seconds, if nothing else is asked for, and a thousand command lines
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh
export FUZZ_SECONDS=${1:-600}
exec .venv/bin/python -m pytest -m slow -s tests/commands/test_fuzz.py
