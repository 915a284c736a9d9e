"""The plain ops on rows alone, against formulas written out here in fp64; and what the op set declares.

Leaves out: ops with memory (`test_ops_plain_recurrent.py`, `test_ops_plain_paged.py`).
"""

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.functional import softplus

from instep.kit.cases import CASES, EXACT_ROWS, ROWS, strays
from instep.kit.cases.case import Case, serve
from instep_optimized.ops.op_protocols import ExpertWeights
from instep_optimized.ops.plain import PLAIN
from instep_reference.contract.place_names import COMPONENTS, Place
from support.independent.op_agreement import agree

Tensor = torch.Tensor
ROW_CASES = [case for case in (*ROWS, *EXACT_ROWS) if case.op not in ("pick", "accept")]
FP64 = torch.float64
FP32_NOISE = 5e-5  # of the largest element: fp32 sums, and angles at position 400


def doubled(value: Any) -> Any:
    """The same inputs in fp64."""
    if isinstance(value, ExpertWeights):
        return ExpertWeights(*(doubled(getattr(value, name)) for name in value.__dataclass_fields__))
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def named(answer: Any) -> dict[str, Tensor]:
    return {"result": answer} if isinstance(answer, Tensor) else dict(zip(answer._fields, answer, strict=True))


# ---- the formulas ---------------------------------------------------------------------------------------------


def norm(x: Tensor, weight: Tensor, eps: float, **_: Any) -> Tensor:
    return torch.stack([row / math.sqrt(float((row * row).mean()) + eps) * (1 + weight) for row in x])


def linear(x: Tensor, weight: Tensor, shape: tuple[int, ...], **_: Any) -> Tensor:
    return torch.stack([(weight @ row.flatten()).view(shape) for row in x])


def gdn_inputs(
    mixed: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, key_heads: int, key_dim: int, **_: Any
) -> dict[str, Tensor]:
    keys, rows = key_heads * key_dim, []
    for x, a_row, b_row in zip(mixed, a, b, strict=True):
        q, k, v = x[:keys].view(key_heads, -1), x[keys : 2 * keys].view(key_heads, -1), x[2 * keys :]
        unit_q, unit_k = (torch.stack([h / math.sqrt(float(h @ h) + 1e-6) for h in part]) for part in (q, k))
        rows.append((unit_q / math.sqrt(key_dim), unit_k, v.view(len(a_row), -1),
                     -torch.exp(A_log) * softplus(a_row + dt_bias), 1 / (1 + torch.exp(-b_row))))
    names = ("q", "k", "v", "log_decay", "beta")
    return {name: torch.stack(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)}


def gated_norm(core: Tensor, z: Tensor, weight: Tensor, eps: float, gate: str, **_: Any) -> Tensor:
    opened = 1 / (1 + torch.exp(-z)) * (z if gate == "silu" else 1)
    return core / (core.square().mean(-1, keepdim=True) + eps).sqrt() * weight * opened


def attention_inputs(
    projected: Tensor, key_raw: Tensor, positions: Tensor, q_norm: Tensor, k_norm: Tensor, eps: float,
    rotary_dim: int, theta: float, **_: Any,
) -> dict[str, Tensor]:
    def turned(x: Tensor, weight: Tensor, position: int) -> Tensor:
        y, half = norm(x, weight, eps), rotary_dim // 2
        out = y.clone()
        for i in range(half):
            angle = position * theta ** (-2 * i / rotary_dim)
            pair = torch.view_as_complex(torch.stack([y[:, i], y[:, i + half]], dim=-1))
            spun = pair * complex(math.cos(angle), math.sin(angle))
            out[:, i], out[:, i + half] = spun.real, spun.imag
        return out

    spots = positions.tolist()
    return {
        "query": torch.stack([turned(x[:, 0], q_norm, p) for x, p in zip(projected, spots, strict=True)]),
        "key": torch.stack([turned(x, k_norm, p) for x, p in zip(key_raw, spots, strict=True)]),
    }


