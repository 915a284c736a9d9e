"""What a result found, for the tools around a pull request: SARIF 2.1.0, and the annotations of GitHub.

A notice stands at the line of the subject's file that raised, else where its op set or engine is defined, else at the
event's line of the trace. Leaves out: the result itself (`result.py`).
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from .command import near
from .machine import installed
from .result import Result

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
HEAD = 1  # line of a trace before its first event


@dataclass(frozen=True)
class Notice:
    """rule: the check;  title: in a few words;  text: the rest;  file, line: where it is shown; run: number of the run;
    first: whether it is the first finding of its run, whose text is the whole message."""

    rule: str
    title: str
    text: str
    file: str
    line: int
    first: bool


def notices(result: Result, trace: Path | None = None) -> list[Notice]:
    """Of every run all findings that are listed."""
    found = result.found
    return [
        notice for run in found.get("runs", [found] if "findings" in found else [])
        for notice in _of_run(run, str(run.get("engine") or run.get("ops") or found.get("ops") or ""), trace)
    ]


def _of_run(run: Mapping[str, Any], subject: str, trace: Path | None) -> Iterator[Notice]:
    for number, finding in enumerate(run.get("findings", ())):
        file, line = _placed(finding, subject, trace)
        whole = run.get("message") if number == 0 else None
        text = whole or f"{finding['where']}\n{finding['diagnosis']}"
        yield Notice(finding["check"], finding["where"], text, file, line, number == 0)


def _placed(finding: Mapping[str, Any], subject: str, trace: Path | None) -> tuple[str, int]:
    raised = finding.get("raised")
    if raised and raised["file"]:
        return near(Path(raised["file"])), int(raised["line"]) or 1
    module, _, attribute = subject.partition(":")
    source = getattr(sys.modules.get(module), "__file__", None) if attribute else None
    if source:
        return near(Path(source)), defined(Path(source), attribute)
    return ("instep", 1) if trace is None else (near(trace), int(finding["event"]) + HEAD + 1)


def defined(source: Path, name: str) -> int:
    """The line of a module on which a name is given its value; 1 if that cannot be told."""
    try:
        body = ast.parse(source.read_text(encoding="utf-8")).body
    except (OSError, SyntaxError, UnicodeDecodeError):
        return 1
    for node in reversed(body):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        names = [target.id for target in targets if isinstance(target, ast.Name)]
        if name in (*names, getattr(node, "name", None)):
            return node.lineno
    return 1


def sarif(found: Sequence[Notice]) -> bytes:
    """A log of one run. Every check that found something is a rule."""
    rules = list(dict.fromkeys(notice.rule for notice in found))
    return msgspec.json.encode({
        "$schema": SCHEMA, "version": "2.1.0",
        "runs": [{
            "tool": {"driver": {
                "name": "instep", "version": installed("instep") or "0", "rules": [
                    {"id": rule, "shortDescription": {"text": f"the check {rule} of instep"}} for rule in rules],
            }},
            "results": [{
                "ruleId": notice.rule, "ruleIndex": rules.index(notice.rule), "level": "error",
                "message": {"text": notice.text},
                "locations": [{"physicalLocation": {
                    "artifactLocation": {"uri": quote(Path(notice.file).as_posix())},
                    "region": {"startLine": notice.line},
                }}],
            } for notice in found],
        }],
    })  # fmt: skip


def workflow_commands(found: Sequence[Notice]) -> list[str]:
    """Annotations of GitHub, one for the first finding of every run: it shows ten of a step at most."""
    return [
        f"::error file={_property(one.file)},line={one.line},title={_property(one.title)}::{_data(one.text)}"
        for one in found if one.first
    ]


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
