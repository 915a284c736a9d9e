"""Errors of tensors and directions of errors of states, measured a second time with loops over blocks.

Leaves out: the wrong states (`test_wrong_state_bank.py`), and whole runs (`test_directed.py`).
"""

import math
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from instep.checks import known_wrong_states, one_sided_errors
from instep.checks.error_measurement import Spot, granted_error, measured, not_finite
from instep.checks.known_wrong_states import Looked, look
from instep.checks.one_sided_errors import OneSided, Samples
from instep.checks.wrong_state_inputs import Wrong
from instep.finding_problem import NamedMistake
from instep.tier_allowances import DITHERED, MORE_DRAWS, SCALE_FLOOR, one_sided_limit
from instep.verdict import Skipped, Tier
from instep_reference.contract.declared_rounding import Product
from instep_reference.contract.place_names import Place
from support.inputs.check_contexts import of_facts

Tensor = torch.Tensor


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# -- errors of a tensor ----------------------------------------------------------------------------------


def heads_of(component: str, x: Tensor) -> list[list[float]]:
    """The numbers of each head, or all of them if a head has fewer than 32."""
    axis = {"q": 1, "state": 0}.get(component)
    if axis is None or x.numel() < 32 * x.shape[axis]:
        return [x.flatten().tolist()]
    return [x.select(axis, head).flatten().tolist() for head in range(x.shape[axis])]


def sizes(numbers: Sequence[float]) -> tuple[float, float]:
    return math.sqrt(sum(one * one for one in numbers)), max(map(abs, numbers))


def errors(component: str, x: Tensor, o: Tensor, scale: Tensor | None) -> list[list[float]]:
    """By the norm and by the largest element: the relative error of each head."""
    found: list[list[float]] = [[], []]
    for off, due, wide in zip(*(heads_of(component, one) for one in (x - o, o, o * 0 if scale is None else scale)),
                              strict=True):  # fmt: skip
        for kind in (0, 1):
            found[kind].append(sizes(off)[kind] / max(sizes(due)[kind], sizes(wide)[kind], SCALE_FLOOR))
    return found


@pytest.mark.parametrize(
    ("component", "shape"), [("q", (4, 3, 8)), ("q", (4, 3, 7)), ("state", (2, 4, 8)), ("hidden", (2, 64))]
)
@pytest.mark.parametrize("size", [1e-7, 1e-3])
def test_errors_of_a_tensor_by_heads(component: str, shape: tuple[int, ...], size: float) -> None:
    """The block closest to its limit: 3 errors of the yardstick in that block, at least the floor, and 4 units."""
    o, place = drawn(1, *shape), Place("trunk", 2, component)
    spot = Spot("derived", Tier.DERIVED, 4, "forward", place, "a", 3)
    draws = torch.stack([o + 1e-7 * drawn(seed, *shape) for seed in (2, 3)])
    for seed, floor, factor, stored, scale in (
        (4, 0.0, 1.0, None, None),
        (5, 1e-3, 2.0, torch.bfloat16, None),
        (6, 0.0, 1.0, torch.float32, drawn(7, *shape) * 3),
        (8, 0.0, 0.5, torch.float32, o * 0 + 0.01),
    ):
        x = o + size * drawn(seed, *shape)
        eps = torch.finfo(stored or torch.float64).eps
        mine, yardsticks = errors(component, x, o, scale), [errors(component, one, o, scale) for one in draws]
        limits = [[3 * max(*(one[kind][block] for one in yardsticks), floor) + 4 * eps for block in range(len(mine[0]))]
                  for kind in (0, 1)]  # fmt: skip
        assert granted_error(place, stored or torch.float64, o, draws, scale).tolist() == [
            pytest.approx([3 * max(one[kind][block] for one in yardsticks) + 4 * eps for block in range(len(mine[0]))])
            for kind in (0, 1)]  # fmt: skip
        parts = [
            (mine[kind][block] / limits[kind][block], -kind, -block) for kind in (0, 1) for block in range(len(mine[0]))
        ]
        part, kind, block = max(parts)
        for yardstick in (draws, list(draws)):
            one = measured(spot, x, o, yardstick, floor, stored, factor, scale)
            worst, limit = mine[-kind][-block], factor * limits[-kind][-block]
            assert (one.worst, one.allowed) == (pytest.approx(worst), pytest.approx(limit))
            assert (one.elements, one.blocks, one.head) == (
                o.numel(),
                len(mine[0]),
                -block if len(mine[0]) > 1 else None,
            )
            assert (one.check, one.tier, one.event, one.kind, one.place, one.request, one.slot) == (
                *vars(spot).values(),
            )
            noise = max(*(its[-kind][-block] for its in yardsticks), floor)
            passes = (worst - (limit - 3 * noise)) / noise
            by = ("norm", "largest element")[-kind]
            says = f"the yardstick errs by {noise:.1e} (would pass at {passes:.3g} times that)"
            assert one.diagnosis == (f"relative error {worst:.2e} by the {by}; {says}" if part > factor else "")


