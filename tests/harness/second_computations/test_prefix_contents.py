"""Known wrong contents of prefixes and of memory that moved: all of them, in order, computed again by plain loops.

Leaves out: runs in which a prefix is wrong (`test_prefixes.py`, `test_transfers.py`).
"""

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from instep.checks import prefix_findings as p
from instep.checks import transfer_findings as t
from instep.finding_problem import Problem, WrongContent
from instep.verdict import Comparison, Tier
from instep_reference.contract.declared_rounding import INTEGER_SCALE_BITS, SCALED_KEPT, Blocked
from instep_reference.contract.engine import Fetch, Load
from instep_reference.contract.place_names import Place
from instep_reference.contract.shards import Segment, Shard

KEYS, STATE = Place("trunk", 0, "keys"), Place("trunk", 0, "state")


def said(found: Iterable[tuple[WrongContent, torch.Tensor]]) -> list[tuple[str, list[Any]]]:
    return [(known.says, tensor.tolist()) for known, tensor in found]


def held(parts: dict[Place, torch.Tensor], **more: Any) -> Any:
    return SimpleNamespace(parts=lambda: [*parts.items()], **more)


# -- steps and slots of prefixes -----------------------------------------------------------------------------


@pytest.mark.parametrize(("path", "before", "window", "every"), [
    ((0, 2, 3, 5), 8, 7, 5), ((0, 2, 3, 5), 8, 6, 5), ((0, 1, 2), 7, 3, 4), ((0, 4), 9, 6, 5), ((0, 1, 3), 6, 8, 4),
    ((0, 3), 4, 5, 8),
])  # fmt: skip
def test_every_wrong_step_has_all_mistakes_that_lead_to_it(
    path: tuple[int, ...], before: int, window: int, every: int
) -> None:
    """For each mistake the steps to which it leads. `depth`: in the path, of the token that reaches the multiple."""

    def depth(tokens: int) -> int:
        return max(count for count in range(before + tokens + 1) if count % every == 0) - before - 1

    mine, whole = depth(len(path)), depth(window)
    for found, right in product(range(-2, 8), (-1, 0, 3)):
        due = right >= 0
        leads = {
            "no multiple is seen, although the path reaches one": {-1, -2} if due else {},
            f"it is the depth {mine}, not the node that accept_index has there": {mine} if due else {},
            "it is the accepted node one before the one that reaches the multiple":
                {*path[max(mine - 1, 0) : max(mine, 0)]} if due else {},
            "it is the accepted node one after the one that reaches the multiple":
                {*path[max(mine + 1, 0) : max(mine + 2, 0)]} if due else {},
            "it is the last accepted node": {path[-1]} if due else {},
            "the multiple is one that only the whole window reaches":
                {whole, path[whole if whole < len(path) else -1], *([] if due else [0])} - {-1, -2}
                if whole > mine else {},
        }  # fmt: skip
        fits = p.wrong_step(found, right, path, before, window, every)
        says = [mistake for mistake, steps in leads.items() if found in steps]
        assert (fits.says if fits is not None else "") == ", or ".join(says), (found, right)
        assert fits is None or len(fits.names) == len(says) > 0


@pytest.mark.parametrize(("found", "right", "says"), [
    ({"a": 1, "c": 2, "b": 1}, {"a": 1}, 'the slot of "c" is kept, although nothing was tracked under the name'),
    ({"a": 1, "b": 3}, {"a": 2, "b": 2}, "no slot is taken for a window that may reach a multiple, and does not"),
    ({"a": 2, "b": 3}, {"a": 2, "b": 2}, "a slot is taken for a window that can reach no multiple"),
    ({"a": 5}, {"a": 5}, "a slot is taken for a window that can reach no multiple"),
    ({}, {}, "a slot is taken for a window that can reach no multiple"),
    ({"a": 5}, {"a": 2, "b": 2}, None),
])  # fmt: skip
def test_wrong_slots_of_prefixes_are_named(found: dict[str, int], right: dict[str, int], says: str | None) -> None:
    known = p.wrong_slots(found, right)
    assert (known and known.says) == says


