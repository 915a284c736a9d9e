"""Correct runs pass with room to spare, and every kind of damage is named where it was done.

Small errors in a 16-bit run are hidden at a layer's boundary, and found from an op's own inputs. Leaves out: states
that lean towards wrong ones (`test_directed.py`), pools (`test_memory.py`), and how a piece is run again from the
subject's own rows (`test_oracle.py`).
"""

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from instep.checks import for_labels, for_numbers
from instep.checks.error_measurement import Spot, blocks, measured, relative_error
from instep.checks.exact_labels import Labels, states_of_window
from instep.checks.trace_bookkeeping import Identity, greedy
from instep.checks.unchanged_bytes import Bytes
from instep.cli.record import make
from instep.oracle.oracle import Oracle
from instep.oracle.storage_rounding import before_rounding
from instep.run.replay import Replay
from instep.setting import Setting
from instep.tier_allowances import allowed
from instep.trace.file import Trace, read
from instep.trace.policy import Arrival, Policy
from instep.verdict import Comparison, Exit, Tier
from instep.watch.event_context import EventContext
from instep.watch.facts_for_later_events import last_forward
from instep.watch.rows_by_request import row_spans, rows
from instep_proof.faults.catalogue import TRACES
from instep_proof.faults.catalogue.fault import Edit
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.engine import Admit, Commit, Committed, Draft, Forward, Idle
from instep_reference.contract.place_names import AFTER_LAYERS, STAGE_LEVEL, Place
from support.inputs import check_contexts as m
from support.inputs.check_contexts import Redrawn
from support.inputs.few_channels import few_channels
from support.inputs.traces import ROOM, recorded
from support.running.covering import WHOLE, few
from support.running.planting import planted_here
from support.running.verdicts import agreed, first_finding

pytestmark = pytest.mark.slow  # whole runs in several widths


@pytest.mark.parametrize(("found", "mistake"), [
    ([1, 3, 0], ""), ([3, 3, 2], "its cap is ignored, or all requests have the highest cap of the batch"),
    ([0, 2, 0], "its cap counts the bonus as a draft"),
    ([2, 3, 1], "its cap is one too high"), ([1, 3, 2], "its cap of 0 is taken for no cap"),
    ([0, 1, 2], "it has the cap of the row before"), ([3, 0, 1], "it has the cap of the next row"),
    ([0, 3, 1], "the caps are in the reverse order"), ([1, 1, 1], "all requests have the cap of the first row"),
    ([0, 0, 0], "all requests have the lowest cap of the batch"),
    ([2, 0, 1], "it has the cap that its row had at the commit before"),
    ([0, 2, 1], "it has the cap that it had at the commit before"), ([3, 0, 2], ""),
])  # fmt: skip
def test_wrong_caps_are_named_by_all_requests_of_a_commit(found: list[int], mistake: str) -> None:
    check = Identity()
    check.caps = {"b": 2, "a": 0, "c": 1}
    event = Commit(("a", "b", "c"), caps=(1, 3, 0))
    assert check._cap_mistake(event, found, whole=[3, 3, 2]) == mistake


