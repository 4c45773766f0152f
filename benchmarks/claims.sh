#!/usr/bin/env bash
# Claims of CONF-KV and QEvict that need a run of their own: docs/results.md, "Claims of the papers, here".
#
#   benchmarks/claims.sh FOLDER
set -euo pipefail
out=${1:?a folder for the results}
kvstrata="$(dirname "$0")/../.venv/bin/kvstrata"
# C3 and C4: what victims cost at CONF-KV's own rates, and confidence against what ablation costs
"$kvstrata" diagnose isolation --policy confkv --documents 4 --length 512 --steps 96 --out "$out/diagnose"
"$kvstrata" diagnose confidence --samples 1200 --documents 12 --length 640 --steps 128 --out "$out/diagnose"
# Q1: the same windows with and without their coded tier, and evictions, at equal bytes
"$kvstrata" evaluate --out "$out" --task ppl,faithful --length 1536 --contexts 8 --budget 20%,10% --no-controls \
  --policy qevict,qevict:split=0,h2o,streaming,snapkv
# Q4 and Q5: attention that went to what was dropped, what comes back, and how much changes from event to event
"$kvstrata" diagnose fmm,churn,reactivation --documents 8 --length 768 --steps 128 --out "$out/diagnose" \
  --policy qevict:budget=20%,qevict:budget=20%,split=0,h2o:budget=20%
