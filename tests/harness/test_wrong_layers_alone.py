"""Explanations of results of experts, streams, ranks and labels, each computed again by hand from a few numbers.

Leaves out: formulas of other layers (`test_explanations.py`), and whole runs (`test_mistakes.py`).
"""

from collections.abc import Iterable
from dataclasses import dataclass, make_dataclass, replace
from functools import reduce
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from instep.checks.exact_labels import folded
from instep.diagnose.mistakes import (
    experts,
    residual_streams,
    wrong_labels,
    wrong_weights,
)
from instep.diagnose.mistakes.experts import Mixture
from instep.watch.memory_changes import pattern
from instep_reference import per_layer_embedding as ple
from instep_reference.contract.place_names import Place
from instep_reference.contract.qwen4_config import PleShape
from instep_reference.label_ledger import expand
from instep_reference.label_mixing import MASK, mix
from instep_reference.mlp import dense
from instep_reference.weights import MlpWeights, MoeWeights

KEY = Place("trunk", 0, "key")


def value(**given: Any) -> Any:
    """A frozen value of these fields, for code that replaces some of them."""
    return make_dataclass("Value", given)(**given)


def named_tensors(found: Iterable[Any]) -> dict[str, torch.Tensor]:
    return {one.sentence: one.wrong for one in found}


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


# -- experts ---------------------------------------------------------------------------------------------


def test_the_experts_of_a_row_are_added_to_a_shared_one_without_its_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    """3 rows of 2 channels, 4 experts of which a row takes 2, and a shared one."""
    g = torch.Generator().manual_seed(7)
    every, router, gate, x = (torch.randn(*shape, generator=g, dtype=torch.float64)
                              for shape in ((5, 3, 2, 2), (4, 2), (1, 2), (3, 2)))  # fmt: skip
    *routed, shared = (MlpWeights(*one) for one in every)
    config: Any = SimpleNamespace(experts_per_token=2, routed_scale=1.0, norm_topk=True)
    scores = x @ router.T
    mix = Mixture(config, MoeWeights(router, tuple(routed), shared, gate), x, scores, scores.argsort(descending=True))
    monkeypatch.setattr(experts, "mixture", lambda case: mix)
    for name in ("_weights", "_experts", "_of_other_layers", "_left_out", "_grouped"):
        monkeypatch.setattr(experts, name, lambda *given: ())
    found = named_tensors(experts.experts(SimpleNamespace()))["the shared expert is not gated"]  # type: ignore[arg-type]
    shares = mix.shares(2, True)
    for row, numbers in enumerate(mix.ranking[:, :2].tolist()):
        parts = [share * dense(routed[number], x[row]) for share, number in zip(shares[row], numbers, strict=True)]
        assert torch.allclose(found[row], sum(parts) + dense(shared, x[row]))
    assert torch.equal(mix.ranked(scores), mix.ranking)


def test_rows_may_go_to_other_experts_or_lack_some(monkeypatch: pytest.MonkeyPatch) -> None:
    """4 rows with two of 3 experts each, and the shared one, number 3. All numbers are exact."""
    made = torch.randint(1, 999, (4, 4, 2), generator=torch.Generator().manual_seed(8)).double()
    share = torch.tensor([[4.0, 2.0, 1.0]] * 4, dtype=torch.float64)
    ranking = torch.tensor([[2, 0, 1], [0, 1, 2], [2, 1, 0], [1, 0, 2]])
    chosen = torch.cat((ranking[:, :2], torch.full((4, 1), 3)), 1)

    def rows(experts: Any, shares: Any = share) -> Any:
        made_of: Any = [sum(float(shares[t][n]) * made[experts[t][n], t] for n in range(3)) for t in range(4)]
        return torch.stack(made_of)

    mix: Any = SimpleNamespace(x=made[0], scores=made[0], ranking=ranking, config=None, mlp=None, top=2)
    for name, result in (("mixture", mix), ("_pairs", (made, share, chosen)), ("Mixture", mix)):
        monkeypatch.setattr(experts, name, lambda *given, result=result: result)
    other, less = chosen.clone(), share.clone()
    other[1, 1], less[1, 1] = 2, 0
    piece = SimpleNamespace(span=SimpleNamespace(begin=0), truth=SimpleNamespace(places={"mlp"}))
    case: Any = value(found=rows(other), piece=piece, pieces=[piece], finding=SimpleNamespace(place="mlp"))
    monkeypatch.setattr(experts, "SHOWN", 1)
    for most, tried in ((4**3, 4**3), (4**3 - 1, 4 * 3)):  # every choice of three, or another one in each place
        monkeypatch.setattr(experts, "ANY", most)
        (one,) = experts.other_experts(case)
        assert (one.sentence, one.tries) == ("row 1 goes to expert 2 instead of expert 1", tried)
        assert torch.equal(one.wrong, rows(other))
    weights = torch.zeros(4, 3, dtype=torch.float64).scatter(1, ranking[:, :2], share[:, :2])
    lacks: Any = SimpleNamespace(found=rows(chosen, less))
    found = named_tensors(experts._left_out(lacks, mix, weights, made[:3], made[3]))
    assert [*found] == ["lacks expert 1 in row 1"] and torch.equal(next(iter(found.values())), lacks.found)
    pairs = sorted((int(chosen[t, n]), 3 * t + n) for t in range(4) for n in range(3))
    late = chosen.flatten().clone()
    for (before, _), (_, at) in pairwise(pairs):
        late[at] = before
    found = named_tensors(experts._grouped(case))
    assert torch.equal(found["the first row of every expert goes to the expert before it"], rows(late.view(4, 3)))