# Events to the second step without drafts: by then every op has run, and each kind of event wrote a state.
SECOND_PLAIN = 20
FINAL = Place("trunk", AFTER_LAYERS, "final")


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Two layers of GDN, as an error in the second one is not one of the first, and one of attention."""
    return m.checkpoint(tmp_path_factory.mktemp("checks"), num_hidden_layers=3, layer_types=m.TWO_AND_ONE)


@pytest.fixture(scope="module")
def events(opened: Checkpoint) -> list[Any]:
    return m.events_of(opened)[: m.ALONE]


@pytest.fixture(scope="module")
def correct(opened: Checkpoint, events: list[Any]) -> list[EventContext]:
    return m.run(opened, events)


@pytest.fixture(scope="module")
def labelled(opened: Checkpoint, events: list[Any]) -> list[EventContext]:
    return m.run_labels(opened, events)


def numbers(
    opened: Checkpoint, redrawn: Redrawn, activation: torch.dtype = torch.float32, state: torch.dtype = torch.float32
) -> tuple[Any, ...]:
    return for_numbers(Oracle(opened, m.declared(activation, state), torch.float32), redrawn)


def index_of(contexts: list[EventContext], kind: type, holds: Callable[..., Any] = lambda context: True) -> int:
    return next(context.index for context in contexts if isinstance(context.event, kind) and holds(context))


@pytest.fixture(scope="module")
def found(opened: Checkpoint, events: list[Any]) -> Callable[..., Any]:
    """The findings at the last event; nothing may be found before it. Checks look back one round at most."""
    redrawn = m.Redrawn(opened, events)

    def found(contexts: list[Any], *, explain: bool = True) -> list[Any]:
        looked_at = [context for context in contexts[:-4] if isinstance(context.event, Admit)] + contexts[-4:]
        verdict = m.judge(looked_at, numbers(opened, redrawn), explain=explain)
        assert verdict.exit == Exit.DIVERGED
        assert {finding.event for finding in verdict.findings} == {contexts[-1].index}
        return verdict.findings

    return found


@few(1)
@pytest.mark.parametrize(("activation", "state", "until"), [
    pytest.param(torch.float32, torch.float32, SECOND_PLAIN, id="fp32"),
    pytest.param(torch.float32, torch.float32, m.ALONE, id="fp32-all", marks=WHOLE),
    pytest.param(torch.bfloat16, torch.float32, SECOND_PLAIN, id="bf16", marks=WHOLE),
    pytest.param(torch.bfloat16, torch.bfloat16, SECOND_PLAIN, id="bf16-state"),
])  # fmt: skip
def test_a_correct_run_agrees_in_every_tier_with_room_to_spare(
    request: pytest.FixtureRequest, opened: Checkpoint, events: list[Any], activation: torch.dtype, state: torch.dtype,
    until: int,
) -> None:
    fp32 = activation == state == torch.float32
    run = request.getfixturevalue("correct") if fp32 else m.run(opened, events[:until], activation, state)
    contexts = run[:until]
    verdict = m.judge(contexts, numbers(opened, m.Redrawn(opened, events, activation, state), activation, state))
    assert verdict.exit == Exit.AGREED
    assert {c.tier for c in verdict.compared} == set(Tier)
    assert all(c.elements > 0 for c in verdict.compared)
    used = sorted(c.used for c in verdict.compared)
    assert used[99 * len(used) // 100] < 0.5
    # T3 runs free, and its largest part depends on the order of a library's sums: 0.912 was seen.
    assert max(c.used for c in verdict.compared if c.tier is not Tier.PROPAGATED) < 0.9


def test_a_correct_run_of_labels_agrees_exactly(labelled: list[EventContext]) -> None:
    verdict = agreed(m.judge(labelled, for_labels()))
    assert max(c.worst for c in verdict.compared) == 0


@pytest.mark.parametrize("made", [Bytes, Identity, Labels])
def test_a_check_remembers_nothing_of_the_events_before(labelled: list[EventContext], made: type) -> None:
    """A check that is built for every event gives the same results as one that saw all events."""
    old = made()
    for context in labelled:
        assert list(made()(context)) == list(old(context))


def test_the_run_has_what_the_checks_need(correct: list[EventContext]) -> None:
    kinds = {type(context.event).__name__ for context in correct}
    assert kinds >= {"Admit", "Draft", "Forward", "Commit", "SetNumSteps", "Preempt", "Resume", "Finish", "Idle"}
    assert any(span.count > 4 for context in correct for span in row_spans(context, "trunk") if span.kind == "prefill")
    commits = [context.event for context in correct if isinstance(context.event, Commit)]
    assert {len(path.nodes) for commit in commits for path in commit.accepted} >= {0, 1, 2, 3}


@few(7)
@pytest.mark.parametrize("component", ["normed", "qkv", "z", "b", "mixed", "k", "log_decay", "beta", "core", "gated",
                                       "mixer", "residual", "mlp", "hidden"])  # fmt: skip
def test_a_component_that_is_one_percent_off_is_the_first_finding(
    found: Callable[..., Any], correct: list[EventContext], component: str
) -> None:
    at, place = index_of(correct, Forward), Place("trunk", 1, component)
    damaged = m.spoiled(correct, at, lambda context: m.with_rows(context, place, lambda rows: rows * 1.01))
    first = found(damaged, explain=False)[0]
    assert (first.tier, first.place) == (Tier.DERIVED, place)
    assert "relative error" in first.diagnosis and "would pass at" in first.diagnosis


UPDATE = Place("trunk", 1, "update")


def test_an_update_that_is_one_percent_off_is_found_where_it_is_kept(found: Any, correct: list[EventContext]) -> None:
    """Only rows of a window: no engine keeps updates of other rows."""
    at = index_of(correct, Forward, lambda context: UPDATE in context.subject.places)
    assert all(UPDATE not in context.truth.places for context in correct[:at])
    damaged = m.spoiled(correct, at, lambda context: m.with_rows(context, UPDATE, lambda rows: rows * 1.01))
    first = found(damaged)[0]
    assert (first.tier, first.place) == (Tier.DERIVED, UPDATE)
    assert "relative error" in first.diagnosis and "would pass at" in first.diagnosis


def test_updates_that_are_due_and_not_shown_are_missing(found: Callable[..., Any], correct: list[EventContext]) -> None:
    at = index_of(correct, Forward, lambda context: UPDATE in context.subject.places)

    assert all(f.place == UPDATE for f in found(m.spoiled(correct, at, partial(m.without, place=UPDATE))))


def test_a_window_next_to_a_prompt_shows_updates_of_its_own_rows(correct: list[EventContext]) -> None:
    """No engine keeps updates of prompts; in a forward with a window they are zeros on every side."""
    mixed = [context for context in correct if isinstance(context.event, Forward)
             and {"verify", "prefill"} <= {row.kind for row in context.event.rows}]  # fmt: skip
    assert mixed
    for context in mixed:
        for span in row_spans(context, "trunk"):
            shown = [rows(side, UPDATE, span) for side in (context.truth, context.subject)]
            assert all(bool(x.any()) == (span.kind == "verify") for x in shown)


def test_a_token_that_the_state_knows_is_judged_by_what_its_update_is_the_difference_of() -> None:
    """v - S'k is next to nothing there: by its own size the last bit of a correct engine would be far too much."""
    v = torch.rand(1, 4, 16, dtype=torch.float64)
    truth, spot = 1e-9 * v, Spot("derived", Tier.DERIVED, 0, "forward", UPDATE, None, None)
    subject, exact = (truth + 1e-7 * v).float(), [truth.float().double()] * 2
    assert not measured(spot, subject, truth, exact).agrees
    assert measured(spot, subject, truth, exact, scale=v).agrees
    assert not measured(spot, subject + 1e-5 * v.float(), truth, exact, scale=v).agrees


