"""Two tables of planted faults for docs/results.md: the score, and what a test of accuracy would not have seen.

Leaves out: making the result that they are read from (`instep faults --json fixtures/results/faults.json`).
"""

from collections.abc import Iterable, Mapping
from typing import Any

from instep_proof.faults.result_data import took

from . import markdown

Results = Mapping[str, Any]
JUDGED = ("found", "named", "located")
MOST, LONGEST = 8, 110  # rows of each kind, and letters of a diagnosis


def score(result: Results) -> str:
    """A line per family, and one for all; then how many each namer named, if the file has it."""
    families = dict.fromkeys(one["family"] for one in result["results"])
    namers = result["named_by"]
    heads = ["family", "faults", "void", *JUDGED, *(f"by {who}" for who in namers), "first seen by"]
    lines = []
    for family in families:
        mine = [one for one in result["results"] if one["family"] == family]
        first = dict.fromkeys(one["first"]["check"] for one in mine if one["first"])
        lines.append(_line(family, mine, namers, ", ".join(f"`{check}`" for check in sorted(first))))
    return markdown.table(heads, [*lines, _line("all", result["results"], namers, took(result))])


def _line(name: str, faults: Iterable[Results], namers: Iterable[str], last: str) -> tuple[object, ...]:
    faults = list(faults)
    counts = [sum(one[what] for one in faults) for what in JUDGED]
    counts += [sum(one["named_by"] == who for one in faults) for who in namers]
    void = sum(bool(one["void"]) for one in faults)
    return name, len(faults), void, *counts, last


def unheard(result: Results) -> tuple[list[Results], list[Results]]:
    """Faults that leave every token as it was, and others with which more drafts are accepted; the clearest first."""
    heard = [one for one in result["results"] if one["text"] is not None and not one["void"]]
    equal = [one for one in heard if one["text"]["equal"]]
    raised = [one for one in heard if one["text"]["raised"] and not one["text"]["equal"]]
    return (
        sorted(equal, key=lambda one: abs(one["text"]["usual"] - one["text"]["acceptance"])),
        sorted(raised, key=lambda one: one["text"]["usual"] - one["text"]["acceptance"]),
    )


def unseen(result: Results) -> str:
    """Faults that leave the text as it is while states differ, and faults with which more drafts are accepted."""
    heard = sum(one["text"] is not None and not one["void"] for one in result["results"])
    equal, raised = unheard(result)
    said = f"{len(equal)} of {heard} leave every token as it was, {len(raised)} others raise the acceptance rate"
    table = markdown.table(
        ("planted fault", "tokens that stay", "accepted drafts, without and with it", "message of instep"),
        map(_unseen, (*equal[:MOST], *raised[:MOST])))
    found = sum(one["found"] for one in (*equal, *raised))
    return f"{said}; {found} of these were found. The first {MOST} of each:\n\n{table}"


def _unseen(one: Results) -> tuple[str, ...]:
    text, first = one["text"], one["first"]
    rates = ("" if text["usual"] is None or text["acceptance"] is None
             else f"{text['usual']:.0%} → {text['acceptance']:.0%}")  # fmt: skip
    said = f"event {first['event']} {first['kind']}: {first['diagnosis']}" if first else ""
    said = said if len(said) <= LONGEST else f"{said[:LONGEST].rpartition(' ')[0]} ..."
    tokens = "all" if text["agreement"] == 1 else f"{text['agreement']:.0%}"
    return one["what"].rstrip("."), tokens, rates, said