def test_a_block_that_allows_nothing_hides_no_other() -> None:
    """Three heads of 64 numbers: zeros where numbers are due have an error of 1, and 0 of 0 is right."""
    o = torch.ones(2, 3, 32)
    spot, zeros, nothing = Spot("derived", Tier.DERIVED, 4, "forward", Place("trunk", 2, "q"), "a", 3), o.clone(), o + 0
    zeros[:, 1] = 0
    one = measured(spot, zeros, o, o[None])
    assert (one.agrees, one.worst, one.head) == (False, 1.0, 1)
    nothing[:, 0] *= torch.inf  # a yardstick that overflows
    assert measured(spot, zeros, o, nothing[None]).head == 1 and measured(spot, o, o, nothing[None]).agrees


def test_tensors_that_cannot_be_measured() -> None:
    """No tensor, another shape, numbers that are not finite, and yardsticks that are exact or overflow."""
    spot, o = Spot("derived", Tier.DERIVED, 4, "forward", Place("trunk", 2, "hidden"), "a", 3), torch.ones(2, 3)
    for found, says in ((None, "nothing"), (torch.ones(2, 4), "shape (2, 4)")):
        one = measured(spot, found, o, o[None])
        assert (one.elements, one.worst, one.allowed, one.request, one.slot) == (0, math.inf, 0.0, "a", 3)
        assert (
            one.diagnosis == f"has {says}; expected shape (2, 3)"
            and one.problem is not None
            and one.problem.code == "missing"
        )
    assert not measured(spot, o[:0], o[:0], o[None, :0]).agrees
    for at, value, says in (
        ([(0, 1)], torch.nan, "1 of 6 numbers are not finite (NaN), the first at (0, 1)"),
        ([(1, 0), (1, 2)], torch.inf, "2 of 6 numbers are not finite (infinite), the first at (1, 0)"),
        ([(0, 2), (1, 1)], None, "2 of 6 numbers are not finite (NaN or infinite), the first at (0, 2)"),
        ([], 0.0, ""),
    ):
        x = o.clone()
        for number, where in enumerate(at):
            x[where] = (torch.inf, torch.nan)[number] if value is None else value
        assert not_finite(x) == says
        one = measured(spot, x, o, o[None])
        assert one.agrees is (not at) and (not at or (one.problem is not None and one.problem.code == "not_finite"))
        assert one.diagnosis.endswith(says)
    assert measured(spot, o, o, o[None] * torch.inf).agrees
    for wrong, says in ((1.0, "by the norm; the yardstick errs by 0.0e+00 (no factor would pass)"),
                        (torch.inf, "by the norm, where the yardstick itself overflows")):  # fmt: skip
        one = measured(spot, o + 1e-3, o, o[None] * wrong)
        assert not one.agrees and one.diagnosis == f"relative error 1.00e-03 {says}"
        assert granted_error(spot.place, torch.float32, o, o[None] * wrong).tolist() == [
            [0.0 if wrong == torch.inf else pytest.approx(4 * torch.finfo(torch.float32).eps)]] * 2  # fmt: skip


# -- directions of errors of a state -----------------------------------------------------------------------

HV, K, V = 3, 4, 12  # two groups of columns; the second has 4
BLOCKS = [(head, group) for head in range(HV) for group in range(2)]
NAMES = ("one", "two", "same as two", "right in head 1")


