"""Watching changes nothing: an engine that is probed, judged and digested gives the bits that it gives alone.

Leaves out: whether the bits are right. Both arms serve one trace; one has nothing around its ops and is never asked.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

import pytest
import torch

from instep.checks import structure
from instep.observe import notes
from instep.observe.digests import bits
from instep.rig.lockstep import Lockstep
from instep.rig.rig import Rig
from instep.rig.setting import Setting
from instep.rig.sides import bare, seat
from instep.trace.file import Trace
from support.traces import recorded

pytestmark = pytest.mark.slow  # whole replays


@pytest.fixture(scope="module")
def trace(tmp_path_factory) -> Trace:
    return recorded(tmp_path_factory.mktemp("watching"))


@pytest.mark.parametrize(("ops", "how"), [
    ("plain", {}), ("ledger", {"graphs": True}), ("plain", {"graphs": True, "strategy": "snapshot"}),
    ("ledger", {"strategy": "columns", "conv": "widened"}),
], ids=str)  # fmt: skip
def test_watched_judged_and_digested_or_left_alone(trace, ops, how):
    """Answers, pools with their red zones after every event, and the states at the end."""
    plan = Rig(trace, Setting(ops, **how)).plan
    sides = seat(plan)
    lockstep, checks = Lockstep(trace, sides), structure()
    alone = bare(plan)
    for event in trace.events:
        moment = lockstep.step()
        assert all(result.agrees for check in checks for result in check(moment) if hasattr(result, "agrees"))
        told = event.on(alone)
        assert same(moment.subject.answer, told), moment.kind
        assert same(sides.shown.regions(), alone.regions()), moment.kind
    assert alone.next_num_steps() == moment.subject.wish


@pytest.mark.parametrize("graphs", [False, True])
def test_with_contracts_or_without(trace, graphs, monkeypatch):
    """The same lock-step, its wrapper once judging and once passing on."""
    arms = []
    for judged in (True, False):
        if not judged:
            monkeypatch.setattr(notes.Notes, "wrapper", lambda self, name, op: op)
        sides = seat(Rig(trace, Setting("plain", graphs=graphs)).plan)
        lockstep = Lockstep(trace, sides)
        moments = [lockstep.step() for _ in trace.events[:14]]
        assert any(moment.noted.calls for moment in moments) == judged
        arms.append([(m.subject.answer, m.subject.places, m.subject.after) for m in moments] + [sides.shown.regions()])
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
