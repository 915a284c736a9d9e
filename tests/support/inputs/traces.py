"""Small headers, event sequences and recorded traces for the harness's tests.

Leaves out: checkpoints (`checkpoints.py`).
"""

import hashlib
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from instep.cli.record import make
from instep.kit.model_and_trace import POLICY, PROMPTS, ROOM
from instep.trace.file import CHECKSUMS, Trace, beside, read
from instep.trace.header import SCHEMA, Header, Model, Part
from instep.trace.policy import Arrival, Policy, ScheduledAction, Steps
from instep_proof.faults.catalogue import TRACES
from instep_reference.contract import engine as e
from support.inputs.checkpoints import TWO_LAYERS, write

VOCAB = 64


def header(**changes: Any) -> Header:
    """A sound header for 64 tokens, two slots and eight pages."""
    made = Header(
        schema=SCHEMA, name="small", claim="Two requests decode side by side.",
        checkpoint=Model(near="model", digest="0" * 64, config_sha256="1" * 64, vocab=VOCAB, mtp_layers=1),
        capacity=ROOM, num_steps=3, candidates=(1, 3), adaptive={"candidate_steps": [1, 3]}, lag=0, seed=0, stop=None,
        replay=(Part("plain"),), created={"test": "1"},
    )
    return msgspec.structs.replace(made, **changes)


def one_round() -> list[e.AnyEvent]:
    """A request from admission to its end: a prompt in two chunks, a round, a plain step."""
    return [
        e.Admit("a", (1, 2, 3, 4, 5)),
        e.Forward((e.Row("a", "prefill", 2),)),
        e.Forward((e.Row("a", "prefill", 3, root=9),)),
        e.Draft(("a",), picks=((10, 11, 12),)),
        e.Forward((e.Row("a", "verify"),)),
        e.Commit(("a",), accepted=(e.Path((1, 2), 13),)),
        e.Forward((e.Row("a", "decode", root=14),)),
        e.Finish("a"),
    ]


def policy(**changes: Any) -> Policy:
    """Three requests over two slots, rising and vanishing step counts, a preemption, an abort, a reload."""
    made = {
        "arrivals": (
            Arrival("a", "more", chunks=(7, 3, 1), max_new=9),
            Arrival("b", "one", max_new=8),
            Arrival("c", "few", arrive=1, chunks=(4,), max_new=6),
            Arrival("d", "more", arrive=2, max_new=4),
        ),
        "steps": (Steps(2, 3), Steps(5, 0), Steps(7, 3)),
        "deeds": (
            ScheduledAction(1, "save", "a", name="start"), ScheduledAction(3, "preempt", "b"),
            ScheduledAction(5, "resume", "b"), ScheduledAction(4, "idle"),
            ScheduledAction(6, "load", "d", name="start"), ScheduledAction(6, "abort", "c", when="verified"),
        ),
        "accept": (0, 3, 1, 2),
    }
    return msgspec.structs.replace(POLICY, **{**made, **changes})


def brief() -> Policy:
    """Every kind of event, and few of each."""
    return POLICY


def first(rounds: int) -> Policy:
    """The first rounds of `brief`: 3 end with a plain step, 4 with two windows, one of which rejects every draft.

    A request is saved, one is preempted, and one begins with what was saved.
    """
    deeds = tuple(deed for deed in POLICY.deeds if deed.do not in ("resume", "abort"))
    return msgspec.structs.replace(POLICY, rounds=rounds, deeds=deeds)


def recorded(folder: Path, told: Policy | None = None, **config: Any) -> Trace:
    """A trace of a small random model, both in `folder`."""
    model = write(folder / "model", **{"vocab_size": VOCAB, **TWO_LAYERS, **config})
    return make(model, PROMPTS, told or policy(), folder / "small.jsonl")


def recording(told: Policy | None = None, **config: Any) -> Any:
    """A fixture: a trace of a small random model, recorded once for a module."""

    @pytest.fixture(scope="module")
    def made(tmp_path_factory: pytest.TempPathFactory) -> Trace:
        return recorded(tmp_path_factory.mktemp("trace"), told, **config)

    return made


def committed(name: str) -> Any:
    """A fixture: a trace below `fixtures/traces`, read once for a module."""
    return pytest.fixture(scope="module")(lambda: read(TRACES.parent / f"{name}.jsonl"))


def seal(path: Path, lines: list[bytes], tensors: Mapping[str, torch.Tensor] | None = None) -> Path:
    """Write lines and tensors as a trace whose digests of lines agree, whatever it contains."""
    body = b"".join(line + b"\n" for line in lines)
    sha256 = hashlib.sha256(body).hexdigest()
    footer = {"events": len(lines) - 1, "sha256": sha256}
    path.write_bytes(body + msgspec.json.encode(footer) + b"\n")
    checksums = torch.tensor([zlib.crc32(line + b"\n") for line in lines])
    save_file({**(tensors or {}), CHECKSUMS: checksums}, str(beside(path)), {"trace_sha256": sha256})
    return path


def lines_of(made: Header, events: list[e.AnyEvent]) -> list[bytes]:
    """The lines of a trace without its footer, and without a digest of tensors: `seal` writes none."""
    made = msgspec.structs.replace(made, tensors_sha256=None)
    return [msgspec.json.encode(made), *(msgspec.json.encode(event) for event in events)]
