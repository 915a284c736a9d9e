"""Copies beside the launches: nothing is read before it has come, and nothing is written over before it was read.

Two queues stand in for the streams, and run as far apart as their moments let them. On a GPU sleeps hold up the real
ones. Leaves out: which numbers are sent, and what else goes stale in a graph (`test_graphs.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from instep_optimized import OptimizedEngine, Options, load
from instep_optimized.graphs import Runner
from instep_optimized.ops.base import Ops
from instep_optimized.ops.plain import PLAIN
from instep_optimized.transfer import to_device, to_host
from instep_optimized.transfer.lane import AtOnce, Beside, lane
from instep_optimized.transfer.to_device import Landing
from instep_optimized.transfer.to_host import HostCopy
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.engine import Capacity, Path, Row
from support.checkpoints import write

ROOM = Capacity(slots=(4, 1), pages=tuple(range(30, 0, -1)), page_size=4, max_tokens=64)
LONG = 200_000_000  # cycles that a sleep on a GPU takes: a tenth of a second


class Moment(NamedTuple):
    """The moment at which so many things of a queue have run."""

    queue: list[tuple[Any, Callable[[], Any]]]
    count: int
    streams: Streams

    def synchronize(self) -> None:
        self.streams.run(self.queue, self)


class Streams:
    """A `Lane` and the launches beside it. What is given to them runs when somebody lets it."""

    def __init__(self) -> None:
        self.launches, self.copies = [], []  # type: ignore[var-annotated]
        self._ran: list[int] = [0, 0]

    def now(self) -> Any:
        return Moment(self.launches, len(self.launches), self)

    def copy(self, target: torch.Tensor, source: torch.Tensor, behind: Any) -> Any:
        self.copies.append((behind, lambda: target.copy_(source)))
        return Moment(self.copies, len(self.copies), self)

    def wait(self, moment: Any) -> None:
        self.launch(lambda: None, moment)

    def launch(self, act: Callable[[], Any], behind: Any = None) -> None:
        self.launches.append((behind, act))

    def run(self, queue: list[Any], until: Moment | None = None) -> None:
        """Run this queue, and of the other one only what must run before."""
        number = int(queue is self.copies)
        while self._ran[number] < (len(queue) if until is None else until.count):
            behind, act = queue[self._ran[number]]
            if behind is not None and behind.queue is not queue:
                self.run(behind.queue, behind)
            self._ran[number] += 1
            act()


FIRST = pytest.mark.parametrize("first", ["launches", "copies"])


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    """In the place of what goes in."""
    found = Streams()
    monkeypatch.setattr(to_device, "lane", lambda device, way: found)
    return found


# ---- to the device


def replays(streams: Streams, first: str) -> tuple[list[Any], list[Any]]:
    """What replays of two graphs in turn should have seen, and what they saw, with one of the queues ahead."""
    given, seen = [], list[list[int]]()

    def record(ops: Ops, body: Callable[[Ops], Any]) -> Any:
        outputs = body(ops)

        class Noting:
            def replay(self) -> None:
                streams.launch(lambda: seen.append(outputs[0].tolist()))

        return Noting(), outputs

    graphs = Runner(record, (2,))
    for number in range(6):
        inputs = (torch.tensor([number, 10 + number]),)
        graphs.run(number % 4 // 2, PLAIN, lambda ops, own: (own[0],), inputs, (-1,))  # graphs 0 0 1 1 0 0
        given.append(inputs[0].tolist())
    streams.run(getattr(streams, first))
    streams.run(streams.copies)
    streams.run(streams.launches)
    return given, seen


@FIRST
def test_a_replay_reads_what_was_sent_for_it(streams: Streams, first: str) -> None:
    given, seen = replays(streams, first)
    assert seen == given


def test_a_replay_that_does_not_wait_is_caught(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: launches do not stand behind the copy."""
    monkeypatch.setattr(streams, "wait", lambda moment: None)
    given, seen = replays(streams, "launches")
    assert seen != given


@pytest.mark.parametrize("lost", ["done", "behind"])
def test_a_copy_that_does_not_wait_is_caught(streams: Streams, monkeypatch: pytest.MonkeyPatch, lost: str) -> None:
    """Planted: nobody says that a replay reads; or the copy does not care."""
    if lost == "done":
        begun = Landing.done
        monkeypatch.setattr(Landing, "done", lambda self: None if hasattr(self, "_read") else begun(self))
    else:
        copy = streams.copy
        monkeypatch.setattr(streams, "copy", lambda target, source, behind: copy(target, source, None))
    given, seen = replays(streams, "copies")
    assert seen != given and seen[-1] == given[-1]


