"""Explanations by inputs of another row, request or token, each computed again from a few numbers.

Leaves out: memory that an op reads (`test_wrong_memory.py`), and rows of a result (`test_wrong_rows.py`).
"""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import pytest
import torch

from instep.diagnose.mistakes import wrong_inputs
from instep.diagnose.mistakes.wrong_inputs import STREAM
from instep.oracle.single_layer_run import LayerWork
from instep.watch.event_context import RowSpan
from instep_reference.contract.engine import Drafted
from instep_reference.contract.place_names import AFTER_LAYERS, STAGE_LEVEL, Place
from instep_reference.label_ledger import expand
from instep_reference.label_mixing import MASK, mix


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def of_inputs(component: str, own: dict[str, torch.Tensor], **given: Any) -> Any:
    """A finding of request "a". It makes again what has changed."""
    piece = SimpleNamespace(span=SimpleNamespace(start=3, count=2), work=None, own=())
    return SimpleNamespace(**{
        "component": component, "granted": None, "context": SimpleNamespace(), "own": own.get, "piece": piece,
        "finding": SimpleNamespace(place=Place("trunk", 1, component), request="a"), "others": lambda name: (),
        "right": torch.zeros(2, 9), "made": lambda says, changes=None, **work: [SimpleNamespace(
            sentence=says, wrong=changes or work)], **given})  # fmt: skip


def changed(made: Iterable[Any]) -> dict[str, dict[str, Any]]:
    return {one.sentence: {name: x.tolist() for name, x in one.wrong.items()} for one in made}


REPLACED = ("no {0}, but zeros", "{0} twice as large", "half of {0}", "{0} of the opposite sign")


