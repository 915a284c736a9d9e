"""`instep show`: every event of every committed trace in one line, and nothing of a trace that is illegal.

Leaves out: what an engine makes of the events.
"""

import shutil
from pathlib import Path

import pytest

from instep.trace.event_text import told
from instep.trace.file import read
from instep_proof.faults.catalogue import TRACES
from support.running.command import Runner, complaint

EVERY = sorted(TRACES.parent.rglob("*.jsonl"))


@pytest.mark.parametrize("path", EVERY, ids=lambda path: path.stem)
def test_every_event_is_shown_with_all_its_requests(path: Path) -> None:
    from instep_reference.contract.event_facts import named

    trace = read(path)
    lines = list(told(trace))
    assert [index for index, _, _ in lines] == list(range(len(trace.events)))
    for (_, kind, text), event in zip(lines, trace.events, strict=True):
        assert all(name in text for name in named(event)) and (text or kind == "idle")


def test_show_prints_trees_paths_and_the_capacity(instep: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    out = instep("show", TRACES / "branching.jsonl").out
    for line in (
        "a into slot 3: 1 token", "a: prompt 0 to 1 of 1; b: prompt 0 to 10 of 10; c: prompt 0 to 7 of 27",
        "b: 5 drafts, a tree 3 deep; a: 6 drafts, a tree 3 deep", "b: verifies 6 tokens after 10; c: prompt 7 to 14",
        "b: 2 of 5 drafts (nodes 1 4), now 13; a: 3 of 6 drafts (nodes 2 4 6), now 5", "c with 30 tokens, ready",
        "19 events, 3 requests", "trees of 8 nodes at most; drafter eagle",
    ):
        assert line in out, line
    drawn = instep("show", TRACES / "drawn.jsonl", "--request", "c").out
    assert "temperature 2.5, top-k 40" in drawn and "b into slot" not in drawn and "3 drafts a round" not in drawn


def test_unreadable_trace_is_refused_in_one_line(instep: Runner, tmp_path: Path) -> None:
    assert "expected one of a, b, c" in complaint(instep("show", TRACES / "branching.jsonl", "--request", "q"))
    assert "No such file" in complaint(instep("show", tmp_path / "none.jsonl"))
    for suffix in (".jsonl", ".safetensors"):
        shutil.copy(TRACES / f"branching{suffix}", tmp_path / f"cut{suffix}")
    lines = (tmp_path / "cut.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "cut.jsonl").write_text("".join(lines[:-2]))
    assert "cut.jsonl" in complaint(instep("show", tmp_path / "cut.jsonl"))


def test_the_version_is_printed_alone(instep: Runner) -> None:
    assert instep("--version").out.startswith("instep ")