def test_weights_of_experts_are_exchanged() -> None:
    """3 experts, whose gate, up and down are one number each."""
    right = tuple(MlpWeights(*(torch.tensor(10 * number + part) for part in range(3))) for number in range(3))
    found = {says: [[int(x) for x in (one.gate, one.up, one.down) if x is not None] for one in wrong]
             for says, wrong in experts._experts(right)}  # fmt: skip
    assert found["each expert has the weights of the expert before it"] == [[20, 21, 22], [0, 1, 2], [10, 11, 12]]
    assert found["each expert takes gate and up from the expert after it"] == [[10, 11, 2], [20, 21, 12], [0, 1, 22]]
    assert found["gate and up of its experts are swapped"] == [[1, 0, 2], [11, 10, 12], [21, 20, 22]]
    assert found["gate and up of expert 1 are swapped"] == [[0, 1, 2], [11, 10, 12], [20, 21, 22]]
    assert len(found) == 8 and len([*experts._experts(tuple(replace(one, gate=None) for one in right))]) == 4


def test_experts_over_latents_may_read_scaled_ones() -> None:
    """3 rows of 2 channels, 2 experts that read and write 2 latents; their weights have a scale of 4."""
    to, back, router, x, every = drawn(2, 2), drawn(2, 2) + 1, drawn(2, 2) * 2, drawn(3, 2), drawn(3, 3, 2, 2)
    *routed, shared = (MlpWeights(*one) for one in every)
    config: Any = SimpleNamespace(experts_per_token=1, routed_scale=4.0, norm_topk=True)
    mlp = MoeWeights(router, tuple(routed), shared, None, to_latent=to, from_latent=back)
    scores = x @ router.T
    of = Mixture(config, mlp, x, scores, scores.argsort(descending=True))
    right, made = of.weighed(of.shares(1, True)), of.made(mlp.experts)
    found = named_tensors(experts._over_latents(of, right, made, of.shared()))
    wrong = found["its experts read latents times the scale of the configuration"]
    for row, (number, *_) in enumerate(of.ranking.tolist()):
        assert torch.allclose(wrong[row], dense(routed[number], 4 * to @ x[row]) @ back.T + dense(shared, x[row]))
    share, within = 0.25, "the routing weights multiply the latents, not what the experts make of them"
    right *= share
    wrong = named_tensors(experts._over_latents(of, right, made, of.shared()))[within]
    for row in range(3):
        latents = right[row, :, None] * (to @ x[row])
        parts = sum(dense(expert, each) for expert, each in zip(routed, latents, strict=True))
        assert torch.allclose(wrong[row], parts @ back.T + dense(shared, x[row]))


# -- matrices of a layer --------------------------------------------------------------------------------


# -- residual streams and n-grams ------------------------------------------------------------------------

# 2 and 3 tokens, a head each; two taps, streams and channels. Token 0 ends a text.
SHAPE = PleShape(ngram=3, taps=2, streams=2, heads=1, vocab=10, least=5, eos=0)


def of_streams(component: str = "ngrams", **own: torch.Tensor) -> Any:
    weights = SimpleNamespace(config=SimpleNamespace(eps=1e-6, streams=2, ple=()))
    return SimpleNamespace(
        component=component,
        own=own.get,
        weights=weights,
        context=SimpleNamespace(subject=SimpleNamespace(before={})),
        finding=SimpleNamespace(place=Place("trunk", 1, component), request="a"),
    )