@pytest.mark.parametrize(("component", "marks", "several", "alone"), [
    ("gated", (), ("core", "z"), ()), ("gated", ("out_gate",), ("out_gate", "mixed"), ()),
    ("gated", ("skip",), ("skip", "z"), ()), ("gated", ("out_gate", "skip"), ("skip", "z"), ()),
    ("qkv", (), (), ("normed",)), ("qkv", ("out_gate",), ("in_gate", "x"), ("normed",)),
    ("mixer", (), (), ("gated", "opened", "attended")), ("hidden", (), ("residual", "mlp", "mlp_normed"), ()),
    ("logits", (), (), ()),
])  # fmt: skip
def test_inputs_are_moved_replaced_and_rounded_where_there_are_several(
    component: str, marks: Any, several: Any, alone: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("core", "z", "out_gate", "mixed", "skip", "normed", "in_gate", "x", "gated", "residual", "mlp_normed")
    own = {name: torch.tensor([[1 + 2.0**-20 * at], [4.0]]) for at, name in enumerate(names, 1)
           if name not in ("out_gate", "skip") or name in marks}  # fmt: skip
    monkeypatch.setattr(wrong_inputs, "_moved", lambda case, name, own: [(f"moved {name}", own.flip(0))])
    due = {}
    for name in [name for name in (*several, *alone) if name in own]:
        x = own[name]
        if name in several:
            due |= dict(zip((f"moved {name}", *(says.format(name) for says in REPLACED)),
                            ({name: y.tolist()} for y in (x.flip(0), x * 0, x * 2, x * 0.5, x * -1)), strict=True))
        due |= {f"{name} rounded to {dtype}": {name: [[1.0], [4.0]]} for dtype in ("bfloat16", "float16")}
    found = changed(wrong_inputs.inputs(of_inputs(component, own)))
    assert found == {f"is computed with {says}": rows for says, rows in due.items()}
    assert not [*wrong_inputs.inputs(of_inputs(component, own, piece=None))]


def test_values_that_are_all_one_row_look_like_attention_to_that_row_alone() -> None:
    for component, name, rows, start, said in (
        ("attended", "value", [[1.0], [1.0]], 0, True), ("attended", "value", [[1.0], [2.0]], 0, False),
        ("attended", "value", [[1.0], [1.0]], 1, False), ("attended", "key", [[1.0], [1.0]], 0, False),
        ("gated", "value", [[1.0], [1.0]], 0, False), ("attended", "value", [[1.0]], 0, False),
    ):  # fmt: skip
        case = of_inputs(component, {}, piece=SimpleNamespace(span=SimpleNamespace(start=start)))
        also = wrong_inputs._or_seen_alone(case, name, torch.tensor(rows))
        assert also == ", or sees that row alone" * said
        case.piece = None
        assert not wrong_inputs._or_seen_alone(case, name, torch.tensor(rows))
    own = {"value": torch.tensor([[[1.0]], [[2.0]]])}
    case = of_inputs("attended", own, piece=SimpleNamespace(span=SimpleNamespace(start=0)))
    assert "is computed with the value of the first row for every row, or sees that row alone" in changed(
        wrong_inputs.inputs(case))  # fmt: skip


@pytest.mark.parametrize(("name", "shape"), [("core", (2, 3, 2)), ("core", (7, 6, 1)), ("core", (4, 1, 2)),
                                             ("core", (8, 2)),
                                             ("mlp", (3, 4)), ("mlp", (1, 4)), ("log_decay", (3, 2)),
                                             ("state", (3, 2))])
def test_rows_and_heads_of_an_input_are_moved_by_up_to_four(name: str, shape: Any) -> None:
    """A shift by half of all rows is the same in both directions. Only `core` has heads, in its second axis."""
    own = drawn(*shape)
    rows, due = own.tolist(), list[tuple[str, Any]]()
    for by in range(1, min(4, len(rows) - 1) + 1):
        for step in (by, -by):
            if step < 0 and 2 * by == len(rows):
                continue
            of = "before" if step > 0 else "after"
            due.append((f"the row {of}" if by == 1 else f"the row {by} {of}",
                        [rows[(at - step) % len(rows)] for at in range(len(rows))]))  # fmt: skip
    heads = shape[1] if name == "core" else 1
    due += [(f"another head: head h with that of head (h - {by}) mod {heads}",
             [[row[(head - by) % heads] for head in range(heads)] for row in rows]) for by in range(1, min(heads, 5))]
    if len(rows) > 1:
        due += [("the first row for every row", [rows[0]] * len(rows)), ("the last row for every row",
                                                                         [rows[-1]] * len(rows))]  # fmt: skip
    found = [(says, x.tolist()) for says, x in wrong_inputs._moved(of_inputs("gated", {}), name, own)]
    assert found == [(f"the {name} of {where}", x) for where, x in due]


def test_rows_of_other_requests_are_repeated_and_must_differ() -> None:
    """"b" has fewer rows, "c" more, "d" rows that "a" has, too, and "e" other channels."""
    own, b, c = drawn(3, 2, 2) * torch.tensor([1.0, 0, 1])[:, None, None], drawn(2, 2, 2, seed=1), drawn(
        4, 2, 2, seed=2)  # fmt: skip
    theirs = {"b": b, "c": c, "d": own[[2, 0]] * (1 + 0.9e-5), "e": drawn(3, 2, 1), "f": own[[2, 1]] * (1 + 1.1e-5),
              "g": torch.cat((own[:2], c[:1])), "h": own[[1, 1]]}  # fmt: skip
    case = of_inputs("gated", {}, others=lambda name: [(f"of {who}", x) for who, x in theirs.items()])
    found = dict(wrong_inputs._moved(case, "mlp", own))
    others = {says: x.tolist() for says, x in found.items() if "row" not in says}
    assert others == {"the mlp of b": b[[0, 1, 1]].tolist(), "the mlp of c": c[:3].tolist(),
                      "the mlp of f": theirs["f"][[0, 1, 1]].tolist(), "the mlp of g": theirs["g"].tolist()}


# -- other tensors of the same request --------------------------------------------------------------------


def test_an_input_or_a_result_is_another_tensor_of_the_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """2 rows of a gated norm over `core` and `z`. The layer may read its rows."""
    core, z, v, hidden, earlier = (drawn(2, 3, seed=seed) for seed in range(5))
    narrow = hidden.float().double()
    before = [("the rows that the layer reads", narrow), ("`core`", core), ("`z`", z), ("`v`", v), ("`q`", drawn(2, 1))]
    monkeypatch.setattr(wrong_inputs, "_before", lambda case: before)
    monkeypatch.setattr(wrong_inputs, "_earlier", lambda case: [("`hidden` of layer 0", earlier), ("", drawn(1, 3))])
    work = LayerWork("trunk", 1, hidden.float(), 3, None)
    for reads in (True, False):
        monkeypatch.setattr(wrong_inputs, "_reads_hidden", lambda case, work, reads=reads: reads)
        case = of_inputs("gated", {"core": core, "z": z}, right=torch.zeros(2, 3),
                         piece=SimpleNamespace(span=SimpleNamespace(count=2), work=work))  # fmt: skip
        found = [(one.sentence, one.wrong) for one in wrong_inputs.other_rows(case)]
        due: list[Any] = [(f"is computed with {says} in the place of `{name}`", {name: x}) for name in ("core", "z")
                          for says, x in before[:4] if says != f"`{name}`"]  # fmt: skip
        if reads:
            due += [(f"is computed with {says} in the place of the rows that the layer reads", {"hidden": x})
                    for says, x in (*before[1:4], ("`hidden` of layer 0", earlier))]  # fmt: skip
            due += [(f"is computed with the rows that the layer reads rounded to {said}", {
                "hidden": narrow.to(dtype).double()}) for said, dtype in (("bfloat16", torch.bfloat16), (
                    "float16", torch.float16))]  # fmt: skip
        due += [(f"is {says}", x) for says, x in before[:4]]
        assert [says for says, _ in found] == [says for says, _ in due]
        for (_, one), (_, other) in zip(found, due, strict=True):
            ours, theirs = ({"": x} if isinstance(x, torch.Tensor) else x for x in (one, other))
            assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    for most, tried in ((2, True), (1, False)):
        monkeypatch.setattr(wrong_inputs, "MOST_TOKENS", most)
        assert bool([*wrong_inputs.other_rows(case)]) is tried
    case.piece.work = SimpleNamespace()
    monkeypatch.setattr(wrong_inputs, "_reads_hidden", lambda case, work: 1 / 0)
    monkeypatch.undo()
    case.piece = None
    assert not [*wrong_inputs.other_rows(case)]


def test_another_final_row_is_tried_for_one_row_of_the_draft_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wrong_inputs, "_before", lambda case: ())
    monkeypatch.setattr(wrong_inputs, "_of_another_final_row", lambda case: ["a final row"])
    for component, layer, rows, tried in (("post_normed", STAGE_LEVEL, 1, 1), ("final", STAGE_LEVEL, 1, 0),
                                          ("post_normed", 0, 1, 0), ("post_normed", STAGE_LEVEL, 2, 0)):
        case = of_inputs(component, {}, right=torch.zeros(rows, 2))
        case.finding.place = Place("extend", layer, component)
        assert len([*wrong_inputs.other_rows(case)]) == tried


