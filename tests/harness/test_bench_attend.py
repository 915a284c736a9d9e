"""`instep bench --kind attend` also times fp8 KV and trees: judged like the others, and next to rows of older files.

Leaves out: what all kinds share (`test_bench.py`), and figures, which need a card.
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

from documentation.bench_tables import speed
from instep.options import FP8
from instep.verdict import Exit
from instep_optimized.memory_addresses import Pages
from instep_optimized.ops import load
from instep_optimized.ops.op_protocols import Ops
from instep_optimized.ops.plain import PLAIN
from instep_reference.contract.errors import Unsupported
from instep_speed.bench import run
from instep_speed.bench.interleaved_timing import Rates
from instep_speed.bench.kinds import attend
from instep_speed.bench.peers import flashinfer
from instep_speed.bench.resume import joined
from instep_speed.bench.run import Asked, Bench, bench
from support.build.outcomes import shown

NARROW, TREE = {"batch": 2, "rows": 3, "behind": 70, "kv": FP8}, {"batch": 2, "rows": 5, "behind": 70, "tree": "binary"}
FP32, MACHINE = torch.float32, Rates(1e10, 2e10, 1e11)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "rates", lambda device, dtype: MACHINE)


def ran(ops: Ops, **more: Any) -> Bench:
    return bench(Asked({"it": ops}, "cpu", FP32, ("attend",), "tiny", **{"peers": False} | more))


def text(found: Bench) -> str:
    return shown(found.result(), 200)


def rows(found: Bench, *axes: str) -> list[run.Row]:
    return [row for row in found.rows if all((axis in row["cell"]) is (axis in axes) for axis in ("kv", "tree"))]


def as_chains(*, pages: Pages, **given: Any) -> torch.Tensor:
    return PLAIN.attend(pages=replace(pages, ancestors=None, nodes=0), **given)


def by_the_first_scale(*, pages: Pages, **given: Any) -> torch.Tensor:
    if pages.key_scales is not None:
        pages = replace(pages, key_scales=pages.key_scales[:, :, :1].expand_as(pages.key_scales))
    return PLAIN.attend(pages=pages, **given)


@pytest.mark.parametrize(("wrong", "axis"), [(as_chains, "tree"), (by_the_first_scale, "kv")])
def test_a_tree_and_a_scale_are_judged_where_they_are_and_nowhere_else(
    wrong: Callable[..., torch.Tensor], axis: str
) -> None:
    found = ran(replace(PLAIN, attend=wrong))
    assert found.exit is Exit.DIVERGED
    said = {tuple(row["cell"]): row["arms"]["it"]["finding"] for row in found.rows}
    assert [cell for cell, finding in said.items() if "attended of head" in finding] == [
        ("batch", "rows", "behind", axis)]  # fmt: skip


def test_the_floor_of_fp8_is_that_of_its_bytes() -> None:
    """A key of 16 numbers takes 16 bytes and a scale of 4, and 64 in fp32. Rows are read and written in fp32."""
    wide, narrow = (row for row in ran(PLAIN).rows if row["cell"]["rows"] == 3)
    kept, moved = 2 * 2 * 73 * attend.KV_HEADS, 2 * 2 * 3 * 4 * 16 * 4
    assert wide["bytes"] == kept * 64 + moved and narrow["bytes"] == kept * 20 + moved


def test_op_set_without_fp8_and_trees_is_reported() -> None:
    found = ran(replace(PLAIN, tiled=False, trees=False))
    assert found.exit is Exit.AGREED and [len(row["arms"]) for row in found.rows] == [1, 1, 0, 0]
    assert "do not read scales" in rows(found, "kv")[0]["absent"]["it"]
    assert "no trees" in rows(found, "tree")[0]["absent"]["it"]


@pytest.mark.parametrize("size", ["default", "full"])
def test_every_grid_has_both_and_other_cells_keep_their_keys(size: Any) -> None:
    every = list(attend.cells(run.Ground(torch.device("cpu"), FP32, {}, MACHINE, 0), size))
    assert len({run.key({"kind": "attend", "cell": at}) for at in every}) == len(every)
    plain = [at for at in every if at.keys() == {"batch", "rows", "behind"}]
    assert plain == [dict(zip(("batch", "rows", "behind"), case, strict=True)) for case in attend.CASES[size]]
    for due in ({"batch": 32, "rows": 4, "behind": 4096, "kv": FP8},
                {"batch": 8, "rows": 8, "behind": 4096, "tree": "binary"}):  # fmt: skip
        assert due in every and len([at for at in every if at not in plain]) >= (2 if size == "default" else 10)


def test_older_rows_are_joined_with_new_ones(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("old.json", "new.json")]
    whole = ran(PLAIN)
    whole.result().write(files[1])
    replace(whole, rows=rows(whole)).result().write(files[0])
    old, new = (json.loads(file.read_text())["rows"] for file in files)
    assert len(old) == 2 and len(new) == 4
    for order in (files, files[::-1]):
        found = joined(order, None)
        assert sorted(map(run.key, found.rows)) == sorted(map(run.key, new)) and not found.left
        (head,) = (line.split() for line in text(found).splitlines() if "behind" in line)
        assert head[:6] == ["batch", "rows", "behind", "kv", "tree", "arm"]
        lines = [line.split() for line in text(found).splitlines() if " it " in line]
        assert {("2", "3", "70", FP8, "it"), ("2", "5", "70", "binary", "it")} <= {tuple(one[:5]) for one in lines}


def test_the_table_of_speed_shows_the_cell_without_further_axes() -> None:
    arm = {"us": 20.0, "lower": 19.0, "upper": 21.0, "mean": 20.0, "finding": "", "peer": ""}
    cell = {"batch": 32, "rows": 4, "behind": 4096}
    made = [{"kind": "attend", "cell": cell | more, "floor_us": 10.0, "arms": {"triton": arm}}
            for more in ({"kv": FP8}, {})]  # fmt: skip
    (line,) = (line for line in speed({"rows": made}).splitlines() if "attend" in line)
    assert "batch 32, rows 4, behind 4096 |" in line


# Peers


@pytest.mark.parametrize("at", [NARROW, TREE, TREE | {"behind": 0}], ids=["fp8", "tree", "a tree behind nothing"])
def test_peers_refuse_what_they_do_not_serve(at: dict[str, Any]) -> None:
    cell = attend.make(run.Ground(torch.device("cpu"), torch.bfloat16, {"it": PLAIN}, MACHINE, 0), at)
    assert [arm.name for arm in cell.arms] == ["it"] and cell.arms[0].check() == ""
    assert "torch's attention reads no pages, no scales and no trees" in cell.absent["torch sdpa"]
    assert ("a scale per tensor" if "kv" in at else "no mask") in cell.absent["flashinfer, FA3"]


class Planned:
    """FlashInfer's wrapper as far as an arm calls it: causal, or by a mask of all rows, request after request."""

    def __init__(self, room: torch.Tensor, layout: str, backend: str) -> None:
        assert (layout, backend) == ("NHD", "fa2")

    def plan(self, *planned: Any, causal: bool, custom_mask: torch.Tensor | None, **given: Any) -> None:
        self.planned, self.mask = planned, custom_mask
        assert causal

    def run(self, query: torch.Tensor, pools: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        rows, pages, ids, last, heads, kv_heads, width, page = self.planned
        found, at = [], 0
        for one, end in enumerate(last.tolist()):
            mine = ids[pages[one] : pages[one + 1]].long()
            known = (len(mine) - 1) * page + end
            key, value = (pool[mine].flatten(0, 1)[:known].double().repeat_interleave(heads // kv_heads, 1)
                          for pool in pools)  # fmt: skip
            q = query[rows[one] : rows[one + 1]].double()
            seen = torch.ones(len(q), known, dtype=torch.bool).tril(known - len(q))
            if self.mask is not None:
                seen, at = self.mask[at : at + len(q) * known].view(len(q), known), at + len(q) * known
            scores = torch.einsum("nhd,mhd->hnm", q, key) * width**-0.5
            found.append(torch.einsum("hnm,mhd->nhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), value))
        return torch.cat(found).to(query.dtype)


@pytest.mark.parametrize("at", [TREE, {"batch": 2, "rows": 3, "behind": 70}], ids=["tree", "chain"])
def test_flashinfer_gets_the_tree_as_a_mask(at: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("flashinfer")
    module.BatchPrefillWithPagedKVCacheWrapper = Planned
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr(flashinfer, "WORKSPACE", 1)
    cell = attend.make(run.Ground(torch.device("cpu"), torch.bfloat16, {"it": PLAIN}, MACHINE, 0), at)
    arms = {arm.name: arm for arm in cell.arms}
    assert arms["flashinfer, FA2"].check() == ""
    monkeypatch.setattr(flashinfer, "_mask", lambda form: None)
    causal = {arm.name: arm for arm in attend.make(
        run.Ground(torch.device("cpu"), torch.bfloat16, {"it": PLAIN}, MACHINE, 0), at).arms}  # fmt: skip
    assert ("attended of head" in str(causal["flashinfer, FA2"].check())) is ("tree" in at)


def test_unsupported_dtype_is_refused_before_the_package_is_imported() -> None:
    cell = attend.make(run.Ground(torch.device("cpu"), FP32, {"it": PLAIN}, MACHINE, 0), TREE)
    assert cell.absent["flashinfer, FA2"] == "it takes bf16 and fp16"
    with pytest.raises(Unsupported, match="bf16"):
        flashinfer.attend_2(run.Ground(torch.device("cpu"), FP32, {}, MACHINE, 0), TREE, "", query=None, pages=[])


@pytest.mark.slow
@pytest.mark.interpreted
@pytest.mark.parametrize("at", [NARROW, TREE, TREE | {"kv": FP8}], ids=["fp8", "tree", "both"])
def test_our_kernels_are_right_in_such_cells(at: dict[str, Any]) -> None:
    ground = run.Ground(torch.device("cpu"), torch.bfloat16, {"triton": load("triton")}, MACHINE, 0, False)
    (arm,) = attend.make(ground, at).arms
    assert arm.check() == ""
