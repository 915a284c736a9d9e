"""`--stress`: delays, few multiprocessors, poison and another process act, are counted, and each finds a fault alone.

On a CPU the parts run on objects that note their calls. On a GPU each kind meets faults that a replay without
stress does not see. Leaves out: the wrong op sets (`support/kernels/under_stress.py`).
"""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from instep import setting as settings
from instep.options import STRESSES
from instep.player import Player
from instep.report.outcome_data import notes, of
from instep.run import stress
from instep.run.few_multiprocessors import Squeeze
from instep.run.replay import Replay
from instep.run.stress import Jitter, Neighbour, Poison, free_blocks
from instep.setting import Setting
from instep.verdict import Exit, Stressed, Verdict
from instep_optimized import load
from instep_optimized.ops.op_protocols import Ops
from instep_optimized.transfer import to_host
from instep_optimized.transfer.copy_stream import SideStream
from instep_reference.contract.errors import BadInput
from support.inputs.few_channels import few_channels
from support.running.verdicts import agreed, related

CARD = torch.device("cuda", 0)
ALL = ",".join(STRESSES)
Plant = Callable[[pytest.MonkeyPatch], str | Ops]


# ---- what is refused, and what does not pass


@pytest.mark.parametrize(("given", "says"), [
    ({"stress": "jitter"}, "found --device cpu"), ({"stress": "jiter"}, "some of jitter, squeeze"),
    ({"stress": ""}, "some of jitter"), ({"stress": "poison,poison"}, "each once"),
    ({"stress": "squeeze:3"}, "jitter:N has the seed N"), ({"stress": "jitter:x"}, "jitter:N has the seed N"),
])  # fmt: skip
def test_unknown_stress_is_refused_and_on_a_cpu_all_of_it(given: dict[str, Any], says: str) -> None:
    with pytest.raises(BadInput, match="--stress") as raised:
        Setting("plain", **given)
    assert says in str(raised.value)


@pytest.fixture
def anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stress on a CPU, too."""
    monkeypatch.setattr(settings, "may_be_stressed", lambda device, comm: None)


@pytest.mark.usefixtures("anywhere")
def test_stress_that_never_acted_does_not_pass() -> None:
    outcome = Replay(few_channels("ragged", 2), Setting("ledger", stress="jitter:7")).run(until=4)
    assert not outcome.verdict.findings and outcome.verdict.exit is Exit.INCONCLUSIVE
    said = notes([outcome])
    assert "ledger: under jitter: the engine recorded no torch.cuda.Event and waited for none" in said
    assert "ledger: --stress jitter never acted, so it shows nothing" in said
    assert of([outcome]).found["runs"][0]["stressed"]["jitter"].startswith("the engine recorded")
    assert outcome.plan.setting.words()[-2:] == ("--stress", "jitter:7")


@pytest.mark.usefixtures("anywhere")
def test_kinds_have_the_names_of_the_option() -> None:
    assert tuple(stress.KINDS) == STRESSES
    assert Setting(stress="poison, jitter:7").stresses == {"poison": 0, "jitter": 7}
    assert Verdict([], stressed={"jitter": Stressed(0, "", "")}).exit is Exit.INCONCLUSIVE


class Acts:
    """A kind while which an op of its test is wrong. runs: under it"""

    on, runs = False, 0

    def __init__(self, device: torch.device, seed: int) -> None: ...
    def __enter__(self) -> None:
        Acts.on, Acts.runs = True, Acts.runs + 1

    def __exit__(self, *failed: object) -> None:
        Acts.on = False

    def result(self) -> Stressed:
        return Stressed(3, "three times", "never")


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize("always_wrong", [False, True])
def test_cause_of_a_finding_is_the_stress_if_it_agrees_without(
    always_wrong: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it does not agree, the stress hides no other cause: further runs are without it."""
    from instep.diagnose import diagnose

    ledger = load("ledger")

    def norm(**given: Any) -> torch.Tensor:
        return ledger.norm(**given) + (Acts.on or always_wrong)

    def embed(**given: Any) -> torch.Tensor:
        return ledger.embed(**given) + (Acts.on and Acts.runs > 1)

    monkeypatch.setitem(stress.KINDS, "jitter", Acts)  # type: ignore[misc]
    monkeypatch.setattr(Acts, "runs", 0)
    handed = replace(ledger, norm=norm, embed=embed)
    outcome = diagnose(Replay(few_channels("ragged", 2), Setting(stress="jitter", handed=handed)), until=3, ladder=True)
    assert outcome.verdict.exit is Exit.DIVERGED and outcome.located is not None
    says = "cause: op `norm` (with the op of `ledger`, event" if always_wrong else "(without it, event"
    assert outcome.located.cause == ("op" if always_wrong else "stress") and says in outcome.located.says
    assert outcome.verdict.stressed == {"jitter": Stressed(3, "three times", "never")} and not Acts.on
    assert Acts.runs == 1


