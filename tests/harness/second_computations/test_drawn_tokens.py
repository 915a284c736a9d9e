"""Drawn tokens and grown trees, computed a second time with plain loops over numbers.

Leaves out: whole runs (`test_draws.py`, `test_trees.py`).
"""

import math
from collections.abc import Callable, Sequence
from itertools import cycle, product
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from instep.checks import sampled_tokens
from instep.checks.sampled_tokens import Row, Said
from instep.verdict import Tier
from instep.watch.event_context import RowSpan
from instep_reference.contract.engine import Forward, Idle
from instep_reference.contract.engine import Row as BatchRow
from instep_reference.contract.sampling import Sampling
from instep_reference.sampling import Drawing
from support.inputs.check_contexts import of_facts as context

# -- the bounds of a draw --------------------------------------------------------------------------------

TOKENS, PARENTS = (9, 2, 0, 2, 1), (-1, 0, 0, 0, 3)  # the root's children are 2 and 0; node 3 has the child 1
SINGLE = torch.float32
Bounds = tuple[list[float], list[float]]


def bounds(
    x: Sequence[float], how: Sampling, error: float, eps: float, edges: Callable[[float], None] = lambda part: None
) -> Bounds:
    """The smallest and the largest weight of each token if each logit errs by at most `error`.

    edges: called with each part of the total with which top-p is compared
    """
    count, heat = len(x), how.temperature
    off = error / heat + 4 * eps * (max(map(abs, x)) / heat + 1)
    low, high = ([math.exp((one - max(x)) / heat + side * off) for one in x] for side in (-1, 1))
    order = sorted(range(count), key=lambda token: (-x[token], token))
    sure = [sum(other > x[token] + 2 * error for other in x) if error else order.index(token) for token in range(count)]
    may = [sum(other >= x[token] - 2 * error for other in x) - 1 if error else order.index(token)
           for token in range(count)]  # fmt: skip
    if how.top_k is not None:
        low = [one if before < how.top_k else 0.0 for one, before in zip(low, may, strict=True)]
        high = [one if before < how.top_k else 0.0 for one, before in zip(high, sure, strict=True)]
    if how.top_p is not None and how.top_p < 1:
        slack, edge = 2 * math.sqrt(count) * eps, float(torch.tensor(how.top_p, dtype=torch.float32))
        least, most = [low[token] for token in order], [high[token] for token in order]
        small, large = list(low), list(high)
        for token in range(count):
            for kept, side, before, after in ((small, 1, most[: may[token]], [*least[may[token] + 1 :], low[token]]),
                                              (large, -1, least[: sure[token]], most[sure[token] :])):  # fmt: skip
                part = sum(before) / (sum(before) + sum(after)) * (1 + side * slack) if sum(before) else 0.0
                edges(part)
                kept[token] *= part < edge
        low, high = small, large
    return low, high


def reaches(weights: Bounds, token: int, first: float, last: float, children: Sequence[int], slack: float) -> bool:
    """Whether these uniforms can draw a token: the sum before it may be at most, the sum with it above the uniform."""
    low, high = weights

    def between(before: list[int], after: list[int], uniform: float, among: list[int]) -> bool:
        least, others = sum(low[one] for one in before), sum(high[one] for one in among if one not in before)
        most, beside = sum(high[one] for one in after), sum(low[one] for one in among if one not in after)
        if least and least / (least + others) * (1 - slack) > uniform:
            return False
        return not after or (bool(most) and most / (most + beside) * (1 + slack) > uniform)

    every = list(range(len(low)))
    if not high[token]:
        return False
    if token in children:
        at = children.index(token)
        return between([*children[:at]], [*children[: at + 1]], first, every)
    rest = [one for one in every if one not in children]
    return between([*children], [], first, every) and between(
        [one for one in rest if one < token], [one for one in rest if one <= token], last, rest)  # fmt: skip


