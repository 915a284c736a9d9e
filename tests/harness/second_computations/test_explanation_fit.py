"""Whether explanations fit and which findings get them, computed again cell by cell on tensors made by hand.

Leaves out: the explanations, and findings of a real run (`test_diagnose.py`).
"""

import math
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from instep.diagnose.mistakes import explanation_fit
from instep.diagnose.mistakes.explanation_fit import Fit, fit, nearest, only
from instep.diagnose.mistakes.finding_case import Compared, Explanation
from instep_reference.contract.place_names import Place

CORE, STATE = Place("trunk", 1, "core"), Place("trunk", 1, "state")


def drawn(*shape: int, seed: int = 3) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def compared(
    component: str, right: torch.Tensor, found: torch.Tensor, granted: Any = 1e-6, **more: Any
) -> Compared:
    finding: Any = SimpleNamespace(place=Place("trunk", 1, component))
    given = torch.full((2, 1), granted).double() if isinstance(granted, float) else granted
    return Compared(finding, found, right, given, **more)


# -- cells -------------------------------------------------------------------------------------------------

SHAPES = (("core", (2, 3, 16)), ("core", (2, 3, 12)), ("hidden", (3, 24)), ("b", (2, 3)), ("state", (2, 3, 16)),
          ("state", (2, 5, 6)), ("conv", (4, 3)), ("normed", (2, 8)))  # fmt: skip