def tile(x: Tensor, block: tuple[int, int]) -> list[float]:
    head, group = block
    return x[head, :, 8 * group : min(8 * group + 8, V)].flatten().tolist()


def dot(x: Sequence[float], y: Sequence[float]) -> float:
    return sum(one * other for one, other in zip(x, y, strict=True))


def judged(
    x: Tensor, o: Tensor, wrong: Sequence[Tensor], yardsticks: Tensor, draws: Sequence[Tensor], leaning: Tensor | None
) -> Any:
    """The largest decided projection of each block, and the counts. draws: correct states, for the standard error"""
    eps, largest, decided, pairs = torch.finfo(x.dtype).eps, dict[Any, float](), 0, 0
    for block in BLOCKS:
        error, right, alphas = tile(x.double() - o, block), tile(o, block), [-math.inf]
        noise = max(math.sqrt(dot(off, off)) for off in (tile(one - o, block) for one in yardsticks))
        sampled = (noise + math.sqrt(dot(right, right)) * eps / 2) / math.sqrt(len(right))
        for state in wrong:
            towards = tile(state - o, block)
            length = dot(towards, towards)
            if length:
                pairs += 1
                spread = math.sqrt(
                    sum((dot(tile(one - o, block), towards) / length) ** 2 for one in draws) / len(draws)
                )
                bias = 0.0 if leaning is None else abs(dot(tile(leaning.mean(0) - o, block), towards) / length)
                if max(sampled / math.sqrt(length), spread) <= (1 - 2 * bias / 0.5) / 16:
                    alphas.append(dot(error, towards) / length)
                    decided += 1
        largest[block] = max(alphas) if all(map(math.isfinite, error)) else math.nan
    return largest, pairs, pairs - decided


def scene_of(o: Tensor) -> Any:
    return SimpleNamespace(right=o)


def test_projections_on_wrong_states(monkeypatch: pytest.MonkeyPatch) -> None:
    o = drawn(20, HV, K, V)
    wrong = [
        o + drawn(21, HV, K, V),
        o + 0.02 * drawn(22, HV, K, V),
        o + 0.02 * drawn(22, HV, K, V),
        o + drawn(23, HV, K, V),
    ]
    wrong[3][1] = o[1]
    bank = [Wrong(NamedMistake(name, name).known(), state) for name, state in zip(NAMES, wrong, strict=True)]
    monkeypatch.setattr(known_wrong_states, "wrong_states", lambda scene: bank)
    monkeypatch.setattr(known_wrong_states, "overfull", lambda scene: iter(()))
    few = torch.stack([o + 1e-3 * drawn(seed, HV, K, V) for seed in (24, 25, 26)])
    ramp = 0.3 + torch.tensor([0.0, 0.1, 0.05])[:, None, None] + torch.arange(V) / 1000
    half = o.clone()
    half[1, :, 8:] = wrong[0][1, :, 8:]
    part = o + 1e-4 * (wrong[3] - o)
    part[2, :, :8] = o[2, :, :8] + 0.9 * (wrong[0] - o)[2, :, :8]
    lost = half.clone()
    lost[2, 3, 11] = torch.inf
    for x, names in (
        (o, None),
        (o + ramp * (wrong[0] - o), None),
        (half, ["one"]),
        (wrong[1], ["two", "same as two"]),
        (wrong[0], ["one"]),
        (wrong[0].float(), ["one"]),
        (part, ["one"]),
        (lost, []),
        (o + 5 * drawn(27, HV, K, V), []),
        (wrong[3], ["right in head 1"]),
    ):
        for yardsticks, leaning in ((few, None), (few, few[1:] + 0.05 * (wrong[0] - o)), (o + 20 * (few - o), None)):
            largest, pairs, undecided = judged(x, o, wrong, yardsticks, list(yardsticks), leaning)
            found = look(x, scene_of(o), yardsticks, leaning=leaning)
            over = [block for block in BLOCKS if not largest[block] <= 0.5]
            assert (found.pairs, found.undecided) == (pairs, undecided)
            assert found.blocks == sum(largest[block] != -math.inf for block in BLOCKS)
            if not over:
                best = max(largest.values())
                assert found.problem is None and found.worst == pytest.approx(max(best, 0.0), abs=1e-9)
                assert (found.head, found.group) == next(block for block in BLOCKS if largest[block] == best)
                continue
            assert (found.head, found.group) == over[0] and found.problem is not None
            if names and yardsticks is few:
                assert found.problem.mistake is not None and [*found.problem.mistake.names] == names
                count = f"; {len(over)} of 6 blocks differ{'s' * (len(over) == 1)}"
                assert found.problem.mistake.where == count * (len(over) < 6)
                state = wrong[NAMES.index(names[0])]
                along, length = (sum(dot(tile(one, block), tile(state - o, block)) for block in over)
                                 for one in (x.double() - o, state - o))  # fmt: skip
                assert found.worst == pytest.approx(along / length)
            elif not names:
                assert found.problem.code == ("not_finite" if x is lost else "unidentified")
    assert Looked(0.0, 0, 0, 1, 1, 0, None).diagnosis == ""


