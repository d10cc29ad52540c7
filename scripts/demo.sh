#!/usr/bin/env bash
# Sets everything up and runs the main job on the model that ships, then shows what eviction forgets and what not.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh
echo "== Text for the built-in prompts, with 20 % of the KV cache"
.venv/bin/python -m flexgen_h2o.run --hh-ratio 0.1 --recent-ratio 0.1 --gen-len 64
echo
echo "== What each policy still knows"
.venv/bin/python -m flexgen_h2o.demo
