"""Helpers for tests of pages: a reader of their elements, texts that would be markup, small traces.

Leaves out: a browser (`browser.py`).
"""

import json
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from instep.setting import Setting
from instep.trace.file import Trace, read
from instep_proof.faults.catalogue import TRACES
from instep_reference.contract import engine as e

HOSTILE = "</script><img src=x onerror=alert(1)>"
KINDS = ("gdn", "gdn", "gdn", "attention")
PLAN = SimpleNamespace(
    setting=Setting("plain"), checkpoint=SimpleNamespace(digest="d" * 64, config=SimpleNamespace(layer_kinds=KINDS))
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
