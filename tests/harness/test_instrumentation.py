"""Watching changes nothing: an engine that is probed, judged and digested gives the bits that it gives alone.

Leaves out: whether the bits are right. Both arms serve one trace; one has nothing around its ops and is never asked.
"""

from dataclasses import fields, is_dataclass
from typing import Any

import pytest
import torch

from instep.checks import structure
from instep.run.build_compared_engines import bare, participants_of
from instep.run.lockstep import Lockstep
from instep.run.replay import Replay
from instep.setting import Setting
from instep.trace.file import Trace
from instep.watch import gather_event_log
from instep.watch.digests import bits
from support.running.covering import WHOLE, few

pytestmark = pytest.mark.slow  # whole replays


@few(2)
@pytest.mark.parametrize(("ops", "how"), [
    pytest.param("plain", {}, marks=WHOLE),  # the other rows have each of these values
    ("ledger", {"graphs": True}), ("plain", {"graphs": True, "strategy": "snapshot"}),
    ("ledger", {"strategy": "columns", "conv": "widened"}),
], ids=str)  # fmt: skip
def test_engine_behaves_alike_with_and_without_observers(trace: Trace, ops: str, how: dict[str, Any]) -> None:
    """Answers, pools with their red zones after every event, and the states at the end."""
    plan = Replay(trace, Setting(ops, **how)).plan
    participants = participants_of(plan)
    lockstep, checks = Lockstep(trace, participants), structure()
    alone = bare(plan)
    for event in trace.events:
        context = lockstep.step()
        assert all(result.agrees for check in checks for result in check(context) if hasattr(result, "agrees"))
        told = event.on(alone)
        assert same(context.subject.answer, told), context.kind
        assert same(participants.shown.regions(), alone.regions()), context.kind
    assert alone.next_num_steps(1, 1) == context.subject.wanted_num_steps


@pytest.mark.parametrize("graphs", [False, True])
def test_with_contracts_or_without(trace: Trace, graphs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same lock-step, its wrapper once judging and once passing on."""
    arms = []
    for judged in (True, False):
        if not judged:
            monkeypatch.setattr(gather_event_log.Instrumentation, "wrapper", lambda self, name, op: op)
        participants = participants_of(Replay(trace, Setting("plain", graphs=graphs)).plan)
        lockstep = Lockstep(trace, participants)
        contexts = [lockstep.step() for _ in trace.events[:14]]
        assert any(context.log.calls for context in contexts) == judged
        seen = [(m.subject.answer, m.subject.places, m.subject.after) for m in contexts]
        arms.append([*seen, participants.shown.regions()])
    assert same(*arms)


def same(one: Any, other: Any) -> bool:
    """Equal down to the bytes of every tensor."""
    if isinstance(one, torch.Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and torch.equal(bits(one), bits(other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if is_dataclass(one):
        return all(same(getattr(one, each.name), getattr(other, each.name)) for each in fields(one))
    return bool(one == other)
