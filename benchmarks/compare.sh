#!/usr/bin/env bash
# Peers and ours at equal bytes held, on needles and on the likelihood of a continuation: docs/results.md, "Beside other
# libraries". Each is compared with its own full cache. The question is never visible when compressing. Then, always on the
# demo model, seconds of a prompt and of a step, which need a machine with nothing else to do. Makes the peers' environments.
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
"$bin/kvstrata" bench --decode-only --context 2k --rounds 5 --steps 8 --prefill 3 --out "$out/times.json" \
  --policy full,snapkv:budget=25%,tova:budget=25%,keydiff:budget=25%,streaming:budget=25%,echo:budget=25%,full:codec=int4 \
  --peers hf,quantized,kvpress
