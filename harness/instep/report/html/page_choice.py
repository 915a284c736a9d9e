"""Choose the document for a result, and make its page.

A document is made from the data that `--json` writes, so a file gives the same page. Only the command adds more: charts
of events, if it has the trace. Leaves out: the content of each page (the files named below).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from instep_reference.contract.errors import BadInput

from .. import result
from ..document import Document

# Module of a page, and its function unless that is `page` -> the field that identifies its results; after `runs.`, a
# field that every run has.
FAMILY: Mapping[str, str] = {
    "instep.audit.page": "recording", "instep_speed.bench.page": "rates", "instep_proof.faults.page": "fired",
    "instep.campaign.fuzz.page": "campaigns", "instep_speed.gate.page": "judged",
    "instep_speed.gate.page:calibration_page": "trials", "instep.campaign.relations.page": "runs.relation",
    "instep.report.html.runs_page": "runs.findings",
}


def page_of(found: Mapping[str, Any], charts: Mapping[str, Any] | None = None, terminal: str = "") -> bytes:
    """The page of a result's data.  charts: charts of events;  terminal: the printed output of the command"""
    from .write_page import write_page

    made = document_of(found)
    return write_page(replace(made, charts={**made.charts, **(charts or {})}, terminal=terminal))


def document_of(found: Mapping[str, Any]) -> Document:
    """The document of a result's data."""
    found = _plain(found)
    name = next((name for name, field in FAMILY.items() if _has(found, field)), None)
    if name is None:
        commands = "audit, bench, faults, fuzz, gate, op, relations, replay, shapes or streams"
        raise BadInput("result", found=f"what `{found.get('command')}` wrote", expected=f"a result of {commands}")
    if find_spec(package := name.partition(".")[0]) is None:
        raise BadInput("result", found=f"what `{found.get('command')}` wrote", expected=f"the package {package}")
    module, _, function = name.partition(":")
    make: Callable[[Mapping[str, Any]], Document] = getattr(import_module(module), function or "page")
    return replace(make(found), made=found)


def page_of_file(path: Path) -> bytes:
    """The page of a result file."""
    found = result.read(path)
    try:
        return page_of(found)
    except (ArithmeticError, AttributeError, ImportError, LookupError, RecursionError, TypeError, ValueError) as error:
        said = f"{type(error).__name__}: {error}"
        raise BadInput(str(path), found=f"a damaged result ({said})",
                       expected="a file as --json writes it, unchanged") from error


def _has(found: Mapping[str, Any], field: str) -> bool:
    first, _, inner = field.partition(".")
    value = found.get(first)
    of_all = isinstance(value, list) and value and all(isinstance(one, dict) and inner in one for one in value)
    return first in found and (not inner or bool(of_all))


def _plain(value: Any) -> Any:
    """The data as in a file: lists for tuples, and text for numbers that JSON does not have."""
    if isinstance(value, Mapping):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
