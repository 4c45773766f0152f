#!/usr/bin/env bash
# Strategies for the demo model at three mean budgets, and one of them against single patterns.
#
#   benchmarks/polykv.sh FOLDER DATA     DATA: see docs/data.md
set -euo pipefail
out=${1:?a folder for the results}
data=${2:?the folder of docs/data.md, whose training side is read}
kvstrata="$(dirname "$0")/../.venv/bin/kvstrata"
for budget in 128 256 512; do
  "$kvstrata" calibrate polykv --data "$data" --budget "$budget" --out "$out/polykv-$budget.yaml"
done
"$kvstrata" evaluate --out "$out" --task ppl,faithful --length 1024 --contexts 16 --no-controls --policy \
  "polykv:$out/polykv-256.yaml,snapkv:budget=256,h2o:budget=256,tova:budget=256,streaming:budget=256,pyramidkv:budget=256"
