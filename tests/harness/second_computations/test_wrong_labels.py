"""Labels of wrong rows, tokens and chains, each mixed again by hand.

Leaves out: the labels of a whole run (`test_explanations.py`).
"""

from collections.abc import Iterable, Sequence
from itertools import product
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import pytest
import torch

from instep.diagnose.mistakes import wrong_labels
from instep.diagnose.mistakes.wrong_labels import NAMES, Source
from instep.oracle.miscounted_states import FROM_ZERO
from instep.watch.event_context import RowSpan
from instep.watch.memory_changes import pattern
from instep_reference.contract.place_names import AFTER_LAYERS, STAGE_LEVEL, Place
from instep_reference.label_ledger import expand
from instep_reference.label_mixing import MASK, mix

NORMED = Place("trunk", 1, "normed")
LARGE = (1 << 63) + 5  # a label with the sign bit


def span(request: str = "a", begin: int = 0, count: int = 2, start: int = 3) -> RowSpan:
    return RowSpan(request, "prefill", begin, count, start, begin, count)


def told(made: Iterable[Any]) -> list[tuple[str, list[int]]]:
    found = [(one.sentence, wrong_labels.heads(one.wrong), one.wrong) for one in made]
    assert all(torch.equal(rows, expand(labels, (2,))) for _, labels, rows in found)
    return [(says, labels) for says, labels, _ in found]


def code(name: str) -> int:
    return crc32(name.encode())


# -- one token, one window, one chain ----------------------------------------------------------------------


def test_families_explain_labels_of_their_component_and_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(wrong_labels.FAMILIES, "mixed", lambda case, span: [span.begin])  # type: ignore[arg-type]
    monkeypatch.setattr(wrong_labels, "row_spans", lambda context, stage: [span("b"), span("a", 2)][: context])
    for component, granted, check, spans, found in (
        ("mixed", None, "labels", 2, [2]), ("normed", None, "labels", 2, []), ("mixed", object(), "labels", 2, []),
        ("mixed", None, "bits", 2, []), ("mixed", None, "labels", 1, []),
    ):  # fmt: skip
        case: Any = SimpleNamespace(component=component, granted=granted, context=spans, finding=SimpleNamespace(
            check=check, request="a", place=Place("trunk", 1, component)))  # fmt: skip
        assert [*wrong_labels.labels(case)] == found


def test_a_vocabulary_is_that_of_logits_and_has_a_label_for_each_token() -> None:
    logits, other = (Place("trunk", layer, name) for layer, name in ((AFTER_LAYERS, "logits"), (0, "hidden")))
    for places, vocab in (({logits: torch.zeros(2, 7), other: torch.zeros(2, 9)}, 7),
                          ({other: torch.zeros(2, 9)}, 65536),
                          ({logits: torch.zeros(2, 7), logits._replace(stage="extend"): torch.zeros(1, 8)}, 8)):
        case: Any = SimpleNamespace(context=SimpleNamespace(truth=SimpleNamespace(places=places)))
        assert wrong_labels.vocab_of(case) == vocab
    for stage, family in (("trunk", "trunk"), ("extend", "draft"), ("chain.1", "draft")):
        case = SimpleNamespace(finding=SimpleNamespace(place=Place(stage, STAGE_LEVEL, "embedding")))
        own = code(f"{family}.-1.embedding")
        assert wrong_labels.embedded(case, 3) == {mix(0, own): 0, mix(1, own): 1, mix(2, own): 2}


def test_rows_have_the_label_of_their_first_element() -> None:
    rows = torch.tensor([[[3], [9]], [[-1], [2]]])
    assert wrong_labels.heads(rows) == [3, MASK] and wrong_labels.heads(torch.empty(0, 2)) == []


def test_a_mixture_is_undone() -> None:
    for first, second in product((0, 1, 12345, LARGE, MASK), repeat=2):
        assert wrong_labels.undone(mix(first, second), second) == first


