"""Kinds of `instep bench`: attention with fp8 and trees, prompts in handed-over bits, cells and products, whole texts.

Leaves out: what all kinds share (`test_bench.py`), what is wrong when (`test_bench_errors.py`), and figures, which need
a card.
"""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from documentation.bench_tables import speed
from instep.campaign.shapes.random_weights import random_checkpoint
from instep.generate.decode import Ask, Decoded
from instep.options import FP8
from instep.setting import Setting
from instep.verdict import Exit
from instep_optimized.memory_addresses import Pages, Part
from instep_optimized.ops import load
from instep_optimized.ops.op_protocols import ExpertWeights, GdnInputs
from instep_optimized.ops.plain import PLAIN
from instep_optimized.ops.watch_op_calls import Op, around
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.engine import SetNumSteps
from instep_reference.contract.errors import BadInput, Unsupported
from instep_reference.contract.place_names import unseen
from instep_speed.bench import kind, run
from instep_speed.bench.bench_types import SEED, TO, Cell, Ground
from instep_speed.bench.drawn_rows import redrawn
from instep_speed.bench.kinds import attend, mixer, prefill
from instep_speed.bench.kinds.decoding import arms, hardest_first, mixed, parted
from instep_speed.bench.peers import flashinfer, torch_functions
from instep_speed.bench.replayed_acceptance import Extent, play, trace_of
from instep_speed.bench.resume import joined
from instep_speed.bench.run import Bench
from support.inputs.bench_runs import FP32, ground, make_up_peer, measured_cells, text
from support.inputs.narrow_models import narrow
from support.running.covering import WHOLE
from support.running.processes import ENVIRONMENT, ROOTS, start

NARROW, TREE = {"batch": 2, "rows": 3, "behind": 70, "kv": FP8}, {"batch": 2, "rows": 5, "behind": 70, "tree": "binary"}


def rows(found: Bench, *axes: str) -> list[run.Row]:
    return [row for row in found.rows if all((axis in row["cell"]) is (axis in axes) for axis in ("kv", "tree"))]


def as_chains(*, pages: Pages, **given: Any) -> torch.Tensor:
    return PLAIN.attend(pages=replace(pages, ancestors=None, nodes=0), **given)


def by_the_neighbouring_channel(*, inputs: GdnInputs, **given: Any) -> torch.Tensor:
    return PLAIN.gdn(inputs=inputs._replace(log_decay=inputs.log_decay.roll(1, -1)), **given)


def rerun_without_decay(*, inputs: GdnInputs, parts: tuple[Part, ...], **given: Any) -> torch.Tensor:
    for part in parts:
        if part.settled is not None and part.ring is not None:
            part.ring.kept.decay.fill_(1.0)  # type: ignore[union-attr]
    return PLAIN.gdn(inputs=inputs, parts=parts, **given)


def by_the_first_scale(*, pages: Pages, **given: Any) -> torch.Tensor:
    if pages.key_scales is not None:
        pages = replace(pages, key_scales=pages.key_scales[:, :, :1].expand_as(pages.key_scales))
    return PLAIN.attend(pages=pages, **given)


@pytest.mark.usefixtures('quick')
@pytest.mark.parametrize(("wrong", "axis"), [(as_chains, "tree"), (by_the_first_scale, "kv")])
def test_a_tree_and_a_scale_are_judged_where_they_are_and_nowhere_else(
    wrong: Callable[..., torch.Tensor], axis: str
) -> None:
    found = measured_cells(replace(PLAIN, attend=wrong), "attend")
    assert found.exit is Exit.DIVERGED
    said = {tuple(row["cell"]): row["arms"]["it"]["finding"] for row in found.rows}
    assert [cell for cell, finding in said.items() if "attended of head" in finding] == [
        ("batch", "rows", "behind", axis)]  # fmt: skip


