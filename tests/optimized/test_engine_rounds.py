"""Rounds in orders that are legal and rare, and what the host may ask, wait for and reserve meanwhile.

Leaves out: the usual orders (`test_engine_reference.py`), and graphs by themselves (`test_engine_graphs.py`).
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from instep_optimized import OptimizedEngine
from instep_optimized.transfer.to_host import HostCopy
from instep_reference.contract import engine as e
from instep_reference.contract.adaptive_controller_file import AdaptiveFile, Bracket
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.errors import BadInput, OutOfCapacity
from instep_reference.contract.place_names import Place, unseen
from support.running.covering import few
from support.running.recorded_calls import calls_of
from support.worlds import engine_and_reference as sides
from support.worlds.engine_and_reference import both_sides, snapshot, untouched
from support.worlds.engine_in_graphs import Twins

FILE = AdaptiveFile(flat=Bracket(candidate_steps=(0, 1, 3), warmup_batches=1, update_interval=2))
ROOM = e.Capacity(slots=(4, 1, 6, 3), pages=tuple(range(60, 0, -1)), page_size=4, max_tokens=64)
PROMPT = (5, 9, 2, 33, 7)
engine = partial(sides.engine, ops="ledger", room=ROOM, adaptive=FILE)


def verifies(*names: str) -> tuple[e.Row, ...]:
    return tuple(e.Row(name, "verify") for name in names)


def started(subject: OptimizedEngine, *names: str) -> OptimizedEngine:
    for name in names:
        subject.admit(name, PROMPT)
        subject.forward((e.Row(name, "prefill", len(PROMPT)),))
    return subject


# ---- orders


def rare() -> Iterator[e.Event]:
    """Drafts in several events, of which some are verified, some decode meanwhile, some leave; others come and go
    between a verify and its commit."""
    for name in "abc":
        yield e.Admit(name, PROMPT)
    yield e.Forward((e.Row("a", "prefill", 5), e.Row("b", "prefill", 5), e.Row("c", "prefill", 2)))
    yield e.Save("b", "early")
    yield e.Draft(("b",), ((1, 2, 3),))
    yield e.Forward((e.Row("c", "prefill", 3), e.Row("a", "decode")))  # next to a request with drafts
    yield e.Draft(("a",), ((4, 5, 6),))
    yield e.Draft(("c",), ((7, 8, 9),))
    yield e.Forward(verifies("c", "a"))  # not everybody who is drafted
    yield e.Admit("d", PROMPT)
    yield e.Load("d", "early")
    yield e.Save("d", "meanwhile")
    yield e.Preempt("d")
    yield e.Resume("d")
    yield e.Commit(("a", "c"), (e.Path((1,), 3), e.Path((1, 2, 3), 4)))
    yield e.Forward((e.Row("d", "decode"), *verifies("b")))
    yield e.Abort("b")  # verified, and the only one: no commit follows
    yield e.SetNumSteps(1)
    yield e.Draft(("d", "c"))
    yield e.Abort("d")
    yield e.Draft(("a",))
    yield e.Forward((e.Row("a", "verify"), e.Row("c", "verify")))
    yield e.Admit("e", PROMPT)
    yield e.Load("e", "meanwhile")
    yield e.Abort("a")
    yield e.Commit(("c",))
    yield e.SetNumSteps(0)
    yield e.Forward((e.Row("e", "decode"), e.Row("c", "decode")))
    yield e.SetNumSteps(3)
    yield e.Draft(("e",))
    yield e.Draft(("c",))
    yield e.Forward(verifies("e", "c"))
    yield e.Commit(("c", "e"))
    yield e.Finish("c")
    yield e.Preempt("e")
    yield e.SetNumSteps(1)
    yield e.Resume("e")
    yield e.Draft(("e",))
    yield e.Forward(verifies("e"))
    yield e.Commit(("e",))


@few(2)
@pytest.mark.slow
@pytest.mark.parametrize("options", [
    {"strategy": "rerun"}, {"strategy": "lazy_rerun", "conv": "widened"}, {"strategy": "columns"},
    {"strategy": "snapshot", "overlap": True}, {"strategy": "rerun", "graphs": True, "overlap": True},
], ids=lambda options: ", ".join(map(str, options.values())))  # fmt: skip
def test_rare_orders_agree_with_the_reference(checkpoint: Checkpoint, options: dict[str, Any]) -> None:
    both = both_sides(checkpoint, "plain", ROOM, adaptive=FILE, watched="graphs" not in options, **options)
    assert both.serve(rare()).compared > 10_000


# ---- rounds that overlap


def rejected(subject: OptimizedEngine, rounds: int) -> None:
    """Rounds that accept one token each."""
    for _ in range(rounds):
        subject.draft(("a",))
        subject.forward(verifies("a"))
        subject.commit(("a",), (e.Path((), 3),))


@pytest.mark.slow
def test_pages_are_reserved_only_for_rounds_in_flight(checkpoint: Checkpoint) -> None:
    subject = started(engine(checkpoint, overlap=True), "a")
    rejected(subject, 30)
    in_flight = 2 * 4  # a window of which nothing is known yet, and the next one
    assert len(subject.pages()["a"]) <= -(-(5 + 30 + in_flight) // ROOM.page_size)
    assert subject.state("a").length == 5 + 30


def test_event_that_fits_by_exact_lengths_is_served(checkpoint: Checkpoint) -> None:
    """The worst case does not fit; then lengths are waited for, and only then an event is refused."""
    subject = started(engine(checkpoint, room=replace(ROOM, pages=(2, 1, 3)), overlap=True), "a")
    rejected(subject, 4)
    assert subject.state("a").length == 9
    with pytest.raises(OutOfCapacity):
        rejected(subject, 1)
    assert subject.state("a").length == 9


@pytest.mark.parametrize(("ops", "options"), [
    ("plain", {}), pytest.param("triton", {"device": "cuda", "graphs": True}, marks=pytest.mark.gpu),
], ids=["plain", "cuda"])  # fmt: skip
def test_two_rounds_run_without_a_host_read(checkpoint: Checkpoint, ops: str, options: dict[str, Any]) -> None:
    """Counts are owed while others are saved, preempted and aborted, and while the step count changes."""
    both = Twins(*(engine(checkpoint, ops=ops, overlap=overlap, **options) for overlap in (False, True)))
    answers = [[event.on(subject) for event in rare()] for subject in both.engines]
    for waiting, overlapping in zip(*answers, strict=True):
        both._same(waiting, overlapping)
    both._same(*(subject.state("e") for subject in both.engines))
    assert len({subject.next_num_steps(1, 1) for subject in both.engines}) == 1
    assert both.compared > 100


@pytest.mark.gpu
def test_admit_and_finish_do_not_wait(checkpoint: Checkpoint) -> None:
    """Amid rounds of others a prompt comes in and a request ends, freed units poisoned: waiting is an error."""
    subject = started(engine(checkpoint, ops="triton", device="cuda", graphs=True, overlap=True), "a", "b")
    rejected(subject, 2)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        subject.finish("b")
        started(subject, "c")
        rejected(subject, 1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert (subject.state("a").length, subject.state("c").length) == (5 + 3, 5)


def test_counts_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = HostCopy(torch.tensor([3, 1]))
    assert counts.list() == [3, 1]
    monkeypatch.setattr(torch.Tensor, "tolist", None)
    assert counts.list() == [3, 1]


def test_overwriting_an_answer_changes_nothing(checkpoint: Checkpoint) -> None:
    subject = started(engine(checkpoint, overlap=True), "a")
    subject.draft(("a",))
    subject.forward(verifies("a"))
    subject.commit(("a",), (e.Path((1,), 3),)).accept_lens.fill_(99)
    assert subject.state("a").length == 7


# ---- reads and refusals


@pytest.mark.slow
def test_watched_and_unwatched_engines_run_in_graphs(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """A watcher is shown the rows of every replay; once it has gone it is shown nothing."""
    subject = started(engine(checkpoint, graphs=True), "a")
    replayed = calls_of(monkeypatch, subject._graphs, "run", key=lambda key, *_, **__: key)
    shown: dict[str, int] = {}

    def see(place: Place, tensor: torch.Tensor) -> torch.Tensor:
        shown[place.component] = len(tensor)
        return tensor

    for watcher in (see, unseen):
        subject.watch(watcher)
        subject.forward((e.Row("a", "decode"),))
        assert replayed.pop() == ("decode", 3) and bool(shown) is (watcher is see)
        assert set(shown.values()) <= {1}, "one row, whatever the bucket"
        shown.clear()


@pytest.mark.parametrize(
    ("picks", "parents"), [(((1, 2),), ((0, 1, 2),)), (((1, 2, 3, 4),), ((0, 1, 2, 3),)), (((1,),), ((),))],
    ids=["fewer drafts", "longer", "none"],
)
def test_a_chain_that_is_too_long_or_has_other_drafts_is_refused(
    checkpoint: Checkpoint, picks: tuple[tuple[int, ...], ...], parents: tuple[tuple[int, ...], ...]
) -> None:
    subject = started(engine(checkpoint), "a")
    before, pages = snapshot(subject), subject.pages()
    with pytest.raises(BadInput):
        subject.draft(("a",), picks, parents)
    assert subject.pages() == pages
    assert untouched(subject, before, {}) > 0
