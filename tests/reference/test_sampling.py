"""Drawn choices: the definition by hand, equality with rejection sampling, and the exact target distribution.

Leaves out: acceptance with given probabilities (`test_acceptance.py`), and the optimized op.
"""

import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import pairwise, product
from pathlib import Path as File

import msgspec
import pytest
import torch

from instep_reference.acceptance import block_sampled, chain, draws, greedy, sampled
from instep_reference.contract.engine import Admit, Path, Row
from instep_reference.contract.sampling import LEAST_PART, UNIFORM, Sampling
from instep_reference.engine import ReferenceEngine
from instep_reference.label_ledger import LedgerEngine
from instep_reference.sampling import probabilities
from support.inputs.rounds import config, weights
from support.running.covering import few

LOGITS = torch.tensor([[2.0, 0.0, 2.0, 1.0, -3.0]], dtype=torch.float64)


@pytest.mark.parametrize(("sampling", "weighs"), [
    (Sampling(1.0), [2.0, 0.0, 2.0, 1.0, -3.0]),
    (Sampling(0.5), [4.0, 0.0, 4.0, 2.0, -6.0]),
    (Sampling(1.0, top_k=1), [2.0, None, None, None, None]),  # the lower id of two equal logits
    (Sampling(1.0, top_k=3), [2.0, None, 2.0, 1.0, None]),
    (Sampling(1.0, top_k=9), [2.0, 0.0, 2.0, 1.0, -3.0]),
    (Sampling(1.0, top_p=1.0), [2.0, 0.0, 2.0, 1.0, -3.0]),
    (Sampling(1.0, top_p=1 - 1e-9), [2.0, 0.0, 2.0, 1.0, -3.0]),  # 1 in fp32
    (Sampling(1.0, top_p=0.1), [2.0, None, None, None, None]),
    (Sampling(1.0, top_p=LEAST_PART), [2.0, None, None, None, None]),
    (Sampling(1.0, top_p=0.42), [2.0, None, 2.0, None, None]),  # the first alone has 0.397
    (Sampling(0.5, top_p=0.7), [4.0, None, 4.0, None, None]),  # of the kept weights at this temperature
    (Sampling(2.0, top_p=0.7), [1.0, None, 1.0, 0.5, None]),
    (Sampling(1.0, top_k=2, top_p=0.5), [2.0, None, None, None, None]),  # one of two has exactly the half
    (Sampling(1.0, top_k=2, top_p=0.51), [2.0, None, 2.0, None, None]),
])  # fmt: skip
def test_probabilities_match_a_hand_calculation(sampling: Sampling, weighs: list[float | None]) -> None:
    right = torch.tensor([0.0 if x is None else 2.718281828459045**x for x in weighs], dtype=torch.float64)
    assert torch.allclose(probabilities(LOGITS, sampling)[0], right / right.sum(), rtol=1e-14, atol=0)


def test_temperature_and_top_p_are_those_of_fp32() -> None:
    said = probabilities(LOGITS, Sampling(0.7))
    for temperature, same in ((torch.tensor(0.7).double(), True), (0.7, False)):
        assert torch.allclose(said, (LOGITS / temperature).softmax(-1), rtol=1e-12, atol=0) is same


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_top_p_that_rounds_to_1_keeps_every_token(dtype: torch.dtype) -> None:
    """The sum of the tokens before the last one is 1 in the width of these logits."""
    logits = torch.tensor([[0.0, -50.0]], dtype=dtype)
    assert probabilities(logits, Sampling(1.0, top_p=1 - 1e-9)).tolist() == logits.softmax(-1).tolist()


@pytest.mark.parametrize(("top_p", "wrong"), [
    (LEAST_PART, False), (LEAST_PART * (1 - 2**-53), True), (1e-46, True), (0.0, True), (math.nan, True), (1.0, False),
])  # fmt: skip
def test_a_top_p_that_may_round_to_0_is_refused(top_p: float, wrong: bool) -> None:
    due = [("top_p", "at least 1.1754943508222875e-38, and at most 1")] if wrong else []
    assert [(field, expected) for field, _, expected in Sampling(1.0, top_p=top_p).wrong()] == due


TREES = [  # tokens, parents
    ([0, 1, 2], chain(3)), ([2, 2], chain(2)), ([1], chain(1)), ([0, 1, 2, 0], [-1, 0, 0, 1]),
    ([0, 1, 1, 2], [-1, 0, 0, 0]), ([0, 2, 1, 0, 1], [-1, 0, 0, 2, 2]), ([1, 0, 1, 2], [-1, 0, 0, 0]),
]
PROBS = torch.tensor([[1, 2, 1], [3, 0, 1], [0, 4, 0], [1, 1, 2], [2, 1, 1]], dtype=torch.float64) / 4


