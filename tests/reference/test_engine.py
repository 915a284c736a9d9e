"""The engine event by event: answers, forced choices, watched places, and the controller.

Leaves out: the meaning of a round (`test_properties.py`).
"""

import pytest
import torch

from instep_reference.contract.adaptive_controller_file import AdaptiveFile
from instep_reference.contract.engine import Admit, AnyEvent, Commit, Draft, Forward, Path, Row, SetNumSteps
from instep_reference.contract.errors import Unsupported
from instep_reference.contract.place_names import AFTER_LAYERS, STAGE_LEVEL, Place
from instep_reference.engine import ReferenceEngine
from instep_reference.label_ledger import LedgerEngine
from instep_reference.weights import Weights
from support.inputs.rounds import begin, config, decode, disagreement, play, weights

PROMPT = (5, 9, 33, 2, 40)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    return weights(tmp_path_factory.mktemp("dense") / "model")


class Tape:
    """Joins the tensors of each place, as the harness does; can replace the tensor of one place."""

    def __init__(self, graft: Place | None = None) -> None:
        self.seen: dict[Place, torch.Tensor] = {}
        self.graft = graft

    def __call__(self, place: Place, tensor: torch.Tensor) -> torch.Tensor:
        self.seen[place] = torch.cat([self.seen[place], tensor]) if place in self.seen else tensor
        return torch.zeros_like(tensor) if place == self.graft else tensor


# One round over two requests, one of them still in its prompt.
EVENTS: tuple[AnyEvent, ...] = (
    Admit("a", PROMPT),
    Admit("b", PROMPT),
    Forward((Row("a", "prefill", 5), Row("b", "prefill", 3))),
    Draft(("a",)),
    Forward((Row("b", "prefill", 1), Row("a", "verify"))),
    Commit(("a",), (Path((1, 2), 7),)),
    Forward((Row("b", "prefill", 1), Row("a", "decode"))),
)
ROWS = (None, None, (8, 8, 1), (0, 0, 0), (5, 1, 0), (0, 3, 1), (2, 2, 2))  # trunk, extend, extend's logits


def test_both_engines_name_the_same_places_with_the_same_rows(dense: Weights) -> None:
    engines = ReferenceEngine(dense, num_steps=3), LedgerEngine(config(), num_steps=3)
    for event, rows in zip(EVENTS, ROWS, strict=True):
        tapes = Tape(), Tape()
        for engine, tape in zip(engines, tapes, strict=True):
            engine.watch(tape)
            event.on(engine)
        tensors, labels = (tape.seen for tape in tapes)
        assert tensors.keys() == labels.keys()
        for place, tensor in tensors.items():
            assert tensor.shape == labels[place].shape, place
            if place.component not in ("logits", "pick"):
                assert (tensor.dtype, labels[place].dtype) == (torch.float64, torch.int64), place
        if rows is not None:
            assert _rows(labels, Place("trunk", STAGE_LEVEL, "embedding")) == rows[0]
            assert _rows(labels, Place("extend", STAGE_LEVEL, "fused")) == rows[1]
            assert _rows(labels, Place("extend", AFTER_LAYERS, "pick")) == rows[2]


def _rows(seen: dict[Place, torch.Tensor], place: Place) -> int:
    return len(seen[place]) if place in seen else 0


def test_a_chain_of_n_drafts_runs_n_minus_one_heads(dense: Weights) -> None:
    engine, tape = ReferenceEngine(dense, num_steps=4), Tape()
    begin(engine, PROMPT)
    engine.watch(tape)
    engine.draft(("a",))
    assert {place.stage for place in tape.seen} == {"chain.1", "chain.2", "chain.3"}


def test_grafted_tensor_replaces_the_original(dense: Weights) -> None:
    engine, tape = ReferenceEngine(dense, num_steps=1), Tape(Place("trunk", 1, "hidden"))
    engine.watch(tape)
    begin(engine, PROMPT)
    assert not tape.seen[Place("trunk", 2, "normed")].any()
    assert tape.seen[Place("trunk", 1, "normed")].any()


def test_unfinished_prompt_has_no_root_and_no_own_choice(dense: Weights) -> None:
    engine = ReferenceEngine(dense, num_steps=1)
    engine.admit("a", PROMPT)
    said = engine.forward((Row("a", "prefill", 4),))
    assert (said.roots, said.own) == ({}, {})
    state = engine.state("a")
    assert (state.length, state.root, state.proposal) == (4, None, None)
    assert state.draft_keys[0].shape[0] == 4, "the next prompt token is known, so the draft side keeps up"


def test_forced_root_is_in_force_and_the_own_one_is_reported(dense: Weights) -> None:
    free, forced = ReferenceEngine(dense, num_steps=1), ReferenceEngine(dense, num_steps=1)
    begin(free, PROMPT)
    own = free.state("a").root
    other = (own + 1) % dense.config.vocab
    forced.admit("a", PROMPT)
    said = forced.forward((Row("a", "prefill", 5, other),))
    assert (said.roots["a"], said.own["a"].tolist()) == (other, [own])
    said = forced.forward((Row("a", "decode", 1, 3),))
    assert said.roots == {"a": 3} and said.own["a"].shape == (1,)


def test_own_answers_do_not_depend_on_later_forced_drafts(dense: Weights) -> None:
    """The head's own choice at place i follows the forced drafts before i, and nothing after."""
    engine = ReferenceEngine(dense, num_steps=3)
    begin(engine, PROMPT)
    free = engine.draft(("a",))
    assert torch.equal(free.drafts, free.own)
    first, second, third = free.own[0].tolist()
    forced = engine.draft(("a",), ((first, second, (third + 1) % 64),))
    assert forced.own[0].tolist() == [first, second, third]
    forced = engine.draft(("a",), (((first + 1) % 64, second, third),))
    assert forced.own[0, 0] == first
    assert forced.drafts[0].tolist() == [(first + 1) % 64, second, third]


