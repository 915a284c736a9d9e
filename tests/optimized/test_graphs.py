"""Graphs replay what eager calls do, bit by bit, whatever batches come and go; and what goes stale is found.

Leaves out: the engine's own bodies. On a CPU all of it runs through the emulator; on a GPU the same runs are captured.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from instep.kit.cases.guarded_pools import same_bits
from instep_optimized.graphs import Emulator, LooseCall, Recorder, Runner, buckets, capture_and_replay
from instep_optimized.graphs.cuda import CudaGraphs
from instep_optimized.graphs.emulator import Recorded
from instep_optimized.kernels.runtime import INTERPRETED
from instep_optimized.ops.ledger_label_ops import LEDGER
from instep_optimized.ops.op_protocols import Ops
from instep_optimized.ops.plain import PLAIN
from instep_optimized.ops.triton import TRITON
from instep_reference.contract.errors import BadInput, InstepError, OutOfCapacity
from instep_reference.contract.place_names import Place
from support.worlds.toy_core import (
    EMBEDDING,
    HIDDEN,
    IDLE,
    LOGITS,
    MIXED,
    PICK,
    Inputs,
    World,
    batch,
    differences,
    eagerly,
)

BUCKETS = (1, 2, 4)


def emulated() -> Recorder:
    return Emulator(poison=True)


PLACES = [
    pytest.param(PLAIN, "cpu", emulated, id="plain"),
    pytest.param(LEDGER, "cpu", emulated, id="ledger"),
    pytest.param(
        TRITON, "cpu", emulated, id="triton",
        marks=pytest.mark.skipif(not INTERPRETED, reason="kernels are native here"),
    ),
    pytest.param(
        TRITON, "cuda", CudaGraphs, id="cuda",
        marks=pytest.mark.gpu,
    ),
]
everywhere = pytest.mark.parametrize(("ops", "device", "recorder"), PLACES)
Make = Callable[[], Recorder]


def bucket_of(rows: int) -> int:
    return next(bucket for bucket in BUCKETS if bucket >= rows)


# Batches that grow and shrink inside a bucket and across, with slots that come back in other rows.
COURSE = [
    ((4, 1, 6, 2), 3), ((4, 1, 6), 3), ((6, 4, 2, 8), 3), ((3,), 3), ((1, 8), 3), ((8, 3, 5, 1), 3), ((7, 6, 5), 3),
]


@everywhere
def test_replay_equals_eager_run_while_batches_grow_and_shrink(ops: Ops, device: str, recorder: Make) -> None:
    graphed, eager = World(ops, device), World(ops, device)
    graphs = Runner(recorder(), BUCKETS, device)
    for number, (slots, width) in enumerate(COURSE):
        inputs = batch(slots, width, number, forced=[number % 3] * len(slots))
        ours = graphs.run(("verify", width), ops, graphed.verify, inputs, IDLE)
        theirs = eagerly(eager.verify, ops, inputs, bucket_of(len(slots)), device)
        assert differences(ours, theirs, graphed, eager) == [], number


@everywhere
def test_capture_changes_no_byte(ops: Ops, device: str, recorder: Make) -> None:
    world, untouched = World(ops, device), World(ops, device)
    graphs = Runner(recorder(), BUCKETS, device)
    graphs.prepare(("verify", 2), ops, world.verify, batch((1,), 3), IDLE)
    graphs.prepare(("decode", 0), ops, world.decode, batch((1,), 1), IDLE)
    assert all(same_bits(pool, untouched.pools()[name]) for name, pool in world.pools().items())


@everywhere
def test_layouts_with_equal_token_counts_are_kept_apart(ops: Ops, device: str, recorder: Make) -> None:
    """(4, 2) and (2, 4) are eight tokens both; a window of one and a decode row are even shaped alike."""
    graphed, eager = World(ops, device), World(ops, device)
    graphs = Runner(recorder(), BUCKETS, device)
    course = [
        ("verify", (4, 1, 6, 2), 2), ("verify", (5, 3), 4), ("verify", (1, 4, 2, 6), 2), ("verify", (3, 5), 4),
        ("verify", (8,), 1), ("decode", (8,), 1), ("verify", (5,), 1), ("decode", (3,), 1),
    ]
    for number, (kind, slots, width) in enumerate(course):
        inputs = batch(slots, width, number)
        ours = graphs.run((kind, width - 1), ops, getattr(graphed, kind), inputs, IDLE)
        theirs = eagerly(getattr(eager, kind), ops, inputs, bucket_of(len(slots)), device)
        assert differences(ours, theirs, graphed, eager) == [], number


@everywhere
def test_outputs_outlive_later_replays(ops: Ops, device: str, recorder: Make) -> None:
    world, graphs = World(ops, device), Runner(recorder(), BUCKETS, device)
    kept: list[tuple[Any, Any]] = []
    for number, (slots, width) in enumerate(COURSE[:5]):
        given = batch(slots, width, number)
        outputs = graphs.run("verify", ops, world.verify, given, IDLE)
        kept.append((outputs, [x.clone() for x in outputs]))
    assert all(same_bits(now, then) for outputs, copies in kept for now, then in zip(outputs, copies, strict=True))
    memory = [x.untyped_storage().data_ptr() for outputs, _ in kept for x in outputs]
    assert len(set(memory)) == len(memory)


@everywhere
def test_every_replay_is_shown_to_see_without_its_padding(ops: Ops, device: str, recorder: Make) -> None:
    graphed, eager = World(ops, device), World(ops, device)
    graphs = Runner(recorder(), BUCKETS, device)
    for number, slots in enumerate([(4, 1, 6), (1, 6, 4, 2), (2, 7, 8)]):
        inputs = batch(slots, 2, number)
        tape: list[tuple[Place, torch.Tensor]] = []

        def see(place: Place, tensor: torch.Tensor, tape: Any = tape) -> torch.Tensor:
            tape.append((place, tensor.clone()))
            return tensor

        ours = graphs.run("verify", ops, graphed.verify, inputs, IDLE, see)
        theirs = eagerly(eager.verify, ops, inputs, 4, device)
        assert [place for place, _ in tape] == [EMBEDDING, MIXED, HIDDEN, LOGITS, PICK]
        assert same_bits(dict(tape)[HIDDEN], theirs.hidden) and same_bits(ours.hidden, theirs.hidden)
        assert all(len(tensor) == 2 * len(slots) for _, tensor in tape)
    unwatched = graphs.run("verify", ops, graphed.verify, inputs, IDLE)
    assert same_bits(unwatched.hidden, eagerly(eager.verify, ops, inputs, 4, device).hidden)
    assert len(tape) == 5


@everywhere
def test_an_empty_batch_replays_nothing(ops: Ops, device: str, recorder: Make) -> None:
    world, untouched = World(ops, device), World(ops, device)
    graphs, seen = Runner(recorder(), BUCKETS, device), []

    def see(place: Place, tensor: torch.Tensor) -> torch.Tensor:
        seen.append(place)
        return tensor

    for _ in range(2):
        outputs = graphs.run("verify", ops, world.verify, batch((), 3), IDLE, see)
        assert [tuple(x.shape) for x in outputs] == [(0, 32), (0, 3), (0,), (0,)]
    assert not seen
    assert all(same_bits(pool, untouched.pools()[name]) for name, pool in world.pools().items())


# Faults that must be found


def test_padding_that_is_not_refreshed_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: only the rows that are given are written. The request that left advances once more."""

    def rows_alone(own: torch.Tensor, given: torch.Tensor, value: Any, name: str) -> tuple[torch.Tensor, ...]:
        return own[: len(given)], given

    monkeypatch.setattr(capture_and_replay, "_fill", rows_alone)
    graphed, eager = World(PLAIN, "cpu"), World(PLAIN, "cpu")
    graphs = Runner(Emulator(), BUCKETS)
    for slots, wrong in (((4, 1, 6, 2), []), ((4, 1, 6), ["conv", "kv", "length"])):
        inputs = batch(slots, 2)
        ours = graphs.run("verify", PLAIN, graphed.verify, inputs, IDLE)
        assert differences(ours, eagerly(eager.verify, PLAIN, inputs, 4), graphed, eager) == wrong


