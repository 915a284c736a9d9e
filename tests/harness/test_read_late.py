"""The relation `read_late`: it agrees for a correct engine, and finds faults that every replay of the trace misses.

Leaves out: engines driven through callbacks (`test_relations_engine.py`).
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from instep.campaign.relations import Held, held, relations
from instep.campaign.relations.case import Case
from instep.campaign.relations.read_late import BY_CALLBACKS
from instep.run.replay import Replay
from instep.setting import Setting
from instep.trace.file import Trace
from instep.verdict import Exit, Tier
from instep_optimized import OptimizedEngine
from instep_optimized.commit import OURS
from instep_optimized.transfer.to_host import Roots
from instep_proof.faults.catalogue import by_id
from instep_proof.faults.catalogue.fault import Fault
from instep_proof.faults.catalogue.late_reads import FAULTS
from support.inputs.few_channels import few_channels, same_events
from support.running.command import Runner
from support.running.covering import COVERING, WHOLE, begun, few
from support.running.verdicts import agreed

pytestmark = pytest.mark.slow  # whole replays

DRAWN = "lifecycle/histories-rest"  # whose event 29 drafts nothing for a request
TRACES = (*(name for name in COVERING if name != "transfer"), DRAWN)  # `transfer` has two engines
SETTINGS = [(strategy, conv, graphs) for graphs in (True, False) for strategy in OURS["state"] for conv in OURS["conv"]]
ON_GPU = torch.cuda.is_available()


def read_late(trace: Trace, setting: Setting) -> Held:
    found, = held(Case.of(trace, Replay(trace, setting).plan), relations(["read-late"]))
    return found


def agrees(trace: Trace, ops: str, **setting: Any) -> None:
    found = agreed(read_late(trace, Setting(ops, **setting)))
    assert {one.tier for one in found.compared} == {Tier.BITWISE}
    components = {one.place.component for one in found.compared}
    memory = {"lfm2": {"conv"}, "minimax": {"state"}}.get(Path(trace.header.checkpoint.near).name, {"conv", "state"})
    assert {"pick", "length", "root", "keys", *memory} <= components, "answers, step counts, states, pools"


# ---- nothing is wrong


def test_ring_leaves_the_same_bytes_unread() -> None:
    agrees(same_events("late", 2), "ledger", strategy="lazy_rerun")


@WHOLE
@pytest.mark.parametrize(("name", "setting"), [
    (name, SETTINGS[number % len(SETTINGS)]) for number, name in enumerate(TRACES)
])  # fmt: skip
def test_covering_traces_agree_with_every_setting(name: str, setting: tuple[str, str, bool]) -> None:
    """Each setting meets a trace at least, and most meet two."""
    trace, (strategy, conv, graphs) = begun(name), setting
    trace = replace(trace, events=trace.events[:36]) if name == DRAWN else trace
    conv = "windows" if trace.header.room().trees else conv  # a line of inputs has no room for siblings
    agrees(trace, "ledger", strategy=strategy, conv=conv, graphs=graphs)


@WHOLE
@pytest.mark.parametrize(("name", "graphs"), [
    ("kept", False), ("grown", True), ("prefix", False), ("tiers", True), ("drawn", False),
])  # fmt: skip
def test_numbers_agree(name: str, graphs: bool) -> None:
    agrees(same_events(name, 2), "plain", graphs=graphs)


def test_engine_of_a_user_is_read_late() -> None:
    agrees(same_events("aborted", 2), "support.wrong.subjects:right")


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("strategy", OURS["state"])
def test_native_engine_agrees(strategy: str, graphs: bool) -> None:
    """There copies to the host arrive later than the call that starts them."""
    agrees(same_events("kept", 2), "triton", device="cuda", strategy=strategy, graphs=graphs)


# ---- faults that only this relation finds


@few(1)
@pytest.mark.parametrize("fault", FAULTS, ids=[fault.id for fault in FAULTS])
def test_fault_is_found_named_and_located(plant: Callable[..., None], fault: Fault) -> None:
    trace = few_channels(fault.trace, 2)
    assert read_late(trace, fault.how).verdict.exit is Exit.AGREED
    plant(*fault.edits)
    assert Replay(trace, fault.how).run().verdict.exit is Exit.AGREED, "a replay reads everything after every event"
    found = read_late(trace, fault.how).verdict
    assert found.exit is Exit.DIVERGED
    first = found.findings[0]
    assert (first.event, first.place, first.check) == (fault.event, fault.place, "read_late")
    assert fault.says in first.diagnosis
    named = {"host-copies-of-one-size": "a", "root-looked-up-in-the-slot": "a", "wish-of-the-latest-counts": None}
    assert first.request == named.get(fault.id, "b")


@WHOLE
def test_shared_host_copies_are_found_in_most_traces(plant: Callable[..., None]) -> None:
    """And no replay of a trace here sees them."""
    plant(*by_id()["host-copies-of-one-size"].edits)
    names, missed = ("aborted", "accepted", "kept", "late", "rounds", "steps"), []
    for name in names:
        trace = same_events(name, 2)
        assert Replay(trace, Setting("ledger")).run().verdict.exit is Exit.AGREED, name
        missed += [name] * (read_late(trace, Setting("ledger")).verdict.exit is not Exit.DIVERGED)
    assert len(missed) < len(names) / 2, missed


def test_state_that_writes_a_pool_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """It writes before its pools are read in one run, and after that in the other one."""
    state = OptimizedEngine.state

    def writes(self: OptimizedEngine, request: str) -> Any:
        found, slot = state(self, request), self._memory.slots.owned().get(request)
        if found.length and slot is not None:
            next(one.units for one in self.regions() if one.name == "state")[slot].zero_()
        return found

    monkeypatch.setattr(OptimizedEngine, "state", writes)
    found = read_late(same_events("aborted", 2), Setting("ledger")).verdict
    assert found.exit is Exit.DIVERGED
    assert "state" in {one.place.component for one in found.findings} and found.findings[0].event == 2


def test_answer_that_cannot_be_read_late_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Roots can be read until the next one is chosen."""
    right, newest = Roots.__getitem__, dict[str, Roots]()
    made = Roots.__init__

    def makes(self: Roots, *given: Any) -> None:
        made(self, *given)
        newest["it"] = self if len(self) else newest.get("it", self)

    def reads(self: Roots, name: str) -> int:
        if newest["it"] is not self:
            raise RuntimeError("this root is gone")
        return right(self, name)

    monkeypatch.setattr(Roots, "__init__", makes)
    monkeypatch.setattr(Roots, "__getitem__", reads)
    first = read_late(same_events("steps", 2), Setting("ledger")).verdict.findings[0]
    assert first.diagnosis == "read late: raised RuntimeError (this root is gone); the event is legal"


@WHOLE
def test_printed_command_shows_the_finding_again(instep: Runner, plant: Callable[..., None]) -> None:
    """A trace that ends at the event of the finding would have no event that overwrites its answer."""
    plant(*by_id()["host-copies-of-one-size"].edits)
    ran = instep("relations", few_channels("ragged", 2).path, "read-late", "--ops", "ledger")
    words = ran.out.splitlines()[-1].split()
    assert ran.code == 1 and words[:2] == ["instep", "relations"] and "--until" not in words
    assert instep(*words[1:]).code == 1


def test_engine_driven_through_callbacks_shows_memory_alone() -> None:
    found = read_late(few_channels("kept", 2), Setting(engine="support.wrong.engines:right"))
    assert found.verdict.exit is Exit.AGREED and [one.reason for one in found.verdict.skipped] == [BY_CALLBACKS]
    assert {one.place.component for one in found.verdict.compared} == {"conv", "state"}
    silent = read_late(few_channels("kept", 2), Setting(engine="support.wrong.engines:mute"))
    assert silent.lacks == f"{BY_CALLBACKS}, and this engine shows none"