def test_an_op_reads_the_rows_of_its_layer_if_they_make_its_result_nan() -> None:
    work = LayerWork("trunk", 1, drawn(2, 2), 3, None)
    for made, said in ((lambda x: x + 1, True), (lambda x: torch.cat((x, torch.ones(2, 2))), True),
                       (torch.ones_like, False), (lambda x: None, False)):  # fmt: skip
        case = of_inputs("gated", {}, again=lambda hidden, made=made: made(hidden))
        assert wrong_inputs._reads_hidden(case, work) is said


def test_results_before_a_finding_are_those_of_its_layer() -> None:
    """And the rows that the layer reads, in fp64. The rows of `v` are not shown."""
    names = [("trunk", 0, "q"), ("trunk", 1, "q"), ("trunk", 0, "gated"), ("extend", 0, "q"), ("trunk", 0, "v"),
             ("trunk", 0, "core")]  # fmt: skip
    rows = drawn(2, 2).float()
    for work, first in ((None, []), (LayerWork("trunk", 0, rows, 3, None), [rows.double().tolist()])):
        case = of_inputs("core", {"q": rows, "gated": rows, "core": rows}, piece=SimpleNamespace(
            work=work, own=[Place(*each) for each in names]))  # fmt: skip
        case.finding.place = Place("trunk", 0, "core")
        found = [*wrong_inputs._before(case)]
        assert [says for says, _ in found] == ["the rows that the layer reads"] * len(first) + ["`q`"]
        assert [x.tolist() for _, x in found] == [*first, rows.tolist()]
        assert all(x.dtype == torch.float64 for _, x in found[:-1])


