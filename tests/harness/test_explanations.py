"""Formulas of explanations, each alone on small numbers; and parts of the search for causes.

Leaves out: mistakes that are planted in kernels and engines (`test_mistakes.py`, `test_diagnose.py`).
"""

import math
from collections.abc import Iterable
from dataclasses import make_dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from instep.checks import for_labels
from instep.checks.earlier_rounds import EarlierRounds
from instep.checks.grown_trees import Scores
from instep.checks.one_sided_errors import FEWEST_SAMPLES, LOOKS, Samples
from instep.checks.sampled_tokens import Row, reachable
from instep.diagnose import RunHistory, explained
from instep.diagnose.mistakes import (
    transformed_tensors,
    wrong_inputs,
)
from instep.diagnose.mistakes.finding_case import Compared
from instep.diagnose.mistakes.wrong_labels import heads
from instep.oracle import miscounted_states
from instep.oracle.states_with_folded_tokens import Run
from instep.watch.event_context import EventContext
from instep.watch.memory_changes import pattern
from instep_reference.contract.engine import Forward
from instep_reference.contract.place_names import STAGE_LEVEL, Place
from instep_reference.contract.sampling import Sampling
from instep_reference.label_ledger import code, expand
from instep_reference.label_mixing import mix
from support.inputs import check_contexts
from support.running.covering import few


def value(**given: Any) -> Any:
    """A frozen value of these fields, for code that replaces some of them."""
    return make_dataclass("Value", given)(**given)


def named_tensors(found: Iterable[Any]) -> dict[str, torch.Tensor]:
    return {one.sentence: one.wrong for one in found}


def compared(right: torch.Tensor, found: torch.Tensor, component: str = "hidden") -> Compared:
    """A finding whose rows may err by 1e-6."""
    finding: Any = SimpleNamespace(place=Place("trunk", 0, component))
    return Compared(finding, found, right, torch.full((2, 1), 1e-6, dtype=torch.float64))


def test_inputs_are_replaced_by_multiples_and_by_rows_of_their_shape() -> None:
    own = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert [one.tolist() for _, one in wrong_inputs._replaced("k", own)] == [
        [[0, 0], [0, 0]], [[2, 4], [6, 8]], [[0.5, 1], [1.5, 2]], [[-1, -2], [-3, -4]]]  # fmt: skip
    others = {"of b": torch.tensor([[5.0, 6.0]]), "of c": torch.zeros(2, 3)}
    case = SimpleNamespace(others=lambda name: others.items())
    moved = dict(wrong_inputs._moved(case, "hidden", own))  # type: ignore[arg-type]
    assert "the hidden of c" not in moved and moved["the hidden of b"].tolist() == [[5, 6], [5, 6]]
    assert moved["the hidden of the row before"].tolist() == [[3, 4], [1, 2]]


def test_rows_that_a_request_has_itself_are_not_another_requests() -> None:
    """Two requests begin with the same token, so the first row of one is that of the other, too."""
    own = torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(0)).double()
    theirs = {"b": own[:1] * (1 + 1e-7), "c": own[:1] + 1}
    case: Any = SimpleNamespace(others=lambda name: ((f'of request "{one}"', x) for one, x in theirs.items()))
    found = dict(wrong_inputs._moved(case, "value", own))
    assert 'the value of request "b"' not in found and 'the value of request "c"' in found
    first, case.component = found["the value of the first row for every row"], "attended"
    for start, rows in ((0, first), (2, first), (0, own)):
        case.piece = SimpleNamespace(span=SimpleNamespace(start=start))
        assert bool(wrong_inputs._or_seen_alone(case, "value", rows)) is (not start and torch.equal(rows, own[[0] * 3]))


def test_narrow_numbers_may_err_by_the_largest_allowance() -> None:
    """Two rows, of 1 and of 64, in bfloat16; a number is off by more than its rounding, and within the allowance."""
    right = torch.full((2, 8), 1 + 1 / 512, dtype=torch.float64)
    right[1] = 64 + 1 / 8
    for granted, right_one in (([1e-9, 1e-3], True), ([1e-9, 1e-9], False)):
        found = right.bfloat16().float()
        found[0] += 1 / 64
        case = SimpleNamespace(component="hidden", found=found, right=right,
                               granted=torch.tensor([[1e-9] * 2, granted]))  # fmt: skip
        named = [one.sentence for one in transformed_tensors._narrowed(case)]  # type: ignore[arg-type]
        assert named == ["as if stored in bfloat16"] * right_one


