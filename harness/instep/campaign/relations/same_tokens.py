"""Relations between two runs that bring the same tokens through different events: both compute the same values.

A row has the name, the claim, the runs, the condition under which they are compared bit by bit, and an example of a
wrong engine that it detects. If bits may differ, the difference must be within the allowance of two correct runs
(`compare_records.py`). If only the number of rows can make bits differ, the runs are repeated row by row
(`engine_modifications.py`) and compared bit by bit. Leaves out: how runs are recorded and compared
(`request_timelines.py`, `compare_records.py`), and two engines on the same events (`same_events.py`).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from instep_optimized.memory_addresses import StateLayout
from instep_reference.contract.drafters import EXTERNAL
from instep_reference.contract.engine import Draft, Forward, RequestState
from instep_reference.contract.place_names import Place, draft_stage

from ...trace.event_rules import EventRules
from ...trace.file import Trace
from ...verdict import Skipped, Tier
from .case import Case, Relation, Results, not_by_verbs, our_own
from .compare_records import Yardstick, lengths, same
from .engine_modifications import windows_of_one
from .position_record import PositionRecord
from .request_timelines import (
    Rewrite,
    alone,
    as_traced,
    chunked,
    decoded,
    exact_windows,
    just_begun,
    prompt_only,
    rejected,
    rescheduled,
    timelines_of,
)
from .rewrites import capped, cut_to_caps, undrawn, with_other_drafts, without_speculation

Pairs = Iterator[tuple[PositionRecord, PositionRecord]]
Exact = Callable[[Case], bool]
LAYOUTS: Sequence[StateLayout] = ("VK", "KV")
# Around the conv's width and the prefill kernels' 64 tokens at a time.
EDGES = (1, 2, 3, 63, 64, 65)
WHY_NO_MTP_ROWS = "rows of MTP layers after the first depend on where chunks and rounds ended: not compared"
FIRST = draft_stage(0)


def always(case: Case) -> bool:
    return True


def where_rows_are_invariant(case: Case) -> bool:
    return case.rows_are_invariant


def where_experts_are_apart(case: Case) -> bool:
    """Whether other rows in the batch leave a row's bits alone.

    A product over the same number of rows does not depend on their contents. But an expert's product has as many rows
    as chose that expert.
    """
    apart = case.ops is not None and "moe" in case.ops.row_invariant
    return case.labels or apart or not case.plan.checkpoint.config.experts or where_rows_are_invariant(case)


def where_prefixes_are_prefilled_alike(case: Case) -> bool:
    """Whether a request that loads a shared prefix gets the bits of prefilling it itself, as the other run does."""
    return where_rows_are_invariant(case) and (case.labels or not brought_anew(case))


def brought_anew(case: Case) -> bool:
    """Whether some prefix is prefilled in chunks other than its donor's, which changes the order of sums."""
    return any(step.anew for timeline in timelines_of(case.trace) for step in timeline.steps)


def for_labels(case: Case) -> bool:
    """One chunk and two chunks are summed in different orders, so only labels are exact."""
    return case.labels


def rewritten(
    name: str, says: str, runs: Callable[[Case], Pairs], catches: str, *, exact: Exact = where_rows_are_invariant,
    lacks: Callable[[Case], str | None] = lambda case: None, elsewhere: bool = False, same_events: bool = False,
    decodes: bool = False,
) -> Relation:
    """A row of the table.

    exact      whether a case is compared bit by bit
    same_events  whether the runs commit the same tokens at the same events, so that lengths are compared as well
    elsewhere  whether the runs end rounds or chunks after different tokens, and so store states at different positions
    decodes    whether one run decodes tokens that the other has in windows
    """

    def hold(case: Case) -> Results:
        apart = (elsewhere and case.stores_narrow) or (decodes and case.splits_ring) or case.reads_narrow_prefixes
        for whole in runs(case):
            one, other = map(_without_guesses, whole)
            if one is not whole[0]:
                yield Skipped(name, 0, WHY_NO_MTP_ROWS)
            if same_events:
                yield from lengths(name, one, other)
            if apart:
                yield Skipped(name, 0, ELSEWHERE)
                rounded = partial(_own_rounded, case, (one.name, other.name))
                yield from Yardstick(name, case.truth(), rounded, one, other, case.drawn, runs=2).compare()
            elif exact(case):
                yield from same(name, one, other)
            else:
                yield from Yardstick(name, case.truth(), case.rounded, one, other, case.drawn).compare()
        by_rows = exact in BY_ROWS and not apart and not exact(case) and not brought_anew(case)
        if by_rows and case.row_by_row is not None:
            for one, other in runs(case.row_by_row):
                yield from same(name, _without_guesses(one), _without_guesses(other))

    def lacking(case: Case) -> str | None:
        if case.plan.setting.dp > 1:
            return "rows of several replicas are not in the order of the batch"
        return lacks(case)

    tiers = (Tier.BITWISE,) if exact is always else (Tier.BITWISE, Tier.PROPAGATED)
    return Relation(name, says, catches, tiers, hold, lacking)


