"""Cells of `instep bench`: memory that a turn changes comes back as it was drawn, and torch's own products are right.

Leaves out: what is wrong when, and words (`test_bench_errors.py`).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from instep_optimized.ops.op_protocols import ExpertWeights
from instep_optimized.ops.plain import PLAIN
from instep_reference.contract.errors import Unsupported
from instep_speed.bench import kernels_of_peers, kind
from instep_speed.bench.bench_types import SEED, TO, Cell, Ground
from instep_speed.bench.drawn_rows import redrawn
from instep_speed.bench.interleaved_timing import Rates
from instep_speed.bench.kinds import mixer
from instep_speed.bench.peers import torch_functions
from support.running.covering import WHOLE
from support.running.process import ENVIRONMENT, ROOTS, start


def ground(dtype: torch.dtype = torch.float32) -> Ground:
    return Ground(torch.device("cpu"), dtype, {"it": PLAIN}, Rates(1e10, 2e10, 1e11), 0)


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
    module: Any = ModuleType("made_up_peer")
    seen: dict[str, Any] = {}

    def maker(*given: Any, **drawn: Any) -> None:
        seen.update(drawn)
        raise Unsupported("looking on")

    module.maker = maker
    monkeypatch.setitem(sys.modules, "made_up_peer", module)
    monkeypatch.setitem(kernels_of_peers.PEERS, name, {"made up": "made_up_peer:maker"})
    cell = made(name, ground())
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
    made("mixer", ground()).anew()
    assert len(drawn) == len({seed for seed, _ in drawn}) == 2 and all(count for _, count in drawn)
    one, other, again = torch.zeros(3, 64)
    redrawn(one)
    redrawn(other, seed=SEED + 1)
    redrawn(again)
    assert torch.equal(one, again) and abs(float(torch.corrcoef(torch.stack((one, other)))[0, 1])) < 0.5


needs_groups = pytest.mark.skipif(not hasattr(torch.nn.functional, "grouped_mm"), reason="torch has it since 2.10")


def test_experts_need_grouped_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.nn.functional, "grouped_mm", raising=False)
    number = [at["op"] for at in kind("products").cells(ground(), "tiny")].index("moe")
    cell = made("products", ground(), number)
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
    for number, at in enumerate(kind("products").cells(ground(dtype), "tiny")):
        if at["op"] == op:
            arm = made("products", ground(dtype), number).arms[-1]
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
    number = [at["op"] for at in kind("products").cells(ground(), "tiny")].index(op)
    assert "is off by" in made("products", ground(), number).arms[-1].judged().finding


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
    cell = made("decode", ground())
    assert "sglang sigmoid" in cell.absent and "sglang sigmoid" not in {arm.name for arm in cell.arms}
