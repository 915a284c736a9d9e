"""Benchmarks of verify and commit. Each asserts, before and after it was timed, that the states are the reference's.

Leaves out: comparing two versions (`instep gate`), and any threshold: a time does not hold for another machine.
"""

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from instep.run.build_compared_engines import participants_of
from instep.run.replay import Replay
from instep.verdict import Exit
from instep_reference.contract.place_names import unseen
from instep_speed.gate.cases import CASES, Course, Shown, Walk
from instep_speed.gate.clock import Clock
from instep_speed.gate.reference_check import Yardstick

TIMED_ROUNDS = 30


@pytest.mark.timing
@pytest.mark.parametrize("case", CASES)
def test_speed_of(case: str, course: Course, benchmark: BenchmarkFixture) -> None:
    plan = Replay(course.trace).plan
    engine = participants_of(plan).subject.engine
    engine.watch(unseen)
    walk, yardstick = Walk(engine, course), Yardstick(plan, course)
    assert yardstick.judge(walk.show()).exit is Exit.AGREED

    # A round is played up to the case's event; the event alone is timed.
    answer = benchmark.pedantic(
        lambda event: event.on(engine), setup=lambda: ((walk.until(case),), {}), rounds=TIMED_ROUNDS
    )

    shown = walk.show()
    verdict = yardstick.judge(shown)
    assert verdict.exit is Exit.AGREED, verdict.findings[0]
    assert verdict.elements > 10_000
    assert answer is not None
    benchmark.extra_info.update(
        accepted_drafts=shown.acceptance, elements_compared=verdict.elements, ops=plan.setting.ops
    )


def test_a_walk_times_only_the_case_and_ends_where_it_would_have(course: Course) -> None:
    plan = Replay(course.trace).plan
    walk, yardstick = Walk(participants_of(plan).subject.engine, course), Yardstick(plan, course)
    spent = walk.laps(2, Clock("cpu"))
    assert set(spent) == set(CASES)
    assert all(reading.wall > 0 and reading.cpu > 0 for reading in spent.values())
    lapped = walk.states()  # a lap ends where the course ends
    verdict = yardstick.judge(Shown(lapped, yardstick.truth.acceptance))
    assert verdict.exit is Exit.AGREED, verdict.findings[0]


def test_the_yardstick_refuses_other_states_and_another_acceptance(course: Course) -> None:
    plan = Replay(course.trace).plan
    walk, yardstick = Walk(participants_of(plan).subject.engine, course), Yardstick(plan, course)
    shown = walk.show()
    request, state = next(iter(shown.states.items()))
    layer = next(iter(state.state))
    state.state[layer][1] = state.state[layer][1].roll(1, 0)
    findings = yardstick.judge(shown).findings
    assert [(found.request, found.place.component, found.place.layer) for found in findings] == [
        (request, "state", layer)
    ]
    for off in (1.0, -1.0):
        other = Shown(walk.show().states, yardstick.truth.acceptance + off)
        assert [found.place.component for found in yardstick.judge(other).findings] == ["pick"]
    missing = {name: state for name, state in walk.show().states.items() if name != request}
    assert yardstick.judge(Shown(missing, shown.acceptance)).exit is Exit.DIVERGED
