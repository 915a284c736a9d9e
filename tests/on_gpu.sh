#!/usr/bin/env bash
# What only a GPU can show, in parts that run one after the other: replays, the recorded traces natively; tests, those
# marked gpu; race, a look for data races and reads out of bounds; time, the figures, each alone on the card.
# Usage: tests/on_gpu.sh FOLDER COMMIT [replays|tests|race|time]    left out: all. Writes *.json and *.txt into FOLDER; a
# task's exit status is the last line of its *.txt (124: stopped at its limit). SECONDS_OF_TESTS, MINUTES: of bench
set -uo pipefail
cd "$(dirname "$0")/.."
out=$1 commit=$2 part=${3:-all} failed=$(mktemp -d)
export PYTHONPATH=${PYTHONPATH:+$PYTHONPATH:}reference:optimized:harness:tests PYTHONUNBUFFERED=1 OMP_NUM_THREADS=2
python3 -c "import instep.cli, pytest" || exit  # a bare machine lacks packages: nothing would run
mkdir -p "$out"
where=$(python3 -c 'import torch, triton; print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")')

task() {  # name, seconds, command: its output in FOLDER/name.txt
  local name=$1 limit=$2 begun=$SECONDS status=0
  shift 2
  echo "# $where, commit $commit, $(date -u +%F): $*" >"$out/$name.txt"
  timeout --kill-after=5 "$limit" "$@" >>"$out/$name.txt" 2>&1 || status=$?
  [ -z "$(tail -c 1 "$out/$name.txt")" ] || echo >>"$out/$name.txt"  # a test that was stopped ends no line
  echo "exit status $status, limit $limit s" >>"$out/$name.txt"
  if ((status)); then echo "FAILED ($status) $name" >"$failed/$name"; tail -n 40 "$out/$name.txt"; fi
  echo "$name: $((SECONDS - begun)) s"
}
summary() {  # files of tasks: what stands in the repository of them
  local file
  for file in "$@"; do
    head -n 1 "$file"
    grep -E "^(FAILED|ERROR|DIVERGED|[0-9]+ (passed|failed)|.* (agrees:|relations hold:) .*|=+ (RACECHECK|ERROR) SUMMARY|(mem|race|init)check, |exit status )" "$file"
  done
}
replay() { local name=$1; shift; task "$name" 300 python3 -m instep replay fixtures/traces/adaptive.jsonl --device cuda --commit "$commit" --json "$out/$name.json" "$@"; }
of() {  # name, replay or relations, trace
  local name=of-$1 command=$2 trace=fixtures/traces/$3.jsonl
  shift 3
  [[ $* = *--ops* ]] || set -- --ops triton "$@"
  task "$name" 300 python3 -m instep "$command" "$trace" --device cuda "$@"
}
tests() { local name=$1; shift; task "$name" "${SECONDS_OF_TESTS:-480}" python3 -m pytest -q --durations=5 -p no:cacheprovider -m gpu "$@"; }