def test_more_draws_are_made_before_a_state_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Further correct states have a wide spread along the wrong one, which is then too close to them."""
    o = drawn(30, HV, K, V)
    wrong = o + drawn(31, HV, K, V)
    monkeypatch.setattr(known_wrong_states, "wrong_states", lambda scene: [
        Wrong(NamedMistake("one", "one").known(), wrong)])  # fmt: skip
    monkeypatch.setattr(known_wrong_states, "overfull", lambda scene: iter(()))
    few = torch.stack([o + 1e-3 * drawn(seed, HV, K, V) for seed in (32, 33)])
    asked = list[int]()

    def again(spread: float, rounds: int) -> Any:
        def draw(count: int) -> Tensor:
            asked.append(count)
            made = [o + spread * (wrong - o)] * (count if len(asked) <= rounds else 0)
            return torch.stack(made) if made else o.new_empty(0, HV, K, V)

        return draw

    needed = -(-(MORE_DRAWS - 2) // DITHERED)
    for x, spread, rounds, narrow, calls, agrees in (
        (o, 0.1, 99, False, 0, True), (o, 0.1, 99, True, 1, True), (wrong, 0.0, 99, False, needed, False),
        (wrong, 0.1, 99, False, needed, True), (wrong, 0.05, 99, False, needed, False), (wrong, 0.1, 99, True, 1, True),
        (wrong, 0.0, 99, True, MORE_DRAWS // DITHERED, False), (wrong, 0.05, 2, False, 3, False),
        (wrong, 0.1, 2, False, 3, True), (wrong, 0.0, 2, True, 3, False), (o * math.nan, 0.1, 99, False, 0, False),
    ):  # fmt: skip
        asked.clear()
        found = look(x, scene_of(o), few, again(spread, rounds), narrow=narrow)
        assert (len(asked), found.problem is None) == (calls, agrees), (spread, rounds, narrow)
        assert {*asked} <= {DITHERED} and found.undecided == (6 if agrees and calls and spread == 0.1 else 0)


def test_rare_states_name_an_error_that_the_bank_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """The nearest of all rare states, of which 64 are in memory at once; it must be near."""
    o, few = drawn(40, HV, K, V), drawn(41, 1, HV, K, V)
    wrong, x = o + drawn(42, HV, K, V), o + 3 * drawn(43, HV, K, V) + 2 * drawn(42, HV, K, V)
    monkeypatch.setattr(known_wrong_states, "wrong_states", lambda scene: [
        Wrong(NamedMistake("known", "known").known(), wrong)])  # fmt: skip

    def rare(name: str, share: float) -> Wrong:
        return Wrong(NamedMistake(name, name).known(), o + share * (x - o))

    far = [rare("far", 30.0)] * 70
    for earlier, late, name, share in (
        ([], [], None, 0),
        (far, [], None, 0),
        ([*far, rare("a", 0.9)], [], "a", 0.9),
        ([rare("a", 0.9), *far, rare("b", 0.95)], [], "b", 0.95),
        ([], [rare("c", 1.1)], "c", 1.1),
        ([rare("a", 0.95), *far], [rare("c", 0.9)], "a", 0.95),
        ([rare("a", 0.9), *far], [rare("c", 0.9)], "a", 0.9),
        ([rare("a", 0.7)], [], None, 0),
    ):
        monkeypatch.setattr(known_wrong_states, "overfull", lambda scene, late=late: iter(late))
        found = look(x, scene_of(o), o + 1e-4 * few, earlier=lambda earlier=earlier: earlier)
        assert found.problem is not None
        if name is None:
            count = 1 + len(earlier) + len(late)
            assert found.diagnosis.startswith(f"unknown: close to none of {count} wrong states"), found.diagnosis
            assert found.worst == max(judged(x, o, [wrong], o + 1e-4 * few, [o + 1e-4 * few[0]], None)[0].values())
        else:
            assert found.problem.mistake is not None and found.problem.mistake.names == (name,)
            blocks = [
                block
                for block, part in judged(x, o, [wrong], o + 1e-4 * few, [o + 1e-4 * few[0]], None)[0].items()
                if part > 0.5
            ]
            assert blocks and found.worst == pytest.approx(1 / share)


def test_a_scene_has_the_tokens_that_its_state_took(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key for two heads. A committed tree has the tokens of its path. An accepted step before is pending."""
    monkeypatch.setattr(known_wrong_states, "handed_over", lambda base, previous: [("handed", lambda: base + 1)])
    monkeypatch.setattr(known_wrong_states, "branches", lambda folding, nodes: ("branches of", nodes))

    def tokens(seed: int, count: int) -> Any:
        rows = {
            "k": drawn(seed, count, 2, K),
            "v": drawn(seed + 1, count, 4, V),
            "log_decay": drawn(seed + 2, count, 4),
            "beta": drawn(seed + 3, count, 4),
            "update": drawn(seed + 4, count, 4, V),
        }
        return SimpleNamespace(of=rows.__getitem__, rows=rows, recalls="recalls", skip="skip", folded=lambda: (
            rows["k"], rows["v"], rows["log_decay"], rows["beta"]))  # fmt: skip

    mine, before = tokens(70, 5), tokens(80, 3)
    for kind, prefix, parents, nodes, verb in (
        ("verify", "", None, (0, 1), "accepted"),
        ("commit", "", (-1, 0, 0, 1, 1), (0, 2), "accepted"),
        ("decode", "", None, (), "given"),
        ("verify", "", (-1, 0, 0, 1, 1), (0, 2), "accepted"),
        ("commit", "p", None, (0, 1), "tracked"),
    ):
        for previous in (None, "accepted", "given", "lost"):
            step = (
                None
                if previous is None
                else SimpleNamespace(
                    base="base before",
                    tokens=None if previous == "lost" else before,
                    verb=previous,
                    recent=("recent",),
                    last=None,
                )
            )
            folding = SimpleNamespace(
                others=[("o", "other")],
                previous=step,
                parents=parents,
                tokens=mine,
                base=drawn(90, 4, K, V),
                count=2,
                safe="safe",
            )
            piece: Any = SimpleNamespace(folding=folding, layer=1, request="a", prefix=prefix, later_windows="later",
                                         span=SimpleNamespace(kind=kind, nodes=nodes))  # fmt: skip
            given = [SimpleNamespace(**vars(piece) | more, truth=SimpleNamespace(state=state)) for more, state in (
                ({"layer": 2, "request": "b"}, 1), ({"prefix": "p"}, 2), ({"request": "c", "folding": None}, 3),
                ({"request": "d", "span": SimpleNamespace(kind="prefill")}, 4), ({"request": "e"}, 5),
                ({"request": "f"}, None))]  # fmt: skip
            of = known_wrong_states.scene_of(piece, [piece, *given])  # type: ignore[list-item]
            tree = kind == "commit" and parents is not None
            path = [*nodes] if tree else [0, 1, 2, 3, 4]
            for found, name in ((of.v, "v"), (of.log_decay, "log_decay"), (of.beta, "beta")):
                assert torch.equal(found, mine.rows[name][path])
            assert torch.equal(of.k, mine.rows["k"][path][:, [0, 0, 1, 1]])
            assert (of.count, of.verb, of.shared, of.safe, of.recalls, of.skip) == (
                2,
                verb,
                2,
                "safe",
                "recalls",
                "skip",
            )
            assert (of.others, of.later) == (
                [("o", "other"), ('of request "d"', 4), ('of request "e"', 5)], "later")
            names = [f'of request "{name}"' for name in "ef"] * (kind != "decode")
            for kept, name in ((of.theirs, "update"), (of.their_decays, "log_decay")):
                assert [whose for whose, _ in kept] == names
                assert all(torch.equal(tensor, mine.rows[name]) for _, tensor in kept)
            assert of.branches == (("branches of", nodes) if tree else ())
            assert of.recent == (() if step is None else ("recent",)) and of.previous == (step and "base before")
            assert [(known, torch.equal(state, of.base + 1)) for known, state in of.handed] == [("handed", True)] * (
                step is not None
            )
            assert (of.older is None) is (of.pending is None) is (previous != "accepted")
            if of.pending is not None and of.older is not None:
                for one, other in zip(
                    (*of.pending, of.older),
                    (
                        before.rows["k"][:, [0, 0, 1, 1]],
                        before.rows["log_decay"],
                        before.rows["update"],
                        before.rows["update"],
                    ),
                    strict=True,
                ):
                    assert torch.equal(one, other)


