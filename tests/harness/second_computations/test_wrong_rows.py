"""Explanations by rows, heads and entries at another place, each computed again by hand from a few numbers.

Leaves out: inputs of an op (`test_wrong_inputs.py`), and memory that it reads (`test_wrong_memory.py`).
"""

from collections.abc import Iterable
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from instep.checks.unchanged_bytes import PROPOSED
from instep.diagnose.mistakes import wrong_rows
from instep.oracle.single_layer_run import LayerWork
from instep.watch.event_context import RowSpan
from instep_reference.contract.place_names import AFTER_LAYERS, Place

HIDDEN, KEYS = Place("trunk", 1, "hidden"), Place("trunk", 1, "keys")


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def sentences(made: Iterable[Any]) -> list[str]:
    return [one.sentence for one in made]


def tensors(made: Iterable[Any]) -> dict[str, list[Any]]:
    return {one.sentence: one.wrong.tolist() for one in made}


def span(request: str, begin: int, count: int, start: int = 0) -> RowSpan:
    return RowSpan(request, "prefill", begin, count, start, begin, count)


def case_of(place: Place, found: torch.Tensor, right: torch.Tensor, **given: Any) -> Any:
    """A finding of request "a". Exact without `granted`; `sides`: whether it has those of bits; `own`: other rows."""
    more = {"granted": None, "once": False, "piece": None, "oracle": None, "own": {}, "rights": (), **given}
    more |= {"own": more["own"].get, "rights": lambda rights=more["rights"]: rights}
    finding = SimpleNamespace(place=place, request="a", sides=more.pop("sides", None), check=more.pop("check", "bits"))
    return SimpleNamespace(component=place.component, finding=finding, found=found, right=right, **more)


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[RowSpan]]:
    """Stage -> spans, for the module."""
    told = dict[str, list[RowSpan]]()
    monkeypatch.setattr(wrong_rows, "row_spans", lambda context, stage: told.get(stage, []))
    return told


# -- rows, heads and columns of a result -------------------------------------------------------------------


OF_B = [(0, ' of request "b"'), (1, ' of request "b"'), (2, ' of request "b"')]


@pytest.mark.parametrize(("sources", "says", "tries"), [
    ([0, 0, 1, 2], "each row is that of the row before it", 1),
    ([3, 0, 1, 2], "each row is that of the row before it", 1),
    ([1, 2, 3, 3], "each row is that of the row after it", 1),
    ([1, 2, 3, 0], "each row is that of the row after it", 1),
    ([0, 0, 1], "each row is that of the row before it", 2), ([OF_B[0], 1, 2], 'row 0 is that of row 0 of request "b"',
                                                              1),
    ([1, 0, 3, 2], "row 0 is that of row 1, row 1 is that of row 0, row 2 is that of row 3, row 3 is that of row 2", 4),
    ([2, *OF_B[:2]], 'row 0 is that of row 2, row 1 is that of row 0 of request "b", '
                     'row 2 is that of row 1 of request "b"', 3),
    ([0, 0, 1, 3], "row 1 is that of row 0, row 2 is that of row 1", 2),
    ([2, 3, 0, 1], "row n is that of row (n - 2) mod 4", 1),
    ([0, 1, 2, 4, 5, 3, 7, 6, 8], "row 3 is that of row 4, row 4 is that of row 5, row 5 is that of row 3, "
                                  "row 6 is that of row 7, and 1 more", 5),
    ([0, 1, 3, 2], "row 2 is that of row 3, row 3 is that of row 2", 2),
    ([1, 0], "row 0 is that of row 1, row 1 is that of row 0", 2), ([0, 1, 2, 1], "row 3 is that of row 1", 1),
    ([0, 0, 0, 0, 0, 0], "rows 1, 2, 3, 4 are all that of row 0", 5),
    ([2, 3, 2, 3], "row 0 is that of row 2, row 1 is that of row 3", 2),
    ([0, 3, 2, 1], "row 1 is that of row 3, row 3 is that of row 1", 2),
    (OF_B, 'each row is that of request "b"', 1), ([*OF_B[:2], 2], 'each row is that of request "b"', 2),
    ([*OF_B[1:], OF_B[0]], 'row 0 is that of row 1 of request "b", row 1 is that of row 2 of request "b", '
                           'row 2 is that of row 0 of request "b"', 1),
    ([OF_B[0], 0, 1], 'row 0 is that of row 0 of request "b", row 1 is that of row 0, row 2 is that of row 1', 3),
    ([OF_B[1], OF_B[1], 2], 'rows 0, 1 are all that of row 1 of request "b"', 2),
    ([0, 0, OF_B[0]], 'row 1 is that of row 0, row 2 is that of row 0 of request "b"', 2),
    ([OF_B[0], (1, ' of request "c"'), 2],
     'row 0 is that of row 0 of request "b", row 1 is that of row 1 of request "c"', 2),
])  # fmt: skip
@pytest.mark.parametrize("bits", [True, False])
def test_rows_that_are_other_rows_are_one_rule_or_pairs(
    sources: list[Any], says: str, tries: int, bits: bool
) -> None:
    """A rule of one shift is one try of all right rows; otherwise each pair is one. "b" and "c" have 5 rows each."""
    count = len(sources)
    right, *theirs = (drawn(n, 3, 5, seed=n * 10 + at) for at, n in enumerate((count, 5, 5)))
    if bits:
        right, *theirs = ((1000 * x).long() for x in (right, *theirs))
    of = {"": right, ' of request "b"': theirs[0], ' of request "c"': theirs[1]}
    at = [one if isinstance(one, tuple) else (one, "") for one in sources]
    wrong = torch.stack([of[whose][row] for row, whose in at])
    others = [*zip(('of request "b"', 'of request "c"', 'of request "d"'), (*theirs, torch.zeros(4, 2, 2)),
                   strict=True)]
    granted, found = (None, wrong) if bits else (torch.full((2, 1), 1e-6), wrong * (1 + 1e-7))
    for axis in range(1 if any(whose for _, whose in at) else 3):
        case = case_of(HIDDEN, found.movedim(0, axis), right.movedim(0, axis), granted=granted)
        (one,) = wrong_rows.permuted(case, axis, "row", others if axis == 0 else ())
        assert one.sentence == says and torch.equal(one.wrong, wrong.movedim(0, axis))
        assert one.tries == float(count + 10 * (axis == 0)) ** tries


