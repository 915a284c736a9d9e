"""Recordings of two released SGLangs in `fixtures/live`, judged, and cut to shorter ones."""

import json
from pathlib import Path
from typing import Any

import pytest

from instep.audit.audit import Audit, audit, opened
from instep.audit.result_data import of
from instep.lru_cache import EVENTS, closed
from instep.report.document_choice import document_of
from instep.verdict import Exit
from peers.live import TOP
from peers.live.cut import cut
from support.inputs.recordings import TINY

pytestmark = pytest.mark.slow

LIVE = TOP / "fixtures" / "live"


def judged(recording: Path, events: str, **options: Any) -> Audit:
    with closed(EVENTS):
        return audit(recording, TINY, events=events, **options)


def test_sglang_0_5_12_continues_a_request_from_the_state_of_another_one() -> None:
    found = judged(LIVE / "sglang-0.5.12", "20:29", first=True)
    assert found.exit is Exit.DIVERGED and found.replay is not None
    lines = document_of(of(found).data()).messages[0].splitlines()
    assert "event 26 commit" in lines[1] and "layer 0 recurrent state, slot 2" in lines[1]
    assert lines[2].strip().startswith('holds the state of request "c"')
    assert "first commit after steps 3 -> 1" in found.replay.remarks[0]
    assert "batch rows 1 and 2 of 6" in found.replay.remarks[0]


def test_sglang_0_5_13_is_right_after_the_same_change_of_steps() -> None:
    found = judged(LIVE / "sglang-0.5.13", "23:35")
    assert found.exit is Exit.AGREED and found.replay is not None and not found.verdict.findings
    assert found.verdict.elements + found.replay.verdict.elements > 400_000


def test_a_cut_recording_has_only_the_chosen_requests(tmp_path: Path) -> None:
    whole = LIVE / "sglang-0.5.12"
    names = [json.loads(line)["request"] for line in (whole / "events.jsonl").read_text().splitlines()[:3]]
    count = cut(whole, tmp_path / "short", names[1:])
    read = opened(tmp_path / "short")
    assert len(read.events) == count == len(opened(whole).events) - 1  # without one admission
    assert {one.request for one in read.events if hasattr(one, "request")} == set(names[1:])
    tensors = {event: set(read.tensors(event)) for event in range(count) if read.tensors(event)}
    assert list(tensors) == [21, 25, 28] and not any(names[0] in name for found in tensors.values() for name in found)
    assert len(tensors[25]) == 2 * (3 + 3 + 1)  # conv windows and states of three layers, and slots
    assert all(one.rows.keys() == one.slots.keys() == set(names[1:]) and one.batch == 6 for one in read.batches)
    with pytest.raises(SystemExit, match="no request z"):
        cut(whole, tmp_path / "other", ["z"])
