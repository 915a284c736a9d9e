"""The few traces that `make test` replays through `plain` meet what all of them meet.

Leaves out: replaying those of `THROUGH_PLAIN` (the plugin does, in `make test` and `make whole`).
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from instep.replay.replay import Replay
from instep.replay.setting import Setting
from instep.trace.file import Trace
from instep.verdict import Exit
from support.covering import BY_TESTS, MAIN, ON_FEW_CHANNELS, THROUGH_PLAIN, every_trace, met
from support.few_channels import few_channels


def begun(name: str) -> Trace:
    """The events of a trace that are among the few."""
    whole = few_channels(name, 2)
    return replace(whole, events=whole.events[: ON_FEW_CHANNELS[name]])


@pytest.mark.slow
def test_the_traces_that_go_through_plain_meet_what_any_trace_meets() -> None:
    found = {name: met(trace) for name, trace in every_trace().items()}
    few = {name: found[name] for name in (MAIN, *THROUGH_PLAIN, *BY_TESTS)}
    few |= {name: met(begun(name)) for name in ON_FEW_CHANNELS}
    assert set().union(*few.values()) == set().union(*found.values())
    for name in few.keys() - {MAIN}:  # and none is there for nothing
        others = set().union(*(few[other] for other in few if other != name))
        assert few[name] - others, f"{name} meets nothing that another one of the few does not meet"


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_FEW_CHANNELS)
def test_a_right_engine_agrees_with_what_they_meet(name: str) -> None:
    trace = begun(name)
    verdict = Replay(trace, Setting("plain")).run().verdict
    assert verdict.exit is Exit.AGREED and verdict.events == len(trace.events), verdict.findings[:1]
