"""The committed traces of faults once more, of a random model with the layers of `fixtures/tiny` and few channels.

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
from instep.faults import TRACES
from instep.trace.file import Trace
from instep.trace.policy import read_policy, read_prompts
from support.checkpoints import write

_FOLDER = TemporaryDirectory(prefix="few-channels-")  # until the process ends
FIXTURES = Path(_FOLDER.name)  # as `fixtures`: has a trace once it was asked for
FOLDER = FIXTURES / "traces" / "faults"
MAIN, TINY = "adaptive", TRACES.parents[1] / "tiny"


@cache
def few_channels(name: str) -> Trace:
    FOLDER.mkdir(parents=True, exist_ok=True)
    policy = read_policy((TRACES.parent if name == MAIN else TRACES) / f"{name}.policy.json")
    return make(_model(), dict(_prompts()), policy, FOLDER / f"{name}.jsonl")


@cache
def _model() -> Path:
    """Stored in bf16 and of 256 tokens, as `fixtures/tiny` is: three GDN layers, one of attention, a draft head."""
    return write(FIXTURES / "tiny", vocab_size=256, dtype=torch.bfloat16)


def _prompts() -> Iterator[tuple[str, tuple[int, ...]]]:
    for file in (TINY / "prompts.json", *TRACES.glob("*.prompts.json")):
        yield from read_prompts(file).items()
