"""Facts about the ranks of a subject at one event: what each rank decided, called, and holds a copy of.

Leaves out: gathering them (`subject/engines/ranked.py`), and which of them must be equal (`checks/`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from instep_optimized.pipeline import Ran
from instep_optimized.ranks import Call
from instep_reference.contract.place_names import AFTER_LAYERS, STAGE_LEVEL, Place
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
    zero, like  a copied head: whether it is all zero; another rank that holds the same bits
    """

    place: Place
    rank: int
    other: int
    elements: int
    differing: int
    request: str | None = None
    zero: bool = False
    like: int | None = None


@dataclass(frozen=True)
class RankFacts:
    """Facts about all ranks.

    row, memory   the parts of a place's rows and of a request's memory that a rank has (`contract/shards.py`)
    calls         the collectives of each rank in order
    """

    size: int
    row: Callable[[Place], Shard | None]
    memory: Mapping[str, Shard]
    decisions: tuple[Decision, ...] = ()
    replicas: tuple[Replica, ...] = ()
    calls: tuple[tuple[Call, ...], ...] = ()


@dataclass(frozen=True)
class StageFacts:
    """Facts about the pipeline stages of a subject at one event.

    layers     of each stage
    parts      the micro-batches of the event, as the trace has them
    verified   request -> number of the micro-batch of its window, counted over the run, and its place there
    decisions  what all stages must have alike
    ran        the steps that each stage made
    here       the stages that run in this process
    """

    layers: tuple[range, ...]
    parts: tuple[tuple[str, ...], ...] = ()
    verified: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    decisions: tuple[Decision, ...] = ()
    ran: tuple[tuple[Ran, ...], ...] = ()
    here: tuple[int, ...] = ()

    @property
    def count(self) -> int:
        return len(self.layers)

    def stage_of(self, place: Place) -> int | None:
        """The stage that makes a place of the model, or has its memory; None for places of no layer."""
        if place == NO_LAYER or place.component == "length":
            return None
        if place.stage == "trunk" and place.layer == STAGE_LEVEL:
            return 0
        if place.stage != "trunk" or place.layer == AFTER_LAYERS:
            return self.count - 1
        return next((stage for stage, layers in enumerate(self.layers) if place.layer in layers), None)


@dataclass(frozen=True)
class GroupFacts:
    """Facts about the replicas of a data-parallel group at one event.

    owners     request -> its replica
    decisions  what all replicas must have alike
    calls      the collectives of each replica in order
    padded     of each replica: place, padded rows of a collective, and numbers in them that are not 0
    """

    size: int
    owners: Mapping[str, int]
    decisions: tuple[Decision, ...] = ()
    calls: tuple[tuple[Call, ...], ...] = ()
    padded: tuple[tuple[tuple[Place, int, int], ...], ...] = ()
