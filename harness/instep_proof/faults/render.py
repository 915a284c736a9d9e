"""Print a campaign as a table with a score, and turn it into data.

Leaves out: the picture (`matrix_svg.py`), and judging.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from msgspec import to_builtins
from rich.console import Console
from rich.text import Text

from instep.report import terminal_tables
from instep.report.divergence_message import spelled
from instep.report.document import Kind
from instep.report.result import Result as File
from instep_reference.contract.place_names import Place

from .catalogue import FAMILY_OF
from .compare_with_control import HYPOTHESIS, Heard, Judged, Result

TOP = Path(__file__).resolve().parents[3]  # paths in a result are relative to this folder
YES, NO, UNNAMED = Text("yes", style="green"), Text("NO", style="red"), Text("-", style="dim")


def show(result: Result, console: Console) -> None:
    """Print a line per fault, deviations from the catalogue in words, and the score."""
    columns: dict[str, Kind] = {
        "fault": "word", "found": "word", "named": "word", "located": "word", "seen by": "text",
    }  # fmt: skip
    if any(one.heard is not None for one in result.judged):
        columns |= {"same text": "number", "accepted": "number"}
    made = terminal_tables.table("", columns, framed=True)
    family = None
    for one in result.judged:
        if family is not None and FAMILY_OF.get(one.fault.id) != family:
            made.add_section()
        family = FAMILY_OF.get(one.fault.id)
        made.add_row(one.fault.id, *_marks(one), ", ".join(one.seen), *_heard(one.heard))
    terminal_tables.show(made, console)
    for one in result.judged:
        terminal_tables.say(console, *surprises(one))
    terminal_tables.say(console, *result.failures, summary(result))


def _marks(one: Judged) -> tuple[Text, ...]:
    if one.void:
        return (Text("void", style="yellow"), Text(), Text())
    named = Text(one.named_by, style="green") if one.named else NO if one.fault.says else UNNAMED
    return YES if one.found else NO, named, YES if one.located else NO


def _heard(one: Heard | None) -> tuple[str, ...]:
    """The share of the text that equals the control's, and the acceptance next to the control's."""
    if one is None:
        return ()
    text = "broke" if one.error else f"{one.agreement:.0%}"
    return text, "" if one.acceptance is None or one.usual is None else f"{one.usual:.0%} → {one.acceptance:.0%}"


def surprises(one: Judged) -> Iterator[str]:
    """Deviations from the catalogue, and their cause."""
    fault, first = one.fault, one.arm.findings[0] if one.arm.findings else None
    if one.void:
        yield f"{fault.id}: void: {one.void}"
        return
    if first is None:
        ended = "every event agrees" if one.arm.clean else f"exit code {one.arm.code}: {one.arm.error}"
        yield f"{fault.id}: not found: {ended}"
        return
    if not one.found:
        yield f"{fault.id}: found by {', '.join(one.seen)}, not by {' or '.join(fault.seen_by)}, which should see it"
    if not one.located:
        yield f"{fault.id}: {first['where']}; expected event {fault.event}, {_place(fault.place)}"
    if not one.named and fault.says:
        yield f"{fault.id}: not named {fault.says!r}; said:\n    {first['check']}: {first['diagnosis']}"
    if one.named and (one.named_by == HYPOTHESIS) != fault.written_for:
        yield f"{fault.id}: named by {one.named_by}, but `written_for` is {fault.written_for}"
    if sees := sorted(one.seen.keys() & set(fault.blind)):
        yield f"{fault.id}: {', '.join(sees)} should be blind to it"


def _place(place: Place) -> str:
    return f"{spelled(place)} ({place.stage}, {place.layer}, {place.component})"


def summary(result: Result) -> str:
    return said(of(result).found)


def said(found: Mapping[str, Any]) -> str:
    """The score: 18 of 18 faults found, 17 located, 16 named (9 by check, 5 by bank, 2 by hypothesis); 0 void; ..."""
    by = ", ".join(f"{count} by {who}" for who, count in found.get("named_by", {}).items())
    return (f"{found['found']} of {found['fired']} faults found, {found['located']} located, {found['named']} named "
            f"({by}); {found['void']} void; {took(found)}")  # fmt: skip


def took(found: Mapping[str, Any]) -> str:
    """The cost, whatever the load of the machines: 3621 processor seconds, in 2 sessions"""
    sessions = found["sessions"]
    several = f", in {len(sessions)} sessions" if len(sessions) > 1 else ""
    return f"{sum(one['processor_seconds'] for one in sessions):.0f} processor seconds{several}"


def of(result: Result, commit: str | None = None) -> File:
    """The result of the campaign."""
    fired, sessions = result.fired, result.sessions
    found = {
        "sessions": to_builtins(sessions),
        "faults": len(result.judged), "fired": len(fired), "void": len(result.judged) - len(fired),
        **{what: sum(getattr(one, what) for one in fired) for what in ("found", "named", "located")},
        "named_by": result.named_by,
        "failures": list(result.failures),
        "results": [_data(one) | {"session": sessions.index(one.session)} for one in result.judged],
    }  # fmt: skip
    return File(result.exit, "cpu", found, commit)


def _data(one: Judged) -> dict[str, Any]:
    fault, first = one.fault, one.arm.findings[0] if one.arm.findings else None
    return {
        "id": fault.id, "family": FAMILY_OF.get(fault.id), "kind": fault.kind, "what": fault.what,
        "origin": fault.origin, "trace": fault.trace, "how": asdict(fault.how),
        "expected": {"event": fault.event, **fault.place._asdict(), "says": fault.says,
                     "written_for": fault.written_for, "seen_by": list(fault.seen_by), "blind": list(fault.blind)},
        "void": one.void, "found": one.found, "named": one.named, "named_by": one.named_by, "located": one.located,
        "code": one.arm.code, "seen": dict(one.seen), "looked": dict(one.arm.looked),
        "first": first, "message": one.arm.message.replace(f"{TOP}/", ""), "cause": one.arm.cause,
        "error": one.arm.error,
        "served": dict(one.arm.served),
        "seconds": round(one.arm.seconds, 2), "text": None if one.heard is None else _text(one.heard),
    }  # fmt: skip


def _text(one: Heard) -> dict[str, Any]:
    return {**asdict(one), "equal": one.equal, "raised": one.raised}
