"""Engines led by verbs that show slots, pages and pools: right ones agree, and each planted fault is found and named.

Leaves out: engines that show no memory (`test_engines.py`).
"""

from __future__ import annotations

import pytest

from instep.run.replay import Outcome, Replay
from instep.setting import Setting
from instep.verdict import Exit
from support.inputs.few_channels import few_channels


def replayed(name: str, trace: str = "kept") -> Outcome:
    return Replay(few_channels(trace, 2), Setting(engine=f"support.wrong.pooled_engines:{name}")).run()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "checks"), [
    ("slotted", {"identity", "bytes", "bounds", "aliasing", "capacity"}), ("numbered", {"identity"}),
    ("paged", {"identity"}),
])  # fmt: skip
@pytest.mark.parametrize("trace", ["kept", "arriving"])
def test_a_right_engine_that_shows_its_memory_agrees(name: str, checks: set[str], trace: str) -> None:
    found = replayed(name, trace)
    assert found.verdict.exit is Exit.AGREED, found.verdict.findings[:1]
    assert checks <= {one.check for one in found.verdict.compared} and found.served_events == found.of
    assert found.shown.has("regions") is (name == "slotted")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "check", "says"), [
    ("stray", "bytes", "changed in state slot"), ("neighbour", "bytes", "changed in state slot"),
    ("silent", "bytes", "changed in conv slot"), ("swapped", "identity", "slots are"),
    ("wide", "bounds", "the engine's table lets this forward write conv slot"),
    ("unnamed", "interface", "may_change names units of states; `regions` shows no such region"),
    ("shared_pool", "aliasing", "units of state (layer 0) share memory"),
    ("one_slot", "identity", "slots are {'a': 0, 'b': 0}"), ("no_slot", "identity", "slots are"),
    ("dead_slot", "identity", "slots are {'nobody': 0}"),
    ("shared_page", "identity", "pages are (5,)"), ("twice", "identity", "pages are ("),
    ("no_table", "identity", "pages are ()"), ("moved_pages", "identity", "a page moved in the table"),
])  # fmt: skip
def test_fault_in_shown_memory_is_found(name: str, check: str, says: str) -> None:
    findings = replayed(name).verdict.findings
    assert findings and any(one.check == check and says in one.diagnosis for one in findings), findings[:3]