def test_four_zeroed_rows_of_one_head_are_found_in_that_head_of_that_request(
    found: Callable[..., Any], correct: list[EventContext]
) -> None:
    at = index_of(correct, Forward, lambda context: any(s.count >= 5 for s in row_spans(context, "trunk")))
    span = next(s for s in row_spans(correct[at], "trunk") if s.count >= 5)

    def zero(rows: torch.Tensor) -> torch.Tensor:
        rows[span.begin : span.begin + 4, 2] = 0
        return rows

    place = Place("trunk", 0, "core")
    first = found(m.spoiled(correct, at, lambda context: m.with_rows(context, place, zero)))[0]
    assert (first.place, first.request, first.head) == (place, span.request, 2)


@pytest.mark.parametrize(("component", "value", "kind"), [
    ("hidden", "nan", "NaN"), ("core", "nan", "NaN"), ("logits", "nan", "NaN"), ("hidden", "inf", "infinite"),
])
def test_infinite_numbers_never_pass_and_are_counted(
    found: Callable[..., Any], correct: list[EventContext], component: str, value: str, kind: str
) -> None:
    at = index_of(correct, Forward)
    place = Place("trunk", AFTER_LAYERS if component == "logits" else 0, component)

    def poison(rows: torch.Tensor) -> torch.Tensor:
        rows.view(-1)[-1] = float(value)
        return rows

    findings = found(m.spoiled(correct, at, lambda context: m.with_rows(context, place, poison)))
    assert findings[0].place == place
    assert re.match(rf"1 of \d+ numbers are not finite \({kind}\), the first at \(\d+, ", findings[0].diagnosis)


