"""How a tensor looks, rows at a wrong stride, ops that round inside, and states of earlier events, computed by hand.

Leaves out: which explanation is printed (`test_explanations.py`), and whole runs (`test_diagnose_planted.py`).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from instep.diagnose.mistakes import rounded_inside, run_history, wrong_strides
from instep.diagnose.mistakes.run_history import RunHistory
from instep.diagnose.mistakes.transformed_tensors import appearance
from instep.oracle.single_layer_run import LayerWork
from instep.watch.memory_changes import pattern
from instep_reference.attention import AttentionMemory
from instep_reference.contract.engine import Commit, Forward, Load, Row, SetNumSteps
from instep_reference.contract.place_names import AFTER_LAYERS, STAGE_LEVEL, Place
from instep_reference.weights import LatentWeights

Tensor = torch.Tensor
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
GENERATOR = torch.Generator().manual_seed(3)


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=GENERATOR, dtype=torch.float64)


def agree(found: Iterable[Any], due: dict[str, Tensor]) -> bool:
    """Whether explanations have these sentences in this order, and these tensors."""
    one = [*found]
    assert [each.sentence for each in one] == [*due]
    return all(each.wrong.shape == right.shape and torch.allclose(each.wrong.to(right), right, equal_nan=True)
               for each, right in zip(one, due.values(), strict=True))  # fmt: skip


# -- how a tensor looks ----------------------------------------------------------------------------------


def look(found: Tensor, right: Tensor, granted: Any = None, poison: float | None = None, component: str = "x") -> Any:
    return SimpleNamespace(component=component, found=found, right=right, granted=granted,
                           context=SimpleNamespace(log=SimpleNamespace(poison=poison)))  # fmt: skip


def test_a_tensor_is_compared_with_simple_changes_of_the_right_one() -> None:
    """Labels, numbers, and three axes or a conv window, which may be transposed. A zero keeps its sign."""
    labels, numbers, cube = torch.arange(6).view(2, 3), drawn(2, 3), drawn(2, 3, 4)
    sums = {f"is {n} times the right value, as if {n} ranks had added theirs": n * labels for n in range(2, 9)}
    times = (("is twice", 2.0), ("is half of", 0.5), ("is the opposite of", -1.0))
    poisoned, granted = "is poison: memory that was never written", torch.zeros(2, 1)
    for case, due in (
        (look(labels, labels), sums), (look(labels, labels, granted), {}),
        (look(labels, labels, poison=2.5), {poisoned: torch.full((2, 3), pattern(2.5, torch.int64))} | sums),
        (look(labels, labels, granted, 2.5), {}),
        *((look(x, x, poison=poison, component=name), {poisoned: torch.full_like(x, 2.5)} if poison else {})
          for x, name in ((numbers, "x"), (cube, "x"), (numbers, "conv")) for poison in (None, 2.5)),
    ):  # fmt: skip
        x = case.right
        if x.is_floating_point():
            due = due | {f"{says} the right value": factor * x for says, factor in times}
        made = {"is all zero": 0 * x} | due
        found = [*appearance(case)]
        turned = found[len(made) :]
        assert agree(found[: len(made)], made)
        if x.dim() == 3 or case.component == "conv":
            assert {one.sentence for one in turned} == {"is transposed"}
            rows, columns = x.shape[-2:]
            for one, way in zip(turned, ("there", "back"), strict=True):
                for part, given in zip(one.wrong.reshape(-1, rows, columns), x.reshape(-1, rows, columns), strict=True):
                    due_rows = (given.T.reshape(rows, columns) if way == "there" else given.reshape(columns, rows).T)
                    assert torch.equal(part, due_rows)
        else:
            assert not turned
    minus = next(iter(appearance(look(torch.tensor([-0.0, 0.0, 3.0]), torch.ones(3))))).wrong
    assert minus.signbit().tolist() == [True, False, False] and not minus.any()


NEAR, OFF = 1 + 2.0**-9, 1 + 2.0**-6  # a number that bfloat16 does not have, and its second next one there


@pytest.mark.parametrize(("rows", "slack", "dtype", "narrow"), [
    ([(NEAR, 1.0)], 0.0, "float32", "bfloat16"),
    ([(NEAR, 1.0)], 0.0, "bfloat16", ""),  # found in bfloat16
    ([(NEAR, NEAR)], 0.0, "float32", ""),  # nothing differs
    ([(1.5, 1.5 + 2.0**-7)], 0.0, "float32", ""),  # right numbers that are narrow, too
    ([(NEAR, 1.0), (NEAR, NEAR + 2.0**-20)], 0.0, "float32", ""),  # one that differs and is not narrow
    ([(NEAR, 1.0), (NEAR, NEAR)], 0.0, "float32", "bfloat16"),
    ([(NEAR, 1.0), (1.5, 1.5 + 2.0**-7)], 0.0, "float32", "bfloat16"),
    ([(NEAR, 1.0), (1.5, 4.0)], 0.0, "float32", ""),  # one is far
    ([(NEAR, OFF), (2.0, 2.0)], OFF - NEAR - 2.0**-7 * NEAR, "float32", "bfloat16"),  # at the limit
    ([(NEAR, OFF), (2.0, 2.0)], OFF - NEAR - 2.0**-7 * NEAR - 2.0**-40, "float32", ""),  # and after it
    ([(NEAR, 1.0), (NEAR, torch.nan)], 0.0, "float32", ""),
    ([(1 + 2.0**-12, 1.0)], 0.0, "float32", "bfloat16 float16"),
    ([(1 + 2.0**-12, 1 + 2.0**-10)], 0.0, "float32", "float16"),
    ([(1 + 2.0**-12, 1 + 2.0**-10)], 0.0, "float16", ""),
    ([(NEAR, 1.0)], 0.0, "float16", ""),  # a dtype of as many bits
])  # fmt: skip
def test_narrow_numbers_are_near_right_ones_that_are_not(
    rows: list[tuple[float, float]], slack: float, dtype: str, narrow: str
) -> None:
    """Cells of 8 columns with one number each, right and found, that the dtype does not round. The largest is 2."""
    right, found = (torch.full((len(rows), 8), 2.0, dtype=torch.float64) for _ in range(2))
    for row, (due, is_there) in enumerate(rows):
        right[row, 3], found[row, 3] = due, is_there
    granted = torch.tensor([[9.0, 9.0], [slack / 4, slack / 2]], dtype=torch.float64)
    case = look(found.to(getattr(torch, dtype)), right, granted)
    says = {one.sentence: one.wrong for one in appearance(case) if "stored" in one.sentence}
    assert [*says] == [f"as if stored in {name}" for name in narrow.split()]
    assert all(torch.equal(wrong, found) for wrong in says.values())


# -- rows at a wrong stride ------------------------------------------------------------------------------


def commit(**changed: Any) -> Any:
    """A draft head's rows of request "b" after a commit of nodes 0 and 2. Rows of three requests are 3, 4 and 4."""
    spans = [SimpleNamespace(request=name, begin=begin, count=count)
             for name, begin, count in (("a", 0, 3), ("b", 3, 4), ("c", 7, 4))]  # fmt: skip
    final = drawn(11, 2)
    given = {
        "event": Commit(("b",)), "place": Place("extend", STAGE_LEVEL, "post_normed"), "request": "b", "nodes": (0, 2),
        "spans": spans, "final": final, "taken": [3, 5], "draft": SimpleNamespace(norm_hidden=2.0), "regions": (),
        "forward": True, "oracle": True, "piece": True, "slots": {"a": 1, "b": 2}} | changed  # fmt: skip
    places = {} if given["final"] is None else {Place("trunk", AFTER_LAYERS, "final"): final.float()}
    forward = SimpleNamespace(subject=SimpleNamespace(places=places), spans=given["spans"])
    return SimpleNamespace(
        history=SimpleNamespace(forward=forward if given["forward"] else None),
        finding=SimpleNamespace(place=given["place"], request=given["request"]), oracle=given["oracle"] or None,
        context=SimpleNamespace(event=given["event"], regions=given["regions"],
                                expected=SimpleNamespace(slots_after=given["slots"])),
        piece=SimpleNamespace(span=SimpleNamespace(nodes=given["nodes"])) if given["piece"] else None,
        found=3 * final[given["taken"]].float(),
        weights=SimpleNamespace(draft=given["draft"], config=SimpleNamespace(drafter=lambda: SimpleNamespace(eps=1.0))))


