"""The driver turns prompts and a policy into complete, legal events, and carries out all that the policy requires.

Leaves out: what the engine computes; a small random reference makes the choices.
"""

from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from instep.trace.event_rules import EventRules, verified
from instep.trace.file import Trace, read
from instep.trace.policy import Arrival, ScheduledAction, Steps, read_policy, read_prompts
from instep_reference.contract import engine as e
from instep_reference.contract.errors import BadInput
from support.inputs.traces import PROMPTS, ROOM, policy, recorded


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return recorded(tmp_path_factory.mktemp("drive"))


def of(trace: Trace, kind: type) -> list:
    return [event for event in trace.events if isinstance(event, kind)]


def ended(trace: Trace) -> dict[str, tuple[int, ...]]:
    """The tokens of every request according to the rules."""
    rules = EventRules(trace.header)
    for event in trace.events:
        rules.apply(event)
    assert not rules.table.live
    return {standing.request: standing.said for standing in rules.table.ended}


def test_a_recorded_trace_is_legal_and_complete(trace: Trace) -> None:
    assert verified(read(trace.path)).events == trace.events
    assert all(draft.picks is not None for draft in of(trace, e.Draft))
    assert all(commit.accepted is not None for commit in of(trace, e.Commit))


def test_everything_the_policy_asks_for_happens(trace: Trace) -> None:
    assert [event.num_steps for event in of(trace, e.SetNumSteps)] == [3, 0, 3]
    for kind in (e.Preempt, e.Resume, e.Save, e.Load, e.Idle):
        assert len(of(trace, kind)) == 1, kind
    aborted = next(i for i, event in enumerate(trace.events) if isinstance(event, e.Abort) and event.request == "c")
    assert isinstance(trace.events[aborted - 1], e.Forward)
    assert set(ended(trace)) == {"a", "b", "c", "d"}


def test_prompts_run_in_the_chunks_they_were_given(trace: Trace) -> None:
    chunks = [row.tokens for event in of(trace, e.Forward) for row in event.rows
              if row.request == "a" and row.kind == "prefill"]
    assert chunks == [7, 3, 1, 7, 2]


def test_rows_are_mixed_and_the_batch_order_turns(trace: Trace) -> None:
    kinds = [{row.kind for row in event.rows} for event in of(trace, e.Forward)]
    assert {"prefill", "verify"} in kinds
    orders = {tuple(row.request for row in event.rows) for event in of(trace, e.Forward) if len(event.rows) == 2}
    assert any(order[::-1] in orders for order in orders)


def test_forced_acceptance_is_ragged(trace: Trace) -> None:
    counts = [len(path.nodes) for commit in of(trace, e.Commit) for path in commit.accepted]
    assert min(counts) == 0 and max(counts) == 3 and len(set(counts)) > 2


def test_the_same_policy_gives_the_same_events(trace: Trace, tmp_path: Path) -> None:
    assert recorded(tmp_path).events == trace.events


def test_engine_answers_are_stored_next_to_the_trace(trace: Trace) -> None:
    admits = [index for index, event in enumerate(trace.events) if isinstance(event, e.Admit)]
    assert [tuple(trace.recorded[f"prompt.{index}"].tolist()) for index in admits] == [
        trace.events[index].prompt for index in admits
    ]
    for index, event in enumerate(trace.events):
        if isinstance(event, e.Draft):
            assert trace.recorded[f"own.{index}"].numel() == sum(map(len, event.picks))


@pytest.mark.slow
def test_free_acceptance_follows_the_engine_and_a_stop_token_ends_a_path(tmp_path: Path) -> None:
    arrivals = (Arrival("a", "few", max_new=24), Arrival("b", "one", max_new=24))
    free = recorded(tmp_path, policy(arrivals=arrivals, deeds=(), accept=(), steps=(Steps(1, 3),)))
    said = ended(free)
    stop = said["a"][7]
    ending = recorded(tmp_path, policy(arrivals=arrivals, deeds=(), accept=(), steps=(Steps(1, 3),), stop=stop))
    for name, tokens in ended(ending).items():
        cut = said[name].index(stop) + 1 if stop in said[name] else len(said[name])
        assert tokens == said[name][:cut]


