"""Explanations by memory of another request or round, each computed again from a few numbers.

Leaves out: rows of a result (`test_wrong_rows.py`), and inputs of an op (`test_wrong_inputs.py`).
"""

from collections.abc import Iterable
from dataclasses import dataclass, make_dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from instep.diagnose.mistakes import wrong_memory
from instep.diagnose.mistakes.finding_case import Compared
from instep.oracle.single_layer_run import LayerWork
from instep_reference.attention import AttentionMemory
from instep_reference.contract.place_names import Place
from instep_reference.gdn import GdnMemory
from instep_reference.short_conv import ConvMemory

STATE = Place("trunk", 1, "state")
NAN = torch.nan


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def told(made: Iterable[Any]) -> list[tuple[str, Any]]:
    return [(one.sentence, one.wrong.tolist()) for one in made]


def value(**given: Any) -> Any:
    """A frozen value of these fields, for code that replaces some of them."""
    return make_dataclass("Value", given, frozen=True)(**given)


def work_of(memory: Any, start: int = 3, layer: int = 1) -> LayerWork:
    return LayerWork("trunk", layer, torch.zeros(2, 1), start, memory)


def held(**tensors: Any) -> Any:
    """A request's memory in layer 1, by component, of the target."""
    parts = [(Place("trunk", 1, name), tensor) for name, tensor in tensors.items()]
    fields = {name: {1: tensor} for name, tensor in tensors.items()}
    return SimpleNamespace(parts=lambda: parts, block_keys={}, **fields)


def case_of(component: str, **given: Any) -> Any:
    """A finding of request "a" at event 4. It makes again what memory it is given."""
    history = SimpleNamespace(of=lambda request, index: given.get("past", {}).get((request, index), ()))
    context = SimpleNamespace(index=4, subject=SimpleNamespace(before=given.get("before", {})))
    return SimpleNamespace(**{
        "component": component, "granted": None, "history": history, "context": context, "own": lambda name: None,
        "finding": SimpleNamespace(place=Place("trunk", 1, component), request="a"),
        "made": lambda says, memory: [(says, memory)], **given})  # fmt: skip


# -- memory itself ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rerun:
    """A case whose run has the rows of its piece's work."""

    piece: Any
    oracle: Any = None

    finding = SimpleNamespace(place=STATE)

    def again(self) -> Any:
        return self.piece.work.again


def test_wrong_rows_that_the_recomputation_knows_are_made_twice() -> None:
    """By the reference in fp64 from its own rows, and from the subject's; either may be absent."""
    known = SimpleNamespace(says="reads other rows", name="other-rows")
    works = [SimpleNamespace(places={STATE: 1}, again=2), SimpleNamespace(places={}, again=3),
             SimpleNamespace(places={STATE: 4}, again=None)]  # fmt: skip
    piece = value(work=None, wrongs=[(known, work) for work in works])
    oracle = SimpleNamespace(runner=SimpleNamespace(true=lambda work: work))
    made: Any = [*wrong_memory.known_rows(Rerun(piece, oracle))]  # type: ignore[arg-type]
    assert [(one.sentence, one.wrong, one.name) for one in made] == [
        ("reads other rows", wrong, "other-rows") for wrong in (1, 2, 3, 4)]
    assert not [*wrong_memory.known_rows(Rerun(None))]  # type: ignore[arg-type]


