"""A failing trace shrinks to the events that its finding needs: legal after every cut, and no event more.

Leaves out: the search for a failing trace (`test_fuzz.py`).
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from instep.audit.audit import audit
from instep.campaign import shrink as shrinking
from instep.campaign.runner import TrialRunner
from instep.campaign.shrink import Shrunk, same_finding, shrink
from instep.diagnose import diagnose
from instep.run.replay import Replay
from instep.trace.cut_events import without_requests
from instep.trace.event_rules import EventRules, verified
from instep.trace.file import Trace, read
from instep.verdict import Comparison, Exit, Tier, Verdict
from instep_proof.faults.catalogue import TRACES, by_id
from instep_reference.contract import engine as e
from instep_reference.contract.errors import BadInput
from instep_reference.contract.place_names import Place
from support.inputs.recordings import PROMPTS, TINY, lines, recorded, said, shown, tensors
from support.running.command import Runner, complaint
from support.running.covering import WHOLE
from support.running.planting import planted_here

pytestmark = pytest.mark.slow  # whole replays

FOLDER = TRACES.parent
ANSWERS = {"a": [32, 114, 101, 115, 117], "b": [10, 32, 32, 32, 32], "c": [44, 32, 51, 44, 32]}  # of fixtures/tiny


def trace_of(name: str) -> Trace:
    return read(FOLDER / f"{name}.jsonl")


def smaller_by_one(trace: Trace) -> Iterator[Trace]:
    """The trace without one event, or without one request, as far as that is legal."""
    events = trace.events
    cuts = [events[:at] + events[at + 1 :] for at in range(len(events))]
    cuts += [without_requests(events, [one.request]) for one in events if isinstance(one, e.Admit)]
    for cut in cuts:
        try:
            yield verified(replace(trace, events=cut, recorded={}))
        except BadInput:
            continue


# Without an engine: what fails is read from the events, so that every kind of cut meets every kind of trace.

Fails = Callable[[Trace], bool]


@contextmanager
def without_engine(monkeypatch: pytest.MonkeyPatch, fails: Fails) -> Iterator[list[Trace]]:
    """`shrink` asks `fails` in place of a replay; the block gets every trace that it would have run."""
    ran = list[Trace]()
    found = Comparison("check", Tier.IDENTITY, 0, "commit", Place("trunk", 0, "state"), 1, 1.0, 0.0)

    def outcome(replay: Replay, trace: Trace, wanted: Any = None, **how: Any) -> Any:
        ran.append(trace)
        at = replace(found, event=len(trace.events) - 1)
        return (SimpleNamespace(verdict=Verdict([at])), {}) if fails(trace) else None

    with monkeypatch.context() as patched:
        patched.setattr(shrinking, "_outcome", outcome)
        yield ran


def widths(trace: Trace) -> bool:
    """Two requests verify windows of different widths in one forward, after another round of both."""
    rules, seen = EventRules(trace.header), list[set[int]]()
    for event in trace.events:
        verify = [row.request for row in getattr(event, "rows", ()) if row.kind == "verify"]
        seen += [{len(rules.table.live[name].window) for name in verify}] * (len(verify) > 1)
        rules.apply(event)
    return any(len(one) > 1 for one in seen[1:])


def path_in_a_tree(trace: Trace) -> bool:
    """A path of two accepted drafts in a tree leaves out a node between them."""
    return any(path.nodes[1:] and path.nodes[1] > path.nodes[0] + 1 for event in trace.events
               if isinstance(event, e.Commit) for path in event.accepted or ())  # fmt: skip


def after_a_finish(trace: Trace) -> bool:
    """A prompt runs next to a window, after another request finished."""
    finished, seen = False, False
    for event in trace.events:
        finished |= isinstance(event, e.Finish)
        kinds = {row.kind for row in event.rows} if isinstance(event, e.Forward) else set()
        seen |= finished and kinds >= {"prefill", "verify"}
    return seen


def loaded(trace: Trace) -> bool:
    """A copy is loaded by a request of the second engine."""
    receivers = {event.request for event in trace.events if isinstance(event, e.Admit) and event.receiver}
    return any(isinstance(event, e.Load) and event.request in receivers for event in trace.events)


def inner_prefix(trace: Trace) -> bool:
    """A chunk with a prefix inside it is the last of its prompt, and draws its token."""
    return any(row.root is not None and any(row.inner) and row.uniforms for event in trace.events
               if isinstance(event, e.Forward) for row in event.rows)  # fmt: skip


def capped(trace: Trace) -> bool:
    """A commit is cut by a cap above 0."""
    return any(0 < cap < len(path.nodes) for event in trace.events if isinstance(event, e.Commit)
               for cap, path in zip(event.caps, event.accepted or (), strict=False))  # fmt: skip


@pytest.mark.parametrize(("name", "fails", "most"), [
    ("faults/unread", widths, 8), ("faults/branching", path_in_a_tree, 5), ("lifecycle/overlapped", after_a_finish, 7),
    ("faults/transfer", loaded, 8), ("faults/inner", inner_prefix, 2), ("faults/caps", capped, 5),
])  # fmt: skip
def test_every_kind_of_trace_shrinks_to_its_minimum(
    name: str, fails: Fails, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = trace_of(name)
    replay = Replay(trace)
    assert fails(trace), "the whole trace"
    with without_engine(monkeypatch, fails) as ran:
        found = shrink(replay, TrialRunner())
        monkeypatch.setattr(shrinking, "legal_part", lambda header, events, overlap: events)
        unrepaired = shrink(replay, TrialRunner())
    for one in ran[1:]:
        verified(one)
    assert found is not None and found.minimal and fails(found.trace), found
    assert len(found.trace.events) <= most, found.trace.events
    assert not any(map(fails, smaller_by_one(found.trace))), found.trace.events
    assert unrepaired is not None and unrepaired.runs > len(ran) - found.runs - 2, "it met illegal cuts and ran none"


def test_shrinking_ends_early_with_the_smallest_trace_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    replay, kept = Replay(trace_of("faults/branching")), list[int]()
    with without_engine(monkeypatch, path_in_a_tree):
        late = shrink(replay, TrialRunner(0.0))
    assert late is not None and not late.minimal and late.trace.events == replay.trace.events and not late.runs

    def keep(shrunk: Shrunk) -> None:
        kept.append(len(shrunk.trace.events))
        if len(kept) == 3:
            raise KeyboardInterrupt

    with without_engine(monkeypatch, path_in_a_tree):
        pressed = shrink(replay, TrialRunner(), keep=keep)
    assert pressed is not None and pressed.interrupted and not pressed.minimal
    assert len(pressed.trace.events) == kept[2] < kept[0], "Ctrl-C"


# With an engine


def test_command_writes_the_smallest_trace_and_how_to_replay_it(
    instep: Runner, trace: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A root of another replica needs two requests, and no draft."""
    fault, out = by_id()["group-roots-of-replica-0"], tmp_path / "out.json"
    words = (*fault.how.words(), "--no-ladder")
    monkeypatch.chdir(tmp_path)
    says = complaint(instep("shrink", trace.path, *words, "--until", 3))
    assert "no finding in any run" in says and not [*tmp_path.iterdir()], "right engine"
    with planted_here(*fault.edits):
        ran = instep("shrink", trace.path, *words, "--json", out)
        small = read(tmp_path / "small-shrunk.jsonl")
        again = instep("replay", small.path, *words)
    assert ran.code == again.code == Exit.DIVERGED, ran
    assert [type(event) for event in small.events] == [e.Admit, e.Admit, e.Forward]
    assert "instep replay small-shrunk.jsonl --ops ledger --until 2 --dp 2" in ran.out, ran.out
    assert f"requests 3 to 2, events {len(trace.events)} to 3" in ran.out and "no further cut keeps" in ran.out
    told = json.loads(out.read_text())["shrunk"]
    assert told["minimal"] and told["parts"]["tokens"] == [11, 2] and told["file"] == small.path.name
    assert instep("replay", small.path, *words).code != Exit.DIVERGED, "without the fault"


