"""A trace is read as it was written, and every change of its files is found and named.

Leaves out: whether its events are legal (`test_event_rules.py`).
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from instep.bundled import fixtures
from instep.run.replay import Replay
from instep.trace import file
from instep.trace.file import beside, read, stamp, write
from instep.trace.header import Model, Recording
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.errors import BadInput
from support.inputs.traces import ROOM, header, lines_of, one_round, seal
from support.running.command import Runner

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
RECORDED = {"prompt.0": torch.tensor([1, 2, 3, 4, 5]), "own.3": torch.tensor([10, 11, 12])}


def test_a_trace_comes_back_as_it_was_written(tmp_path: Path) -> None:
    written = write(tmp_path / "t.jsonl", header(), one_round(), RECORDED)
    back = read(tmp_path / "t.jsonl")
    assert back.header == written.header == header(tensors_sha256=file.digest_of(RECORDED))
    assert back.events == tuple(one_round()) and back.sha256 == written.sha256
    assert all(torch.equal(back.recorded[name], tensor) for name, tensor in RECORDED.items())


def test_a_trace_is_refused_when_any_byte_of_its_tensors_changes(tmp_path: Path) -> None:
    write(tmp_path / "t.jsonl", header(), one_round(), RECORDED)
    stored = beside(tmp_path / "t.jsonl").read_bytes()
    for at in range(len(stored)):
        beside(tmp_path / "t.jsonl").write_bytes(stored[:at] + bytes([stored[at] ^ 1]) + stored[at + 1 :])
        with pytest.raises(BadInput, match=r"t\.safetensors"):
            read(tmp_path / "t.jsonl")


@pytest.mark.parametrize(("name", "tensor", "complaint"), [
    ("own.3", [9, 255 << 32], r"own\.3\[1\]: found 1095216660480, expected a token of the vocabulary or -1, -1 to 63"),
    ("own.4", [-1, 11, 12, 13], r"own\.4\[0\]: found -1, expected a token of the vocabulary, 0 to 63"),
    ("own.5", [4, 13], r"own\.5\[0\]: found 4, expected a number of accepted drafts, 0 to 3"),
    ("own.5", [3, 64], r"own\.5\[1\]: found 64, expected a token of the vocabulary, 0 to 63"),
    ("own.0", [1], r"own\.0: found a tensor, expected prompt\.N for an admit event N"),
    ("own.x", [1], r"own\.x: found a tensor"), ("kv.3", [1], r"kv\.3: found a tensor"),
    ("own.3", [[1]], r"own\.3: found torch\.int64 of shape \[1, 1\], expected an int64 vector"),
    ("own.3", [0.5], r"own\.3: found torch\.float32 of shape \[1\], expected an int64 vector"),
    ("prompt.0", [1, 2], r"prompt\.0: found other tokens, expected the prompt of t\.jsonl line 2"),
])  # fmt: skip
def test_a_recorded_value_out_of_range_is_refused_without_a_digest(
    tmp_path: Path, name: str, tensor: list[Any], complaint: str
) -> None:
    path = seal(tmp_path / "t.jsonl", lines_of(header(), one_round()), {**RECORDED, name: torch.tensor(tensor)})
    with pytest.raises(BadInput, match=complaint):
        read(path)


def test_a_trace_without_a_digest_is_read_and_can_be_stamped(tmp_path: Path) -> None:
    path = seal(tmp_path / "t.jsonl", lines_of(header(), one_round()), RECORDED)
    before, (warning,) = path.read_bytes().splitlines(), read(path).warnings
    assert warning.startswith("t.jsonl has no digest of its tensors") and f"instep show {path} --stamp" in warning
    stamped = stamp(path)
    assert stamped.header.tensors_sha256 == file.digest_of(RECORDED) and not read(path).warnings
    assert path.read_bytes().splitlines()[1:-1] == before[1:-1]


def test_show_names_a_missing_digest_and_stamps_the_trace(tmp_path: Path, instep: Runner) -> None:
    path = seal(tmp_path / "t.jsonl", lines_of(header(), one_round()), RECORDED)
    (warning,) = read(path).warnings
    assert warning in instep("show", path).out
    assert instep("show", path, "--stamp").code == 0 and warning not in instep("show", path).out


def test_every_committed_trace_has_a_digest_of_its_tensors() -> None:
    traces = [path for path in FIXTURES.rglob("*.jsonl") if path.parent.name != "example" and "live" not in path.parts]
    assert len(traces) > 30 and not [path for path in traces if read(path).warnings]


def test_lines_are_readable_json_with_the_header_first(tmp_path: Path) -> None:
    write(tmp_path / "t.jsonl", header(), one_round(), {})
    lines = (tmp_path / "t.jsonl").read_text().splitlines()
    assert msgspec.json.decode(lines[0])["claim"] == header().claim
    assert msgspec.json.decode(lines[1]) == {"event": "admit", "request": "a", "prompt": [1, 2, 3, 4, 5]}
    assert msgspec.json.decode(lines[-1])["events"] == len(one_round())


def edited(number: int) -> Callable[[list[bytes]], list[bytes]]:
    """A letter of this line, counted from 1."""
    return lambda lines: [
        line.replace(b'"a"', b'"z"').replace(b"side by side", b"apart") if at == number else line
        for at, line in enumerate(lines, 1)
    ]


@pytest.mark.parametrize(("change", "says"), [
    *((lambda lines, kept=kept: lines[:kept], f"line {kept}: found no footer.*the trace was cut")
      for kept in (1, 4, 8)),
    (lambda lines: [*lines[:-1], lines[-1][:-10]], ".*the trace was cut"),
    *((edited(number), f"line {number}: .*the trace was edited") for number in (1, 2, 5, 9)),
    (lambda lines: lines[:3] + lines[4:], "line 4: .*the trace was edited"),
])  # fmt: skip
def test_a_trace_whose_lines_changed_is_refused(
    tmp_path: Path, change: Callable[[list[bytes]], list[bytes]], says: str
) -> None:
    path = tmp_path / "t.jsonl"
    write(path, header(), one_round(), {})
    path.write_bytes(b"".join(change(path.read_bytes().splitlines(keepends=True))))
    with pytest.raises(BadInput, match=f"t.jsonl {says}"):
        read(path)


def test_the_tensors_of_another_trace_are_refused(tmp_path: Path) -> None:
    one, other = tmp_path / "one.jsonl", tmp_path / "other.jsonl"
    write(one, header(), one_round(), {})
    write(other, header(name="other"), one_round(), {})
    beside(one).write_bytes(beside(other).read_bytes())
    with pytest.raises(BadInput, match="not of one recording"):
        read(one)
    beside(one).unlink()
    with pytest.raises(BadInput, match=r"one.safetensors: found no such file"):
        read(one)


@pytest.mark.parametrize(("line", "complaint"), [
    (b'{"event":"draft","requests":["a"],"picks":[[1,"x"]]}', r"line 2: picks\[0\]\[1\]: found `str`"),
    (b'{"event":"teleport","request":"a"}', r"line 2: event: found invalid value 'teleport'"),
    (b'{"event":"idle","surprise":1}', r"line 2: found object contains unknown field `surprise`"),
    (b'{"event":"admit","request":"a"}', r"line 2: found object missing required field `prompt`"),
    (b'{"event":"forward","rows":[{"request":"a","kind":"vrify"}]}', r"line 2: rows\[0\].kind: found invalid enum"),
    (b"not json", "line 2: found"),
])  # fmt: skip
def test_a_line_outside_the_schema_names_its_field(tmp_path: Path, line: bytes, complaint: str) -> None:
    path = seal(tmp_path / "t.jsonl", [msgspec.json.encode(header()), line])
    with pytest.raises(BadInput, match=complaint):
        read(path)


def test_max_positions_is_optional_in_a_header(tmp_path: Path) -> None:
    assert b"max_positions" not in lines_of(header(), [])[0] and header().room().request_positions == 64
    room = msgspec.structs.replace(ROOM, max_positions=41)
    back = read(seal(tmp_path / "t.jsonl", lines_of(header(capacity=room), one_round()))).header
    assert (back.room().request_positions, back.room().request_pages) == (41, 6)


def test_another_schema_version_is_refused_first(tmp_path: Path) -> None:
    first = msgspec.json.encode({"schema": 99, "shape_of_things": "to come"})
    with pytest.raises(BadInput, match="line 1: schema: found 99, expected 1"):
        read(seal(tmp_path / "t.jsonl", [first]))


@pytest.mark.parametrize(("changes", "complaint"), [
    ({"num_steps": 5}, "num_steps: found 5"),
    ({"candidates": (3, 40), "adaptive": None}, "capacity.max_tokens: found 32, expected at least 41"),
    ({"capacity": msgspec.structs.replace(ROOM, max_positions=3)},
     "capacity.max_positions: found 3, expected 4, the widest window, to 64, what all pages hold"),
    ({"capacity": msgspec.structs.replace(ROOM, max_positions=65)}, "capacity.max_positions: found 65, expected 4"),
    ({"stop": 64}, "stop: found 64"),
    ({"lag": -1}, "lag: found -1"),
    ({"adaptive": {"ema_alpha": 7}}, "adaptive.ema_alpha: found 7"),
    ({"recording": Recording("block")}, "drafter: found nothing, expected a block drafter"),
    ({"drafter": Model("m/block", "", "", 64, 0)}, "drafter: found m/block, expected a block drafter in a trace whose"),
    ({"recording": Recording("block"), "drafter": Model("m/block", "", "", 63, 0)},
     "drafter.vocab: found 63, expected 64, as in the checkpoint"),
])  # fmt: skip
def test_a_header_that_contradicts_itself_names_the_field(
    tmp_path: Path, changes: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(BadInput, match=complaint):
        read(seal(tmp_path / "t.jsonl", lines_of(header(**changes), one_round())))


def test_a_trace_is_refused_with_another_block_drafter() -> None:
    trace = read(fixtures() / "traces" / "faults" / "block.jsonl")
    model = Checkpoint.open(fixtures() / "tiny", "block")
    Replay(trace, checkpoint=model)
    with pytest.raises(BadInput, match=r"drafter\.digest.*recorded with another drafter"):
        Replay(trace, checkpoint=replace(model, block_digest="0" * 64))


def test_a_reserved_or_repeated_slot_is_refused(tmp_path: Path) -> None:
    for slots in ((0, 1), (2, 2), ()):
        room = msgspec.structs.replace(header().capacity, slots=slots)
        with pytest.raises(BadInput, match=r"capacity\.slots"):
            read(seal(tmp_path / "t.jsonl", lines_of(header(capacity=room), one_round())))


def test_writing_leaves_both_files_or_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.jsonl"
    before = write(path, header(), one_round(), {}).sha256

    def refuse(*_: object, **__: object) -> bytes:
        raise ValueError("no tensors today")

    monkeypatch.setattr(file, "save", refuse)
    with pytest.raises(ValueError, match="no tensors"):
        write(path, header(name="second"), one_round(), {})
    assert read(path).sha256 == before
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["t.jsonl", "t.safetensors"]
