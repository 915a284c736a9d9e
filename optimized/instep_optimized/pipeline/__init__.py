"""Pipeline stages: the schedule of micro-batches, and the relay that brings a choice of the last stage to the others.

Leaves out: the engine of one stage (`stage_engine.py`), its ops (`ops_of_stage.py`), and the layers of a stage
(`instep_reference.contract.shards`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple, TypeVar

from ..ranks import Comm

T = TypeVar("T")
Action = Literal["run", "relay"]
Work = Literal["forward", "choice"]  # choice: a draft or a commit, which the last stage decides


class Step(NamedTuple):
    """One step of a stage. tick: its time; run: it serves the micro-batch, relay: it receives the last stage's choice.
    """

    tick: int
    stage: int
    micro_batch: int
    action: Action


class Ran(NamedTuple):
    """A step that a stage has made, with the requests that it served, and the rows of the relay that it received."""

    step: Step
    requests: tuple[str, ...]
    relayed: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class Stage:
    """One stage of a pipeline. comm: its rank is the number of the stage

    micro_batches  into how many parts a batch is cut, at most
    clock          waits until every stage is at this tick
    """

    comm: Comm
    micro_batches: int
    clock: Callable[[int], None]

    @property
    def number(self) -> int:
        return self.comm.rank

    @property
    def count(self) -> int:
        return self.comm.size

    @property
    def first(self) -> bool:
        return self.number == 0

    @property
    def last(self) -> bool:
        return self.number == self.count - 1


def schedule(work: Work, stages: int, micro_batches: int) -> tuple[Step, ...]:
    """Return the steps of one event, by tick and stage.

    A forward goes from stage to stage: stage s runs micro-batch i while stage s - 1 runs i + 1. A choice begins on the
    last stage, which relays it to stage 0. Each stage relays it to the next one, one tick later. In one tick a relay
    comes before a run.
    """
    last = stages - 1
    steps = list[Step]()
    for number in range(micro_batches):
        for stage in range(stages):
            if work == "forward":
                steps.append(Step(stage + number, stage, number, "run"))
                if stage < last:
                    steps.append(Step(stages + number + stage, stage, number, "relay"))
            else:
                steps.append(Step(number if stage == last else number + 1 + stage, stage, number, "run"))
    return tuple(sorted(steps, key=lambda step: (step.tick, step.stage, step.action)))


def cut(members: Sequence[T], parts: int) -> list[Sequence[T]]:
    """Cut a batch into parts of almost equal size, in order. There is no empty part."""
    parts = min(parts, len(members))
    ends = [len(members) * part // parts for part in range(parts + 1)] if parts else []
    return [members[begin:end] for begin, end in pairwise(ends)]


class Relay(NamedTuple):
    """One row of a relay, from the last stage to all others.

    number   the micro-batch: of a commit, the one in which the forward verified the request, counted over the run
    place    the request's row in that micro-batch
    values   of a draft: the tokens of the window after the root; of a forward: the new root; of a commit: `Accepted`
    """

    number: int
    place: int
    values: tuple[int, ...]


class Accepted(NamedTuple):
    """The values of a relayed commit. path: T columns, -1 padded; cap: -1 means none;  last, bonus: as in `Acceptance`
    """

    accept_len: int
    last: int
    bonus: int
    cap: int
    path: tuple[int, ...]

    @classmethod
    def of(cls, values: Sequence[int]) -> "Accepted":
        accept_len, last, bonus, cap, *path = values
        return cls(accept_len, last, bonus, cap, tuple(path))