class Run:
    """Request "a" in layer 1, after 3 tokens unless begun: memory before, of earlier rounds and of others."""

    def __init__(self, component: str, **parts: torch.Tensor) -> None:
        self.parts, self.width = parts, 2
        self.before = {"a": self.memory([30, 31], 22, 3), "b": self.memory([40, 41], 44, 1),
                       "c": self.memory([0, 0], 0, 0)}
        self.past = [("after event 2", self.memory([50, 51], 55, 2))]
        self.context = SimpleNamespace(index=4, earlier=SimpleNamespace(forward="forward"), truth=SimpleNamespace(
            before=self.before, places=dict.fromkeys(Place("trunk", 1, name) for name in parts)))  # fmt: skip
        self.case: Any = SimpleNamespace(
            finding=SimpleNamespace(place=Place("trunk", 1, component), request="a"), context=self.context,
            right=torch.zeros(2, 2, dtype=torch.int64), history=SimpleNamespace(
                of=lambda name, event: self.past if (name, event) == ("a", 4) else ()))  # fmt: skip

    def memory(self, window: Sequence[int], chain: int, length: int) -> Any:
        """A window of 2 columns with 3 channels, and a state of 2 elements."""
        return SimpleNamespace(conv={1: torch.tensor([[w + 900 * n for w in window] for n in range(3)])}, length=length,
                               state={1: torch.tensor([[chain, 999]])})  # fmt: skip


SOURCES = ("as it was after event 2", 'of request "b"')


def test_a_conv_reads_another_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """2 rows of a conv over 3; the windows are 0, that of an earlier round, and that of request "b"."""
    fed = torch.tensor([[5, 905], [6, 906]])
    monkeypatch.setattr(wrong_labels, "rows", lambda side, place, span: {"qkv": fed}.get(place.component))
    run, own = Run("mixed"), code("trunk.1.mixed")
    for start in (3, 0):
        windows = {FROM_ZERO.sentence: (0, 0)} if start else {}
        windows |= {f"reads the window {whose}": window for whose, window in zip(SOURCES, ((50, 51), (40, 41)),
                                                                                 strict=True)}
        due = [(says, [mix(mix(mix(own, a), b), 5), mix(mix(mix(own, b), 5), 6)]) for says, (a, b) in windows.items()]
        assert told(wrong_labels._mixed(run.case, span(start=start))) == due
    run.before["a"].conv.clear()
    assert not [*wrong_labels._mixed(run.case, span())]
    run.before["a"].conv[1] = torch.zeros(2, 2)
    monkeypatch.setattr(wrong_labels, "rows", lambda side, place, span: None)
    assert not [*wrong_labels._mixed(run.case, span())]