def test_two_swapped_requests_are_found_in_the_first_thing_they_read(found: Any, correct: list[EventContext]) -> None:
    at = index_of(correct, Forward, lambda context: len(row_spans(context, "trunk")) > 1)
    place = Place("trunk", STAGE_LEVEL, "embedding")
    findings = found(m.spoiled(correct, at, lambda context: m.with_rows(context, place, lambda r: r.flip(0))))
    assert findings[0].place == place


def test_a_missing_row_and_a_missing_place_are_reported(found: Callable[..., Any], correct: list[EventContext]) -> None:
    at = index_of(correct, Forward)
    short = m.spoiled(correct, at, lambda context: m.with_rows(context, FINAL, lambda rows: rows[:-1]))
    assert any(f"has {len(correct[at].truth.places[FINAL]) - 1} rows" in f.diagnosis for f in found(short))
    missing = m.spoiled(correct, at, partial(m.without, place=FINAL))
    assert any(f.place == FINAL and f.elements == 0 for f in found(missing))


def test_a_chain_that_reads_the_hidden_row_of_an_earlier_step_is_found_where_it_reads(
    found: Callable[..., Any], correct: list[EventContext]
) -> None:
    """The draft head's own y of step 1 goes into step 2; a stale one shows in what step 2 makes of it."""
    at = index_of(correct, Draft, lambda context: Place("chain.2", STAGE_LEVEL, "joined") in context.subject.places)
    stale = correct[at].subject.places[Place("chain.1", STAGE_LEVEL, "post_normed")]
    place = Place("chain.2", STAGE_LEVEL, "post_normed")
    findings = found(m.spoiled(correct, at, lambda context: m.with_rows(context, place, lambda rows: stale)))
    assert (findings[0].place, findings[0].tier) == (place, Tier.DERIVED)
    assert findings[0].diagnosis.startswith("reads the head's row of step 0, not of step 1; relative error")


def test_a_conv_window_that_was_not_rolled_back_is_named_by_its_count(found: Any, correct: list[EventContext]) -> None:
    at, name = m.commit_of(correct, 1)
    verify = correct[at - 1]
    span = next(s for s in row_spans(verify, "trunk") if s.request == name)
    fed = verify.subject.places[Place("trunk", 1, "qkv")][span.begin : span.begin + span.count]

    def late(state: Any) -> Any:
        window = torch.cat((verify.subject.before[name].conv[1], fed.T), 1)[:, -3:]
        return replace(state, conv={**state.conv, 1: window})

    findings = found(m.spoiled(correct, at, lambda context: m.with_state(context, name, late)))
    assert findings[0].place == Place("trunk", 1, "conv")
    assert findings[0].diagnosis.startswith(f"holds the window after {span.count} tokens; 2 tokens were accepted; ")


