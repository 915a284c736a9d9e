"""The few traces that `make test` replays meet what all of them meet.

Leaves out: replaying those of `THROUGH_PLAIN` (the plugin does, in `make test` and `make whole`).
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from instep.run.replay import Replay
from instep.setting import Setting
from instep.trace.file import Trace, read
from instep.verdict import Exit
from support.inputs.few_channels import few_channels, same_events
from support.running.covering import BEGUN, BY_REPLAY, ON_FEW_CHANNELS, THROUGH_PLAIN, TRACES, WHOLE, every_trace, met


def begun(name: str) -> Trace:
    """The events of a trace that are among the few."""
    if name in BEGUN:
        whole, most = read(TRACES / "faults" / f"{name}.jsonl"), BEGUN[name]
    else:
        whole, most = (same_events if name == "tiers" else few_channels)(name, 2), ON_FEW_CHANNELS[name]
    return replace(whole, events=whole.events[:most])


@pytest.mark.slow
def test_replayed_traces_cover_all_conditions_of_all_traces() -> None:
    every = every_trace()
    found = {name: met(trace) for name, trace in every.items()}
    few = {name: found[name] for name in (*BY_REPLAY, *THROUGH_PLAIN)}
    few |= {name: met(begun(name)) for name in (*BEGUN, *ON_FEW_CHANNELS)}
    assert set().union(*few.values()) == set().union(*found.values())
    for name in few.keys() - {*BY_REPLAY}:  # and none is there for nothing
        others = set().union(*(few[other] for other in few if other not in (name, *BY_REPLAY[1:])))
        assert few[name] - others, f"{name} meets nothing that another one of the few does not meet"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "ops"), [
    pytest.param(name, ops, marks=WHOLE if ops == "ledger" else ())
    for name in (*BEGUN, *ON_FEW_CHANNELS) for ops in ("plain", "ledger")
    if (name, ops) != ("handed", "plain")  # `test_external_replay.py` looks at that run more closely
])
def test_correct_engine_agrees_on_the_covering_traces(name: str, ops: str) -> None:
    trace = begun(name)
    verdict = Replay(trace, Setting(ops)).run().verdict
    assert verdict.exit is Exit.AGREED and verdict.events == len(trace.events), verdict.findings[:1]
