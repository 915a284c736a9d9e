"""The plain ops against the reference, and what the op set declares: its widths, new results, and what it may write.

Leaves out: memory of conv, gdn and attend (`test_ops_plain_memory.py`).
"""

import itertools
from typing import Any

import pytest
import torch

from instep import kit
from instep.kit.cases import CASES, EXACT_ROWS, ROWS, strays
from instep.kit.cases.case import Case, serve
from instep.kit.expected_results import COMPUTED
from instep_optimized.ops.op_protocols import ExpertWeights
from instep_optimized.ops.plain import PLAIN
from instep_reference.contract.place_names import COMPONENTS, Place
from support.independent.op_agreement import agree
from support.running.covering import WHOLE

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


@pytest.mark.parametrize("op", [
    pytest.param(op, marks=WHOLE if op in ("moe", "attend", "attend_latents") else ())
    for op in sorted(COMPUTED - {"fused_gdn"})
])  # fmt: skip
def test_every_case_agrees_with_the_reference(op: str) -> None:
    """Engines compare these ops with it in fp64, too (`test_engine_reference.py`)."""
    assert kit.served(kit.op_cases(op, trees=True), PLAIN).must_agree()


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
