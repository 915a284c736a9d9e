"""The oracle restarts one piece on the subject's bits, with rows and counts from the trace, and names known mistakes.

Leaves out: what checks make of its answers (`test_checks.py`), and the bank of wrong states (`test_directed.py`).
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path as FilePath
from typing import Any

import pytest
import torch

from instep import tier_allowances
from instep.checks.error_measurement import granted_error
from instep.checks.known_wrong_states import Directed, look, scene_of
from instep.checks.recomputed_values import Derived
from instep.checks.wrong_state_bank import branches
from instep.checks.wrong_state_inputs import add, step
from instep.lru_cache import forget
from instep.oracle import chunked_yardstick
from instep.oracle.oracle import Oracle
from instep.oracle.recomputation import Recomputation, rerun
from instep.oracle.reordered_arithmetic import by_a_unit, up_or_down
from instep.oracle.states_with_folded_tokens import Run
from instep.watch.event_context import EventContext
from instep.watch.rows_by_request import UPDATE, due, paths, row_spans, rows
from instep_reference import trunk
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.engine import Admit, Commit, Draft, Forward, Path, Row
from instep_reference.contract.place_names import AFTER_LAYERS, STAGE_LEVEL, Place
from instep_reference.weights import Weights
from support.inputs import check_contexts as m

Ran = tuple[Checkpoint, list[EventContext]]
Pieces = list[tuple[EventContext, list[Recomputation]]]
Rerunnable = tuple[Weights, list[tuple[Any, ...]]]
pytestmark = pytest.mark.slow  # whole runs, computed again place by place


ROUNDS = 22  # events: chunks, plain steps, and rounds of every outcome


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    opened = m.checkpoint(tmp_path_factory.mktemp("oracle"), num_hidden_layers=3, layer_types=m.TWO_AND_ONE)
    return opened, m.run(opened, m.events_of(opened)[:ROUNDS])


@pytest.fixture(scope="module")
def pieces(run: Ran) -> Pieces:
    oracle = oracle_of(run[0])
    return [(context, [r for r in oracle.at(context) if isinstance(r, Recomputation)]) for context in run[1]]


def oracle_of(opened: Checkpoint) -> Oracle:
    return Oracle(opened, m.declared(torch.float32, torch.float32), torch.float32)


def test_every_place_of_the_subject_is_recomputed(pieces: Pieces) -> None:
    """All but the picks, which are choices, and judged as such."""
    for context, found in pieces:
        covered = {place for piece in found for place in piece.truth.places if due(context, place, piece.span)}
        assert covered == {place for place in context.subject.places if place.component != "pick"}


def test_recomputed_truth_is_fp64_and_equals_the_free_run(pieces: Pieces) -> None:
    for context, found in pieces:
        for piece in found:
            for place, tensor in piece.truth.places.items():
                assert tensor.dtype == torch.float64
                if due(context, place, piece.span):
                    right = rows(context.truth, place, piece.span)
                    torch.testing.assert_close(tensor, right, rtol=1e-3, atol=1e-4)


def test_states_are_restarted_except_for_a_verify(pieces: Pieces) -> None:
    written = {piece.span.kind for _, found in pieces for piece in found if piece.writes_state}
    assert written == {"prefill", "decode", "commit"}
    for context, found in pieces:
        for piece in found:
            if piece.writes_state:
                right = context.truth.after[piece.request].state[piece.layer]
                torch.testing.assert_close(piece.truth.state, right, rtol=1e-3, atol=1e-5)
                assert len(piece.yardsticks.state) >= 4


def test_prefill_has_a_chunked_and_recurrent_yardsticks(pieces: Pieces) -> None:
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
def test_wrong_chunked_form_does_not_widen_the_allowance(run: Ran, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    """A reference that is wrong in chunks would loosen T2 for every prompt: it is refused with a sentence."""
    (wrong, where), right = WRONG_FORMS[form], chunked_yardstick.recur_in_chunks
    monkeypatch.setattr(chunked_yardstick, "recur_in_chunks", lambda *given: wrong(right, *given))
    forget()
    oracle = oracle_of(run[0])
    with pytest.raises(chunked_yardstick.AnotherRule, match=rf"delta rule differ: in chunks of 16 .*({where})"):
        for context in run[1]:
            oracle.at(context)


def test_few_rows_are_drawn_more_often_than_many(pieces: Pieces) -> None:
    found = [piece for _, several in pieces for piece in several if piece.span.kind != "commit"]
    alone = [piece for piece in found if piece.span.count == 1]
    assert {len(next(iter(p.yardsticks.places.values()))) for p in alone} == {4}
    assert {len(next(iter(p.with_all_draws().yardsticks.places.values()))) for p in alone} == {16}
    assert all(not p.truth.places.keys() ^ p.yardsticks.places.keys() for p in found)


def test_an_error_is_called_wrong_only_by_all_draws(run: Ran, pieces: Pieces) -> None:
    """First draws without an error allow only the ulps. Then all are made, once for all checks, and may allow more."""
    context, some = next(pair for pair in pieces if isinstance(pair[0].event, Commit))
    piece = next(piece for piece in some if piece.writes_state and piece.drawn_further is not None)
    full, again, right = piece.with_all_draws(), piece.with_all_draws(), piece.truth.state
    assert torch.equal(full.yardsticks.state[:4], piece.yardsticks.state) and len(full.yardsticks.state) > 4
    assert again.yardsticks is full.yardsticks
    ulps = tier_allowances.ULPS * torch.finfo(torch.float32).eps
    most = float(granted_error(piece.place("state"), torch.float32, right, full.yardsticks.state).min())
    after = context.subject.after[piece.request]
    wrong = {**after.state, piece.layer: (right * (1 + (ulps + most) / 2)).float()}
    subject = replace(context.subject, after={**context.subject.after, piece.request: replace(after, state=wrong)})
    exact = replace(piece, yardsticks=Run({}, right[None].float()))
    for lacking, agrees in ((exact, True), (replace(exact, drawn_further=None), False)):
        (said,) = Derived(oracle_of(run[0]))._judged(replace(context, subject=subject), lacking)
        assert said.agrees is agrees


def test_earlier_error_is_not_reported_again(run: Ran) -> None:
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


def test_it_answers_twice_without_forgetting_the_window(run: Ran) -> None:
    opened, contexts = run
    oracle = oracle_of(opened)
    for context in contexts[:10]:  # two rounds
        assert oracle.at(context) is oracle.at(context)
    assert not oracle.flights


def test_every_state_is_computed_between_whole_events(run: Ran, pieces: Pieces) -> None:
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
def branched(run: Ran) -> tuple[list[EventContext], ...]:
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


def test_rows_are_shared_out_by_the_trace_alone(run: Ran) -> None:
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


# ---- a piece run again reads what the subject had at every place: an error moves what it feeds, and nothing else


# The places that a rerun changes if these rows of the subject change. (The read-out also computes updates.)
READ_BY = {
    "gdn": {
        "normed": {"qkv", "z", "b", "a"}, "qkv": {"mixed"}, "z": {"gated"}, "b": {"beta"}, "a": {"log_decay"},
        "mixed": {"q", "k", "v"}, "q": {"core"}, "k": {"core", UPDATE}, "v": {"core", UPDATE},
        "log_decay": {"core", UPDATE}, "beta": {"core", UPDATE}, "core": {"gated"}, "gated": {"mixer"},
        "mixer": {"residual"}, "residual": {"post_normed", "hidden"}, "post_normed": {"mlp"}, "mlp": {"hidden"},
    },
    "attention": {
        "normed": {"projected", "key_raw", "value"}, "projected": {"query", "opened"}, "key_raw": {"key"},
        "query": {"attended"}, "key": {"attended"}, "value": {"attended"}, "attended": {"opened"}, "opened": {"mixer"},
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def rerunnable(tmp_path_factory: pytest.TempPathFactory) -> Rerunnable:
    opened = m.checkpoint(tmp_path_factory.mktemp("own"))
    oracle = Oracle(opened, m.declared(torch.float32, torch.float32), torch.float32)
    contexts = m.run(opened, m.events_of(opened)[:10])  # two rounds: each test takes the first that fits
    pieces = [(x, [r for r in oracle.at(x) if isinstance(r, Recomputation)]) for x in contexts]
    return oracle.runner.truth, pieces


def moved(one: Run, other: Run) -> set[str]:
    return {place.component for place, x in one.places.items() if not torch.equal(x, other.places[place])}


@pytest.mark.parametrize("kind", READ_BY)
def test_op_rerun_uses_the_subjects_rows_and_changes_nothing_after(rerunnable: Rerunnable, kind: str) -> None:
    weights, contexts = rerunnable
    piece = next(p for _, found in contexts for p in found
                 if p.span.kind == "verify" and p.layer == weights.config.mixers.index(kind))  # fmt: skip
    right = rerun(piece, weights)
    for component, readers in READ_BY[kind].items():
        changed = 1.25 * piece.own[piece.place(component)]
        assert moved(rerun(piece, weights, {component: changed}), right) == readers, component
        own = {**piece.own, piece.place(component): changed}  # the same by a subject whose rows these are
        assert moved(rerun(replace(piece, own=own), weights), right) == readers, component


def test_the_draft_head_joins_the_rows_of_the_subject(rerunnable: Rerunnable) -> None:
    weights, contexts = rerunnable
    piece = next(p for _, found in contexts for p in found if p.stage == "extend" and p.layer == -1)
    readers = {"embedding": {"normed"}, "normed": {"joined"}, "post_normed": {"joined"}, "joined": {"fused"}}
    for component, moves in readers.items():
        changed = {component: 1.25 * piece.own[piece.place(component)]}
        assert moved(rerun(piece, weights, changed), rerun(piece, weights)) == moves


def test_rows_that_are_not_shown_or_do_not_fit_are_the_references_own(rerunnable: Rerunnable) -> None:
    weights, contexts = rerunnable
    piece = next(p for _, found in contexts for p in found if p.span.kind == "verify" and p.folding)
    bare = rerun(replace(piece, own={}), weights)
    assert not moved(bare, piece.truth) and not bare.onward
    cut = {place: rows[:1] for place, rows in piece.own.items()}
    assert not moved(rerun(replace(piece, own=cut), weights), piece.truth)


def test_rerun_accepts_another_position_configuration_or_memory(rerunnable: Rerunnable) -> None:
    weights, contexts = rerunnable
    kinds = weights.config.mixers
    attention, recurrent = (
        next(p for _, found in contexts for p in found
             if p.span.kind == "verify" and p.stage == "trunk" and p.layer == kinds.index(kind))
        for kind in ("attention", "gdn")
    )  # fmt: skip
    right = rerun(attention, weights)
    later = replace(attention, work=replace(attention.work, start=attention.work.start + 1))
    assert moved(rerun(later, weights), right) == {"query", "key"}
    other = replace(weights, config=replace(weights.config, eps=1e-2))
    assert moved(rerun(attention, other), right) == {"normed", "query", "key", "post_normed"}
    memory = replace(recurrent.work.memory, state=0 * recurrent.work.memory.state)
    forgot = replace(recurrent, work=replace(recurrent.work, memory=memory))
    assert moved(rerun(forgot, weights), rerun(recurrent, weights)) == {"core", UPDATE}


def test_a_commit_folds_the_rows_that_the_subject_showed_at_the_verify(rerunnable: Rerunnable) -> None:
    weights, contexts = rerunnable
    piece = next(p for x, found in contexts for p in found
                 if isinstance(x.event, Commit) and p.folding and len(p.span.nodes) > 1)  # fmt: skip
    torch.testing.assert_close(rerun(piece, weights).state, piece.truth.state, rtol=1e-3, atol=1e-5)
    rows = {name: piece.own[piece.place(name)].double() for name in ("k", "v", "log_decay", "beta", UPDATE)}
    without = replace(piece, own={place: x for place, x in piece.own.items() if place.component != UPDATE})
    for kept, change in ((piece, {UPDATE: torch.randn_like(rows["v"])}), (piece, {"k": rows["k"].roll(1, 0)}),
                         (without, {"beta": torch.ones_like(rows["beta"])})):  # fmt: skip
        given, state = {**rows, **change}, piece.folding.base
        for t in piece.span.nodes:
            k = given["k"][t].repeat_interleave(rows["v"].shape[1] // rows["k"].shape[1], 0)
            state = given["log_decay"][t].exp()[:, None, None] * state
            made = given["beta"][t, :, None] * (given["v"][t] - torch.einsum("hk,hkv->hv", k, state))
            state = state + torch.einsum("hk,hv->hkv", k, given[UPDATE][t] if kept is piece else made)
        torch.testing.assert_close(rerun(kept, weights, change).state, state, rtol=1e-12, atol=1e-13)


# ---- states that known mistakes leave: a miscounted previous step, a restart from zero, narrow storage


LAYER = 1


def states_at(oracle: Oracle, context: EventContext) -> dict[str, Recomputation]:
    return {
        piece.request: piece for piece in oracle.at(context)
        if isinstance(piece, Recomputation) and piece.layer == LAYER and piece.writes_state
    }


@pytest.fixture(scope="module")
def two_commits(run: Ran) -> tuple[Any, ...]:
    """A commit, a request, and its pieces in the commit before (of 3 tokens or more) and in this one."""
    opened, contexts = run
    oracle, last = oracle_of(opened), {}
    for context in contexts:
        for name, piece in states_at(oracle, context).items():
            earlier = last.get(name)
            both = earlier is not None and {piece.span.kind, earlier.span.kind} == {"commit"}
            if both and earlier.folding.count >= 3:
                return context.index, name, earlier, piece
            last[name] = piece
    raise AssertionError("the run has no such commits")


def folded(state: torch.Tensor, piece: Recomputation, count: int) -> torch.Tensor:
    """The first `count` accepted tokens of a piece, folded in one by one."""
    tokens = [piece.folding.tokens.of(name)[list(piece.span.nodes)] for name in ("k", "v", "log_decay", "beta")]
    tokens[0] = tokens[0].repeat_interleave(tokens[1].shape[1] // tokens[0].shape[1], dim=1)
    for t in range(count):
        state = step(state, *(token[t] for token in tokens))
    return state


def directed(run: Ran, at: int, name: str, state: torch.Tensor) -> str:
    opened, contexts = run
    check = Directed(oracle_of(opened))
    for before in contexts[:at]:
        check.oracle.at(before)  # fills the memory of windows and states; its result is not used here
    context = m.with_state(contexts[at], name, lambda s: replace(s, state={**s.state, LAYER: state.float()}))
    return next(said.diagnosis for said in check(context) if not said.agrees)


def test_the_step_before_counted_twice_is_named(run: Ran, two_commits: tuple[Any, ...]) -> None:
    at, name, earlier, piece = two_commits
    twice = folded(piece.folding.base, earlier, earlier.folding.count)
    state = folded(twice, piece, piece.folding.count)
    assert directed(run, at, name, state).startswith("counts the tokens of the previous step twice")


@pytest.mark.parametrize("some", [1, 2])
def test_lost_tokens_of_the_previous_step_are_named(run: Ran, two_commits: tuple[Any, ...], some: int) -> None:
    at, name, earlier, piece = two_commits
    state = folded(folded(earlier.folding.base, earlier, some), piece, piece.folding.count)
    tokens = "1 token" if some == 1 else f"{some} tokens"
    assert directed(run, at, name, state).startswith(
        f"was continued from the state after {tokens} of the previous step; "
        f"{earlier.folding.count} tokens were accepted")


def run_again(piece: Recomputation, updates: torch.Tensor) -> torch.Tensor:
    """The accepted tokens of a piece run again on the state before them, with these updates."""
    nodes, tokens = list(piece.span.nodes), piece.folding.tokens
    k = tokens.of("k")[nodes].repeat_interleave(updates.shape[1] // tokens.of("k").shape[1], dim=1)
    state = piece.folding.base
    for token in zip(k, tokens.of("log_decay")[nodes], updates, strict=True):
        state = add(state, *token)
    return state


def test_the_updates_of_the_step_before_in_the_ring_are_named(run: Ran, two_commits: tuple[Any, ...]) -> None:
    at, name, earlier, piece = two_commits
    updates = piece.folding.tokens.of("update")[list(piece.span.nodes)].clone()
    older = earlier.folding.tokens.of("update")[list(earlier.span.nodes)]
    many = min(len(updates), len(older))
    updates[:many] = older[:many]
    assert directed(run, at, name, run_again(piece, updates)).startswith("adds the updates of the previous step")


def test_the_updates_of_another_request_in_the_ring_are_named(run: Ran) -> None:
    """As a ring that is addressed by batch row and not by slot would hold them."""
    opened, contexts = run
    oracle = oracle_of(opened)
    for context in contexts:
        pieces = states_at(oracle, context)
        if isinstance(context.event, Commit) and len(pieces) > 1:
            break
    else:
        raise AssertionError("the run has no commit of two")
    (name, piece), (other, theirs) = list(pieces.items())[:2]
    updates = piece.folding.tokens.of("update")[list(piece.span.nodes)].clone()
    many = min(len(updates), len(theirs.folding.tokens.of("update")))
    updates[:many] = theirs.folding.tokens.of("update")[:many]
    said = directed(run, context.index, name, run_again(piece, updates))
    assert said.startswith(f'adds the updates of request "{other}"')


def test_layer_restarted_from_zero_is_named_in_its_places(run: Ran) -> None:
    """Conv and state of a second chunk at zero: q, k and v are wrong, too, so no wrong state has these tokens."""
    opened, contexts = run
    oracle = oracle_of(opened)
    for context in contexts:
        pieces = [p for p in oracle.at(context) if isinstance(p, Recomputation)]
        pieces = [p for p in pieces if p.span.kind == "prefill" and p.wrongs]
        piece = next((p for p in pieces if (p.stage, p.layer) == ("trunk", LAYER)), None)
        if isinstance(context.event, Forward) and piece is not None:
            break
    else:
        raise AssertionError("the run has no second chunk")
    span, shown = piece.span, {}
    hidden = rows(context.subject, Place("trunk", LAYER - 1, "hidden"), span).double()
    empty = trunk.empty_memory(opened.config, "gdn", torch.float64, torch.device("cpu"))
    positions = span.start + torch.arange(span.count)
    weights = Weights.of(opened, torch.float64)
    trunk.layer(opened.config, weights.layers[LAYER], LAYER, "trunk", hidden, empty, positions,
                lambda place, tensor: shown.setdefault(place, tensor))  # fmt: skip
    wrong = context
    for component in ("mixed", "core"):
        place = Place("trunk", LAYER, component)

        def put(tensor: torch.Tensor, place: Place = place) -> torch.Tensor:
            tensor[span.begin : span.begin + span.count] = shown[place].to(tensor)
            return tensor

        wrong = m.with_rows(wrong, place, put)
    verdict = m.judge([*contexts[: context.index], wrong], [Derived(oracle_of(opened))])
    said = {found.place.component: found.diagnosis for found in verdict.findings}
    for component in ("mixed", "core"):
        assert said[component].startswith("was started from zero: everything before these tokens is lost; relative ")


def judged(run: Ran, change: Callable[..., Any]) -> str:
    """The findings of T2 for one commit in which a state was changed."""
    opened, contexts = run
    at = next(context.index for context in contexts if isinstance(context.event, Commit))
    name = contexts[at].event.requests[0]
    context = m.with_state(contexts[at], name, lambda s: replace(s, state={**s.state, LAYER: change(s.state[LAYER])}))
    (found,) = m.judge([*contexts[:at], context], [Derived(oracle_of(opened))]).findings
    assert found.place == Place("trunk", LAYER, "state")
    return found.diagnosis


def test_a_state_that_went_through_16_bits_is_named(run: Ran) -> None:
    assert judged(run, lambda state: state.bfloat16().float()).startswith(
        "the state is rounded to bfloat16 when it is stored; relative error")


def zero(state: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(state)


def half_and_narrow(state: torch.Tensor) -> torch.Tensor:
    return (state / 2).bfloat16().float()


def one_column_zero_and_narrow(state: torch.Tensor) -> torch.Tensor:
    return state.bfloat16().float() * (torch.arange(state.shape[2]) > 0)


@pytest.mark.parametrize("change", [zero, half_and_narrow, one_column_zero_and_narrow])
def test_wrong_16_bit_numbers_are_not_called_rounded(run: Ran, change: Callable[..., Any]) -> None:
    assert "as if stored" not in judged(run, change)


def test_rows_of_16_bits_by_construction_are_not_called_stored(tmp_path: FilePath) -> None:
    """v is a part of the conv output, which bf16 activations store in 16 bits: another row of it is no rounding."""
    opened = m.checkpoint(tmp_path, dtype=torch.bfloat16, num_hidden_layers=3, layer_types=m.TWO_AND_ONE)
    contexts = m.run(opened, m.events_of(opened)[:4], torch.bfloat16)
    at = next(context.index for context in contexts if isinstance(context.event, Forward))
    for component in ("v", "mixed", "embedding"):
        layer = STAGE_LEVEL if component == "embedding" else LAYER
        wrong = m.with_rows(contexts[at], Place("trunk", layer, component), lambda x: (1.0625 * x).bfloat16().to(x))
        check = Derived(Oracle(opened, m.declared(torch.bfloat16, torch.float32), torch.float32))
        findings = m.judge([*contexts[:at], wrong], [check]).findings
        said = [found.diagnosis for found in findings if found.place.component == component]
        assert said and not any("as if stored" in one for one in said), component


def test_a_state_of_another_dtype_than_declared_is_named_and_granted_nothing(run: Ran) -> None:
    said = judged(run, lambda state: state.bfloat16())
    assert "is torch.bfloat16, torch.float32 is declared; relative error" in said
    assert judged(run, lambda state: state.double()) == "is torch.float64, torch.float32 is declared"