def test_the_controller_is_followed_with_its_lag(tmp_path: Path) -> None:
    quick = {"candidate_steps": [1, 3], "warmup_batches": 1, "update_interval": 1, "ema_alpha": 1.0}
    told = policy(follow=True, steps=(), deeds=(), adaptive=quick, accept=(0, 3))
    counts = {lag: [event.num_steps for event in of(recorded(tmp_path, replace(told, lag=lag)), e.SetNumSteps)]
              for lag in (0, 2)}
    assert counts[0], "the controller never wished for anything"
    assert counts[0] != counts[2]


def test_an_action_that_is_never_due_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match='found abort "nobody", never possible from round 1 on'):
        recorded(tmp_path, policy(deeds=(ScheduledAction(1, "abort", "nobody"),)))
    assert not list(tmp_path.glob("small*"))


def test_a_prompt_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match='found prompt "novel"'):
        recorded(tmp_path, policy(arrivals=(Arrival("a", "novel"),), deeds=()))


def test_request_near_its_last_position_decodes_without_drafts(tmp_path: Path) -> None:
    """Positions are counted with the drafts in flight; the others go on as they were."""
    short = replace(ROOM, max_positions=23)
    trace = recorded(tmp_path, policy(capacity=short, deeds=(), steps=(), num_steps=3, arrivals=(
        Arrival("a", "more", max_new=30), Arrival("b", "one", max_new=12))))
    assert read(trace.path).header.room().max_positions == 23
    last = {}
    for row in (row for event in of(trace, e.Forward) for row in event.rows):
        last.setdefault(row.request, []).append(row.kind)
    assert last["a"] == ["prefill", "decode", "decode", "decode"]  # 20, and then no window of 4 fits
    assert last["b"].count("verify") > 2 and "decode" not in last["b"]
    mixed = [{row.kind for row in event.rows} for event in of(trace, e.Forward)]
    assert {"verify", "decode"} in mixed
    said = ended(trace)
    assert len(said["a"]) == 4 and len(said["b"]) >= 12
    window = recorded(tmp_path, policy(capacity=replace(ROOM, max_positions=24), deeds=(), steps=(), num_steps=3))
    assert [row.kind for event in of(window, e.Forward) for row in event.rows if row.request == "a"][5] == "verify"


def test_a_prompt_longer_than_a_request_may_be_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match='prompt "more": found 20 tokens, expected at most 19, the positions that'):
        recorded(tmp_path, policy(capacity=replace(ROOM, max_positions=19)))
    trace = recorded(tmp_path, policy(capacity=replace(ROOM, max_positions=20), deeds=()))
    assert len(ended(trace)["a"]) == 1


def test_policies_and_prompts_are_read_strictly(tmp_path: Path) -> None:
    file = tmp_path / "p.json"
    file.write_text('[{"name": "x", "text": "caf\\u00e9"}, {"name": "y", "tokens": [3, 4], "from": "here"}]')
    assert read_prompts(file) == {"x": (99, 97, 102, 0xE9), "y": (3, 4)}
    for text, complaint in (
        ('[{"name": "x"}]', "neither"), ('[{"name": "x", "text": "\\u0100"}]', "above 255"),
        ('[{"name": "x", "txt": "a"}]', "unknown field `txt`"), ("[{", "truncated"),
    ):
        file.write_text(text)
        with pytest.raises(BadInput, match=complaint):
            read_prompts(file)
    file.write_text('{"name": "x"}')
    with pytest.raises(BadInput, match="missing required field"):
        read_policy(file)
    refused = policy(deeds=(ScheduledAction(1, "refused"),))
    idle = policy(deeds=(ScheduledAction(1, "idle"), ScheduledAction(1, "idle", of=e.Idle())))
    for told, complaint in ((refused, r"deeds\[0\].of: found no event"), (idle, r"deeds\[1\].of: found an event")):
        file.write_bytes(msgspec.json.encode(told))
        with pytest.raises(BadInput, match=complaint):
            read_policy(file)


def test_prompts_of_these_tests_reach_over_several_chunks() -> None:
    assert len(PROMPTS["more"]) > 2 * 7
