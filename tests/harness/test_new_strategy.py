"""A commit strategy that the harness has never heard of: its pools are looked at as closely as any other's.

Leaves out: what strategies compute. The new one is `snapshot` with a pool of another name 
(`support/inputs/new_strategy.py`), which `tests/test_adding.py` adds to a copy of the product.
"""

import pytest

from instep.run.replay import Replay
from instep.setting import Setting
from instep.trace.file import Trace
from instep.verdict import Comparison, Exit
from instep_optimized import commit
from support.inputs.new_strategy import PUT_BY, PutBy
from support.inputs.traces import brief, recorded

pytestmark = pytest.mark.slow  # whole replays or commands


@pytest.fixture
def trace(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Trace:
    monkeypatch.setitem(commit.STRATEGIES, "put_by", PUT_BY)
    return recorded(tmp_path_factory.mktemp("new"), brief())


def found(trace: Trace, ops: str) -> list[Comparison]:
    return Replay(trace, Setting(ops, strategy="put_by", drafter="external")).run().verdict.findings


def test_it_agrees_and_its_positions_are_looked_at(trace: Trace) -> None:
    verdict = Replay(trace, Setting("plain", strategy="put_by", drafter="external")).run().verdict
    assert verdict.exit is Exit.AGREED and not [one for one in verdict.skipped if one.check == "tails"]


def test_column_after_a_window_is_named(trace: Trace) -> None:
    said = [one.diagnosis for one in found(trace, "support.wrong.ops:ONE_COLUMN_MORE") if one.check == "tails"]
    assert said[0] == ("put_by row 0 changed at position 2; this event writes only positions 0 to 1 "
                       "there")  # fmt: skip


def test_a_pool_that_is_too_narrow_is_named_with_its_place(trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PutBy, "narrower", 1)
    first = found(trace, "plain")[0]
    assert first.diagnosis == "put_by has 3 columns; 4 are needed for the widest window, of 4 tokens"
    assert first.place == ("trunk", 0, "state")
