"""An engine that is led by verbs: right ones agree, and what is wrong with others is named at the first wrong place.

Leaves out: engines that nobody here wrote (`tests/peers`), and the page (`test_your_engine.py`).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from instep.replay.replay import Outcome, Replay
from instep.replay.setting import Setting
from instep.trace.file import read
from instep.verdict import Exit, Tier

TRACES = Path(__file__).resolve().parents[2] / "fixtures" / "traces" / "faults"


def replayed(name: str, trace: str = "kept", **setting: str) -> Outcome:
    return Replay(read(TRACES / f"{trace}.jsonl"), Setting(engine=f"support.by_verbs:{name}", **setting)).run()


@pytest.mark.parametrize("name", ["right", "keeping"])
def test_a_right_engine_agrees_in_every_tier_that_it_shows(name):
    verdict = replayed(name).verdict
    assert verdict.exit is Exit.AGREED, verdict.findings[:1]
    judged = {tier: [c for c in verdict.compared if c.tier is tier] for tier in Tier}
    assert {tier for tier, mine in judged.items() if mine} == set(Tier) - {Tier.DERIVED}
    assert {c.place.component for c in judged[Tier.PROPAGATED]} >= {"conv", "state", "final", "logits"}


@pytest.mark.parametrize(("name", "event", "kind", "place", "says"), [
    ("no_rollback", 6, "commit", "trunk layer 0 conv", "holds the window after 3 tokens; 2 were accepted"),
    ("no_rollback", 6, "commit", "trunk layer 0 state", "holds the state after 3 tokens; 2 were accepted"),
    ("one_more", 6, "commit", "trunk layer 0 state", "holds the state after 3 tokens; 2 were accepted"),
    ("of_another", 6, "commit", "trunk layer 0 state", 'holds the state of request "a"'),
    ("stale_logits", 8, "forward", "trunk logits", "relative error"),
    ("no_drop", 16, "resume", "trunk layer 0 state", "relative error"),
    ("shifted_window", 6, "commit", "trunk layer 0 conv", "is shifted by one to newer inputs"),
    ("stale_tile", 6, "commit", "trunk layer 0 state", "holds the state from before the step; 2 were accepted, in 1"),
    ("neighbour", 12, "load", "trunk layer 0 state", "4 of 32768 bytes differ"),
    ("slightly", 5, "forward", "trunk final", "is 1.0001 times what is right"),
    ("hidden_rollback", 8, "forward", "trunk final", "relative error"),
])  # fmt: skip
def test_what_is_wrong_is_named_where_it_is_made(name, event, kind, place, says):
    findings = replayed(name).verdict.findings
    assert (findings[0].event, findings[0].kind) == (event, kind)
    assert any(str(found.place) == place and found.diagnosis.startswith(says) for found in findings), findings[:3]


def test_an_engine_that_shows_nothing_has_not_agreed():
    verdict = replayed("mute").verdict
    assert verdict.exit is Exit.INCONCLUSIVE and {c.check for c in verdict.compared} == {"remembered"}
