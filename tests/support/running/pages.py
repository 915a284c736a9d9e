"""Helpers for tests of pages: a reader of their elements, texts that would be markup, small traces.

Leaves out: a browser (`browser.py`).
"""

import json
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from instep.campaign.relations import Held
from instep.campaign.relations.result import Run
from instep.setting import Setting
from instep.trace.file import Trace, read
from instep_proof.faults.catalogue import TRACES
from instep_reference.contract import engine as e
from instep_speed.gate.input_and_result import Judged as Clocked
from instep_speed.gate.input_and_result import Question, Report
from instep_speed.gate.statistics import Ratio, Say, Spread

HOSTILE = "</script><img src=x onerror=alert(1)>"
KINDS = ("gdn", "gdn", "gdn", "attention")
PLAN = SimpleNamespace(
    setting=Setting("plain"), checkpoint=SimpleNamespace(digest="d" * 64, config=SimpleNamespace(mixers=KINDS))
)


def trace_of(*events: e.AnyEvent) -> Trace:
    """These events under the header of a recorded trace."""
    known = read(TRACES / "ragged.jsonl")
    return Trace(Path("some.jsonl"), known.header, events, {}, "")


def round_of(*names: str) -> tuple[e.AnyEvent, ...]:
    """Two tokens of prompt, a draft, a verify and a commit of one of four drafts, and the end."""
    return (
        *(e.Admit(name, (1, 2)) for name in names), e.Forward(tuple(e.Row(name, "prefill", 2, 3) for name in names)),
        e.Draft(names, ((4, 5, 6, 7),) * len(names)), e.Forward(tuple(e.Row(name, "verify") for name in names)),
        e.Commit(names, (e.Path((1,), 7),) * len(names)), *(e.Finish(name) for name in names),
    )  # fmt: skip


class Read(HTMLParser):
    """The elements of a page, with the text of each kind."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.texts: dict[str, list[str]] = {}
        self._open: list[str] = []
        self.data: Any = None
        self.cells: list[list[str]] = []
        self.feed(page)
        self.data = json.loads(next(text for text in self.texts["script"] if text.startswith("{")))

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.append(tag)
        if tag == "td":
            self.cells.append([])
        if tag not in ("meta", "br"):
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open:
            self.texts.setdefault(self._open[-1], []).append(data)
            if self._open[-1] == "td":
                self.cells[-1].append(data)


def relation_run(*each: Held, plan: Any = PLAN, bitwise: bool = False, checkpoint: Path | None = None) -> Run:
    trace = Path("fixtures/traces/adaptive.jsonl")
    case: Any = SimpleNamespace(trace=read(trace), plan=plan, bitwise=bitwise)
    return Run(trace, checkpoint, None, case, each)


def gate_report(
    question: Question, *says: tuple[str, str, Say], refused: str = "", wide: bool = False, pairs: Any = ()
) -> Report:
    """Cases by a clock, and what is said of them; wide: of what is noisy no ratio is known well."""
    spread, same = Spread(0.0125, 0.012, 0.013), Ratio(1.0, 0.99, 1.01, 120)
    change = {Say.HELD: Ratio(1.01, 1.0, 1.02, 120), Say.SLOWER: Ratio(1.2, 1.1, 1.3, 120), Say.NOISY: same}
    apart = {Say.NOISY: Ratio(1.0, 0.9, 1.1, 120)} if wide else {}
    judged = [Clocked(case, clock, spread, spread, change[said], apart.get(said, same), said, pairs)
              for case, clock, said in says]  # fmt: skip
    return Report(question, refused, judged, elements=12_345, acceptance={"before": 1.5, "after": 1.25},
                  reference_acceptance=1.5)  # fmt: skip