def test_rows_of_the_residual_stream_are_those_of_two_layers_before() -> None:
    stream = (*STREAM, "core")
    places = {Place(stage, layer, name): torch.tensor([[100.0 * layer + at], [0.5]]) for layer in range(-1, 5)
              for at, name in enumerate(stream) for stage in ("trunk", "extend")
              if name != "embedding" or layer == STAGE_LEVEL}  # fmt: skip
    span = RowSpan("a", "decode", 0, 1, 3, 0, 1)
    for layer, before in ((3, (1, 2)), (1, (STAGE_LEVEL, 0)), (0, (STAGE_LEVEL,)), (STAGE_LEVEL, ())):
        case = of_inputs("mixer", {}, piece=SimpleNamespace(span=span), context=SimpleNamespace(
            subject=SimpleNamespace(places=places)))  # fmt: skip
        case.finding.place = Place("trunk", layer, "mixer")
        due = [(f"`{name}`" + ("" if at == STAGE_LEVEL else f" of layer {at}"),
                [[100.0 * at + number]]) for at in before
               for number, name in enumerate(STREAM) if name != "embedding" or at == STAGE_LEVEL]  # fmt: skip
        assert [(says, x.tolist()) for says, x in wrong_inputs._earlier(case)] == due


def test_a_step_of_the_draft_head_continues_from_another_final_row() -> None:
    """Two stages with final rows of "a" and "b"."""
    stages = {"extend": {"a": drawn(1, 2), "b": drawn(2, 2, seed=1)}, "chain.1": {"a": drawn(2, 2, seed=2)}}
    finals = {Place(stage, AFTER_LAYERS, "final"): [*rows.items()] for stage, rows in stages.items()}
    weight = torch.tensor([0.5, -1.0], dtype=torch.float64)
    weights = SimpleNamespace(draft=SimpleNamespace(norm_hidden=weight), config=SimpleNamespace(eps=0.25))
    case = of_inputs("post_normed", {}, weights=weights, everybody=finals.get, context=SimpleNamespace(
        subject=SimpleNamespace(places=[*finals, Place("extend", 0, "normed")])))  # fmt: skip
    made = [*wrong_inputs._of_another_final_row(case)]
    due = [(f"is the norm of `final` of stage {stage}, row {row}" + (f' of request "{name}"' if name != "a" else ""), x)
           for stage, rows in stages.items() for name, several in rows.items() for row, x in enumerate(several)]
    assert [one.sentence for one in made] == [says for says, _ in due]
    for one, (_, x) in zip(made, due, strict=True):
        scale = ((float(x[0]) ** 2 + float(x[1]) ** 2) / 2 + 0.25) ** 0.5
        assert torch.allclose(one.wrong, (x / scale * (1 + weight))[None], rtol=1e-6)
    weights.draft = None
    assert not [*wrong_inputs._of_another_final_row(case)]


# -- embeddings of other tokens ---------------------------------------------------------------------------


def of_tokens(found: Any, right: Any, **given: Any) -> Any:
    case = of_inputs("embedding", {}, found=found, right=right, oracle=object(), **given)
    case.finding.check, case.context.log = "derived", SimpleNamespace(poison=None)
    return case