@pytest.mark.parametrize(("right", "found", "moved"), [
    ([[1], [2], [2]], [[2], [2], [2]], None),  # it equals two rows
    ([[1], [2], [3], [1]], [[1], [1], [2], [3]], [[1], [1], [2], [3]]),  # by a rule it need not be one row alone
    ([[1], [2], [1]], [[1], [1], [2]], None),  # two rows are no rule
    ([[0] * 8, [1] * 8], [[1] * 7 + [5], [1] * 8], [[1] * 8, [1] * 8]),
    ([[0] * 4, [1] * 4], [[1] * 3 + [5], [1] * 4], None),  # a quarter of it is wrong
    ([[1], [2]], [[1], [2]], None),
])  # fmt: skip
def test_a_row_is_another_one_if_most_of_it_is_and_no_third_one(right: Any, found: Any, moved: Any) -> None:
    for scale in (None, 1.0):
        case = case_of(HIDDEN, torch.tensor(found), torch.tensor(right), granted=scale and torch.full((2, 1), 1e-6))
        if scale is not None:  # by distance: 2 of sqrt(8), and 1 of 1, are the fourth part or more
            case.found, case.right = case.found * scale, case.right * scale
            moved = None if len(right[0]) == 8 else moved
        assert [one.wrong.tolist() for one in wrong_rows.permuted(case, 0, "row", ())] == [moved] * (moved is not None)


def test_distances_are_compared_for_few_numbers_and_a_quarter_is_too_far(monkeypatch: pytest.MonkeyPatch) -> None:
    right = torch.tensor([[0.0, 0, 0, 0], [10, 0, 0, 0], [0, 50, 0, 0], [0, 0, 90, 0]])
    for first, moved in ((7.9, False), (8.1, True), (11.9, True)):
        found = right.clone()
        found[0, 0] = first
        case = case_of(HIDDEN, found, right, granted=torch.full((2, 1), 1e-6))
        made = sentences(wrong_rows.permuted(case, 0, "row", ()))
        assert made == ["row 0 is that of row 1"] * moved
    for most, tried in ((4, 1), (3, 0)):  # 4 rows with 16 numbers
        monkeypatch.setattr(wrong_rows, "MOST", most)
        assert len([*wrong_rows.permuted(case, 0, "row", ())]) == tried


