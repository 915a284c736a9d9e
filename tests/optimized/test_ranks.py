"""Ranks in lock step: sums in the order of the ranks, and ranks that do not make the same calls.

Leaves out: the checks over ranks (`tests/harness/test_ranks.py`).
"""

import signal
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from instep_optimized.graphs.capture_and_replay import Break
from instep_optimized.graphs.cuda import CudaGraphs
from instep_optimized.ops.op_protocols import Ops
from instep_optimized.ops.plain import PLAIN
from instep_optimized.options import Options
from instep_optimized.ranks import Comm
from instep_optimized.ranks.lockstep import Lockstep, RankRaised, RankUnread, RankWaits
from instep_optimized.ranks.ops_over_ranks import factor, of_rank, part_of
from instep_reference.contract import shards
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.checkpoint_tensor_shapes import FUSED, block_shapes, expected_shapes
from instep_reference.contract.config import ModelConfig
from instep_reference.contract.errors import BadInput, Unsupported
from instep_reference.contract.place_names import Place
from support.inputs.checkpoints import TWO_LAYERS, Kind, config_of, write, write_block

MIXER = Place("trunk", 3, "mixer")


def run(size: int, work: Callable[[Comm], object], limit_s: float = 5.0) -> list[object]:
    group = Lockstep(size, limit_s)
    return group.run([lambda comm=comm: work(comm) for comm in group.comms])  # type: ignore[misc]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_collectives_give_every_rank_the_same(size: int) -> None:
    def work(comm: Comm) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x = torch.full((2,), float(comm.rank + 1))
        return comm.all_reduce(x), comm.all_gather(x[None], 1), comm.broadcast(x)

    for added, gathered, told in run(size, work):  # type: ignore[misc]
        assert added.tolist() == [size * (size + 1) / 2] * 2 and told.tolist() == [1, 1]
        assert gathered.tolist() == [[rank + 1.0 for rank in range(size) for _ in range(2)]]


def test_sum_is_in_the_order_of_the_ranks_and_rounded_once() -> None:
    parts = torch.tensor([1.0, 2.0**-8, 2.0**-8], dtype=torch.bfloat16)  # rounded in between, the sum would stay 1
    for found in run(3, lambda comm: comm.all_reduce(parts[comm.rank : comm.rank + 1])):
        assert isinstance(found, torch.Tensor) and found.item() == 1 + 2.0**-7 and found.dtype == torch.bfloat16
    wide = torch.tensor([1e8, 1.0, -1e8])  # fp32 loses the 1 in this order alone
    assert [x.item() for x in run(3, lambda comm: comm.all_reduce(wide[comm.rank : comm.rank + 1]))] == [0.0] * 3  # type: ignore[attr-defined]


def test_results_are_separate_memory() -> None:
    first, second = run(2, lambda comm: comm.broadcast(torch.zeros(1)))
    assert isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor)
    first.fill_(1)
    assert second.item() == 0


def test_only_one_rank_runs_at_a_time_and_always_in_the_same_order() -> None:
    said: list[str] = []

    def work(comm: Comm) -> None:
        for step in range(3):
            said.append(f"{comm.rank}{step}")
            comm.all_reduce(torch.zeros(1))

    for _ in range(3):
        said.clear()
        run(3, work)
        assert said == ["00", "10", "20", "01", "11", "21", "02", "12", "22"]


def test_tensors_are_sent_from_rank_to_rank() -> None:
    def work(comm: Comm) -> list[float]:
        if comm.rank == 0:
            for number in range(3):
                comm.send(torch.tensor([float(number)]), 1)
            return comm.recv(torch.zeros(1), 1).tolist()  # type: ignore[no-any-return]
        found = [comm.recv(torch.zeros(1), 0) for _ in range(3)]
        comm.send(torch.cat(found).sum(0, keepdim=True), 0)
        return torch.cat(found).tolist()  # type: ignore[no-any-return]

    assert run(2, work) == [[3.0], [0.0, 1.0, 2.0]]


def wait_alone(comm: Comm) -> None:
    if comm.rank == 1:
        comm.all_reduce(torch.zeros(2), MIXER)


def call_another(comm: Comm) -> None:
    (comm.all_reduce if comm.rank else comm.broadcast)(torch.zeros(2), MIXER)