def test_embeddings_of_wrong_n_grams_are_those_of_their_tokens() -> None:
    """Tokens 3, 0, 4 and 5 at the begin of a request; the table has the number of each entry."""
    weights: Any = SimpleNamespace(table=torch.arange(float(sum(SHAPE.sizes)))[:, None])

    def embedded(*grams: tuple[int, int, int]) -> list[list[float]]:
        by, (few, many) = ple.multipliers(SHAPE), SHAPE.sizes
        hashed = [[one * factor for one, factor in zip(gram, by, strict=True)] for gram in grams]
        return [[(a ^ b) % few, few + (a ^ b ^ c) % many] for a, b, c in hashed]

    for parents in (None, (-1, 0, 1, 2), (-1, 0, 0, 2)):
        work: Any = SimpleNamespace(start=0, memory=None, parents=parents, tokens=(3, 0, 4, 5))
        found = {says: wrong.tolist() for says, wrong in named_tensors(
            residual_streams._ngrams(of_streams(), SHAPE, weights, work)).items()}  # fmt: skip
        if parents == (-1, 0, 0, 2):
            assert not found, "rows of a tree have other tokens before them"
            continue
        says = "is that of n-grams "
        assert found[says + "that reach beyond the end of a text"] == embedded(
            (3, 0, 0), (0, 3, 0), (4, 0, 3), (5, 4, 0)
        )
        again = embedded((3, 0, 0), (0, 0, 0), (4, 0, 0), (5, 4, 0))
        assert found[says + "that also begin again after their own token"] == again
        assert found[says + "read backwards"] == embedded((0, 0, 3), (0, 3, 0), (0, 0, 4), (0, 4, 5))
        assert found[says + "without the tokens before this step"] == embedded(
            (3, 0, 0), (0, 3, 0), (4, 0, 0), (5, 4, 0)
        )


def test_n_grams_continue_from_the_tokens_before_their_step() -> None:
    """Tokens 4 and 3 after 5 and 2, or after 2 alone; two heads for each length, and token 9 ends a text."""
    shape = PleShape(ngram=3, taps=2, streams=2, heads=2, vocab=10, least=5, eos=9)
    weights: Any = SimpleNamespace(table=torch.arange(float(sum(shape.sizes)))[:, None])
    case, by = of_streams(), ple.multipliers(shape)

    def embedded(*grams: tuple[int, int, int]) -> list[list[float]]:
        rows = []
        for gram in grams:
            a, b, c = (one * factor for one, factor in zip(gram, by, strict=True))
            starts = [sum(shape.sizes[:head]) for head in range(4)]
            rows.append([start + (a ^ b ^ c * (head > 1)) % size
                         for head, (start, size) in enumerate(zip(starts, shape.sizes, strict=True))])  # fmt: skip
        return rows

    for kept, first, second in (([6, 3], (4, 2, 5), (3, 4, 2)), ([0, 3], (4, 2, 9), (3, 4, 2))):
        memory = ple.PleMemory(torch.zeros(1), torch.zeros(1), torch.tensor(kept), torch.zeros(1))
        work: Any = SimpleNamespace(start=2, memory=memory, parents=None, tokens=(4, 3))
        found = {says: wrong.tolist() for says, wrong in named_tensors(
            residual_streams._ngrams(case, shape, weights, work)).items()}  # fmt: skip
        says = "is that of n-grams "
        assert found[says + "that reach beyond the end of a text"] == embedded(first, second)
        assert found[says + "read backwards"] == embedded(first[::-1], second[::-1])
        assert found[says + "without the tokens before this step"] == embedded((4, 9, 9), (3, 4, 9))
        assert found[says + "with token 0 before the first one"] == embedded((*first[:2], first[2] % 9), second)
        work.start = 0
        (begun, *_) = named_tensors(residual_streams._ngrams(case, shape, weights, work)).values()
        assert begun.tolist() == embedded((4, 9, 9), (3, 4, 9))