# -- rows and memory of others -------------------------------------------------------------------------------


def test_final_rows_of_other_tokens_and_requests_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    every = {"a": torch.tensor([[1.0], [2.0]]), "b": torch.tensor([[7.0]]), "c": torch.tensor([[8.0], [9.0]])}
    monkeypatch.setattr(p, "rows", lambda side, place, span: every[span] if place == p.FINAL else None)
    forward: Any = SimpleNamespace(spans={name: name for name in every}, subject=None)
    assert said(p.other_rows(every["a"], forward, "a")) == [
        ("is the final row of token 0 of this event", [1.0]), ("is the final row of token 1 of this event", [2.0]),
        ('is a final row of request "b"', [7.0]), ('is a final row of request "c"', [8.0]),
        ('is a final row of request "c"', [9.0])]  # fmt: skip


def test_rows_of_earlier_tokens_are_as_many_as_a_line_has() -> None:
    for count, due in ((2, [("1 token", [2, 3]), ("2 tokens", [1, 2])]), (4, []), (3, [("1 token", [1, 2, 3])])):
        assert said(p.older_rows(torch.arange(1, 5), count)) == [
            (f"holds the rows of {words} earlier", rows) for words, rows in due]  # fmt: skip


def around(**given: Any) -> Any:
    """A context with requests "a" (4 tokens), "b" (1), "c" without keys, and prefixes "mine", "other" and "empty"."""
    states = {"a": held({KEYS: torch.arange(4)}, length=4), "b": held({KEYS: torch.arange(10, 13)}, length=1),
              "c": held({STATE: torch.arange(3)}, length=2)}  # fmt: skip
    saved = {"mine": KEYS, "other": KEYS, "empty": STATE}
    kept = {name: SimpleNamespace(state=held({place: torch.arange(20, 23)})) for name, place in saved.items()}
    given.setdefault("earlier", SimpleNamespace(saved=kept, dropped={}))
    return SimpleNamespace(subject=SimpleNamespace(after=states), **given)


def test_prefix_memory_of_other_requests_is_cut_to_its_length() -> None:
    assert said(p.of_others(around(), "a", KEYS, 2)) == [('holds what belongs to request "b"', [10, 11])]
    assert said(p.of_others(around(), "z", STATE, 1)) == [('holds what belongs to request "c"', [0])]


def test_moved_memory_may_be_of_now_or_of_other_prefixes() -> None:
    due = torch.ones(2, dtype=torch.int64)
    of_b = ('holds what request "b" has now, after 1 token; {} tracked', [10, 11])
    of_a = ('holds what request "a" has now, after 4 tokens; {} tracked', [0, 1])
    for count, were in ((1, "1 token was"), (2, "2 tokens were")):
        for but, others in (("", [of_a, of_b]), ("b", [of_a])):
            assert said(p.others_kept(around(), "mine", KEYS, due, count, but)) == [
                (p.ZERO.sentence, [0, 0]), *((says.format(were), rows) for says, rows in others),
                ('holds what is kept as "other"', [20, 21])]  # fmt: skip


def test_prefix_name_goes_with_a_problem_alone() -> None:
    right = Comparison("bytes", Tier.BITWISE, 0, "commit", KEYS, 1, 0.0, 0.0)
    wrong = Comparison("bytes", Tier.BITWISE, 0, "commit", KEYS, 1, 1.0, 0.0, problem=Problem("differs", "x"))
    assert p.of_prefix("p", wrong).problem == Problem("differs", "x", prefix="p")
    assert p.of_prefix("p", right) is right and p.of_prefix("", wrong) is wrong