def give_another_shape(comm: Comm) -> None:
    comm.all_reduce(torch.zeros(2 + comm.rank), MIXER)


def receive_in_vain(comm: Comm) -> None:
    if comm.rank == 1:
        comm.recv(torch.zeros(2), 0, MIXER)


@pytest.mark.parametrize(("work", "says", "ranks"), [
    (wait_alone, "rank 0 has served the event; rank 1 waits in all_reduce for trunk layer 3 mixer of (2,)", (1,)),
    (call_another, "rank 0 waits in broadcast for trunk layer 3 mixer of (2,) float32; rank 1 waits in all_reduce",
     (0, 1)),
    (give_another_shape, "of (2,) float32; rank 1 waits in all_reduce for trunk layer 3 mixer of (3,)", (0, 1)),
    (receive_in_vain, "rank 1 waits in recv from rank 0 for trunk layer 3 mixer", (1,)),
], ids=lambda one: one.__name__ if callable(one) else None)  # fmt: skip
def test_ranks_that_wait_in_vain_are_reported_at_once(
    work: Callable[[Comm], None], says: str, ranks: tuple[int, ...]
) -> None:
    begun = time.perf_counter()
    with pytest.raises(RankWaits) as raised:
        run(2, work, limit_s=30)
    assert says in str(raised.value) and raised.value.ranks == ranks
    assert time.perf_counter() - begun < 5


def test_tensor_that_was_sent_and_not_received_is_reported() -> None:
    """At the end of the run, although no rank waits. The next run begins without it."""
    group = Lockstep(3)

    def work(comm: Comm) -> float:
        if comm.rank == 0:
            for number in range(3):
                comm.send(torch.full((2,), float(number)), 2, MIXER)
        return comm.recv(torch.zeros(2), 0, MIXER).sum().item() if comm.rank == 2 else 0.0

    says = ("rank 0 was in send to rank 2 for trunk layer 3 mixer of (2,) float32; rank 2 has served the event and did "
            "not receive it, nor 1 more")  # fmt: skip
    with pytest.raises(RankUnread) as raised:
        group.run([partial(work, comm) for comm in group.comms])
    assert str(raised.value) == says and raised.value.ranks == (0, 2)
    assert group.run([lambda: 1, lambda: 2, lambda: 3]) == [1, 2, 3]


@pytest.mark.parametrize("waits", [False, True])
def test_interrupt_waits_until_the_other_ranks_have_left(waits: bool) -> None:
    """Python aborts if it ends while a thread computes."""
    left = []

    def work(comm: Comm) -> None:
        if comm.rank:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            time.sleep(0.1)
            left.append(comm.rank)
        if comm.rank or waits:
            comm.all_reduce(torch.zeros(1))

    with pytest.raises(KeyboardInterrupt):
        run(2, work)
    assert left == [1]


def test_rank_that_never_comes_back_is_reported_within_the_limit() -> None:
    stop = threading.Event()

    def work(comm: Comm) -> None:
        if comm.rank == 1:
            stop.wait(20)
        comm.all_reduce(torch.zeros(1))

    begun = time.perf_counter()
    with pytest.raises(RankWaits, match=r"rank 1 did not come back within 0\.2 s"):
        run(2, work, limit_s=0.2)
    assert time.perf_counter() - begun < 5
    stop.set()


def test_rank_that_computes_longer_than_the_limit_is_no_hang() -> None:
    def work(comm: Comm) -> None:
        until = time.process_time() + 0.8 * comm.rank
        while time.process_time() < until:
            pass
        comm.all_reduce(torch.zeros(1))

    run(2, work, limit_s=0.5)


def test_error_of_all_ranks_is_rank_0s() -> None:
    def work(comm: Comm) -> None:
        raise Unsupported(f"rank {comm.rank} has no trees")

    with pytest.raises(Unsupported, match="rank 0 has no trees"):
        run(3, work)


@pytest.mark.parametrize("waits", [False, True])
def test_error_of_one_rank_names_the_rank(waits: bool) -> None:
    def work(comm: Comm) -> None:
        if comm.rank == 1:
            raise Unsupported("no trees")
        if waits:
            comm.all_reduce(torch.zeros(1))

    with pytest.raises(RankRaised, match=r"rank 1 raised Unsupported \(no trees\); ranks 0, 2 did not") as raised:
        run(3, work)
    assert raised.value.ranks == (1,) and isinstance(raised.value.__cause__, Unsupported)