def test_own_acceptance_is_reported_when_another_is_forced(dense: Weights) -> None:
    engine = ReferenceEngine(dense, num_steps=2)
    begin(engine, PROMPT)
    said = engine.forward((Row("a", "decode"),))
    engine.abort("a")
    begin(engine, PROMPT)
    right = said.roots["a"]
    engine.draft(("a",), ((right, 1),))
    picks = engine.forward((Row("a", "verify"),)).own["a"].tolist()
    assert picks[0] == right
    answer = engine.commit(("a",), (Path((), 9),))
    own = 2 if picks[1] == 1 else 1
    assert (answer.own_num_correct_drafts.tolist(), answer.own_bonus.tolist()) == ([own], [picks[own]])
    assert (answer.num_correct_drafts.tolist(), answer.bonus.tolist()) == ([0], [9])
    assert (engine.state("a").length, engine.state("a").root) == (6, 9)


def test_draft_rows_follow_committed_tokens_at_any_step_count(dense: Weights) -> None:
    """Decoding at 0 steps keeps the draft side up to date: the next proposal is that of a speculating run."""
    speculating, plain = ReferenceEngine(dense, num_steps=2), ReferenceEngine(dense, num_steps=0)
    begin(speculating, PROMPT, root=1)
    begin(plain, PROMPT, root=1)
    play(speculating, (2, 3), Path((1, 2), 4))
    decode(plain, (2, 3, 4))
    plain.set_num_steps(2)
    assert plain.state("a").draft_keys[0].shape[0] == plain.state("a").length == 8
    assert torch.equal(plain.draft(("a",)).drafts, speculating.draft(("a",)).drafts)


def test_controller_counts_commits_and_plain_decoding() -> None:
    file = AdaptiveFile.read('{"candidate_steps": [0, 1, 3], "warmup_batches": 0, "update_interval": 1}')
    engine = LedgerEngine(config(), num_steps=1, adaptive=file)
    begin(engine, PROMPT)
    assert engine.next_num_steps(1, 1) == 1
    play(engine, (1,), Path((), 2))
    assert engine.next_num_steps(1, 1) == 0
    SetNumSteps(0).on(engine)
    decode(engine, (3,))
    assert engine.next_num_steps(1, 1) == 1, "a decode step at 0 counts, and a probe is due"
    counted = engine.controller.opinions[1].batches
    begin(engine, PROMPT, name="b")
    assert engine.controller.opinions[1].batches == counted, "a prefill does not count"
    engine.admit("c", PROMPT)
    engine.forward((Row("a", "decode"), Row("c", "prefill", 2), Row("b", "decode")))
    assert (engine.controller.opinions[1].batches, engine.controller.batch) == (counted + 1, 2), "decode rows alone"
    SetNumSteps(1).on(engine)
    decode(engine, (3,))
    assert engine.next_num_steps(1, 1) == 1, "a decode step with drafts in force does not count"
    assert engine.controller.opinions[1].batches == counted + 1


def test_controller_counts_committed_drafts_not_its_own() -> None:
    engine = LedgerEngine(config(), num_steps=3, adaptive=AdaptiveFile.read('{"ema_alpha": 0.5}'))
    begin(engine, PROMPT)
    for count, ema in ((3, 2.5), (1, 1.75)):
        wrong = (engine.forward((Row("a", "decode"),)).roots["a"] + 1) % 64
        engine.draft(("a",), ((wrong, wrong, wrong),))
        engine.forward((Row("a", "verify"),))
        said = engine.commit(("a",), (Path(tuple(range(1, count + 1)), 5),))
        assert said.own_num_correct_drafts.tolist() != said.num_correct_drafts.tolist() == [count]
        assert engine.controller.opinions[1].ema == ema


def test_abort_ends_a_request_in_any_phase() -> None:
    engine = LedgerEngine(config(), num_steps=2)
    for name in ("in its prompt", "drafted", "verified", "preempted"):
        engine.admit(name, PROMPT)
        engine.forward((Row(name, "prefill", 2),))
        if name != "in its prompt":
            engine.forward((Row(name, "prefill", 3),))
        if name in ("drafted", "verified"):
            engine.draft((name,), ((1, 2),))
        if name == "verified":
            engine.forward((Row(name, "verify"),))
        if name == "preempted":
            engine.preempt(name)
        engine.abort(name)
        assert (engine.requests, engine.preempted) == ({}, {})


def test_a_tree_with_adaptive_steps_is_refused() -> None:
    engine = LedgerEngine(config(), num_steps=3, adaptive=AdaptiveFile.read("{}"))
    begin(engine, PROMPT)
    with pytest.raises(Unsupported, match="tree"):
        engine.draft(("a",), ((1, 2, 3),), ((0, 0, 1),))
    engine.draft(("a",), ((1, 2, 3),), ((0, 1, 2),))


def test_empty_events_have_empty_answers(dense: Weights) -> None:
    engine = ReferenceEngine(dense, num_steps=2)
    assert engine.draft(()).drafts.shape == (0, 2)
    assert engine.forward(()).own == {}
    assert engine.commit(()).bonus.shape == (0,)


def test_saved_state_does_not_change_while_its_request_continues(dense: Weights) -> None:
    engine = ReferenceEngine(dense, num_steps=2)
    begin(engine, PROMPT)
    before = engine.state("a")
    engine.save("a", "kept")
    play(engine, (1, 2), Path((1,), 3))
    engine.finish("a")
    engine.admit("a", PROMPT)
    engine.load("a", "kept")
    assert disagreement(engine.state("a"), before) == 0