def key_inputs(key_raw: Tensor, **given: Any) -> Tensor:
    unused = torch.stack([key_raw, key_raw], dim=2)
    found = attention_inputs(unused, key_raw, q_norm=given["k_norm"], **given)["key"]
    assert isinstance(found, Tensor)
    return found


def swiglu(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    middle = gate_up.shape[0] // 2
    gate, up = gate_up[:middle] @ x, gate_up[middle:] @ x
    return down @ (gate / (1 + torch.exp(-gate)) * up)


def mlp(x: Tensor, gate_up: Tensor, down: Tensor, **_: Any) -> Tensor:
    return torch.stack([swiglu(row, gate_up, down) for row in x])


def moe(x: Tensor, weights: ExpertWeights, top_k: int, norm_topk: bool, **_: Any) -> Tensor:
    rows = []
    for row in x:
        chances = torch.softmax(weights.router @ row, dim=0)
        chosen = sorted(range(len(chances)), key=lambda e: -float(chances[e]))[:top_k]
        total = sum(float(chances[e]) for e in chosen) if norm_topk else 1.0
        out = sum(chances[e] / total * swiglu(row, weights.gate_up[e], weights.down[e]) for e in chosen)
        if weights.shared_gate_up is not None:
            opened = 1 / (1 + torch.exp(-(weights.shared_gate @ row)))
            out = out + opened * swiglu(row, weights.shared_gate_up, weights.shared_down)
        rows.append(out)
    return torch.stack(rows)


FORMULAS: dict[str, Callable[..., Any]] = {
    "embed": lambda tokens, table, to: torch.stack([table[t] for t in tokens.tolist()]),
    "norm": norm,
    "linear": linear,
    "add": lambda x, y, to: x + y,
    "concat": lambda x, y, to: torch.stack([torch.cat(rows) for rows in zip(x, y, strict=True)]),
    "gdn_inputs": gdn_inputs,
    "gated_norm": gated_norm,
    "attention_inputs": attention_inputs,
    "key_inputs": key_inputs,
    "output_gate": lambda attended, projected, to: attended / (1 + torch.exp(-projected[:, :, 1])),
    "mlp": mlp,
    "moe": moe,
    "lm_head": lambda x, weight, to: torch.stack([weight @ row for row in x]),
}


# ---- the tests ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [c for c in ROW_CASES if "empty" not in c.name], ids=str)
def test_a_row_op_is_its_formula_in_fp64(case: Case) -> None:
    inputs = {name: doubled(value) for name, value in case.build("cpu").inputs.items()}
    wanted = FORMULAS[case.op](**inputs)
    for name, result in named(getattr(PLAIN, case.op)(**inputs)).items():
        expected = wanted if isinstance(wanted, Tensor) else wanted[name]
        assert result.dtype == FP64
        assert result.shape == expected.shape
        assert float((result - expected).abs().max()) <= 1e-12 * float(expected.abs().max())


@pytest.mark.parametrize("case", [c for c in ROW_CASES if "empty" not in c.name], ids=str)
def test_a_row_op_rounds_once_and_only_to_the_declared_width(case: Case) -> None:
    inputs = case.build("cpu").inputs
    exact = named(getattr(PLAIN, case.op)(**{name: doubled(value) for name, value in inputs.items()}))
    activation = torch.bfloat16 if "bfloat16" in case.name else torch.float32
    declared, places = PLAIN.rounds(activation, torch.float32), inputs["to"]
    places = places if isinstance(places, tuple) and not isinstance(places, Place) else (places,)
    for place, (name, result) in zip(places, named(getattr(PLAIN, case.op)(**inputs)).items(), strict=True):
        truth = exact[name]
        room = truth.abs() * torch.finfo(result.dtype).eps * 0.51 + FP32_NOISE * float(truth.abs().max())
        assert result.dtype == declared[place.component]
        assert bool(((result.double() - truth).abs() <= room).all())


@pytest.mark.parametrize("case", [c for c in CASES if "empty" in c.name or "none" in c.name], ids=str)
def test_an_empty_batch_gives_no_rows_and_writes_nothing(case: Case) -> None:
    outcome = serve(PLAIN, case)
    assert all(bool((result == 0).all()) for result in outcome.results.values())
    assert not any(strays(outcome).values())


@pytest.mark.parametrize("case", [c for c in CASES if "empty" not in c.name and "none" not in c.name], ids=str)
def test_results_are_new_contiguous_and_separate(case: Case) -> None:
    inputs = case.build("cpu").inputs
    answer = getattr(PLAIN, case.op)(**inputs)
    results = list(named(answer).values()) if answer is not None else []
    memory = [x.untyped_storage().data_ptr() for x in results if x.numel()]
    given = [x.untyped_storage().data_ptr() for x in inputs.values() if isinstance(x, Tensor) and x.numel()]
    assert all(x.is_contiguous() for x in results)
    assert len({*memory, *given}) == len(memory) + len(set(given))


def test_select_moves_rows_of_any_dtype_and_gives_zeros_for_minus_one() -> None:
    for x in (torch.arange(12).view(4, 3), torch.full((4, 2, 2), -0.0).bfloat16()):
        out = PLAIN.select(x=x, index=torch.tensor([2, -1, 0]))
        assert out.dtype == x.dtype
        assert torch.equal(out[0], x[2]) and torch.equal(out[2], x[0])
        assert not out[1].any()


def test_pick_takes_the_lowest_of_equal_logits() -> None:
    place = Place("trunk", 0, "pick")
    logits = torch.tensor([[0.0, 2.0, 2.0], [1.0, 1.0, 1.0], [-3.0, -2.0, -1.0]])
    assert PLAIN.pick(logits=logits, to=place).tolist() == [1, 0, 2]


def test_accept_is_the_loop_over_every_small_window() -> None:
    width = 4
    drafts = list(itertools.product(range(2), repeat=width - 1))
    window = torch.tensor([[0, *d] for d in drafts for _ in range(2**width)])
    picks = torch.tensor([list(p) for _ in drafts for p in itertools.product(range(2), repeat=width)])
    own = torch.full((len(window),), -1)
    for count in range(width + 1):
        answer = PLAIN.accept(
            window=window, picks=picks, count=torch.full((len(window),), count), forced_last=own, forced_bonus=own
        )
        assert all(field.dtype == torch.int64 for field in answer)
        for b, (nodes, said) in enumerate(zip(window.tolist(), picks.tolist(), strict=True)):
            right = 0
            while right + 1 < count and nodes[right + 1] == said[right]:
                right += 1
            wanted = (right, right + 1, list(range(right + 1)), right, said[right]) if count else (0, 0, [], 0, 0)
            path = wanted[2] + [-1] * (width - len(wanted[2]))
            tokens = [*nodes[1 : right + 1], said[right], *[0] * (width - right - 1)] if count else [0] * width
            got = tuple(field[b].tolist() for field in answer)
            assert got == (wanted[0], wanted[1], path, *wanted[3:], wanted[0], wanted[4], tokens)


def test_every_component_has_a_declared_width() -> None:
    for activation, state in ((torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16), (FP64, FP64)):
        declared, kinds = PLAIN.rounds(activation, state), PLAIN.types(activation, state)
        assert set(declared) == set(COMPONENTS)
        assert declared["state"] == kinds.state == state
        assert declared["conv"] == kinds.conv == declared["hidden"] == kinds.hidden == kinds.kv == activation
        wide = torch.float64 if activation == FP64 else torch.float32
        assert {declared[c] for c in ("q", "k", "v", "log_decay", "beta", "logits")} == {wide}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_case_is_the_same_every_time_and_touches_only_what_it_may(case: Case) -> None:
    assert agree(case, serve(PLAIN, case), serve(PLAIN, case)) == []


@pytest.mark.gpu
def test_gpu_agrees_with_the_cpu() -> None:
    assert [line for case in CASES for line in agree(case, serve(PLAIN, case), serve(PLAIN, case, "cuda"))] == []