@pytest.mark.parametrize(("stage", "layer", "rows", "due", "says"), [
    ("extend", 0, 4, 3, "keeps the draft head's last row, which depends on the token after the prefix"),
    ("extend", 0, 5, 3, "keeps the draft head's last row, which depend on tokens after the prefix"),
    ("extend", 2, 5, 3, "keeps 2 rows of MTP layer 2, which depend on tokens after the prefix"),
    ("extend", 1, 4, 3, "keeps 1 row of MTP layer 1, which depends on the token after the prefix"),
    ("extend", 0, 2, 3, "lacks the draft head's last row, which depends on no token after the prefix"),
    ("extend", 3, 1, 3, "lacks 2 rows of MTP layer 3, which depends on no token after the prefix"),
    ("extend", 1, 3, 3, None), ("trunk", 1, 4, 3, None),
])  # fmt: skip
def test_prefix_with_another_number_of_draft_rows_is_recognised(
    stage: str, layer: int, rows: int, due: int, says: str | None
) -> None:
    result = Comparison("bytes", Tier.BITWISE, 0, "commit", Place(stage, layer, "keys"), 1, 1.0, 0.0,
                        problem=Problem("differs", "x"))  # fmt: skip
    found = p.with_last(result, torch.zeros(rows, 2, 2), due).problem
    assert found == (Problem("differs", "x") if says is None else Problem("identified", says))
    for other in (None, torch.zeros(rows, 2)):
        assert p.with_last(result, other, due) is result
    agrees = Comparison("bytes", Tier.BITWISE, 0, "commit", Place(stage, layer, "keys"), 1, 0.0, 0.0)
    assert p.with_last(agrees, torch.zeros(rows, 2, 2), due) is agrees


# -- roundings -------------------------------------------------------------------------------------------------

Index = tuple[int, int, int]
CHANNEL, VALUE, HEAD = (lambda h, k, v: (h, k)), (lambda h, k, v: (h, v)), (lambda h, k, v: h)
Whole = Callable[[float], float]


def scales_of(x: torch.Tensor, of: Callable[[int, int, int], Hashable]) -> dict[Index, float]:
    """A scale for each element: the largest number of its tile over 127, rounded up to 17 bits."""
    where, largest, scales = [*product(*map(range, x.shape))], dict[Hashable, float](), dict[Index, float]()
    for at in where:
        largest[of(*at)] = max(largest.get(of(*at), 0.0), abs(float(x[at])))
    for at in where:
        mantissa, exponent = math.frexp(float(torch.tensor(largest[of(*at)], dtype=torch.float32) / 127))
        scales[at] = math.ldexp(math.ceil(mantissa * 2**INTEGER_SCALE_BITS), exponent - INTEGER_SCALE_BITS)
    return scales


def stored(x: torch.Tensor, of: Callable[[int, int, int], Hashable], whole: Whole = round) -> torch.Tensor:
    found = torch.zeros_like(x)
    for at, scale in scales_of(x, of).items():
        found[at] = max(-127, min(127, whole(float(x[at] / scale)))) * scale
    return found


def wraps(x: torch.Tensor) -> torch.Tensor:
    """With scales of 1/128 of the largest number, which is then 128: in 8 bits that is -128."""
    found = torch.zeros_like(x)
    for at, scale in scales_of(x, CHANNEL).items():
        number = round(float(x[at] / scale) * 128 / 127)
        found[at] = (number - 256 if number > 127 else number) * scale * 127 / 128
    return found


def same(found: Iterable[tuple[WrongContent, torch.Tensor]], due: Sequence[tuple[str, torch.Tensor]]) -> None:
    every = [*found]
    assert [known.says for known, _ in every] == [says for says, _ in due]
    for (known, mine), (_, other) in zip(every, due, strict=True):
        torch.testing.assert_close(mine, other, rtol=2e-7, atol=0, msg=known.says)
        assert torch.equal(mine.signbit() & (mine == 0), other.signbit() & (other == 0)), known.says


def a_state(seed: int, *shape: int) -> torch.Tensor:
    """The first head has numbers of both signs from 0.001 to 127, so that some become 0, 127, or nearly 127."""
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3
    x[0, 0, :4] = torch.tensor([127.0, 125.9, -126.4, -0.4])
    return x