def test_key_that_does_not_distinguish_layouts_is_detected() -> None:
    """Planted: one key for both kinds of a single row. The decode graph serves the window."""
    graphed, eager = World(PLAIN, "cpu"), World(PLAIN, "cpu")
    graphs, inputs = Runner(Emulator(), BUCKETS), batch((4, 1), 1)
    graphs.run("one row", PLAIN, graphed.decode, inputs, IDLE)
    eagerly(eager.decode, PLAIN, inputs, 2)
    ours = graphs.run("one row", PLAIN, graphed.verify, inputs, IDLE)
    assert "hidden" in differences(ours, eagerly(eager.verify, PLAIN, inputs, 2), graphed, eager)
    with pytest.raises(BadInput, match=r"one row window: found rows of \(3,\).*expected \(1,\)"):
        graphs.run("one row", PLAIN, graphed.verify, batch((4, 1), 3), IDLE)


def test_a_branch_on_the_host_stays_as_it_was_recorded() -> None:
    """Planted: a body that asks a host flag. The emulator replays the old branch, as a graph does; eager differs."""
    graphed, eager, probing = World(LEDGER, "cpu"), World(LEDGER, "cpu"), {"now": False}

    def body(world: World) -> Callable[[Ops, Inputs], Any]:
        return lambda ops, inputs: (world.decode if probing["now"] else world.verify)(ops, inputs)

    graphs, inputs = Runner(Emulator(), BUCKETS), batch((4, 1), 1)
    for flag, wrong in ((False, False), (True, True)):
        probing["now"] = flag
        ours = graphs.run("branch", LEDGER, body(graphed), inputs, IDLE)
        theirs = eagerly(body(eager), LEDGER, inputs, 2)
        assert bool(differences(ours, theirs, graphed, eager)) == wrong


