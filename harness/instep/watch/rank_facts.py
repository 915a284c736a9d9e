"""Facts about the ranks of a subject at one event: what each rank decided, called, and holds a copy of.

Leaves out: gathering them (`subject/engines/ranked.py`), and which of them must be equal (`checks/`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from instep_optimized.ranks import Call
from instep_reference.contract.place_names import Place
from instep_reference.contract.shards import Shard

from .pool_addresses import NO_LAYER


@dataclass(frozen=True)
class Decision:
    """One decision as every rank made it.

    values  one per rank;  request: of which, if it is one's;  place: where the event makes it
    """

    what: str
    values: tuple[object, ...]
    request: str | None = None
    place: Place = NO_LAYER


@dataclass(frozen=True)
class Replica:
    """Something that two ranks hold with the same bits: elements, and how many of them differ.

    other    the rank that `rank` is compared with
    """

    place: Place
    rank: int
    other: int
    elements: int
    differing: int
    request: str | None = None


@dataclass(frozen=True)
class RankFacts:
    """Facts about all ranks.

    rows, memory  the parts of named rows and of a request's memory that a rank has (`contract/shards.py`)
    calls         the collectives of each rank in order
    """

    size: int
    rows: Mapping[str, Shard]
    memory: Mapping[str, Shard]
    decisions: tuple[Decision, ...] = ()
    replicas: tuple[Replica, ...] = ()
    calls: tuple[tuple[Call, ...], ...] = ()
