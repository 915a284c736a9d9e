"""The same seed draws the same, whatever modules are imported by then. Leaves out: what a campaign draws."""

import sys
from pathlib import Path
from random import Random

import pytest
from hypothesis import strategies as st
from hypothesis.internal.conjecture.data import ConjectureData

from instep.campaign.fuzz.hypothesis_machine import by_seed_alone
from instep.campaign.soak.soak import Seeded
from instep_reference.contract.errors import InstepError

NUMBERS = st.lists(st.integers(10**6, 10**8), min_size=200, max_size=200)


def freely() -> list[int]:
    return ConjectureData(random=Random("x")).draw(NUMBERS)


def test_constants_of_an_imported_module_change_no_draw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "somewhere"
    folder.mkdir()
    (folder / "numbers_of_somebody.py").write_text(f"HERE = {[10**6 + 17 * n for n in range(300)]}\n")
    before, free = Seeded("x").draw(NUMBERS), freely()
    monkeypatch.syspath_prepend(folder)
    __import__("numbers_of_somebody")
    try:
        assert freely() != free, "Hypothesis alone draws some of them"
        assert Seeded("x").draw(NUMBERS) == before
        with by_seed_alone():
            assert freely() == before
    finally:
        del sys.modules["numbers_of_somebody"]


def test_a_draw_that_never_succeeds_ends() -> None:
    with pytest.raises(InstepError, match=r"draws from .* gave up"):
        Seeded("x").draw(st.integers(0, 9).filter(lambda number: number > 9))


@pytest.mark.parametrize("strategy", [st.lists(st.integers(), max_size=0), st.builds(list)], ids=["list", "builds"])
def test_a_strategy_that_builds_a_value_draws_it_outside_hypothesis(strategy: st.SearchStrategy[list[int]]) -> None:
    assert Seeded("x").draw(strategy) == []