def test_rows_of_the_last_verify_are_those_at_another_stride_or_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """The norm is a product with 3. Request "b" is row 1, request "c" row 2."""
    monkeypatch.setattr(wrong_strides, "rms_norm", lambda rows, weight, eps: (weight + eps) * rows.double())
    monkeypatch.setattr(wrong_strides, "row_spans", lambda context, stage: context.spans if stage == "trunk" else [])
    stride = "reads the verified rows with a wrong stride: it takes row r, step t from row r * {} + t"
    row = "the target's row {} of request \"{}\"".format
    four = ("row 0 reads {}, not {}, row 2 reads {}, not {}, row 3 reads {}, not {}, row 4 reads {}, not {}, "
            "and 1 more row").format  # fmt: skip
    for changed, says in (
        ({}, ""), ({"taken": [2, 4]}, stride.format(2)), ({"taken": [0, 2]}, stride.format(0)),
        ({"taken": [1, 5]}, f"row 0 reads {row(1, 'a')}, not {row(0, 'b')}"),
        ({"taken": [3, 7]}, f"row 1 reads {row(0, 'c')}, not {row(2, 'b')}"),
        ({"request": "c", "taken": [6, 8]}, stride.format(3)), ({"request": "c", "taken": [7, 9]}, ""),
        ({"request": "c", "taken": [5, 7]}, f"row 0 reads {row(2, 'b')}, not {row(0, 'c')}, "
                                            f"row 1 reads {row(0, 'c')}, not {row(2, 'c')}"),
        ({"request": "a", "taken": [1, 3]}, f"row 0 reads {row(1, 'a')}, not {row(0, 'a')}, "
                                            f"row 1 reads {row(0, 'b')}, not {row(2, 'a')}"),
        ({"nodes": (1, 2), "taken": [0, 1]}, f"row 0 reads {row(0, 'a')}, not {row(1, 'b')}, "
                                             f"row 1 reads {row(1, 'a')}, not {row(2, 'b')}"),
        ({"nodes": (0, 1, 2, 3, 2, 1), "taken": [10, 4, 9, 9, 9, 9]}, four(
            row(3, "c"), row(0, "b"), row(2, "c"), row(2, "b"), row(2, "c"), row(3, "b"), row(2, "c"), row(2, "b"))),
        *((change | {"taken": [2, 4]}, "") for change in (
            {"event": SetNumSteps(1)}, {"place": Place("extend", STAGE_LEVEL, "normed")}, {"forward": False},
            {"place": Place("extend", 0, "post_normed")}, {"oracle": False}, {"piece": False}, {"nodes": ()},
            {"draft": None}, {"final": None}, {"request": "d"})),
    ):  # fmt: skip
        case = commit(**changed)
        found = [*wrong_strides.addresses(case)]
        assert agree(found, {says: case.found.double()} if says else {})
        assert [one.tries for one in found] == [11.0 ** len(case.found)] * len(found)