# -- errors to one side ------------------------------------------------------------------------------------


def signed(e: Sequence[float], o: Sequence[float]) -> tuple[float, float]:
    """The error along the truth in units of the truth, and whether the truth has a size."""
    square = dot(o, o)
    return (dot(e, o) / square, 1.0) if square > SCALE_FLOOR**2 else (0.0, 0.0)


def samples_of(x: Tensor, o: Tensor, skip: int) -> list[list[tuple[float, float]]]:
    """A and D of each row [heads, channels]: of itself, each of several heads, each channel after `skip`."""
    found = []
    for e, row in zip(x - o, o, strict=True):
        groups = [signed(e.flatten().tolist(), row.flatten().tolist())]
        groups += [signed(*(one[head].tolist() for one in (e, row))) for head in range(len(row)) if len(row) > 1]
        size = math.sqrt(dot(*[row.flatten().tolist()] * 2) / row.numel()) or 1.0
        for channel in range(skip, row.shape[1]):
            off, due = e[:, channel].tolist(), row[:, channel].tolist()
            groups.append((sum(math.copysign(1, d) * one for one, d in zip(off, due, strict=True) if d) / size,
                           sum(map(abs, due)) / size))  # fmt: skip
        found.append(groups)
    return found


def limits(rows: Sequence[Sequence[tuple[float, float]]], b: float, t: float) -> tuple[list[float], list[float]]:
    mean, limit = list[float](), list[float]()
    for group in zip(*rows, strict=True):
        a, d = (sum(part) for part in zip(*group, strict=True))
        side = (a > 0) - (a < 0)
        ends = [beta + t * math.sqrt(sum((side * one - beta * size) ** 2 for one, size in group)) / d
                for beta in (-b, b)] if d else [math.inf]  # fmt: skip
        mean.append(a / d if d else 0.0)
        limit.append(max(ends))
    return mean, limit


