"""The result of `instep audit` as data, its document, and the charts of the page: tokens, layers and events.

Leaves out: the judgement (`audit.py`).
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from itertools import groupby
from typing import Any

from ..checks.check_interface import counted, verb
from ..report import outcome_data
from ..report.divergence_message import message, numbers, where
from ..report.document import Data, Document, Listing, findings, matrix, messages, short, totals, word
from ..report.html import replay
from ..report.html.heat_map import Row
from ..report.html.timeline import NOBODY, UNKNOWN, Lanes, lanes_of
from ..report.outcome_data import finding
from ..report.result import Result
from ..report.runs_document import conclusions, omitted
from ..verdict import UNDECIDABLE, Comparison, Exit, Verdict
from .audit import Audit
from .recording import Recorded
from .round_of_finding import round_of
from .token_origins import Text
from .tokens import AtToken

# Kinds of results that tokens and counts alone cannot judge.
NOT_JUDGED = "logits, final rows, conv windows and states, KV entries (T2, T3)"
ONE_STEP = "each one step from the recorded state before it; --from-start also sees small errors add up"
FROM_START = "from position 0, up to the first wrong one, because later states follow from it"
NAMED = 26  # requests whose own names are printed


def placed(found: Comparison) -> str:
    """event 12 commit, request "b", token 8 at position 41; for other formats line 3, or step 3"""
    if isinstance(found, AtToken):
        numbered = found.kind in ("line", "step")
        at = f"{found.kind} {found.event}" if numbered else f"event {found.event} {found.kind}"
        return f'{at}, request "{found.request}", token {found.token} at position {found.position}'
    return "all tokens" if found.kind == "recording" else where(found)


def told(audit: Audit) -> str | None:
    """The message of the first finding, with the number of findings."""
    findings = audit.verdict.findings
    if not findings:
        return None
    return message(f"{audit.recorded.path.name}, {audit.recorded.engine} against reference", findings,
                   numbers(findings[0]), [], placed)  # fmt: skip


def _notes(audit: Audit, verbose: bool) -> Iterator[str]:
    """The judged parts, how they were judged, and up to where. verbose: list what was not judged, with the reasons"""
    counts, names, count = audit.told, audit.recorded.names, len(audit.trace.events)
    if counts.windows:
        cut = len(audit.verdict.skipped)
        some = f"; {counted(cut, 'count')} not judged: {audit.verdict.skipped[0].reason}" if cut else ""
        taken = f"{counts.accepted} {verb(counts.accepted, 'was', 'were')} accepted"
        yield f"windows: {counts.windows}, with {counted(counts.drafts, 'draft')}; {taken}{some}"
        yield f"step counts: {_steps(audit)}"
        yield f"drafts: {_drafts(audit)}"
    if audit.assumed:
        yield "rounding: that of the checkpoint's own dtype; --dtype names another"
    if len(audit.events) < count:
        yield f"events: {audit.events.start} to {audit.events.stop - 1} of 0 to {count - 1}"
    if audit.replay is not None and "states" in audit.recorded.shows:
        yield f"states: {ONE_STEP if audit.one_step else FROM_START}"
    if audit.stopped:
        yield f"stopped: {audit.stopped}: the rest of the recording is not judged"
    if audit.digest is None:
        yield "the recording does not name its model, so the model was not checked"
    given = [len(text.said) - text.known for text in audit.texts if text.given]
    if given:
        yield (f"not judged: {counted(sum(given), 'token')} of {counted(len(given), 'request')}, because the recording "
               "does not have how they were chosen")
    if audit.tokens.exit is Exit.INCONCLUSIVE and not audit.only_given:
        yield f"fewer than half of the tokens could be decided: {audit.tokens.decided} of {audit.tokens.ties.made}"
    hardly = [] if audit.replay is None else [one for one in audit.replay.verdict.skipped if one.check == UNDECIDABLE]
    if hardly:
        yield f"events of which too little could be decided: {len(hardly)}; event {hardly[0].event}: {hardly[0].reason}"
    yield from [f"not judged: {NOT_JUDGED}"] if audit.replay is None else outcome_data.notes([audit.replay], verbose)
    yield from (f'request "{short}" is "{own}"' for short, own in list(names.items())[:NAMED])
    if (more := len(names) - NAMED) > 0:
        yield f"{counted(more, 'further request')}: the result of --json names all"


def of(audit: Audit, *, verbose: bool = False) -> Result:
    """The result. verbose: its notes list what was not judged"""
    recorded, tokens = audit.recorded, audit.tokens
    found: dict[str, Any] = {
        "recording": recorded.path.name, "engine": recorded.engine, "model": audit.digest,
        "events": len(recorded.events), "requests": sum(not text.given for text in audit.told.texts),
        "tokens": tokens.ties.made, "decided": tokens.decided, "ties": tokens.ties.ties, "windows": audit.told.windows,
        "drafts": audit.told.drafts, "accepted": audit.told.accepted, "step_counts": _steps(audit),
        "draft_choices": _draft_choices(audit),
        "elements": audit.verdict.elements,
        "rounding": audit.precision.declared.said(audit.precision.width), "assumed": audit.assumed,
        "notes": list(recorded.notes), "walks": tokens.walks, "seconds": round(audit.seconds, 1),
        "peak_mib": round(audit.peak), "used": _used(audit),
        "texts": [_text(one) for one in audit.texts],
        "judged": {"events": [audit.events.start, audit.events.stop - 1], "one_step": audit.one_step,
                   "stopped": audit.stopped, "states": ONE_STEP if audit.one_step else FROM_START},
        "round": _round(audit), "names": dict(recorded.names),
        "remarks": [] if audit.replay is None else list(audit.replay.remarks),
        "findings": [_finding(one) for one in audit.verdict.findings], "message": told(audit),
        "run_notes": [*_notes(audit, verbose)],
    }  # fmt: skip
    found["findings_in_all"] = len(found["findings"])
    if audit.replay is None:
        found["not_judged"] = [{"shows_no": "", "what": NOT_JUDGED}]
    else:
        found = {**outcome_data.of([audit.replay]).found, **found}
        found["not_compared"] = [asdict(skip) for skip in (*audit.verdict.skipped, *audit.replay.verdict.skipped)]
    return Result(audit.exit, "cpu", found)


def _round(audit: Audit) -> dict[str, Any] | None:
    """The round of the first finding; None: there is no finding at an event that was judged."""
    replayed = () if audit.replay is None else audit.replay.verdict.findings
    found = [one for one in (*audit.verdict.findings, *replayed)
             if one.kind in ("commit", "forward") and one.event < len(audit.trace.events)]  # fmt: skip
    return round_of(audit.recorded, sorted(found, key=Comparison.order)) if found else None


def _steps(audit: Audit) -> str:
    named = audit.recorded.controller
    if named is None:
        return "not judged, because recording.json names no controller"
    return f"{audit.rounds} rounds judged by the controller {named.dialect}"


def _draft_choices(audit: Audit) -> dict[str, Any] | None:
    """The judged drafts as data. None: there are none, or no head that could be compared."""
    drafts = audit.tokens.drafts
    if drafts is None:
        return None
    first = [{"event": event, "request": request, "draft": number, "says": says}
             for event, request, number, says in drafts.others[:1]]  # fmt: skip
    return {"own": drafts.own, "other": len(drafts.others), "undecided": drafts.undecided,
            "first": first[0] if first else None}  # fmt: skip


def _drafts(audit: Audit) -> str:
    found = _draft_choices(audit)
    if found is None:
        return "not judged, because the model has no single MTP layer"
    of = found["own"] + found["other"] + found["undecided"]
    said = f"{found['own']} of {of} are the draft head's own choice, {found['undecided']} undecided"
    if (first := found["first"]) is None:
        return said
    at = f'event {first["event"]}, request "{first["request"]}"'
    return f"{said}, {found['other']} others; first: {at}, {first['says']}"


def _text(text: Text) -> dict[str, Any]:
    """A text as data.

    by: a letter for each token: g argmax, d drawn, k judged in another request, whose text this one continues, u not
    judged, as the recording does not have how it was chosen
    """
    drawn, argmax = text.drawn or (None,) * len(text.said), "u" if text.given else "g"
    by = "".join("k" if number < text.known else argmax if how is None else "d" for number, how in enumerate(drawn))
    return {"request": text.request, "prompt": len(text.prompt), "tokens": len(text.said), "by": by}


def _used(audit: Audit) -> float:
    """The largest part of its allowance that an agreeing token used."""
    return max((one.worst for one in audit.tokens.verdict.compared if one.agrees and one.allowed == 1), default=0.0)


def _finding(found: Comparison) -> dict[str, Any]:
    at = {"token": found.token, "position": found.position} if isinstance(found, AtToken) else {}
    return {**finding(found), **at, "where": placed(found)}


# ---- the document of the data

MOST = 200  # requests whose tokens are drawn, those with findings first
DETAILED = 5000  # tokens; with more, equal neighbours share a cell
# How a token was chosen, in a result -> kind of a cell
BY = {"g": "chosen", "d": "random", "k": "missing", "u": "missing"}
SAYS = {"chosen": "argmax, judged by the model's margin", "random": "sampled, and again from the model's logits",
        "missing": "not judged here: in the request that this one continues, before the judged events, or chosen in a "
                   "way that is not recorded",
        "found": "differs from the model"}

COUNTS = ("engine", "events", "requests", "tokens", "decided", "ties", "windows", "drafts", "accepted", "rounding",
          "walks", "seconds", "peak_mib")  # fmt: skip


def document(found: Data) -> Document:
    texts, replayed = found.get("texts") or [], found.get("runs", ())
    runs = sorted([{**found, "engine": "tokens and counts"}, *replayed], key=first_event)
    elements = found["elements"] + sum(run["elements"] for run in replayed)
    said = [f"{found['recording']}, {found['engine']}: {word(found['exit'])}",
            f"{found['tokens']} tokens of {found['requests']} requests judged, each after the tokens that the engine "
            f"really chose; {found['decided']} could be decided, {found['ties']} tied; "
            f"{short(elements)} numbers", *conclusions(replayed)]  # fmt: skip
    every = "Every judged token is the model's choice after the tokens before it."
    right = "" if found["findings"] or not found["tokens"] else every
    return Document(
        f"{found['recording']}, {found['engine']}", Exit(found["exit"]), [*said, *found["notes"]],
        right, messages(runs),
        [_batch(found.get("round"))],
        {"plots": [_strip(texts, found["findings"])] if texts else [],
         "legend": [[kind, words] for kind, words in SAYS.items()] if texts else [], "says": SAYS},
        [_counts(found, texts), totals(replayed), _requests(texts), findings(runs)], found.get("run_notes", ()),
        omitted(replayed),
    )


def first_event(run: Data) -> float:
    """The event of a run's first finding. An earlier finding can explain later ones."""
    return min((one["event"] for one in run["findings"]), default=math.inf)