def test_gates_of_embeddings_are_those_of_their_streams() -> None:
    """3 rows of two streams with two channels."""
    key, hidden, shown = drawn(3, 4), drawn(3, 4) + 1, drawn(3, 2)
    weights: Any = SimpleNamespace(key_norm=torch.zeros(4), query_norm=torch.zeros(4))
    case = of_streams("ple_written", ple_key=key, ple_value=shown)
    found = named_tensors(residual_streams._written(case, SHAPE, weights, SimpleNamespace(hidden=hidden)))  # type: ignore[arg-type]
    assert torch.equal(found["is not gated"], torch.cat((shown, shown), 1))
    k, q = (x.view(3, 2, 2) / x.view(3, 2, 2).square().mean(-1, keepdim=True).sqrt() for x in (key, hidden))
    score = (k[:, [1, 0]] * q).sum(-1) / 2**0.5
    opened = torch.sigmoid(score.sign() * score.abs().sqrt())
    expected = torch.cat((opened[:, :1] * shown, opened[:, 1:] * shown), 1)
    assert torch.allclose(found["is gated by the key of the stream before"], expected, rtol=1e-4)


def test_neighbouring_taps_read_the_last_row_of_the_window() -> None:
    """3 rows of one channel after a window of 3 rows; the taps are 3 rows apart."""
    x, window, conv = drawn(3, 1), drawn(1, 3), drawn(1, 2)
    memory = ple.PleMemory(torch.zeros(1), torch.zeros(1), torch.zeros(2), window)
    work: Any = SimpleNamespace(memory=memory, parents=None, start=3)
    case, weights = of_streams("ple_mixed", ple_normed=x), SimpleNamespace(conv=conv)
    found = named_tensors(residual_streams._ple_mixed(case, SHAPE, weights, work))  # type: ignore[arg-type]
    line = [float(window[0, 2]), *x.flatten().tolist()]
    expected = torch.tensor([float(conv[0, 0]) * line[t] + float(conv[0, 1]) * line[t + 1] for t in range(3)])
    near = found["is convolved with neighbouring taps, without the distance"]
    assert near.flatten().tolist() == pytest.approx(F.silu(expected.double()).tolist(), rel=1e-6)
    assert torch.allclose(found["is convolved without the rows before this step"], F.silu(conv[0, 1] * x))
    for parents, tree in (((-1, 0, 1), False), ((-1, 0, 0), True)):
        work.parents = parents
        assert bool([*residual_streams._ple_mixed(case, SHAPE, weights, work)]) is not tree  # type: ignore[arg-type]


# -- scales, weights and inputs --------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """Weights of a test."""

    one: Any = None
    other: Any = None
    last_norm: Any = None


def test_blocks_of_weights_are_norms_or_inside_other_blocks() -> None:
    layer = Block(torch.ones(2), Block(torch.ones(1), Block(torch.ones(3))), Block(torch.zeros(0), torch.ones(2)))
    names = [name for name, _ in wrong_weights._parts(layer)]
    assert names == ["one", "other.one", "other.other", "other.other.one", "last_norm", "last_norm.other"]


# -- labels and rows of the draft head -------------------------------------------------------------------


def of_labels(component: str, span: Any, **before: Any) -> Any:
    truth = SimpleNamespace(before=before, places={Place("trunk", 0, "beta"): None})
    return SimpleNamespace(finding=SimpleNamespace(place=Place("trunk", 0, component)), right=torch.zeros(2, 1).long(),
                           context=SimpleNamespace(truth=truth, index=4, earlier=SimpleNamespace(forward=None)),
                           history=SimpleNamespace(of=lambda request, index: ()))  # fmt: skip


def test_labels_of_a_conv_may_be_made_after_an_empty_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """2 rows after 3 tokens; the conv reads 3 rows, so its window has 2."""
    fed, span = torch.tensor([[5], [6]]), SimpleNamespace(request="a", start=3)
    monkeypatch.setattr(wrong_labels, "rows", lambda side, place, span: fed)
    case = of_labels("mixed", span, a=SimpleNamespace(conv={0: torch.tensor([[3, 4]])}))
    (wrong,) = named_tensors(wrong_labels._mixed(case, span)).values()  # type: ignore[arg-type]
    own = wrong_labels.code(case.finding.place)
    assert wrong_labels.heads(wrong) == [reduce(mix, taps, own) for taps in ([0, 0, 5], [0, 5, 6])]