@pytest.mark.parametrize(("field", "stage"), [("keys", "trunk"), ("values", "trunk"), ("draft_keys", "extend")])
def test_kv_entries_are_the_accepted_rows_bit_by_bit(
    found: Callable[..., Any], correct: list[EventContext], field: str, stage: str
) -> None:
    at = index_of(correct, Commit)
    name = correct[at].event.requests[0]
    layer = 2 if stage == "trunk" else 0

    def nudged(state: Any) -> Any:
        cache = getattr(state, field)[layer].clone()
        cache.view(torch.int32)[-1, 0, 0] ^= 1
        return replace(state, **{field: {layer: cache}})

    findings = found(m.spoiled(correct, at, lambda context: m.with_state(context, name, nudged)))
    assert findings[0].tier == Tier.BITWISE
    assert findings[0].place == Place(stage, layer, field.removeprefix("draft_"))
    assert "the first at" in findings[0].diagnosis


def test_a_request_that_is_not_in_the_batch_keeps_its_memory(found: Any, correct: list[EventContext]) -> None:
    at = index_of(correct, Idle)
    name = next(iter(correct[at].subject.after))

    def touched(state: Any) -> Any:
        return replace(state, state={**state.state, 0: -state.state[0].neg().neg()})

    findings = found(m.spoiled(correct, at, lambda context: m.with_state(context, name, touched)))
    assert (findings[0].tier, findings[0].place, findings[0].request) == (
        Tier.BITWISE, Place("trunk", 0, "state"), name)


@pytest.mark.parametrize("field", ["num_correct_drafts", "accept_lens", "accept_index", "last_correct_step_indices",
                                   "bonus", "own_num_correct_drafts", "own_bonus"])  # fmt: skip
def test_the_names_of_a_commit_imply_each_other(found: Any, correct: list[EventContext], field: str) -> None:
    at = index_of(correct, Commit)

    def other(context: Any) -> Any:
        answer = context.subject.answer
        assert isinstance(answer, Committed)
        wrong = replace(answer, **{field: getattr(answer, field) + 1})
        return replace(context, subject=replace(context.subject, answer=wrong))

    findings = found(m.spoiled(correct, at, other), explain=False)
    assert findings[0].tier == Tier.IDENTITY
    assert field.removeprefix("own_").split("_")[-1] in findings[0].diagnosis or "own" in findings[0].diagnosis


def test_slots_lengths_and_wishes_are_what_the_trace_and_the_other_side_say(
    found: Callable[..., Any], correct: list[EventContext]
) -> None:
    at = index_of(correct, Commit)
    name = correct[at].event.requests[0]
    wrong_slot = m.spoiled(correct, at, lambda mo: replace(mo, subject_slots={**mo.subject_slots, name: 2}))
    assert "slots are" in found(wrong_slot)[0].diagnosis
    longer = m.spoiled(correct, at, lambda mo: m.with_state(mo, name, lambda s: replace(s, length=s.length + 1)))
    assert any(f.diagnosis.startswith("length is") for f in found(longer))
    eager = m.spoiled(correct, at, lambda mo: replace(mo, subject=replace(mo.subject, wanted_num_steps=7)))
    assert found(eager)[0].diagnosis == "next_num_steps requests 7; expected 3"


def test_a_flipped_choice_is_judged_by_the_margin_of_the_truth(found: Any, correct: list[EventContext]) -> None:
    at = index_of(correct, Commit) - 1
    pick, logits = Place("trunk", AFTER_LAYERS, "pick"), Place("trunk", AFTER_LAYERS, "logits")

    def flipped(context: Any) -> Any:
        scores = context.subject.places[logits].clone()
        scores[0, scores[0].argmin()] = scores[0].max() + 1
        context = m.with_rows(context, logits, lambda rows: scores)
        return m.with_rows(context, pick, lambda rows: scores.argmax(-1))

    findings = found(m.spoiled(correct, at, flipped))
    choices = [finding for finding in findings if finding.tier == Tier.DECISIONS]
    assert len(choices) == 1 and "by a margin of" in choices[0].diagnosis
    other = m.spoiled(correct, at, lambda context: m.with_rows(context, pick, lambda rows: rows.roll(1) + 1))
    assert any("against its own logits" in finding.diagnosis for finding in found(other))


