"""The page of `instep audit`: the judged tokens of a recording, and its layers and events if it has events.

Leaves out: the judgement (`instep.audit`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import groupby
from typing import TYPE_CHECKING, Any

from ..report.divergence_message import numbers
from ..report.document import Document, Listing
from ..report.document_parts import Data, findings, matrix, messages, short, totals, word
from ..report.html import replay
from ..report.html.heat_map import Row
from ..report.html.timeline import NOBODY, UNKNOWN, Lanes, lanes_of
from ..report.runs_document import conclusions
from ..verdict import Exit, Verdict

if TYPE_CHECKING:
    from .audit import Audit
    from .recording import Recorded

MOST = 200  # requests whose tokens are drawn, those with findings first
DETAILED = 5000  # tokens; with more, equal neighbours share a cell
BY = {"g": "chosen", "d": "random", "k": "missing"}  # how a token was chosen, in a result -> kind of a cell
SAYS = {"chosen": "argmax, judged by the model's margin", "random": "sampled, and again from the model's logits",
        "missing": "not judged here: in the request that this one continues, or before the judged events",
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
    right = "" if found["findings"] else "Every generated token is the model's choice after the tokens before it."
    return Document(
        f"{found['recording']}, {found['engine']}", Exit(found["exit"]), [*said, *found["notes"]],
        right, messages(runs),
        [_round(found.get("round"))],
        {"plots": [_strip(texts, found["findings"])] if texts else [],
         "legend": [[kind, words] for kind, words in SAYS.items()] if texts else [], "says": SAYS},
        [_counts(found, texts), totals(replayed), _requests(texts), findings(runs)], found.get("run_notes", ()),
    )


def first_event(run: Data) -> float:
    """The event of a run's first finding. An earlier finding can explain later ones."""
    return min((one["event"] for one in run["findings"]), default=math.inf)


def _round(found: Data | None) -> Listing:
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
    heads = ("request", "prompt tokens", "generated tokens", "sampled tokens", "judged in another request")
    return Listing(heads, [
        (text["request"], str(text["prompt"]), str(text["tokens"]), *(str(text["by"].count(by)) for by in "dk"))
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
        from .result_data import placed

        said = [{"event": one.event, "request": one.request, "row": rows[Row.of(one.place)], "where": placed(one),
                 "says": one.diagnosis, "measured": numbers(one), "command": "", "maps": None}
                for one in audit.verdict.findings]  # fmt: skip
        return sorted(said + ([] if outcome is None else replay.listed(outcome, rows)), key=lambda one: one["event"])

    return {**lanes.data(), "runs": [replay.run_of(audit.recorded.engine, both, lanes, audit.kinds, findings=found)]}