def test_group_runs_again_after_a_failure() -> None:
    group = Lockstep(2)
    with pytest.raises(RankWaits):
        group.run([lambda: group.comms[0].all_reduce(torch.zeros(1)), lambda: torch.zeros(1)])
    assert [x.item() for x in group.run([lambda c=c: c.all_reduce(torch.ones(1)) for c in group.comms])] == [2, 2]  # type: ignore[misc]


def test_rank_has_the_modes_of_the_caller() -> None:
    with torch.inference_mode():
        assert run(2, lambda comm: torch.is_inference_mode_enabled()) == [True, True]
    assert run(2, lambda comm: torch.is_inference_mode_enabled()) == [False, False]


def test_collective_outside_of_a_run_is_refused() -> None:
    with pytest.raises(RankWaits, match="no other rank runs"):
        Lockstep(2).comms[1].all_reduce(torch.zeros(1))


class FakeGraph:
    """A CUDA graph whose captured calls are torch's, of any thread. `current`: the graph under capture."""

    current: ClassVar["FakeGraph | None"] = None
    replays: ClassVar[int] = 0

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def capture_begin(self, pool: object, capture_error_mode: str) -> None:
        assert FakeGraph.current is None
        FakeGraph.current, self.thread = self, threading.get_ident()

    def capture_end(self) -> None:
        assert FakeGraph.current is self and self.thread == threading.get_ident()
        FakeGraph.current = None

    def replay(self) -> None:
        FakeGraph.replays += 1
        for func, args, kwargs, found in self.calls:
            found.copy_(func(*args, **kwargs))


class Captures(TorchDispatchMode):
    """Adds the calls of this thread to the graph under capture."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if FakeGraph.current is not None and isinstance(found, torch.Tensor):
            FakeGraph.current.calls.append((func, args, kwargs or {}, found))
        return found


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = SimpleNamespace(wait_stream=lambda other: None)
    for name, fake in {
        "Stream": lambda: stream, "current_stream": lambda: stream, "graph_pool_handle": lambda: (0, 1),
        "stream": lambda one: nullcontext(), "synchronize": lambda: None, "empty_cache": lambda: None,
        "is_current_stream_capturing": lambda: FakeGraph.current is not None, "CUDAGraph": FakeGraph,
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr("gc.collect", lambda: 0)  # of a capture: slow once a process has run many tests
    FakeGraph.current, FakeGraph.replays = None, 0


def added_twice(comm: Comm, x: torch.Tensor, between: Break) -> torch.Tensor:
    """Sums over the ranks before and after an eager call, which reads the first one."""
    first = comm.all_reduce(x * 2, MIXER)
    room = between(lambda room: room.copy_(first + 10 * comm.rank), first)
    return comm.all_reduce(room + first, MIXER)


def test_graph_of_all_ranks_has_their_sums_in_it(fake_cuda: None) -> None:
    group = Lockstep(3)

    def work(comm: Comm) -> list[float]:
        x = torch.zeros(1)
        with Captures():  # type: ignore[no-untyped-call]
            recording, found = CudaGraphs(comm)(PLAIN, lambda ops, between: added_twice(comm, x, between))
        comm.calls.clear()
        results = []
        for value in (1.0, 5.0):
            x.fill_(value * (comm.rank + 1))
            recording.replay()
            results.append(found.item())
        assert [str(call) for call in comm.calls] == [f"in all_reduce for {MIXER} of (1,) float32"] * 4
        return results

    found = group.run([partial(work, comm) for comm in group.comms])
    first = [2 * value * 6 for value in (1.0, 5.0)]
    assert found == [[6 * sum_of + 30 for sum_of in first]] * 3
    assert FakeGraph.replays == 2 * 2 and FakeGraph.current is None  # once for all ranks: two segments


def test_rank_that_replays_another_graph_is_reported(fake_cuda: None) -> None:
    def work(comm: Comm) -> None:
        record = CudaGraphs(comm)
        one, another = (record(PLAIN, lambda ops, between: comm.all_reduce(torch.zeros(1)))[0] for _ in range(2))
        (another if comm.rank else one).replay()

    with pytest.raises(RankWaits, match="rank 0 waits in replay of graph 0, segment 0; rank 1 waits in replay of gr"):
        run(2, work)


@pytest.mark.parametrize("rank", [0, 1])
def test_capture_ends_when_a_rank_raises(fake_cuda: None, rank: int) -> None:
    def work(comm: Comm) -> None:
        def body(ops: Ops, between: Break) -> torch.Tensor:
            if FakeGraph.current is not None and comm.rank == rank:
                raise Unsupported("no trees")
            return comm.all_reduce(torch.zeros(1))

        CudaGraphs(comm)(PLAIN, body)

    with pytest.raises(RankRaised, match=rf"rank {rank} raised Unsupported \(no trees\)"):
        run(2, work)
    assert FakeGraph.current is None


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_factors_of_labels_add_up_to_one(size: int) -> None:
    found = [factor(comm) for comm in Lockstep(size).comms]
    assert sum(found) == 1 and not {0, 1} & set(found)


@pytest.mark.parametrize(("kind", "fused"), [("dense", False), ("next", False), ("moe", True), ("kimi", False)])
@pytest.mark.parametrize("size", [1, 2])
def test_parts_of_all_ranks_cover_every_tensor(kind: Kind, fused: bool, size: int) -> None:
    """Each entry of a split tensor is on exactly one rank, and a tensor has the shape of the rank's own model."""
    config, comms = ModelConfig.from_dict(config_of(kind)), Lockstep(size).comms
    stored = FUSED if fused else ()
    own = expected_shapes(shards.config_of(config, size), stored)
    split = 0
    for name, shape in expected_shapes(config, stored).items():
        shard, whole = shards.weight(config, name), torch.arange(torch.Size(shape).numel()).view(shape)
        parts = [part_of(whole, shard, comm) for comm in comms]
        if shard is None:
            assert all(part is whole for part in parts)
            continue
        split += 1
        assert torch.cat([part.flatten() for part in parts]).sort().values.equal(whole.flatten())
        if "embed_tokens" not in name and "lm_head" not in name:  # the configuration of a rank has all tokens
            assert all(tuple(part.shape) == tuple(own[name]) for part in parts), name
    assert split > 20