def test_a_label_in_the_wrong_place_is_reported_with_its_row_or_count(labelled: list[EventContext]) -> None:
    at, name = m.commit_of(labelled, 2)
    before = labelled[at - 1].subject.before[name]
    stale = m.spoiled(
        labelled, at,
        lambda context: m.with_state(context, name, lambda s: replace(s, state={**s.state, 1: before.state[1]})),
    )  # fmt: skip
    first = first_finding(m.judge(stale[-1:], for_labels()))  # what it needs of the verify, the run kept
    assert (first.event, first.place, first.request) == (at, Place("trunk", 1, "state"), name)
    assert first.diagnosis == "holds the state from before the step; 3 tokens were accepted"
    after_two = states_of_window(last_forward(labelled[at]), name, 1)[2]
    short = m.spoiled(labelled, at, lambda context: m.with_state(context, name, lambda s: replace(
        s, state={**s.state, 1: torch.full_like(s.state[1], after_two - (after_two >> 63 << 64))})))  # fmt: skip
    first = first_finding(m.judge(short[-1:], for_labels()))
    assert first.diagnosis == "holds the state after 2 tokens; 3 tokens were accepted"
    hidden = Place("trunk", 2, "hidden")
    swapped = m.spoiled(labelled, at - 1, lambda context: m.with_rows(context, hidden, lambda rows: rows.flip(0)))
    first = first_finding(m.judge(swapped, for_labels()))
    assert first.place == hidden and "row 0 is wrong" in first.diagnosis and "it holds row" in first.diagnosis


def test_greedy_acceptance_walks_down_a_tree() -> None:
    tokens, parents = (5, 7, 9, 3), (-1, 0, 0, 2)
    assert greedy(tokens, parents, picks=(9, 1, 3, 8)) == (2, 8)
    assert greedy(tokens, parents, picks=(4, 1, 3, 8)) == (0, 4)


def test_a_yardstick_that_overflows_allows_nothing_and_an_exact_block_hides_no_other() -> None:
    spot = Spot("derived", Tier.DERIVED, 0, "forward", Place("trunk", 0, "v"), "a", 1)
    truth = torch.rand(4, 2, 32, dtype=torch.float64) + 1
    drawn = torch.stack([truth, truth])
    drawn[1, :, 1] = torch.inf
    subject = truth.float()
    subject[:, 1] *= 1.5
    result = measured(spot, subject, truth, drawn)
    assert not result.agrees and result.head == 1 and "overflows" in result.diagnosis
    assert measured(spot, truth, truth, drawn[:1]).agrees
    assert not measured(spot, torch.full_like(subject, torch.nan), truth, drawn[:1]).agrees


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("wrong", [None, torch.nan, torch.inf])
def test_the_measure_is_the_relative_error(scaled: bool, wrong: float | None) -> None:
    """Both compute one formula, the first quickly for many small tensors, the second for every block."""
    generator = torch.Generator().manual_seed(0)
    truth, *off = torch.randn(5, 40, 4, 32, generator=generator, dtype=torch.float64)
    subject, *drawn = ((truth + 1e-6 * x).float() for x in off)
    scale = 3 * truth.abs() if scaled else None
    if wrong is not None:
        subject[7, 2, 5] = wrong
    spot = Spot("derived", Tier.DERIVED, 0, "forward", Place("trunk", 0, "core"), "a", 1)
    found = measured(spot, subject, truth, drawn, scale=scale)
    x, *yardsticks, o = (blocks("core", one) for one in (subject, *drawn, truth))
    least = None if scale is None else blocks("core", scale)
    error = relative_error(x, o, least)
    limit = allowed(relative_error(torch.stack(yardsticks), o, least).amax(1), subject.dtype)
    block = int((error / limit).argmax())  # a NaN counts as the largest
    assert found.blocks == 4 and found.head == block % 4 and found.agrees is (wrong is None)
    here = torch.tensor([found.worst, found.allowed], dtype=torch.float64)
    torch.testing.assert_close(here, torch.stack((error, limit)).flatten(1)[:, block], equal_nan=True)