def test_read_of_another_graphs_result_is_poisoned() -> None:
    """Planted: hidden states passed around the runner, as a view on another graph's result."""
    shown = {}
    for poison in (False, True):
        world, graphs = World(PLAIN, "cpu"), Runner(Emulator(poison=poison), BUCKETS)
        inputs, leaked = batch((4, 1), 1), {}

        def first(ops: Ops, inputs: Inputs, world: World = world, leaked: Any = leaked) -> Any:
            answer = world.decode(ops, inputs)
            leaked["hidden"] = answer.hidden
            return answer

        def second(ops: Ops, inputs: Inputs, leaked: Any = leaked) -> torch.Tensor:
            return ops.add(x=leaked["hidden"], y=leaked["hidden"], to=HIDDEN)

        graphs.run("first", PLAIN, first, inputs, IDLE)
        shown[poison] = graphs.run("second", PLAIN, second, inputs, IDLE)
    assert not shown[False].isnan().any()
    assert shown[True].isnan().all()


def test_every_replay_poisons_what_replays_and_others_have_written() -> None:
    """Planted: numbers in results of graphs that were not replayed since they were poisoned."""
    world, record, inputs, leaked = World(PLAIN, "cpu"), Emulator(poison=True), batch((4, 1), 1), list[torch.Tensor]()
    first, _ = record(PLAIN, lambda ops, _: leaked.append(world.decode(ops, inputs).hidden))
    second, total = record(PLAIN, lambda ops, _: ops.add(x=leaked[0], y=leaked[0], to=HIDDEN))
    third, shown = record(PLAIN, lambda ops, _: world.decode(ops, inputs).hidden)
    assert isinstance(first, Recorded)
    results = [x for x in first.results if x.is_floating_point()]
    for _ in range(2):
        first.replay()
        third.replay()
        assert not shown.isnan().any()
        second.replay()
        assert all(x.isnan().all() for x in (*results, shown, total))
        leaked[0].zero_()
        shown.zero_()
        second.replay()
        assert shown.isnan().all()
        assert total.isnan().all()


