"""Explanations of results of experts, ranks and labels, each computed again by hand from a few numbers.

Leaves out: formulas of other layers (`test_explanations.py`), and whole runs (`test_mistakes.py`).
"""

from collections.abc import Iterable
from dataclasses import dataclass, make_dataclass
from functools import reduce
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from instep.checks.exact_labels import folded
from instep.diagnose.mistakes import (
    experts,
    wrong_labels,
    wrong_weights,
)
from instep.watch.memory_changes import pattern
from instep_reference.contract.place_names import Place
from instep_reference.label_ledger import expand
from instep_reference.label_mixing import MASK, mix

KEY = Place("trunk", 0, "key")


def value(**given: Any) -> Any:
    """A frozen value of these fields, for code that replaces some of them."""
    return make_dataclass("Value", given)(**given)


def named_tensors(found: Iterable[Any]) -> dict[str, torch.Tensor]:
    return {one.sentence: one.wrong for one in found}


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


# -- experts ---------------------------------------------------------------------------------------------


def test_rows_may_go_to_other_experts_or_lack_some(monkeypatch: pytest.MonkeyPatch) -> None:
    """4 rows with two of 3 experts each, and the shared one, number 3. All numbers are exact."""
    made = torch.randint(1, 999, (4, 4, 2), generator=torch.Generator().manual_seed(8)).double()
    share = torch.tensor([[4.0, 2.0, 1.0]] * 4, dtype=torch.float64)
    ranking = torch.tensor([[2, 0, 1], [0, 1, 2], [2, 1, 0], [1, 0, 2]])
    chosen = torch.cat((ranking[:, :2], torch.full((4, 1), 3)), 1)

    def rows(experts: Any, shares: Any = share) -> Any:
        made_of: Any = [sum(float(shares[t][n]) * made[experts[t][n], t] for n in range(3)) for t in range(4)]
        return torch.stack(made_of)

    mix: Any = SimpleNamespace(x=made[0], scores=made[0], ranking=ranking, config=None, mlp=None, top=2)
    for name, result in (("mixture", mix), ("_pairs", (made, share, chosen)), ("Mixture", mix)):
        monkeypatch.setattr(experts, name, lambda *given, result=result: result)
    other, less = chosen.clone(), share.clone()
    other[1, 1], less[1, 1] = 2, 0
    piece = SimpleNamespace(span=SimpleNamespace(begin=0), truth=SimpleNamespace(places={"mlp"}))
    case: Any = value(found=rows(other), piece=piece, pieces=[piece], finding=SimpleNamespace(place="mlp"))
    monkeypatch.setattr(experts, "SHOWN", 1)
    for most, tried in ((4**3, 4**3), (4**3 - 1, 4 * 3)):  # every choice of three, or another one in each place
        monkeypatch.setattr(experts, "ANY", most)
        (one,) = experts.other_experts(case)
        assert (one.sentence, one.tries) == ("row 1 goes to expert 2 instead of expert 1", tried)
        assert torch.equal(one.wrong, rows(other))
    weights = torch.zeros(4, 3, dtype=torch.float64).scatter(1, ranking[:, :2], share[:, :2])
    lacks: Any = SimpleNamespace(found=rows(chosen, less))
    found = named_tensors(experts._left_out(lacks, mix, weights, made[:3], made[3]))
    assert [*found] == ["lacks expert 1 in row 1"] and torch.equal(next(iter(found.values())), lacks.found)
    pairs = sorted((int(chosen[t, n]), 3 * t + n) for t in range(4) for n in range(3))
    late = chosen.flatten().clone()
    for (before, _), (_, at) in pairwise(pairs):
        late[at] = before
    found = named_tensors(experts._grouped(case))
    assert torch.equal(found["the first row of every expert goes to the expert before it"], rows(late.view(4, 3)))


# -- scales, weights and inputs --------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """Weights of a test."""

    one: Any = None
    other: Any = None
    last_norm: Any = None


def test_blocks_of_weights_are_norms_or_inside_other_blocks() -> None:
    layer = Block(torch.ones(2), Block(torch.ones(1), Block(torch.ones(3))), Block(torch.zeros(0), torch.ones(2)))
    names = [name for name, _ in wrong_weights._parts(layer)]
    assert names == ["one", "other.one", "other.other", "other.other.one", "last_norm", "last_norm.other"]


# -- labels and rows of the draft head -------------------------------------------------------------------


def of_labels(component: str, span: Any, **before: Any) -> Any:
    truth = SimpleNamespace(before=before, places={Place("trunk", 0, "beta"): None})
    return SimpleNamespace(finding=SimpleNamespace(place=Place("trunk", 0, component)), right=torch.zeros(2, 1).long(),
                           context=SimpleNamespace(truth=truth, index=4, earlier=SimpleNamespace(forward=None)),
                           history=SimpleNamespace(of=lambda request, index: ()))  # fmt: skip


