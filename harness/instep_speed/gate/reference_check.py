"""The gate's own reference at the end of a course, and whether an arm's states and acceptance agree with it.

This check runs outside the arm. So a source tree whose own reference or checks are wrong does not pass by them alone.
Leaves out: the checks after every event (an arm replays the course with all of them in its own process).
"""

from collections.abc import Iterator, Mapping

import torch

from instep.checks.error_measurement import Spot, blocks, relative_error
from instep.checks.tensor_and_choice_judgement import judge
from instep.finding_problem import Problem
from instep.run.build_compared_engines import Plan, reference, rounded_participant
from instep.tier_allowances import TRUTH_ERROR
from instep.verdict import Comparison, Tier, Verdict
from instep_reference.contract.engine import RequestState
from instep_reference.contract.place_names import STAGE_LEVEL, Place

from .cases import Course, Shown, Walk

NAME = "after the course"


class Yardstick:
    """Truth and rounded reference at the end of a course, for the op set and setting of `plan`."""

    def __init__(self, plan: Plan, course: Course) -> None:
        rounded = rounded_participant(plan, plan.setting.subject(), 0)
        self.course = course
        self.truth = Walk(reference(plan, torch.float64), course).show()
        with rounded.arithmetic:
            self.rounded = Walk(rounded.engine, course).show()
        self.noise = max(self._noise(), TRUTH_ERROR)
        # By a tie one window of the course may differ completely. If more windows differ, it is no tie.
        self.band = plan.num_steps / (len(course.rounds) * len(course.prompts))

    def judge(self, shown: Shown) -> Verdict:
        """Compare by T3 every component of every request, by T0 lengths and roots, by T4 the acceptance, up or down."""
        verdict = Verdict(events=len(self.course.trace.events))
        verdict.add(self._identity(shown.states))
        verdict.add(self._memory(shown.states))
        off, place = abs(shown.acceptance - self.truth.acceptance), Place("trunk", STAGE_LEVEL, "pick")
        wrong = f"accepts {shown.acceptance:.2f} drafts a window; the reference {self.truth.acceptance:.2f}"
        verdict.add([self._comparison(Tier.DECISIONS, place, None, off, self.band, wrong)])
        return verdict

    def _noise(self) -> float:
        """The rounded run's largest error in any component: one run is one sample (`checks/accumulated_errors.py`)."""
        errors = []
        for request, state in self.truth.states.items():
            rounded = dict(self.rounded.states[request].parts())
            for place, truth in state.parts():
                errors.append(relative_error(blocks(place.component, rounded[place]), blocks(place.component, truth)))
        return max(float(error.max()) for error in errors)

    def _identity(self, states: Mapping[str, RequestState]) -> Iterator[Comparison]:
        for request, truth in self.truth.states.items():
            for what in ("length", "root"):
                found = getattr(states[request], what) if request in states else None
                place, right = Place("trunk", STAGE_LEVEL, what), getattr(truth, what)
                wrong = f"{what} is {found}; expected {right}"
                yield self._comparison(Tier.IDENTITY, place, request, float(found != right), 0.0, wrong)

    def _memory(self, states: Mapping[str, RequestState]) -> Iterator[Comparison]:
        for request, truth in self.truth.states.items():
            found = dict(states[request].parts()) if request in states else {}
            rounded = dict(self.rounded.states[request].parts())
            for place, right in truth.parts():
                spot = Spot(NAME, Tier.PROPAGATED, self._last, "commit", place, request, None)
                yield judge(spot, right, [(rounded[place], self.noise)], found.get(place))

    def _comparison(
        self, tier: Tier, place: Place, request: str | None, worst: float, allowed: float, wrong: str
    ) -> Comparison:
        problem = None if worst <= allowed else Problem("differs", wrong)
        return Comparison(
            NAME, tier, self._last, "commit", place, 1, worst, allowed, request=request, problem=problem
        )

    @property
    def _last(self) -> int:
        """The number of the course's last commit in its trace."""
        return len(self.course.opening) + sum(map(len, self.course.rounds)) - 1
