"""The micro-batches of every event of an engine with pipeline stages, and the steps of their schedule.

They follow from the trace alone. Leaves out: the engine's own schedule (`instep_optimized.pipeline`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

from instep_reference.contract.engine import Commit, Event, Forward
from instep_reference.contract.event_facts import facts, named

Due = tuple[int, int, str, tuple[str, ...]]  # tick, micro-batch, run or relay, requests


@dataclass
class MicroBatches:
    """Cuts the batch of each event in order. most: parts of a batch

    `verified` has the number of the micro-batch with the window of a request, and its place there.
    """

    most: int
    verified: dict[str, tuple[int, int]] = field(default_factory=dict)
    _windows: int = 0  # micro-batches with windows so far

    def of(self, event: Event) -> tuple[tuple[str, ...], ...]:
        """Return the micro-batches of the next event. A commit has those of the forward, in its own order."""
        if not facts(event).batch:
            return ()
        names = named(event)
        if isinstance(event, Commit):
            return tuple(tuple(run) for _, run in groupby(names, lambda name: self.verified[name][0]))
        count = min(self.most, len(names))
        parts = tuple(names[len(names) * n // count : len(names) * (n + 1) // count] for n in range(count))
        if isinstance(event, Forward):
            kinds = {row.request: row.kind for row in event.rows}
            for part in parts:
                windows = [name for name in part if kinds[name] == "verify"]
                self._windows += bool(windows)
                self.verified |= {name: (self._windows, place) for place, name in enumerate(windows)}
        return parts


def due_steps(event: Event, parts: Sequence[tuple[str, ...]], stage: int, stages: int) -> tuple[Due, ...]:
    """Return the steps of one stage in an event.

    A forward reaches a stage one tick after the stage before. The choice of the last stage takes one tick more to each
    stage, stage 0 first. A draft or a commit is served with it.
    """
    last, found = stages - 1, list[Due]()
    for number, part in enumerate(parts):
        if not isinstance(event, Forward):
            found.append((number if stage == last else number + 1 + stage, number, "run", part))
            continue
        found.append((stage + number, number, "run", part))
        if stage < last:
            kinds = {row.request: row for row in event.rows}
            found.append((stages + number + stage, number, "relay",
                          tuple(name for name in part if kinds[name].kind != "verify")))  # fmt: skip
    return tuple(sorted(found, key=lambda step: (step[0], step[2])))