@pytest.mark.parametrize(("tokens", "parents"), TREES)
def test_walk_along_drawn_choices_equals_rejection_sampling(tokens: list[int], parents: Sequence[int]) -> None:
    """Try every cell of every uniform: all bounds are multiples of 1/4, and the rest has at most 3 parts."""
    width, cells = len(tokens), [torch.tensor(x, dtype=torch.float64) for x in (0.0, 0.125, 0.25, 0.49, 0.5, 0.75, 0.9)]
    inner = sorted({max(parent, 0) for parent in parents})  # a leaf's own uniform decides nothing
    probs, seen = PROBS[:width], Counter[Path]()
    for chosen in product(cells, repeat=len(inner)):
        uniforms = torch.full((width,), 0.37, dtype=torch.float64)
        uniforms[inner] = torch.stack(chosen)
        for final in cells:
            path = sampled(tokens, parents, probs, uniforms, final)
            assert greedy(tokens, parents, draws(tokens, parents, probs, uniforms, final)) == path
            seen[path] += 1
    assert len(seen) >= min(width, 3)


def cells(bounds: set[Fraction]) -> Iterator[tuple[Fraction, torch.Tensor]]:
    """Length and middle of each interval between neighbouring bounds, in which no uniform changes a choice."""
    for low, high in pairwise(sorted({Fraction(0), Fraction(1), *bounds})):
        yield high - low, torch.tensor(float((low + high) / 2), dtype=torch.float64)


QUARTERS = {Fraction(n, 4) for n in range(5)} | {Fraction(n, d) for d in (1, 2, 3) for n in range(d)}


def law(tokens: Sequence[int], parents: Sequence[int], probs: torch.Tensor, said: tuple[int, ...]) -> Fraction:
    """Probability that the target chooses these tokens in turn, as long as the window has nodes for them."""
    chance, node = Fraction(1), 0
    for token in said:
        chance *= Fraction(float(probs[node, token]))
        node = next((child for child, parent in enumerate(parents) if parent == node and tokens[child] == token), -1)
    return chance


@pytest.mark.parametrize(("tokens", "parents"), TREES)
def test_path_and_bonus_have_exactly_the_target_distribution(tokens: list[int], parents: Sequence[int]) -> None:
    width, exact = len(tokens), Counter[tuple[int, ...]]()
    inner = sorted({max(parent, 0) for parent in parents})
    for chosen in product(list(cells(QUARTERS)), repeat=len(inner)):
        uniforms = torch.full((width,), 0.5, dtype=torch.float64)
        uniforms[inner] = torch.stack([middle for _, middle in chosen])
        for part, final in cells(QUARTERS):
            path = greedy(tokens, parents, draws(tokens, parents, PROBS[:width], uniforms, final))
            chance = part
            for length, _ in chosen:
                chance *= length
            exact[*(tokens[node] for node in path.nodes), path.bonus] += chance  # type: ignore[assignment]
    assert sum(exact.values()) == 1
    assert {said: float(chance) for said, chance in exact.items()} == {
        said: float(law(tokens, parents, PROBS, said)) for said in exact
    }


VOCAB, DRAWS = 6, 4000
CHI_SQUARE = 27.9  # exceeded with probability 9e-6 at 5 degrees of freedom, 1e-4 over all rules together


@few(2)
@pytest.mark.slow
@pytest.mark.parametrize("rule", ["greedy", "chain", "tree", "block"])
def test_many_draws_have_the_target_distribution(rule: str) -> None:
    """Count the first token of a window: accepted, or the bonus. Greedy has one outcome."""
    dice = torch.Generator().manual_seed(5)
    logits = torch.randn(4, VOCAB, generator=dice, dtype=torch.float64)
    tokens, parents = ([0, 3, 1, 4], [-1, 0, 0, 1]) if rule == "tree" else ([0, 3, 1, 4], chain(4))
    probs = probabilities(logits, Sampling(0.8))
    if rule == "greedy":
        probs = probabilities(logits, Sampling(1e-4))  # nearly all of it at the argmax
    counts = torch.zeros(VOCAB, dtype=torch.float64)
    uniforms = torch.rand(DRAWS, 5, generator=dice, dtype=torch.float64)
    if rule == "block":
        correct, bonus = block_sampled(
            torch.tensor([tokens] * DRAWS), probs.expand(DRAWS, -1, -1), uniforms[:, :4], uniforms[:, 4])
        first = torch.where(correct > 0, tokens[1], bonus)
        counts += torch.bincount(first, minlength=VOCAB)
    for row in uniforms if rule != "block" else ():
        path = greedy(tokens, parents, draws(tokens, parents, probs, row[:4], row[4]))
        counts[tokens[path.nodes[0]] if path.nodes else path.bonus] += 1
    if rule == "greedy":
        assert counts[int(logits[0].argmax())] == DRAWS
        return
    assert float(((counts - DRAWS * probs[0]) ** 2 / (DRAWS * probs[0])).sum()) < CHI_SQUARE
    twisted = probs[0].roll(1)  # the test can fail
    assert float(((counts - DRAWS * twisted) ** 2 / (DRAWS * twisted)).sum()) > CHI_SQUARE


