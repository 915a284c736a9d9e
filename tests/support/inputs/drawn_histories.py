"""Draw legal events by the rules of a trace alone, without an engine, and count what requests go through.

    PYTHONPATH=reference:optimized:harness:tests python -m support.inputs.drawn_histories --out FOLDER

writes the traces of `TRACES`, which meet pairs of facts about one request that no other trace meets
(`instep.campaign.fuzz.request_histories`). Leaves out: runs next to an engine (`instep fuzz`).
"""

import argparse
import copy
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, cast

from msgspec.structs import replace

from instep.campaign.fuzz import draw_events
from instep.campaign.fuzz.campaign import edges_of
from instep.campaign.fuzz.drawn_run import Example
from instep.campaign.fuzz.event_turns import Past, Turn, remember
from instep.campaign.fuzz.request_histories import Histories, Pair
from instep.campaign.soak.soak import Seeded, Turns
from instep.run.build_compared_engines import Plan
from instep.run.engine_without_comparison import header_of
from instep.setting import Setting
from instep.trace.event_rules import EventRules
from instep.trace.file import read
from instep.trace.header import Header, Model, Part
from instep.trace.policy import Policy
from instep_reference.contract import engine as e
from instep_reference.contract.checkpoint import Checkpoint

from .recordings import TINY

EVENTS = 120  # of a drawn run
NODES = 4  # of a tree, at most


@dataclass
class Drawn:
    """A run without engines, in place of an `Example`."""

    rules: EventRules
    events: list[e.AnyEvent] = field(default_factory=list)
    refuses: bool = False


class Rules:
    """The host of such a run: it applies events to the rules, and counts pairs of facts."""

    def __init__(self, checkpoint: Checkpoint, header: Header) -> None:
        self.header = header
        self.edges, self.drawn, self.histories = edges_of(checkpoint), Drawn(EventRules(header)), Histories()
        self.known: dict[Pair, int] = {}
        self._past = Past()

    def begin(self, choose: draw_events.Draw) -> Example:
        raise NotImplementedError

    def serve(self, example: Example, event: Any) -> None:
        self.note(event)

    def note(self, event: e.AnyEvent) -> None:
        rules = self.drawn.rules.serving(event)
        before = rules.table.as_it_stands()
        self.drawn.rules.apply(event)
        turn = Turn(before, event, rules.table, self._past)
        self.histories.note(turn)
        remember(turn)
        self.drawn.events.append(event)

    def refused(self, event: Any) -> None:
        """It found no room; another one is drawn."""

    def failed(self, error: Exception) -> NoReturn:
        raise error


def header(checkpoint: Checkpoint, data: Seeded, *, trees: int) -> Header:
    """Draw a room with tracked prefixes. trees: the most nodes of a window; 0: chains, and several step counts"""
    room, steps = draw_events.room(data.draw), draw_events.candidates(data.draw)
    room = draw_events.with_prefixes(data.draw, replace(room, trim=True), always=True)
    if trees:
        room, steps = draw_events.with_trees(data.draw, room, steps, trees, grow=False)
    adaptive = {} if trees else {"adaptive": {"candidate_steps": sorted(steps), **draw_events.HASTY}}
    policy = Policy("drawn", "Events are drawn.", room, (), steps[0], **cast(Any, adaptive), seed=1)
    return header_of(policy, checkpoint, model=Model.of(checkpoint, TINY, "."))[0]


def draw(checkpoint: Checkpoint, seed: str, *, trees: int = 0, events: int = EVENTS) -> Rules:
    """Draw a run of that many events or a few more."""
    data = Seeded(seed)
    host = Rules(checkpoint, header(checkpoint, data, trees=trees))
    turns = Turns(host, cast(Example, host.drawn), data)
    turns.enter_some()
    while len(host.drawn.events) < events:
        turns.turn()
    return host


# Traces that meet as many pairs as possible