def _batch(found: Data | None) -> Listing:
    """The batch of the first finding: a line for each row. Columns without a number are not shown."""
    if found is None:
        return Listing((), ())
    heads = {"row": "batch row", "request": "request", "wrong": "memory and rows", "slot": "slot",
             "before": "window before", "window": "window", "accepted": "accepted"}  # fmt: skip
    shown = [name for name in heads if any(one[name] is not None for one in found["rows"])]
    rows = [["" if one[name] is None else str(one[name]) or "no finding" for name in shown] for one in found["rows"]]
    title = ", ".join(filter(None, (f"Event {found['event']} {found['kind']}", found["changed"],
                                    f"a batch of {found['size']}")))  # fmt: skip
    bad = [number for number, one in enumerate(found["rows"]) if one["wrong"]]
    return Listing([heads[name] for name in shown], rows, title, bad)


def _counts(found: Data, texts: list[Data]) -> Listing:
    lines = [(name.replace("_", " "), str(found[name])) for name in COUNTS if found.get(name) not in (None, "")]
    lines += [("sampled tokens", str(sum(text["by"].count("d") for text in texts)))] * bool(texts)
    return Listing({"what": "word", "found": "text"}, lines, "What was judged")


def _requests(texts: list[Data]) -> Listing:
    heads = ("request", "prompt tokens", "generated tokens", "sampled tokens", "judged in another request",
             "not judged")
    return Listing(heads, [
        (text["request"], str(text["prompt"]), str(text["tokens"]), *(str(text["by"].count(by)) for by in "dku"))
        for text in texts
    ], "Requests")


