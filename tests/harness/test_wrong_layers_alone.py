"""Explanations of results of experts and ranks, each computed again by hand from a few numbers.

Leaves out: formulas of other layers (`test_explanations.py`), and whole runs (`test_mistakes.py`).
"""

from collections.abc import Iterable
from dataclasses import dataclass, make_dataclass
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from instep.diagnose.mistakes import (
    experts,
    wrong_weights,
)
from instep_reference.contract.place_names import Place

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