GDN = "instep_optimized/ops/plain/gdn.py"
WINDOW, DECODE = ("part.form == 'window' and part.store is None", "part.form == 'window' and part.store is not None")
WRITES = "    writes = _writes(rows, work, heads)\n"
AGAIN = "    k, decay, update = (x.to(S.dtype) for x in kept)\n"
ADDED = "    S += write.key * update[..., None, :]\n"
UNIT = "    return x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + L2_EPS)\n"


def written(path: str, name: str, as_: str = ".bfloat16().to(work)") -> Edit:
    """On one path, part of what a token writes goes through bf16, or is something else."""
    return Edit(GDN, WRITES, f"{WRITES}    if {path}:\n        writes = writes._replace({name}=writes.{name}{as_})\n")


def again(change: str) -> Edit:
    return Edit(GDN, AGAIN, f"{AGAIN}    {change}\n")


def read_out(of: str) -> Edit:
    return Edit(GDN, "_sum_by_halves(S * q[:alive, row])", f"_sum_by_halves({of})")


# Planted error, strategy, trace, kind of the first event with a finding, components found there.
SLIPS = {
    "beta of a verify": (written(WINDOW, "beta"), "rerun", "short", "forward", {"core", "update"}),
    "beta of a verify that stores states": (written(WINDOW, "beta"), "snapshot", "short", "forward", {"core"}),
    "key of a verify": (written(WINDOW, "key"), "rerun", "short", "forward", {"core", "update"}),
    "key of a decode": (written(DECODE, "key"), "rerun", "decodes", "forward", {"core", "state"}),
    "beta of a decode": (written(DECODE, "beta"), "columns", "decodes", "forward", {"core", "state"}),
    "update run again": (again("update = update.bfloat16().to(S.dtype)"), "rerun", "short", "commit", {"state"}),
    "key run again": (again("k = k.bfloat16().to(S.dtype)"), "lazy_rerun", "short", "commit", {"state"}),
    "state that is read": (read_out("S.bfloat16().to(S) * q[:alive, row]"), "rerun", "short", "forward", {"core"}),
    "query that reads": (read_out("S * q[:alive, row].bfloat16().to(S)"), "snapshot", "short", "forward", {"core"}),
    # not of the family that the check was made for
    "decay by a short log2(e)": (written(WINDOW, "decay", ".log2().mul(1.00002).exp2()"), "rerun", "accepted",
                                 "forward", {"core", "update"}),
    "running state in 11 bits": (Edit(GDN, ADDED, f"{ADDED}    S.copy_(S.half().to(S))\n"), "rerun", "short",
                                 "forward", {"core", "state"}),
    "epsilon ten times": (Edit(GDN, UNIT, UNIT.replace("L2_EPS", "10 * L2_EPS")), "rerun", "short", "forward",
                          {"q", "k"}),
}  # fmt: skip


# A state of a random model has more in it for each key: in 16 bits these are below what a rounding may be.
TRAINED = {"key of a decode", "beta of a decode", "update run again", "decay by a short log2(e)"}


TWO = Policy(
    name="decodes", claim="Two requests decode.", capacity=ROOM, num_steps=0,
    arrivals=(Arrival("a", "one", max_new=2), Arrival("b", "few", max_new=2)),
)