# ---- delays


class Streams:
    """torch's streams and events on a CPU. Each stream has a clock, in seconds, and so has the host.

    log: the stream and the action, in order
    """

    STEP = 5e-6  # of an action

    def __init__(self) -> None:
        self.log: list[tuple[str, str]] = []
        self.host, self.launches = 0.0, Stream("launches", self)
        self.current = [self.launches]

    def act(self, stream: "Stream", name: str) -> float:
        """Issue an action, and return when it has ended."""
        self.log.append((stream.name, name))
        self.host += self.STEP
        stream.at = max(stream.at, self.host) + self.STEP
        return stream.at

    def sleep(self, cycles: int) -> None:
        stream = self.current[-1]
        self.log.append((stream.name, "sleep"))
        stream.at = max(stream.at, self.host) + cycles / stress.CYCLES_PER_S

    @contextmanager
    def within(self, stream: "Stream") -> Iterator[None]:
        self.current.append(stream)
        yield
        self.current.pop()


class Stream:
    def __init__(self, name: str, of: Streams) -> None:
        self.name, self.of, self.device, self.at = name, of, CARD, 0.0
        self.captures = False

    def wait_event(self, event: Any) -> None:  # as torch's own does
        event.wait(self)


class Memory:
    """A tensor on the card. arrives: when the last copy has ended"""

    is_cuda = True

    def __init__(self, streams: Streams) -> None:
        self._streams, self.arrives = streams, 0.0

    def copy_(self, source: Any, non_blocking: bool) -> None:
        self.arrives = self._streams.act(self._streams.current[-1], "copy")

    def record_stream(self, stream: Stream) -> None: ...
    def data_ptr(self) -> int:
        return id(self)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    found = Streams()

    class Event:
        def record(self, stream: Stream) -> None:
            self.at = found.act(stream, "record")

        def wait(self, stream: Stream) -> None:
            stream.at = max(found.act(stream, "wait"), self.at)

        def synchronize(self) -> None:
            found.host = max(found.host, self.at)

    class Graph:
        def capture_begin(self) -> None:
            found.current[-1].captures = True

        def replay(self) -> None:
            found.act(found.current[-1], "replay")

    made: dict[str, Any] = {
        "Event": Event, "Stream": lambda device: Stream("copies", found), "stream": found.within, "CUDAGraph": Graph,
        "current_stream": lambda device=None: found.current[-1], "_sleep": found.sleep,
        "is_current_stream_capturing": lambda: found.current[-1].captures,
    }
    for name, value in made.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return found


def test_a_delay_follows_each_record_and_wait_of_the_engines_copies(streams: Streams) -> None:
    jitter = always(0.001)
    copies, memory = SideStream(CARD), Memory(streams)
    with jitter:
        copies.wait(copies.copy(memory, memory, behind=copies.now()))  # type: ignore[arg-type]
    acts = [("launches", "record"), ("copies", "wait"), ("copies", "record"), ("launches", "wait")]
    expected = [one for stream, act in acts for one in ((stream, act), (stream, "sleep"))]
    assert streams.log == [*expected[:4], ("copies", "copy"), *expected[4:]]
    assert jitter.result()[:2] == (4, "4 delays, 4 ms in all, at 4 records and waits on 2 streams")
    streams.log.clear()
    copies.wait(copies.now())
    assert streams.log == [("launches", "record"), ("launches", "wait")], "torch has its own functions again"


def always(seconds: float) -> Jitter:
    jitter = Jitter()
    jitter._drawn = lambda: seconds  # type: ignore[method-assign]
    return jitter


def test_a_capture_with_a_side_stream_has_no_delay_that_nothing_waits_for(streams: Streams) -> None:
    """CUDA ends a capture with an error if a stream of it has work that the first one does not wait for."""
    side, origin, graph, forked, joined = Stream("side", streams), streams.launches, *(
        getattr(torch.cuda, name)() for name in ("CUDAGraph", "Event", "Event"))
    with (jitter := always(0.001)):
        graph.capture_begin()
        forked.record(origin)
        side.captures = True
        side.wait_event(forked)
        streams.act(side, "work")
        joined.record(side)
        origin.wait_event(joined)
        serve(jitter)
    assert jitter.result().times == 3, "they are in each replay, although the engine was only built"
    assert streams.log == [("launches", "record"), ("launches", "sleep"), ("side", "wait"), ("side", "sleep"),
                           ("side", "work"), ("side", "record"), ("launches", "wait"), ("launches", "sleep")]


