"""The oracle restarts one piece on the subject's bits, with rows and counts from the trace, and keeps itself correct.

Leaves out: what is made of its answers (`test_checks.py`, `test_directed.py`).
"""

from dataclasses import replace

import pytest
import torch

from instep.checks.known_wrong_states import look, scene_of
from instep.checks.wrong_tree_states import branches
from instep.lru_cache import forget
from instep.oracle import chunked_yardstick
from instep.oracle.oracle import Oracle
from instep.oracle.recomputation import Recomputation
from instep.oracle.reordered_arithmetic import by_a_unit, up_or_down
from instep.watch.event_context import EventContext
from instep.watch.rows_by_request import paths, row_spans, rows
from instep.watch.rows_subject_must_show import due
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.engine import Admit, Commit, Draft, Forward, Path, Row
from instep_reference.contract.place_names import AFTER_LAYERS, STAGE_LEVEL, Place
from support.inputs import check_contexts as m

pytestmark = pytest.mark.slow  # whole runs, computed again place by place
ROUNDS = 22  # events: chunks, plain steps, and rounds of every outcome


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Checkpoint, list[EventContext]]:
    opened = m.checkpoint(tmp_path_factory.mktemp("oracle"), num_hidden_layers=3, layer_types=m.TWO_AND_ONE)
    return opened, m.run(opened, m.events_of(opened)[:ROUNDS])


@pytest.fixture(scope="module")
def pieces(run: tuple[Checkpoint, list[EventContext]]) -> list[tuple[EventContext, list[Recomputation]]]:
    oracle = oracle_of(run[0])
    return [(context, [r for r in oracle.at(context) if isinstance(r, Recomputation)]) for context in run[1]]


def oracle_of(opened: Checkpoint) -> Oracle:
    return Oracle(opened, m.declared(torch.float32, torch.float32), torch.float32)


def test_every_place_of_the_subject_is_recomputed(pieces: list[tuple[EventContext, list[Recomputation]]]) -> None:
    """All but the picks, which are choices, and judged as such."""
    for context, found in pieces:
        covered = {place for piece in found for place in piece.truth.places if due(context, place, piece.span)}
        assert covered == {place for place in context.subject.places if place.component != "pick"}


def test_recomputed_truth_is_fp64_and_equals_the_free_run(
    pieces: list[tuple[EventContext, list[Recomputation]]]
) -> None:
    for context, found in pieces:
        for piece in found:
            for place, tensor in piece.truth.places.items():
                assert tensor.dtype == torch.float64
                if due(context, place, piece.span):
                    right = rows(context.truth, place, piece.span)
                    torch.testing.assert_close(tensor, right, rtol=1e-3, atol=1e-4)


def test_states_are_restarted_except_for_a_verify(pieces: list[tuple[EventContext, list[Recomputation]]]) -> None:
    written = {piece.span.kind for _, found in pieces for piece in found if piece.writes_state}
    assert written == {"prefill", "decode", "commit"}
    for context, found in pieces:
        for piece in found:
            if piece.writes_state:
                right = context.truth.after[piece.request].state[piece.layer]
                torch.testing.assert_close(piece.truth.state, right, rtol=1e-3, atol=1e-5)
                assert len(piece.yardsticks.state) >= 4


def test_prefill_has_a_chunked_and_recurrent_yardsticks(pieces: list[tuple[EventContext, list[Recomputation]]]) -> None:
    chunk = next(piece for _, found in pieces for piece in found if piece.span.kind == "prefill" and piece.folding)
    drawn = {place.component: len(tensor) for place, tensor in chunk.yardsticks.places.items()}
    assert drawn.pop("core") == len(chunk.yardsticks.state) == drawn["gated"] + 2
    assert len(set(drawn.values())) == 1
    right = chunk.truth.state
    for state in chunk.yardsticks.state:
        error = (state - right).norm() / right.norm()
        assert 0 < error < 1e-5


WRONG_FORMS = {
    "no decay inside": (lambda f, *given: f(*given[:3], 0 * given[3], *given[4:]), "core"),
    "a gate of 1.00001": (lambda f, *given: f(*given[:4], 1.00001 * given[4], *given[5:]), "state|core"),
    "state before it": (lambda f, *given: (f(*given)[0], given[6]), "state"),
    "operands of 16 bits": (lambda f, *given: f(*(x.bfloat16().to(x) for x in given[:6]), *given[6:]), "core"),
    "overflows in fp32 alone": (lambda f, *given: tuple(x.clamp(max=torch.finfo(x.dtype).max / 1e30) * torch.inf
                                if x.dtype == torch.float32 else x for x in f(*given)), "float32"),
}  # fmt: skip