READ = ("holds the stored numbers, not multiplied by their scales", "is read with its scales in 16 bits, not in fp32",
        "is read with the scales of other heads, {} further", 'is read with the scales of "{}"')  # fmt: skip


def read_wrongly(state: torch.Tensor, kept: dict[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    scales, heads = scales_of(state, CHANNEL), len(state)
    others = {name: scales_of(other, CHANNEL) for name, other in kept.items() if other.shape == state.shape}

    def with_scales(scale: Callable[[Index], float]) -> torch.Tensor:
        found = torch.zeros_like(state)
        for at, mine in scales.items():
            found[at] = float(state[at] / mine) * scale(at)
        return found

    return [(READ[0], with_scales(lambda at: 1.0)),
            (READ[1], with_scales(lambda at: float(torch.tensor(scales[at]).bfloat16()))),
            *((READ[2].format(far), with_scales(lambda at, far=far: scales[(at[0] + far) % heads, at[1], at[2]]))
              for far in range(1, heads)),
            *((READ[3].format(name), with_scales(lambda at, its=its: its[at])) for name, its in others.items())]


def test_states_of_prefixes_are_misread_in_all_ways() -> None:
    state = stored(a_state(1, 3, 2, 5), CHANNEL)
    kept = {"one": a_state(2, 3, 2, 5), "small": a_state(3, 2, 2, 5), "two": a_state(4, 3, 2, 5)}
    same(p.misread(state, {"kept": SCALED_KEPT}, kept), read_wrongly(state, kept))
    for rounds in ({}, {"chunk": SCALED_KEPT}, {"kept": torch.bfloat16}):
        assert not [*p.misread(state, rounds, kept)]


@pytest.mark.parametrize("chunk", [None, torch.bfloat16])
@pytest.mark.parametrize("forward", [False, True])
def test_states_of_prefixes_are_misrounded_in_all_ways(chunk: torch.dtype | None, forward: bool) -> None:
    """A state of 2 heads, 3 key channels and 5 value channels, kept in int8, of a chunk or a commit."""
    state, before = a_state(5, 2, 3, 5), a_state(6, 2, 3, 5)
    rounds: dict[str, Any] = {"kept": SCALED_KEPT} | ({"chunk": chunk} if chunk else {})
    kept = {"one": a_state(7, 2, 3, 5)}

    def begun(x: torch.Tensor, made: bool = forward) -> torch.Tensor:
        return x.bfloat16().float() if chunk and made else x

    x = begun(state)
    right = stored(x, CHANNEL)
    chunks = ("is not rounded as the state that a chunk leaves" if forward
              else "is rounded as the state that a chunk leaves; a commit made this prefix")  # fmt: skip
    for older, early in ((None, []), (before, [
            ("holds the state that the request had before this event, rounded", stored(begun(before), CHANNEL))])):
        same(p.misrounded(state, older, rounds, forward=forward, kept=kept), [
            ("is the state of the request, which is not rounded as declared", state), *early,
            *([(chunks, stored(begun(state, not forward), CHANNEL))] if chunk else []),
            ("is rounded with a scale per value channel, not per key channel", stored(x, VALUE)),
            ("is rounded with one scale per head, not per head and key channel", stored(x, HEAD)),
            ("is cut off towards zero, not rounded to nearest", stored(x, CHANNEL, math.trunc)),
            ("is rounded with one scale per head, and again with one per key channel",
             stored(stored(x, HEAD), CHANNEL)),
            ("has the largest number of every channel wrapped around to the other sign", wraps(x)),
            *read_wrongly(right, kept)])  # fmt: skip


def test_states_in_narrow_dtypes_have_fewer_roundings() -> None:
    """bf16 has no scales, and float8 tiles have no whole numbers. Without storage nothing is rounded."""
    state = a_state(8, 2, 2, 4)
    float8 = Blocked(torch.float8_e4m3fn, (1, None))
    for storage, dtype in ((torch.bfloat16, torch.bfloat16), (float8, torch.float32)):
        ((known, wrong),) = p.misrounded(state, None, {"kept": storage}, forward=False, kept={})
        assert known.name == "prefix-not-rounded" and torch.equal(wrong, state.to(dtype)) and wrong.dtype == dtype
    assert not [*p.misrounded(state, state, {}, forward=True, kept={})]


def test_numbers_off_the_grid_are_named() -> None:
    x = a_state(9, 2, 3, 5)
    for state, name in ((stored(x, CHANNEL), None), (stored(x, VALUE), "scale-per-value-channel"),
                        (stored(x, HEAD), "scale-per-head"), (x, "prefix-not-rounded")):  # fmt: skip
        mistake = p.off_the_grid(state, SCALED_KEPT)
        assert (mistake and mistake.name) == name


def test_a_misrounding_is_named_if_nearly_all_numbers_have_it() -> None:
    """200 numbers of a state that is stored in bf16. Some of them are right, as an error may move a number."""
    rounds = {"state": torch.bfloat16, "kept": SCALED_KEPT}
    state = a_state(10, 2, 4, 25)
    x = state.bfloat16().float()
    right, wrong, cut = stored(x, CHANNEL), stored(x, HEAD), stored(x, CHANNEL, math.trunc)
    off = (wrong != right).flatten().nonzero().flatten()
    for count, name in ((0, "scale-per-head"), (19, "scale-per-head"), (20, None), (21, None)):
        found = wrong.flatten().clone()
        found[off[:count]] += 100
        known = p.nearest_misrounding(found.view_as(wrong), state, rounds, forward=False)
        assert (known and known.name) == name, count
    known = p.nearest_misrounding(cut, state, rounds, forward=False)
    assert known is not None and known.name == "prefix-cut-off"
    assert p.nearest_misrounding(right, state, rounds, forward=False) is None
    same_bits = torch.full((2, 2, 2), 127.0)  # nothing distinguishes the two roundings here
    assert p.nearest_misrounding(same_bits, same_bits, rounds, forward=False) is None
    assert p.nearest_misrounding(x.bfloat16(), state, {"kept": SCALED_KEPT}, forward=False) is None
    assert p.nearest_misrounding(x, state, {}, forward=False) is None


# -- memory that moved to another engine -------------------------------------------------------------------------


def transfers(right: torch.Tensor, place: Place, ranks: Any, sent: Any = None, event: Any = None) -> list[Any]:
    values = Place("trunk", 0, "values")
    short, same_shape = right[:-1] + 50, right + 60
    kept = SimpleNamespace(state=held({place: right, values: same_shape, STATE: short, KEYS._replace(layer=1):
                                       same_shape.double()}, length=1), sent=sent, ranks=None)  # fmt: skip
    given = around(event=event or Fetch("mine"), ranks=ranks, earlier=SimpleNamespace(saved={}, dropped={
        "mine": (SimpleNamespace(state=held({place: torch.cat((right, right)).double() + 70})),
                 SimpleNamespace(state=held({values: right})))}))  # fmt: skip
    given.subject.after = {}
    every = t.wrong_transfers(given, "mine", kept, place, right)
    found = [(known.says, wrong.tolist(), wrong.dtype) for known, wrong in every]
    head = [("holds zeros", (right * 0).tolist()), ('holds what was kept as "mine" before', (right + 70).tolist()),
            (f"holds the values ({values}) of the copy", same_shape.tolist())]  # fmt: skip
    assert [wrong for _, wrong, _ in found[:3]] == [wrong for _, wrong in head]
    assert [says for says, *_ in found[1:3]] == [says for says, _ in head[1:]]
    assert all(dtype == right.dtype for *_, dtype in found)
    return [(says, wrong) for says, wrong, _ in found[3:]]


def test_keys_that_moved_are_wrong_in_all_ways() -> None:
    """3 positions of 4 channels, in two segments over 2 ranks: rank 0 has channels 0 and 2, rank 1 has 1 and 3."""
    right = torch.tensor([[10 * row + channel + 1.0 for channel in range(4)] for row in range(3)])
    ranks = SimpleNamespace(size=2, memory={"keys": Shard(1, (Segment(2), Segment(2)))})
    turned = [right[index % 3, index // 3].item() for index in range(12)]
    shifted = []
    for far, what in ((1, "1 position"), (2, "2 positions")):
        for way, from_row in (("further", lambda row, far=far: row - far), ("earlier", lambda row, far=far: row + far)):
            round_ = [right[from_row(row) % 3].tolist() for row in range(3)]
            empty = [round_[row] if 0 <= from_row(row) < 3 else [0.0] * 4 for row in range(3)]
            shifted += [(f"has its rows {what} {way}", round_), (f"has its rows {what} {way}", empty)]
    narrow = torch.tensor([[1.001, 300.1]])
    casts = [(f"was cast to {name} on the way", narrow.to(dtype).float().tolist())
             for name, dtype in (("bfloat16", torch.bfloat16), ("float16", torch.float16))]  # fmt: skip
    for sent, last in ((None, []), (held({KEYS: narrow}), casts), (held({KEYS: narrow.long()}), []), (held({}), [])):
        assert transfers(right, KEYS, ranks, sent) == [
            ("has the parts of the ranks 1 further", right[:, [1, 0, 3, 2]].tolist()),
            ("has the part of rank 0 for every rank", right[:, [0, 0, 2, 2]].tolist()),
            ("has its channels cut over 2 ranks as one block, not per segment", right[:, [0, 2, 1, 3]].tolist()),
            *shifted,
            ("has the numbers of each row in the order of the turned matrix", [turned[:4], turned[4:8], turned[8:]]),
            *last]  # fmt: skip
    long = torch.arange(140.0).reshape(70, 2)
    assert len([says for says, _ in transfers(long, KEYS, None) if "rows" in says]) == 4 * 63


def test_other_memory_that_moved_has_no_positions() -> None:
    conv, tail = Place("trunk", 0, "conv"), Place("trunk", 2, "tail")
    right = torch.arange(6.0).reshape(3, 2)
    three = SimpleNamespace(size=3, memory={"conv": Shard(0, (Segment(3),))})
    assert transfers(right, conv, three) == [
        ("has the parts of the ranks 1 further", right[[1, 2, 0]].tolist()),
        ("has the parts of the ranks 2 further", right[[2, 0, 1]].tolist()),
        ("has the part of rank 0 for every rank", right[[0, 0, 0]].tolist()),
        ("has the numbers of the window in the order of the turned matrix", [[0.0, 2.0], [4.0, 1.0], [3.0, 5.0]])]
    assert transfers(right, tail, three) == [] and transfers(right[:, 0], conv, None) == []


def test_a_copy_of_before_is_another_one_of_the_same_name_and_length() -> None:
    now = held({KEYS: torch.arange(3), STATE: torch.arange(2)}, length=3)
    other = held({KEYS: torch.arange(3), STATE: torch.arange(1, 3)}, length=3)
    fewer, longer = held({KEYS: torch.arange(3)}, length=3), held(dict(now.parts()), length=4)
    wider = held({KEYS: torch.arange(4), STATE: torch.arange(2)}, length=3)
    for dropped, event, found in (([other, now], Load("a", "copy"), True), ([], Load("a", "copy"), False),
                                  ([other, fewer, longer, wider], Load("a", "copy"), False),
                                  ([now], Load("b", "copy"), False), ([now], Fetch("copy"), False)):  # fmt: skip
        copies = tuple(SimpleNamespace(state=state) for state in dropped)
        given: Any = SimpleNamespace(event=event, subject=SimpleNamespace(after={"a": now}),
                                     earlier=SimpleNamespace(dropped={"copy": copies}))  # fmt: skip
        assert t.is_copy_of_before(given, "a") is found
    given.subject.after = {}
    assert not t.is_copy_of_before(given, "a")