def test_tries_of_many_moved_rows_are_counted() -> None:
    """72 rows are some of 20000 of another request: the 72nd power of their number is infinite in fp64."""
    right, theirs = torch.arange(72).view(72, 1), torch.arange(100, 20028).view(-1, 1)
    found = theirs.view(-1)[torch.arange(72) ** 2].view(72, 1)
    (one,) = wrong_rows.permuted(case_of(HIDDEN, found, right), 0, "row", [("of b", theirs)])
    assert one.tries == 20000**72 and torch.equal(one.wrong, found)


@pytest.mark.parametrize(("component", "shape", "searched"), [
    ("hidden", (3, 4), ["0 row", "1 column"]), ("core", (3, 2, 4), ["0 row", "1 head", "2 column"]),
    ("b", (3, 2), ["0 row", "1 head"]), ("value", (3, 2), ["0 row", "1 head"]), ("state", (2, 3, 4), ["0 head"]),
    ("conv", (3, 4), []), ("pick", (3,), []), ("value", (3,), []),
])  # fmt: skip
@pytest.mark.parametrize("granted", [None, torch.ones(2, 1)])
def test_places_are_searched_for_rows_heads_and_columns(
    component: str, shape: Any, searched: list[str], granted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = list[Any]()
    monkeypatch.setattr(wrong_rows, "permuted", lambda case, axis, what, others: tried.append(
        (f"{axis} {what}", [*others])) or [])  # fmt: skip
    for name in ("_of_forward_before", "_elsewhere"):
        monkeypatch.setattr(wrong_rows, name, lambda case, name=name: [name])
    case = case_of(HIDDEN._replace(component=component), torch.zeros(shape), torch.zeros(shape), granted=granted,
                   rights=["right"])  # fmt: skip
    assert not [*wrong_rows.result_rows(case)]
    others = ["right", "_of_forward_before"] + ["_elsewhere"] * (granted is None)
    assert tried == [(what, others * (what == "0 row")) for what in searched]


def test_rows_of_the_forward_before_are_right_labels_or_what_the_subject_had() -> None:
    """"a" has two rows, "b" one, and "c" none."""
    ours, right = (SimpleNamespace(places={HIDDEN: x}) for x in (torch.arange(3.0), torch.arange(3.0) + 10))
    spans = {"a": span("a", 0, 2), "c": span("c", 2, 0), "b": span("b", 2, 1)}
    forward: Any = SimpleNamespace(subject=ours, truth=right, spans=spans)
    context = SimpleNamespace(earlier=SimpleNamespace(forward=forward))
    for granted, first in ((None, 10), (torch.ones(2, 1), 0)):
        case = case_of(HIDDEN, torch.zeros(1), torch.zeros(1), granted=granted, context=context)
        assert [(whose, rows.tolist()) for whose, rows in wrong_rows._of_forward_before(case)] == [
            ('of request "a" in the forward before', [first, first + 1]),
            ('of request "b" in the forward before', [first + 2])]  # fmt: skip
    right.places, context.earlier.forward = {}, forward
    assert not [*wrong_rows._of_forward_before(case_of(HIDDEN, ours.places[HIDDEN], torch.zeros(1), context=context))]
    context.earlier.forward = None
    assert not [*wrong_rows._of_forward_before(case)]


def test_rows_of_other_stages_are_those_of_the_same_request_and_place(spans: dict[str, list[RowSpan]]) -> None:
    """The finding is in the second step of a chain; there are two more stages with rows of "a"."""
    spans |= {"chain.0": [span("b", 0, 1), span("a", 1, 2)], "extend": [span("a", 0, 1)], "chain.1": [span("a", 0, 1)],
              "chain.2": [span("b", 0, 3)]}  # fmt: skip
    made = {Place(stage, layer, name): torch.arange(3) + 10 * at for at, (stage, layer, name) in enumerate((
        ("chain.0", 1, "hidden"), ("extend", 1, "hidden"), ("chain.1", 1, "hidden"), ("chain.2", 1, "hidden"),
        ("extend", 0, "hidden"), ("extend", 1, "normed")))}  # fmt: skip
    context = SimpleNamespace(truth=SimpleNamespace(places=made))
    case = case_of(Place("chain.1", 1, "hidden"), torch.zeros(1), torch.zeros(1), context=context)
    assert [(whose, rows.tolist()) for whose, rows in wrong_rows._elsewhere(case)] == [
        ("of draft step 1", [1, 2]), ("of stage extend", [10])]  # fmt: skip


def test_logits_are_read_from_every_final_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """2 rows of logits over 3 tokens; "a" has two final rows of 2 channels, and "b" one."""
    head, a, b, right = drawn(3, 2).float(), drawn(2, 2), drawn(1, 2, seed=1), drawn(2, 3)
    logits = Place("trunk", AFTER_LAYERS, "logits")
    finals = {Place("trunk", AFTER_LAYERS, "final"): [("a", a), ("b", b)]}
    case = case_of(logits, right, right, piece=object(), everybody=finals.get, weights=SimpleNamespace(head=head))
    due = [(f'is read from the final row {row} of request "{name}"', number, rows[row]) for number in range(2)
           for name, rows, row in (("a", a, 0), ("a", a, 1), ("b", b, 0))]  # fmt: skip
    made = [*wrong_rows.read_rows(case)]
    assert sentences(made) == [says for says, _, _ in due]
    for one, (_, number, row) in zip(made, due, strict=True):
        expected = right.clone()
        expected[number] = torch.stack([(row.float() * each).sum() for each in head])
        assert torch.allclose(one.wrong, expected, rtol=1e-5)
    for most, tried in ((3, 6), (2, 0)):
        monkeypatch.setattr(wrong_rows, "MOST", most)
        assert len([*wrong_rows.read_rows(case)]) == tried
    monkeypatch.undo()
    case.piece = None
    assert not [*wrong_rows.read_rows(case)]
    assert not [*wrong_rows.read_rows(case_of(HIDDEN, right, right, piece=object()))]


@pytest.mark.parametrize(("heads", "groups", "explained"), [(6, 2, True), (6, 3, True), (4, 4, False), (4, 1, False)])
def test_query_heads_read_kv_heads_in_turns(heads: int, groups: int, explained: bool) -> None:
    """Attention adds 100 times the number of the KV head to each query."""
    query = drawn(2, heads, 3)

    def again(own: dict[str, torch.Tensor]) -> torch.Tensor:
        return own["query"] + 100.0 * (torch.arange(heads) // (heads // groups))[:, None]

    piece = SimpleNamespace(work=LayerWork("trunk", 1, torch.zeros(2, 1), 0, None))
    config = SimpleNamespace(kv_heads=groups, heads=heads)
    given = {"piece": piece, "oracle": object(), "own": {"query": query}, "again": again,
             "weights": SimpleNamespace(config=config)}  # fmt: skip
    made = [*wrong_rows.mixing(case_of(Place("trunk", 1, "attended"), query, query, **given))]
    assert sentences(made) == [f"query head h reads KV head h % {groups}, not h // {heads // groups}"] * explained
    for one in made:
        for head in range(heads):
            assert torch.equal(one.wrong[:, head], query[:, head] + 100.0 * (head % groups))
    for name, changed in (("attended", {"piece": None}), ("attended", {"piece": SimpleNamespace(work=None)}),
                          ("attended", {"oracle": None}), ("attended", {"own": {}}), ("mixer", {}),
                          ("attended", {"again": lambda own: None})):  # fmt: skip
        assert not [*wrong_rows.mixing(case_of(HIDDEN._replace(component=name), query, query, **{**given, **changed}))]


# -- entries of a pool and of memory -----------------------------------------------------------------------


@pytest.mark.parametrize(("pages", "at", "says"), [
    ((2, 1), {0: 4, 1: 5, 2: 2}, "is right in the pool, and wrong in what the engine shows of it"),
    ((2, 1), {1: 4, 2: 5},
     "was written 1 position too early, to page 2, position 0 of pool, not to page 2, position 1"),
    ((2, 1), {0: 5, 1: 2}, "was written 1 position too late, to page 2, position 1 of pool, not to page 2, position 0"),
    ((2, 1), {0: 2, 1: 3},
     "was written 2 positions too late, to page 1, position 0 of pool, not to page 2, position 0"),
    ((2, 1), {1: 6, 2: 3}, "was written 1 position too late, to page 3, position 0 of pool, not to page 2, position 1"),
    ((2, 1), {0: 0, 1: 1},
     "was written 4 positions too early, to page 0, position 0 of pool, not to page 2, position 0"),
    ((2, 1), {0: 7, 1: 6}, "was written to page 3, position 1 of pool, not to page 2, position 0"),
    ((2, 1), {0: 0, 2: 3}, "was written to page 0, position 0 of pool, not to page 2, position 0"),
    ((2, 1), {0: 4, 2: 3}, ""), ((2, 1), {0: None}, ""), ((2, 1), {0: 1, 1: 2, 2: None}, ""), ((2,), {0: 5}, ""),
    ((2, 1), {}, ""),
])  # fmt: skip
def test_missing_entries_are_searched_in_the_pool(pages: Any, at: dict[int, int | None], says: str) -> None:
    """3 entries [2, 3] of "a" in pages of 2. at: position -> where its entry is in the pool of 4 pages."""
    right = drawn(3, 2, 3).float()
    found, pool = right.clone(), right[0].repeat(8, 1, 1)
    pool[:, 1, 1] = 9  # no whole entry
    for position, stands in at.items():
        found[position, 0, 1] = -1
        if stands is not None:
            pool[stands] = right[position]
    means = [SimpleNamespace(component=name, draft=draft) for name, draft in (("keys", True), ("values", False),
                                                                              ("keys", False))]  # fmt: skip
    regions = [SimpleNamespace(by=by, layer=layer, means=one, units=pool.view(4, 2, 2, 3), name=name)
               for by, layer, one, name in (("page", 1, None, "a"), ("slot", 1, means[2], "b"),
                                            ("page", 0, means[2], "c"),
                                            ("page", 1, means[0], "draft"), ("page", 1, means[1], "e"),
                                            ("page", 1, means[2], "pool"))]  # fmt: skip
    owned = {"a": pages}
    context = SimpleNamespace(regions=regions, expected=SimpleNamespace(pages_after=owned))
    case = case_of(KEYS, found, right, context=context)
    made = [*wrong_rows.elsewhere(case)]
    assert sentences(made) == [says] * bool(says) and all(torch.equal(one.wrong, found) for one in made)
    if "too late, to page 2, position 1 of pool" in says:
        for place, name in ((Place("extend", 1, "keys"), "draft"), (Place("trunk", 1, "values"), "e")):
            (one,) = wrong_rows.elsewhere(case_of(place, found, right, context=context))
            assert f"position 1 of {name}, not" in one.sentence
        case.granted = torch.ones(2, 1)
        assert not [*wrong_rows.elsewhere(case)], "numbers"
        regions[-1].units = regions[-1].units.double()
        assert not [*wrong_rows.elsewhere(case_of(KEYS, found, right, context=context))], "another dtype"
        regions[-1].units = torch.zeros(4, 2, 2, 2)
        assert not [*wrong_rows.elsewhere(case_of(KEYS, found, right, context=context))], "another shape"
        del regions[-1]
        assert not [*wrong_rows.elsewhere(case_of(KEYS, found, right, context=context))], "no pool"
        context.regions = [SimpleNamespace(by="page", layer=1, means=SimpleNamespace(component="k", draft=False))]
        assert not [*wrong_rows.elsewhere(case_of(HIDDEN._replace(component="k"), found, right, context=context))]


def test_an_equal_entry_of_another_request_is_there_rightly(monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry of "a" lies one position late. That of "b" is the same, in its page or at another position."""
    right = torch.arange(1.0, 5).view(4, 1, 1)
    for position, theirs, explained in ((1, 7, True), (1, 8, False), (1, 0, False), (3, 9, True), (3, 7, False)):
        pool, found = torch.zeros(10, 1, 1), right.clone()
        pool[3 + position], found[position], pool[theirs] = right[position], -1, right[position]
        region = SimpleNamespace(by="page", layer=1, means=SimpleNamespace(component="keys", draft=False), name="p",
                                 units=pool.view(5, 2, 1, 1))  # fmt: skip
        context = SimpleNamespace(regions=[region], expected=SimpleNamespace(pages_after={"a": (1, 2), "b": (3, 4)}))
        case = case_of(KEYS, found, right, context=context)
        assert len([*wrong_rows.elsewhere(case)]) == explained
    pool[theirs], pool[3], found[0], found[3] = 0, right[0], -1, right[3]
    for most, pages, length, explained in ((1, (1, 2), 4, True), (0, (1, 2), 4, False), (1, (1,), 4, False),
                                           (1, (1,), 2, True), (1, (1, 2), 0, False)):  # fmt: skip
        monkeypatch.setattr(wrong_rows, "MOST_MISSING", most)
        context.expected.pages_after["a"] = pages
        case.found, case.right = found[:length], right[:length]
        assert len([*wrong_rows.elsewhere(case)]) == explained


@pytest.mark.parametrize(("due", "found", "says"), [
    ((1 << 16) + 3, 3, ", as if indices had 16 bits"), ((1 << 32) + 3, 3, ", as if indices had 32 bits"),
    (100, 100 + (1 << 16), ", as if indices had 16 bits"), (99, 3, ""),
    (7 + (1 << 16), 7 + 480, ", as if indices had 16 bits and negative ones counted from the end of the pool"),
])  # fmt: skip
def test_indices_that_wrap_around_are_named(due: int, found: int, says: str) -> None:
    """A pool of 30 pages with 16 positions each."""
    region: Any = SimpleNamespace(units=torch.zeros(30, 1), name="pool")
    off = abs(due - found)
    too = f"was written {off} positions too {'early' if due > found else 'late'}, to page {found // 16}, position "
    told = f"{found % 16} of pool, not to page {due // 16}, position {due % 16}"
    moved = [(due, found), (due + 1, found + 1)]
    assert wrong_rows._moves(moved, 16, region, {due: 0, due + 1: 1}) == too + told + says


def test_windows_are_wrong_in_columns_channels_positions_and_heads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A conv window, and keys of 3 positions; "b" has right ones, "c" wrong ones, "d" none, "e" is new, "f" other."""
    tried = list[Any]()
    monkeypatch.setattr(wrong_rows, "permuted", lambda case, axis, what, others: tried.append(
        (axis, what, [(whose, rows.tolist()) for whose, rows in others])) or ())  # fmt: skip
    known = [(SimpleNamespace(says="is known", name="its-name"), torch.ones(1))]
    sides, right = SimpleNamespace(wrongs=lambda: known), drawn(2, 3)
    case = case_of(HIDDEN._replace(component="conv"), right, right, sides=sides)
    (one,) = wrong_rows.windows(case)
    assert one.sentence == "has the newest input first" and one.wrong.tolist() == [row[::-1] for row in right.tolist()]
    assert tried == [(1, "column", []), (0, "channel", [])]
    (one,) = wrong_rows.known_windows(case)
    assert (one.sentence, one.name) == ("is known", "its-name") and one.wrong is known[0][1]
    for changed in (case_of(HIDDEN._replace(component="conv"), right, right), case_of(KEYS, right, right)):
        assert not [*wrong_rows.windows(changed)] and not [*wrong_rows.known_windows(changed)]
    cache = {name: drawn(3, 2, seed=at) for at, name in enumerate("abcdf")}
    for stage, component in product(("trunk", "extend"), ("keys", "values")):
        fields = [stage.replace("trunk", "").replace("extend", "draft_") + name for name in ("keys", "values")]
        mine, other = fields if component == "keys" else fields[::-1]

        def state(held: torch.Tensor | None, others: torch.Tensor | None, mine: str = mine, other: str = other) -> Any:
            return SimpleNamespace(**{mine: {} if held is None else {1: held}, other: {} if others is None else {
                1: others}}, block_keys={})  # fmt: skip

        ours = {"a": state(cache["a"], cache["d"]), "b": state(cache["b"] * 1.01, None), "c": state(cache["c"], None),
                "d": state(None, None), "e": state(cache["d"], None), "f": state(cache["f"][:0], None)}  # fmt: skip
        due = {"a": state(cache["d"], cache["a"]), "b": state(cache["b"], None), "c": state(cache["c"] * 2, None),
               "d": state(cache["d"], None), "f": state(cache["f"][:0], None)}  # fmt: skip
        context = SimpleNamespace(subject=SimpleNamespace(after=ours), truth=SimpleNamespace(after=due))
        case = case_of(Place(stage, 1, component), cache["a"], cache["d"], sides=sides, context=context)
        tried.clear()
        (one,) = wrong_rows.windows(case)
        assert one.sentence == f"holds the {'values' if component == 'keys' else 'keys'}"
        assert torch.equal(one.wrong, cache["d"])
        assert tried == [(0, "position", [('of request "b"', (cache["b"] * 1.01).tolist())]), (1, "head", [])]
        for held, right in ((None, cache["a"]), (cache["d"][:2], cache["a"]), (cache["d"], None),
                            (cache["d"], cache["a"] * 2)):  # fmt: skip
            ours["a"], due["a"] = state(cache["a"], held), state(cache["d"], right)
            assert not [*wrong_rows.windows(case)]
        del ours["a"], due["a"]
        assert not [*wrong_rows.windows(case)]


def test_entries_are_right_up_to_a_quarter_of_their_size() -> None:
    right = torch.tensor([3.0, 4.0])
    for off, said in ((1.25, True), (1.26, False)):
        assert wrong_rows._is_right(right + torch.tensor([off, 0.0]), right) is said
    assert not wrong_rows._is_right(right, None) and not wrong_rows._is_right(right[:1], right)


def test_new_entries_are_other_rows_of_the_layer(spans: dict[str, list[RowSpan]]) -> None:
    """5 keys [2, 3] of "a", of which the last two are new. Rows of "b" come first; a latent has more channels."""
    spans["trunk"] = [span("b", 0, 1, 7), span("a", 1, 2, 3)]
    made = {"key": drawn(3, 2, 3), "query": drawn(3, 2, 3, seed=1), "core": drawn(3, 2, 5, seed=2), "v": drawn(3, 2, 2),
            "z": drawn(3, 1, 3), "hidden": drawn(3, 6)}  # fmt: skip
    places = {Place("trunk", 1, name): rows for name, rows in made.items()}
    places |= {Place("trunk", 0, "query"): made["query"], Place("extend", 1, "query"): made["query"]}
    right, context = drawn(5, 2, 3, seed=3), SimpleNamespace(subject=SimpleNamespace(places=places))
    case = case_of(KEYS, right, right, sides=object(), context=context)
    due = right.tolist()
    assert tensors(wrong_rows.written_rows(case)) == {
        f"holds `{name}` in the place of `key`": due[:3] + made[name][1:, :, :3].tolist() for name in ("query", "core")}
    of_values = case_of(Place("trunk", 1, "values"), right, right, sides=object(), context=context)
    assert len([*wrong_rows.written_rows(of_values)]) == 3
    for changed in ({"granted": torch.ones(2, 1)}, {"sides": None}, {"place": HIDDEN}, {"right": right[:4]}):
        given: Any = {"place": KEYS, "right": right, "sides": object(), "granted": None, **changed}
        place, due_ = given.pop("place"), given.pop("right")
        assert not [*wrong_rows.written_rows(case_of(place, due_, due_, context=context, **given))], changed
    spans["trunk"] = []
    assert not [*wrong_rows.written_rows(case)]


def test_the_row_after_draft_1_is_another_row_of_the_head() -> None:
    hidden, rows, right = drawn(3), {"a": drawn(1, 3), "b": drawn(2, 3, seed=1)}, torch.zeros(3)
    for before, first in (({"a": SimpleNamespace(proposal_hidden=hidden)}, [hidden.tolist()]),
                          ({"a": SimpleNamespace(proposal_hidden=None)}, []), ({}, [])):  # fmt: skip
        context = SimpleNamespace(subject=SimpleNamespace(before=before))
        everybody = {PROPOSED: [*rows.items()]}
        case = case_of(PROPOSED, right, right, sides=object(), context=context, everybody=everybody.get)
        made = tensors(wrong_rows.windows(case))
        assert [*made.values()] == [*first, *rows["a"].tolist(), *rows["b"].tolist()]
        assert [*made] == ["is the head's row of the round before"] * len(first) + [
            f'is the head\'s row {row} of request "{name}", of {of}' for name, row, of in (("a", 0, 1), ("b", 0, 2),
                                                                                           ("b", 1, 2))]  # fmt: skip
    for place, found in ((PROPOSED, right[None]), (HIDDEN, right)):
        assert not [*wrong_rows.windows(case_of(place, found, found, sides=object(), context=context,
                                                everybody=everybody.get))]  # fmt: skip