@pytest.mark.parametrize(("component", "shape", "rotated", "skip"), [
    ("hidden", (1, 5), 2, 0), ("q", (2, 4), 2, 0), ("query", (3, 4), 3, 3), ("key", (1, 4), 1, 1)])  # fmt: skip
def test_mean_errors_of_rows(component: str, shape: tuple[int, int], rotated: int, skip: int) -> None:
    """Rows wait until there are 32. A row with the bits of an earlier one and one that is not finite do not count.

    A channel that is nearly 0 has errors as large as itself. A row below the floor of sizes has none.
    """
    o = drawn(50, 40, *shape)
    o[3], o[5] = o[2], 0.0
    o[:, :, -2] *= 1e-6
    o[10:12] *= torch.tensor([1e-20, 1e-35], dtype=torch.float64)[:, None, None]
    o[:, 0, 0] *= (torch.arange(40) != 7) & (torch.arange(40) != 8)
    x = o + 1e-3 * drawn(51, 40, *shape) + 5e-4 * o
    x[10:12] = 1.001 * o[10:12]
    x[9, 0, 1], o[:, :, -1] = torch.nan, 0.0
    samples, flat = Samples(component, rotated, 6), shape if shape[0] > 1 else shape[1:]
    rows = [one.reshape(-1, *flat) for one in (x, o)]
    assert [samples.add(rows[0][at : at + 8], rows[1][at : at + 8]) for at in range(0, 40, 8)] == [
        *[False] * 3,
        True,
        False,
    ]
    assert (samples.count, samples.first) == (30, 6)
    kept = [at for at in range(32) if at not in (3, 9)]
    due = samples_of(x[kept], o[kept], skip)
    for b, t in ((1e-4, 2.0), (1e-3, 0.5), (0.0, 1.0)):
        mean, limit = samples.judged(b, t)
        right = limits(due, b, t)
        assert mean.tolist() == pytest.approx(right[0], abs=1e-12) and limit.tolist() == pytest.approx(
            right[1], rel=1e-9
        )
    heads = [head for head in range(shape[0]) if shape[0] > 1]
    names = [("", None), *(("", head) for head in heads),
             *((f" in channel {channel}", None) for channel in range(skip, shape[1]))]  # fmt: skip
    assert [samples.group(number) for number in range(len(mean))] == names
    for count, looked, ready in (
        (63, 0, False),
        (64, 0, True),
        (64, 52, False),
        (65, 52, True),
        (125, 100, True),
        (124, 100, False),
    ):
        samples.count, samples.looked = count, looked
        assert samples.due() is ready


