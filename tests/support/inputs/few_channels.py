"""Committed traces, recorded again with a random model that has the layers of `fixtures/tiny` and few channels.

The policy decides the events, so every event is the same, at the same place in the same layer, and a replay takes half
the time. These traces are for tests of findings and messages; `make replay` and the traces of `covering.py` replay a
trained model. Leaves out: policies of a single test (`traces.py`).
"""

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from msgspec import structs

from instep.trace.file import Trace, read
from instep.trace.header import Model
from instep_proof.faults.catalogue import TRACES as FAULTS
from instep_proof.faults.rerecord import retraced
from instep_reference.contract.checkpoint import Checkpoint
from support.inputs.checkpoints import write

_FOLDER = TemporaryDirectory(prefix="few-channels-")  # until the process ends
FIXTURES = Path(_FOLDER.name) / "4"  # as `fixtures`: has a trace after its first use
TRACES = FAULTS.parent
MAIN = "adaptive"


@cache
def few_channels(name: str, layers: int = 4) -> Trace:
    """layers: 4, as in `fixtures/tiny` (three of GDN, one of attention); 2 where one of each is enough."""
    (committed,) = TRACES.rglob(f"{name}.jsonl")
    folder = FIXTURES.with_name(str(layers)) / "traces" / committed.parent.relative_to(TRACES)
    folder.mkdir(parents=True, exist_ok=True)
    return read(retraced(committed.parent, [name], small_model("tiny", layers), folder) / committed.name)


@cache
def same_events(name: str, layers: int) -> Trace:
    """The recorded events with all their choices, for such a model.

    A policy with names of prefixes would not do: its events depend on what the model accepts.
    """
    (committed,) = TRACES.rglob(f"{name}.jsonl")
    told = read(committed)
    model = small_model(Path(told.header.checkpoint.near).name, layers)
    header = structs.replace(told.header, checkpoint=Model.of(Checkpoint.open(model), model, f"../{model.name}"))
    return Trace(model / committed.name, header, told.events, {}, "")


@cache
def small_model(name: str, layers: int) -> Path:
    """Stored in bf16 and of 256 tokens, as `fixtures/tiny` is; with as many experts as `fixtures/experts` has."""
    folder, experts = FIXTURES.with_name(str(layers)) / name, {"num_experts": 6, "num_experts_per_tok": 3}
    return write(folder, "moe" if name == "experts" else "dense", vocab_size=256, dtype=torch.bfloat16,
                 num_hidden_layers=layers, full_attention_interval=layers,
                 **(experts if name == "experts" else {}))  # fmt: skip
