"""Prefixes are offloaded to the host, reloaded and evicted by events that every engine serves alike, bit by bit.

Leaves out: how prefixes are tracked and shared (`test_prefixes.py`).
"""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from msgspec import structs

from instep.campaign.streams.stamped_trace import relabelled
from instep.run.replay import Replay
from instep.setting import Setting
from instep.subject.engines.engine_from_verbs import DerivedEngine
from instep.trace.event_rules import verified
from instep.trace.event_scheduler import drive
from instep.trace.file import Trace
from instep.trace.policy import read_policy, read_prompts
from instep.verdict import Tier
from instep.watch.event_log import Copies
from instep.watch.frozen_memory import KeptCopies
from instep_optimized import OptimizedEngine
from instep_proof.faults.catalogue import TRACES, by_id
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.engine import Evict, Fetch, Offload
from instep_reference.contract.errors import Unsupported
from instep_reference.label_ledger import LedgerEngine
from support.inputs.traces import committed
from support.running.planting import planted_here

EXACT = (Tier.IDENTITY, Tier.BITWISE)  # of which all that sees them is


trace = committed("faults/tiers")


def test_policy_offloads_the_least_recently_used_prefix(trace: Trace) -> None:
    """The trace follows its policy. Without a host a prefix that leaves the device is evicted and never reloaded."""
    told = read_policy(TRACES / "tiers.policy.json")
    prompts = read_prompts(TRACES.parents[1] / "tiny" / "prompts.json")

    def moves(events: Iterable[Any]) -> list[str]:
        return [f"{type(one).__name__} {one.name}" for one in events if isinstance(one, Offload | Fetch | Evict)]

    config = Checkpoint.open(TRACES.parents[1] / "experts").config
    steps = [drive(policy, prompts, trace.header, LedgerEngine(config, num_steps=3, room=trace.header.room()))
             for policy in (told, structs.replace(told, host=0, deeds=()))]  # fmt: skip
    ours, hostless = ([step.event for step in run] for run in steps)
    assert moves(ours) == moves(trace.events) and moves(ours)[:3] == ["Offload a, 0", "Offload a, 1", "Fetch a, 1"]
    gone = [move.split()[0] for move in moves(hostless)]
    assert gone == ["Evict"] * len(gone) and len(gone) > 4


@pytest.mark.slow
def test_stale_copy_under_a_reused_name_is_found_by_bytes(trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that does not show its copies."""
    again = by_id()["evicted-and-served-again"]
    monkeypatch.delattr(OptimizedEngine, "copies")
    with planted_here(*again.edits):
        findings = Replay(trace, Setting("ledger")).run(tiers=EXACT).verdict.findings
    assert trace.events[findings[0].event] == Offload("a, 0") and findings[0].event > again.event
    assert 'is a prefix of 4 tokens; expected 16' in findings[0].diagnosis


def test_memory_left_on_the_device_by_an_offload_is_reported() -> None:
    looked, part = KeptCopies(), torch.arange(3.0)
    assert looked.look({("save", "a"): {"root": part}}) == Copies(frozenset({("save", "a")}), 3)
    moved = looked.look({("offload", "a"): {"root": part.clone()}})
    assert (moved.changed, moved.held) == ((), (("save", "a"),))
    back = looked.look({("save", "a"): {"root": part + 1}})
    assert back.changed == ((("save", "a"), "root"),)
    there = part.as_subclass(type("There", (torch.Tensor,), {"device": torch.device("cuda")}))
    assert KeptCopies().look({("offload", "a"): {"root": there}}).stayed == (("offload", "a"),)


def test_streams_and_verbs_know_what_is_evicted(trace: Trace) -> None:
    verified(relabelled(trace).trace)
    led: Any = DerivedEngine.__new__(DerivedEngine)
    led.saved = {"k": None}
    led.evict("k")
    assert not led.saved
    with pytest.raises(Unsupported, match="on the host"):
        led.offload("k")