@pytest.mark.parametrize("form", WRONG_FORMS)
def test_wrong_chunked_form_does_not_widen_the_allowance(
    run: tuple[Checkpoint, list[EventContext]], monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """A reference that is wrong in chunks would loosen T2 for every prompt: it is refused with a sentence."""
    (wrong, where), right = WRONG_FORMS[form], chunked_yardstick.recur_in_chunks
    monkeypatch.setattr(chunked_yardstick, "recur_in_chunks", lambda *given: wrong(right, *given))
    forget()
    oracle = oracle_of(run[0])
    with pytest.raises(chunked_yardstick.AnotherRule, match=rf"delta rule differ: in chunks of 16 .*({where})"):
        for context in run[1]:
            oracle.at(context)


def test_few_rows_are_drawn_more_often_than_many(pieces: list[tuple[EventContext, list[Recomputation]]]) -> None:
    found = [piece for _, several in pieces for piece in several if piece.span.kind != "commit"]
    assert {len(next(iter(p.yardsticks.places.values()))) for p in found if p.span.count == 1} == {16}
    assert all(not p.truth.places.keys() ^ p.yardsticks.places.keys() for p in found)


def test_earlier_error_is_not_reported_again(run: tuple[Checkpoint, list[EventContext]]) -> None:
    """The restart continues from the subject's own wrong bits, so later events are judged separately."""
    opened, contexts = run
    at = next(x.index for x in contexts if isinstance(x.event, Commit)) - 1
    name = contexts[at].event.rows[0].request
    context = contexts[at]
    before = dict(context.subject.before)
    before[name] = replace(before[name], state={**before[name].state, 0: before[name].state[0] + 1})
    wrong = replace(context, subject=replace(context.subject, before=before))
    oracle, other = oracle_of(opened), oracle_of(opened)
    for admitted in contexts[:at]:
        if isinstance(admitted.event, Admit):
            oracle.at(admitted), other.at(admitted)
    place = Place("trunk", 0, "core")
    said = [next(r for r in o.at(x) if isinstance(r, Recomputation) and place in r.truth.places).truth.places[place]
            for o, x in ((oracle, context), (other, wrong))]  # fmt: skip
    assert not torch.allclose(*said, rtol=0.1)


def test_it_answers_twice_without_forgetting_the_window(run: tuple[Checkpoint, list[EventContext]]) -> None:
    opened, contexts = run
    oracle = oracle_of(opened)
    for context in contexts[:10]:  # two rounds
        assert oracle.at(context) is oracle.at(context)
    assert not oracle.flights


def test_every_state_is_computed_between_whole_events(
    run: tuple[Checkpoint, list[EventContext]], pieces: list[tuple[EventContext, list[Recomputation]]]
) -> None:
    """A commit that is judged whole has every op of its window, whichever were judged at its verify."""
    oracle, opened = oracle_of(run[0]), 0
    oracle.every = next(n for n, (context, _) in enumerate(pieces) if context.kind == "commit")
    for context, all_of_them in pieces:
        found = [piece for piece in oracle.at(context) if isinstance(piece, Recomputation)]
        states, right = ([p for p in some if p.writes_state] for some in (found, all_of_them))
        assert [(p.request, p.layer, p.span) for p in states] == [(p.request, p.layer, p.span) for p in right]
        for mine, due_ in zip(states, right, strict=True):
            assert torch.equal(mine.truth.state, due_.truth.state), (context.index, mine.request)
            assert mine.yardsticks.state.shape == due_.yardsticks.state.shape
        if context.index % oracle.every == 0:
            assert len(found) == len(all_of_them) and not any(p.all_ops for p in found)
            assert [p.near is None for p in found] == [p.near is None for p in all_of_them]
            opened += context.kind == "commit"
        else:
            assert all(p.folding is not None for p in found)
    assert opened


@pytest.fixture(scope="module")
def branched(run: tuple[Checkpoint, list[EventContext]]) -> tuple[list[EventContext], ...]:
    """A tree and a chain in one batch: of the tree nodes 0, 2, 4 are accepted."""
    opened, _ = run
    drafts = Draft(("a", "b"), ((3, 4, 5, 7), (6, 7, 8)), ((0, 0, 1, 2), (0, 1, 2)))
    prompts = {"a": m.PROMPTS["one"], "b": m.PROMPTS["short"]}
    admitted = [Admit(name, prompt) for name, prompt in prompts.items()]
    begun = [Forward((Row(name, "prefill", len(prompt), 9),)) for name, prompt in prompts.items()]
    verified = Forward((Row("a", "verify"), Row("b", "verify")))
    committed = Commit(("a", "b"), (Path((2, 4), 11), Path((1,), 12)))
    contexts = m.run(opened, [*admitted, *begun, drafts, verified, committed])
    oracle = oracle_of(opened)
    return contexts, [oracle.at(context) for context in contexts]


def test_a_tree_is_computed_again_as_a_chain_is(branched: tuple[list[EventContext], ...]) -> None:
    contexts, answers = branched
    for context, found in zip(contexts[-3:], answers[-3:], strict=True):
        assert all(isinstance(one, Recomputation) for one in found) and {one.request for one in found} == {"a", "b"}
        covered = {place for piece in found for place in piece.truth.places if due(context, place, piece.span)}
        assert covered == {place for place in context.subject.places if place.component != "pick"}
        for piece in found:
            for place, tensor in piece.truth.places.items():
                right = rows(context.truth, place, piece.span)
                assert right is not None and len(right) == len(tensor)
                torch.testing.assert_close(tensor, right, rtol=1e-3, atol=1e-4)


def test_state_of_another_tree_node_is_named(branched: tuple[list[EventContext], ...]) -> None:
    (*_, committed), (*_, found) = branched
    states = [piece for piece in found if piece.writes_state and piece.request == "a"]
    assert states
    for piece in states:
        right, spread = piece.truth.state, piece.yardsticks.state
        torch.testing.assert_close(right, committed.truth.after["a"].state[piece.layer], rtol=1e-4, atol=1e-5)
        scene = scene_of(piece, states)
        assert look(right.float(), scene, spread).diagnosis == ""
        for wrong in branches(piece.folding, piece.span.nodes):
            said = look(wrong.state.float(), scene, spread).diagnosis
            assert wrong.sentence in said, (wrong.sentence, said)
    # Rows in order are listed twice: folded in, and rerun with the updates that they made.
    assert list(dict.fromkeys(wrong.sentence for wrong in branches(states[0].folding, (0, 2, 4)))) == [
        "holds the state after node 1, a node off the path; node 4 is the last accepted one",
        "holds the state after node 3, a node off the path; node 4 is the last accepted one",
        "takes the tree for a chain: holds rows 0 to 4 in their order, up to the last accepted node",
        "takes the tree for a chain: holds rows 0 to 2 in their order, as many as are accepted",
    ]


def test_rows_are_shared_out_by_the_trace_alone(run: tuple[Checkpoint, list[EventContext]]) -> None:
    _, contexts = run
    for context in contexts:
        stages = {place.stage for place in context.truth.places}
        for stage in stages:
            packed = row_spans(context, stage)
            assert sum(s.count for s in packed) == len(context.truth.places[Place(stage, STAGE_LEVEL, "embedding")])
            assert sum(s.logit_rows for s in packed) == len(context.truth.places.get(
                Place(stage, AFTER_LAYERS, "logits"), torch.zeros(0)))
        if isinstance(context.event, Forward):
            assert [s.request for s in row_spans(context, "trunk")] == [row.request for row in context.event.rows]
        if isinstance(context.event, Commit):
            free = replace(context, event=Commit(context.event.requests))
            assert paths(free, free.event) == list(context.event.accepted)


def test_stochastic_rounding_is_unbiased() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.cat((torch.randn(200, generator=generator), torch.tensor([0.0, 1.0, -1.0, 0.5, 1 + 2**-9, 1 - 2**-10])))
    drawn = torch.stack([up_or_down(x, torch.bfloat16, generator) for _ in range(4000)])
    stored = x.to(torch.bfloat16)
    unit = torch.finfo(torch.bfloat16).eps * 2.0 ** x.abs().clamp_min(1e-30).log2().floor()
    assert torch.equal(drawn, drawn.to(torch.bfloat16).to(drawn.dtype))
    assert ((drawn - x).abs() < unit).all() and (drawn == stored).any(0).all()
    assert torch.equal(drawn[:, 200:204], x[200:204].expand(4000, 4)), "what bf16 has stays"
    assert ((drawn.mean(0) - x).abs() < 5 * 0.5 * unit / 4000**0.5 + 1e-12).all()
    spread = (drawn - x).square().mean(0).sqrt()
    assert (spread >= 0.9 * (stored.float() - x).abs()).all(), "never less than rounding to nearest"
    wide = up_or_down(x, torch.float16, generator)
    assert (wide - x).abs().max() < 2**-10 * 4 and wide.to(torch.float16).to(x.dtype).equal(wide)


def test_draws_move_wide_storage_within_one_ulp() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.cat((torch.randn(500, generator=generator), torch.zeros(1)))
    moved = by_a_unit(x, generator)
    unit = torch.finfo(torch.float32).eps * x.abs()
    assert ((moved - x).abs() <= 2 * unit).all() and (moved != x).sum() > 200, "and once more to store it"
    assert moved[-1] == 0
