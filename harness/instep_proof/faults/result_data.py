"""A campaign as data, in its file and read from it, its score as a sentence, and the document of `instep faults`.

The document shows which faults were found, located and named, by family, and which check saw them. Leaves out: planting
and judging.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType, to_builtins

from instep.report.divergence_message import spelled
from instep.report.document import Data, Document, Kind, Listing, matrix
from instep.report.result import Result as File
from instep.report.result import read as read_file
from instep.setting import Setting
from instep.verdict import Exit
from instep_reference.contract.errors import BadInput
from instep_reference.contract.place_names import Place

from .catalogue import FAMILY_OF, by_id
from .catalogue.fault import Expected, Fault
from .compare_with_control import HYPOTHESIS, TIERS, Heard, Judged, Result, Session
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


JUDGED = ("found", "located", "named")
HEARD = ("same text", "accepted")  # columns of the free runs
SIGNS = {"check": "✓", "bank": "b", "hypothesis": "h"}  # who names a fault
SAYS = {
    "meant": "sees it, as it should", "also": "sees it, too", "silent": "compared, saw nothing",
    "yes ✓": "yes; named by the check", "yes b": "named by the bank", "yes h": "named by a hypothesis", "yes": "yes",
    "no": "no", "void": "void: no verdict",
}
LEGEND = [[*kind.split(" ")[:1], words, *kind.split(" ")[1:]] for kind, words in SAYS.items() if kind != "yes"]


def document(found: Data) -> Document:
    every, families = found["results"], by_family(found)
    return Document(
        "Planted faults", Exit(found["exit"]), [said(found)],
        "Every fault is an edit of the source, after a bug of a real engine. Its control is the same run without it.",
        found["failures"], [_counts(every, families)], {
            "plots": [_plot(family, mine) for family, mine in families.items()],
            "says": SAYS, "legend": LEGEND,
        }, [_table(every)], [line for one in every for line in surprises(one)],
        word={Exit.DIVERGED: "FAILED", Exit.AGREED: "all found"}.get(Exit(found["exit"]), ""),
    )  # fmt: skip


def by_family(found: Data) -> dict[str, list[Data]]:
    families: dict[str, list[Data]] = {}
    for one in found["results"]:
        families.setdefault(_family(one), []).append(one)
    return families


def checks_of(rows: list[Data]) -> dict[str, str]:
    """Each check that looked at one of these faults, and its tier, in the order of tiers."""
    tiers = {check: tier for one in rows for check, tier in {**one.get("looked", {}), **one["seen"]}.items()}
    return dict(sorted(tiers.items(), key=lambda each: (TIERS.index(each[1]), each)))


def _family(one: Data) -> str:
    return one.get("family") or "not in the catalogue"


def _counts(every: list[Data], families: dict[str, list[Data]]) -> Listing:
    rows = []
    for family, mine in (*families.items(), ("all", every)):
        void = sum(bool(one["void"]) for one in mine)
        rows.append((family, *map(str, (len(mine), void, *(sum(bool(one[what]) for one in mine) for what in JUDGED)))))
    return Listing(("family", "faults", "void", *JUDGED), rows, "By family")


def _table(every: list[Data]) -> Listing:
    heads: dict[str, Kind] = {
        "fault": "word", "family": "detail", **dict.fromkeys(JUDGED, "word"), "seen by": "text",
        **(dict.fromkeys(HEARD, "number") if any(one.get("text") for one in every) else {}), "where": "detail",
        "what it does, or why it is void": "detail",
    }  # fmt: skip
    rows = [(
        one["id"], _family(one), *(word(one, what) for what in JUDGED), ", ".join(one["seen"]),
        *(_heard(one.get("text")) if HEARD[0] in heads else ()),
        one["first"]["where"] if one["first"] else one.get("error") or "",
        f"void: {one['void']}" if one["void"] else one["what"],
    ) for one in every]
    bad = [number for number, one in enumerate(every)
           if not (one["void"] or (one["found"] and (one["located"] or not one.get("place_judged", True))))]
    return Listing(heads, rows, "Every fault", bad, [_family(one) for one in every])


def _heard(text: Data | None) -> tuple[str, str]:
    """The share of the text that equals the control's, and the acceptance next to the control's."""
    if text is None:
        return "", ""
    known = None not in (text["acceptance"], text["usual"])
    same = "broke" if text["error"] else f"{text['agreement']:.0%}"
    return same, f"{text['usual']:.0%} → {text['acceptance']:.0%}" if known and not text["error"] else ""


def surprises(one: Data) -> Iterator[str]:
    """Deviations from the catalogue, and their cause."""
    id, first, expected = one["id"], one["first"], one["expected"]
    if one["void"]:
        yield f"{id}: void: {one['void']}"
        return
    if first is None:
        ended = "every event agrees" if one["code"] == Exit.AGREED else f"exit code {one['code']}: {one['error']}"
        yield f"{id}: not found: {ended}"
        return
    if not one.get("place_judged", True):
        yield f"{id}: {first['where']}: {first['diagnosis']}"
        return
    if not one["found"]:
        yield f"{id}: found by {', '.join(one['seen'])}, not by {' or '.join(expected['seen_by'])}, which should see it"
    if expected["event"] < 0:
        yield f"{id}: {first['where']}; no finding is expected yet: `--update` writes this one"
    elif not one["located"]:
        place = Place(expected["stage"], expected["layer"], expected["component"])
        yield (f"{id}: {first['where']}; expected event {expected['event']}, {spelled(place)} "
               f"({', '.join(map(str, place))})")  # fmt: skip
    if not one["named"] and expected["says"]:
        yield f"{id}: not named {expected['says']!r}; said:\n    {first['check']}: {first['diagnosis']}"
        names = (first["explained"] or {}).get("names")
        if expected.get("mistake") and names is not None and expected["mistake"] not in names:
            yield f"{id}: its mistake is {expected['mistake']}; the finding is {', '.join(names) or 'no known one'}"
    mistake = expected["mistake"] if "mistake" in expected else expected["written_for"]  # in older files
    if one["named"] and (one["named_by"] == HYPOTHESIS) != bool(mistake):
        yield f"{id}: named by {one['named_by']}, but `mistake` is {mistake!r}"
    if sees := sorted(one["seen"].keys() & set(expected["blind"])):
        yield f"{id}: {', '.join(sees)} should be blind to it"


def word(one: Data, what: str) -> str:
    if one["void"]:
        return "void"
    placed = one.get("place_judged", True)
    if (what == "named" and placed and not one["expected"].get("says")) or (what == "located" and not placed):
        return "-"  # not every numeric error has a name, and a catalogue outside the tree may expect no place
    return (one.get("named_by") if what == "named" else "") or ("yes" if one[what] else "NO")


def _plot(family: str, mine: list[Data]) -> dict[str, Any]:
    checks = checks_of(mine)
    rows = [(one["id"], {
        "lines": [one["what"], f"void: {one['void']}" if one["void"] else "", _origin(one)], "message": one["message"],
    }) for one in mine]  # fmt: skip
    cells = [(row, column, *cell) for row, one in enumerate(mine) for column, cell in _cells(one, [*checks])]
    columns = [*JUDGED, *(f"{check} ({tier})" for check, tier in checks.items())]
    return {**matrix(f"{family}: faults and checks", rows, columns, cells), "group": family}


def matrix_of(found: Data) -> dict[str, Any]:
    """The matrix of all faults and checks as one plot, with a heading for each family."""
    every = [one for mine in by_family(found).values() for one in mine]
    tiers = list(checks_of(every).values())
    gaps = [number for number, tier in enumerate(tiers, len(JUDGED)) if tier not in tiers[: number - len(JUDGED)]]
    title = f"{sum(bool(one['found']) for one in every)} of {len(every)} planted faults found, by {len(tiers)} checks"
    return {**_plot("", every), "title": title, "groups": [*map(_family, every)], "gaps": gaps, "legend": LEGEND}


def _origin(one: Data) -> str:
    return f"as in {one['origin']}" if one.get("origin") else ""


def _cells(one: Data, checks: list[str]) -> Iterator[tuple[int, tuple[str, ...]]]:
    for column, what in enumerate(JUDGED):
        holds = word(one, what)
        if holds != "-":
            kind = {"void": "void", "NO": "no"}.get(holds, "yes")
            yield column, (kind, SIGNS[holds]) if holds in SIGNS else (kind,)
    yield from ((len(JUDGED) + column, (kind,)) for column, check in enumerate(checks) if (kind := mark(one, check)))


def mark(one: Data, check: str) -> str:
    """The result of a check: "meant", "also" or "silent"; empty if it had nothing to compare."""
    if check in one["seen"]:
        return "meant" if check in one["expected"]["seen_by"] else "also"
    return "silent" if check in one.get("looked", ()) else ""