def test_parts_of_a_previous_step_are_counted_in_words() -> None:
    tokens = SimpleNamespace(of=lambda name: torch.zeros(3, 1))
    previous = SimpleNamespace(tokens=tokens, verb="read", base=None)
    says = [known.says for known, _ in miscounted_states.handed_over(torch.zeros(1), previous)]  # type: ignore[arg-type]
    assert says[1:] == ["was continued from the state after 1 token of the previous step; 3 tokens were read",
                        "was continued from the state after 2 tokens of the previous step; 3 tokens were read"]


def test_wrong_states_of_earlier_rounds_are_named_by_their_age() -> None:
    """Three rounds of "a" and "b" in layer 1. A state before a window is named in the oldest round alone."""
    fields = ("yardsticks", "own", "near", "wrongs", "dithered", "all_ops", "request", "layer", "prefix", "round")

    def pieces(number: int, *of: tuple[str, int, str]) -> Any:
        return [make_dataclass("Piece", fields)(*[None] * 6, *each, number) for each in of]

    def scene_of(piece: Any, others: Any) -> Any:
        assert piece.yardsticks == Run({}) and piece.own == {} and piece.wrongs == ()
        return SimpleNamespace(count=2, right=(piece.request, piece.round), k=range(3), counts=lambda: (1, 0),
                               after=lambda count: (piece.request, piece.round, count))  # fmt: skip

    rounds, scene = EarlierRounds(scene_of), SimpleNamespace(carried=lambda state: [("carried", *state)])
    for number, of in enumerate(([("a", 1, ""), ("b", 1, ""), ("a", 0, "")], [("a", 1, "")], [("c", 1, "p")],
                                 [("a", 1, ""), ("b", 1, ""), ("a", 1, "p"), ("b", 0, "")])):  # fmt: skip
        rounds.add(pieces(number, *of))
    (mine,) = pieces(3, ("a", 1, ""))
    of, part, b = "after 1 of 3 tokens of its window", "was continued from", 'the state of request "b"'
    assert [(known.says, state) for known, state in rounds.wrong_states(mine, scene)] == [  # type: ignore[arg-type]
        (f"holds {b}, in this round", ("b", 3, 2)), (f"holds {b} {of}, in this round", ("b", 3, 1)),
        (f"{part} its own state, 1 round ago", ("carried", "a", 1)),
        ("holds its own state, 1 round ago", ("a", 1, 2)), (f"holds its own state {of}, 1 round ago", ("a", 1, 1)),
        (f"{part} its own state, 2 rounds ago", ("carried", "a", 0)),
        ("holds its own state, 2 rounds ago", ("a", 0, 2)), (f"holds its own state {of}, 2 rounds ago", ("a", 0, 1)),
        ("holds its own state before its window, 2 rounds ago", ("a", 0, 0)),
        (f"{part} {b}, 2 rounds ago", ("carried", "b", 0)),
        (f"holds {b}, 2 rounds ago", ("b", 0, 2)), (f"holds {b} {of}, 2 rounds ago", ("b", 0, 1)),
        (f"holds {b} before its window, 2 rounds ago", ("b", 0, 0))]  # fmt: skip


def test_tokens_by_which_a_stale_state_is_late_are_counted_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.zeros(2, 1)
    monkeypatch.setattr(miscounted_states, "joined", lambda runs: (rows,) * 5)
    monkeypatch.setattr(miscounted_states, "_undone", lambda state, *given: state)
    last: Any = SimpleNamespace(recalls=True)
    says = [known.says for known, _ in miscounted_states.stale(torch.zeros(1), last)]
    assert says == [f"was continued from the state of {tokens} before" for tokens in ("1 token", "2 tokens")]


def test_kept_paths_are_compared_with_the_best_other_one() -> None:
    """Scores by their distance: a path may be kept if no other one is far above it."""
    scores: Any = SimpleNamespace(_part=lambda kept, other: float(other[0] - kept[0]))
    paths = [(1,), (4,), (2,)]
    assert Scores.disorder(scores, [(1,)], paths, ordered=False) == 3
    assert Scores.disorder(scores, [(2,), (4,)], paths, ordered=False) == -1
    assert Scores.disorder(scores, [(2,), (4,)], paths, ordered=True) == 2
    assert Scores.disorder(scores, paths, paths, ordered=False) == 0


