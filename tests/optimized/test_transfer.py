"""Copies that run in parallel with launches: nothing is read before it arrived or overwritten before it was read.

Two queues replace the streams, and run as far apart as their events let them. On a GPU sleeps delay the real ones.
Leaves out: the copied numbers, and other stale inputs of graphs (`test_graphs.py`).
"""

from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from instep_optimized import OptimizedEngine, Options, load
from instep_optimized.graphs import Runner, capture_and_replay
from instep_optimized.ops.op_protocols import Ops
from instep_optimized.ops.plain import PLAIN
from instep_optimized.transfer import to_device, to_host
from instep_optimized.transfer.copy_stream import Immediate, SideStream, copy_stream
from instep_optimized.transfer.to_device import StaticInputs
from instep_optimized.transfer.to_host import HostCopy
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.engine import Capacity, Path, Row

ROOM = Capacity(slots=(4, 1), pages=tuple(range(30, 0, -1)), page_size=4, max_tokens=64)
LONG = 200_000_000  # cycles that a sleep on a GPU takes: a tenth of a second


class Event(NamedTuple):
    """A position after this many entries of a queue."""

    queue: list[tuple[Any, Callable[[], Any]]]
    count: int
    streams: "Streams"

    def synchronize(self) -> None:
        self.streams.run(self.queue, self)


class Streams:
    """A `CopyStream` and its launches. Work that is given to them runs when the test lets it."""

    def __init__(self) -> None:
        self.launches, self.copies = [], []  # type: ignore[var-annotated]
        self._ran: list[int] = [0, 0]

    def now(self) -> Any:
        return Event(self.launches, len(self.launches), self)

    def copy(self, target: torch.Tensor, source: torch.Tensor, behind: Any) -> Any:
        self.copies.append((behind, lambda: target.copy_(source)))
        return Event(self.copies, len(self.copies), self)

    def wait(self, event: Any) -> None:
        self.launch(lambda: None, event)

    def launch(self, act: Callable[[], Any], behind: Any = None) -> None:
        self.launches.append((behind, act))

    def run(self, queue: list[Any], until: Event | None = None) -> None:
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
    monkeypatch.setattr(to_device, "copy_stream", lambda device, direction: found)
    return found


# ---- to the device


class Seen(NamedTuple):
    """The values that replays of two graphs in turn should have seen, and those that they saw; and the recorder's own
    runs.
    """

    given: list[list[int]]
    replayed: list[list[int]]
    recorded: list[list[int]]