class Directed(NamedTuple):
    """How a trace is drawn.

    runs     drawn runs of each kind, whose pairs are due; trees: the most nodes of a window, 0: chains
    turns    turns that are drawn at a time; tries: how many draws of them compete; events: the most of the trace
    """

    runs: int
    trees: int
    seed: str
    turns: int
    tries: int
    events: int


TRACES = {
    "histories-chains": Directed(40, 0, "3c", 5, 48, 150), "histories-trees": Directed(40, NODES, "3c", 5, 48, 150),
    "histories-rest": Directed(10, 0, "q5", 7, 40, 170),
}  # fmt: skip


def directed(checkpoint: Checkpoint, due: set[Pair], how: Directed) -> Rules:
    """Draw a run in which every few turns are the best of several: those that meet the most due pairs per event."""
    data = Seeded(how.seed)
    best = Rules(checkpoint, header(checkpoint, data, trees=how.trees))
    turns = Turns(best, cast(Example, best.drawn), data)
    turns.enter_some()
    for part in count():
        if len(best.drawn.events) >= how.events or not due - best.histories.met.keys():
            break
        drawn = [_continued(best, f"{how.seed}/{part}/{number}", how.turns) for number in range(how.tries)]
        best = max(drawn, key=partial(_gain, best, due))
    return best


def _continued(host: Rules, seed: str, count: int) -> Rules:
    after = copy.deepcopy(host)
    turns = Turns(after, cast(Example, after.drawn), Seeded(seed))
    for _ in range(count):
        turns.turn()
    return after


def _gain(before: Rules, due: set[Pair], after: Rules) -> float:
    new = due & after.histories.met.keys() - before.histories.met.keys()
    return len(new) / (3 + len(after.drawn.events) - len(before.drawn.events))


def reached(checkpoint: Checkpoint, runs: int) -> set[Pair]:
    """The pairs of facts that drawn runs meet, half of them with trees."""
    return {pair for number in range(runs) for trees in (0, NODES)
            for pair in draw(checkpoint, f"{number}/{trees}", trees=trees).histories.met}  # fmt: skip


def met(checkpoint: Checkpoint, traces: Iterable[Path]) -> set[Pair]:
    """The pairs of facts that the events of recorded traces meet."""
    found = set[Pair]()
    for trace in map(read, traces):
        host = Rules(checkpoint, trace.header)
        for event in trace.events:
            host.note(event)
        found |= host.histories.met.keys()
    return found


def record(checkpoint: Checkpoint, host: Rules, path: Path, trees: int) -> None:
    """Serve the events next to the reference, and write its choices as a trace."""
    drawn = host.header
    kind = "trees" if trees else "chains"
    claim = f"Requests, with windows that are {kind}, go through pairs of conditions that no shorter trace has."
    named = replace(drawn, name=path.stem, claim=claim, replay=(Part("ledger"), Part("plain")))
    example = Example(Plan.of(named, checkpoint, Setting(), "drawn", TINY), named)
    for number, event in enumerate(host.drawn.events, 1):
        example.serve(event, last=number == len(host.drawn.events))
    example.write(path, named.near(TINY, path.parent))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("names", nargs="*", default=[*TRACES], help="of the traces to write")
    given = parser.parse_args()
    checkpoint, others = Checkpoint.open(TINY), [*Path("fixtures/traces").rglob("*.jsonl")]
    for name in given.names:
        how = TRACES[name]
        later = [*TRACES][[*TRACES].index(name) :]
        due = reached(checkpoint, how.runs) - met(checkpoint, (path for path in others if path.stem not in later))
        host = directed(checkpoint, due, how)
        record(checkpoint, host, given.out / f"{name}.jsonl", how.trees)
        left = sorted(due - host.histories.met.keys())
        print(f"{name}: {len(due)} pairs were due, {len(left)} are left after {len(host.drawn.events)} events: {left}")


if __name__ == "__main__":
    main()