def cells_of(component: str, shape: tuple[int, ...]) -> dict[tuple[int, ...], list[tuple[int, ...]]]:
    """Cell -> its elements: a number of each head; 8 columns, or all of them where they are no multiple of 8."""
    columns = shape[-1]
    width = 1 if component in ("b", "a", "log_decay", "beta") else 8 if columns % 8 == 0 else columns
    found: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for at in product(*map(range, shape)):
        row = at[:1] if component == "state" else at[:-1]  # a tile of a state has all its rows
        found.setdefault((*row, at[-1] // width), []).append(at)
    return found


@pytest.mark.parametrize(("component", "shape"), SHAPES)
def test_cells_are_columns_of_a_head_and_tiles_of_a_state(component: str, shape: tuple[int, ...]) -> None:
    x, due = drawn(*shape), cells_of(component, shape)
    made = explanation_fit.cells(component, x)
    assert made.shape[:-1].numel() == len(due)
    for cell, elements in due.items():
        assert sorted(made[cell].tolist()) == sorted(float(x[at]) for at in elements)
    taken = torch.zeros(made.shape[:-1])
    for number, cell in enumerate(due):
        taken[cell] = number
    spread = explanation_fit._spread(component, taken, x)
    assert spread.shape == x.shape
    assert all(spread[at] == number for number, elements in enumerate(due.values()) for at in elements)


@pytest.mark.parametrize(("component", "shape", "taken", "says"), [
    ("core", (3, 2, 2), [(1, 0, 1), (2, 0, 1)], ", in rows 1, 2, in head 0, in columns 8 to 15"),
    ("core", (3, 2, 3), [(1, 0, 1), (2, 1, 2)], ", in rows 1, 2, in tiles of 8 columns, numbers 1, 2"),
    ("core", (3, 2, 1), [(0, 0, 0), (1, 0, 0), (2, 0, 0)], ", in head 0"), ("core", (2, 2, 1), [(1, 0, 0)],
                                                                            ", in row 1, in head 0"),
    ("hidden", (2, 2), [(1, 0), (0, 0)], ", in columns 0 to 7"), ("b", (2, 3), [(1, 2)], ", in row 1, in head 2"),
    ("state", (2, 3), [(1, 0), (0, 0)], ", in columns 0 to 7"), ("state", (2, 3), [(1, 0), (1, 1), (1, 2)],
                                                                 ", in head 1"),
    ("conv", (3, 2), [(1, 0), (2, 0)], ", in rows 1, 2, in column 0"), ("keys", (2, 2, 2), [(0, 1, 0)],
                                                                        ", in row 0, in column 0"),
    ("values", (2, 1, 2), [(0, 0, 1)], ", in row 0, in column 1"), ("hidden", (3,), [(1,)], ", in row 1"),
])  # fmt: skip
def test_wrong_parts_are_rows_heads_and_columns(component: str, shape: Any, taken: Any, says: str) -> None:
    """The place is named only where a part of what may be wrong is wrong."""
    which, every = torch.zeros(shape, dtype=torch.bool), torch.ones(shape, dtype=torch.bool)
    for at in taken:
        which[at] = True
    assert explanation_fit.where(component, which, every) == says
    assert explanation_fit.where(component, which, which) == ""
    assert explanation_fit.where(component, every, every) == ""


# -- one explanation ----------------------------------------------------------------------------------------


def changed(right: torch.Tensor, by: dict[tuple[int, int, int], float]) -> torch.Tensor:
    """A tensor [2, 2, 16] with some of its cells times 1 + a number."""
    wrong = right.clone()
    for (row, head, tile), part in by.items():
        wrong[row, head, 8 * tile : 8 * tile + 8] *= 1 + part
    return wrong


ALL = {(row, head, tile): 1.0 for row in range(2) for head in range(2) for tile in range(2)}


@pytest.mark.parametrize(("wrong", "found", "says"), [
    (ALL, ALL, ""), (ALL, {(1, 0, 1): 1.0}, ", in row 1, in head 0, in columns 8 to 15"), (ALL, {}, None),
    (ALL, {**ALL, (0, 0, 0): 0.0}, ""), (ALL, {**ALL, (0, 0, 0): 2.0}, None), (ALL, {(1, 0, 1): 0.4}, None),
    ({(0, 0, 0): 1.0}, {(0, 0, 0): 1.0, (1, 1, 1): 1.0}, None), ({(0, 0, 0): 1.0}, {(0, 0, 0): 1.0}, ""),
    ({(0, 0, 0): 0.0301}, {(0, 0, 0): 0.0301}, ""), ({(0, 0, 0): 0.0299}, {(0, 0, 0): 0.0299}, None),
    ({(0, 1, 0): 0.0301}, {(0, 1, 0): 0.0301}, ""), (ALL, {(1, 1, 1): 0.75}, None),
])  # fmt: skip
def test_every_wrong_cell_must_be_that_of_the_mistake(wrong: Any, found: Any, says: str | None) -> None:
    """A cell counts if the mistake moves it by 3 allowances of the worst head, here 0.01, or more."""
    right = drawn(2, 2, 16)
    granted = torch.tensor([[0.01, 1e-4], [1e-4, 1e-4]]).double()
    one = Explanation("is wrong", changed(right, wrong), name="its-name")
    made = fit(compared("core", right, changed(right, found), granted), one)
    assert (made and (made.sentence, made.part, made.name)) == ((says is not None and (
        f"is wrong{says}", found != wrong, "its-name")) or None)  # fmt: skip
    if made is not None:
        assert torch.allclose(made.stands, changed(right, found)) and made.left == 0
    assert fit(compared("core", right, changed(right, found), granted), Explanation("", right[:1])) is None


@pytest.mark.parametrize(("component", "shape"), SHAPES)
def test_the_rest_of_an_error_is_a_part_of_the_allowance(component: str, shape: Any) -> None:
    """By the norm or by the largest element of a head; the size is that of the larger of the two tensors."""
    right, wrong = drawn(*shape), 3 * drawn(*shape)
    found = wrong * (1 + 2e-7 * drawn(*shape, seed=5))
    axis = {"core": 1, "state": 0}.get(component)
    several = axis is not None and right.numel() >= 32 * shape[axis]
    pieces = [x.movedim(axis, 0) if several and axis is not None else x[None] for x in (found - wrong, right, wrong)]
    scale = 5 * right
    for granted, floor in ((torch.tensor([[1e-6], [2e-6]]), None), (torch.tensor([[2e-6], [1e-6]]), scale)):
        worst = 0.0
        for off, o, w, s in zip(*pieces, scale.movedim(axis or 0, 0) if several else scale[None], strict=True):
            for metric, part in zip((lambda x: float(x.square().sum()) ** 0.5, lambda x: float(x.abs().max())),
                                    granted[:, 0].tolist(), strict=True):  # fmt: skip
                size = max(metric(o), metric(w), metric(s) if floor is not None else 0.0)
                worst = max(worst, metric(off) / (part * size))
        made = fit(compared(component, right, found, granted.double(), scale=floor), Explanation("is another", wrong))
        assert made is not None and made.left == pytest.approx(worst, rel=1e-5)
        assert explanation_fit.agrees(compared(component, right, found, granted.double() * worst * 1.001, scale=floor),
                                      Explanation("", wrong))  # fmt: skip


def test_tiny_numbers_have_the_error_of_underflow() -> None:
    tiny, floor = torch.full((1, 8), 1e-36, dtype=torch.float64), 2.0**-126 / 2.0**-23
    case = compared("hidden", tiny, tiny + 1e-33, 0.01)
    assert explanation_fit._left(case, tiny) == pytest.approx(1e-33 / (0.01 * floor) * 8**0.5, rel=1e-6)
    exact, some = compared("hidden", tiny, tiny, 0.0), tiny.clone()
    some[0, 3] = math.nan
    assert explanation_fit._left(exact, tiny) == 0 and math.isinf(explanation_fit._left(
        compared("hidden", tiny, some), tiny))  # fmt: skip
    assert explanation_fit._left(case, case.found) == 0 and math.isinf(explanation_fit._left(
        compared("hidden", tiny, tiny * math.nan), tiny))  # fmt: skip


@pytest.mark.parametrize(("left", "fits"), [(1.0, True), (1.0 + 1e-9, False), (math.nan, False)])
def test_an_explanation_may_leave_the_whole_allowance(left: float, fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    right = drawn(2, 16)
    monkeypatch.setattr(explanation_fit, "_explained_left", lambda *given: left)
    monkeypatch.setattr(explanation_fit, "_left", lambda *given: left)
    case = compared("normed", right, 2 * right)
    assert (fit(case, Explanation("is doubled", 2 * right)) is not None) is fits
    assert explanation_fit.agrees(case) is fits and explanation_fit.agrees(case, Explanation("", 2 * right)) is fits
    assert not explanation_fit.agrees(case, Explanation("", right[:1]))
    monkeypatch.undo()
    some = torch.where(torch.arange(16) == 3, math.nan, 2 * right)
    assert not explanation_fit.agrees(case, Explanation("", some)), "a NaN agrees with nothing"


def test_a_number_is_no_coincidence_if_it_is_near_enough() -> None:
    """One number is left with a part p of its error: t tries have the chance t p, which may be a thousandth."""
    zero, found = torch.zeros(5, 1, dtype=torch.float64), torch.full((5, 1), 4.0, dtype=torch.float64)
    assert fit(compared("hidden", zero, found, 0.2), Explanation("is 5", zero + 5)) is not None, "a quarter is left"
    right = torch.ones(1, 1, dtype=torch.float64)
    for part, tried, tries, count, fits in (
        (1e-4, 9.9, 1.0, 1, True), (1e-4, 10.1, 1.0, 1, False), (1e-4, 1.0, 9.9, 1, True), (1e-4, 1.0, 10.1, 1, False),
        (1e-4, 3.0, 3.0, 1, True), (1e-4, 4.0, 3.0, 1, False), (0.0, 1e290, 1.0, 1, True), (0.19, 1.0, 1.0, 5, True),
        (0.19, 1.0, 1.0, 4, False), (0.199, 1.0, 1.0, 9, True), (0.201, 1.0, 1.0, 9, False),
        (1e-4, 1.0, 10**400, 101, True), (1e-4, 1.0, 10**400, 100, False),  # more than the largest float
    ):  # fmt: skip
        case = compared("hidden", right.expand(count, 1), (2 - part) * right.expand(count, 1), 0.2)
        one = Explanation("is doubled", 2 * right.expand(count, 1), tries)
        assert (fit(case, one, tried) is not None) is fits, (part, tried, tries)


def test_the_nearest_of_several_tensors_is_compared_with_the_numbers_as_they_are() -> None:
    """A bf16 number of 1.5 may be any number up to half a unit away. That does not match a tensor that was searched."""
    right = torch.ones(1, 1, dtype=torch.float64)
    case = compared("hidden", right, torch.tensor([[1.5]]).bfloat16(), 0.1, once=True)
    wrong = right * (1.5 + 2**-9)
    assert explanation_fit.off(case, wrong) == 0 and explanation_fit.off(case, right) == 0.5 - 2**-8
    for tries, fits in ((1.0, True), (2.0, False)):
        assert (fit(case, Explanation("is more", wrong, tries)) is not None) is fits
    taken = torch.ones(1, 1, dtype=torch.bool)
    assert explanation_fit._match(case, wrong, taken) == 2**-9 / 0.5


def test_numbers_that_are_lost_must_be_lost_by_the_mistake_too() -> None:
    """A NaN, where the mistake has one, too; it may begin in 1,200 places, so one place is no coincidence."""
    right = drawn(600, 16)
    lost, wrong, all_lost, worse = right.clone(), 2 * right, torch.full_like(right, math.nan), right.clone()
    lost[0, 3], wrong[0, 3], worse[0, 3], worse[5, 5] = math.nan, math.nan, math.nan, 9.0
    mistake = Explanation("loses a number", lost)
    made = fit(compared("normed", right, lost), mistake)
    assert made is not None and (made.sentence, made.left, made.part, made.stands) == ("loses a number", 0, False, lost)
    for case, one, tried, fits in (
        (lost, mistake, 1.2, True), (lost, mistake, 1.21, False), (wrong, mistake, 1.0, False), (wrong, Explanation(
            "doubles, too", wrong), 1.0, True), (all_lost, Explanation("loses all", all_lost), 1.0, False),
        (lost, mistake._replace(tries=1.21), 1.0, False), (worse, mistake, 1.0, False), (right, mistake, 1.0, False),
        (right, Explanation("is right", right), 1.0, False),
    ):  # fmt: skip
        assert (fit(compared("normed", right, case), one, tried) is not None) is fits
    assert fit(compared("normed", right[:400], lost[:400]), Explanation("loses it", lost[:400])) is None


def test_bits_are_those_of_the_mistake_wherever_they_are_wrong() -> None:
    """3 rows of 2 numbers."""
    right = torch.tensor([[1.0, 2], [3, 4], [5, 6]])
    wrong = torch.tensor([[2.0, 2], [2, 2], [5, 7]])
    for found, says in (([[2, 2], [2, 2], [5, 7]], ""), ([[2, 2], [3, 4], [5, 6]], ", in row 0, in column 0"),
                        ([[1, 2], [2, 2], [5, 6]], ", in row 1"), ([[2, 2], [2, 9], [5, 6]], None), (
                            [[1, 2], [3, 4], [5, 6]], None), ([[1, 2], [3, 5], [5, 6]], None)):  # fmt: skip
        case = compared("conv", right, torch.tensor(found).float(), None)
        made = fit(case, Explanation("is moved", wrong.double(), name="its-name"))
        assert (made and (made.sentence, made.left, made.part, made.name)) == ((says is not None and (
            f"is moved{says}", 0.0, bool(says), "its-name")) or None)  # fmt: skip
        assert made is None or torch.equal(made.stands, explanation_fit.bits(wrong))


def test_a_mistake_may_round_more_than_the_right_op() -> None:
    """Its draws err by a hundredth, so 3 hundredths and 4 units are granted, if the error is no large part."""
    right = drawn(1, 16).float().double()
    wrong = 2 * right
    found = (wrong * 1.02).float()
    draws = (wrong * 1.01)[None]
    one = Explanation("is doubled", wrong, draws=lambda: draws)
    case = compared("normed", right, found, 1e-6)
    due = 0.02 / (3 * 0.01 + 4 * 2**-23)
    assert explanation_fit._explained_left(case, wrong, one) == pytest.approx(due, rel=1e-4)
    assert explanation_fit._explained_left(case, wrong, one._replace(draws=None)) == pytest.approx(2e4, rel=1e-4)
    assert explanation_fit._explained_left(case, wrong * 1.4, one) > 1e5, "that is no rounding"
    for part, granted in ((0.33, True), (0.34, False)):  # a quarter of the error from the right tensor
        far = compared("normed", right, (wrong + part * right * 1.0).double(), 1e-6)
        left = explanation_fit._explained_left(far, wrong, one)
        assert (left < 100) is granted
    within = compared("normed", right, (wrong * (1 + 1e-7)).double(), 1e-6)
    assert explanation_fit._explained_left(within, wrong, one) == pytest.approx(0.1, rel=1e-3)
    more = compared("normed", right, (wrong * (1 + 1.5e-6)).double(), 1e-6)
    assert explanation_fit._explained_left(more, wrong, one) < 1e-4
    lost = compared("normed", right, found * math.nan, 1e-6)
    assert math.isinf(explanation_fit._explained_left(lost, wrong, one))
    narrow = compared("normed", right, found.bfloat16(), 1e-6)
    assert explanation_fit._explained_left(narrow, wrong, one) < 1
    once = compared("normed", right, found.bfloat16(), 1e-6, once=True)
    assert explanation_fit._explained_left(once, wrong, one) == pytest.approx(
        explanation_fit._left(once, wrong, torch.full((2, 1), 0.03 + 4 * 2.0**-52).double()), rel=1e-3)


# -- several explanations ----------------------------------------------------------------------------------


def of_fit(sentence: str, left: float = 0.0, part: bool = False, stands: float = 1.0) -> Fit:
    return Fit(sentence, left, part, torch.tensor([stands, 1e-9], dtype=torch.float64))


@pytest.mark.parametrize(("fits", "kept"), [
    ([("a", 0.3), ("b", 0.6)], "ab"), ([("a", 0.3), ("b", 0.61)], "a"), ([("a", 0.0), ("b", 0.5)], "ab"),
    ([("a", 0.0), ("b", 0.51)], "a"), ([("a", 0.9, True), ("b", 0.9)], "b"), ([("a", 0.9, True), ("b", 0.1, True)],
                                                                              "b"),
    ([("a", 0.0), ("a", 0.1)], "a"), ([None, ("b", 0.0)], "b"), ([], ""),
])  # fmt: skip
def test_explanations_that_fit_nearly_as_well_are_kept(fits: Any, kept: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice the smallest part of the allowance that is left; a quarter is the least that counts."""
    asked = list[Any]()
    monkeypatch.setattr(explanation_fit, "fit", lambda case, one, tried: asked.append(tried) or (
        None if one is None else of_fit(*one)))  # fmt: skip
    found = nearest(SimpleNamespace(), iter(fits))  # type: ignore[arg-type]
    assert "".join(one.sentence for one in found) == kept and asked == [len(fits)] * len(fits)


def test_sentences_with_the_same_tensor_are_one() -> None:
    a, b, c, d = of_fit("a"), of_fit("b"), of_fit("c", stands=1 + 1e-13), of_fit("d", stands=1 + 1e-11)
    for fits, said in (([a], ("a", 1)), ([a, b], ("a [equal bits: b]", 1)), ([], (None, 0)), ([a, d], (None, 2)),
                       ([a, b, c], ("a [equal bits: b; c]", 1)), ([a, b, d], (None, 3))):  # fmt: skip
        assert only(fits) == said
    one = torch.tensor([1.0, 1e-9], dtype=torch.float64)
    for other, same in ((one * (1 + 1e-13), True), (one + 0.9e-12, True), (one + 1.2e-12, False), (one / 0, False),
                        (one[:1], False), (one + torch.tensor([1e-9, 0.0]), False)):  # fmt: skip
        assert explanation_fit._same(one, other) is same
    assert not explanation_fit._same(one, torch.tensor([1.0, torch.inf], dtype=torch.float64))
    many = torch.tensor([1e12], dtype=torch.float64)
    assert explanation_fit._same(many + 1, many) and not explanation_fit._same(many + 1.1, many)
    infinite = one / 0
    assert explanation_fit._same(infinite, infinite.clone()) and not explanation_fit._same(infinite, -infinite)
    assert explanation_fit.best(compared("normed", drawn(2, 8), 2 * drawn(2, 8)),
                                [Explanation("x", 2 * drawn(2, 8))]) == (
        "x", 1)  # fmt: skip


def test_cells_that_the_mistake_leaves_are_no_part_of_it() -> None:
    """The second of two cells is 0 with the mistake and without it. The best of several tensors fits as well."""
    right = drawn(3, 2, 16)
    right[..., 8:] = 0
    for tries in (1.0, 2.0):
        made = fit(compared("core", right, 2 * right), Explanation("is doubled", 2 * right, tries))
        assert made is not None and (made.sentence, made.part) == ("is doubled", False)
    some = torch.where(torch.arange(3).view(3, 1, 1) == 1, 2 * right, right)
    made = fit(compared("core", right, some), Explanation("is doubled", 2 * right, 2.0))
    assert made is not None and (made.sentence, made.part) == ("is doubled, in row 1", True)
