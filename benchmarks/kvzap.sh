#!/usr/bin/env bash
# The tables of docs/results.md, "KVzap": the shipped surrogates, their training, the oracle and their neighbours.
#
#   benchmarks/kvzap.sh FOLDER DATA     DATA: see docs/data.md
set -euo pipefail
out=${1:?a folder for the results}
data=${2:?the folder of docs/data.md, whose training side is read}
kvstrata="$(dirname "$0")/../.venv/bin/kvstrata"
for kind in linear mlp; do # the shipped ones; pairs are collected once
  "$kvstrata" calibrate kvzap --data "$data" --kind "$kind" --documents 10 --length 1000 --out "$out/surrogate"
  mkdir -p "$out/$kind" && cp "$out/surrogate/config.json" "$out/surrogate/model.safetensors" "$out/$kind/"
done
[ -f "$out/duo.json" ] || "$kvstrata" calibrate heads --scorer duo --data "$data" --documents 1 --length 1000 \
  --levels 10%,25%,50% --out "$out/duo.json"
run() { "$kvstrata" evaluate --out "$out" --no-controls "$@"; }
run --task needle --contexts 8 --budget 25%,10% \
  --policy kvzap:file=linear,window=32,kvzap:file=mlp,window=32,kvzap:file=linear,window=128,kvzip,kvzip+,adakv
run --task needle --contexts 8 --budget 50%,25% --policy "criticalkv,expected,expected-ada,lagkv,duo:heads=$out/duo.json"
run --task needle --contexts 8 --budget 25% --policy defensivekv,defensivekv-layer,cake,cam,d2o
run --task words --contexts 8 --budget 25%,10% --policy kvzap:file=linear,window=32,kvzip+,echo,keydiff,expected
"$kvstrata" calibrate kvzap --target echo --data "$data" --kind linear --documents 10 --length 1000 --out "$out/echo-surrogate"
run --task needle --contexts 8 --budget 25%,10% --policy "kvzap:file=$out/echo-surrogate,window=32"
run --task continue --length 768 --contexts 16 --budget 75%,50%,25% \
  --policy kvzap:file=linear,kvzap:file=mlp,kvzip,kvzip+,snapkv,h2o,expected,adakv,random,echo
run --task needle --contexts 8 --budget 10%,5% \
  --policy echo:codec=int4,exact=32,kvzap:file=linear,window=32,codec=int4,exact=32,keydiff:codec=int4,exact=32
"$(dirname "$kvstrata")/python" "$(dirname "$0")/texts.py" "$out/texts" "$data"
"$(dirname "$kvstrata")/python" "$(dirname "$0")/own_words.py" "$out/texts" "$data"
run --task faithful --length 1024 --contexts 8 --budget 25% --haystack "$out/texts/own.txt" \
  --policy kvzap:file=linear,h2o,snapkv,streaming,random
run --task continue --length 768 --contexts 8 --budget 25% --haystack "$out/texts/chat.txt" \
  --policy echo,kvzap:file=linear,kvzip+,snapkv,h2o,keydiff,random
for text in essays code; do # thresholds and who shares a budget; then windows
  run --task continue --contexts 6 --length 768 --haystack "$out/texts/$text.txt" \
    --policy kvzap:file=linear,tau=-3.2479,kvzap:file=linear,budget=25%,kvzap-head:file=linear,budget=25%,kvzap-layer:file=linear,budget=25%
done
run --task continue --contexts 6 --budget 25% --haystack "$out/texts/code.txt" \
  --policy kvzap:file=linear,window=0,kvzap:file=linear,window=16,kvzap:file=linear,window=64,kvzap:file=linear,window=128
