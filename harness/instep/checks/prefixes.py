"""How a finding in a tracked prefix is told: beside the place and the request stands the name of the prefix.

Leaves out: the comparisons, which the checks make as they do for a request's own memory.
"""

from __future__ import annotations

from dataclasses import replace

from instep_reference.contract.place import AFTER_LAYERS, Place

from ..verdict import Comparison

FINAL = Place("trunk", AFTER_LAYERS, "final")  # of the last token of a prefix: the draft head takes it in at a load


def of_prefix(under: str, result: Comparison) -> Comparison:
    """The comparison as one of the prefix that is tracked under this name; none: of the request's own memory."""
    if not under or not result.diagnosis:
        return result
    said = f'of the prefix that is tracked as "{under}": {result.diagnosis}'
    explained = result.explained and replace(result.explained, says=said)
    return replace(result, diagnosis=said, explained=explained)