if [ "$part" = all ] || [ "$part" = replays ]; then
  replay replay-native-fp32 --ops triton &
  replay replay-native-bf16 --ops triton --dtype bfloat16 &
  replay replay-native-kv --ops triton --layout KV --strategy snapshot --conv widened &
  replay replay-native-graphs --ops triton --graphs &
  for one in inner crossing; do
    of "prefixes-$one" replay faults/$one --graphs &
    of "prefixes-$one-prompts" replay faults/$one --graphs --prompt-graphs 16,64 &
  done
  of prompts replay faults/prompts --graphs --prompt-graphs 16,64 &
  of prompts-relations relations faults/prompts prompt_buckets graph_is_eager --graphs --prompt-graphs 16,64 &
  of narrow-prefixes replay faults/prefix --graphs --kept-dtype int8 --chunk-dtype bfloat16 &
  of narrow-prefixes-relations relations faults/prefix kept_once strategies --kept-dtype int8 &
  of caps replay faults/caps --graphs --overlap &
  of capped replay faults/capped --graphs --overlap &
  of caps-relations relations faults/caps full_caps capped graph_is_eager strategies --graphs &
  of block replay faults/block --graphs &
  of block-bf16 replay faults/block --graphs --dtype bfloat16 &
  of prefixes-alone relations faults/inner alone strategies graph_is_eager --ops invariant --graphs &
  of block-relations relations faults/block handed graph_is_eager --graphs &
  for one in triton invariant; do
    replay ranks-native-$one --ops $one --ranks 2 --dtype bfloat16 --graphs &
  done
  for dtype in float32 bfloat16; do
    replay stages-native-$dtype --ops triton --stages 3 --micro-batches 2 --graphs --overlap --dtype $dtype &
  done
  of stages-trees replay trees --stages 3 --micro-batches 2 --graphs &
  of stages-invariant replay slots --stages 3 --micro-batches 2 --ops invariant --until 40 &
  of stages-relations relations adaptive graph_is_eager unseen --stages 3 --micro-batches 2 --graphs --until 30 &
  of groups-relations relations adaptive graph_is_eager unseen --dp 2 --graphs --until 30 &
  of groups replay adaptive --dp 2 --graphs --dtype bfloat16 &
  of groups-invariant replay slots --dp 2 --ops invariant --until 40 &
  of coins replay faults/coins --graphs &
  of transfer replay faults/transfer --graphs &
  of split-rings replay adaptive --ring-dtype bfloat16 --strategy lazy_rerun --graphs &
  of split-rings-trees replay trees --ring-dtype float16 --dtype bfloat16 --graphs &
  of split-rings-relations relations faults/branching ring_parts strategies graph_is_eager --ring-dtype bfloat16 &
  of ranks replay adaptive --ranks 2 --graphs --overlap --dtype bfloat16 &
  of ranks-invariant replay adaptive --ranks 2 --graphs --ops invariant --until 40 &
  of ranks-prompts replay faults/prompts --ranks 2 --graphs --prompt-graphs 16,64 &
  of ranks-relations relations adaptive graph_is_eager unseen --ranks 2 --graphs --until 30 &
  if [ "$(python3 -c 'import torch; print(torch.cuda.device_count())')" -gt 1 ]; then
    replay ranks-nccl --ops triton --ranks 2 --comm nccl --graphs &
    for dtype in float32 bfloat16; do
      replay stages-nccl-$dtype --ops triton --stages 2 --micro-batches 2 --comm nccl --graphs --dtype $dtype &
    done
  fi
  task streams-native 300 python3 -m instep streams fixtures/traces/adaptive.jsonl --ops triton --device cuda --dtype bfloat16 --graphs --commit "$commit" --json "$out/streams-native.json" &
  task fla-native 300 python3 tests/perf/fla_gpu.py --out "$out/fla-native.json" --commit "$commit" &
  task shapes-native 300 python3 -m instep shapes --device cuda --dtype bfloat16 --json "$out/shapes-native.json" --commit "$commit" &
  wait
  summary "$out"/of-*.txt >"$out/events-native.txt"
fi
if [ "$part" = all ] || [ "$part" = tests ]; then  # what the replays compiled is taken from Triton's cache
  tests tests-kernels tests/optimized/test_kernels.py &
  tests tests-kernels-more tests/optimized/test_kernels_*.py &
  tests tests-ops tests/optimized/test_walk_*.py tests/optimized/test_ops_plain.py tests/optimized/test_index_ops.py tests/optimized/test_tiles.py tests/optimized/test_draw.py tests/optimized/test_stochastic_rounding.py tests/optimized/test_transfer.py &
  tests tests-attend tests/optimized/test_attend_parts.py -k "not explicit" &
  tests tests-attend-layouts tests/optimized/test_attend_parts.py -k explicit &
  tests tests-attend-trees tests/optimized/test_attend_trees.py &
  tests tests-forms tests/optimized/test_blocks_staged.py tests/optimized/test_fusions.py tests/optimized/test_fused_gdn.py tests/optimized/test_verify_gdn.py tests/optimized/test_channel_decays.py &
  tests tests-exact tests/optimized/test_exact*.py tests/optimized/test_staged.py tests/optimized/test_graphs.py &
  tests tests-engine tests/optimized/test_engine_*.py &
  tests tests-vanilla tests/optimized/test_vanilla.py tests/optimized/test_block_drafter.py tests/optimized/test_mixed_steps.py &
  tests tests-harness tests/harness/test_attach_cost.py tests/harness/test_digests.py tests/harness/test_kit_device.py tests/harness/test_read_late.py tests/harness/test_sums_native.py &
  tests tests-rounds tests/harness/test_mixed_steps.py &
  tests tests-steps tests/harness/test_step_changes.py &
  tests tests-ranks tests/harness/test_ranks.py tests/harness/test_rank_processes.py tests/harness/test_stages.py tests/harness/test_data_parallel.py &
  tests tests-storage tests/harness/test_storage.py tests/harness/test_split_rings.py &
  tests tests-invariant-ops tests/optimized/test_invariant.py &
  tests tests-invariant-engine tests/optimized/test_invariant_engine.py &
  wait
  summary "$out"/tests-*.txt >"$out/suite-native.txt"