@WHOLE
@pytest.mark.parametrize(("name", "most"), [
    ("tree-as-chain-state", 4), ("device-width-of-the-neighbour", 4), ("pages-of-the-exact-length", 5),
    ("transfer-scratch-columns", 8),
])  # fmt: skip
def test_planted_fault_shrinks_to_few_events_of_which_each_is_needed(name: str, most: int) -> None:
    fault = by_id()[name]
    replay = Replay(trace_of(f"faults/{fault.trace}"), fault.how)
    with planted_here(*fault.edits):
        found = shrink(replay, TrialRunner())
        assert found is not None and found.minimal and len(found.trace.events) <= most
        wanted = same_finding(found.finding)
        for one in smaller_by_one(found.trace):
            smaller = Replay(one, fault.how)
            findings = diagnose(smaller).verdict.findings
            assert not findings or same_finding(findings[0]) != wanted, one.events


# A recording of somebody's engine


def test_prompts_and_answers_shrink_to_the_request_with_the_wrong_token(instep: Runner, tmp_path: Path) -> None:
    requests = [{"prompt": PROMPTS[name], "tokens": tokens} for name, tokens in ANSWERS.items()]
    file, words = said(tmp_path / "said.jsonl", requests), ("--model", TINY, "--dtype", "float32")
    out = tmp_path / "small.jsonl"
    says = complaint(instep("shrink", file, *words, "--out", out))
    assert "no finding" in says and not out.exists(), "right answers"
    said(file, [*requests[:1], {**requests[1], "tokens": [*ANSWERS["b"][:2], 0, *ANSWERS["b"][3:]]}, *requests[2:]])
    assert "--until: found a recording" in complaint(instep("shrink", file, *words, "--until", 3))
    ran = instep("shrink", file, *words, "--out", out)
    (left,) = lines(out)
    assert ran.code == Exit.DIVERGED and "requests 3 to 1, tokens of each 5 to 3" in ran.out, ran
    assert left["request"] == "line 2" and left["tokens"] == [*ANSWERS["b"][:2], 0]
    assert instep("audit", out, *words).code == Exit.DIVERGED


@WHOLE
def test_recording_shrinks_to_the_request_and_the_event_of_its_finding(instep: Runner, tmp_path: Path) -> None:
    made, out = recorded(tmp_path / "made", tokens=4), tmp_path / "small"
    event = next(number for number, one in enumerate(lines(made / "events.jsonl"))
                 if one["event"] == "commit" and "b" in one["requests"])
    tensors(made, event, "state.b.2", lambda state: state.flip(0))
    ran = instep("shrink", made, "--model", TINY, "--out", out)
    assert ran.code == Exit.DIVERGED and "requests 3 to 1" in ran.out and "no further cut" in ran.out, ran
    events = lines(out / "events.jsonl")
    assert events[-1]["event"] == "commit" and events[-1]["requests"] == ["b"] and len(events) <= 8
    numbers = [int(file.stem) for file in (out / "tensors").iterdir()]
    assert {name.split(".")[1] for number in numbers for name in shown(out, number)} == {"b"}
    again = audit(out, TINY)
    assert again.exit is Exit.DIVERGED and again.replay is not None
    assert again.replay.verdict.findings[0].place == Place("trunk", 2, "state")