UNEVEN, EVEN = (0.5, -1.0, 1.0, 1.0, 3.0), (0.0,) * 4
HOW = (
    Sampling(1.0), Sampling(0.5, top_k=3), Sampling(2.0, top_k=2), Sampling(2.0, top_p=0.5), Sampling(1.5, 4, 0.75),
    Sampling(0.5, top_p=1.0), Sampling(1.0, top_p=0.9),
)  # fmt: skip


@pytest.mark.parametrize(("x", "error", "width", "factor"), [
    ((0.0, 0.6, 1.2, 1.8, 2.4), 0.25, torch.float32, 1.0),
    (UNEVEN, 0.25, torch.bfloat16, 1.0), (UNEVEN, 0.0625, torch.float32, 1.0), (UNEVEN, 0.0625, torch.float32, 2.0),
    (EVEN, 0.0, torch.float32, 0.0)])  # fmt: skip
def test_bounds_of_a_draw(x: tuple[float, ...], error: float, width: torch.dtype, factor: float) -> None:
    """With uniforms a little before and after each bound, and on it where no sum is rounded (factor 0)."""
    eps, logits = torch.finfo(width).eps * factor, torch.tensor(x, dtype=torch.float64)
    slack, offs = 2 * math.sqrt(len(x)) * eps, (-1e-9, 1e-9) if factor else (0.0,)
    for how, (node, children) in zip(
        HOW[: 3 if factor == 2 else None], cycle(((0, [2, 0]), (3, [1]), (0, [2, 0]), (2, []))), strict=False
    ):
        edges = list[float]()
        low, high = weights = bounds(x, how, error * factor, eps, edges.append)
        for off, edge in product((-1e-6, 1e-6), {round(edge, 9) for edge in edges} if factor < 2 else ()):
            near = Sampling(how.temperature, how.top_k, edge + off)
            if 0 < edge + off < 1:
                its = sampled_tokens._Weights.of(Row(logits, Drawing.alone(near, (0.5,)), 0), error * factor, eps)
                parts = bounds(x, near, error * factor, eps)
                assert its.low.tolist() == pytest.approx(parts[0], rel=1e-12), near
                assert its.high.tolist() == pytest.approx(parts[1], rel=1e-12), near
        every, rest, pairs = range(len(x)), [one for one in range(len(x)) if one not in children], {(0.999, 0.0)}
        for tokens, among in ((children[:1], every), (children, every), *((rest[:at], rest) for at in every[1:])):
            for one, other, side, off in product((low, high), (low, high), (-1, 1), offs):
                total = sum((one if token in tokens else other)[token] for token in among) or 1
                sums = max(round(sum(one[token] for token in tokens) / total * (1 + slack * side), 12) + off, 0.0)
                if one is not other and (one is low) is (side < 0):
                    pairs.add((sums, 0.4) if among is every else (0.999, sums))
        for first, last in pairs:
            uniforms = (*(first if one == node else 0.3 for one in range(5)), last)
            row = Row(logits, Drawing(how, TOKENS, PARENTS, uniforms), node)
            due = [reaches(weights, token, first, last, children, slack) for token in range(len(x))]
            found = [sampled_tokens.reachable(row, token, error, width, factor) for token in range(len(x))]
            assert found == due, (how, node, first, last)
            assert factor != 1 or sampled_tokens.sure(row, error, width) is (sum(due) == 1)


@pytest.mark.parametrize("how", [Sampling(1.0, top_k=7), Sampling(1.0, top_p=0.25)], ids=["top-k", "top-p"])
def test_equal_logits_are_cut_in_the_order_of_their_tokens(how: Sampling) -> None:
    x = (1.0, 0.0) * 20
    row = Row(torch.tensor(x, dtype=torch.float64), Drawing.alone(how, (0.5,)), 0)
    found, due = sampled_tokens._Weights.of(row, 0.0, 0.0), bounds(x, how, 0.0, 0.0)
    assert (found.low.tolist(), found.high.tolist()) == (pytest.approx(due[0]), pytest.approx(due[1]))