def test_mean_errors_of_events_and_numbers_per_head() -> None:
    """An event is one sample of a state, divided by its tokens. A channel of gates is a head."""
    o, x = drawn(52, 32, 2, 3, 4), list[list[tuple[float, float]]]()
    samples = Samples("core", 0, 0)
    for at, truth in enumerate(o):
        found, tokens = truth + 1e-3 * drawn(60 + at, 2, 3, 4), at % 3
        assert samples.add(found, truth, tokens) is (at == 31)
        parts = [(found - truth, truth), *((found[:, head] - truth[:, head], truth[:, head]) for head in range(3))]
        pairs = [signed(*(one.flatten().tolist() for one in part)) for part in parts]
        x.append([(a / max(tokens, 1), d) for a, d in pairs])
    for one, other in zip(samples.judged(1e-4, 2.0), limits(x, 1e-4, 2.0), strict=True):
        assert one.tolist() == pytest.approx(other, rel=1e-9)
    assert [samples.group(number) for number in range(4)] == [("", None), ("", 0), ("", 1), ("", 2)]
    gates = Samples("beta", 0, 0)
    assert gates.add(drawn(53, 32, 3), drawn(53, 32, 3))
    assert [gates.group(number) for number in range(4)] == [("", None), ("", 0), ("", 1), ("", 2)]
    large = Samples("hidden", 0, 0)
    wide = torch.ones(2, (1 << 16) - 1)
    assert not large.add(wide, wide) and large.add(wide[:1], wide[:1])


