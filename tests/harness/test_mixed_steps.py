"""Mixed steps under every check: rows of all kinds in any order, and prompts split anywhere, within the declared tiers.

Leaves out: what must be the same bits (`tests/optimized/test_mixed_steps.py`, which runs every commit strategy too).
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from instep.run.replay import Outcome, Replay
from instep.setting import Setting
from instep.trace.event_rules import EventRules
from instep.trace.file import Trace
from instep.trace.header import SCHEMA, Header, Model, Part, Room
from instep.verdict import Tier
from instep_optimized.memory_addresses import StateLayout
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.engine import Capacity, Event, Forward
from support.inputs.checkpoints import TWO_LAYERS, write
from support.inputs.mixed_steps import (
    CANDIDATES,
    CROWD,
    LONG_ROOM,
    ROOM,
    WHERE,
    beside_windows,
    comings,
    crowd,
    prompts_in_chunks,
    split_everywhere,
    trio,
)
from support.running.covering import WHOLE
from support.running.verdicts import agreed

pytestmark = pytest.mark.slow

ON_GPU = torch.cuda.is_available()
NUMBERS = {Tier.BITWISE, Tier.DERIVED, Tier.DIRECTED, Tier.PROPAGATED, Tier.DECISIONS}
FEW = settings(
    max_examples=1, derandomize=True, deadline=None, database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
ORDERS = st.permutations(range(len(CROWD)))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stored in bf16, as real ones are: a wider file would be rounded by a bf16 engine, and nothing declares that."""
    return write(tmp_path_factory.mktemp("model"), dtype=torch.bfloat16, **TWO_LAYERS)


def trace(model: Path, events: Iterable[Event], room: Capacity = ROOM) -> Trace:
    """The events as a hand-made trace with three step counts, 3 in force at first."""
    header = Header(
        schema=SCHEMA, name="mixed", claim="Rows of every kind stand in one step.",
        checkpoint=Model.of(Checkpoint.open(model), model, "."),
        capacity=Room(room.slots, room.pages, room.page_size, room.max_tokens), num_steps=3, candidates=CANDIDATES,
        adaptive={"candidate_steps": list(CANDIDATES)}, lag=0, seed=0, stop=None, replay=(Part("ledger"),), created={},
    )
    return Trace(model / "mixed.jsonl", header, tuple(events), {}, "")


def agrees(outcome: Outcome) -> None:
    """Every event was served and compared, and nothing disagrees."""
    verdict = agreed(outcome)
    assert verdict.events == outcome.of == len({compared.event for compared in verdict.compared})
    if outcome.plan.setting.ops != "ledger":
        assert {compared.tier for compared in verdict.compared} >= NUMBERS


# ---- all kinds of rows in one step


@FEW
@given(num_steps=st.sampled_from(CANDIDATES), order=ORDERS)
@example(num_steps=3, order=(3, 0, 5, 1, 4, 2))
def test_labels_agree_in_any_order(model: Path, num_steps: int, order: Sequence[int]) -> None:
    agrees(Replay(trace(model, crowd(num_steps, order)), Setting("ledger"), checkpoint=model).run())


@WHOLE
@pytest.mark.parametrize(("num_steps", "order", "dtype", "layout"), [
    (3, (3, 0, 5, 1, 4, 2), "bfloat16", "KV"),
    pytest.param(7, (4, 1, 3, 5, 0, 2), "float32", "VK", marks=WHOLE),
])  # fmt: skip
def test_numbers_agree_in_any_order(
    model: Path, num_steps: int, order: Sequence[int], dtype: str, layout: StateLayout
) -> None:
    setting = Setting("plain", dtype=dtype, layout=layout)
    agrees(Replay(trace(model, crowd(num_steps, order)), setting, checkpoint=model).run())


@pytest.mark.skipif(ON_GPU, reason="native kernels serve the whole crowd (below)")
def test_interpreted_kernels_agree_on_mixed_rows(model: Path) -> None:
    agrees(Replay(trace(model, trio(1, (1, 0, 2))), Setting("triton", layout="KV"), checkpoint=model).run())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("num_steps", CANDIDATES)
def test_native_kernels_agree_on_the_crowd(model: Path, num_steps: int, dtype: str) -> None:
    for order in ((0, 1, 2, 3, 4, 5), (3, 0, 5, 1, 4, 2)):
        setting = Setting("triton", device="cuda", dtype=dtype)
        agrees(Replay(trace(model, crowd(num_steps, order)), setting, checkpoint=model).run())


@pytest.mark.parametrize(("num_steps", "where"), list(zip(CANDIDATES, WHERE, strict=True)))
def test_a_chunk_as_wide_as_a_window_agrees_as_the_prefill_that_it_is(model: Path, num_steps: int, where: str) -> None:
    told = trace(model, beside_windows(num_steps, where, small=False))
    given = Setting("plain", drafter="external")  # the draft head's rows of mixed steps are compared above and below
    outcome = Replay(told, given, checkpoint=model).run()
    agrees(outcome)
    mixed = max(number for number, event in enumerate(told.events) if isinstance(event, Forward))
    tiers = {c.tier for c in outcome.verdict.compared if c.request == "chunk" and c.event == mixed}
    assert tiers >= {Tier.IDENTITY, Tier.DERIVED, Tier.DIRECTED}


# ---- where a prompt is split


@WHOLE
@pytest.mark.parametrize(("dtype", "layout"), [
    ("float32", "KV"), pytest.param("bfloat16", "VK", marks=WHOLE),  # which a crowd is served in, above
])  # fmt: skip
def test_a_prompt_split_at_any_edge_stays_within_its_tier(model: Path, dtype: str, layout: StateLayout) -> None:
    told = trace(model, split_everywhere(rounds=False), LONG_ROOM)
    outcome = Replay(told, Setting("plain", dtype=dtype, layout=layout), checkpoint=model).run()
    agrees(outcome)
    states = [c for c in outcome.verdict.compared if c.tier is Tier.DIRECTED]
    assert {c.request for c in states} >= {"split at 1", "split at 63", "split at 64", "split at 65", "split at 67"}
    head = {c.place.component for c in outcome.verdict.compared if c.place.stage == "extend"}
    assert {"key", "value", "final"} <= head, "the draft head's rows are compared too"


def test_labels_agree_on_a_prompt_split_at_any_edge(model: Path) -> None:
    agrees(Replay(trace(model, split_everywhere(), LONG_ROOM), Setting("ledger"), checkpoint=model).run())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_native_kernels_agree_on_a_prompt_split_at_any_edge(model: Path, dtype: str) -> None:
    told = trace(model, split_everywhere(), LONG_ROOM)
    agrees(Replay(told, Setting("triton", device="cuda", dtype=dtype), checkpoint=model).run())


# ---- step counts change, requests come


def test_labels_agree_while_step_counts_change_and_requests_come(model: Path) -> None:
    agrees(Replay(trace(model, comings((0, 3, 1, 0, 7))), Setting("ledger"), checkpoint=model).run())


def test_every_sequence_is_legal(model: Path) -> None:
    """Both test files use only sequences that the event rules allow."""
    stories = [(prompts_in_chunks(small=False), ROOM), (split_everywhere(), LONG_ROOM), (trio(3, (2, 0, 1)), ROOM),
               *((beside_windows(n, where, False), ROOM) for n in CANDIDATES for where in WHERE)]
    for events, room in stories:
        told = trace(model, events, room)
        rules = EventRules(told.header)
        for event in told.events:
            rules.apply(event)
        assert rules.table.live
