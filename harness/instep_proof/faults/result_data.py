"""A campaign as data, and its score as a sentence.

Leaves out: tables and the picture (`result_document.py`), and judging.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from msgspec import to_builtins

from instep.report.result import Result as File

from .catalogue import FAMILY_OF
from .compare_with_control import Heard, Judged, Result

TOP = Path(__file__).resolve().parents[3]  # paths in a result are relative to this folder


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
        "sessions": sessions,
        "faults": len(result.judged), "fired": len(fired), "void": len(result.judged) - len(fired),
        **{what: sum(getattr(one, what) for one in fired) for what in ("found", "named", "located")},
        "named_by": result.named_by,
        "failures": list(result.failures),
        "results": [data_of(one) | {"session": sessions.index(one.session)} for one in result.judged],
    }  # fmt: skip
    return File(result.exit, "cpu", found, commit)


def data_of(one: Judged) -> dict[str, Any]:
    """The row of a fault."""
    fault, first = one.fault, one.arm.findings[0] if one.arm.findings else None
    return {
        "id": fault.id, "family": FAMILY_OF.get(fault.id), "kind": fault.kind, "what": fault.what,
        "origin": fault.origin, "trace": fault.trace, "how": fault.how,
        "expected": {**to_builtins(fault.expected), "mistake": fault.mistake, "seen_by": list(fault.seen_by),
                     "blind": list(fault.blind)},
        "void": one.void, "found": one.found, "named": one.named, "named_by": one.named_by, "located": one.located,
        "code": one.arm.code, "seen": dict(one.seen), "looked": dict(one.arm.looked),
        "first": first, "message": one.arm.message.replace(f"{TOP}/", ""), "cause": one.arm.cause,
        "error": one.arm.error,
        "served": dict(one.arm.served),
        "seconds": round(one.arm.seconds, 2), "text": None if one.heard is None else _text(one.heard),
    }  # fmt: skip


def _text(one: Heard) -> dict[str, Any]:
    return {**asdict(one), "equal": one.equal, "raised": one.raised}
