"""The cells for which a grid has time: shares of the kinds, and cells that use time left by others.

Leaves out: answers and times (`test_bench.py`), and files (`test_bench_resume.py`).
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from instep.campaign import runner
from instep_optimized.ops.plain import PLAIN
from instep_speed.bench import kind, run
from instep_speed.bench.interleaved_timing import Rates
from instep_speed.bench.kinds import decoding, prefill, strategies
from instep_speed.bench.run import Asked, Bench, bench
from support.running.command import Runner, complaint

GROUND = run.Ground(torch.device("cpu"), torch.float32, {}, Rates(1e10, 2e10, 1e11), 0)


class Clock:
    """Cells that take the given seconds of their kind, while nothing else takes any time."""

    def __init__(self, **seconds: float) -> None:
        self.now, self.seconds, self.order = 0.0, seconds, list[str]()

    def monotonic(self) -> float:
        return self.now

    def row(self, name: str, ground: Any, at: Any) -> run.Row:
        self.now += self.seconds[name]
        self.order.append(name)
        return {"kind": name, "cell": dict(at), "floor_us": None, "arms": {}, "absent": {}}


def ran(clock: Clock, seconds: float, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(run, "rates", lambda device, dtype: GROUND.rates)
    monkeypatch.setattr(runner, "time", clock)
    monkeypatch.setattr(run, "_row", clock.row)
    return bench(Asked({"it": PLAIN}, "cpu", torch.float32, tuple(clock.seconds), "tiny", seconds / 60, peers=False))


def test_unused_minutes_go_to_cells_that_had_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four attentions of 10 seconds, with a share of 17, then two quick kinds; everything fits into 50."""
    assert [len(list(kind(name).cells(GROUND, "tiny"))) for name in ("attend", "pick", "prefill")] == [4, 2, 2]
    found = ran(clock := Clock(attend=10.0, pick=0.5, prefill=1.0), 50.0, monkeypatch)
    assert clock.order == ["attend"] * 2 + ["pick"] * 2 + ["prefill"] * 2 + ["attend"] * 2
    assert not found.left and len({run.key(row) for row in found.rows}) == len(found.rows) == 8


def test_cell_that_does_not_fit_the_minutes_is_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    found = ran(clock := Clock(attend=10.0, pick=0.5), 20.6, monkeypatch)
    assert clock.order == ["attend"] * 2 + ["pick"] * 2 and found.left == {"attend": 2}


def test_default_grid_varies_other_axes_for_few_batches() -> None:
    cells = list(strategies.cells(GROUND, "default"))
    first = {"window": 4, "heads": 32, "state": "float32"}
    others = [at for at in cells if first.items() - at.items()]
    assert [at["batch"] for at in cells if at not in others] == [1, 8, 32, 64, 128]
    assert {(axis, at[axis]) for at in others for axis in first} == {
        *first.items(), ("window", 2), ("window", 8), ("heads", 16), ("heads", 64), ("state", "bfloat16")}  # fmt: skip
    assert len(others) == 5 * len(strategies.FEW) and {at["batch"] for at in others} == set(strategies.FEW)
    full = list(strategies.cells(GROUND, "full"))
    assert all(at in full for at in cells) and len(full) == 8 * 8 * 5 * 2


def test_prompts_of_few_heads_are_in_the_full_grid_only() -> None:
    heads = {size: {at["heads"] for at in prefill.cells(GROUND, size)} for size in ("default", "full")}  # type: ignore
    assert heads == {"default": {32, 64}, "full": {16, 24, 32, 48, 64}}


def test_texts_explain_the_missing_vanilla_drafter() -> None:
    ground = replace(GROUND, sets={"plain": PLAIN})
    eagle, ngram = (decoding.make(ground, {"batch": 2, "drafter": name}) for name in ("eagle", "ngram"))
    assert eagle.absent == {"vanilla": "it takes an MTP layer per draft, and the trained model has 1"}
    assert not ngram.absent and [arm.name for arm in ngram.arms] == [arm.name for arm in eagle.arms]
    assert [at["drafter"] for at in decoding.cells(GROUND, "default")] == ["eagle", "ngram"]


@pytest.mark.parametrize(("words", "says"), [
    (("--kind", "pick", "--at", "rows=1", "--at", "rows=77"), "found rows=77, which no cell of this grid has, ex"),
    (("--kind", "decode", "--kind", "pick", "--at", "rows=1", "--at", "batch=2"), "batch=2 rows=1, which no cell of"),
    (("--kind", "attend", "--at", "kv=None"), "kv=None, which no cell of this grid has, expected"),
    (("--kind", "attend", "--at", "rows=33", "--at", "tree=binary"), "at once"),
])  # fmt: skip
def test_a_value_that_no_cell_has_is_refused_at_once(
    words: tuple[str, ...], says: str, instep: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "rates", Mock(side_effect=AssertionError("the machine was measured first")))
    assert says in complaint(instep("bench", "--device", "cpu", *words))


def test_requested_kind_without_a_chosen_cell_is_reported(tmp_path: Path, instep: Runner) -> None:
    file, words = tmp_path / "found.json", ("bench", "--device", "cpu", "--at", "rows=1", "--json")
    ran = instep(*words, file, "--kind", "pick", "--kind", "decode")
    found = json.loads(file.read_text())
    assert ran.code == 0 and "decode: 2 cells left out, none has rows=1" in ran.out
    assert found["left_out"] == {"decode": 2} and [row["cell"] for row in found["rows"]] == [{"rows": 1}]
