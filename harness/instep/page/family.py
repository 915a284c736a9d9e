"""Results as pages: which page tells which result, and what all of them have in common.

A page is made of the result's data, as `--json` writes it, so a file gives the same page. What only the command knows
comes beside it: the events, of a trace that is at hand. Leaves out: what each page tells (the files named below).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from instep_reference.contract.errors import BadInput

from ..report import result
from .document import Page, document

# The file beside this one that tells a result -> a field by which such a result is known; of `runs`, one of every run.
FAMILY: Mapping[str, str] = {
    "audit": "recording", "bench": "rates", "faults": "fired", "fuzz": "campaigns", "gate": "judged", "power": "trials",
    "relations": "runs.relation", "runs": "runs.findings",
}


def page_of(found: Mapping[str, Any], charts: Mapping[str, Any] | None = None, terminal: str = "") -> bytes:
    """charts: of the events;  terminal: what the command prints"""
    found = _plain(found)
    name = next((name for name, field in FAMILY.items() if _has(found, field)), None)
    if name is None:
        commands = "audit, bench, faults, fuzz, gate, op, relations, replay, shapes or streams"
        raise BadInput("result", found=f"what `{found.get('command')}` wrote", expected=f"a result of {commands}")
    told: Callable[[Mapping[str, Any]], Page] = import_module(f".{name}", __package__).page
    page = told(found)
    return document(replace(page, charts={**page.charts, **(charts or {})}, terminal=terminal, made=found))


def page_of_file(path: Path) -> bytes:
    """Of a result file."""
    found = result.read(path)
    try:
        return page_of(found)
    except (ArithmeticError, AttributeError, ImportError, LookupError, RecursionError, TypeError, ValueError) as error:
        said = f"{type(error).__name__}: {error}"
        raise BadInput(str(path), found=f"a result that no page can be made of ({said})",
                       expected="one as --json writes it, unchanged") from error


def _has(found: Mapping[str, Any], field: str) -> bool:
    first, _, inner = field.partition(".")
    value = found.get(first)
    of_all = isinstance(value, list) and value and all(isinstance(one, dict) and inner in one for one in value)
    return first in found and (not inner or bool(of_all))


def _plain(value: Any) -> Any:
    """As a file has it: no tuples, and numbers that JSON has none for as text."""
    if isinstance(value, Mapping):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
