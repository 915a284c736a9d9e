"""FlashInfer's and FlashQLA's kernels on a GPU: entries as those of `make peers`, with rows of the same fields.

Leaves out: speed. A script for a machine with a card of Hopper or later, where flashinfer-python and flash-qla are
installed, or lie on PYTHONPATH with what they need (nvidia-cutlass-dsl and its `dsl_packages`, tilelang):
    python tests/perf/peers_gpu.py --out fixtures/results/peers-native.json --commit REVISION
Both want K = V = 128. So the traces are recorded first: the policies of `fixtures/traces` with a small model of that
width and random weights (`record`). {unpacked} in a row is the folder where they lie.
"""

import argparse
import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from instep.cli.record import make
from instep.report.result import Result
from instep.trace.policy import read_policy, read_prompts
from peers.entry import Entry
from peers.environment import TOP, environment
from peers.run import served
from support.inputs.checkpoints import write as write_checkpoint

TRACES = TOP / "fixtures" / "traces"
WINDOWS = ("faults/wider", "faults/ragged", "faults/kept", "peers/lengths")
PROMPTS = ("faults/arriving", "faults/mixed", "peers/lengths")
WIDE = {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "vocab_size": 512, "num_hidden_layers": 2,
        "full_attention_interval": 2}  # fmt: skip
SHAPES = "qwen3.5-9b qwen3.5-27b --layers 1 --vocab 8192"  # 32 and 48 value heads
WIDTH = "snapshot_state row; changed at position; this event writes only; T1"
FLASHINFER = {"package": "flashinfer-python", "version": "0.7.2.post1", "modules": ["flashinfer", "cutlass"]}
FLASHQLA = {"package": "flash-qla", "version": "0.1.3", "modules": ["flash_qla", "tilelang"]}


def _entry(name: str, peer: dict[str, Any], ops: str, traces: tuple[str, ...] = (), **more: Any) -> dict[str, Any]:
    """An op set through traces, or without them through layers of real shape."""
    how = f"--device cuda --dtype bfloat16 --ops instep.adapters.{ops}"
    command = f"instep replay {{trace}} --no-ladder {how}" if traces else f"instep shapes {SHAPES} {how}"
    told = [f"{{unpacked}}/{Path(one).name}.jsonl" for one in traces]
    pins = [f"{peer['package']}=={peer['version']}"]
    return {"name": name, **peer, "door": "op", "command": command, "traces": told, "needs": pins, **more}


def _script(name: str, peer: dict[str, Any], file: str, expected: str) -> dict[str, Any]:
    return {**_entry(name, peer, "", expected=expected), "door": "script", "command": f"python docs/found/{file}.py"}


DECODE, PREFILL = "gated_delta_rule_mtp and decode_pretranspose", "chunk_gated_delta_rule"
SNAPSHOT, COLUMNS = "--strategy snapshot", "--strategy columns"
ENTRIES = [
    _entry(f"{DECODE}, snapshots as allocated", FLASHINFER, f"flashinfer:VERIFY {SNAPSHOT}", WINDOWS, expected=WIDTH),
    _entry(f"{DECODE}, snapshots as wide as the window", FLASHINFER, f"flashinfer:EXACT {SNAPSHOT}", WINDOWS),
    _entry(f"{DECODE}, snapshots as wide as the window, real shapes", FLASHINFER, f"flashinfer:EXACT {SNAPSHOT}"),
    _entry(f"{DECODE}, strided pools", FLASHINFER, f"flashinfer:STRIDED {SNAPSHOT}", WINDOWS),
    _entry(f"{DECODE}, columns", FLASHINFER, f"flashinfer:VERIFY {COLUMNS}", WINDOWS),
    _entry(f"{DECODE}, columns, real shapes", FLASHINFER, f"flashinfer:VERIFY {COLUMNS}"),
    _entry(f"{PREFILL}, slots of the pool", FLASHINFER, f"flashinfer:PREFILL {SNAPSHOT}", PROMPTS),
    _entry(f"{PREFILL}, slots of the pool, real shapes", FLASHINFER, f"flashinfer:PREFILL {SNAPSHOT}"),
    _script("a window narrower than its snapshot buffer", FLASHINFER, "flashinfer_snapshot_stride",
            "diverged; where they belong: False"),
    _script("slot 4096 of fp32 states of 32 x 128 x 128, a window", FLASHINFER, "flashinfer_slot_4096",
            "diverged; slot 4096, 2 tokens; illegal memory access"),
    _entry(PREFILL, FLASHQLA, f"flashqla:OPS {SNAPSHOT}", PROMPTS),
    _entry(f"{PREFILL}, real shapes", FLASHQLA, f"flashqla:OPS {SNAPSHOT}"),
    _script("new lengths in the same tensor", FLASHQLA, "flashqla_lengths_in_place", "diverged; relatively off"),
    _script("chunks after an empty sequence", FLASHQLA, "flashqla_empty_sequence", "diverged; relatively off"),
]


def record(folder: Path) -> None:
    """The model of K = V = 128 and the traces of all entries."""
    model = write_checkpoint(folder / "model", dtype=torch.bfloat16, **WIDE)
    prompts = {**read_prompts(TOP / "fixtures/tiny/prompts.json"), **read_prompts(TRACES / "faults/short.prompts.json")}
    for name in dict.fromkeys((*WINDOWS, *PROMPTS)):
        policy = TRACES / f"{name}.policy.json"
        make(model, prompts, read_policy(policy), folder / f"{Path(name).name}.jsonl")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit")
    parser.add_argument("--only", action="append", default=[], help="entries with this in their title; repeatable")
    parser.add_argument("--jobs", type=int, default=4)
    told = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("no CUDA device is here")
    there = [Path(place) for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place]
    entries = [Entry.of(one) for one in ENTRIES]
    chosen = [one for one in entries if not told.only or any(word in one.title for word in told.only)]
    with tempfile.TemporaryDirectory() as made, ThreadPoolExecutor(told.jobs) as pool:
        record(Path(made))
        rows = []
        for row in pool.map(lambda one: served(one, environment(there), Path(made)), chosen):
            rows.append(row)
            print(f"{'  ' if row['met'] else '! '}{row['package']} {row['name']}: {row['verdict']}, {row['events']} of "
                  f"{row['of']} events, {row['seconds']} s. {row['finding']}", flush=True)  # fmt: skip
    code = 0 if rows and all(row["met"] for row in rows) else 1
    if told.out is not None:
        Result(code, "cuda", {"rows": rows}, told.commit).write(told.out)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
