#!/usr/bin/env bash
# The tables of docs/results.md, "Echo": needles from 50 to 5 %, controls inside the same head budgets, windows, continuations.
#
#   benchmarks/echo.sh FOLDER DATA     DATA: see docs/data.md
set -euo pipefail
out=${1:?a folder for the results}
data=${2:?the folder of docs/data.md, whose training side is read}
kvstrata="$(dirname "$0")/../.venv/bin/kvstrata"
heads="$out/heads.json"
mkdir -p "$out"
[ -f "$heads" ] || "$kvstrata" calibrate heads --data "$data" --out "$heads" --documents 2 --length 1900
run() { "$kvstrata" evaluate --out "$out" --contexts 8 "$@"; }
run --task needle --budget 50%,25%,10%,5% --policy "echo,echo-layer,echo-head,echo-head:heads=$heads"
run --task needle --budget 25%,10% --policy "random:heads=$heads,keydiff:heads=$heads,snapkv:heads=$heads,keydiff,snapkv"
run --task needle --budget 25%,10%,5% --policy echo,echo:weight=u+,echo:weight=u --no-controls
run --task needle --budget 10%,5% --policy echo:window=8,echo:window=128 --no-controls
run --task needle --policy echo:tau=-2.6314,echo:tau=0.2599,echo:tau=1.956 --no-controls
for length in 1000 4000 7600; do
  run --task needle --length "$length" --budget 25%,10% --policy echo,keydiff,kvzap:file=linear,window=32 --no-controls
done
run --task ppl,faithful --length 512 --budget 50%,25%,10% \
  --policy "echo,echo-head:heads=$heads,h2o,snapkv,qevict,streaming"