def test_embeddings_are_those_of_other_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """7 tokens; the table is found with rounding."""
    table = drawn(7, 3)
    monkeypatch.setattr(wrong_inputs, "_own", lambda case: 5)
    weights = SimpleNamespace(embedding=table.float())
    for ours, due, says in (
        ([1, 2], [1, 2], None), ([1, 3], [1, 2], "row 1 is the embedding of token 3; the trace has 2"),
        ([5, 3], [1, 2], "row 0 is the embedding of token 5, the draft head's own pick; the trace has 1, "
                         "row 1 is the embedding of token 3; the trace has 2"),
        ([0, 0, 0, 0, 0, 0], [1, 2, 3, 4, 5, 6], ", ".join(
            f"row {row} is the embedding of token 0; the trace has {row + 1}" for row in range(4)
        ) + ", and 2 more rows"),
        ([0, 0, 0, 0], [1, 2, 3, 4], ", ".join(
            f"row {row} is the embedding of token 0; the trace has {row + 1}" for row in range(4))),
    ):  # fmt: skip
        case = of_tokens(table[ours] * 1.001, table[due].float(), granted=torch.ones(2, 1), weights=weights)
        made = [*wrong_inputs.tokens(case)]
        assert [one.sentence for one in made] == ([] if says is None else [says])
        for one in made:
            assert torch.equal(one.wrong, table.float().double()[ours])
            assert one.tries == 7.0 ** sum(a != b for a, b in zip(ours, due, strict=True))
        for change in ({"component": "normed"}, {"oracle": None}):
            assert not [*wrong_inputs.tokens(SimpleNamespace(**{**vars(case), **change}))]  # type: ignore[arg-type]
    many = torch.arange(20000.0)[:, None]
    case = of_tokens(many[1:73], many[:72], granted=torch.ones(2, 1), weights=SimpleNamespace(embedding=many))
    assert [one.tries for one in wrong_inputs.tokens(case)] == [20000**72]


def test_labels_of_embeddings_are_those_of_other_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vocabulary of 7. Poison is the embedding of the token with the bits of -3.0."""
    monkeypatch.setattr(wrong_inputs, "_own", lambda case: None)
    monkeypatch.setattr(wrong_inputs, "vocab_of", lambda case: 7)
    poison, bits = -3.0, 0xC008 - (1 << 16) << 48
    for ours, due, said in (
        ([3, 2], [1, 2], "row 0 is the embedding of token 3; the trace has 1"), ([1, 2], [1, 2], ""), ([3, 7], [1, 2],
                                                                                                       ""),
        ([1, bits], [1, 2], "row 1 is the embedding of poison (memory that nothing wrote); the trace has 2"),
    ):  # fmt: skip
        own = crc32(b"trunk.1.embedding")
        found, right = (expand([mix(token & MASK, own) for token in tokens], (2,)) for tokens in (ours, due))
        for poisoned in (poison, None):
            case = of_tokens(found, right)
            case.context.log.poison = poisoned
            made = [*wrong_inputs.tokens(case)]
            known = bool(said) and (poisoned is not None or "poison" not in said)
            assert [one.sentence for one in made] == [said] * known
            assert all(torch.equal(one.wrong, found) for one in made)
            case.oracle, case.finding.check = None, "labels"
            assert len([*wrong_inputs.tokens(case)]) == known


def test_a_chain_continues_from_the_own_pick_of_the_draft_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """2 requests with 3 steps; "a" is the second."""
    own = torch.tensor([[10, 11, 12], [20, 21, 22]])
    spans = [RowSpan(name, "draft", at, 1, 3, at, 1) for at, name in enumerate("ba")]
    monkeypatch.setattr(wrong_inputs, "row_spans", lambda context, stage: spans)
    answer = object.__new__(Drafted)
    object.__setattr__(answer, "own", own)
    object.__setattr__(answer, "own_parents", None)
    for stage, request, given, pick in (("chain.1", "a", answer, 20), ("chain.3", "a", answer, 22),
                                        ("chain.3", "b", answer, 12), ("extend", "a", answer, None),
                                        ("chain.1", "c", answer, None), ("chain.1", "a", object(), None)):  # fmt: skip
        case = of_inputs("embedding", {}, context=SimpleNamespace(subject=SimpleNamespace(answer=given)))
        case.finding.place, case.finding.request = Place(stage, STAGE_LEVEL, "embedding"), request
        assert wrong_inputs._own(case) == pick
    object.__setattr__(answer, "own_parents", torch.zeros(1))
    case.context.subject.answer = answer
    assert wrong_inputs._own(case) is None, "of a tree"
