"""Errors of prompts beside FLA's: every row keeps them, and where ours is above, the table says so in words.

Leaves out: figures, and FLA's kernels themselves, which need a card.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from rich.console import Console

from instep.bench import kind, peers, render, run
from instep.bench.base import Arm
from instep.bench.clock import Rates
from instep.bench.kept import joined
from instep.bench.right import Judged, errors
from instep.bench.rows import on
from instep.bench.run import Asked, Bench, bench
from instep.page import bench as pages
from instep.verdict import Exit
from instep_optimized.ops.plain import PLAIN

FP32, TO = torch.float32, kind("prefill").bar
Gdn = Callable[..., torch.Tensor]
SMALL, LARGE = 2e-7, 1e-3  # within what is allowed of fp32, and far outside


def off_in_core(part: float) -> Gdn:
    return lambda **given: PLAIN.gdn(**given) * (1 + part)


def off_in_state(part: float) -> Gdn:
    def gdn(*, parts: Any, **given: Any) -> torch.Tensor:
        core = PLAIN.gdn(parts=parts, **given)
        for one in parts:
            one.store.pool[one.store.units] *= 1 + part
        return core

    return gdn


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Bench]:
    """Prompts with `ours` beside a peer under FLA's name that computes as `theirs`; None: there is none."""
    monkeypatch.setattr(run, "rates", lambda device, dtype: Rates(1e10, 2e10, 1e11))

    def ran(ours: Gdn, theirs: Gdn | None) -> Bench:
        def maker(ground: Any, at: Any, name: str, *, parts: Any, inputs: Any, judge: Any, **drawn: Any) -> Arm:
            assert theirs is not None

            def core(pool: torch.Tensor) -> torch.Tensor:
                return theirs(inputs=inputs, parts=(on(parts[0], pool),), dtype=FP32, to=None)

            return Arm(name, lambda: core(parts[0].read.pool), lambda: judge(core), peer="fla-core 0.0")

        module: Any = ModuleType("made_up_fla")
        module.maker = maker
        monkeypatch.setitem(sys.modules, "made_up_fla", module)
        monkeypatch.setitem(peers.PEERS, "prefill", {} if theirs is None else {TO: "made_up_fla:maker"})
        return bench(Asked({"it": replace(PLAIN, gdn=ours)}, "cpu", FP32, ("prefill",), "tiny",
                           at={"sequences": ("2",)}))  # fmt: skip

    return ran


def text(found: Bench) -> str:
    console = Console(width=250)
    with console.capture() as captured:
        render.show(found, console)
    return captured.get()


@pytest.mark.parametrize(("ours", "theirs", "place"), [
    (off_in_core(SMALL), PLAIN.gdn, "core"), (off_in_state(SMALL), PLAIN.gdn, "state"),
    (PLAIN.gdn, PLAIN.gdn, None), (PLAIN.gdn, off_in_core(SMALL), None), (PLAIN.gdn, off_in_state(LARGE), None),
    (off_in_core(SMALL), None, None),
], ids=["a core above", "a state above", "equal", "theirs above", "theirs wrong", "nobody there"])  # fmt: skip
def test_an_error_above_fla_s_is_said_beside_our_speed(
    ours: Gdn, theirs: Gdn | None, place: str | None, beside: Callable[..., Bench]
) -> None:
    found = beside(ours, theirs)
    (row,), said = found.rows, text(found)
    own = row["arms"]["it"]
    assert found.exit is Exit.AGREED and not own["finding"] and "us" in own
    assert all(arm["errors"].keys() == {"core", "state"} for arm in row["arms"].values())
    assert "off by: core, state" in said and f"{own['errors']['core']:.1e}, {own['errors']['state']:.1e}" in said
    page = pages.page(found.result().data())
    if place is None:
        assert "above" not in own and "ABOVE" not in said and "errs more" not in str(page)
        return
    higher, lower = (row["arms"][name]["errors"][place] for name in ("it", TO))
    assert higher > lower and own["above"] == (
        f"errs more than {TO}: {place} is off by {higher:.4g}, there by {lower:.4g}")  # fmt: skip
    assert f"ABOVE  prefill, sequences 2, tokens 33, heads 4: it {own['above']}" in said
    assert own["above"] in str(page) and "above" not in row["arms"][TO]


def test_an_error_is_relative_to_the_norm_over_all_heads() -> None:
    truth = torch.tensor([[3.0, 4.0], [0.0, 12.0]], dtype=torch.float64)
    found = errors(off=(truth + torch.tensor([[0.0, 0.0], [1.3, 0.0]]), truth), right=(truth, truth),
                   lost=(truth * torch.nan, truth), cut=(truth[:1], truth))  # fmt: skip
    assert found == {"off": pytest.approx(0.1), "right": 0.0}
    assert Judged("", found).above(Judged("", {"off": 0.05})) == "off is off by 0.1, there by 0.05"


def test_rows_without_errors_stand_beside_rows_with_them(beside: Callable[..., Bench], tmp_path: Path) -> None:
    """Files that are older than errors are joined and printed as they were."""
    files = [tmp_path / name for name in ("old.json", "new.json")]
    for file in files:
        beside(off_in_core(SMALL), PLAIN.gdn).result().write(file)
    old = json.loads(files[0].read_text())
    for arm in old["rows"][0]["arms"].values():
        arm.pop("errors"), arm.pop("above", None)
    old["rows"][0]["cell"]["tokens"] = 34
    files[0].write_text(json.dumps(old))
    found = joined(files, None)
    assert sorted("errors" in row["arms"]["it"] for row in found.rows) == [False, True]
    assert text(found).count("ABOVE") == 1
