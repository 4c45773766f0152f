#!/usr/bin/env bash
# The tables of docs/results.md, "Quality at equal bytes": every preset at these budgets on needles, continuations and agent traces.
#
#   benchmarks/evaluate.sh FOLDER DATA [options of kvstrata evaluate]     DATA: see docs/data.md
set -euo pipefail
out=${1:?a folder for the results}
data=${2:?a folder with agent/taubench_gpt-4o-airline.json.gz}
shift 2
bin=$(dirname "$0")/../.venv/bin
presets=window,streaming,keynorm,keydiff,h2o,tova,snapkv,pyramidkv,scissorhands,confkv,confkv-l
"$bin/kvstrata" evaluate --out "$out" --data "$data" --task needle,ppl,faithful,agent \
  --policy "$presets,full:codec=int8,full:codec=int4" --budget 50%,25% --contexts 8 "$@"