@pytest.mark.parametrize("component", ["core", "update"])
@pytest.mark.parametrize("gate", ["beta", "write"])
def test_rows_depend_on_another_chain_of_tokens(component: str, gate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """2 tokens. The chain before them is 22; 11, 22 and 33 are those of the last window, of which one was accepted."""
    names = ("k", "v", "log_decay", gate, "q")
    parts = {name: torch.tensor([[7 + at, 1], [LARGE - MASK - 1 + at, 1]]) for at, name in enumerate(names)}
    monkeypatch.setattr(wrong_labels, "rows", lambda side, place, span: parts.get(place.component))
    nodes = list[int]()
    monkeypatch.setattr(wrong_labels, "states_of_window", lambda forward, name, layer: nodes if (
        forward, name, layer) == ("forward", "a", 1) else [])  # fmt: skip
    run, recalls = Run(component, **parts), gate == "beta"

    def rows(chain: int, recalls: bool) -> list[int]:
        made = []
        for row in range(2):
            k, v, decay, written, q = (int(parts[name][row, 0]) & MASK for name in names)
            inside = mix(mix(mix(mix(chain if recalls else 0, k), v), decay), written)
            chain = mix(chain, mix(mix(k, decay), mix(inside, code("trunk.1.update"))))
            made.append(mix(mix(chain, q), code("trunk.1.core")) if component == "core" else mix(
                inside, code("trunk.1.update")))  # fmt: skip
        return made

    family, rule = wrong_labels.FAMILIES[component], NAMES["nothing-recalled" if recalls else "recalled"]
    for start, window, last in ((3, [11, 22, 33], [(0, 11), (2, 33)]), (3, [22, 33], [(1, 33)]), (3, [11, 33], []),
                                (0, [], [])):  # fmt: skip
        nodes[:] = window
        due = [(FROM_ZERO.sentence, rows(0, recalls))] * bool(start)
        due += [(f"depends on the state {whose}", rows(chain, recalls)) for whose, chain in zip(
            SOURCES, (55, 44), strict=True)]  # fmt: skip
        due.append((rule.sentence, rows(22 if start else 0, not recalls)))
        taken = f"{window.index(22)} {'was' if window.index(22) == 1 else 'were'} accepted" if 22 in window else ""
        due += [(f"depends on the state after {count} token{'' if count == 1 else 's'} of the last window; {taken}",
                 rows(chain, recalls)) for count, chain in last]  # fmt: skip
        made = [*family(run.case, span(start=start))]
        assert told(made) == due and [one.name for one in made if one.name] == [rule.name]
    nodes[:], mine = [22, 33], run.before.pop("a")
    assert [says for says, _ in told(family(run.case, span()))][-1] == rule.sentence, "the request is new"
    assert told(family(run.case, span()))[-1][1] == rows(0, not recalls)
    run.before["a"] = mine
    del parts["v"]
    assert not [*family(run.case, span())]


# -- parts of a mixture ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("place", "whose", "when", "says"), [
    (("trunk", 1, "core"), "a", "", "`core`, row 3"), (("trunk", 0, "core"), "a", "", "`core` of layer 0, row 3"),
    (("trunk", 1, "core"), "b", " in the forward before", '`core`, row 3 of request "b" in the forward before'),
    (("extend", 1, "core"), "a", "", "`core` of layer 1 of stage extend, row 3"),
    (("trunk", STAGE_LEVEL, "embedding"), "a", "", "`embedding`, row 3"),
    (("trunk", AFTER_LAYERS, "final"), "a", "", "`final`, row 3"),
    (("extend", STAGE_LEVEL, "embedding"), "a", "", "`embedding` of stage extend, row 3"),
])  # fmt: skip
def test_a_source_has_names_where_it_differs(place: Any, whose: str, when: str, says: str) -> None:
    assert Source(Place(*place), whose, 3, when).told(NORMED, "a") == says


HIDDEN, MIXER, RESIDUAL = Place("trunk", 0, "hidden"), Place("trunk", 1, "mixer"), Place("trunk", 1, "residual")
KNOWN: dict[int, list[Source | str]] = {
    0: ["zeros"], 10: [Source(HIDDEN, "a", 0)], 11: [Source(HIDDEN, "a", 1)], 12: [Source(HIDDEN, "b", 0)],
    20: [Source(MIXER, "a", 0)], 21: [Source(MIXER, "a", 1)], 30: [Source(RESIDUAL._replace(layer=0), "a", 0)],
    31: [Source(RESIDUAL._replace(layer=3), "a", 0)], 40: [Source(HIDDEN, "a", 2), Source(HIDDEN, "a", 3)],
    1: ["position 1"], 2: ["position 2"],
}  # fmt: skip


def residual(one: int, other: int | None, layer: int = 1) -> int:
    own = code(f"trunk.{layer}.residual")
    return mix(one if other is None else mix(one, other), own)


@pytest.mark.parametrize(("found", "due", "says"), [
    ((11, 20), (10, 20), "is made from `hidden` of layer 0, row 1, not from `hidden` of layer 0, row 0"),
    ((10, 21), (10, 20), "is made from `mixer`, row 1, not from `mixer`, row 0"),
    ((12, 20), (10, 20), 'is made from `hidden` of layer 0, row 0 of request "b", not from `hidden` of layer 0, row 0'),
    ((0, 20), (10, 20), "is made from zeros, not from `hidden` of layer 0, row 0"),
    ((10, 2), (10, 1), "is made from position 2, not from position 1"),
    ((10, 0), (10, 1), "is made from position 0, not from position 1"),
    ((10, 2), (10, 0), "is made from position 2, not from position 0"),
    ((11, None), (10, None), "is made from `hidden` of layer 0, row 1, not from `hidden` of layer 0, row 0"),
    ((11, 21), (10, 20), ""), ((20, 10), (10, 20), ""), ((10, None), (10, 20), ""), ((99, 20), (10, 20), ""),
    ((11, 20), (99, 20), ""), ((40, 20), (10, 20), ""), ((11, 20), (40, 20), ""),
    ((10, 20, 0), (10, 20), "is made with the weights of layer 0, not of layer 1"),
    ((10, 20, 3), (10, 20), "is made with the weights of layer 3, not of layer 1"),
    ((11, 20, 0), (10, 20), ""), ((10, 20, 2), (10, 20), ""),
])  # fmt: skip
def test_a_mixture_has_one_other_part_or_the_weights_of_another_layer(found: Any, due: Any, says: str) -> None:
    assert wrong_labels._told(residual(*found), residual(*due), RESIDUAL, "a", KNOWN) == says