def test_a_look_needs_enough_new_samples() -> None:
    samples = Samples("core", 0, 0)
    for count, looked, due in ((FEWEST_SAMPLES - 1, 0, False), (FEWEST_SAMPLES, 0, True),
                               (LOOKS * FEWEST_SAMPLES - 1, FEWEST_SAMPLES, False),
                               (LOOKS * FEWEST_SAMPLES, FEWEST_SAMPLES, True)):  # fmt: skip
        samples.count, samples.looked = count, looked
        assert samples.due() is due


@pytest.mark.parametrize(("first", "child", "other"), [(0.49, True, False), (0.51, False, True), (0.0, True, False)])
def test_a_token_of_half_the_weight_is_drawn_in_one_half_of_the_uniforms(
    first: float, child: bool, other: bool
) -> None:
    """Two tokens of equal weight, of which the first is a draft; in fp64 nothing else is allowed."""
    logits = torch.zeros(2, dtype=torch.float64)
    for tokens, parents in (((9, 0), (-1, 0)), ((9, 0, 1), (-1, 0, 0))):
        drawing: Any = SimpleNamespace(sampling=Sampling(1.0), at_nodes=[first] * 3, final=0.5, tokens=tokens,
                                       parents=parents)  # fmt: skip
        row = Row(logits, drawing, 0)
        assert reachable(row, 0, 0.0, torch.float64) is child and reachable(row, 1, 0.0, torch.float64) is other
    large = Row(logits + 100, SimpleNamespace(**{**vars(drawing), "at_nodes": [0.5] * 3}), 0)  # type: ignore[arg-type]
    assert all(reachable(large, token, 0.0, torch.float32) for token in (0, 1)), "rounding may decide"


@pytest.fixture(scope="module")
def of_labels(tmp_path_factory: pytest.TempPathFactory) -> list[EventContext]:
    opened = check_contexts.checkpoint(tmp_path_factory.mktemp("labels"))
    return list(check_contexts.run_labels(opened, check_contexts.events_of(opened)[:6]))


@few(2)
@pytest.mark.parametrize(("layer", "component", "label", "says"), [
    (2, "normed", lambda of: mix(of(1, "residual"), code(Place("trunk", 2, "normed"))),
     "row 0 is made from `residual` of layer 1, row 0, not from `hidden` of layer 1, row 0"),
    (2, "normed", lambda of: mix(0, code(Place("trunk", 2, "normed"))),
     "row 0 is made from zeros, not from `hidden` of layer 1, row 0"),
    (2, "normed", lambda of: mix(of(1, "hidden"), code(Place("trunk", 1, "normed"))),
     "row 0 is made with the weights of layer 1, not of layer 2"),
    (3, "query", lambda of: mix(mix(of(3, "projected"), 2), code(Place("trunk", 3, "query"))),
     "row 0 is made from position 2, not from position 0"),
    (2, "residual", lambda of: mix(mix(of(1, "hidden"), of(2, "gated")), code(Place("trunk", 2, "residual"))),
     "row 0 is made from `gated`, row 0, not from `mixer`, row 0"),
    (2, "residual", lambda of: mix(mix(of(1, "mixer"), of(2, "gated")), code(Place("trunk", 2, "residual"))),
     "row 0 is wrong in"),  # two parts are wrong, so neither is named
    (2, "normed", lambda of: mix(12345678901, code(Place("trunk", 2, "normed"))), "row 0 is wrong in"),
    (STAGE_LEVEL, "embedding",
     lambda of: mix(int(pattern(math.nan, torch.int64)), code(Place("trunk", STAGE_LEVEL, "embedding"))),
     "row 0 is the embedding of poison (memory that nothing wrote); the trace has "),
], ids=["other-row", "zeros", "other-layer", "position", "second-part", "two-parts", "unknown", "poison"])  # fmt: skip
def test_labels_tell_what_a_row_was_made_from(
    of_labels: list[EventContext], layer: int, component: str, label: Any, says: str
) -> None:
    place = Place("trunk", layer, component)
    context = next(one for one in of_labels if isinstance(one.event, Forward) and len(one.subject.places[place]) > 3)

    def first(at: int, name: str) -> int:
        return heads(context.truth.places[Place("trunk", at, name)])[0]

    def put(x: torch.Tensor) -> torch.Tensor:
        return torch.cat((expand([label(first)], x.shape[1:]), x[1:]))

    wrong = check_contexts.with_rows(context, place, put)
    wrong = replace(wrong, log=replace(wrong.log, poison=math.nan))
    check = next(check for check in for_labels() if check.name == "labels")
    said = explained([found for found in check(wrong) if not found.agrees], wrong, None, RunHistory())
    assert said[0].place == place and said[0].diagnosis.startswith(says) and "raised" not in said[0].diagnosis