def _own_rounded(case: Case, runs: tuple[str, ...], draw: int) -> PositionRecord:
    """Draws of the rounded reference, taking turns between the runs."""
    return case.rounded(draw // len(runs), runs[draw % len(runs)])


ELSEWHERE = "states, prefixes or rings are narrower than computed, so bits depend on where they end: not compared"
BY_ROWS = (where_rows_are_invariant, where_prefixes_are_prefilled_alike, where_experts_are_apart)


# Why a relation does not apply


def nobody_decodes(case: Case) -> str | None:
    return None if max(case.trace.header.candidates) else "no step count of this trace makes drafts"


def nobody_drafts(case: Case) -> str | None:
    return nobody_decodes(case) or (
        None if case.trace.header.proposes else "no draft head is in use"
    ) or not_by_verbs("no verb shows what a draft head computes")(case)


def nothing_rejected(case: Case) -> str | None:
    other = with_other_drafts(case.trace).events
    return "no draft of this trace was rejected" if other == case.trace.events else None


def no_windows_of_one(case: Case) -> str | None:
    """No event asks for a window of one token, so only instep's engine can serve it."""
    if case.ops is None:
        return "only instep's own engine serves a window of one token"
    if case.plan.setting.stages > 1:
        return "earlier stages commit no window that was not drafted"
    return "a ring keeps tokens of windows in two parts; those of decode steps are not kept" * case.splits_ring or None


# The runs. A run that several rows share is made once (`Case.recorded`).


def by_itself(case: Case) -> PositionRecord:
    """Run every request alone in the engine, with the steps of the trace."""
    return case.recorded("alone", lambda: alone(undrawn(case.trace)))


def _alone(case: Case) -> Pairs:
    """The only relation that keeps sampling on: a request with the same drafts draws the same tokens."""
    yield case.traced(), case.recorded("alone, as drawn", lambda: alone(case.trace)) if case.drawn else by_itself(case)


def token_by_token(case: Case) -> PositionRecord:
    """Run every request alone, decoded without drafts."""
    return case.recorded("plain decoding", lambda: alone(undrawn(case.trace), decoded))


def _recorded(case: Case, name: str, rewrite: Rewrite) -> PositionRecord:
    return case.recorded(name, lambda: alone(undrawn(case.trace), rewrite))


def _other_drafts(case: Case) -> Pairs:
    trace = undrawn(case.trace)
    one = case.recorded("the trace, undrawn", lambda: as_traced(trace)) if case.drawn else case.traced()
    yield one, case.recorded("other rejected drafts", lambda: with_other_drafts(trace))


def _with_and_without(case: Case) -> Pairs:
    """Prompts with speculation enabled and disabled, in both state layouts.

    Without speculation the pools have the smallest width and there is no controller.
    """
    prompts = alone(undrawn(case.trace), prompt_only)
    for layout in LAYOUTS if case.led is None else ("",):  # an engine driven through callbacks has its own layout
        options, which = ({"layout": layout}, f", {layout}") if layout else ({}, "")
        yield (
            case.recorded(f"speculation{which}", lambda: prompts, options=options),
            case.recorded(f"no speculation{which}", lambda: without_speculation(prompts), options=options),
        )


def _exact_windows(case: Case) -> Pairs:
    yield by_itself(case), _recorded(case, "windows without a rejected draft", exact_windows)


def _schedules(case: Case) -> Pairs:
    """The trace's own step counts, and every count in turn, up and down."""
    header, plain = case.trace.header, token_by_token(case)
    counts = sorted({0, *header.candidates})
    up_and_down = [*counts, *counts[-2:0:-1]]
    yield plain, by_itself(case)
    yield plain, _recorded(case, "step counts in turn", rescheduled(up_and_down, header.checkpoint.vocab))


def _rejected(case: Case) -> Pairs:
    header = case.trace.header
    rewrite = rejected(sorted({*header.candidates} - {0}), header.checkpoint.vocab)
    yield token_by_token(case), _recorded(case, "rounds of wrong drafts", rewrite)


def _capped(case: Case) -> Pairs:
    trace = undrawn(case.trace)
    yield (case.recorded("paths to a leaf with caps", lambda: capped(trace)),
           case.recorded("windows cut after the caps", lambda: cut_to_caps(trace)))  # fmt: skip


def _windows_of_one(case: Case) -> Pairs:
    yield token_by_token(case), case.recorded(
        "windows of one token", lambda: alone(undrawn(case.trace), decoded), windows_of_one
    )


def _split(case: Case) -> Pairs:
    recorded = _recorded(case, "the trace's chunks", just_begun)
    yield recorded, _recorded(case, "whole prompts", lambda timeline: chunked(())(just_begun(timeline)))
    name = f"chunks of {', '.join(map(str, EDGES))}"
    yield recorded, _recorded(case, name, lambda timeline: chunked(EDGES)(just_begun(timeline)))


def _in_buckets(case: Case) -> Pairs:
    """Forwards with prompts run eagerly, in the narrowest graphs from 16 rows on, and in one that is wider than all."""
    narrow = [16]
    while narrow[-1] < max(prompt_rows(case.trace)):
        narrow.append(2 * narrow[-1])
    eager = case.recorded("prompts run eagerly", lambda: as_traced(case.trace), options={"prompt_graphs": None})
    for buckets in (tuple(narrow), (max(64, 2 * narrow[-1]),)):
        name, options = ", ".join(map(str, buckets)), {"graphs": True, "prompt_graphs": buckets}
        name = f"prompts run in graphs of {name} rows"
        yield eager, case.recorded(name, lambda: as_traced(case.trace), options=options)


def prompt_rows(trace: Trace) -> list[int]:
    """The packed rows of every forward with a prompt."""
    rules, found = EventRules(trace.header), []
    for number, event in enumerate(trace.events):
        if isinstance(event, Forward) and any(row.kind == "prefill" for row in event.rows):
            live = rules.table.live
            found.append(sum(len(live[row.request].window) if row.kind == "verify" else row.tokens
                             for row in event.rows))  # fmt: skip
        rules.apply(event, trace.where(number))
    return found


def _handed(case: Case) -> Pairs:
    """The trace's drafts with the drafter that proposes them, and without any drafter."""
    handed = case.recorded("drafts handed in", lambda: as_traced(case.trace), options={"drafter": EXTERNAL})
    yield _of_target(case.traced()), _of_target(handed)


def _of_target(record: PositionRecord) -> PositionRecord:
    """Keep the rows and the memory of the target alone."""
    return replace(
        record, blocks=[block for block in record.blocks if block.place.stage == "trunk"],
        standings=[replace(standing, state=_undrafted(standing.state)) for standing in record.standings],
        rows={at: row for at, row in record.rows.items() if at[1].stage == "trunk"},
        states={at: _undrafted(state) for at, state in record.states.items()},
    )


def _undrafted(state: RequestState) -> RequestState:
    return replace(state, proposal=None, proposal_hidden=None, draft_keys={}, draft_values={}, block_keys={},
                   block_values={}, tail={})  # fmt: skip


def nobody_proposes(case: Case) -> str | None:
    proposes = case.trace.header.proposes and case.plan.setting.mode != EXTERNAL
    own = any(isinstance(event, Draft) and event.own for event in case.trace.events)
    return nobody_decodes(case) or (None if proposes else "no drafter is in use") or (
        "the trace lets each engine draft its own windows" if own else None
    ) or our_own("an external engine has its own drafter")(case)


def no_prompts(case: Case) -> str | None:
    if case.ops is None:
        return "an external engine captures its graphs itself"
    if case.plan.setting.stages * case.plan.setting.dp > 1:
        return "pipeline stages and replicas run forwards with prompts eagerly"
    return None if prompt_rows(case.trace) else "no forward of this trace has a prompt"


REWRITTEN: tuple[Relation, ...] = (
    # Rows after the last accepted one are not compared: no engine keeps them.
    rewritten(
        "later_rows", "row i of a verify does not depend on the tokens after it", _other_drafts,
        "a product whose rows share one scale", exact=where_experts_are_apart, lacks=nothing_rejected,
    ),
    rewritten(
        "speculation_off", "a prefill leaves the same state with speculation and without", _with_and_without,
        "a prefill that orders the channels of a state by whether drafts are made", exact=always, lacks=nobody_decodes,
    ),
    rewritten(
        "alone", "a request alone in the engine is served as in the batch", _alone,
        "a product whose rows share one scale", exact=where_prefixes_are_prefilled_alike,
    ),
    rewritten(
        "draft_layout", "draft extend over a window's rows is draft extend over its accepted rows alone",
        _exact_windows, "a draft that continues from the last row of the window", lacks=nobody_drafts, decodes=True,
    ),
    rewritten(
        "schedule", "any schedule of step counts is plain decoding", _schedules,
        "a ring whose tokens are not all run again", elsewhere=True,
    ),
    rewritten(
        "rejected_is_plain", "a round whose drafts are all rejected is one decode step", _rejected,
        "a commit that takes the first draft where none was accepted", lacks=nobody_decodes, decodes=True,
    ),
    rewritten(
        "handed", "drafts that are handed in leave what they leave if the engine's drafter proposes them", _handed,
        "a drafter that writes memory of the target", exact=always, lacks=nobody_proposes, same_events=True,
    ),
    rewritten(
        "capped", "a window with a cap leaves what the window cut to that number of drafts leaves", _capped,
        "an acceptance that ignores its cap",
        lacks=lambda case: nobody_decodes(case) or our_own("an external engine may have no caps")(case),
        same_events=True,
    ),
    rewritten(
        "decode_is_verify_1", "a verify with T = 1 is a decode step", _windows_of_one,
        "a decode kernel that rounds where the window kernel does not", exact=always, lacks=no_windows_of_one,
    ),
    rewritten(
        "split", "a prompt in one chunk leaves what it leaves in any chunks", _split,
        "a chunk that begins with an empty conv window", exact=for_labels, elsewhere=True,
    ),
    rewritten(
        "prompt_buckets", "a forward with a prompt runs eagerly as in a graph of any width", _in_buckets,
        "eager calls that keep the addresses of an earlier forward", lacks=no_prompts,
    ),
)  # fmt: skip


def _guessing(place: Place) -> bool:
    """Whether a later MTP layer of a draft extend computes this place."""
    return place.stage.startswith(f"{FIRST}.")


def _without_guesses(record: PositionRecord) -> PositionRecord:
    """Drop rows of later MTP layers. A record without later MTP layers is returned as it is.

    MTP layer i pairs a row with the token i positions later. A token that is not known yet is guessed by the layers
    before, and the row is never recomputed. The step count also decides which rows a layer reads. So two runs that
    bring the same tokens in different steps may rightly differ there.
    """
    if not any(map(_guessing, {place for _, place, _ in record.rows})):
        return record
    return replace(
        record, blocks=[block for block in record.blocks if not _guessing(block.place)],
        standings=[replace(standing, state=_first(standing.state)) for standing in record.standings],
        rows={at: row for at, row in record.rows.items() if not _guessing(at[1])},
        states={at: _first(state) for at, state in record.states.items()},
    )


def _first(state: RequestState) -> RequestState:
    keys, values = ({layer: x for layer, x in each.items() if layer < 1}
                    for each in (state.draft_keys, state.draft_values))  # fmt: skip
    return replace(state, draft_keys=keys, draft_values=values)