def _strip(texts: list[Data], findings: list[Data]) -> dict[str, Any]:
    """A plot with a row for each request and a column for each token."""
    wrong = {(one["request"], one.get("token")): one["diagnosis"] for one in findings}
    texts = sorted(texts, key=lambda text: all(text["request"] != request for request, _ in wrong))[:MOST]
    apart = sum(text["tokens"] for text in texts) <= DETAILED
    cells = []
    for row, text in enumerate(texts):
        each = [(token, BY[by], wrong.get((text["request"], token))) for token, by in enumerate(text["by"])]
        for _, alike in groupby(each, key=lambda one: one[0] if apart or one[2] else one[1]):
            (token, kind, said), *more = alike
            cells.append([row, token, "found" if said else kind, "", said, token + len(more)])
    rows = [(text["request"], {"lines": [f"{text['prompt']} prompt tokens"]}) for text in texts]
    columns = list(map(str, range(max(text["tokens"] for text in texts))))
    return {**matrix("Generated tokens", rows, columns, cells), "numbered": "token "}


def _with_slots(lanes: Lanes, recorded: Recorded) -> Lanes:
    """The timeline with the engine's slots, where the recording names them, in place of slots of the trace."""
    names = list(lanes.requests)
    for stay in lanes.stays:
        placed = [one for one in recorded.batches if names[stay[0]] in one.slots and stay[2] <= one.event <= stay[3]]
        if stay[1] != NOBODY:
            stay[1] = placed[0].slots[names[stay[0]]] if placed else UNKNOWN
    return lanes


def charts_of(audit: Audit) -> dict[str, Any]:
    """Layers and events, and the timeline, of a recording with events; tokens and counts are at their events."""
    trace, outcome = audit.trace, audit.replay
    if not trace.events:
        return {}
    lanes = _with_slots(lanes_of(trace, audit.kinds), audit.recorded)
    both = Verdict(list(audit.verdict.compared), events=len(trace.events))
    if outcome is not None:
        both.compared += outcome.verdict.compared
        both.skipped += outcome.verdict.skipped
        both.events = outcome.verdict.events

    def found(rows: Mapping[Row, int]) -> list[dict[str, Any]]:
        said = [{"event": one.event, "request": one.request, "row": rows[Row.of(one.place)], "where": placed(one),
                 "says": one.diagnosis, "measured": numbers(one), "command": "", "maps": None}
                for one in audit.verdict.findings]  # fmt: skip
        return sorted(said + ([] if outcome is None else replay.listed(outcome, rows)), key=lambda one: one["event"])

    return {**lanes.data(), "runs": [replay.run_of(audit.recorded.engine, both, lanes, audit.kinds, findings=found)]}