@pytest.mark.usefixtures('quick')
@pytest.mark.parametrize(("wrong", "forms"), [
    (by_the_neighbouring_channel, {"decode", "prefill"}), (rerun_without_decay, {"rerun"})])  # fmt: skip
def test_a_decay_per_channel_is_judged_in_every_form(wrong: Callable[..., torch.Tensor], forms: set[str]) -> None:
    """A re-run has the bits of its own kernel for one token, which decodes judge."""
    found = measured_cells(replace(PLAIN, kda=wrong), "channel_decay")
    assert {row["cell"]["form"] for row in found.rows} == {"decode", "prefill", "rerun"}
    assert {row["cell"]["form"] for row in found.rows if any(arm["finding"] for arm in row["arms"].values())} == forms


@pytest.mark.usefixtures('quick')
def test_the_floor_of_fp8_is_that_of_its_bytes() -> None:
    """A key of 16 numbers takes 16 bytes and a scale of 4, and 64 in fp32. Rows are read and written in fp32."""
    wide, narrow = (row for row in measured_cells(PLAIN, "attend").rows if row["cell"]["rows"] == 3)
    kept, moved = 2 * 2 * 73 * attend.KV_HEADS, 2 * 2 * 3 * 4 * 16 * 4
    assert wide["bytes"] == kept * 64 + moved and narrow["bytes"] == kept * 20 + moved


@pytest.mark.usefixtures('quick')
def test_op_set_without_fp8_and_trees_is_reported() -> None:
    found = measured_cells(replace(PLAIN, tiled=False, trees=False), "attend")
    assert found.exit is Exit.AGREED and [len(row["arms"]) for row in found.rows] == [1, 1, 0, 0]
    assert "do not read scales" in rows(found, "kv")[0]["absent"]["it"]
    assert "no trees" in rows(found, "tree")[0]["absent"]["it"]


@pytest.mark.usefixtures('quick')
@pytest.mark.parametrize("size", ["default", "full"])
def test_every_grid_has_both_and_other_cells_keep_their_keys(size: Any) -> None:
    every = list(attend.cells(ground(), size))
    assert len({run.key({"kind": "attend", "cell": at}) for at in every}) == len(every)
    plain = [at for at in every if at.keys() == {"batch", "rows", "behind"}]
    assert plain == [dict(zip(("batch", "rows", "behind"), case, strict=True)) for case in attend.CASES[size]]
    for due in ({"batch": 32, "rows": 4, "behind": 4096, "kv": FP8},
                {"batch": 8, "rows": 8, "behind": 4096, "tree": "binary"}):  # fmt: skip
        assert due in every and len([at for at in every if at not in plain]) >= (2 if size == "default" else 10)


@pytest.mark.usefixtures('quick')
def test_older_rows_are_joined_with_new_ones(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("old.json", "new.json")]
    whole = measured_cells(PLAIN, "attend")
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


@pytest.mark.usefixtures('quick')
def test_the_table_of_speed_shows_the_cell_without_further_axes() -> None:
    arm = {"us": 20.0, "lower": 19.0, "upper": 21.0, "mean": 20.0, "finding": "", "peer": ""}
    cell = {"batch": 32, "rows": 4, "behind": 4096}
    made = [{"kind": "attend", "cell": cell | more, "floor_us": 10.0, "arms": {"triton": arm}}
            for more in ({"kv": FP8}, {})]  # fmt: skip
    (line,) = (line for line in speed({"rows": made}).splitlines() if "attend" in line)
    assert "batch 32, rows 4, behind 4096 |" in line


# Peers of attention


@pytest.mark.usefixtures('quick')
@pytest.mark.parametrize("at", [NARROW, TREE, TREE | {"behind": 0}], ids=["fp8", "tree", "a tree behind nothing"])
def test_peers_refuse_what_they_do_not_serve(at: dict[str, Any]) -> None:
    cell = attend.make(ground(torch.bfloat16, it=PLAIN), at)
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


