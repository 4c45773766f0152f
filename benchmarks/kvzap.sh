#!/usr/bin/env bash
# The tables of docs/results.md, "KVzap": the shipped surrogates, their training, and the oracle on needles.
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
"$kvstrata" evaluate --out "$out" --task needle --contexts 8 --budget 25%,10% --no-controls \
  --policy kvzap:file=linear,window=32,kvzap:file=mlp,window=32,kvzap:file=linear,window=128,kvzip,kvzip+,adakv
