#!/usr/bin/env bash
# Peers and ours at equal bytes held, on needles and on the likelihood of a continuation: docs/results.md, "Beside other libraries".
# Each is compared with its own full cache. The question is never visible when compressing. Makes the peers' environments.
#
#   benchmarks/compare.sh FOLDER [options of kvstrata evaluate]
set -euo pipefail
out=${1:?a folder for the results}
shift
bin=$(dirname "$0")/../.venv/bin
press=kvpress:press
"$bin/kvstrata" evaluate --out "$out" --task needle,ppl --budget 50%,25% --contexts 4 --batch 1 \
  --policy snapkv,tova,keydiff,streaming,full:codec=int4 \
  --peers "$press=SnapKVPress,$press=TOVAPress,$press=KeyDiffPress,$press=StreamingLLMPress,quantized:bits=4" "$@"
