"""The engine's refusals, with one clear line and before anything has changed.

Leaves out: the legal order of events (the harness's event rules).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from instep.watch.frozen_memory import KeptCopies
from instep_optimized import OptimizedEngine
from instep_reference.contract import engine as e
from instep_reference.contract.adaptive_controller_file import AdaptiveFile, Bracket
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.errors import BadInput, InstepError, OutOfCapacity, Unsupported
from support.inputs.checkpoints import TWO_LAYERS, write
from support.inputs.rounds import begin, play
from support.worlds.engine_and_reference import CAPACITY, engine, snapshot, untouched


@contextmanager
def as_they_were(subject: OptimizedEngine) -> Iterator[None]:
    """There are kept copies of requests, and nothing happens to them."""
    copies = KeptCopies()
    before = copies.look(subject.copies())
    assert before.elements
    try:
        yield
    finally:
        assert copies.look(subject.copies()) == before


@pytest.mark.parametrize(("options", "why"), [
    ({"strategy": "replay"}, "commit strategy"),
    ({"conv": "narrow"}, "form of conv window"),
    ({"strategy": "lazy_rerun", "state": torch.bfloat16}, "depend on the schedule"),
    ({"layout": "KKV"}, "VK or KV"),
    ({"activation": torch.int32}, "activations are"),
    ({"state": torch.int64}, "a state is stored in"),
    ({"activation": torch.float64}, "narrower state"),
    ({"drafter": "medusa"}, "drafter is not here"),
    ({"graphs": True, "batches": ()}, r"batches of 1 request or more \(batches \(\)\)$"),
    ({"graphs": True, "batches": (4, 0)}, "batches of 1 request or more"),
    ({"graphs": True, "batches": (1,)}, r"graphs for batches of up to 1 requests: there are \d slots"),
    ({"drafter": "vanilla"}, r"\(drafter vanilla, model type qwen3_5, 1 MTP layer, up to 3 drafts\)$"),
    pytest.param(
        {"device": "cuda"}, "no CUDA device",
        marks=pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here"),
    ),
])  # fmt: skip
def test_unsupported_event_is_refused(checkpoint: Checkpoint, options: dict[str, Any], why: str) -> None:
    with pytest.raises(Unsupported, match=why) as refused:
        engine(checkpoint, **options)
    assert not any(name in str(refused.value) for name in {"guarded", "poison"}), "only the options that it is about"


def test_several_mtp_layers_are_refused(tmp_path: Path) -> None:
    several = Checkpoint.open(write(tmp_path, "dense", **TWO_LAYERS, mtp_num_hidden_layers=2))
    with pytest.raises(Unsupported, match="this model has several"):
        engine(several)


def test_window_wider_than_the_capacity_is_refused(checkpoint: Checkpoint) -> None:
    with pytest.raises(BadInput, match="room for a window of 8 tokens"):
        engine(checkpoint, room=replace(CAPACITY, max_tokens=7), num_steps=7)
    with pytest.raises(BadInput, match="room for a window of 8 tokens"):
        engine(checkpoint, room=replace(CAPACITY, pages=(1,)), num_steps=7)


@pytest.mark.parametrize(
    ("room", "field"),
    [({"slots": ()}, "slots"), ({"slots": (0, 1)}, "slots"), ({"slots": (2, 2)}, "slots"), ({"pages": ()}, "pages"),
     ({"pages": (-1, 3)}, "pages"), ({"page_size": 0}, "page_size"), ({"max_tokens": 0}, "capacity")],
)
def test_capacity_too_small_for_any_window_is_refused(checkpoint: Checkpoint, room: dict[str, Any], field: str) -> None:
    with pytest.raises(BadInput, match=field):
        engine(checkpoint, room=replace(CAPACITY, **room))


def test_pools_are_sized_for_the_largest_candidate_of_any_bracket(checkpoint: Checkpoint) -> None:
    file = AdaptiveFile(by_batch={1: Bracket(candidate_steps=(1,)), 4: Bracket(candidate_steps=(2, 9))})
    subject = engine(checkpoint, strategy="snapshot", num_steps=1, adaptive=file)
    snapshots = {region.name: region.units.shape[1] for region in subject.regions() if region.by == "row"}
    assert snapshots["snapshot_state"] == snapshots["snapshot_conv"] == 10
    assert subject.messages == ("the initial step count 1 was added to the candidates of batch size 4",)


def test_prompts_that_cannot_run_are_refused(checkpoint: Checkpoint) -> None:
    subject = engine(checkpoint)
    with pytest.raises(BadInput, match="token 64"):
        subject.admit("a", (3, 64))
    with pytest.raises(BadInput, match="no token"):
        subject.admit("a", ())
    assert subject.slots() == {}


@pytest.mark.parametrize(("event", "error"), [
    (e.Admit("e", (1,)), OutOfCapacity),
    (e.Forward((e.Row("a", "prefill", 65),)), OutOfCapacity),
    (e.Forward((e.Row("b", "prefill", 9), e.Row("a", "prefill", 20))), OutOfCapacity),
    (e.Draft(("c",), ((1, 2, 3),), ((0, 0, 1),)), Unsupported),
])  # fmt: skip
def test_a_refused_event_changes_nothing(checkpoint: Checkpoint, event: e.Event, error: type[InstepError]) -> None:
    subject = engine(checkpoint, room=replace(CAPACITY, pages=(1, 2, 3, 4)))
    begin(subject, (1, 2), name="d")
    subject.save("d", "kept")
    subject.preempt("d")
    for name, length in (("a", 100), ("b", 9), ("c", 1)):
        e.Admit(name, tuple(range(length % 64)) * 3).on(subject)
    e.Forward((e.Row("c", "prefill", 3),)).on(subject)
    before, slots, pages = snapshot(subject), subject.slots(), subject.pages()
    with pytest.raises(error), as_they_were(subject):
        event.on(subject)
    assert (subject.slots(), subject.pages()) == (slots, pages)
    assert untouched(subject, before, {}) > 0


def test_resume_without_room_changes_nothing_and_can_be_repeated(checkpoint: Checkpoint) -> None:
    subject = engine(checkpoint, room=replace(CAPACITY, slots=(3, 1), pages=(1, 2, 3)))
    begin(subject, tuple(range(9)))
    kept = subject.state("a")
    subject.preempt("a")
    begin(subject, (1, 2), name="b")
    with pytest.raises(OutOfCapacity, match="KV pages"), as_they_were(subject):  # a slot is free, pages are not
        subject.resume("a")
    assert (subject.slots(), list(subject.pages())) == ({"b": 3}, ["b"])
    subject.finish("b")
    for name in "cd":
        subject.admit(name, (1,))
    with pytest.raises(OutOfCapacity, match="no free slot"), as_they_were(subject):  # pages are free, a slot is not
        subject.resume("a")
    assert subject.pages() == {}
    subject.abort("c")
    subject.resume("a")
    again = subject.state("a")
    assert (again.length, again.root) == (9, kept.root)
    assert all(torch.equal(again.keys[layer], keys) for layer, keys in kept.keys.items())


def test_a_load_of_another_prompt_or_without_room_changes_nothing(checkpoint: Checkpoint) -> None:
    subject = engine(checkpoint, room=replace(CAPACITY, pages=(1, 2, 3)))
    e.Admit("a", tuple(range(9))).on(subject)
    e.Forward((e.Row("a", "prefill", 7),)).on(subject)
    subject.save("a", "kept")
    e.Admit("b", (1, 2)).on(subject)
    e.Admit("c", tuple(range(9))).on(subject)
    before, pages = snapshot(subject), subject.pages()
    with pytest.raises(BadInput, match="another prompt"), as_they_were(subject):
        subject.load("b", "kept")
    with pytest.raises(OutOfCapacity, match="KV pages"), as_they_were(subject):
        subject.load("c", "kept")
    assert subject.pages() == pages
    assert untouched(subject, before, {}) > 0
    assert subject.state("b").length == subject.state("c").length == 0


def test_a_path_that_is_no_chain_is_refused(checkpoint: Checkpoint) -> None:
    subject = engine(checkpoint)
    begin(subject, (1, 2))
    e.Draft(("a",)).on(subject)
    e.Forward((e.Row("a", "verify"),)).on(subject)
    before = snapshot(subject)
    with pytest.raises(BadInput, match="2 is no child of node 0"):
        e.Commit(("a",), (e.Path((2,), 5),)).on(subject)
    assert untouched(subject, before, {}) > 0
    assert e.Commit(("a",), (e.Path((1, 2), 5),)).on(subject).accept_index.tolist() == [[0, 1, 2, -1]]
    assert (subject.state("a").length, subject.state("a").root) == (5, 5)


def test_a_model_without_a_draft_head_must_be_given_its_drafts(tmp_path: Path) -> None:
    subject = engine(Checkpoint.open(write(tmp_path, "dense", **TWO_LAYERS, mtp_num_hidden_layers=0)))
    begin(subject, (1, 2))
    pages = subject.pages()
    with pytest.raises(Unsupported, match="no draft head is in use"):
        e.Draft(("a",)).on(subject)
    assert subject.pages() == pages
    assert e.Draft(("a",), ((4, 5, 6),)).on(subject).drafts.tolist() == [[4, 5, 6]]


def test_empty_events_change_nothing(checkpoint: Checkpoint) -> None:
    subject = engine(checkpoint)
    before = snapshot(subject)
    assert subject.forward(()).roots == {}
    assert subject.draft(()).drafts.shape == (0, 3)
    assert subject.commit(()).accept_index.shape == (0, 0)
    assert untouched(subject, before, {}) > 0


def test_watching_changes_no_byte(checkpoint: Checkpoint) -> None:
    def run(watched: bool) -> list[bytes]:
        subject = engine(checkpoint, poison=7.5)
        if watched:
            subject.watch(lambda place, tensor: tensor.clone())
        begin(subject, (1, 2, 3, 4))
        for _ in range(2):
            play(subject, None, None)
            subject.state("a")
        return [units.numpy().tobytes() for units, _ in snapshot(subject)]

    assert run(watched=True) == run(watched=False)


def test_outputs_do_not_depend_on_the_poison(checkpoint: Checkpoint) -> None:
    def run(poison: float | None) -> list[int]:
        subject = engine(checkpoint, poison=poison)
        begin(subject, (1, 2, 3, 4))
        drafts = e.Draft(("a",)).on(subject).drafts
        e.Forward((e.Row("a", "verify"),)).on(subject)
        return [*drafts[0].tolist(), int(e.Commit(("a",)).on(subject).bonus[0]), *subject.state("a").keys[1].tolist()]

    assert run(float("nan")) == run(7.5) == run(None)


def test_engine_implements_the_inspection_protocols(checkpoint: Checkpoint) -> None:
    assert isinstance(engine(checkpoint), e.Inspectable)
