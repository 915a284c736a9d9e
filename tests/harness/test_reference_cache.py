"""Events of the reference that are computed once: what is read equals what would be computed, and is of the same run.

Leaves out: what the reference computes.
"""

from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch

from instep.lru_cache import BESIDE, Shelf
from instep.oracle import recomputation
from instep.oracle.recomputation import Runner
from instep.oracle.reference_weights import digest_of, weights_of
from instep.oracle.single_layer_run import LayerWork
from instep.player import Side
from instep.run.build_compared_engines import Plan, rounded_participant, truth_participant
from instep.run.reference_cache import Served
from instep.run.replay import Replay
from instep.setting import Setting
from instep.trace.file import Trace
from instep.verdict import Exit
from instep_optimized.ops.watch_op_calls import tensors_of
from instep_proof.faults.catalogue.fault import Edit
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.speculative_rounds import Rounds
from support.inputs.traces import first, recorded, recording
from support.running.covering import each_value, few
from support.running.planting import planted_here
from support.running.recorded_calls import calls_of

pytestmark = pytest.mark.slow  # whole replays or commands

# A chunk next to a window, a request that loads a prefix, a plain step.
small = recording(first(3))


@pytest.fixture(autouse=True)
def shelf(monkeypatch: pytest.MonkeyPatch) -> Shelf[Served]:
    shelf: Shelf[Served] = Shelf(512 << 20)
    for module in ("run.reference_cache", "lru_cache"):
        monkeypatch.setattr(f"instep.{module}.EVENTS", shelf)
    return shelf


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The forwards that an engine of the reference computes."""
    return calls_of(monkeypatch, Rounds, "forward")


def narrow(plan: Plan, dtype: str) -> Plan:
    return replace(plan, setting=replace(plan.setting, dtype=dtype))


def sides(plan: Plan, events: Any, draw: int | None) -> list[Side]:
    found: Any = plan.setting.subject()
    side = truth_participant(plan) if draw is None else rounded_participant(plan, found, draw)
    return [side.serve(event) for event in events]


def same(left: list[Side], right: list[Side]) -> bool:
    def plain(side: Side) -> Any:
        return [*side.places], [*side.before], [*side.after], side.wanted_num_steps, {
            name: (state.length, state.root, state.proposal) for name, state in side.after.items()}

    both = zip(left, right, strict=True)
    return all(plain(a) == plain(b) and all(map(torch.equal, tensors_of(a), tensors_of(b))) for a, b in both)


@pytest.mark.parametrize(("draw", "dtype"), each_value((None, 0, 1), ("float32", "bfloat16")))
def test_cached_events_equal_computed_ones_at_any_fork(
    dtype: str, draw: int | None, small: Trace, shelf: Shelf[Served], computed: list[Any]
) -> None:
    """Keep the first run's events up to a number: within a round, between rounds, or all.

    The second run continues alone.
    """
    plan, events = narrow(Replay(small, Setting("plain")).plan, dtype), small.events
    right = sides(plan, events, draw)
    for part in (1, 5, 6, len(events) // 2, len(events) - 1, len(events)):
        for path in [*shelf._kept][part:]:
            del shelf._kept[path]
        computed.clear()
        assert same(sides(plan, events, draw), right), part
        assert len(computed) == sum(type(event).__name__ == "Forward" for event in events[part:])


def other_weights(plan: Plan) -> Plan:
    name, tensor = next((n, t) for n, t in plan.checkpoint.tensors.items() if n.endswith("A_log"))
    tensors = {**plan.checkpoint.tensors, name: tensor + 1}
    return replace(plan, checkpoint=replace(plan.checkpoint, tensors=MappingProxyType(tensors)))


OTHER = {
    "weights": other_weights,
    "configuration": lambda plan: replace(
        plan, checkpoint=replace(plan.checkpoint, config=replace(plan.checkpoint.config, eps=1e-3))),
    "steps": lambda plan: replace(plan, num_steps=plan.num_steps + 1),
    "rounding": lambda plan: narrow(plan, "bfloat16"),
    "width": lambda plan: narrow(plan, "float64"),
    "drafter": lambda plan: replace(plan, setting=replace(plan.setting, drafter="vanilla")),
}


@pytest.mark.parametrize("what", OTHER)
def test_another_run_reads_nothing(what: str, small: Trace, shelf: Shelf[Served]) -> None:
    plan = Replay(small, Setting("plain")).plan
    sides(plan, small.events[:3], 0)
    kept = len(shelf._kept)
    sides(plan, small.events[:3], 1)
    assert len(shelf._kept) == 2 * kept == 6, "another draw"
    sides(OTHER[what](plan), small.events[:3], 0)
    assert len(shelf._kept) == 9


def test_a_replay_agrees_with_itself_and_computes_the_reference_once(small: Trace, computed: list[Any]) -> None:
    first = Replay(small, Setting("plain")).run()
    forwards = len(computed)
    again = Replay(small, Setting("plain")).run()
    assert first.verdict.exit is Exit.AGREED and again.verdict.compared == first.verdict.compared
    assert forwards > 0 and len(computed) == forwards


def test_cache_is_bounded_and_keeps_the_start_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("instep.lru_cache.BESIDE", 0)
    shared, shelf = torch.zeros(4, dtype=torch.uint8), Shelf[list[torch.Tensor]](most=10)

    def put(key: bytes, *sizes: int, before: tuple[bytes, ...] = (), also: tuple[torch.Tensor, ...] = ()) -> None:
        shelf.put(key, [*(torch.zeros(size, dtype=torch.uint8) for size in sizes), *also], before)

    put(b"0", 2, 2)
    put(b"1", also=(shared,))
    put(b"2", 4, before=(b"1",))
    assert [*shelf._kept] == [b"1", b"2"] and shelf.size == 8
    put(b"3", 4, before=(b"1", b"2"))
    put(b"4", 11)
    assert [*shelf._kept] == [b"1", b"2"] and shelf.size == 8, "no room but in its own run; larger than all room"
    assert shelf.get(b"1") is not None and shelf.get(b"3") is None
    put(b"5", 4, also=(shared[1:],))
    assert [*shelf._kept] == [b"1", b"5"] and shelf.size == 8, "the last read stays; what two hold counts once"
    put(b"6", 2)
    assert [*shelf._kept] == [b"1", b"5", b"6"] and shelf.size == 10
    put(b"7", 4)
    assert [*shelf._kept] == [b"6", b"7"] and shelf.size == 6, "1 and 5 hold the same, so giving up 1 frees nothing"
    shelf.clear()
    assert shelf.size == 0 and shelf.get(b"1") is None


def test_the_memory_of_a_replay_that_is_kept_is_counted_byte_for_byte(small: Trace, shelf: Shelf[Served]) -> None:
    Replay(small, Setting("plain")).run()
    tensors = [tensor for served, _ in shelf._kept.values() for tensor in tensors_of(served)]
    memory = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
    assert shelf.size == sum(memory.values()) + BESIDE * len({id(x) for x in tensors}) > 0


def test_a_fault_planted_in_the_reference_reads_nothing(small: Trace) -> None:
    plan = Replay(small, Setting("plain")).plan
    right = sides(plan, small.events[:3], None)
    with planted_here(Edit("instep_reference/norms.py", "(1 + weight)", "(2 + weight)")):
        assert not same(sides(plan, small.events[:3], None), right)
    assert same(sides(plan, small.events[:3], None), right)


@few(1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layer_on_the_same_bits_is_computed_once(dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Later draws are unchanged: every number of the verdict is the same."""
    trace = recorded(tmp_path, dtype=getattr(torch, dtype))
    runs, computed = [], []
    right = Runner.__call__
    monkeypatch.setattr(Runner, "__call__", lambda self, *given: (computed.append(given[0]), right(self, *given))[1])
    for layers in (Shelf[Any](0), *[Shelf[Any](256 << 20)] * 2):
        monkeypatch.setattr(recomputation, "LAYERS", layers)
        before = sum(isinstance(work, LayerWork) for work in computed)
        compared = Replay(trace, Setting("plain", dtype=dtype)).run(until=6).verdict.compared
        runs.append(([repr(one) for one in compared], sum(isinstance(work, LayerWork) for work in computed) - before))
        assert layers.size <= layers.most and (layers.size > 0) is (layers.most > 0)
    assert runs[0] == runs[1] and runs[2] == (runs[0][0], 0) and runs[0][1] > 8


def test_weights_are_cast_again_after_a_change(small: Trace) -> None:
    def opened() -> Checkpoint:
        return Checkpoint.open(small.path.parent / "model")

    one, other = opened(), opened()
    first = weights_of(one, torch.float64)
    assert weights_of(other, torch.float64) is first and weights_of(one, torch.float32) is not first
    kept = first.embedding.clone()
    other.tensors["model.embed_tokens.weight"].mul_(2)
    again = weights_of(other, torch.float64)
    assert torch.equal(again.embedding, 2 * kept) and torch.equal(first.embedding, kept)
    assert digest_of(one) == digest_of(opened()) != digest_of(other)
    assert weights_of(one, torch.float64) is first