def test_labels_of_a_conv_may_be_made_after_an_empty_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """2 rows after 3 tokens; the conv reads 3 rows, so its window has 2."""
    fed, span = torch.tensor([[5], [6]]), SimpleNamespace(request="a", start=3)
    monkeypatch.setattr(wrong_labels, "rows", lambda side, place, span: fed)
    case = of_labels("mixed", span, a=SimpleNamespace(conv={0: torch.tensor([[3, 4]])}))
    (wrong,) = named_tensors(wrong_labels._mixed(case, span)).values()  # type: ignore[arg-type]
    own = wrong_labels.code(case.finding.place)
    assert wrong_labels.heads(wrong) == [reduce(mix, taps, own) for taps in ([0, 0, 5], [0, 5, 6])]


def test_labels_may_depend_on_a_state_inside_the_last_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """The states before and after the two nodes of a window are 11, 22 and 33; after one token 22 is held."""
    span: Any = SimpleNamespace(request="a", start=0)
    parts = {name: torch.tensor([[7 + number], [9 + number]]) for number, name in enumerate(
        ("k", "v", "log_decay", "beta", "q"))}  # fmt: skip
    monkeypatch.setattr(wrong_labels, "rows", lambda side, place, span: parts[place.component])
    case = of_labels("update", span, a=SimpleNamespace(state={0: torch.tensor([22])}, length=0),
                     b=SimpleNamespace(state={0: torch.tensor([44])}, length=1))  # fmt: skip
    theirs = 'depends on the state of request "b"'
    for states, said in (([11, 22, 33], [(0, 11), (2, 33)]), ([11, 33], []), ([], [])):
        monkeypatch.setattr(wrong_labels, "states_of_window", lambda *given, states=states: states)
        found = named_tensors(wrong_labels.FAMILIES["update"](case, span))
        _, recalled, *others = found
        assert recalled == wrong_labels.NAMES["nothing-recalled"].sentence
        assert others == [f"depends on the state after {count} tokens of the last window; 1 was accepted"
                            for count, _ in said]  # fmt: skip
        for wrong, (_, chain) in zip((found[name] for name in (theirs, *others)), [(0, 44), *said], strict=True):
            own, made = wrong_labels.code(case.finding.place), []
            for row in range(2):
                k, v, log_decay, beta, _ = (int(part[row]) for part in parts.values())
                made.append(reduce(mix, (chain, k, v, log_decay, beta, own)))
                chain = folded(0, chain, k, v, log_decay, beta, True)
            assert wrong_labels.heads(wrong) == [label & MASK for label in made]


def test_rows_that_were_made_alike_are_named_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """3 rows of 2 elements, of which the first and the last have other labels."""
    right, found = expand([5, 6, 7], (2,)), expand([8, 6, 9], (2,))
    monkeypatch.setattr(wrong_labels, "_known", lambda case: {})
    case: Any = SimpleNamespace(granted=None, component="normed", right=right, found=found, finding=SimpleNamespace(
        check="labels", place=Place("trunk", 0, "normed"), request="a"))  # fmt: skip
    for last, says in (("x", "rows 0, 2 are made from x"), ("y", "row 0 is made from x; row 2 is made from y")):
        made = {8: "is made from x", 9: f"is made from {last}"}
        monkeypatch.setattr(wrong_labels, "_told", lambda label, *given, made=made: made[label])
        assert [*named_tensors(wrong_labels.made_from(case))] == [says]


def test_known_labels_are_those_of_rows_positions_and_poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """3 rows of 3 elements from position 5 on. Poison that is read as a row has one label, which no row has."""
    place = Place("trunk", 0, "normed")
    side = SimpleNamespace(places={place: expand([50, 60, 70], (3,))})
    span = SimpleNamespace(request="a", start=5, count=3, at=lambda place: (0, 3))
    monkeypatch.setattr(wrong_labels, "row_spans", lambda context, stage: [span])
    case: Any = SimpleNamespace(component="normed", context=SimpleNamespace(
        truth=side, subject=side, log=SimpleNamespace(poison=3.0), earlier=SimpleNamespace(forward=None)))  # fmt: skip
    known = wrong_labels._known(case)
    element = int(pattern(3.0, torch.int64))
    intact = [int(each) for each in expand([element], (3,))[0]]
    read = (element + sum((element - due) * (2 * at + 1) for at, due in enumerate(intact))) & MASK
    assert known.keys() == {0, 50, 60, 70, *range(1, 11), read} and known[8] == ["position 8"]
    assert [str(one) for one in known[read]] == ["poison (memory that was never written)"]
