#!/usr/bin/env bash
# Strategies for the demo model at three mean budgets, and those of one against single patterns and controls: P1 to P4.
#
#   benchmarks/polykv.sh FOLDER DATA     DATA: see docs/data.md
set -euo pipefail
out=${1:?a folder for the results}
data=${2:?the folder of docs/data.md, whose training side is read}
kvstrata="$(dirname "$0")/../.venv/bin/kvstrata"
patterns=streaming,h2o,tova,snapkv,pyramidkv,scissorhands,cake
calibrate() { # BUDGET NAME [options]: signals are measured once for a budget
  [ -d "$out/polykv-$1.signals" ] && [ "$2" != "$1" ] && cp -r "$out/polykv-$1.signals" "$out/polykv-$2.signals"
  "$kvstrata" calibrate polykv --data "$data" --budget "$1" --patterns "$patterns" --documents 4 \
    --out "$out/polykv-$2.yaml" "${@:3}"
}
for budget in 128 256 512; do
  calibrate "$budget" "$budget"
done
calibrate 256 256-inverse --inverse
calibrate 256 256-entropy --allocate entropy
policies="polykv:$out/polykv-256.yaml,polykv:$out/polykv-256-inverse.yaml,polykv:$out/polykv-256-entropy.yaml"
for pattern in streaming h2o tova snapkv pyramidkv scissorhands cake; do
  policies="$policies,$pattern:budget=256"
done
"$kvstrata" evaluate --out "$out" --task ppl,faithful --length 1024 --contexts 16 --no-controls --policy "$policies"
