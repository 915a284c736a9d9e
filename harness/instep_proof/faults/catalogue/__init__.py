"""The catalogue of planted faults: one file per family, each a tuple FAULTS, and one line per family in FAMILIES.

Leaves out: what a fault is (`instep_proof/faults/catalogue/fault.py`), and classes of faults in features that do not
exist.
"""

from __future__ import annotations

from collections.abc import Mapping

from . import (
    changed_answers,
    chunks,
    draft,
    drafters,
    experts,
    graph,
    late_reads,
    miscellaneous,
    norms,
    numerics,
    offloaded_prefixes,
    one_path_differs,
    prefixes,
    rings,
    rollback,
    sampling,
    scheduling,
    slots,
    storage,
    taken_from_neighbours,
    trees,
    wrong_dispatch,
)
from .fault import TRACES as TRACES
from .fault import Fault

FAMILIES: Mapping[str, tuple[Fault, ...]] = {
    "rollback": rollback.FAULTS,
    "rings": rings.FAULTS,
    "dispatch": wrong_dispatch.FAULTS,
    "graph": graph.FAULTS,
    "slots": slots.FAULTS,
    "chunks": chunks.FAULTS,
    "scheduling": scheduling.FAULTS,
    "draft": draft.FAULTS,
    "drafters": drafters.FAULTS,
    "numerics": numerics.FAULTS,
    "norms": norms.FAULTS,
    "paths": one_path_differs.FAULTS,
    "storage": storage.FAULTS,
    "neighbours": taken_from_neighbours.FAULTS,
    "answers": changed_answers.FAULTS,
    "readings": late_reads.FAULTS,
    "sampling": sampling.FAULTS,
    "prefixes": prefixes.FAULTS,
    "tiers": offloaded_prefixes.FAULTS,
    "trees": trees.FAULTS,
    "experts": experts.FAULTS,
    "others": miscellaneous.FAULTS,
}
FAMILY_OF = {fault.id: family for family, faults in FAMILIES.items() for fault in faults}


def by_id() -> dict[str, Fault]:
    """Map every fault's name to the fault."""
    return {fault.id: fault for faults in FAMILIES.values() for fault in faults}