def test_labels_may_depend_on_a_state_inside_the_last_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """The states before and after the two nodes of a window are 11, 22 and 33; after one token 22 is held."""
    span: Any = SimpleNamespace(request="a", start=0)
    parts = {name: torch.tensor([[7 + number], [9 + number]]) for number, name in enumerate(
        ("k", "v", "log_decay", "beta", "q"))}  # fmt: skip
    monkeypatch.setattr(wrong_labels, "rows", lambda side, place, span: parts[place.component])
    case = of_labels("update", span, a=SimpleNamespace(state={0: torch.tensor([22])}, length=0),
                     b=SimpleNamespace(state={0: torch.tensor([44])}, length=1))  # fmt: skip
    theirs = 'depends on the state of request "b"'
    for states, said in (([11, 22, 33], [(0, 11), (2, 33)]), ([11, 33], []), ([], [])):
        monkeypatch.setattr(wrong_labels, "states_of_window", lambda *given, states=states: states)
        found = named_tensors(wrong_labels.FAMILIES["update"](case, span))
        _, recalled, *others = found
        assert recalled == wrong_labels.NAMES["nothing-recalled"].sentence
        assert others == [f"depends on the state after {count} tokens of the last window; 1 was accepted"
                            for count, _ in said]  # fmt: skip
        for wrong, (_, chain) in zip((found[name] for name in (theirs, *others)), [(0, 44), *said], strict=True):
            own, made = wrong_labels.code(case.finding.place), []
            for row in range(2):
                k, v, log_decay, beta, _ = (int(part[row]) for part in parts.values())
                made.append(reduce(mix, (chain, k, v, log_decay, beta, own)))
                chain = folded(0, chain, k, v, log_decay, beta, True)
            assert wrong_labels.heads(wrong) == [label & MASK for label in made]


def test_rows_that_were_made_alike_are_named_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """3 rows of 2 elements, of which the first and the last have other labels."""
    right, found = expand([5, 6, 7], (2,)), expand([8, 6, 9], (2,))
    monkeypatch.setattr(wrong_labels, "_known", lambda case: {})
    case: Any = SimpleNamespace(granted=None, component="normed", right=right, found=found, finding=SimpleNamespace(
        check="labels", place=Place("trunk", 0, "normed"), request="a"))  # fmt: skip
    for last, says in (("x", "rows 0, 2 are made from x"), ("y", "row 0 is made from x; row 2 is made from y")):
        made = {8: "is made from x", 9: f"is made from {last}"}
        monkeypatch.setattr(wrong_labels, "_told", lambda label, *given, made=made: made[label])
        assert [*named_tensors(wrong_labels.made_from(case))] == [says]


def test_known_labels_are_those_of_rows_positions_and_poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """3 rows of 3 elements from position 5 on. Poison that is read as a row has one label, which no row has."""
    place = Place("trunk", 0, "normed")
    side = SimpleNamespace(places={place: expand([50, 60, 70], (3,))})
    span = SimpleNamespace(request="a", start=5, count=3, at=lambda place: (0, 3))
    monkeypatch.setattr(wrong_labels, "row_spans", lambda context, stage: [span])
    case: Any = SimpleNamespace(component="normed", context=SimpleNamespace(
        truth=side, subject=side, log=SimpleNamespace(poison=3.0), earlier=SimpleNamespace(forward=None)))  # fmt: skip
    known = wrong_labels._known(case)
    element = int(pattern(3.0, torch.int64))
    intact = [int(each) for each in expand([element], (3,))[0]]
    read = (element + sum((element - due) * (2 * at + 1) for at, due in enumerate(intact))) & MASK
    assert known.keys() == {0, 50, 60, 70, *range(1, 11), read} and known[8] == ["position 8"]
    assert [str(one) for one in known[read]] == ["poison (memory that was never written)"]


def test_rows_of_streams_are_normed_together_or_with_other_weights() -> None:
    """Two rows of two streams with two channels."""
    written, weight = drawn(2, 4), drawn(4)
    weights: Any = SimpleNamespace(conv_norm=weight, key_norm=weight + 1, query_norm=weight + 2)
    shape: Any = SimpleNamespace(streams=2)
    mean = written.square().mean(-1, keepdim=True)
    each = written.view(2, 2, 2).square().mean(-1, keepdim=True).expand(2, 2, 2).reshape(2, 4)
    case = of_streams("ple_normed", ple_written=written)
    found = named_tensors(residual_streams._ple_normed(case, shape, weights, None))  # type: ignore[arg-type]
    due = {
        "is not normed": written, "is normed over all streams together": written / (mean + 1e-6).sqrt() * (1 + weight),
        "is normed with the weight of the norm of keys": written / (each + 1e-6).sqrt() * (2 + weight),
        "is normed with the weight of the norm of streams": written / (each + 1e-6).sqrt() * (3 + weight)}  # fmt: skip
    assert all(torch.allclose(found[says], due[says]) for says in due)
