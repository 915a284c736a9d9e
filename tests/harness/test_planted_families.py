"""Faults of memory and of drafters are found, located and named: one of each way to be wrong.

Leaves out: whole campaigns (`instep faults`), faults of experts (`test_experts.py`), and faults that the general bank
explains (`test_diagnose_planted.py`).
"""

from collections.abc import Callable, Collection

import pytest

from instep.trace.event_rules import EventRules
from instep.trace.file import Trace, read
from instep.verdict import Tier
from instep_proof.faults.catalogue import FAMILIES, TRACES, by_id
from instep_proof.faults.catalogue.fault import Fault
from support.inputs.few_channels import few_channels, same_events
from support.running.covering import few
from support.running.planting import found_as_expected

pytestmark = pytest.mark.slow

EXACT = (Tier.IDENTITY, Tier.BITWISE)  # of which all that sees a fault of copies is
COPIES = (
    "offload-without-final-row", "offload-newer-than-its-key", "fetch-of-another", "offload-frees-nothing",
    "evicted-and-still-there", "evicted-with-a-shared-page",
    "transfer-conv-one-block", "transfer-ranks-reversed", "transfer-copy-of-before", "transfer-half-empty",
    "transfer-cast-twice", "transfer-keeps-the-copy",
)  # fmt: skip
STORED = [fault for fault in (*FAMILIES["storage"], *FAMILIES["rounded"])
          if fault.how.ops == "plain"]  # a kernel is planted in a copy


def recorded(fault: Fault) -> Trace:
    return read(TRACES / f"{fault.trace}.jsonl")


def with_few_channels(fault: Fault) -> Trace:
    """Policies with names of prefixes would draw other events than the recorded ones."""
    record = same_events if fault in FAMILIES["rounded"] else few_channels
    return record(fault.trace, 4 if fault.place.layer else 2)


@few(5)
@pytest.mark.parametrize(("fault", "trace_of", "tiers"), [
    *(pytest.param(fault, with_few_channels, frozenset(Tier) - {Tier.PROPAGATED, Tier.DECISIONS}, id=fault.id)
      for fault in STORED),
    *(pytest.param(by_id()[name], recorded, EXACT, id=name) for name in COPIES),
    *(pytest.param(fault, recorded, (*EXACT, Tier.DERIVED), id=fault.id) for fault in FAMILIES["drafters"]),
])  # fmt: skip
def test_a_fault_is_found_where_it_is_and_named(
    fault: Fault, trace_of: Callable[[Fault], Trace], tiers: Collection[Tier]
) -> None:
    trace = trace_of(fault)
    first = found_as_expected(fault, trace, tiers, given=fault in STORED)
    if trace.header.receiver is not None:
        rules = EventRules(trace.header)
        for event in trace.events[: first.event]:
            rules.apply(event)
        assert rules.serving(trace.events[first.event]).receives is ("at the receiver" in first.kind)