def test_conv_channels_are_split_per_segment() -> None:
    config = ModelConfig.from_dict(config_of())  # q, k: 2 heads of 8 channels; v: 4 heads of 16
    shard = shards.weight(config, "model.layers.0.linear_attn.conv1d.weight")
    assert shard is not None
    assert shard.spans(1, 2) == (range(8, 16), range(24, 32), range(64, 96)) and shard.length == 96


def test_kv_head_is_on_several_ranks_if_there_are_too_few() -> None:
    segment = shards.Segment(2, 16, copied=True)
    assert [segment.held(rank, 4) for rank in range(4)] == [range(0, 1), range(0, 1), range(1, 2), range(1, 2)]
    assert segment.fits(4) and not segment.fits(3)


def test_parts_of_a_block_drafter_follow_its_own_heads(tmp_path: Path) -> None:
    """The target has 4 heads and 2 KV heads, the drafter 2 heads and 1 KV head, which both ranks hold."""
    folder = write_block(write(tmp_path, num_attention_heads=4, num_key_value_heads=2, **TWO_LAYERS))
    whole = Checkpoint.open(folder, "block")
    cut = [of_rank(whole, PLAIN, Options(drafter="block"), comm)[0] for comm in Lockstep(2).comms]
    own = block_shapes(cut[0].config)
    assert cut[0].config.block is not None and cut[0].config.block.num_attention_heads == 1
    for name in own:
        parts = [one.tensors[name] for one in cut]
        assert all(tuple(part.shape) == own[name] for part in parts), name
        if name.endswith(("k_proj.weight", "v_proj.weight")) or own[name] == tuple(whole.tensors[name].shape):
            assert all(torch.equal(part, whole.tensors[name]) for part in parts), name
        else:
            axis = 1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0
            assert torch.equal(torch.cat(parts, axis), whole.tensors[name]), name


@pytest.mark.parametrize(("size", "says"), [
    (3, "expected a divisor of the model's 2 key heads"), (4, "2 key heads (linear_num_key_heads)"),
])  # fmt: skip
def test_ranks_that_cannot_share_the_heads_are_refused(size: int, says: str) -> None:
    with pytest.raises(BadInput) as raised:
        shards.config_of(ModelConfig.from_dict(config_of()), size)
    assert says in str(raised.value)