@pytest.mark.parametrize("least", [0.0, 0.3, 1.0, 1.2, 2.0, 2.5, 100.0, 2.0**20, 2.0**20 + 1])
def test_part_is_the_smallest_of_the_allowance(least: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """To a part in 1024 of the first allowance, or of the octave that it is in; beyond 2^20 the token is impossible."""
    row = Row(torch.zeros(3), Drawing.alone(Sampling(1.0), (0.5,)), 0)
    monkeypatch.setattr(
        sampled_tokens, "reachable", lambda *given: (given[0], *given[2:4]) == (row, 0.5, SINGLE) and given[4] >= least
    )
    grain = (1.0 if least <= 1 else 2.0 ** (math.ceil(math.log2(least)) - 1)) / 1024
    due = max(math.ceil(least / grain), 1) * grain if least <= 2**20 else math.inf
    assert sampled_tokens.part(row, 2, 0.5, SINGLE) == due
    assert sampled_tokens.part(row, 3, 0.5, SINGLE) == sampled_tokens.part(row, -1, 0.5, SINGLE) == math.inf


# -- known mistakes of a draw ----------------------------------------------------------------------------


def weights_of(x: Sequence[float], how: Sampling, heat: float | None = None) -> list[float]:
    """Softmax of the largest top_k, then of the tokens whose sum before them is below top_p; at this temperature."""
    heat = how.temperature if heat is None else heat
    order = sorted(range(len(x)), key=lambda token: (-x[token], token))[: how.top_k]
    score = {token: math.exp(x[token] / heat) for token in order}
    if how.top_p is not None:
        order = [token for at, token in enumerate(order)
                 if sum(score[one] for one in order[:at]) / sum(score.values()) < how.top_p]  # fmt: skip
    return [score[token] / sum(score[one] for one in order) if token in order else 0.0 for token in range(len(x))]


def draw(
    weights: Sequence[Sequence[float]],
    tokens: Sequence[int],
    parents: Sequence[int],
    uniforms: Sequence[float],
    wrong: str = "",
) -> list[int]:
    """A token of each node: of the first child whose sum is above the node's uniform, or one of the others."""
    own = []
    for node, row in enumerate(weights):
        children = [*dict.fromkeys(token for at, token in enumerate(tokens) if at > node and (
            wrong == "later" or parents[at] == node))]  # fmt: skip
        sums = [row[child] if wrong == "restarted" else sum(row[one] for one in children[: at + 1])
                for at, child in enumerate(children)]  # fmt: skip
        bar = uniforms[node] * (max(row) if wrong == "whole" else 1)
        token = next((child for child, until in zip(children, sums, strict=True) if until > bar), -1)
        if token < 0:
            rest = [0.0 if one in children and wrong != "kept" else each for one, each in enumerate(row)]
            bar = (uniforms[node] if wrong == "by_node" else uniforms[-1]) * sum(rest)
            token = next((one for one in range(len(rest)) if sum(rest[: one + 1]) > bar), -1)
        own.append(token)
    return own


def drawn_wrongly(
    x: Sequence[Sequence[float]],
    how: Sampling,
    tokens: Sequence[int],
    parents: Sequence[int],
    us: tuple[float, ...],
    beside: dict[str, Any],
    earlier: tuple[float, ...],
) -> list[tuple[str, list[int]]]:
    """Each known mistake of request "a", and the tokens that it draws."""

    def again(us: Sequence[float] = us, how: Sampling = how, wrong: str = "") -> list[int]:
        return draw([weights_of(row, how) for row in x], tokens, parents, us, wrong)

    def filled(us: Sequence[float]) -> list[float]:
        return [us[node] if node < len(us) - 1 else 0.0 for node in range(len(x))] + [us[-1]]

    argmax = [row.index(max(row)) for row in map(list, x)]
    depths = [0 if parent < 0 else 1 if parent == 0 else 2 for parent in parents]
    found = [(name, again(wrong=wrong)) for name, wrong in (
        ("children-stay", "kept"), ("children-not-accumulated", "restarted"), ("later-drafts-as-children", "later"),
        ("weights-without-their-total", "whole"), ("final-uniform-of-the-node", "by_node"))]  # fmt: skip
    for name in sorted({*beside} - {"a"}):
        theirs = beside[name]
        found.append(("uniforms-of-another-request", again(filled(theirs.uniforms if theirs else (0.0,)))))
        found.append(("sampling-of-another-request", again(how=theirs.sampling) if theirs else argmax))
    found += [("argmax", argmax), ("uniforms-of-zero", again([0.0] * len(us)))]
    if earlier:
        found.append(("uniforms-of-the-round-before", again(filled(earlier))))
    *own, final = us
    if len(x) > 1:
        found += [(name, again([*its, final])) for name, its in (
            ("uniform-of-the-node-after", own[1:] + own[:1]), ("uniform-of-the-node-before", own[-1:] + own[:-1]),
            ("uniform-of-the-depth", [own[depth] for depth in depths]), ("uniform-of-the-root", own[:1] * len(own)),
            ("uniforms-after-a-zero", [0.0, *own[:-1]]))]  # fmt: skip
    heat, top_k, top_p = how.temperature, how.top_k, how.top_p
    found += [
        (name, again(how=other))
        for name, other in (
            ("no-temperature", Sampling(1.0, top_k, top_p)),
            ("no-top-k", Sampling(heat, None, top_p)),
            ("no-top-p", Sampling(heat, top_k)),
            ("temperature-inverted", Sampling(1 / heat, top_k, top_p)),
        )
        if other != how
    ]
    if top_p is not None:
        kept = [[each > 0 for each in weights_of(row, how, 1.0)] for row in x]
        masked = [[score if one else -math.inf for score, one in zip(row, its, strict=True)]
                  for row, its in zip(x, kept, strict=True)]  # fmt: skip
        found.append(("top-p-first", draw([weights_of(row, Sampling(heat)) for row in masked], tokens, parents, us)))
    return found


def test_every_known_mistake_of_a_draw_gives_its_tokens() -> None:
    dice, seen = torch.Generator().manual_seed(6), dict[str, set[bool]]()
    for number in range(28):
        wide, count = [Sampling(2.0), Sampling(0.5, 3), Sampling(2.0, None, 0.75), Sampling(1.5, 4, 0.6)][number % 4], 5
        tokens, parents = [((0,), (-1,)), (TOKENS, PARENTS), (TOKENS, PARENTS), ((9, 1), (-1, 0))][number % 7 % 4]
        x = torch.randn(len(tokens), count, generator=dice, dtype=torch.float64)
        us, more, before = (tuple(torch.rand(size, generator=dice).tolist())
                            for size in (len(tokens) + (len(tokens) > 1), 4, [3, 7, 1][number % 3]))  # fmt: skip
        drawing = Drawing(wide, tokens, parents, us)
        beside = {"b": Drawing(Sampling(0.25, 2), (9, 1, 2), (-1, 0, 0), more), "a": drawing, "c": None}
        earlier = before if number % 2 else ()
        said = Said(RowSpan("a", "verify", 0, 5, 0, 0, 5), drawing, x, [0] * len(x), SINGLE)
        full = us if len(us) > 1 else (0.0, *us)
        due = drawn_wrongly(x.tolist(), wide, tokens, parents, full, beside, earlier)
        found = [(known.name, own) for known, own in sampled_tokens._mistakes(said, beside, earlier)]
        assert found == due, number
        right = draw([weights_of(row, wide) for row in x.tolist()], tokens, parents, full)
        assert sampled_tokens.choices(sampled_tokens.probabilities(x, wide), drawing) == right
        assert [row.drawn for row in Row.every(x, drawing)] == right
        for name, own in due:
            seen.setdefault(name, set()).add(own == right)
        own = due[number % len(due)][1]
        told = sampled_tokens.wrong_way(one := said._replace(own=own), [one], beside, {"a": earlier, "b": more})
        assert told is not None and [*told.names] == [*dict.fromkeys(name for name, its in due if its == own)]
        nobody = one._replace(own=[count] * len(x))  # no mistake draws a token after the last
        assert sampled_tokens.wrong_way(one, [one, nobody], beside, {"a": earlier, "b": more}) is None
    assert [name for name, same in seen.items() if same == {True}] == [], "each mistake shows"


def test_drawing_has_the_uniforms_of_the_row_and_the_window() -> None:
    how, rows = (
        Sampling(2.0),
        (BatchRow("b", "verify", uniforms=(0.1, 0.2)), BatchRow("a", "verify", uniforms=(0.5, 0.7))),
    )
    expected = SimpleNamespace(sampling={"a": how}, windows={"a": (9,), "b": (1,)}, parents={"a": (-1,)})
    for event, request, kind, count, due in (
        (Forward(rows), "a", "verify", 1, Drawing(how, (9,), (-1,), (0.5, 0.7))),
        (Forward(rows), "a", "decode", 1, Drawing(how, (0,), (-1,), (0.5, 0.7))),
        (Forward(rows), "a", "verify", 0, None),
        (Forward(rows), "b", "verify", 1, None),
        (Idle(), "a", "verify", 1, None),
    ):
        span = RowSpan(request, kind, 0, 1, 0, 0, count)  # type: ignore[arg-type]
        assert sampled_tokens.drawing_of(context(event=event, expected=expected), span) == due


def test_drawn_tokens_of_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of 3 and 1 for two tokens, so that uniforms from 0.75 on draw token 1. Most uniforms are 0.9.

    f0 and f1 drew with the uniforms of f2 or with their earlier ones, f3 is right, t is at the edge. Not judged: n has
    one logit that is NaN, g takes the argmax, x is gone, p shows no choice, and q shows nothing.
    """
    uniforms = {
        "f0": 0.9,
        "f1": 0.9,
        "f2": 0.1,
        "f3": 0.9,
        "t": 0.75 + 2.0**-24,
        "n": 0.9,
        "x": 0.9,
        "p": 0.9,
        "q": 0.9,
    }
    names = ["f0", "f1", "f2", "f3", "t", "n", "g", "x", "p", "q"]
    spans = [RowSpan(name, "decode", at, 1, 0, at, 1) for at, name in enumerate(names)]
    logits = torch.tensor([[3.0, 1.0]]).log().repeat(9, 1)
    logits[5, 1] = torch.nan
    places = {sampled_tokens.PICK: torch.tensor([0, 0, 0, 1, 0, 0, 1, 0]), sampled_tokens.LOGITS: logits}
    monkeypatch.setattr(sampled_tokens, "row_spans", lambda context, stage: spans if stage == "trunk" else [])
    event = Forward(tuple(BatchRow(name, "decode", uniforms=(us,)) for name, us in uniforms.items()))
    why = "the final draw takes the uniform of its node, or " + ", or ".join(
        f'with the uniforms of request "{name}"' for name in ("f2", "g")
    )
    for before, missing, others in (
        (None, None, 3), ({"f0": (0.1,), "f1": (0.9,)}, None, 3), (None, sampled_tokens.PICK, 0),
        ({"f0": (0.1,), "f1": (0.2,)}, None, 4), (None, sampled_tokens.LOGITS, 0), (None, "all", 0),
    ):  # fmt: skip
        shown = {place: tensor for place, tensor in places.items() if place != missing}
        expected = SimpleNamespace(
            sampling=dict.fromkeys(uniforms, Sampling(1.0)), slots_after={"f1": 7}, slots_before={}
        )
        found = [
            *sampled_tokens.Draws()(
                context(
                    event=event,
                    shown=SimpleNamespace(whole=missing != "all", gone={"x"}),
                    subject=SimpleNamespace(places=shown),
                    earlier=SimpleNamespace(forward=before and SimpleNamespace(uniforms=before)),
                    expected=expected,
                )
            )
        ]
        assert [one.request for one in found] == (names[:5] if missing is None else [])
        for one in found:
            wrong, tie = one.request in ("f0", "f1"), one.request == "t"
            says = (
                f"{why}, or {others} other mistakes; row 0 drew 0; its own logits and uniforms draw 1" if wrong else ""
            )
            assert one.diagnosis == says
            assert (one.check, one.tier, one.event, one.place) == ("draws", Tier.DERIVED, 4, sampled_tokens.PICK)
            assert (one.elements, one.blocks, one.allowed, one.undecided) == (1, 1, 1.0, int(tie))
            assert one.worst > 1 if wrong else 0 < one.worst < 0.1 if tie else one.worst == 0
            assert one.slot == (7 if one.request == "f1" else None)


def test_distance_of_drawn_tokens_is_that_of_the_width_of_the_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """fp64 for logits of fp64 only; the worst row of a request is reported."""
    monkeypatch.setattr(
        sampled_tokens, "part", lambda row, token, error, width: token + error + row + 100 * (width == SINGLE)
    )
    for width, more in ((torch.float64, 0), (torch.float32, 100), (torch.bfloat16, 100)):
        found = sampled_tokens.against([10, 20, 30], [1, 2, 3], [5, 2, 7], [0.5, 0.25, 0.125], width)  # type: ignore[list-item]
        assert found == [15.5 + more, 0.0, 37.125 + more]
    span, drawing = RowSpan("a", "verify", 0, 3, 0, 0, 3), Drawing.alone(Sampling(1.0), (0.5,))
    said = Said(span, drawing, torch.zeros(3, 2), [4, 5, 6], SINGLE)
    for parts, says, ties in (
        ([0.5, 2.0, 1.5], "row 1 drew 5; its own logits and uniforms draw 8", 1),
        ([0.5, 1.0, 0.0], "", 2),
        ([0.0, 1.0, 3.0], "row 2 drew 6; its own logits and uniforms draw 9", 1),
    ):
        one = sampled_tokens.Draws()._drawn(context(), said, [7, 8, 9], parts, None)
        assert (one.diagnosis, one.undecided, one.worst, one.elements, one.blocks) == (says, ties, max(parts), 3, 3)


def test_requests_with_one_impossible_token_are_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of the allowance of two requests with two rows each. All mistakes of wrong requests are compared."""
    spans = [RowSpan(name, "verify", 2 * at, 2, 0, 2 * at, 2) for at, name in enumerate("ab")]
    drawing, told = Drawing(Sampling(1.0), (9, 0), (-1, 0), (0.5, 0.5, 0.5)), list[Any]()
    monkeypatch.setattr(sampled_tokens, "row_spans", lambda context, stage: spans)
    monkeypatch.setattr(sampled_tokens, "drawing_of", lambda context, span: drawing)
    monkeypatch.setattr(sampled_tokens, "wrong_way", lambda one, wrong, beside, earlier: told.append(
        (one.span.request, [other.span.request for other in wrong], beside, earlier)))  # fmt: skip
    places = {sampled_tokens.PICK: torch.tensor([0, 1, 0, 1]), sampled_tokens.LOGITS: torch.zeros(4, 3)}
    given = context(shown=SimpleNamespace(whole=True, gone=()), subject=SimpleNamespace(places=places),
                    earlier=SimpleNamespace(forward=SimpleNamespace(uniforms={"a": (0.5,)})))  # fmt: skip
    for parts, wrong in (
        ([[0.0, 1.5], [1.0, 0.0]], "a"),
        ([[0.5, 0.0], [3.0, 0.0]], "b"),
        ([[1.0, 1.0], [0.5, 1.0]], ""),
        ([[1.25, 2.0], [0.0, 4.0]], "ab"),
    ):
        told.clear()
        left = iter(parts)
        monkeypatch.setattr(sampled_tokens, "against", lambda *given, left=left: next(left))
        assert [one.agrees for one in sampled_tokens.Draws()(given)] == [name not in wrong for name in "ab"]
        assert told == [(name, [*wrong], dict.fromkeys("ab", drawing), {"a": (0.5,)}) for name in wrong]
