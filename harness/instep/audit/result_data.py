"""The result of `instep audit` as data: how much was judged and decided, the findings, and notes.

Leaves out: the judgement (`audit.py`), and the document (`result_document.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from ..checks.check_interface import counted
from ..report import outcome_data
from ..report.divergence_message import message, numbers, where
from ..report.outcome_data import finding
from ..report.result import Result
from ..verdict import Comparison, Exit
from .audit import Audit
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
    """What was judged, how, and up to where. verbose: list what was not judged, with the reasons"""
    counts, names, count = audit.told, audit.recorded.names, len(audit.trace.events)
    if counts.windows:
        cut = len(audit.verdict.skipped)
        some = f"; {counted(cut, 'count')} not judged: {audit.verdict.skipped[0].reason}" if cut else ""
        yield f"windows: {counts.windows}, with {counts.drafts} drafts; {counts.accepted} were accepted{some}"
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
    if audit.tokens.exit is Exit.INCONCLUSIVE:
        yield f"fewer than half of the tokens could be decided: {audit.tokens.decided} of {audit.tokens.ties.made}"
    yield from [f"not judged: {NOT_JUDGED}"] if audit.replay is None else outcome_data.notes([audit.replay], verbose)
    yield from (f'request "{short}" is "{own}"' for short, own in list(names.items())[:NAMED])
    if (more := len(names) - NAMED) > 0:
        yield f"{counted(more, 'further request')}: the result of --json names all"


def of(audit: Audit, *, verbose: bool = False) -> Result:
    """The result. verbose: its notes list what was not judged"""
    recorded, tokens = audit.recorded, audit.tokens
    found: dict[str, Any] = {
        "recording": recorded.path.name, "engine": recorded.engine, "model": audit.digest,
        "events": len(recorded.events), "requests": len(audit.told.texts), "tokens": tokens.ties.made,
        "decided": tokens.decided, "ties": tokens.ties.ties, "windows": audit.told.windows,
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
    """The round of the first finding; None: there is no finding at an event."""
    replayed = () if audit.replay is None else audit.replay.verdict.findings
    found = [one for one in (*audit.verdict.findings, *replayed) if one.kind in ("commit", "forward")]
    return round_of(audit.recorded, sorted(found, key=Comparison.order)) if found and audit.trace.events else None


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

    by: a letter for each token: g argmax, d drawn, k judged in another request, whose text this one continues
    """
    drawn = text.drawn or (None,) * len(text.said)
    by = "".join("k" if number < text.known else "g" if how is None else "d" for number, how in enumerate(drawn))
    return {"request": text.request, "prompt": len(text.prompt), "tokens": len(text.said), "by": by}


def _used(audit: Audit) -> float:
    """The largest part of its allowance that an agreeing token used."""
    return max((one.worst for one in audit.tokens.verdict.compared if one.agrees and one.allowed == 1), default=0.0)


def _finding(found: Comparison) -> dict[str, Any]:
    at = {"token": found.token, "position": found.position} if isinstance(found, AtToken) else {}
    return {**finding(found), **at, "where": placed(found)}