@pytest.mark.parametrize("seconds", [0.0, 0.001])
def test_jitter_that_delays_nothing_while_events_run_does_not_count(seconds: float, streams: Streams) -> None:
    """Neither the warm-up of a graph while the engine is built, nor a draw of no delay."""
    event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    with (jitter := always(seconds)):
        event.record(streams.launches)
        serve(jitter)
        assert jitter.result()[::2] == (0, f"{seconds > 0:d} delays, {1e3 * seconds:.0f} ms in all, at 1 records and "
                                        "waits on 1 streams, none during an event or in a graph")  # fmt: skip
        jitter._drawn = lambda: 0.002  # type: ignore[method-assign]
        event.wait(streams.launches)
        serve(jitter)
    assert jitter.result().times == 1, "only delays before the first event do not count"


def right(patch: pytest.MonkeyPatch) -> str:
    return "triton"


def after_the_first(patch: pytest.MonkeyPatch, event_of: Callable[..., Any]) -> str:
    """Let a launch wait for `event_of` the copy of its inputs. The first inputs of a graph arrive: all are indices."""
    right, first = SideStream.copy, set[int]()

    def copy(self: SideStream, target: torch.Tensor, source: torch.Tensor, behind: Any) -> Any:
        if not target.is_cuda or target.data_ptr() not in first:
            first.add(target.data_ptr())
            return right(self, target, source, behind)
        return event_of(self, lambda: right(self, target, source, behind))

    patch.setattr(SideStream, "copy", copy)
    return "triton"


def no_wait_for_inputs(patch: pytest.MonkeyPatch) -> str:
    """A graph does not wait for the copy of its inputs."""

    def none(side: SideStream, copied: Callable[[], Any]) -> None:
        copied()

    return after_the_first(patch, none)


def event_before_the_copy(patch: pytest.MonkeyPatch) -> str:
    """The event that a graph waits for is recorded before the copy of its inputs."""

    def early(side: SideStream, copied: Callable[[], Any]) -> Any:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(side._stream)
        copied()
        return event

    return after_the_first(patch, early)


def host_waits_by_the_clock(patch: pytest.MonkeyPatch) -> str:
    """The host gives a copy 3 ms to arrive, instead of waiting for its event."""
    patch.setattr(to_host, "synchronize", lambda event: time.sleep(0.003))
    return "triton"


