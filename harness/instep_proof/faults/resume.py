"""Read the file of a campaign, so that runs in parts, at other times or on other machines become one.

Leaves out: writing it (`result_data.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from instep.report.result import read as read_file
from instep.setting import Setting
from instep_reference.contract.errors import BadInput

from .catalogue import FAMILY_OF, by_id
from .catalogue.fault import Expected, Fault
from .compare_with_control import Heard, Judged, Result, Session
from .fault_runs import Arm


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


def joined(*results: Result) -> Result:
    """Join rows of the same fault: a row that is not void counts, and of those the latest. In the catalogue's order.

    Faults that the catalogue no longer has are dropped.
    """
    best: dict[str, Judged] = {}
    for one in sorted((one for result in results for one in result.judged), key=_weight):
        best[one.fault.id] = one
    return Result(tuple(best[id] for id in FAMILY_OF if id in best))


def _weight(one: Judged) -> tuple[bool, str]:
    return not one.void, one.session.date


def _judged(one: Mapping[str, Any], sessions: tuple[Session, ...]) -> Judged:
    expected, first, text = one["expected"], one["first"], one["text"]
    planted = by_id().get(one["id"])
    fault = Fault(
        **{name: one[name] for name in ("id", "kind", "what", "origin", "trace")}, edits=(),
        how=msgspec.convert(one["how"], Setting), seen_by=tuple(expected["seen_by"]), blind=tuple(expected["blind"]),
        mistake=expected.get("mistake", "" if planted is None else planted.mistake),
        other=msgspec.convert(expected, Expected),
    )
    seen = ({"check": check, "tier": tier} for check, tier in one["seen"].items())
    findings = (first, *(other for other in seen if not first.items() >= other.items())) if first else ()
    told = {name: one[name] for name in ("code", "seconds", "looked", "served", "message", "cause", "error")}
    heard = None if text is None else Heard(**{name: text[name] for name in Heard.__dataclass_fields__})
    return Judged(fault, Arm(None, 0.0), Arm(findings=findings, **told), one["void"], heard, sessions[one["session"]])
