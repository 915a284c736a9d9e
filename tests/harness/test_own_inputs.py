"""A piece run again reads what the subject had at every place: an error moves what it feeds, and nothing else.

Leaves out: what is judged with it.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from instep.oracle.oracle import Oracle
from instep.oracle.recomputation import Recomputation, rerun
from instep.oracle.states_with_folded_tokens import Run
from instep.watch.rows_subject_must_show import UPDATE
from instep_reference.contract.engine import Commit
from instep_reference.weights import Weights
from support.inputs import check_contexts as m

pytestmark = pytest.mark.slow  # whole runs, piece by piece

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
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Weights, list[tuple[Any, ...]]]:
    opened = m.checkpoint(tmp_path_factory.mktemp("own"))
    oracle = Oracle(opened, m.declared(torch.float32, torch.float32), torch.float32)
    contexts = m.run(opened, m.events_of(opened)[:10])  # two rounds: each test takes the first that fits
    pieces = [(x, [r for r in oracle.at(x) if isinstance(r, Recomputation)]) for x in contexts]
    return oracle.runner.truth, pieces


def moved(one: Run, other: Run) -> set[str]:
    return {place.component for place, x in one.places.items() if not torch.equal(x, other.places[place])}


@pytest.mark.parametrize("kind", READ_BY)
def test_op_rerun_uses_the_subjects_rows_and_changes_nothing_after(
    run: tuple[Weights, list[tuple[Any, ...]]], kind: str
) -> None:
    weights, contexts = run
    piece = next(p for _, found in contexts for p in found
                 if p.span.kind == "verify" and p.layer == weights.config.layer_kinds.index(kind))  # fmt: skip
    right = rerun(piece, weights)
    for component, readers in READ_BY[kind].items():
        changed = 1.25 * piece.own[piece.place(component)]
        assert moved(rerun(piece, weights, {component: changed}), right) == readers, component
        own = {**piece.own, piece.place(component): changed}  # the same by a subject whose rows these are
        assert moved(rerun(replace(piece, own=own), weights), right) == readers, component


def test_the_draft_head_joins_the_rows_of_the_subject(run: tuple[Weights, list[tuple[Any, ...]]]) -> None:
    weights, contexts = run
    piece = next(p for _, found in contexts for p in found if p.stage == "extend" and p.layer == -1)
    readers = {"embedding": {"normed"}, "normed": {"joined"}, "post_normed": {"joined"}, "joined": {"fused"}}
    for component, moves in readers.items():
        changed = {component: 1.25 * piece.own[piece.place(component)]}
        assert moved(rerun(piece, weights, changed), rerun(piece, weights)) == moves


def test_rows_that_are_not_shown_or_do_not_fit_are_the_references_own(
    run: tuple[Weights, list[tuple[Any, ...]]]
) -> None:
    weights, contexts = run
    piece = next(p for _, found in contexts for p in found if p.span.kind == "verify" and p.folding)
    bare = rerun(replace(piece, own={}), weights)
    assert not moved(bare, piece.truth) and not bare.onward
    cut = {place: rows[:1] for place, rows in piece.own.items()}
    assert not moved(rerun(replace(piece, own=cut), weights), piece.truth)


def test_rerun_accepts_another_position_configuration_or_memory(run: tuple[Weights, list[tuple[Any, ...]]]) -> None:
    weights, contexts = run
    kinds = weights.config.layer_kinds
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


def test_a_commit_folds_the_rows_that_the_subject_showed_at_the_verify(
    run: tuple[Weights, list[tuple[Any, ...]]]
) -> None:
    weights, contexts = run
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
