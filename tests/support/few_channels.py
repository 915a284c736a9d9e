"""Committed traces once more, of a random model with the layers of `fixtures/tiny` and few channels.

The policy says what happens, so that every event is the same one, at the same place in the same layer; a replay takes
half the time. For tests of what is found and said. What a trained model computes is replayed by `make replay` and by
the traces of `covering.py`. Leaves out: policies of a test's own (`traces.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from instep.cli.record import make
from instep.faults import TRACES as FAULTS
from instep.replay.setting import Setting
from instep.trace.file import Trace, read
from instep.trace.policy import read_policy, read_prompts
from support.checkpoints import write

_FOLDER = TemporaryDirectory(prefix="few-channels-")  # until the process ends
FIXTURES = Path(_FOLDER.name) / "4"  # as `fixtures`: has a trace once it was asked for
TRACES = FAULTS.parent
MAIN = "adaptive"


@cache
def few_channels(name: str, layers: int = 4) -> Trace:
    """layers: 4, as in `fixtures/tiny` (three of GDN, one of attention); 2 where one of each is enough."""
    (committed,) = TRACES.rglob(f"{name}.jsonl")
    made = FIXTURES.with_name(str(layers)) / "traces" / committed.relative_to(TRACES)
    made.parent.mkdir(parents=True, exist_ok=True)
    by = read(committed).header.recording
    setting = Setting(dtype=by.dtype, drafter=by.drafter, overlap=by.overlap)
    return make(_model(layers), dict(_prompts()), read_policy(committed.with_suffix(".policy.json")), made, setting)


@cache
def _model(layers: int) -> Path:
    """Stored in bf16 and of 256 tokens, as `fixtures/tiny` is."""
    folder = FIXTURES.with_name(str(layers)) / "tiny"
    return write(folder, vocab_size=256, dtype=torch.bfloat16, num_hidden_layers=layers, full_attention_interval=layers)


def _prompts() -> Iterator[tuple[str, tuple[int, ...]]]:
    for file in (TRACES.parent / "tiny" / "prompts.json", *FAULTS.glob("*.prompts.json")):
        yield from read_prompts(file).items()
