"""Name the states that known mistakes leave: a miscounted previous step, a restart from zero, narrow storage.

Leaves out: the bank itself (`test_directed.py`).
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from instep.checks.known_wrong_states import Directed
from instep.checks.recomputed_values import Derived
from instep.checks.wrong_state_inputs import add, step
from instep.oracle.oracle import Oracle
from instep.oracle.recomputation import Recomputation
from instep.watch.event_context import EventContext
from instep.watch.rows_by_request import rows
from instep_reference import trunk
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.engine import Commit, Forward
from instep_reference.contract.place_names import STAGE_LEVEL, Place
from instep_reference.weights import Weights
from support.inputs import check_contexts as m

pytestmark = pytest.mark.slow  # whole replays

LAYER = 1


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Checkpoint, list[EventContext]]:
    opened = m.checkpoint(tmp_path_factory.mktemp("named"), num_hidden_layers=3, layer_types=m.TWO_AND_ONE)
    return opened, m.run(opened, m.events_of(opened)[:16])  # up to the third commit


def oracle_of(opened: Checkpoint) -> Oracle:
    return Oracle(opened, m.declared(torch.float32, torch.float32), torch.float32)


def states_at(oracle: Oracle, context: EventContext) -> dict[str, Recomputation]:
    return {
        piece.request: piece for piece in oracle.at(context)
        if isinstance(piece, Recomputation) and piece.layer == LAYER and piece.writes_state
    }


@pytest.fixture(scope="module")
def two_commits(run: tuple[Checkpoint, list[EventContext]]) -> tuple[Any, ...]:
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


def directed(run: tuple[Checkpoint, list[EventContext]], at: int, name: str, state: torch.Tensor) -> str:
    opened, contexts = run
    check = Directed(oracle_of(opened))
    for before in contexts[:at]:
        check.oracle.at(before)  # fills the memory of windows and states; its result is not used here
    context = m.with_state(contexts[at], name, lambda s: replace(s, state={**s.state, LAYER: state.float()}))
    return next(said.diagnosis for said in check(context) if not said.agrees)


def test_the_step_before_counted_twice_is_named(
    run: tuple[Checkpoint, list[EventContext]], two_commits: tuple[Any, ...]
) -> None:
    at, name, earlier, piece = two_commits
    twice = folded(piece.folding.base, earlier, earlier.folding.count)
    state = folded(twice, piece, piece.folding.count)
    assert directed(run, at, name, state).startswith("counts the tokens of the previous step twice")


@pytest.mark.parametrize("some", [1, 2])
def test_lost_tokens_of_the_previous_step_are_named(
    run: tuple[Checkpoint, list[EventContext]], two_commits: tuple[Any, ...], some: int
) -> None:
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


def test_the_updates_of_the_step_before_in_the_ring_are_named(
    run: tuple[Checkpoint, list[EventContext]], two_commits: tuple[Any, ...]
) -> None:
    at, name, earlier, piece = two_commits
    updates = piece.folding.tokens.of("update")[list(piece.span.nodes)].clone()
    older = earlier.folding.tokens.of("update")[list(earlier.span.nodes)]
    many = min(len(updates), len(older))
    updates[:many] = older[:many]
    assert directed(run, at, name, run_again(piece, updates)).startswith("adds the updates of the previous step")


def test_the_updates_of_another_request_in_the_ring_are_named(run: tuple[Checkpoint, list[EventContext]]) -> None:
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


def test_layer_restarted_from_zero_is_named_in_its_places(run: tuple[Checkpoint, list[EventContext]]) -> None:
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


def judged(run: tuple[Checkpoint, list[EventContext]], change: Callable[..., Any]) -> str:
    """The findings of T2 for one commit in which a state was changed."""
    opened, contexts = run
    at = next(context.index for context in contexts if isinstance(context.event, Commit))
    name = contexts[at].event.requests[0]
    context = m.with_state(contexts[at], name, lambda s: replace(s, state={**s.state, LAYER: change(s.state[LAYER])}))
    (found,) = m.judge([*contexts[:at], context], [Derived(oracle_of(opened))]).findings
    assert found.place == Place("trunk", LAYER, "state")
    return found.diagnosis


def test_a_state_that_went_through_16_bits_is_named(run: tuple[Checkpoint, list[EventContext]]) -> None:
    assert judged(run, lambda state: state.bfloat16().float()).startswith(
        "the state is rounded to bfloat16 when it is stored; relative error")


def zero(state: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(state)


def half_and_narrow(state: torch.Tensor) -> torch.Tensor:
    return (state / 2).bfloat16().float()


def one_column_zero_and_narrow(state: torch.Tensor) -> torch.Tensor:
    return state.bfloat16().float() * (torch.arange(state.shape[2]) > 0)


@pytest.mark.parametrize("change", [zero, half_and_narrow, one_column_zero_and_narrow])
def test_wrong_16_bit_numbers_are_not_called_rounded(
    run: tuple[Checkpoint, list[EventContext]], change: Callable[..., Any]
) -> None:
    assert "as if stored" not in judged(run, change)


def test_rows_of_16_bits_by_construction_are_not_called_stored(tmp_path: Path) -> None:
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


def test_a_state_of_another_dtype_than_declared_is_named_and_granted_nothing(
    run: tuple[Checkpoint, list[EventContext]]
) -> None:
    said = judged(run, lambda state: state.bfloat16())
    assert "is torch.bfloat16, torch.float32 is declared; relative error" in said
    assert judged(run, lambda state: state.double()) == "is torch.float64, torch.float32 is declared"
