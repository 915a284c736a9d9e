#!/usr/bin/env bash
# What only a GPU can show, in one go: the tests marked gpu, the recorded trace natively, the kernels' figures.
# Usage: tests/on_gpu.sh FOLDER COMMIT    writes replay-*.json, gpu-tests.txt and kernels.txt into FOLDER
set -euo pipefail
cd "$(dirname "$0")/.."
out=$1 commit=$2
export PYTHONPATH=${PYTHONPATH:+$PYTHONPATH:}reference:optimized:harness:tests PYTHONUNBUFFERED=1
mkdir -p "$out"

run() { python3 -m instep replay fixtures/traces/adaptive.jsonl --device cuda --commit "$commit" "$@"; }
run --ops triton --json "$out/replay-h200-fp32.json" | tee "$out/replay.txt"
run --ops triton --dtype bfloat16 --json "$out/replay-h200-bf16.json" | tee -a "$out/replay.txt"
run --ops triton --layout KV --ops ledger --ops plain --json "$out/others.json" | tee -a "$out/replay.txt"
python3 -m pytest -q -m gpu tests/optimized | tee "$out/gpu-tests.txt"
python3 tests/perf/kernels_gpu.py | tee "$out/kernels.txt"
