#!/usr/bin/env bash
# The grid that FlexGen and H2O published for a T4 with 16 GB and 200 GB of host memory: opt-6.7b and opt-30b, prompts of
# 512 tokens, 32, 512 and 1024 generated. Takes a night. Leaves records, tables, plots and a page.
#   bash scripts/sweep_t4.sh [FOLDER] [--resume]        (default: results/sweep_t4)
# PYTHON=/path/to/python uses an environment that is there, torch for CUDA in it; without it, scripts/setup.sh makes one.
# SWEEP_EXTRA="--device cpu ..." adds flags.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder=results/sweep_t4
if [ $# -gt 0 ] && [ "$1" != --resume ]; then folder=$1; shift; fi

if [ -z "${PYTHON:-}" ]; then
    bash scripts/setup.sh
    bash scripts/setup_peers.sh packages || true
    PYTHON=.venv/bin/python
fi
bench() { PYTHONPATH=. "$PYTHON" -m flexgen_h2o.bench "$@"; }

mkdir -p "$folder"
bench sweep --device cuda --model opt-6.7b,opt-30b --lengths 512+32,512+512,512+1024 \
    --engines flexgen_h2o,accelerate,deepspeed --budget full,0.2 --batch auto --trials 3 --timeout 36000 \
    --output "$folder/sweep.jsonl" ${SWEEP_EXTRA:-} "$@"
bench report "$folder/sweep.jsonl" --output "$folder"