LOOSE: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "arithmetic": (lambda x: x + 1, "aten.add"),
    "allocation": (lambda x: torch.zeros(3), "aten.zeros"),
    "host numbers": (lambda x: torch.tensor([1, 2]), "lift_fresh"),
    "copy in place": (lambda x: x.copy_(x), "aten.copy_"),
    "a copying reshape": (lambda x: x.t().reshape(-1), "aten.clone"),
    "indexing": (lambda x: x[torch.arange(2)], "aten.arange"),
    "item": (lambda x: x[0, 0].item(), "_local_scalar_dense"),
    "a branch": (lambda x: 1 if x[0, 0] > 0 else 2, "aten.gt"),
    "truth": (lambda x: bool(x[0, 0]), "_local_scalar_dense"),
    "tolist": (lambda x: x.tolist(), "tolist"),
    "numpy": (lambda x: x.numpy(), "numpy"),
}


@pytest.mark.parametrize("inference", [False, True], ids=["", "in inference mode"])
@pytest.mark.parametrize("name", LOOSE)
def test_a_loose_call_between_ops_is_refused(name: str, inference: bool) -> None:
    act, called = LOOSE[name]
    world, graphs = World(PLAIN, "cpu"), Runner(Emulator(), BUCKETS)

    def body(ops: Ops, inputs: Inputs) -> Any:
        act(world.decode(ops, inputs).hidden)

    refused = pytest.raises(LooseCall, match=rf"a graph holds ops and views alone.*{called}")
    with refused as caught, torch.inference_mode(inference):
        graphs.run(name, PLAIN, body, batch((4, 1), 1), IDLE)
    assert isinstance(caught.value, InstepError)


@pytest.mark.parametrize("inference", [False, True], ids=["", "in inference mode"])
def test_views_between_ops_are_not_loose(inference: bool) -> None:
    world, graphs = World(PLAIN, "cpu"), Runner(Emulator(poison=True), BUCKETS)

    def body(ops: Ops, inputs: Inputs) -> torch.Tensor:
        x = world.decode(ops, inputs).hidden
        x = x.reshape(-1, 2, 16).transpose(0, 1).unbind(0)[1].unsqueeze(1).expand(-1, 1, 16)[:, 0]
        return ops.add(x=x, y=x.detach().as_strided(x.shape, x.stride(), x.storage_offset()), to=HIDDEN)

    inputs = batch((4, 1, 3), 1)
    with torch.inference_mode(inference):
        for _ in range(2):
            assert torch.equal(graphs.run("v", PLAIN, body, inputs, IDLE), body(PLAIN, inputs))


def test_runner_rounds_up_to_buckets_and_refuses_odd_batches() -> None:
    assert [buckets(most) for most in (1, 2, 5, 8)] == [(1,), (1, 2), (1, 2, 4, 5), (1, 2, 4, 8)]
    world, graphs = World(PLAIN, "cpu"), Runner(Emulator(), (4, 1, 2))
    with pytest.raises(OutOfCapacity, match="a batch of 5 requests; the widest graph is for 4"):
        graphs.run("verify", PLAIN, world.verify, batch((1, 2, 3, 4, 5), 2), IDLE)
    with pytest.raises(AssertionError, match="3 rows for 2 requests"):
        graphs.run("odd", PLAIN, lambda ops, inputs: world.table[:3], batch((1, 2), 1), IDLE)
    ragged = batch((1, 2), 2)._replace(slots=torch.tensor([1]))
    with pytest.raises(BadInput, match="as many rows in each"):
        graphs.run("verify", PLAIN, world.verify, ragged, IDLE)


@pytest.mark.gpu
def test_a_replay_waits_for_nothing() -> None:
    """The host is back from a run, inputs and outputs copied, while a sleep queued before it still lasts."""
    world, graphs = World(TRITON, "cuda"), Runner(CudaGraphs(), BUCKETS, "cuda")
    inputs = batch((4, 1, 6), 2)
    graphs.run("verify", TRITON, world.verify, inputs, IDLE)
    torch.cuda.synchronize()
    awake = torch.cuda.Event()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(2_000_000_000)
        awake.record()
        graphs.run("verify", TRITON, world.verify, inputs, IDLE)
        assert not awake.query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
