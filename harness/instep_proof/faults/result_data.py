"""A campaign as data, in its file and read from it, and its score as a sentence.

Leaves out: tables and the picture (`result_document.py`), and judging.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType, to_builtins

from instep.report.result import Result as File
from instep.report.result import read as read_file
from instep.setting import Setting
from instep_reference.contract.errors import BadInput

from .catalogue import FAMILY_OF, by_id
from .catalogue.fault import Expected, Fault
from .compare_with_control import Heard, Judged, Result, Session
from .fault_runs import Arm

TOP = Path(__file__).resolve().parents[3]  # paths in a result are relative to this folder


def said(found: Mapping[str, Any]) -> str:
    """The score: 18 of 18 faults found, 17 located, 16 named (9 by check, 5 by bank, 2 by hypothesis); 0 void; ..."""
    by = ", ".join(f"{count} by {who}" for who, count in found.get("named_by", {}).items())
    placed = "" if not found.get("without_place") else f" ({found['without_place']} expect no place)"
    return (f"{found['found']} of {found['fired']} faults found, {found['located']} located{placed}, {found['named']} "
            f"named ({by}); {found['void']} void; {took(found)}")  # fmt: skip


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
        "named_by": result.named_by, "without_place": sum(one.unknown for one in fired),
        "failures": list(result.failures),
        "results": [data_of(one) | {"session": sessions.index(one.session)} for one in result.judged],
    }  # fmt: skip
    return File(result.exit, "cpu", found, commit)


def data_of(one: Judged) -> dict[str, Any]:
    """The row of a fault."""
    fault, first = one.fault, one.arm.findings[0] if one.arm.findings else None
    return {
        "id": fault.id, "family": fault.kind if fault.outside else FAMILY_OF.get(fault.id), "kind": fault.kind,
        "what": fault.what, "origin": fault.origin, "trace": fault.trace, "how": fault.how,
        "expected": {**to_builtins(fault.expected), "mistake": fault.mistake, "seen_by": list(fault.seen_by),
                     "blind": list(fault.blind)},
        **({"outside": True, "place_judged": not one.unknown} if fault.outside else {}),
        "void": one.void, "found": one.found, "named": one.named, "named_by": one.named_by, "located": one.located,
        "code": one.arm.code, "seen": dict(one.seen), "looked": dict(one.arm.looked),
        "first": first, "message": one.arm.message.replace(f"{TOP}/", ""), "cause": one.arm.cause,
        "error": one.arm.error,
        "served": dict(one.arm.served),
        "seconds": round(one.arm.seconds, 2), "text": None if one.heard is None else _text(one.heard),
    }  # fmt: skip


def _text(one: Heard) -> dict[str, Any]:
    return {**asdict(one), "equal": one.equal, "raised": one.raised}


# ---- reading the file, so that runs in parts, at other times or on other machines become one

def read(path: Path) -> Result:
    """Read the judged faults with all their fields."""
    try:
        found = read_file(path)
        sessions = msgspec.convert(found["sessions"], tuple[Session, ...])
        return Result(tuple(_judged(one, sessions) for one in found["results"]))
    except (KeyError, TypeError, IndexError, AttributeError, AssertionError, msgspec.ValidationError):
        expected = "a file that `instep faults` wrote"
        raise BadInput(str(path), found="another result", expected=expected) from None


def of_one_model(results: Iterable[Result], model: str | UnsetType | None) -> None:
    """Refuse rows of other models in one file. model: that of the faults planted now; None: none are."""
    models = {session.model for result in results for session in result.sessions} | {model} - {None}
    if len(models) > 1:
        told = sorted("the traces as they come" if one is UNSET else f"a model of digest {one:.12}" for one in models)
        raise BadInput("faults", found=f"rows of {' and of '.join(told)}", expected="those of one model in a file",
                       hint="name the same --checkpoint, and another file for every model")  # fmt: skip


def joined(*results: Result, order: Iterable[str] = FAMILY_OF) -> Result:
    """Join rows of the same fault: a row that is not void counts, and of those the latest.

    order: the faults of the catalogue; those that it no longer has are dropped
    """
    best: dict[str, Judged] = {}
    for one in sorted((one for result in results for one in result.judged), key=_weight):
        best[one.fault.id] = one
    return Result(tuple(best[id] for id in order if id in best))


def _weight(one: Judged) -> tuple[bool, str]:
    return not one.void, one.session.date


def _judged(one: Mapping[str, Any], sessions: tuple[Session, ...]) -> Judged:
    expected, first, text = one["expected"], one["first"], one["text"]
    planted = by_id().get(one["id"])
    fault = Fault(
        **{name: one[name] for name in ("id", "kind", "what", "origin", "trace")}, edits=(),
        how=msgspec.convert(one["how"], Setting), seen_by=tuple(expected["seen_by"]), blind=tuple(expected["blind"]),
        mistake=expected.get("mistake", "" if planted is None else planted.mistake),
        other=msgspec.convert(expected, Expected), outside=one.get("outside", False),
    )
    seen = ({"check": check, "tier": tier} for check, tier in one["seen"].items())
    findings = (first, *(other for other in seen if not first.items() >= other.items())) if first else ()
    told = {name: one[name] for name in ("code", "seconds", "looked", "served", "message", "cause", "error")}
    heard = None if text is None else Heard(**{name: text[name] for name in Heard.__dataclass_fields__})
    return Judged(fault, Arm(None, 0.0), Arm(findings=findings, **told), one["void"], heard, sessions[one["session"]])
