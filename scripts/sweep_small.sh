#!/usr/bin/env bash
# Engines beside one another, for two cores and a quarter of an hour: opt-125m's shape in memory, and opt-1.3b's with 1.5 GB
# of memory, its weights on disk. Leaves records, tables, plots and a page.
#   bash scripts/sweep_small.sh [FOLDER] [--resume]     (default: results/sweep_small)
# The second sweep needs control groups, which usually takes root.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder=results/sweep_small
if [ $# -gt 0 ] && [ "$1" != --resume ]; then folder=$1; shift; fi

bash scripts/setup.sh
# An engine that cannot be installed is a row that says so.
bash scripts/setup_peers.sh packages deepspeed || true
bench() { .venv/bin/python -m flexgen_h2o.bench "$@"; }

mkdir -p "$folder"
bench sweep --model opt-125m --lengths 128+32 --engines flexgen_h2o,transformers,ctranslate2 --budget full,0.2,0.1,0.04 \
    --batch 8,32 --trials 3 --timeout 300 --output "$folder/sweep.jsonl" "$@"
bench sweep --model opt-1.3b --lengths 64+8 --engines flexgen_h2o@192,deepspeed@8,accelerate@1 --budget 0.2 --bits 16,4 \
    --memory 1500M --batch 8 --trials 2 --timeout 400 --output "$folder/sweep.jsonl" "$@"
bench report "$folder/sweep.jsonl" --output "$folder"
