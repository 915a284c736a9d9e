"""The turns of a soak: the rules of `fuzz/hypothesis_machine.py`, one after another, without Hypothesis around them.

Leaves out: what a rule does, and what it draws. Nothing is shrunk here: a finding is cut to its last stretch.
"""

from random import Random
from typing import TypeVar

from hypothesis import strategies as st
from hypothesis.control import BuildContext
from hypothesis.errors import StopTest
from hypothesis.internal.conjecture.data import ConjectureData
from hypothesis.strategies import SearchStrategy

from instep_reference.contract.engine import Abort, Evict, Finish, Idle, SetNumSteps
from instep_reference.contract.errors import InstepError
from instep_reference.contract.event_facts import Phase

from ..fuzz import draw_events
from ..fuzz.drawn_run import Example
from ..fuzz.hypothesis_machine import Host, Machine
from ..fuzz.same_draws_from_seed import by_seed_alone

T = TypeVar("T")

MOST_SAVED = 12  # copies per set of engines, for memory is to stay flat; where prefixes are tracked a stretch ends them
TRIES = 1000  # of one draw; half of all succeed at worst
ROUNDS = 2  # of three turns, this many are a round if one is legal
MAKES_ROOM = ("preempt", "abort", "finish", "evict", "offload")  # what a scheduler does when something finds no room


class Seeded:
    """Draws from a strategy with a seed, as `data.draw` of Hypothesis does."""

    def __init__(self, seed: str) -> None:
        self._random = Random(seed)

    def draw(self, strategy: SearchStrategy[T]) -> T:
        with by_seed_alone():
            for _ in range(TRIES):
                data = ConjectureData(random=self._random)
                try:
                    with BuildContext(data, wrapped_test=Seeded.draw):  # without one, a list of no element is an error
                        return data.draw(strategy)
                except StopTest:  # a draw that the strategy itself gave up, such as a list without room for one more
                    continue
        raise InstepError(f"{TRIES} draws from {strategy} gave up; expected a value: its conditions hold too rarely")


class Turns(Machine):
    """Served by the host; `turn` plays one rule that is enabled, most often a round."""

    def __init__(self, host: Host, example: Example, data: Seeded) -> None:
        super().__init__(host)
        self.example, self._data, self._full = example, data, False
        self._named = {rule.function.__name__: rule for rule in self.rules}

    def enter_some(self) -> None:
        """Two requests or more."""
        for _ in range(self._data.draw(st.integers(2, draw_events.SLOTS[1]))):
            self._do(draw_events.admit, self._data)

    def turn(self) -> None:
        """After a refusal the next event frees room, or else the same event would be refused many times in a row."""
        full, self._full = self._full, False
        if full and (kinds := [kind for kind in MAKES_ROOM if self._may(kind)]):
            self._do(draw_events.UPKEEP[self._data.draw(st.sampled_from(kinds))], self._data)
            return
        enabled = sorted(
            name for name, rule in self._named.items() if all(holds(self) for holds in rule.preconditions)
        )
        usual = "round" in enabled and self._data.draw(st.integers(0, 2)) < ROUNDS
        name = "round" if usual else self._data.draw(st.sampled_from(enabled))
        self._named[name].function(self, data=self._data)

    def leave(self, num_steps: int) -> None:
        """Every request ends, and the step count is `num_steps` again: from here a trace can begin."""
        assert self.example is not None
        table = self.example.rules.table
        for name, standing in list(table.live.items()):
            self.host.serve(self.example, Finish(name) if standing.phase is Phase.READY else Abort(name))
        for name in list(table.saved) if table.capacity.track_interval is not None else ():
            self.host.serve(self.example, Evict(name))
        if table.num_steps != num_steps:
            self.host.serve(self.example, SetNumSteps(num_steps))
        self.host.serve(self.example, Idle())

    def _do(self, drawer: draw_events.Drawer, data: Seeded) -> bool:
        served = super()._do(drawer, data)
        self._full = not served
        return served

    def _may(self, kind: str) -> bool:
        assert self.example is not None
        full = kind == "save" and len(self.example.rules.table.saved) >= MOST_SAVED
        return not full and super()._may(kind)
