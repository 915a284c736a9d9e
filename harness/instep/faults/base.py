"""What a fault is: an edit of the source with its origin, the trace that shows it, and what must be said of it.

Leaves out: planting it (`plant.py`), and which there are (`catalogue/`, one file per family).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from instep_reference.contract.place import Place

from ..rig.setting import Setting


@dataclass(frozen=True)
class Edit:
    """file: inside the copy, package first ("instep_optimized/commit/snapshot.py"); old: whole statements that stand
    there exactly once; new: what takes their place."""

    file: str
    old: str
    new: str


@dataclass(frozen=True)
class Fault:
    """One planted fault.

    id       kebab case, unique over all families: the class, then the variant
    kind     its class, as the design names it ("commit-index")
    what     one sentence: what the planted source does
    origin   the project and number of the bug that it stands for; empty where the class is ours
    trace    stem of a file under `fixtures/traces/faults`: the smallest trace that shows it
    event    the first event of that trace at which something is wrong, and the place of the first finding there
    says     part of the diagnosis that names it; empty: the size of an error is all that can be said
    seen_by  names of the checks that are meant to see it: at least one must
    blind    names of checks that compare there and cannot see it
    how      how the engine is set up, as `instep replay` is
    relation the relation that must find it (`instep relations`), where no single run can
    """

    id: str
    kind: str
    what: str
    origin: str
    edits: tuple[Edit, ...]
    trace: str
    how: Setting
    event: int
    place: Place
    says: str
    seen_by: tuple[str, ...]
    blind: tuple[str, ...] = ()
    relation: str | None = None


def speaking(how: Setting) -> Setting:
    """The same setting where it says text: labels say none, so `plain` speaks for them."""
    return replace(how, ops="plain") if how.ops == "ledger" else how