@pytest.mark.usefixtures('quick')
@pytest.mark.parametrize("at", [TREE, {"batch": 2, "rows": 3, "behind": 70}], ids=["tree", "chain"])
def test_flashinfer_gets_the_tree_as_a_mask(at: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("flashinfer")
    module.BatchPrefillWithPagedKVCacheWrapper = Planned
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr(flashinfer, "WORKSPACE", 1)
    cell = attend.make(ground(torch.bfloat16, it=PLAIN), at)
    arms = {arm.name: arm for arm in cell.arms}
    assert arms["flashinfer, FA2"].check() == ""
    monkeypatch.setattr(flashinfer, "_mask", lambda form: None)
    causal = {arm.name: arm for arm in attend.make(ground(torch.bfloat16, it=PLAIN), at).arms}
    assert ("attended of head" in str(causal["flashinfer, FA2"].check())) is ("tree" in at)


@pytest.mark.usefixtures('quick')
def test_unsupported_dtype_is_refused_before_the_package_is_imported() -> None:
    cell = attend.make(ground(it=PLAIN), TREE)
    assert cell.absent["flashinfer, FA2"] == "it takes bf16 and fp16"
    with pytest.raises(Unsupported, match="bf16"):
        flashinfer.attend_2(ground(), TREE, "", query=None, pages=[])


@pytest.mark.usefixtures('quick')
@pytest.mark.slow
@pytest.mark.interpreted
@pytest.mark.parametrize("at", [NARROW, TREE, TREE | {"kv": FP8}], ids=["fp8", "tree", "both"])
def test_our_kernels_are_right_in_such_cells(at: dict[str, Any]) -> None:
    (arm,) = attend.make(ground(torch.bfloat16, False, triton=load("triton")), at).arms
    assert arm.check() == ""


BF16, FP16 = torch.bfloat16, torch.float16
AT = {"sequences": 2, "tokens": 66, "heads": 4}


class Told:
    """Op sets with their `gdn` watched and, on request, changed.

    seen: the dtypes of its inputs, by set;  said: the finding of a set's arm
    """

    def __init__(self, dtype: torch.dtype, *names: str, strength: float = 1.0) -> None:
        self.strength, self.seen = strength, dict[str, tuple[torch.dtype, ...]]()
        sets = {name: around(load(name), unseen, self._watching(name)) for name in names}
        cell = prefill.make(ground(dtype, False, **sets), AT)
        self.said = {arm.name: arm.judged().finding for arm in cell.arms}

    def _watching(self, ops: str) -> Any:
        def wrapper(name: str, op: Op) -> Op:
            def call(*, inputs: GdnInputs, **given: Any) -> Any:
                self.seen[ops] = tuple(x.dtype for x in inputs)
                return op(inputs=inputs._replace(beta=inputs.beta * self.strength), **given)

            return call if name == "gdn" else lambda **given: op(**given)

        return wrapper


@pytest.mark.slow
@pytest.mark.interpreted
@pytest.mark.parametrize(("dtype", "keys", "values"), [(BF16, BF16, BF16), (FP16, BF16, FP16), (FP32, FP32, FP32)])
def test_rows_are_as_a_model_hands_them_over(dtype: torch.dtype, keys: torch.dtype, values: torch.dtype) -> None:
    told = Told(dtype, "triton", "precise")
    assert told.seen == {"triton": (keys, keys, values, FP32, FP32), "precise": (FP32,) * 5}
    assert told.said == {"triton": "", "precise": ""}


@pytest.mark.slow
@pytest.mark.interpreted
def test_fault_is_found_in_rows_of_16_bits() -> None:
    told = Told(BF16, "triton", strength=0.9)
    assert told.seen["triton"][0] is BF16 and "is off by" in told.said["triton"]


def made(name: str, on: Ground, cell: int = 0) -> Cell:
    return kind(name).make(on, list(kind(name).cells(on, "tiny"))[cell])


POOLS: dict[str, Callable[[Any], list[torch.Tensor]]] = {
    "decode": lambda drawn: [one.read.pool for one in drawn["parts"]],
    "prefill": lambda drawn: [one.read.pool for one in drawn["parts"]],
    "conv": lambda drawn: drawn["pools"],
    "mixer": lambda drawn: [pool for one in drawn["layers"] for pool in (one.windows, one.states)],
}


@pytest.mark.parametrize("name", POOLS)
def test_memory_is_redrawn_in_its_original_scale(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A conv whose window is a tenth of its row depends on one tap alone, and has other errors than one of four."""
    seen: dict[str, Any] = {}

    def maker(*given: Any, **drawn: Any) -> None:
        seen.update(drawn)
        raise Unsupported("looking on")

    make_up_peer(monkeypatch, name, maker)
    cell = made(name, ground(it=PLAIN))
    pools = POOLS[name](seen)
    sizes = [pool.std() for pool in pools]
    for pool in pools:
        pool.fill_(7.0)
    cell.anew()
    first = [pool.clone() for pool in pools]
    assert pools and all(0.8 < pool.std() / size < 1.25 for pool, size in zip(pools, sizes, strict=True))
    cell.arms[0].work()  # type: ignore[misc]
    assert not all(map(torch.equal, pools, first))
    cell.anew()
    assert all(map(torch.equal, pools, first))


def test_windows_and_states_are_not_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The places at which both are drawn again."""
    drawn: list[tuple[int, ...]] = []
    monkeypatch.setattr(mixer, "redrawn", lambda *pools, seed=SEED, **_: drawn.append((seed, len(pools))))
    made("mixer", ground(it=PLAIN)).anew()
    assert len(drawn) == len({seed for seed, _ in drawn}) == 2 and all(count for _, count in drawn)
    one, other, again = torch.zeros(3, 64)
    redrawn(one)
    redrawn(other, seed=SEED + 1)
    redrawn(again)
    assert torch.equal(one, again) and abs(float(torch.corrcoef(torch.stack((one, other)))[0, 1])) < 0.5


needs_groups = pytest.mark.skipif(not hasattr(torch.nn.functional, "grouped_mm"), reason="torch has it since 2.10")


def test_experts_need_grouped_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.nn.functional, "grouped_mm", raising=False)
    number = [at["op"] for at in kind("products").cells(ground(it=PLAIN), "tiny")].index("moe")
    cell = made("products", ground(it=PLAIN), number)
    assert cell.absent == {"torch": "torch has grouped products since 2.10"} and len(cell.arms) == 1


@needs_groups
def test_experts_are_chosen_by_scores_that_are_not_rounded() -> None:
    """The last expert has the largest score, by less than the bf16 distance from 1."""
    x, router = torch.ones(1, 8, dtype=torch.bfloat16), torch.zeros(8, 8, dtype=torch.bfloat16)
    router[:, 0], router[7, 1] = 1.0, 2.0**-9
    gate_up, down = torch.ones(8, 16, 8).bfloat16(), torch.ones(8, 8, 8).bfloat16()
    down[7] = 3.0
    weights = ExpertWeights(router, gate_up, down, None, None, None)
    found = torch_functions._moe(x, weights, 1, True)
    assert torch.equal(found, PLAIN.moe(x=x, weights=weights, top_k=1, norm_topk=True, to=TO))
    assert found.amin() > 3 * 8 * 60  # no other expert gives so much


@needs_groups
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("op", ["qkv", "out", "gates", "mlp", "lm_head", "moe"])
def test_products_of_torch_are_ours(op: str, dtype: torch.dtype) -> None:
    found = 0
    for number, at in enumerate(kind("products").cells(ground(dtype, it=PLAIN), "tiny")):
        if at["op"] == op:
            arm = made("products", ground(dtype, it=PLAIN), number).arms[-1]
            assert arm.peer.startswith("torch ") and arm.name == "torch" and arm.judged().finding == ""
            found += 1
    assert found == 2


@needs_groups
@pytest.mark.parametrize(("op", "name", "wrong"), [
    ("mlp", "silu", torch.relu), ("moe", "silu", torch.relu), ("qkv", "linear", lambda x, w: 1.01 * (x @ w.T)),
    ("moe", "_mlp", lambda x, *weights: torch.zeros_like(x)), ("moe", "_gated", lambda both: both.chunk(2, dim=-1)[0]),
])  # fmt: skip
def test_wrong_product_of_torch_is_reported(op: str, name: str, wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_functions, name, wrong)
    number = [at["op"] for at in kind("products").cells(ground(it=PLAIN), "tiny")].index(op)
    assert "is off by" in made("products", ground(it=PLAIN), number).arms[-1].judged().finding


KERNELS = '''
import torch
from torch.nn import functional as F

fused_recurrent_gated_delta_rule_update = fused_recurrent_gated_delta_rule_packed_decode = None


def fused_sigmoid_gating_delta_rule_update(
    *, A_log, a, dt_bias, b, q, k, v, initial_state_source, initial_state_indices, **_
):
    q, k, v = q[0], k[0], v[0]
    q, k = (F.normalize(x, dim=-1).repeat_interleave(v.shape[1] // x.shape[1], 1) for x in (q, k))
    state = initial_state_source[initial_state_indices.long()]  # [requests, HV, V, K]
    state = state * torch.exp(-A_log.exp() * F.softplus(a + dt_bias))[..., None, None]
    update = b.sigmoid()[..., None] * (v - torch.einsum("rhvk,rhk->rhv", state, k))
    state = state + torch.einsum("rhv,rhk->rhvk", update, k)
    initial_state_source[initial_state_indices.long()] = state
    return torch.einsum("rhvk,rhk->rhv", state, q)[None] * q.shape[-1] ** -0.5
'''


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """SGLang's sources without metadata and requirements: a failed import keeps `sglang.srt` loaded."""
    fla = tmp_path / "sglang" / "srt" / "layers" / "attention" / "fla"
    fla.mkdir(parents=True)
    (tmp_path / "sglang" / "srt" / "first.py").touch()
    (tmp_path / "sglang" / "__init__.py").write_text("import sglang.srt.first, no_such_requirement\n")
    for name in ("fused_recurrent", "fused_sigmoid_gating_recurrent"):
        (fla / f"{name}.py").write_text(KERNELS)
    return tmp_path


@WHOLE
def test_a_peer_without_metadata_is_timed(sources: Path) -> None:
    file, path = sources / "r.json", os.pathsep.join((str(sources), ROOTS))
    done = start("bench", "--kind", "decode", "--ops", "plain", "--peers", "--json", file, cold=True,
                 env={**os.environ, **ENVIRONMENT, "PYTHONPATH": path})  # fmt: skip
    _, err = done.communicate()
    arm = json.loads(file.read_text())["rows"][0]["arms"]["sglang sigmoid"]
    assert (done.returncode, arm["finding"]) == (0, ""), (arm, err)
    assert arm["us"] > 0 and arm["peer"] == "sglang (no version metadata)"


@pytest.mark.skipif(find_spec("sglang") is not None, reason="SGLang is installed")
def test_every_peer_that_is_not_installed_is_absent() -> None:
    cell = made("decode", ground(it=PLAIN))
    assert "sglang sigmoid" in cell.absent and "sglang sigmoid" not in {arm.name for arm in cell.arms}


TINY = Path("fixtures/tiny")


@pytest.fixture(scope="module")
def decoded() -> dict[str, Decoded]:
    prompts = {"a": tuple(b"Return the"), "b": tuple(b"spam, spam, spam, ")}
    ask = Ask(Checkpoint.open(TINY), Setting(), prompts, 1, tokens=6, batch=2, stop=0)
    return arms(ask, {"candidate_steps": [1, 3], "warmup_batches": 0, "update_interval": 1}, (0,))


@pytest.fixture(scope="module")
def large() -> Checkpoint:
    return random_checkpoint(narrow("qwen3.5-9b"))


@pytest.mark.slow
def test_the_hardest_come_first() -> None:
    prompts = {"easy": tuple(b"Shifting operations\n****************"), "hard": tuple(b"&qw }7b3p}dkhx4py8")}
    ask = Ask(Checkpoint.open(TINY), Setting(), prompts, 3, tokens=12, batch=2, stop=0)
    assert list(hardest_first(ask).prompts) == ["hard", "easy"]


@pytest.mark.slow
def test_arms_say_the_same(decoded: dict[str, Decoded]) -> None:
    assert list(decoded) == ["adaptive", "0"] and not parted(decoded)


@pytest.mark.slow
def test_played_arms_are_checked_and_their_laps_hold_the_checked_bits(
    decoded: dict[str, Decoded], large: Checkpoint
) -> None:
    played = play(decoded, large, Setting(), laps=1)
    for name, one in played.items():
        assert one.right and one.checked.verdict.events == len(decoded[name].events)
        assert set(one.digests) == {"a, finished", "b, finished"}
        assert one.speed().tokens == 12 and 0 < one.latency_s() <= sum(one.laps[0].seconds)
    spoilt = replace(played["0"].laps[0], digests={"a, finished": "", "b, finished": ""})
    assert not replace(played["0"], laps=(spoilt,)).right
    assert not replace(played["0"], extent=Extent(until=10**6), digests={}).right


@pytest.mark.slow
def test_a_wrong_engine_is_not_right(decoded: dict[str, Decoded], large: Checkpoint) -> None:
    played = play({"0": decoded["0"]}, large, Setting("support.wrong.ops:SWAPPED"), laps=1)
    assert not played["0"].right


@pytest.mark.slow
def test_a_part_may_be_checked(decoded: dict[str, Decoded], large: Checkpoint) -> None:
    played = play({"0": decoded["0"]}, large, Setting(), laps=1, extents={"0": Extent(until=5, layers=(0,))})["0"]
    assert played.right and played.checked.verdict.events == 6 and set(played.digests) == {"a, event 5", "b, event 5"}


@pytest.mark.slow
def test_graphs_are_compared_while_batches_are_full(decoded: dict[str, Decoded], large: Checkpoint) -> None:
    extent = Extent.full_batches(decoded["0"])
    played = play({"0": decoded["0"]}, large, Setting(graphs=True), laps=1, extents={"0": extent})["0"]
    assert played.right and set(played.digests) == {f"a, event {extent.until}", f"b, event {extent.until}"}


@pytest.mark.slow
def test_laps_begin_at_the_first_step_count_again(large: Checkpoint) -> None:
    ask = Ask(Checkpoint.open(TINY), Setting(), {"a": tuple(b"0, 1, 2, 3, " * 4)}, 1, tokens=16, batch=2, stop=0)
    decoded = arms(ask, {"candidate_steps": [1, 3], "warmup_batches": 0, "update_interval": 1}, ())
    counts = [event.num_steps for event in decoded["adaptive"].events if isinstance(event, SetNumSteps)]
    assert counts and counts[-1] != 1
    assert play(decoded, large, Setting(graphs=True), laps=1)["adaptive"].right


@pytest.mark.slow
def test_a_model_with_a_smaller_vocabulary_is_refused(decoded: dict[str, Decoded]) -> None:
    with pytest.raises(BadInput, match="256 tokens"):
        trace_of(decoded["0"], random_checkpoint(narrow("qwen3.5-9b", vocab=64)), "0")


@pytest.mark.slow
def test_prompts_of_all_kinds_are_mixed() -> None:
    found = mixed({f"p{number}": (1,) for number in range(12)})
    names = list(found)
    assert len(found) == 18 and {name.split()[0] for name in names[:6]} >= {"repeated", "noise"}
    assert found["noise 0"] != found["noise 1"]
