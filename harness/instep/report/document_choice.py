"""The document of a result: which module makes it from the data that `--json` writes.

Leaves out: the content of each document (the modules named below).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from instep_reference.contract.errors import BadInput

from .document import Document

# Module of a document, and its function unless that is `document` -> the field that identifies its results; after
# `runs.`, a field that every run has.
FAMILY: Mapping[str, str] = {
    "instep.audit.result_document": "recording", "instep_speed.bench.result_document": "rates",
    "instep_proof.faults.result_document": "fired", "instep.campaign.fuzz.result_document": "campaigns",
    "instep_speed.gate.result_document": "judged",
    "instep_speed.gate.result_document:calibration_document": "trials",
    "instep.campaign.relations.result_document": "runs.relation", "instep.report.runs_document": "runs.findings",
}


def document_of(found: Mapping[str, Any]) -> Document:
    """The document of a result's data."""
    name = next((name for name, field in FAMILY.items() if _has(found, field)), None)
    if name is None:
        commands = "audit, bench, faults, fuzz, gate, op, relations, replay, shapes or streams"
        raise BadInput("result", found=f"what `{found.get('command')}` wrote", expected=f"a result of {commands}")
    if find_spec(package := name.partition(".")[0]) is None:
        raise BadInput("result", found=f"what `{found.get('command')}` wrote", expected=f"the package {package}")
    module, _, function = name.partition(":")
    make: Callable[[Mapping[str, Any]], Document] = getattr(import_module(module), function or "document")
    return replace(make(found), made=found)


def _has(found: Mapping[str, Any], field: str) -> bool:
    first, _, inner = field.partition(".")
    value = found.get(first)
    of_all = isinstance(value, list) and value and all(isinstance(one, dict) and inner in one for one in value)
    return first in found and (not inner or bool(of_all))

