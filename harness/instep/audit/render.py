"""The output of `instep audit`, as text and as data: how much was judged and decided, and the first finding.

Leaves out: the judgement (`audit.py`).
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Console

from ..checks.check_interface import counted
from ..report import outcome_data, terminal
from ..report.divergence_message import divergence, message, numbers, where
from ..report.document import VERDICTS
from ..report.outcome_data import finding
from ..report.result import Result
from ..report.terminal_tables import say
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


def messages(audit: Audit) -> list[str]:
    """The message of tokens and counts, and that of logits, rows and states: the one with the first finding first."""
    replayed = [] if audit.replay is None else audit.replay.verdict.findings
    found = [(audit.verdict.findings[0].order(), told(audit))] if audit.verdict.findings else []
    found += [(replayed[0].order(), divergence(audit.replay))] if audit.replay is not None and replayed else []
    return [text for _, text in sorted(found, key=lambda one: one[0]) if text is not None]


def show(audit: Audit, console: Console, *, verbose: bool = False) -> None:
    """Print an audit. verbose: list what was not judged, with the reasons."""
    word, style = VERDICTS[audit.exit]
    ties, made = audit.tokens.ties.ties, audit.tokens.ties.made
    texts, counts = audit.told.texts, audit.told
    say(console, f"{audit.recorded.path.name}, {audit.recorded.engine}: {word}", style=style)
    for text in messages(audit):
        say(console, text)
    say(console, f"  tokens    {made} of {len(texts)} requests, each after the tokens that the engine really chose; "
                 f"{audit.tokens.decided} could be decided, {ties} tied")  # fmt: skip
    if counts.windows:
        cut = len(audit.verdict.skipped)
        some = f"; {counted(cut, 'count')} not judged: {audit.verdict.skipped[0].reason}" if cut else ""
        say(console, f"  windows   {counts.windows}, with {counts.drafts} drafts; {counts.accepted} were accepted"
                     f"{some}")  # fmt: skip
        say(console, f"  step counts: {_steps(audit)}")
        say(console, f"  drafts: {_drafts(audit)}")
    said = audit.precision.declared.said(audit.precision.width) or "no rounding"
    by = "the checkpoint's own dtype, --dtype names another" if audit.assumed else "as declared"
    say(console, f"  rounding  {said} ({by})")
    say(console, f"  run       {audit.seconds:.1f} s, {audit.peak:,.0f} MiB at most, "
                 f"{audit.tokens.walks} walks through the layers")  # fmt: skip
    for line in extent(audit):
        say(console, f"  {line}")
    if audit.digest is None:
        say(console, "  the recording does not name its model, so the model was not checked", style="dim")
    for note in audit.recorded.notes:
        say(console, f"  {note}", style="yellow")
    if audit.tokens.exit is Exit.INCONCLUSIVE:
        say(console, f"  fewer than half of the tokens could be decided: {audit.tokens.decided} of {made}", style=style)
    if audit.replay is not None:
        terminal.show([audit.replay], console, of_recording=True, verbose=verbose)
    else:
        say(console, f"  not judged  {NOT_JUDGED}", style="dim")
    for short, own in list(audit.recorded.names.items())[:NAMED]:
        say(console, f'request "{short}" is "{own}"', style="dim")
    if (more := len(audit.recorded.names) - NAMED) > 0:
        say(console, f"{counted(more, 'further request')}: the result of --json names all", style="dim")


def extent(audit: Audit) -> list[str]:
    """Lines on the judged events, on the start of each judged state, and on an early end."""
    count, lines = len(audit.trace.events), list[str]()
    if len(audit.events) < count:
        lines.append(f"events    {audit.events.start} to {audit.events.stop - 1} of 0 to {count - 1}")
    if audit.replay is not None and "states" in audit.recorded.shows:
        lines.append(f"states    {ONE_STEP if audit.one_step else FROM_START}")
    if audit.stopped:
        lines.append(f"stopped   {audit.stopped}: the rest of the recording is not judged")
    return lines


def of(audit: Audit) -> Result:
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
    }  # fmt: skip
    found["findings_in_all"] = len(found["findings"])
    if audit.replay is None:
        found["not_judged"] = [{"shows_no": "", "what": NOT_JUDGED}]
    else:
        found |= outcome_data.of([audit.replay]).found
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
