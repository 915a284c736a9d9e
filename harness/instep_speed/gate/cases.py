"""The timed cases: one event of a round, on an engine that goes through legal rounds only.

Two cheaper ways were rejected. Verifying the same window again and again is not legal, so an engine may do anything
with it: free its memory, or answer from a copy. Calling the commit strategy alone is not what a user waits for: a
commit is acceptance, the move of the states AND draft extend.

So every round is played in full: draft, verify, commit, each with the recorded choices. The clock runs only during the
case's own event, and one walk serves all cases. A lap goes through all recorded rounds. Before it, while the clock is
stopped, every request is aborted, admitted again and given its state after the prompt. So every lap is the same work on
the same bits, with the same uneven acceptance, and one lap can be timed by the host, the next by the device. Leaves
out: clocks (`clock.py`), and the choice of arms (`gate.py`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from types import MappingProxyType

from instep.player import Player
from instep_reference.contract import engine as e

from .clock import NOTHING, Clock, Reading
from .forced_trace import Course

# draft   the proposals of a round; the recorded ones are in force
# verify  the forward of one window per request (T = num_steps + 1)
# commit  acceptance, the move of conv windows and states, and draft extend
CASES: Mapping[str, type[e.AnyEvent]] = {"draft": e.Draft, "verify": e.Forward, "commit": e.Commit}
USUAL = ("verify", "commit")  # cases of a gate that names none; with a block drafter all cases are its own
NO_DRAG: Mapping[str, float] = MappingProxyType({})
_BY_EVENT = {event: name for name, event in CASES.items()}


@dataclass(frozen=True)
class Shown:
    """The result of a walk through the course: the states, and the engine's own count of accepted drafts a window."""

    states: dict[str, e.RequestState]
    acceptance: float


class Walk:
    """An engine that walks through the course; `laps` may be called again and again."""

    def __init__(self, engine: e.Engine, course: Course) -> None:
        self.player, self.course = Player("timed", engine), course  # without observers
        for event in course.opening:
            self.player.serve(event)
        for name in course.prompts:
            self.player.serve(e.Save(name, _start(name)))

    def laps(self, count: int, clock: Clock, drag: Mapping[str, float] = NO_DRAG) -> dict[str, Reading]:
        """Play the course `count` times in each of the clock's ways, in turn; return the summed seconds of each case.

        drag: case -> part by which its events compute longer
        """
        spent = dict.fromkeys(CASES, NOTHING)
        for timed in clock.ways * count:
            self.restart()
            for event in self._events():
                work, case = partial(self.player.serve, event), _BY_EVENT.get(type(event))
                if case is None:
                    work()
                else:
                    spent[case] = spent[case].plus(timed(work, drag.get(case, 0.0)))
        return spent

    def until(self, case: str) -> e.AnyEvent:
        """Play the first round up to the case's event -> this event, which has not run yet."""
        self.restart()
        for event in self.course.rounds[0]:
            if isinstance(event, CASES[case]):
                return event
            self.player.serve(event)
        raise AssertionError(f"a round without {case}")

    def show(self) -> Shown:
        """Play the course once -> the states and the acceptance."""
        self.restart()
        accepted: list[int] = []
        for event in self._events():
            answer = self.player.serve(event).answer
            if isinstance(answer, e.Committed):
                accepted += answer.own_num_correct_drafts.tolist()
        return Shown(self.states(), sum(accepted) / len(accepted))

    def states(self) -> dict[str, e.RequestState]:
        """Request -> its logical state now."""
        return {name: self.player.engine.state(name) for name in self.course.prompts}

    def restart(self) -> None:
        """Bring every request back to the state after its prompt, by legal events."""
        for name in self.course.prompts:
            self.player.serve(e.Abort(name))
        for name, prompt in self.course.prompts.items():
            self.player.serve(e.Admit(name, prompt))
            self.player.serve(e.Load(name, _start(name)))

    def _events(self) -> Iterator[e.AnyEvent]:
        return chain.from_iterable(self.course.rounds)


def _start(name: str) -> str:
    return f"{name} after its prompt"