@pytest.mark.parametrize(("component", "memory", "tried"), [
    ("state", GdnMemory(NAN, NAN), ["_standing"]), ("keys", None, ["_standing"]),  # type: ignore[arg-type]
    ("core", GdnMemory(NAN, NAN), ["_begun_again", "_read", "_without_oldest"]),  # type: ignore[arg-type]
    ("mixed", ConvMemory(NAN), ["_begun_again", "_read"]), ("update", None, ["_begun_again"]),  # type: ignore[arg-type]
    ("attended", AttentionMemory(NAN, NAN), ["_stale_cache"]), ("attended", None, []),  # type: ignore[arg-type]
    ("query", AttentionMemory(NAN, NAN), []), ("attended", GdnMemory(NAN, NAN), []),  # type: ignore[arg-type]
])  # fmt: skip
def test_memory_is_compared_and_ops_that_read_it_are_run_again(
    component: str, memory: Any, tried: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_standing", "_begun_again", "_read", "_without_oldest", "_stale_cache"):
        monkeypatch.setattr(wrong_memory, name, lambda case, *given, name=name: [name])
    case = case_of(component, piece=SimpleNamespace(work=work_of(memory)))
    assert [*wrong_memory.memory(case)] == tried
    case.piece.work = None
    assert [*wrong_memory.memory(case)] == [name for name in tried if name == "_standing"]
    case.piece = case.finding.request = None
    assert not [*wrong_memory.memory(case)]


def test_memory_is_that_of_another_round_copy_or_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Request "b" has its own state, "c" that of "a", "d" one that is wrong for "d", and "e" none."""
    right, old, older, kept, left, b, d = (drawn(2, 3, seed=seed) for seed in range(7))
    of = {"a": right, "b": b, "c": right, "d": d}
    after = {**{name: held(state=x) for name, x in of.items()}, "d": held(state=d + 5), "e": held(conv=d)}
    earlier = SimpleNamespace(saved={"copy": SimpleNamespace(state=held(state=kept)), "no": SimpleNamespace(
        state=held(conv=kept))}, preempted={"b": SimpleNamespace(state=held(state=left)), "no": SimpleNamespace(
            state=held())})  # fmt: skip
    for before, first in (({"a": held(state=old)}, [("holds what it held before the event", old.tolist())]),
                          ({"a": held(conv=old)}, []), ({"b": held(state=old)}, [])):  # fmt: skip
        case = case_of("state", found=torch.zeros(2, 3), past={("a", 4): [("after event 2", held(state=older)), (
            "after event 1", held())]}, context=SimpleNamespace(index=4, earlier=earlier, subject=SimpleNamespace(
                before=before, after=after),
                truth=SimpleNamespace(after={name: held(state=x) for name, x in of.items()})))
        assert told(wrong_memory._standing(case)) == [
            *first, ("holds what it held after event 2", older.tolist()),
            ('holds what was kept under "copy"', kept.tolist()), ('holds what was kept of request "b"', left.tolist()),
            ('holds what belongs to request "b"', b.tolist())]  # fmt: skip


@pytest.mark.parametrize(("theirs", "holds", "due"), [
    ([4.0, 3], [4.0, 3], True), ([4.0, 3], [4.25, 3], True), ([4.0, 3], [4.26, 3], False),
    ([3.0, 3 + 2.5e-3], [3.0, 3], False), ([3.0, 3 + 4e-3], [3.0, 3 + 4e-3], True),
    (None, [4.0, 3], False),
])  # fmt: skip
def test_memory_belongs_to_another_request_if_it_must_differ(theirs: Any, holds: Any, due: bool) -> None:
    """That of "a" is 3 and 3; up to a quarter of the difference may be wrong."""
    truth = {"a": held(state=torch.tensor([3.0, 3])), "b": held() if theirs is None else held(
        state=torch.tensor(theirs))}  # fmt: skip
    case = case_of("state", found=torch.zeros(2), context=SimpleNamespace(truth=SimpleNamespace(after=truth)))
    assert wrong_memory._is_theirs(case, "b", torch.tensor(holds)) is due
    assert not wrong_memory._is_theirs(case, "c", torch.tensor(holds))
    case.finding.request = "c"
    assert not wrong_memory._is_theirs(case, "b", torch.tensor(holds))
    truth |= {"a": held(state=torch.tensor([0.0])), "b": held(state=torch.tensor([2e-6]))}
    case.finding.request, case.found = "a", torch.zeros(1)
    assert wrong_memory._is_theirs(case, "b", torch.tensor([2e-6]))
    truth["b"] = held(state=torch.tensor([0.5e-6]))
    assert not wrong_memory._is_theirs(case, "b", torch.tensor([0.5e-6])), "nearly equal"


def test_a_part_of_a_cache_is_compared_by_its_first_positions() -> None:
    x = drawn(4, 2)
    for component, other, length, part in (
        ("keys", x, 4, x), ("keys", x, 3, x[:3]), ("keys", x, 5, None), ("values", x, 3, x[:3]), ("state", x, 3, None),
        ("state", x, 4, x), ("state", x.view(4, 2, 1), 4, None), ("keys", None, 4, None),
    ):  # fmt: skip
        case = case_of(component, found=torch.zeros(length, 2))
        found = wrong_memory._part(case, held() if other is None else held(**{component: other}))
        assert (None if found is None else found.tolist()) == (None if part is None else part.tolist())


# -- ops that read memory --------------------------------------------------------------------------------


def test_an_op_reads_the_memory_of_another_request_or_round() -> None:
    """Request "b" has another state; "c" none, "d" one of another shape, and "e" the same in another dtype."""
    mine, b, old = drawn(2, 3), drawn(2, 3, seed=1), drawn(2, 3, seed=2)
    for component, part, name, kept in (("core", "state", "state", GdnMemory(drawn(2, 2), mine)),
                                        ("update", "state", "state", GdnMemory(drawn(2, 2), mine)),
                                        ("mixed", "window", "conv", GdnMemory(mine, drawn(1))),
                                        ("mixed", "window", "conv", ConvMemory(mine))):  # fmt: skip
        states = {"a": held(**{name: old}), "b": held(**{name: b}), "c": SimpleNamespace(**{name: {0: b}}),
                  "d": held(**{name: b[:1]}), "e": held(**{name: mine.float()})}  # fmt: skip
        kept = type(kept)(**{key: x.float() for key, x in vars(kept).items()})
        case = case_of(component, before=states, past={("a", 4): [("after event 2", held(**{name: old}))]})
        found = [*wrong_memory._read(case, work_of(kept), kept)]  # type: ignore[arg-type]
        due: list[Any] = [('of request "b"', b), ("as it was after event 2", old)]
        if component == "mixed":
            x = mine.float().tolist()
            due += [("as all zero", [[0.0] * 3] * 2), ("with the newest input first", [row[::-1] for row in x]),
                    ("of the channel before", x[::-1]), ("one column too late", [row[-1:] + row[:-1] for row in x]),
                    ("of the channel after", x[::-1]), ("one column too early", [row[1:] + row[:1] for row in x])]
        assert [says for says, _ in found] == [f"reads the {part} {whose}" for whose, _ in due]
        for (_, memory), (_, expected) in zip(found, due, strict=True):
            other: Any = memory
            assert getattr(other, part).tolist() == (expected if isinstance(expected, list) else expected.tolist())
            assert {key: x for key, x in vars(other).items() if key != part}.items() <= vars(kept).items()
    three = drawn(3, 2)
    found = [*wrong_memory._read(case_of("mixed"), work_of(ConvMemory(three)), ConvMemory(three))]
    of: Any = dict(found)
    assert torch.equal(of["reads the window of the channel before"].window, three[[2, 0, 1]])
    assert torch.equal(of["reads the window of the channel after"].window, three[[1, 2, 0]])


def again(own: Any, memory: None) -> torch.Tensor | None:
    """The sums of the rows so far, with those of the channels of k and v."""
    if "qkv" not in own:
        return None
    return own["qkv"].cumsum(0) + sum(own[name].flatten(1).cumsum(0) for name in ("k", "v") if name in own)


@pytest.mark.parametrize(("found", "begins"), [
    ([1, 3, 4, 12, 16], [2, 4]), ([1, 2, 6, 14, 30], [1]), ([1, 3, 4, 12, 99], [2, 4]), ([0, 3, 7, 15, 31], []),
    ([1, 2, 4, 8, 16], [1, 2, 3, 4]),
    ([1, 3, 7, 15, 31.2421875], []), ([1, 3, 7, 15, 31.25], [4]), ([1, 3, 7, 15, 32], [4]), ([1, 3, 7, 15, NAN], [4]),
    ([1, 3, 7, 15, 31], []),
])  # fmt: skip
def test_memory_begins_again_inside_a_chunk(found: Any, begins: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum of the rows so far; a second channel has zeros. 2^-7 of the largest number, 31, is granted."""
    rows = torch.tensor([[1.0, 0], [2.0, 0], [4.0, 0], [8.0, 0], [16.0, 0]], dtype=torch.float64)
    extra = {"k": torch.zeros(5, 1, 1), "v": torch.zeros(5, 1, 1, 1)}
    case: Any = SimpleNamespace(found=torch.tensor([[x, 0.0] for x in found]), right=rows.cumsum(0), again=again,
                                own={"qkv": rows, **extra}.get,
                                granted=torch.tensor([[9.0, 9], [2.0**-7, 0.0]]))  # fmt: skip
    due = rows.clone()
    for row in range(1, 5):
        due[row] += 0 if row in begins else due[row - 1]
    for most in (8, 2):
        monkeypatch.setattr(wrong_memory, "MOST_BEGINS", most)
        made = [*wrong_memory._begun_again(case)]
        says = f"row{'s' if len(begins) > 1 else ''} {', '.join(map(str, begins[:most]))}"
        assert [one.sentence for one in made] == [f"begins with zeros again at {says}"] * bool(begins)
        assert [one.tries for one in made] == [5.0 ** min(len(begins), most)] * bool(begins)
        if most == 8 and begins:
            assert made[0].wrong.tolist() == due.tolist()
    case.own = {"k": rows}.get
    assert not [*wrong_memory._begun_again(case)], "nothing is made"


def test_an_op_continues_without_the_oldest_tokens_of_a_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    known = [(SimpleNamespace(says="lacks the oldest"), "state")]
    monkeypatch.setattr(wrong_memory, "lacking_oldest", lambda base, recent: known if (base, recent) == (1, 2) else ())
    kept, previous = GdnMemory(drawn(1), drawn(2)), SimpleNamespace(recent=2)
    for component, folding, made in (("core", (1, previous), True), ("update", (1, previous), True),
                                     ("core", (1, None), False), ("mixed", (1, previous), False),
                                     ("core", None, False)):
        piece = SimpleNamespace(folding=folding and SimpleNamespace(base=folding[0], previous=folding[1]))
        found: Any = [*wrong_memory._without_oldest(case_of(component, piece=piece), kept)]
        assert [(says, memory.state, memory.window) for says, memory in found] == [
            ("continues from a state that lacks the oldest", "state", kept.window)] * made
    assert not [*wrong_memory._without_oldest(case_of("core", piece=None), kept)]


def test_attention_sees_an_older_cache_that_is_shorter() -> None:
    kept = AttentionMemory(torch.zeros(3, 1), torch.zeros(3, 1))
    for stage, prefix in (("trunk", ""), ("extend", "draft_")):
        def state(keys: Any, values: Any, prefix: str = prefix) -> Any:
            return SimpleNamespace(block_keys={}, **{f"{prefix}keys": {1: keys}, f"{prefix}values": {1: values}})

        past = [("after event 3", state(kept.keys[:1], "values")), ("after event 2", state(kept.keys[:0], "values")),
                ("after event 1", state(kept.keys, "values")), ("after event 0", state(None, "values")),
                ("", state(kept.keys[:1], None))]  # fmt: skip
        case = case_of("attended", past={("a", 4): past})
        case.finding.place = Place(stage, 1, "attended")
        ((says, memory),) = wrong_memory._stale_cache(case, kept)  # type: ignore[misc]
        assert says == "sees the cache as it was after event 3"
        assert (len(memory.keys), memory.values) == (1, "values")


# -- memory that nothing wrote ---------------------------------------------------------------------------


def test_memory_with_nan_is_what_an_op_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trunk of two layers; the first request has no memory yet, and its layer is the second."""
    config = SimpleNamespace(mixers=["conv", "gdn"])
    x, y = drawn(2), drawn(3)
    monkeypatch.setattr(wrong_memory.trunk, "empty_memory", lambda of, mixer, dtype, device: GdnMemory(
        x, y) if (of, mixer) == (config, "gdn") else None)  # fmt: skip
    window, state = (NAN, y.tolist()), (x.tolist(), NAN)
    says = "reads {} that nothing wrote (poison)"
    kept, fresh = "a state, or a token kept for it,", ", although the request has no tokens yet"
    for component, stage, memory, start, due in (
        ("core", "trunk", GdnMemory(x, y), 3, [(says.format("a conv window"), window), (says.format(kept), state)]),
        ("core", "trunk", None, 0, [(says.format("a conv window") + fresh, window),
                                    (says.format("a state") + fresh, state)]),
        ("core", "extend", None, 0, []), ("query", "trunk", None, 0, []),
        ("mixed", "trunk", ConvMemory(x), 2, [(says.format("a conv window"), (NAN,))]),
        ("attended", "trunk", AttentionMemory(x, y), 2, [(says.format("keys or values"), (NAN, NAN))]),
    ):  # fmt: skip
        case = case_of(component, piece=SimpleNamespace(work=work_of(memory, start)), right=drawn(1),
                       weights=SimpleNamespace(config=config))  # fmt: skip
        case.finding.place = Place(stage, 1, component)
        found = [(told, [x.tolist() for x in vars(made).values()]) for told, made in wrong_memory._with_nan(case)]
        assert [told for told, _ in found] == [told for told, _ in due]
        for (_, shown), (_, expected) in zip(found, due, strict=True):
            assert [one != one or all(n != n for n in got) if one is NAN else one == got
                    for one, got in zip(expected, shown, strict=True)].count(False) == 0  # fmt: skip
            assert all(any(n != n for n in got) is (one is NAN) for one, got in zip(expected, shown, strict=True))
    for piece in (None, SimpleNamespace(work=None)):
        assert not [*wrong_memory._with_nan(case_of("core", piece=piece))]


def test_numbers_next_to_nan_must_be_right(monkeypatch: pytest.MonkeyPatch) -> None:
    right = torch.arange(4.0)
    monkeypatch.setattr(wrong_memory, "agrees", lambda case: torch.equal(case.found, case.right))
    for found, said in (([0, 1, NAN, 3], True), ([0, 9, NAN, 3], False), ([0, 1, 2, 3], False)):
        case: Any = Compared(None, torch.tensor(found), right, None)  # type: ignore[arg-type]
        assert wrong_memory._right_elsewhere(case, case.found.isnan()) is said


def test_nan_is_that_of_a_memory_or_has_the_bits_of_the_poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """2 rows of 2 numbers, of which some are NAN. NaN with other bits may have been computed."""
    poison, ones = -torch.tensor(NAN), torch.ones(2)
    right_elsewhere, memories = [True], list[Any]()
    monkeypatch.setattr(wrong_memory, "_right_elsewhere", lambda case, lost: right_elsewhere[0])
    monkeypatch.setattr(wrong_memory, "_with_nan", lambda case: memories)
    says = "is, or is made from, memory that nothing wrote (poison); all that is due to its op is finite"
    alone = "leaves NaN, although all that is due to its op is finite"

    def told(case: Any) -> tuple[str, bool]:
        one = wrong_memory.unwritten(case)
        return ("", False) if one is None else (one.says, one.vague)

    for component, first, second, said in (
        ("state", poison.expand(2), poison, says), ("state", -poison.expand(2), -poison, alone),
        ("normed", ones, poison, f"{says}, in row 1"), ("normed", ones, -poison, ""),
        ("normed", ones, torch.stack((poison, -poison)), ""), ("state", ones, poison, f"{says}, in row 1"),
        ("normed", ones, torch.stack((poison, ones[0])), f"{says}, in row 1"),
        ("normed", poison.expand(2), poison, says),
        ("normed", -poison.expand(2), -poison, ""),
    ):  # fmt: skip
        found = torch.stack((first, second.expand(2)))
        case: Any = SimpleNamespace(
            found=found, right=torch.ones(2, 2), component=component, piece=object(),
            context=SimpleNamespace(log=SimpleNamespace(poison=poison.item())),
            made=lambda says, memory: [SimpleNamespace(sentence=says, wrong=torch.stack(memory))])  # fmt: skip
        assert told(case) == (said, said.startswith(says))
        memories[:] = [("reads another", (ones, -first)), ("reads it", (-first, -second.expand(2)))]
        whole = component == "state" and said in (says, alone)  # as with NaN in any input
        assert told(case) == ((said, said == says) if whole else ("reads it", False))
        memories.clear()
        case.context.log.poison = None
        assert told(case) == (alone if component == "state" and bool(found.isnan().all()) else "", False)
    case.context.log.poison = poison.item()
    case.found, case.right = torch.stack((ones[0], poison)), torch.ones(2)
    assert told(case) == (says, True), "numbers without rows"
    for changed in ({"piece": None}, {"right": torch.tensor([1.0, NAN])}):
        assert not wrong_memory.unwritten(SimpleNamespace(**{**vars(case), **changed}))  # type: ignore[arg-type]
    right_elsewhere[0] = False
    assert not wrong_memory.unwritten(case)