def test_places_without_a_layer_have_no_other_layers() -> None:
    assert [place.layer for place in wrong_labels._layers(RESIDUAL, KNOWN)] == [1, 0, 3]
    for layer in (STAGE_LEVEL, AFTER_LAYERS):
        assert [*wrong_labels._layers(RESIDUAL._replace(layer=layer), KNOWN)] == [RESIDUAL._replace(layer=layer)]
    assert [*wrong_labels._layers(RESIDUAL._replace(stage="extend"), KNOWN)] == [RESIDUAL._replace(stage="extend")]


def test_a_label_of_several_rows_is_that_of_the_likeliest() -> None:
    """The place of the right row decides, then this event, then the request, if one row alone remains."""
    late = " in the forward before"
    of = {name: Source(*given) for name, given in {
        "a0": (HIDDEN, "a", 0), "a1": (HIDDEN, "a", 1), "b0": (HIDDEN, "b", 0), "late": (HIDDEN, "a", 0, late),
        "later": (HIDDEN, "b", 1, late), "mixer": (MIXER, "a", 0)}.items()}  # fmt: skip
    for several, right, source in (
        (["a0"], ["a1"], "a0"), (["mixer", "b0"], ["a1"], "b0"), (["mixer"], ["a1"], "mixer"),
        (["a0", "b0"], ["a1"], "a0"),
        (["b0", "late"], ["a1"], "b0"), (["late", "later"], ["a1"], "late"), (["a0", "a1"], ["a0"], None),
        (["later"], ["a0"], "later"), (["a0", "mixer"], ["mixer"], "mixer"), (["a0", "mixer"], ["zeros"], None),
        (["zeros"], ["a0"], "zeros"), (["b0"], ["zeros"], "b0"),
    ):  # fmt: skip
        known: Any = {5: [of.get(name, name) for name in several], 6: [of.get(name, name) for name in right]}
        assert wrong_labels._source(5, (5, 6), known, "a") == (None if source is None else of.get(source, source))