PROMPT, UNIFORMS = (5, 9, 2), tuple(x / 8 for x in (1, 5, 2, 7))


def test_engine_draws_as_defined_and_accepts_by_rejection(tmp_path: File) -> None:
    engine = ReferenceEngine(weights(tmp_path / "model"), num_steps=3)
    kept: dict[str, torch.Tensor] = {}
    sampling = Sampling(1.5, top_k=20, top_p=0.9)
    engine.admit("a", PROMPT, sampling)
    engine.watch(lambda place, tensor: kept.setdefault(place.component, tensor))
    said = engine.forward((Row("a", "prefill", 3, uniforms=(0.75,)),))
    probs = probabilities(kept["logits"], sampling)
    assert said.roots["a"] == sampled([0], [-1], probs, torch.zeros(1), torch.tensor(0.75)).bonus
    # The likeliest tokens as drafts, so that some are accepted.
    for picks in ((7, 8, 9), tuple(probs[0].topk(3).indices.tolist())):
        engine.save("a", f"before {picks}")
        engine.draft(("a",), (picks,))
        kept.clear()
        own = engine.forward((Row("a", "verify", uniforms=(*UNIFORMS, 0.6)),)).own["a"].tolist()
        window = (said.roots["a"], *picks)
        probs = probabilities(kept["logits"], sampling)
        uniforms, final = torch.tensor([*UNIFORMS, 0.6], dtype=torch.float64).split([4, 1])
        assert own == draws(window, chain(4), probs, uniforms, final[0])
        answer, path = engine.commit(("a",)), sampled(window, chain(4), probs, uniforms, final[0])
        assert (int(answer.num_correct_drafts[0]), int(answer.bonus[0])) == (len(path.nodes), path.bonus)
        said.roots["a"] = path.bonus  # type: ignore[index]
    engine.preempt("a")
    engine.resume("a")
    engine.forward((Row("a", "decode", uniforms=(0.3,)),))
    engine.admit("b", PROMPT)
    engine.load("b", f"before {(7, 8, 9)}")  # sampling belongs to the request: "b" takes the argmax
    kept.clear()
    assert engine.forward((Row("b", "decode"),)).roots["b"] == int(kept["logits"].argmax())


def test_drawn_label_depends_on_every_input_of_a_draw() -> None:
    def own(sampling: Sampling, uniforms: tuple[float, ...] = UNIFORMS, picks: tuple[int, ...] = (1, 2)) -> list[int]:
        engine = LedgerEngine(config(vocab_size=4096), num_steps=2)
        engine.admit("a", PROMPT, sampling)
        engine.forward((Row("a", "prefill", 3, root=4, uniforms=(0.5,)),))
        engine.draft(("a",), (picks,))
        said: list[int] = engine.forward((Row("a", "verify", uniforms=uniforms),)).own["a"].tolist()
        return said

    right = own(Sampling(1.0, 5, 0.5))
    for other in (Sampling(2.0, 5, 0.5), Sampling(1.0, 6, 0.5), Sampling(1.0, 5, 0.25), Sampling(1.0, 5)):
        assert all(one != two for one, two in zip(own(other), right, strict=True))
    for number in range(3):
        moved = own(Sampling(1.0, 5, 0.5), uniforms=tuple(x + UNIFORM * (n == number) for n, x in enumerate(UNIFORMS)))
        assert [n for n in range(3) if moved[n] != right[n]] == [number]
    assert own(Sampling(1.0, 5, 0.5), picks=(1, 3))[1] != right[1]
    assert own(Sampling(0.0)) == own(Sampling(0.0, 5), uniforms=())


def test_old_traces_read_and_write_unchanged() -> None:
    line = b'{"event":"admit","request":"a","prompt":[1]}'
    assert msgspec.json.encode(msgspec.json.decode(line, type=Admit)) == line
    drawn = Admit("a", (1,), Sampling(0.5))
    assert json.loads(msgspec.json.encode(drawn))["sampling"] == {"temperature": 0.5}
    exact = Row("a", "decode", uniforms=(1 - UNIFORM, UNIFORM, 0.0))
    assert msgspec.json.decode(msgspec.json.encode(exact), type=Row) == exact