@pytest.fixture(scope="module")
def decodes(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """Two prompts of the trained model, followed by plain steps."""
    prompts = {"one": tuple(b"R"), "few": tuple(b"In")}
    return make(TRACES.parents[1] / "tiny", prompts, TWO, tmp_path_factory.mktemp("decodes") / "decodes.jsonl")


def judged(ops: str, trace: Trace, strategy: str = "rerun") -> list[Comparison]:
    """Replay with external drafts: the errors are in the delta rule, which the draft head does not have."""
    setting = Setting(ops, dtype="bfloat16", strategy=strategy, drafter="external")
    return Replay(trace, setting).run().verdict.findings


def must_be(findings: Sequence[Comparison], kind: str, components: Collection[str]) -> None:
    """The finding is in the first layer, from no other check, and about the op alone."""
    assert {found.check for found in findings} == {"own_inputs"}, "nobody else sees it"
    first = [found for found in findings if found.place.layer == 0 and found.event == findings[0].event]
    assert (first[0].kind, first[0].tier) == (kind, Tier.DERIVED)
    assert {found.place.component for found in first} == components
    assert re.search("from the op's own inputs: (before it is stored in bfloat16, )?relative error",
                     findings[0].diagnosis)


@few(2)
@pytest.mark.parametrize("slip", SLIPS)
def test_a_slip_on_one_path_of_a_16_bit_run_is_found_where_it_is_made(slip: str, decodes: Trace) -> None:
    edit, strategy, trace, kind, components = SLIPS[slip]
    with planted_here(edit):
        told = decodes
        if trace != "decodes":
            told = read(TRACES / f"{trace}.jsonl") if slip in TRAINED else few_channels(trace, 2)
        must_be(judged("plain", told, strategy), kind, components)


def test_a_slip_of_an_interpreted_kernel_is_found_where_it_is_made(tmp_path: Path) -> None:
    policy = msgspec.structs.replace(TWO, name="windows", claim="Two requests verify.", num_steps=1)
    sizes = {"linear_key_head_dim": 16, "linear_value_head_dim": 32, "dtype": torch.bfloat16}
    found = judged("support.wrong.ops:NARROW_BETA_OF_WINDOWS", recorded(tmp_path, policy, **sizes))
    must_be(found, "forward", {"core", "update"})


@few(2)
@pytest.mark.parametrize(("trace", "strategy", "until"), [
    ("short", "rerun", None), ("short", "lazy_rerun", None), ("short", "snapshot", None),
    ("rounds", "columns", 6),  # a prompt in two chunks, and the first round
])  # fmt: skip
def test_without_a_slip_nothing_is_found_and_every_op_was_looked_at(
    trace: str, strategy: str, until: int | None
) -> None:
    how = Setting(dtype="bfloat16", strategy=strategy)
    verdict = agreed(Replay(few_channels(trace, 2), how).run(until=until))
    near = {c.place.component: c for c in verdict.compared if c.check == "own_inputs"}
    alone = {"embedding", "normed", "final", "logits"}  # ops whose inputs are a boundary: judged from there
    from_there = {c.place.component for c in verdict.compared if c.check == "derived"}
    assert from_there - near.keys() <= alone and near["state"].elements


def test_a_rounding_is_half_a_unit_and_no_more() -> None:
    torch.manual_seed(0)  # torch casts fp64 to 16 bits by way of fp32: one number in 25 000 is rounded twice
    truth = torch.cat((torch.randn(500, dtype=torch.float64), torch.tensor([0.0, 1.0, -1.0, 3e-39, 1e-41])))
    for narrow in (torch.bfloat16, torch.float16):
        assert torch.equal(before_rounding(truth.to(narrow), truth), truth)
    near, found = truth.new_tensor([0.9999, 1.0001]), truth[:500].bfloat16()  # on both sides of a power of two
    assert torch.equal(before_rounding(torch.ones(2).bfloat16(), near), near)
    off = (before_rounding(found * (1 + 2 * 2**-7), truth[:500]) / truth[:500] - 1).abs()
    assert off.min() > 2**-9 and off.max() < 2**-5
    assert before_rounding(torch.tensor([torch.inf]).half(), truth[:1]).isinf().all()
    assert before_rounding(torch.tensor([torch.nan]).half(), truth[:1]).isnan().all()