def test_a_look_takes_the_group_that_uses_most_of_its_limit() -> None:
    """The second of two heads is slightly too large."""
    o = drawn(54, 64, 2, 4)
    x = o * (1 + 1e-7 * drawn(55, 64, 2, 4))
    x[:, 1] *= 1 + 2e-6
    oracle: Any = SimpleNamespace(runner=SimpleNamespace(rounded=SimpleNamespace(embedding=torch.ones(1))))
    samples, place = Samples("q", 0, 3), Place("trunk", 1, "q")
    assert samples.add(x, o)
    for number, stored in enumerate((torch.float32, torch.bfloat16), 1):
        (one,) = OneSided(oracle)._look(of_facts(), place, "a", samples, stored)
        mean, limit = limits(samples_of(x, o, 0), torch.finfo(torch.float32).eps, one_sided_limit(number))
        assert (samples.looks, samples.looked, one.elements, one.blocks) == (number, 64, 64, 7)
        assert (one.place, one.head, one.worst, one.allowed) == (
            place, 1, pytest.approx(mean[2]), pytest.approx(limit[2]))  # fmt: skip
        assert "e-06 of its size too large" in one.diagnosis and one.diagnosis.endswith(
            "on average over 64 rows since event 3; rounding errs to both sides")
        assert (" beyond its rounding to bfloat16" in one.diagnosis) is (number == 2)


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize(("bound", "mixers"), [(None, ("gdn",)), (-5.0, ("mla",))])
def test_a_place_has_samples_unless_it_amplifies_errors(
    narrow: bool, bound: float | None, mixers: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of a draft share samples. Narrow products leave the places without a product, and prefixes none."""
    seen = [Place(*each) for each in (("trunk", 1, "normed"), ("chain.0", 2, "mlp"), ("chain.1", 2, "mlp"),
            ("trunk", 1, "log_decay"), ("trunk", 3, "attended"), ("trunk", 3, "query"), ("trunk", 3, "logits"))]
    ones, given = torch.ones(2, 1, 4), SimpleNamespace(prefix="", span=SimpleNamespace(count=2), request="a")
    monkeypatch.setattr(one_sided_errors, "Recomputation", SimpleNamespace)
    monkeypatch.setattr(one_sided_errors, "_errors", lambda context, piece: [(one, ones, ones, 0) for one in seen])
    oracle: Any = SimpleNamespace(
        at=lambda context: [given, SimpleNamespace(prefix="p"), None],
        config=SimpleNamespace(decay_bound=bound, rotary_dim=2, mixers=mixers),
        runner=SimpleNamespace(products={"linear": Product("bf16" if narrow else "ieee")}))  # fmt: skip
    check = OneSided(oracle)
    assert [type(one) for one in check(of_facts())] == [Skipped] * narrow
    due = {("trunk", 1, "normed"): 1} | ({} if narrow else {("chain", 2, "mlp"): 2, ("trunk", 3, "query"): 1})
    due |= {("trunk", 1, "log_decay"): 1} if bound is None else {}
    assert {key: len(samples._waiting) for key, samples in check.samples.items()} == due
    for (_, _, component), samples in check.samples.items():
        assert samples._skip == (0 if component != "query" else 2 if mixers == ("gdn",) else sys.maxsize)


def test_errors_are_read_where_rows_and_states_have_their_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_sided_errors, "due", lambda context, place, span: place.component != "z")
    monkeypatch.setattr(one_sided_errors, "rows", lambda side, place, span: side.get(place.component))
    truth, wide = {"normed": drawn(56, 2, 4), "q": drawn(57, 2, 4), "k": drawn(58, 2, 4), "z": drawn(59, 2, 4),
                   "pick": torch.ones(2, dtype=torch.int64), "v": drawn(60, 0, 4)}, drawn(61, 2, 3, 4)  # fmt: skip
    shown = {**truth, "q": truth["q"].bfloat16(), "k": truth["k"][:1]}
    for state, writes, there in ((wide.float(), True, 1), (wide.bfloat16(), True, 0), (wide[:1], True, 0),
                                 (None, True, 0), (wide.float(), False, 0)):  # fmt: skip
        near: Any = SimpleNamespace(
            truth=SimpleNamespace(places={Place("trunk", 1, one): x for one, x in truth.items()}, state=wide),
            writes_state=writes, layer=1, left=lambda side, state=state: SimpleNamespace(state={1: state}))  # fmt: skip
        piece: Any = SimpleNamespace(from_own_inputs=near, span=None, place=lambda name: Place("trunk", 1, name))
        found = [*one_sided_errors._errors(of_facts(subject=shown), piece)]
        assert [place.component for place, *_ in found] == ["normed", "q", *["state"] * there]
        assert [dtype for *_, dtype in found] == [torch.float64, torch.bfloat16, *[torch.float32] * there]
        for place, x, o, _ in found:
            at = place.component
            assert torch.equal(o, wide[None] if at == "state" else truth[at])
            assert (x - o).abs().max() <= {"normed": 0, "q": 1e-2, "state": 1e-6}[at]
