"""Explanations of memory: bits that were moved wrongly, and states that were made of something else.

Leaves out: places that were computed wrongly (`test_diagnose.py`), and wrong states that T2d names
(`test_directed.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from instep.checks.known_wrong_states import scene_of
from instep.checks.wrong_state_inputs import Scene, add
from instep.diagnose import RunHistory, explained
from instep.finding_problem import UNEXPLAINED, Explained, Problem
from instep.oracle.recomputation import Recomputation
from instep.verdict import Tier
from instep.watch.event_context import EventContext
from instep_reference.contract.engine import Commit
from support.inputs import check_contexts as m
from support.inputs.spoiled_runs import Scenario, with_row

pytestmark = pytest.mark.slow  # every commit of a run computed again

GDN, ATTENTION = 0, 3


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scenario:
    return Scenario(tmp_path_factory.mktemp("explain"))


def of_memory(scene: Scenario, field: str, layer: int, change: Callable[[EventContext, str, Any], torch.Tensor]) -> str:
    """T1's findings for the first request of a late commit of several requests."""
    context = [each for each in scene.contexts if isinstance(each.event, Commit) and len(each.event.requests) > 1][-1]
    name = context.event.requests[0]
    wrong = m.with_state(context, name, lambda state: replace(state, **{
        field: {**getattr(state, field), layer: change(context, name, getattr(state, field)[layer])}
    }))
    return scene.said(wrong, bits=True)[0].diagnosis


def commit_before(scene: Scenario, context: EventContext, name: str) -> EventContext:
    return [each for each in scene.contexts[: context.index] if isinstance(each.event, Commit)
            and name in each.event.requests][-2]  # fmt: skip


MEMORY: list[tuple[str, int, Callable[[Scenario, EventContext, str, Any], torch.Tensor], str]] = [
    ("conv", GDN, lambda s, c, name, x: c.subject.before[name].conv[GDN], "holds the window from before the step;"),
    ("conv", GDN, lambda s, c, name, x: torch.zeros_like(x), "is all zero"),
    ("conv", GDN, lambda s, c, name, x: x.flip(1), "has the newest input first"),
    ("conv", GDN, lambda s, c, name, x: x.roll(1, 0), "each channel is that of the channel before it"),
    ("conv", GDN, lambda s, c, name, x: commit_before(s, c, name).subject.after[name].conv[GDN],
     "holds what it held after event"),
    ("keys", ATTENTION, lambda s, c, name, x: x.roll(1, 0), "each position is that of the position before it"),
    ("keys", ATTENTION, lambda s, c, name, x: c.subject.after[name].values[ATTENTION], "holds the values"),
    ("keys", ATTENTION, lambda s, c, name, x: x.flip(1), "head 0 is that of head 1, head 1 is that of head 0"),
    ("keys", ATTENTION, lambda s, c, name, x: with_row(x, 2, torch.zeros_like(x[2])), "is all zero, in row 2"),
]  # fmt: skip


@pytest.mark.parametrize(("field", "layer", "change", "sentence"), MEMORY, ids=[f"{w[0]}: {w[3]}" for w in MEMORY])
def test_bits_that_were_moved_wrongly_are_explained(
    scene: Scenario, field: str, layer: int, change: Callable[..., Any], sentence: str
) -> None:
    assert of_memory(scene, field, layer, lambda *given: change(scene, *given)).startswith(sentence)


def test_bits_that_nothing_explains_are_counted_as_before(scene: Scenario) -> None:
    noise = torch.Generator().manual_seed(0)
    said = of_memory(scene, "conv", GDN, lambda c, name, x: torch.randn(x.shape, generator=noise).to(x))
    assert "bytes differ, the first at" in said.partition(";")[0] and UNEXPLAINED not in said


@cache
def commit_of_several(scene: Scenario) -> tuple[EventContext, list[Recomputation]]:
    """The last one, and its pieces: of every request a step of several tokens."""
    oracle = scene.oracle()
    for context in scene.contexts:
        pieces = [p for p in oracle.at(context) if isinstance(p, Recomputation) and p.layer == GDN and p.folding]
        if isinstance(context.event, Commit) and len(pieces) > 1 and pieces[0].folding.count > 1:
            last = context, pieces
    return last