def test_a_copy_runs_ahead_while_another_graph_runs(streams: Streams) -> None:
    """That is what the lane is for: the inputs of the next graph come although the launches before it have not run."""
    one, other = (Landing([torch.zeros(2, dtype=torch.int64)], torch.device("cpu")) for _ in range(2))
    streams.run(streams.launches)
    streams.launch(lambda: pytest.fail("the copy waited for it"))
    other.said[0].fill_(7)
    other.send()
    streams.run(streams.copies)
    assert other.tensors[0].tolist() == [7, 7] and one.tensors[0].tolist() == [0, 0]


def test_tensors_of_a_landing_begin_as_tensors_of_their_own_would() -> None:
    like = [torch.arange(3), torch.tensor([True]), torch.zeros(2, 0, dtype=torch.int64), torch.arange(8.0).view(2, 4)]
    landing = Landing(like, torch.device("cpu"))
    for said, there, one in zip(landing.said, landing.tensors, like, strict=True):
        assert (there.dtype, there.shape, there.is_contiguous()) == (one.dtype, one.shape, True)
        assert there.storage_offset() * there.element_size() % to_device.ALIGNED == 0
        assert torch.equal(there, one) and torch.equal(said, one)
    landing.said[0].fill_(5)
    assert torch.equal(landing.tensors[0], like[0])
    landing.send()
    landing.said[0].fill_(6)
    assert landing.tensors[0].tolist() == [5, 5, 5] and torch.equal(landing.tensors[3], like[3])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_inputs_are_not_overwritten_while_a_gpu_is_late() -> None:
    landing, seen = Landing([torch.zeros(2, dtype=torch.int64)], torch.device("cuda")), list[torch.Tensor]()
    for number in range(4):
        landing.said[0].fill_(number)
        landing.send()
        torch.cuda._sleep(LONG)
        seen.append(landing.tensors[0].clone())
        landing.done()
    assert [x.tolist() for x in seen] == [[number, number] for number in range(4)]


# ---- to the host


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint.open(write(tmp_path_factory.mktemp("model"), num_hidden_layers=2, full_attention_interval=2))


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Streams:
    """What goes to the host is copied when the host waits for it, not before."""
    found = Streams()
    monkeypatch.setattr(to_host, "lane", lambda device, way: found)
    return found


def counted(checkpoint: Checkpoint, *, graphs: bool) -> int:
    """The length of a request of which 2 tokens were accepted, and whose caller writes into the answer."""
    options = Options(graphs=graphs, overlap=True)
    subject = OptimizedEngine(checkpoint, load("ledger"), options, ROOM, num_steps=3)
    subject.admit("a", (5, 9, 2))
    subject.forward((Row("a", "prefill", 3),))
    subject.draft(("a",))
    subject.forward((Row("a", "verify"),))
    subject.commit(("a",), (Path((1,), 3),)).accept_lens.fill_(99)
    return subject._requests["a"].length.exact


@pytest.mark.parametrize("graphs", [False, True])
def test_what_a_caller_does_with_its_answer_does_not_reach_a_late_copy(
    checkpoint: Checkpoint, late: Streams, graphs: bool
) -> None:
    assert counted(checkpoint, graphs=graphs) == 5
    # The root of the prefill; without graphs the copy of the counts stands among the launches.
    assert len(late.copies) == 1 + graphs


def test_a_late_copy_of_the_caller_s_own_tensor_is_caught(
    checkpoint: Checkpoint, late: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: every source is taken for one that nobody writes into."""
    begin = HostCopy.__init__

    def trusting(self: HostCopy, *parts: torch.Tensor, unwritten: bool = False) -> None:
        begin(self, *parts, unwritten=True)

    monkeypatch.setattr(HostCopy, "__init__", trusting)
    assert counted(checkpoint, graphs=False) == 3 + 99


def test_without_streams_a_copy_runs_at_once() -> None:
    counts = torch.tensor([3, 1])
    copy = HostCopy(counts, unwritten=True)
    counts.fill_(0)
    assert isinstance(lane(torch.device("cpu"), "out"), AtOnce) and copy.list() == [3, 1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_memory_that_was_let_go_is_not_given_away_before_it_was_copied() -> None:
    out, number = lane(torch.device("cuda", torch.cuda.current_device()), "out"), 1 << 10
    assert isinstance(out, Beside)
    for _ in range(3):
        counts = torch.arange(number, device="cuda")
        with torch.cuda.stream(out._stream):
            torch.cuda._sleep(LONG)
        copy = HostCopy(counts, unwritten=True)
        del counts
        others = [torch.zeros(number, dtype=torch.int64, device="cuda") for _ in range(4)]
        assert copy.list() == list(range(number)) and len(others) == 4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_counts_come_before_what_was_launched_behind_them() -> None:
    """The host reads them while a sleep that was launched later still lasts."""
    torch.cuda._sleep(LONG)
    copy = HostCopy(torch.arange(4, device="cuda") + 1, unwritten=True)
    torch.cuda._sleep(20 * LONG)
    slept = torch.cuda.Event()  # type: ignore[no-untyped-call]
    slept.record()
    assert copy.list() == [1, 2, 3, 4] and not slept.query()
    torch.cuda.synchronize()