fi
sanitized() {  # name, tool, tests
  local name=$1 tool=$2
  shift 2
  # Every allocation is torch's own, so that a read behind its end is seen.
  task "$name" "${SECONDS_OF_TESTS:-480}" env PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool "$tool" --error-exitcode 1 python3 -m pytest -q -p no:cacheprovider -m gpu "$@" &
}
if [ "$part" = all ] || [ "$part" = race ]; then
  # What it keeps of every access of the real sizes does not fit the card's memory.
  sanitized racecheck racecheck tests/optimized/test_exact_order.py -k few-programs
  task racecheck-handshake 240 compute-sanitizer --tool racecheck --error-exitcode 1 python3 tests/support/kernels/warp_groups.py of_two_groups &
  # What is named here is the compiler's: hazards fail nothing. It shows what of `racecheck-attend` is the compiler's, too.
  task racecheck-dispatch 240 compute-sanitizer --tool racecheck python3 tests/support/kernels/warp_groups.py of_three_groups &
  task racecheck-numbers 240 compute-sanitizer --tool racecheck python3 tests/support/kernels/warp_groups.py of_numbers &
  for tool in racecheck memcheck; do
    sanitized $tool-prefill $tool tests/optimized/test_kernels_blocks.py tests/optimized/test_blocks_staged.py -k "not fault"
    sanitized $tool-attend $tool tests/optimized/test_attend_parts.py
    sanitized $tool-trees $tool tests/optimized/test_attend_trees.py -k "same_bits or nothing"
    sanitized $tool-products $tool tests/optimized/test_kernels_experts.py tests/optimized/test_kernels_slim.py -k "not begins_early and not fault and not pairs"
    sanitized $tool-conv $tool tests/optimized/test_kernels.py tests/optimized/test_walk_*.py -k "(conv or walk) and not fault"
    sanitized $tool-windows $tool tests/optimized/test_staged.py -k "serves and 5 or unowned"
    sanitized $tool-gated $tool tests/optimized/test_fused_gdn.py -k "computes or serves or (rings and not 70 and not 300)"
    sanitized $tool-verify $tool tests/optimized/test_verify_gdn.py -k "every_shape or guessed"
    sanitized $tool-forms $tool tests/optimized/test_fusions.py tests/optimized/test_stochastic_rounding.py
  done
  sanitized memcheck-memory memcheck tests/optimized/test_kernels.py -k "trees or over or drafted or plan_ or move_rows or nodes"
  task sanitized 600 python3 -m support.running.sanitized &
  wait
  summary "$out"/racecheck*.txt "$out"/memcheck*.txt "$out"/sanitized.txt >"$out/race-native.txt"
fi
if [ "$part" = all ] || [ "$part" = time ]; then
  tests tests-clocks tests/harness/test_gate_clocks.py
  tests tests-stress tests/harness/test_stress.py  # another process would be stress
  # Its last cell, whole texts, begins within these minutes and ends some minutes later.
  # fla-core with its own kernels, not those of FlashQLA, which has an arm of its own.
  task bench-native 500 env FLA_FLASH_QLA=0 python3 -m instep bench --minutes "${MINUTES:-6}" --commit "$commit" --json "$out/bench-native.json" --plots "$out/bench"
  mkdir -p "$out/baselines"  # for fixtures/baselines: how often the gate is wrong on this machine
  task gate-native 360 python3 -m instep gate triton --device cuda --dtype bfloat16 --graphs --overlap --clock device --calibrate --minutes 2.7 --baselines "$out/baselines" --commit "$commit"
  task bench-prompts 240 python3 -m instep bench --ops triton --kind prompts --no-peers --minutes 3 --commit "$commit" --json "$out/bench-prompts.json"
  if [ "$(python3 -c 'import torch; print(torch.cuda.device_count())')" -gt 1 ]; then
    for batch in 1 8 32; do  # all at once, since compiling takes longest: 8 layers have the kernels of 32
      for ranks in 1 2; do
        task bench-ranks-compiled-$batch-$ranks 200 python3 -m instep bench --ops triton --ranks 2 --no-peers --grid full --at batch=$batch --at ranks=$ranks --at layers=8 --json "$failed/../$$-$batch-$ranks.json" &
      done
    done
    wait
    task bench-ranks 300 python3 -m instep bench --ops triton --ranks 2 --minutes 3.5 --commit "$commit" --json "$out/bench-ranks.json"
  fi
  task bench-invariant 90 python3 -m instep bench --ops triton --ops invariant --kind products --kind attend --no-peers --minutes 1 --commit "$commit" --json "$out/bench-invariant.json"
fi
cat "$failed"/* 2>/dev/null
[ -z "$(ls -A "$failed")" ]