@pytest.mark.parametrize("plant", [right, no_wait_for_inputs, event_before_the_copy, host_waits_by_the_clock])
def test_jitter_alone_makes_a_missing_wait_read_stale_numbers(
    plant: Plant, streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the fault's own terms: a graph, or the host, reads before the copy has ended."""
    plant(monkeypatch)
    monkeypatch.setattr(time, "sleep", lambda seconds: setattr(streams, "host", streams.host + seconds))

    def stale() -> int:
        copies, memory, count = SideStream(CARD), Memory(streams), 0
        for turn in range(200):
            event = copies.copy(memory, memory, behind=copies.now())  # type: ignore[arg-type]
            if plant is host_waits_by_the_clock:
                to_host.synchronize(event)
                count += streams.host < memory.arrives
            else:
                copies.wait(event)
                count += streams.act(streams.launches, "replay") - streams.STEP < memory.arrives
            streams.host = max(streams.host, streams.launches.at, memory.arrives)  # a replay of a trace waits here
            assert turn or not count, "the first inputs arrive"
        return count

    assert stale() == 0
    with Jitter(7):
        assert (stale() > 20) == (plant is not right)


def test_half_of_the_delays_are_none_and_a_seed_draws_the_same() -> None:
    draws = [[jitter._drawn() for _ in range(400)] for jitter in (Jitter(1), Jitter(1), Jitter(2))]
    assert draws[0] == draws[1] != draws[2]
    long = [one for one in draws[0] if one]
    assert 150 < len(long) < 250 and stress.SHORTEST_S <= min(long) < 1e-4 < 1e-3 < max(long) <= stress.LONGEST_S


# ---- few multiprocessors


def serve(observer: Any, act: Callable[[], Any] = lambda: None) -> None:
    """Serve an event that does this."""
    event: Any = SimpleNamespace(on=lambda engine: act())
    Player("engine", object(), [observer]).serve(event)  # type: ignore[arg-type]


@pytest.fixture
def squeezed(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Squeeze]:
    """A kernel that notes its calls. whole: whether it spins until its end"""
    spin = SimpleNamespace(count=132, whole=True, calls=[])
    spin.begin = lambda: spin.calls.append("begin") or 4
    spin.end = lambda: spin.calls.append("end") or spin.whole
    stream = SimpleNamespace(synchronize=lambda: spin.calls.append("ran"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *device: spin.calls.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    graph = type("CUDAGraph", (), {"replay": lambda graph: spin.calls.append("replay")})
    monkeypatch.setattr(torch.cuda, "CUDAGraph", graph)
    return spin, Squeeze(CARD, spin)


def fails(error: BaseException) -> Any:
    raise error


def test_kernel_spins_from_before_an_event_until_the_device_has_run_it(squeezed: tuple[Any, Squeeze]) -> None:
    spin, squeeze = squeezed
    with squeeze:
        serve(squeeze, lambda: spin.calls.append("serve"))
        assert spin.calls == ["begin", "serve", "ran", "end"]
        spin.calls.clear()
        serve(squeeze, torch.cuda.synchronize)
        assert spin.calls == ["begin", "end", "synchronize", "ran"], "it would wait for the kernel"
        spin.calls.clear()
        graph = torch.cuda.CUDAGraph()
        serve(squeeze, lambda: (torch.cuda.synchronize(), graph.replay(), graph.replay()))
        graph.replay()
        assert " ".join(spin.calls) == "begin end synchronize begin replay replay ran end replay", "a capture ended it"
        spin.calls.clear()
        with pytest.raises(InterruptedError):
            serve(squeeze, lambda: fails(InterruptedError()))
        assert spin.calls == ["begin", "end"]
    times, says, _ = squeeze.result()
    assert times == 2 and says.startswith("4 events on 4 of 132 multiprocessors; in 2 of them it ended earlier")


def test_exception_of_the_engine_is_the_one_that_is_raised(squeezed: tuple[Any, Squeeze]) -> None:
    spin, squeeze = squeezed
    spin.end = lambda: fails(RuntimeError("CUDA error: an illegal memory access"))
    with squeeze, pytest.raises(InterruptedError):
        serve(squeeze, lambda: fails(InterruptedError()))


def test_squeeze_that_always_ends_too_early_does_not_count(squeezed: tuple[Any, Squeeze]) -> None:
    spin, squeeze = squeezed
    spin.whole = False
    with squeeze:
        serve(squeeze)
    assert squeeze.result().times == 0


# ---- poison


def segment(state: str, *, device: int = 0, pool: tuple[int, int] = (0, 0), stream: int = 0) -> dict[str, Any]:
    blocks = [{"state": "active_allocated", "address": 4096, "size": 512}, {"state": state, "address": 64, "size": 8}]
    return {"device": device, "segment_pool_id": pool, "stream": stream, "blocks": blocks}


def test_only_free_memory_outside_of_graphs_is_poisoned(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    free, other_stream = segment("inactive"), segment("inactive", stream=9)
    told = [free, segment("inactive", pool=(0, 7)), segment("active_pending_free"), segment("inactive", device=1),
            other_stream]  # fmt: skip
    assert [*free_blocks(told, 0)] == [(0, 64, 8), (9, 64, 8)]
    known, here = {0: streams.launches, 9: Stream("side", streams)}, torch.cuda.current_stream()
    memory = torch.zeros(8, dtype=torch.uint8)

    def memory_at(*given: object) -> torch.Tensor:
        memory.zero_()
        streams.act(streams.current[-1], "fill")
        return memory

    monkeypatch.setattr(stress, "_snapshot", lambda: told)
    monkeypatch.setattr(stress, "_stream_at", lambda address, device: known[address])
    monkeypatch.setattr(stress, "memory_at", memory_at)
    here.at = 5.0  # type: ignore[attr-defined]  # when its launches end, which may read memory of the side stream
    poison = Poison(CARD)
    with (jitter := always(0.001)), poison:
        torch.cuda.CUDAGraph().replay()
        assert memory.view(torch.float32).isnan().all()
        told.clear()
        torch.cuda.CUDAGraph().replay()
    acts = ["launches record", "launches wait", "launches fill", "side wait", "side fill", "launches replay"]
    assert [" ".join(act) for act in streams.log] == [*acts, "launches record", "launches replay"]
    assert known[9].at > 5 and jitter.result().times == 0, "the fill waits for launches, and is no delay of the engine"
    assert poison.result().times == 1, "the second replay had no free memory"


@pytest.mark.usefixtures("anywhere")
def test_poison_is_refused_where_the_allocator_lists_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    with pytest.raises(BadInput, match="poison with torch's allocator cudaMallocAsync"):
        Replay(few_channels("ragged", 2), Setting(stress="poison")).run(until=0)


# ---- another process


COUNTS = """
import os, pathlib, sys
def turns(count):
    pathlib.Path(sys.argv[2] + ".new").write_text(sys.argv[1][-1] + str(count))
    os.replace(sys.argv[2] + ".new", sys.argv[2])
turns(2)
sys.stdin.read()
turns(5)
"""


def test_turns_of_another_process_during_a_run_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pathlib.py").write_text("raise SystemExit(1)")
    monkeypatch.chdir(tmp_path)  # it imports nothing of a user
    neighbour = Neighbour(CARD, COUNTS)
    with neighbour:
        assert neighbour._process.poll() is None
    assert neighbour._process.returncode == 0 and neighbour.result().times == 3


@pytest.mark.parametrize("ends", ["raise SystemExit(1)", COUNTS.replace("sys.stdin.read()", "sys.exit()")])
def test_other_process_that_ends_before_the_run_does_not_count(ends: str) -> None:
    with (neighbour := Neighbour(CARD, ends)):
        neighbour._process.wait()
    assert neighbour.result().times == 0


# ---- on a GPU: a correct engine, and faults that a replay without stress does not see


def replayed(kinds: str | None, ops: str | Ops = "triton", name: str = "ragged") -> Any:
    named: dict[str, Any] = {"ops": ops} if isinstance(ops, str) else {"ops": ops.name, "handed": ops}
    setting = Setting(**named, device="cuda", graphs=True, overlap=True, stress=kinds)
    return Replay(few_channels(name, 2), setting).run()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["ragged", "prompts"])
def test_correct_engine_agrees_under_all_stress(name: str) -> None:
    verdict = agreed(replayed(ALL, name=name))
    assert [*verdict.stressed] == [*STRESSES] and all(one.times for one in verdict.stressed.values())


@pytest.mark.gpu
def test_events_that_are_read_late_agree_under_jitter_and_poison() -> None:
    """Nothing waits between two events there, so a delay lasts into the next one."""
    setting = Setting("triton", device="cuda", graphs=True, overlap=True, stress="jitter,poison")
    found = related("read_late", Replay(few_channels("kept", 2), setting)).verdict
    assert all(one.times for one in agreed(found).stressed.values())


def shift_in_place(patch: pytest.MonkeyPatch) -> str:
    return "support.kernels.under_stress:IN_PLACE"


def freed_after_the_capture(patch: pytest.MonkeyPatch) -> Ops:
    """A graph reads copies of weights that are freed when a graph is first replayed."""
    from support.kernels.under_stress import TRITON, Dangling

    right, norm = torch.cuda.CUDAGraph.replay, Dangling()

    def replay(graph: torch.cuda.CUDAGraph) -> None:
        norm.free()
        right(graph)

    patch.setattr(torch.cuda.CUDAGraph, "replay", replay)
    return replace(TRITON, name="dangling", norm=norm)


def over_a_barrier(patch: pytest.MonkeyPatch) -> str:
    return "support.kernels.under_stress:OVER_A_BARRIER"


FAULTS: list[tuple[str, Plant]] = [
    ("jitter", no_wait_for_inputs), ("jitter", event_before_the_copy), ("jitter", host_waits_by_the_clock),
    ("squeeze", shift_in_place), ("poison", freed_after_the_capture), ("neighbour", over_a_barrier),
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "plant"), FAULTS)
def test_fault_is_found_under_its_stress_alone(kind: str, plant: Plant) -> None:
    """Each replay has a process of its own, as a user's has: an illegal access ends all work of one on a card."""
    calm, _ = alone(None, plant)
    assert calm is Exit.AGREED
    for turn in range(5):
        ended, says = alone(f"jitter:{turn}" if kind == "jitter" else kind, plant)
        print(plant.__name__, kind, turn, says)
        if ended is Exit.DIVERGED:
            return
    pytest.fail("no finding in five runs")


def alone(kinds: str | None, plant: Plant) -> tuple[Exit, str]:
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(end_of, kinds, plant).result()


def end_of(kinds: str | None, plant: Plant) -> tuple[Exit, str]:
    """The end of a replay, and its first finding with what its stress did."""
    with pytest.MonkeyPatch.context() as patch:
        verdict = replayed(kinds, plant(patch)).verdict
    found = [f"event {one.event} {one.kind}, {one.place}, {one.worst}" for one in verdict.findings[:1]]
    return verdict.exit, "; ".join([*found, *(one.says for one in verdict.stressed.values())])