@pytest.mark.parametrize(("slot", "nodes", "rows"), [
    (2, (0, 2), {1: [2, 4], 2: [4, 6], 4: [8, 10]}), (1, (3, 1), {1: [4, 2], 2: [5, 3], 4: [7, 5]}),
    (5, (0,), {1: [5], 2: [10]}), (5, (0, 1), {1: [5, 6], 2: [10, 11]}), (5, (1, 2), {1: [6, 7]}),
    (3, (3,), {1: [6], 2: [9]}),
    (0, (0, 2), {}), (12, (0,), {})])  # fmt: skip
def test_rows_of_a_pool_are_read_at_every_width(
    slot: int, nodes: tuple[int, ...], rows: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """4 slots of 4 steps, which are 3 steps apart, one step being 5 numbers of which 2 are read, after 7 numbers.

    The memory has 12 steps after its begin. Other regions are of pages, of other axes or channels, or complex.
    """
    monkeypatch.setattr(wrong_strides, "rms_norm", lambda rows, weight, eps: (weight + eps) * rows.double())
    memory = torch.arange(7.0 + 12 * 5 + 4)
    pool = memory.as_strided((3, 4, 2), (15, 5, 1), 7)
    regions = [SimpleNamespace(units=units, by=by, name=name) for units, by, name in (
        (pool, "page", "pages"), (pool[0], "slot", "a slot"), (pool[None], "slot", "several"),
        (pool[..., :1], "slot", "narrow"), (torch.complex(pool, pool), "slot", "complex"),
        (pool, "slot", "final rows"))]
    case = commit(regions=regions, slots={"b": slot})
    says = "reads the verified rows with a wrong stride: it takes slot r, step t from row r * {} + t, but slots of"
    due = {f"{says.format(width)} final rows are 3 rows apart": torch.stack(
        [3 * memory[7 + 5 * row :][:2] for row in taken]) for width, taken in rows.items()}  # fmt: skip
    assert agree(wrong_strides._by_stride(case, 2.0, nodes), due)
    case.finding.request = None
    assert not [*wrong_strides._by_stride(case, 2.0, nodes)]


# -- ops that round inside -------------------------------------------------------------------------------


def attended(query: Tensor, keys: Tensor, values: Tensor, scores: Any = None, chances: Any = None,
             causal: bool = True) -> Tensor:  # fmt: skip
    """Attention of one head of one row at a time."""
    out = torch.zeros(*query.shape[:2], values.shape[2], dtype=torch.float64)
    for row in range(len(query)):
        seen = len(keys) - len(query) + row + 1 if causal else len(keys)
        for head in range(query.shape[1]):
            group = head // (query.shape[1] // keys.shape[1])
            score = torch.stack([keys[at, group] @ query[row, head] for at in range(seen)]) / query.shape[2] ** 0.5
            weights = (score if scores is None else score.to(scores).double()).exp()
            weights = weights / weights.sum()
            weights = weights if chances is None else weights.to(chances).double()
            out[row, head] = weights @ values[:seen, group]
    return out


def test_attention_may_round_inside_or_see_other_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows after one, four heads that share two keys. Keys of latents are expanded to all heads."""
    query, key, value = drawn(2, 4, 3), drawn(2, 2, 3), drawn(2, 2, 5)
    before = AttentionMemory(drawn(1, 2, 3).float(), drawn(1, 2, 5).float())
    latents = SimpleNamespace(mixer=object.__new__(LatentWeights))
    object.__setattr__(latents.mixer, "up", torch.tensor(2.0))
    monkeypatch.setattr(rounded_inside, "layer_of", lambda case: case.layer)
    monkeypatch.setattr(rounded_inside.mla, "expand", lambda config, up, memory: (
        config * memory.keys.repeat_interleave(2, 1), up * memory.values.repeat_interleave(2, 1)))  # fmt: skip
    for memory, layer in ((before, None), (before, SimpleNamespace(mixer=None)), (None, None), (before, latents)):
        work = LayerWork("trunk", 0, torch.zeros(1, 1), 0, memory)
        keys, values = key, value
        if memory is not None:
            keys, values = torch.cat([before.keys.double(), key]), torch.cat([before.values.double(), value])
        due = dict[str, Tensor]()
        if layer is latents:
            keys, values = (3 * keys)[:, [0, 0, 1, 1]], (2 * values)[:, [0, 0, 1, 1]]
            due["values are those of the token before"] = attended(query, keys, values[[2, 0, 1]])
            due["keys are those of the token before"] = attended(query, keys[[2, 0, 1]], values)
        for name, dtype in DTYPES.items():
            due |= {f"its scores are rounded to {name}": attended(query, keys, values, scores=dtype),
                    f"its attention weights are rounded to {name}": attended(query, keys, values, chances=dtype),
                    f"its keys are rounded to {name}": attended(query, keys.to(dtype).double(), values),
                    f"its values are rounded to {name}": attended(query, keys, values.to(dtype).double())}  # fmt: skip
        due["sees the rows after its own, too"] = attended(query, keys, values, causal=False)
        rows = {"query": query, "key": key, "value": value}
        case = SimpleNamespace(component="attended", piece=SimpleNamespace(work=work), own=rows.get, layer=layer,
                               weights=SimpleNamespace(config=3.0))  # fmt: skip
        assert agree(rounded_inside.shares(case), due)
    lacking = [rows | {name: None} for name in rows]
    for name, changed in (("component", "mixer"), ("piece", None), ("piece", SimpleNamespace(work=None)),
                          *(("own", some.get) for some in lacking)):  # fmt: skip
        assert not [*rounded_inside.shares(SimpleNamespace(**vars(case) | {name: changed}))]


@dataclass(frozen=True)
class Made:
    """Weights of a model, or of its draft head."""

    fc: Tensor
    draft: "Made | None" = None


@pytest.mark.parametrize(("component", "names"), [
    ("qkv", ["normed"]), ("value", ["normed"]), ("mixer", ["gated", "attended"]), ("fused", ["joined"]),
    ("mlp", ["post_normed", "residual"]), ("core", [])])  # fmt: skip
def test_products_may_round_weights_rows_and_results(
    component: str, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights are those of the layer, or of the draft head without one. The product has both as its rows."""
    rows, layer = {name: drawn(2) for name in names}, Made(drawn(2))
    monkeypatch.setattr(rounded_inside, "layer_of", lambda case: case.layer)
    monkeypatch.setattr(rounded_inside, "in_place", lambda weights, case, layer: layer)
    for mine, draft in ((layer, None), (None, Made(drawn(2))), (None, None)):
        weights = Made(drawn(2), draft)
        case = SimpleNamespace(component=component, piece=object(), own=rows.get, layer=mine, weights=weights,
                               found=drawn(2).float(), again=lambda changes, weights: (
                                   torch.stack([*(rows | changes).values(), (weights.draft or weights).fc])))
        due = dict[str, list[Tensor]]()
        used = (mine or draft or weights).fc
        for name in names:
            for said, dtype in DTYPES.items():
                fc = used if (mine or draft) is None else used.to(dtype).double()
                for what, changed in (("its weight", {}), ("both operands", {name: rows[name].to(dtype).double()})):
                    wrong = torch.stack([*(rows | changed).values(), fc])
                    says = f"is multiplied with {what} rounded to {said}"
                    due.setdefault(says, []).append(wrong)
                    due.setdefault(f"{says}, and so is the result", []).append(wrong.float().to(dtype).double())
        found = [*rounded_inside.products(case)]
        assert [one.sentence for one in found] == [*due] * len(names)
        assert all(torch.equal(one.wrong, due[one.sentence].pop(0)) for one in found)
        assert not [*rounded_inside.products(SimpleNamespace(**vars(case) | {"piece": None}))]
        assert not [*rounded_inside.products(SimpleNamespace(**vars(case) | {"again": lambda changes, weights: None}))]


# -- states of earlier events ----------------------------------------------------------------------------


def test_a_history_has_the_last_states_that_an_event_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """States that a verify leaves are those of before. The state right before an event is not an earlier one."""
    monkeypatch.setattr(run_history, "told", lambda context: context.index)
    history, before = RunHistory(None), dict[str, str]()
    prefill, verify, decode = (Row(name, kind) for name, kind in (("a", "prefill"), ("a", "verify"), ("b", "decode")))
    for index, (event, after) in enumerate((
        (Forward((prefill, decode)), {"a": "a0", "b": "b0"}), (Forward((verify, decode)), {"a": "a1", "b": "b1"}),
        (Commit(("a",)), {"a": "a2", "b": "b2"}), (SetNumSteps(1), {"a": "a3", "b": "b3"}),
        (Load("b", "kept"), {"a": "a4", "b": "b4"}), (Commit(("a", "c")), {"a": "a5", "b": "b5"}),
        *((Commit(("a",)), {"a": f"a{n}"}) for n in (6, 7, 8)),
    )):  # fmt: skip
        context: Any = SimpleNamespace(index=index, event=event, subject=SimpleNamespace(before=before, after=after))
        assert history(context) == () and history.told == [*range(index + 1)] and history.steps is None
        assert history.forward is None or history.forward.index == min(index, 1)
        before = after
        if index == 5:
            assert [*history.of("b", 5)] == [("after event 1", "b1"), ("after event 0", "b0")]
            assert [*history.of("b", 4)] == [("after event 0", "b0")] and not [*history.of("b", 1)]
            assert [*history.of("a", 5)] == [("after event 0", "a0")]
            assert [*history.of("a", 6)] == [("after event 2", "a2"), ("after event 0", "a0")]
    assert [*history.of("a", 9)] == [(f"after event {n}", f"a{n}") for n in (7, 6, 5)]
    assert not [*history.of("b", 9)] and not [*history.of("c", 9)]
    assert RunHistory({"num_steps": 3}).steps == (3, None, None, 0)