@pytest.mark.parametrize(("said", "says"), [
    ("xx", "rows 0, 2 are made from x"), ("xy", "row 0 is made from x; row 2 is made from y"),
    ("x", "row 2 is made from x"),
    ("xxx", "rows 0, 1, .. are made from x"), ("xxy", "row 0 is made from x; row 1 is made from x, and 1 more row"),
    ("xyxy", "row 0 is made from x; row 1 is made from y, and 2 more rows"), ("x?", None),
])  # fmt: skip
def test_rows_that_were_made_alike_are_named_together(
    said: str, says: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """5 rows of 2 elements. said: what the wrong rows are made from; two are the first and the third."""
    wrong = {1: [2], 2: [0, 2], 3: [0, 1, 2], 4: [0, 1, 2, 3]}[len(said)]
    labels = [20 + row if row in wrong else row + 5 for row in range(5)]
    right, found = expand([*range(5, 10)], (2,)), expand(labels, (2,))
    monkeypatch.setattr(wrong_labels, "_known", lambda case: {})
    made = {(20 + row, row + 5): "" if of == "?" else f"is made from {of}" for row, of in zip(wrong, said, strict=True)}
    monkeypatch.setattr(wrong_labels, "_told", lambda found, due, *given: made[found, due] if given == (
        NORMED, "a", {}) else "")  # fmt: skip
    finding = SimpleNamespace(check="labels", place=NORMED, request="a")
    case: Any = SimpleNamespace(granted=None, component="normed", right=right, found=found, finding=finding)
    expected = [(says, labels)] if says else []
    assert told(wrong_labels.made_from(case)) == expected
    for most, tried in ((len(wrong), True), (len(wrong) - 1, False)):
        monkeypatch.setattr(wrong_labels, "MOST", most)
        assert told(wrong_labels.made_from(case)) == expected * tried
    monkeypatch.setattr(wrong_labels, "MOST", 64)
    torn = found.clone()
    torn[4, 1] += 1  # of a right row
    for changed in ({"granted": object()}, {"component": "conv"}, {"finding": SimpleNamespace(**{
            **vars(finding), "check": "bits"})}, {"found": right}, {"found": torn},
            {"right": right[:, 0]}):  # fmt: skip
        assert not [*wrong_labels.made_from(SimpleNamespace(**{**vars(case), **changed}))]  # type: ignore[arg-type]


def test_known_labels_are_those_of_rows_numbers_and_poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Request "a" has rows 0 and 1 at positions 5 and 6, and "b" row 2. The subject has one row that is wrong."""
    spans = [span("a", 0, 2, 5), span("b", 2, 1, 0)]
    monkeypatch.setattr(wrong_labels, "row_spans", lambda context, stage: spans)
    hidden, key, drafted = HIDDEN, Place("trunk", 1, "key"), Place("extend", 1, "key")
    right = {hidden: expand([50, 60, 70], (3,)), key: expand([50, 80, 0], (2, 2)), drafted: expand([81, 82, 83], (3,)),
             Place("trunk", AFTER_LAYERS, "pick"): torch.tensor([91, 92, 93]), MIXER: torch.zeros(3, 2)}  # fmt: skip
    ours = {hidden: expand([50, 61, 70], (3,))}
    before = {hidden: expand([50, 62], (3,)), drafted: expand([84, 85], (3,))}
    last = SimpleNamespace(truth=SimpleNamespace(places=before), subject=SimpleNamespace(places={
        hidden: expand([63, 60], (3,))}), spans={"a": span("a", 0, 1, 4), "c": span("c", 1, 1, 9)})  # fmt: skip
    truth, late = SimpleNamespace(places=right), " in the forward before"
    due: dict[int, list[Any]] = {
        0: ["zeros"], 50: [Source(hidden, "a", 0), Source(key, "a", 0)], 60: [Source(hidden, "a", 1)],
        70: [Source(hidden, "b", 0)], 80: [Source(key, "a", 1)], 81: [Source(drafted, "a", 0)],
        82: [Source(drafted, "a", 1)], 83: [Source(drafted, "b", 0)], 61: [Source(hidden, "a", 1)]}  # fmt: skip
    element = int(pattern(3.0, torch.int64))
    for forward, poison, more in (
        (None, None, {}), (last, None, {62: [Source(hidden, "c", 0, late)], 63: [Source(hidden, "a", 0, late)]}),
        (SimpleNamespace(**{**vars(last), "truth": truth}), 3.0, {}),
    ):  # fmt: skip
        context = SimpleNamespace(truth=truth, subject=SimpleNamespace(places=ours), log=SimpleNamespace(poison=poison),
                                  earlier=SimpleNamespace(forward=forward))  # fmt: skip
        case: Any = SimpleNamespace(component="normed", context=context)
        longest = 11 if more else 9  # the first position of a request and twice its rows
        expected = {**due, **more, **{number: [f"position {number}"] for number in range(1, longest)}}
        if poison:
            for width in (3, 4):
                intact = [int(each) for each in expand([element], (width,))[0]]
                read = (element + sum((element - of) * (2 * at + 1) for at, of in enumerate(intact))) & MASK
                expected[read] = ["poison (memory that was never written)"]
        assert wrong_labels._known(case) == expected
        monkeypatch.setattr(wrong_labels, "vocab_of", lambda case: 4)
        context.truth = context.subject = SimpleNamespace(places={})
        if not more and not poison:
            assert wrong_labels._known(case) == {0: ["zeros"]}
        context.truth, context.subject = truth, SimpleNamespace(places=ours)
        case.component = "embedding"
        expected = {**due, **more, **{number: [f"token {number}"] for number in range(4)}}
        assert wrong_labels._known(case) == {**expected, **({element & MASK: [
            "poison (memory that was never written)"]} if poison else {})}  # fmt: skip
