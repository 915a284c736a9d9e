"""The engine held in graphs does what its bodies do, byte by byte; and no round waits for what the host does not know.

Leaves out: graphs by themselves (`test_graphs.py`). On a CPU the emulator records, with everything poisoned between
two replays; on a GPU the same tests capture for real.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import pytest
import torch

from instep_optimized import OptimizedEngine
from instep_optimized.commit import CONV_FORMS, STRATEGIES
from instep_optimized.graphs import Recorder
from instep_optimized.graphs.capture_all_at_start import prepared
from instep_optimized.transfer.to_host import HostCopy
from instep_reference.contract import engine as e
from instep_reference.contract.adaptive_controller_file import AdaptiveFile, Bracket
from instep_reference.contract.checkpoint import Checkpoint
from support.running.covering import WHOLE, few
from support.worlds import engine_and_reference as sides
from support.worlds.engine_and_reference import scenario
from support.worlds.engine_in_graphs import Twins, eagerly, emulated

pytestmark = pytest.mark.slow  # whole replays or commands

CANDIDATES = AdaptiveFile(flat=Bracket(candidate_steps=(0, 1, 3)))
FOUR = e.Capacity(slots=(4, 1, 6, 3), pages=tuple(range(60, 0, -1)), page_size=4, max_tokens=64)
OPS = [
    pytest.param("ledger", "cpu", id="ledger"),
    pytest.param("plain", "cpu", id="plain"),
    pytest.param("triton", "cuda", id="cuda", marks=pytest.mark.gpu),
]
# `test_combinations.py` replays `plain` with graphs and overlapped rounds; here it is in `make whole`.
LABELS = [
    pytest.param(*one.values, id=one.id, marks=(*one.marks, *((WHOLE,) if one.id == "plain" else ()))) for one in OPS
]


def engine(
    checkpoint: Checkpoint, ops: str, device: str, recorder: Recorder | None = None, **options: Any
) -> OptimizedEngine:
    """An engine in graphs for 0, 1 and 3 drafts, captured once, with `recorder` if it is given."""
    chosen = {"device": device, "graphs": recorder is None, **options}
    subject = sides.engine(checkpoint, ops, FOUR, adaptive=CANDIDATES, **chosen)
    if recorder is not None:
        subject._graphs = prepared(subject._base, subject._rounds.values(), subject._device, recorder)
    return subject


@few(2)
@pytest.mark.parametrize(("forced", "ops", "device"), [
    pytest.param(forced, *one.values, id=f"{name}-{one.id}", marks=(*one.marks, *few))
    for forced, name in ((True, "forced"), (False, "free")) for one, few in zip(OPS, (
        [WHOLE] * forced, [WHOLE] * (not forced), ()), strict=True)
])  # fmt: skip
def test_a_replay_is_the_eager_run_on_the_same_bucket(
    checkpoint: Checkpoint, ops: str, device: str, forced: bool
) -> None:
    both = Twins(*(engine(checkpoint, ops, device, recorder) for recorder in (emulated(device), eagerly)))
    assert both.serve(scenario(64, (3, 1, 0, 3), forced=forced)).compared > 100_000


@few(1)
@pytest.mark.parametrize(("strategy", "conv"), list(zip(STRATEGIES, [*CONV_FORMS] * 2, strict=True)))
def test_every_strategy_runs_in_graphs(checkpoint: Checkpoint, strategy: str, conv: str) -> None:
    chosen = {"strategy": strategy, "conv": conv}
    both = Twins(*(engine(checkpoint, "ledger", "cpu", recorder, **chosen) for recorder in (emulated("cpu"), eagerly)))
    assert both.serve(scenario(64, (3, 1, 0), forced=True)).compared > 100_000


def course(subject: Callable[[e.Event], e.Answer | None]) -> None:
    """Windows of equally many rows in turn (4 x 2 and 2 x 4), batches that shrink and grow in a bucket."""
    names = ("a", "b", "c", "d")
    for number, name in enumerate(names):
        subject(e.Admit(name, tuple(range(1, 4 + number))))
        subject(e.Forward((e.Row(name, "prefill", 3 + number),)))
    for steps, who in ((1, names), (3, names[:2]), (3, names[2:3]), (1, names), (0, names), (3, names), (3, names[1:]),
                       (3, names[::-1]), (0, names[:3]), (1, names[3:]), (3, names)):
        subject(e.SetNumSteps(steps))
        if not steps:
            subject(e.Forward(tuple(e.Row(name, "decode") for name in who)))
            continue
        subject(e.Draft(who))
        subject(e.Forward(tuple(e.Row(name, "verify") for name in who)))
        subject(e.Commit(who[::-1]))


@pytest.mark.parametrize(("ops", "device"), LABELS)
def test_layouts_with_equally_many_rows_are_kept_apart(checkpoint: Checkpoint, ops: str, device: str) -> None:
    both = Twins(*(engine(checkpoint, ops, device, recorder) for recorder in (emulated(device), eagerly)))
    course(both)
    assert both.compared > 100_000


def test_every_batch_runs_in_the_requested_graphs(checkpoint: Checkpoint) -> None:
    subject = engine(checkpoint, "ledger", "cpu", batches=(4,))
    both = Twins(subject, engine(checkpoint, "ledger", "cpu", eagerly))
    course(both)
    assert both.compared > 100_000 and subject.graphs is not None
    assert subject.graphs.buckets == (4,) and {bucket for _, bucket, _ in subject.graphs._captured} == {4}


@pytest.mark.parametrize(("ops", "device"), LABELS)
def test_answers_outlive_the_next_replays(checkpoint: Checkpoint, ops: str, device: str) -> None:
    subject, kept = engine(checkpoint, ops, device, emulated(device)), []

    def serve(event: e.Event) -> None:
        answer = event.on(subject)
        kept.extend((tensor, tensor.clone()) for tensor in tensors(answer))

    course(serve)
    assert len(kept) > 50
    assert all(torch.equal(tensor, copy) for tensor, copy in kept)
    places = {tensor.data_ptr() for tensor, _ in kept if tensor.numel()}
    assert len(places) == sum(tensor.numel() > 0 for tensor, _ in kept)


def tensors(answer: Any) -> Iterator[torch.Tensor]:
    for field in fields(answer) if is_dataclass(answer) else ():
        value = getattr(answer, field.name)
        yield from value.values() if isinstance(value, dict) else [value] if isinstance(value, torch.Tensor) else []


def test_a_captured_engine_has_changed_no_byte(checkpoint: Checkpoint) -> None:
    one, other = (
        sides.engine(checkpoint, "plain", FOUR, adaptive=CANDIDATES, graphs=graphs) for graphs in (True, False)
    )
    for region, untouched in zip(one.regions(), other.regions(), strict=True):
        assert torch.equal(bits(region.units), bits(untouched.units)), region.name


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def test_events_without_requests_change_no_byte(checkpoint: Checkpoint) -> None:
    subject = engine(checkpoint, "plain", "cpu", emulated("cpu"))
    course(lambda event: event.on(subject))
    before = [bits(region.units) for region in subject.regions()]
    subject.idle()
    assert subject.forward(()).own == {}
    assert subject.draft(()).drafts.shape == (0, 3)
    assert subject.commit(()).bonus.shape == (0,)
    assert all(torch.equal(bits(region.units), kept) for region, kept in zip(subject.regions(), before, strict=True))


# ---- rounds that overlap ------------------------------------------------------------------------------------------


def rounds(subject: OptimizedEngine, plan: Sequence[int]) -> list[Any]:
    """The answers of rounds, in order, none of which is read before the last one was launched."""
    names, said = ("a", "b", "c"), []
    for number, name in enumerate(names):
        subject.admit(name, tuple(range(1, 5 + number)))
        subject.forward((e.Row(name, "prefill", 4 + number),))
    for steps in plan:
        subject.set_num_steps(steps)
        said.append(subject.draft(names))
        said.append(subject.forward(tuple(e.Row(name, "verify") for name in names)))
        said.append(subject.commit(names))
    return said


@pytest.mark.parametrize(("ops", "device"), LABELS)
def test_overlapping_rounds_give_the_answers_of_waiting_ones(checkpoint: Checkpoint, ops: str, device: str) -> None:
    waiting, overlapping = (engine(checkpoint, ops, device, overlap=overlap) for overlap in (False, True))
    both = Twins(waiting, overlapping)
    for one, other in zip(*(rounds(subject, (3,) * 5) for subject in both.engines), strict=True):
        both._same(one, other)
    for name in "abc":
        both._same(waiting.state(name), overlapping.state(name))
    assert both.compared > 1_000


def test_round_starts_before_the_previous_counts_are_known(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages are there for the worst case, and every count is read a round late."""
    asked: list[int] = []
    made: list[HostCopy] = []
    begin, read = HostCopy.__init__, HostCopy.list

    def made_by(self: HostCopy, *numbers: torch.Tensor, **how: Any) -> None:
        begin(self, *numbers, **how)
        made.append(self)

    def told(self: HostCopy) -> list[int]:
        asked.append(made.index(self))
        return read(self)

    monkeypatch.setattr(HostCopy, "__init__", made_by)
    monkeypatch.setattr(HostCopy, "list", told)
    subject = engine(checkpoint, "ledger", "cpu", overlap=True)
    subject.admit("a", (1, 2, 3))
    subject.forward((e.Row("a", "prefill", 3),))
    made.clear()
    for number in range(6):
        asked.clear()
        subject.draft(("a",))
        subject.forward((e.Row("a", "verify"),))
        assert asked == [], "nothing was waited for before the commit"
        subject.commit(("a",))
        assert set(asked) == ({number - 1} if number else set())
    most = 3 + 6 * 4
    assert len(subject.pages()["a"]) <= -(-(most + 4) // FOUR.page_size)
    assert subject.state("a").length <= most


@pytest.mark.gpu
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_round_waits_for_the_device(checkpoint: Checkpoint, strategy: str) -> None:
    """A whole round, draft to commit, where waiting is an error; and the host is back while a sleep still runs."""
    subject = engine(checkpoint, "triton", "cuda", strategy=strategy, overlap=True)
    names = ("a", "b", "c")

    def again() -> None:
        subject.draft(names)
        subject.forward(tuple(e.Row(name, "verify") for name in names))
        subject.commit(names)

    rounds(subject, (3, 3))
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    again()  # pinned memory for all transfers of a round, of which none has arrived: its allocation may wait, once
    torch.cuda.synchronize()
    slept = torch.cuda.Event()
    torch.cuda._sleep(2_000_000_000)
    slept.record()
    torch.cuda.set_sync_debug_mode("error")
    try:
        again()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not slept.query(), "the host waited for the device"
    torch.cuda.synchronize()
    assert all(subject.state(name).length > 4 for name in names)
