#!/usr/bin/env bash
# Strategies for the demo model at four mean budgets, and what they lose beside single patterns and controls: P1 to P5.
#
#   benchmarks/polykv.sh FOLDER DATA     DATA: see docs/data.md
set -euo pipefail
out=${1:?a folder for the results}
data=${2:?the folder of docs/data.md, whose training side is read}
bin="$(dirname "$0")/../.venv/bin"
patterns=streaming,h2o,tova,snapkv,pyramidkv,scissorhands,cake
calibrate() { # BUDGET NAME [options]: signals are measured once for a budget, for 256 on 32 documents, else on 16
  [ -d "$out/polykv-$1.signals" ] && [ "$2" != "$1" ] && cp -rn "$out/polykv-$1.signals" "$out/polykv-$2.signals"
  "$bin/kvstrata" calibrate polykv --data "$data" --budget "$1" --patterns "$patterns" --documents "$([ "$1" = 256 ] && echo 8 || echo 4)" \
    --out "$out/polykv-$2.yaml" "${@:3}"
}
"$bin/python" "$(dirname "$0")/texts.py" "$out/texts" "$data"
for budget in 64 128 256 512; do
  calibrate "$budget" "$budget"
  calibrate "$budget" "$budget-entropy" --allocate entropy
  calibrate "$budget" "$budget-margin" --margin 0.01
  policies="polykv:$out/polykv-$budget.yaml,polykv:$out/polykv-$budget-entropy.yaml,polykv:$out/polykv-$budget-margin.yaml"
  if [ "$budget" = 256 ]; then
    calibrate "$budget" "$budget-inverse" --inverse
    policies="$policies,polykv:$out/polykv-$budget-inverse.yaml"
  fi
  for pattern in ${patterns//,/ }; do
    policies="$policies,$pattern:budget=$budget"
  done
  for text in essays wikipedia code; do
    "$bin/kvstrata" evaluate --out "$out" --task continue --contexts 6 --no-controls --policy "$policies" \
      --haystack "$out/texts/$text.txt"
  done
  if [ "$budget" = 256 ]; then
    "$bin/kvstrata" evaluate --out "$out" --task needle --no-controls --policy "$policies"
  fi
done