@pytest.fixture
def replays(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Seen]:
    """Replays with one of the queues ahead of the other. failing: the numbers of replays whose copy of outputs raises

    The copy of the outputs, which are views on the inputs here, reads the inputs last.
    """
    copied = capture_and_replay._copied

    def play(first: str, *failing: int) -> Seen:
        found = Seen([], [], [])

        def record(ops: Ops, body: Callable[..., Any]) -> Any:
            outputs = body(ops, pytest.fail)  # echoed has no part between two segments
            streams.launch(lambda: found.recorded.append(outputs[0].tolist()))
            return SimpleNamespace(replay=lambda: None), outputs

        def noted(outputs: Any, *rest: Any) -> Any:
            streams.launch(lambda: found.replayed.append(outputs[0].tolist()))
            return copied(outputs, *rest)

        monkeypatch.setattr(capture_and_replay, "_copied", noted)
        graphs = Runner(record, (2,))
        for number in range(6):
            inputs = (torch.tensor([number, 10 + number]),)
            found.given.append(inputs[0].tolist())
            with suppress(InterruptedError):
                graphs.run(number % 4 // 2, PLAIN, echoed, inputs, (-1,), join=failed if number in failing else None)
        streams.run(getattr(streams, first))
        streams.run(streams.copies)
        streams.run(streams.launches)
        return found

    return play


def failed(outputs: Any) -> Any:
    raise InterruptedError


def echoed(ops: Ops, own: Any) -> tuple[torch.Tensor]:
    return (own[0],)


@FIRST
def test_replay_reads_its_own_inputs(replays: Callable[..., Seen], first: str) -> None:
    found = replays(first)
    assert found.replayed == found.given and found.recorded == [[-1, -1]] * 2


def test_a_replay_that_does_not_wait_is_caught(
    streams: Streams, replays: Callable[..., Seen], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: launches do not wait for the copy."""
    monkeypatch.setattr(streams, "wait", lambda event: None)
    found = replays("launches")
    assert found.replayed != found.given


@pytest.mark.parametrize("lost", ["mark", "behind", "too early"])
def test_a_copy_that_does_not_wait_is_caught(
    streams: Streams, replays: Callable[..., Seen], monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    """Planted: a replay's read is not recorded; the copy ignores it; or it is recorded before the launch."""
    mark, upload, copy = StaticInputs.mark_read, StaticInputs.upload, streams.copy
    if lost == "mark":
        monkeypatch.setattr(StaticInputs, "mark_read", lambda self: None if hasattr(self, "_read") else mark(self))
    elif lost == "behind":
        monkeypatch.setattr(streams, "copy", lambda target, source, behind: copy(target, source, None))
    else:
        monkeypatch.setattr(StaticInputs, "upload", lambda self: (upload(self), mark(self)))
        monkeypatch.setattr(StaticInputs, "mark_read", lambda self: None if hasattr(self, "_read") else mark(self))
    found = replays("copies")
    assert found.replayed != found.given and found.replayed[-1] == found.given[-1]


def test_inputs_wait_for_a_replay_without_copied_outputs(replays: Callable[..., Seen]) -> None:
    """Somebody's error comes out of a run; but the replay was launched, and reads its inputs."""
    found = replays("copies", 0, 3)
    assert found.replayed == found.given


def test_a_copy_runs_ahead_while_another_graph_runs(streams: Streams) -> None:
    """Inputs of the next graph come although the launches before it have not run."""
    one, other = (StaticInputs([torch.zeros(2, dtype=torch.int64)], torch.device("cpu")) for _ in range(2))
    streams.run(streams.launches)
    streams.launch(lambda: pytest.fail("the copy waited for it"))
    other.staging[0].fill_(7)
    other.upload()
    streams.run(streams.copies)
    assert other.tensors[0].tolist() == [7, 7] and one.tensors[0].tolist() == [0, 0]


def test_static_inputs_are_aligned_like_separate_tensors() -> None:
    like = [torch.arange(3), torch.tensor([True]), torch.zeros(2, 0, dtype=torch.int64), torch.arange(8.0).view(2, 4)]
    static = StaticInputs(like, torch.device("cpu"))
    for said, there, one in zip(static.staging, static.tensors, like, strict=True):
        assert (there.dtype, there.shape, there.is_contiguous()) == (one.dtype, one.shape, True)
        assert there.storage_offset() * there.element_size() % to_device.ALIGNED == 0
        assert torch.equal(there, one) and torch.equal(said, one)
    static.staging[0].fill_(5)
    assert torch.equal(static.tensors[0], like[0])
    static.upload()
    static.staging[0].fill_(6)
    assert static.tensors[0].tolist() == [5, 5, 5] and torch.equal(static.tensors[3], like[3])


@pytest.mark.gpu
def test_inputs_are_not_overwritten_while_a_gpu_is_late() -> None:
    static, seen = StaticInputs([torch.zeros(2, dtype=torch.int64)], torch.device("cuda")), list[torch.Tensor]()
    for number in range(4):
        static.staging[0].fill_(number)
        static.upload()
        torch.cuda._sleep(LONG)
        seen.append(static.tensors[0].clone())
        static.mark_read()
    assert [x.tolist() for x in seen] == [[number, number] for number in range(4)]


@pytest.mark.gpu
def test_launch_waits_for_a_late_copy() -> None:
    static = StaticInputs([torch.zeros(2, dtype=torch.int64)], torch.device("cuda"))
    beside = copy_stream(torch.device("cuda"), "in")
    assert isinstance(beside, SideStream)
    with torch.cuda.stream(beside._stream):
        torch.cuda._sleep(LONG)
    static.staging[0].fill_(7)
    static.upload()
    seen = static.tensors[0].clone()
    static.mark_read()
    assert seen.tolist() == [7, 7]


# ---- to the host


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Streams:
    """Results are copied to the host when the host waits for them, not before."""
    found = Streams()
    monkeypatch.setattr(to_host, "copy_stream", lambda device, direction: found)
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
def test_caller_may_change_its_answer_before_a_late_copy(checkpoint: Checkpoint, late: Streams, graphs: bool) -> None:
    assert counted(checkpoint, graphs=graphs) == 5
    # The root of the prefill; without graphs the copy of the counts is among the launches.
    assert len(late.copies) == 1 + graphs


def test_late_copy_of_the_callers_tensor_is_detected(
    checkpoint: Checkpoint, late: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: every source is treated as one that is never overwritten."""
    begin = HostCopy.__init__

    def trusting(self: HostCopy, *parts: torch.Tensor, immutable: bool = False) -> None:
        begin(self, *parts, immutable=True)

    monkeypatch.setattr(HostCopy, "__init__", trusting)
    assert counted(checkpoint, graphs=False) == 3 + 99


def test_without_streams_a_copy_runs_at_once() -> None:
    counts = torch.tensor([3, 1])
    copy = HostCopy(counts, immutable=True)
    counts.fill_(0)
    assert isinstance(copy_stream(torch.device("cpu"), "out"), Immediate) and copy.list() == [3, 1]


@pytest.mark.gpu
def test_freed_memory_is_not_reused_before_its_copy() -> None:
    out, number = copy_stream(torch.device("cuda", torch.cuda.current_device()), "out"), 1 << 10
    assert isinstance(out, SideStream)
    for _ in range(3):
        counts = torch.arange(number, device="cuda")
        with torch.cuda.stream(out._stream):
            torch.cuda._sleep(LONG)
        copy = HostCopy(counts, immutable=True)
        del counts
        others = [torch.zeros(number, dtype=torch.int64, device="cuda") for _ in range(4)]
        assert copy.list() == list(range(number)) and len(others) == 4


@pytest.mark.gpu
def test_counts_arrive_before_later_launches_run() -> None:
    """The host reads them while a sleep that was launched later still lasts."""
    torch.cuda._sleep(LONG)
    copy = HostCopy(torch.arange(4, device="cuda") + 1, immutable=True)
    torch.cuda._sleep(20 * LONG)
    slept = torch.cuda.Event()  # type: ignore[no-untyped-call]
    slept.record()
    assert copy.list() == [1, 2, 3, 4] and not slept.query()
    torch.cuda.synchronize()
