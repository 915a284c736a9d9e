"""Findings for the tools around a pull request: SARIF 2.1.0, and annotations of GitHub.

GitHub refuses a whole log if one result has no file and line. So a notice points at the line of the subject that
raised; or else at the definition of the user's op set or engine; or else at the event's line in the trace or recording;
or else at the definition of our op set. Leaves out: the result itself (`result.py`).
"""

import ast
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from instep_optimized.ops.import_by_name import is_file, split

from ..adapters import OURS, address
from ..trace.file import RECORDING
from .command_lines import near
from .machine import installed
from .result import Result, as_json, runs_of

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
HEAD = 1  # line of a trace before its first event


@dataclass(frozen=True)
class Notice:
    """One finding as a notice.

    rule        the check
    title       where the finding is
    text        the sentence; for the first finding of a run (`first`) the whole message
    file, line  where the notice is shown; an empty file means nowhere
    """

    rule: str
    title: str
    text: str
    file: str
    line: int
    first: bool


def notices(result: Result, given: Path | None = None) -> list[Notice]:
    """Notices of all listed findings of every run. given: the trace or recording."""
    return [notice for run in runs_of(result.found) for notice in _of_run(run, _subject(run), given)]


def _subject(run: Mapping[str, Any]) -> str:
    """The name of the op set or engine; empty for a recording, whose engine is no module of this process."""
    return "" if "recording" in run else str(run.get("engine") or run.get("ops") or "")


def _of_run(run: Mapping[str, Any], subject: str, given: Path | None) -> Iterator[Notice]:
    for number, finding in enumerate(run.get("findings", ())):
        file, line = _placed(finding, subject, given)
        whole = run.get("message") if number == 0 else None
        text = whole or f"{finding['where']}\n{finding['diagnosis']}"
        yield Notice(finding["check"], finding["where"], text, file, line, number == 0)


def _placed(finding: Mapping[str, Any], subject: str, given: Path | None) -> tuple[str, int]:
    raised = finding.get("raised")
    if raised and raised["file"]:
        return near(Path(raised["file"])), int(raised["line"]) or 1
    module, attribute = split(address(subject))
    source = module if is_file(module) else getattr(sys.modules.get(module), "__file__", None)
    if given is not None and (source is None or subject in OURS):
        return near(given), _line(finding, given)
    return ("", 1) if source is None else (near(Path(source)), defined(Path(source), attribute))


def _line(finding: Mapping[str, Any], given: Path) -> int:
    """The line of a finding in a trace, in the events of a recording, or in a file of answers."""
    if given.suffix != ".jsonl":
        return 1
    event, kind = int(finding["event"]), finding.get("kind")
    if kind in ("line", "recording"):
        return max(event, 1)
    return event + 1 + (0 if (given.parent / RECORDING).is_file() else HEAD)


def defined(source: Path, name: str) -> int:
    """The line of a module that defines a name; 1 if there is none."""
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
    """A SARIF log with one run. Every check that has a finding is a rule."""
    rules = list(dict.fromkeys(notice.rule for notice in found))
    return msgspec.json.encode(as_json({
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
                }}] if notice.file else [],
            } for notice in found],
        }],
    }))  # fmt: skip


def workflow_commands(found: Sequence[Notice]) -> list[str]:
    """Annotations of GitHub for the first finding of every run, as GitHub shows at most ten per step."""
    return [
        f"::error {f'file={_property(one.file)},line={one.line},' if one.file else ''}title={_property(one.title)}"
        f"::{_data(one.text)}" for one in found if one.first
    ]


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