def of_state(scene: Scenario, change: Callable[[Scene, Scene, torch.Tensor], torch.Tensor]) -> EventContext:
    """The last commit of several, with the first request's state changed; it and another's step are known."""
    context, pieces = commit_of_several(scene)
    mine, other = (scene_of(piece, []) for piece in pieces[:2])
    return m.with_state(context, pieces[0].request, lambda state: replace(state, state={
        **state.state, GDN: change(mine, other, state.state[GDN].double()).float()
    }))  # fmt: skip


def run_again(mine: Scene, room: int) -> torch.Tensor:
    """The state after a replay in which, of tokens in one ring entry, the last one is used."""
    state, tokens = mine.base, len(mine.k)
    for t in range(mine.count):
        last = max(other for other in range(tokens) if other % room == t % room)
        state = add(state, mine.k[last], mine.log_decay[last], mine.updates[last])
    return state


def overwritten(mine: Scene, _: Scene, __: torch.Tensor) -> torch.Tensor:
    """The first token of the step before, run again with the key, decay and update of this step's last one."""
    state = mine.previous
    for t, was in enumerate(zip(*mine.pending, strict=True)):
        state = add(state, *(was if t else (mine.k[-1], mine.log_decay[-1], mine.updates[-1])))
    return mine.fold(state)


STATES = [
    (lambda mine, other, state: run_again(mine, len(mine.k) - 1), "in which later tokens of the window overwrote"),
    (overwritten, "ran the first token of the previous step again from entries that this step had overwritten"),
    (lambda mine, other, state: other.after(1), "after 1 token of its step"),
    (lambda mine, other, state: state[:1].expand(state.shape), "are all that of head 0"),
]


def rounded_after_every_token(mine: Scene, _: Scene, __: torch.Tensor) -> torch.Tensor:
    state = mine.base
    for t in range(mine.count):
        decayed = mine.log_decay[t].exp()[:, None, None] * state
        added = mine.beta[t][:, None] * (mine.v[t] - torch.einsum("hk,hkv->hv", mine.k[t], decayed))
        state = (decayed + mine.k[t][:, :, None] * added[:, None]).bfloat16().double()
    return state


@pytest.mark.parametrize(("change", "sentence"), STATES, ids=[sentence for _, sentence in STATES])
def test_a_state_that_was_made_of_something_else_is_explained(scene: Scenario, change: Any, sentence: str) -> None:
    said = scene.said(of_state(scene, change))[0]
    assert sentence in said.diagnosis and said.explained.by == "bank", said


def test_a_mistake_of_the_rule_is_named_in_the_state_of_a_commit(scene: Scenario) -> None:
    said = scene.said(of_state(scene, rounded_after_every_token))[0]
    due = Explained("hypothesis", "the state is rounded to bfloat16 after every token", names=("state-in-bfloat16",))
    assert said.explained == due, said


@pytest.mark.parametrize(("change", "ends"), [
    (STATES[3][0], "; the nearest known wrong state: holds the state from before the step"),
    (lambda mine, other, state: mine.base, "holds the state from before the step"),
    (lambda mine, other, state: state + 0.1 * torch.sin(torch.arange(state.numel())).reshape(state.shape),
     "holds the state from before the step"),
])  # fmt: skip
def test_the_bank_overrides_a_wrong_state_that_is_only_the_nearest(scene: Scenario, change: Any, ends: str) -> None:
    """Not one that is right to within the allowance, and not where the bank has nothing that is."""
    context = of_state(scene, change)
    size = scene.said(context)[0]
    named = Explained("hypothesis", "holds the state from before the step")
    leans = replace(size, check="directed", tier=Tier.DIRECTED, problem=Problem("identified", mistake=named))
    oracle, history = scene.oracle(), RunHistory()
    for earlier in scene.contexts[: context.index]:
        oracle.at(earlier), history(earlier)
    (said,) = explained([leans], context, oracle, history)
    assert said.diagnosis.endswith(ends) and ("nearest" in ends) == (said.explained.by == "bank")
