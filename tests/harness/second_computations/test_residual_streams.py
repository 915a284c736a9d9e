"""All explanations of residual streams and embeddings of n-grams, computed again from the definitions of their ops.

Leaves out: whole runs (`test_streams.py`), and memory that any component may have (`test_wrong_states.py`).
"""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from instep.diagnose.mistakes import residual_streams
from instep.oracle.single_layer_run import LayerWork
from instep_reference.contract.qwen4_config import PleShape
from instep_reference.per_layer_embedding import PleMemory, multipliers
from instep_reference.weights import LayerWeights, PleWeights, StreamWeights
from support.inputs.small_cases import NONE, SmallCase, drawn, near, sigmoid, silu, yields

T, S, D, EPS, EOS = 4, 3, 2, 0.1, 9
# Heads of n-grams of 2 and 3 tokens, two of each; three taps.
SHAPE = PleShape(ngram=3, taps=3, streams=S, heads=2, vocab=10, least=5, eos=EOS, layer=1)
OTHER = PleShape(ngram=3, taps=3, streams=S, heads=2, vocab=10, least=5, eos=EOS, index=1, layer=5)


def case_of(
    component: str, layer: LayerWeights, rows: dict[str, torch.Tensor], work: LayerWork | None, **given: Any
) -> SmallCase:  # fmt: skip
    config = SimpleNamespace(eps=EPS, streams=S, ple=(SHAPE, OTHER), ple_before=lambda layer: SHAPE)
    case = SmallCase(component, config, [layer, layer], rows, layer=1, **given)
    case.piece = SimpleNamespace(work=work)
    return case


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """[T, S, D]: each stream by its own mean square."""
    each = [x[:, stream * D : (stream + 1) * D] for stream in range(S)]
    rows = [one / (one.pow(2).sum(1, keepdim=True) / D + EPS).sqrt() for one in each]
    return torch.stack(rows, 1) * (1 + weight.view(S, D))


def together(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (x / (x.pow(2).sum(1, keepdim=True) / (S * D) + EPS).sqrt() * (1 + weight)).view(-1, S, D)


@pytest.mark.parametrize(("post", "ple"), [(True, False), (False, True), (False, False)])
def test_blocks_read_other_mixtures_of_streams(post: bool, ple: bool) -> None:
    """A block reads the residual, the streams with embeddings of n-grams, or those that the layer was given."""
    x, weights = drawn(T, S * D), StreamWeights(drawn(6), drawn(4, 6), drawn(6, 4), drawn(S, 6))
    other = StreamWeights(NONE, NONE, NONE, None)
    layer = LayerWeights(*((other, None, weights, None) if post else (weights, None, other, None)))
    work = LayerWork("trunk", 1, x if not post and not ple else x + 1, 0)
    rows = {"residual": x} if post else {"ple": x} if ple else {}
    y, right = normed(x, weights.norm), drawn(T, S)

    def mixed(y: torch.Tensor, by: float, act: Callable[[torch.Tensor], torch.Tensor] = silu) -> torch.Tensor:
        found = torch.zeros(T, D).double()
        for row in range(T):
            share = sigmoid(weights.up @ act(weights.down @ y[row].flatten() / by)).view(S, D)
            found[row] = (share * y[row]).sum(0) / S
        return found

    due = [("is the sum over the streams, not their mean", 3 * mixed(y, 3)),
           ("is mixed from streams that are normed all together", mixed(together(x, weights.norm), 3)),
           ("is mixed by shares that are not divided by the number of streams", mixed(y, 1)),
           ("is mixed by shares without silu", mixed(y, 3, lambda inner: inner)),
           ("is the mean of the streams: nothing mixes them", (y[:, 0] + y[:, 1] + y[:, 2]) / 3),
           *((f"is the normed stream {stream} alone", y[:, stream]) for stream in range(S))]  # fmt: skip
    inner = y.flatten(1) @ weights.inject.T  # type: ignore[union-attr]
    strengths = [("lacks the factor 2", sigmoid(inner / 3)),
                 ("is not divided by the number of streams inside", 2 * sigmoid(inner)),
                 ("is that of the stream before", near(right, 1)[0][1]),
                 ("is made of streams that are not normed",
                  2 * sigmoid(x @ weights.inject.T / 3))]  # type: ignore[union-attr]  # fmt: skip
    for component, expected in (("normed", due), ("strength", strengths)):
        name = f"post_{component}" if post else component
        case = case_of(name, layer, rows, work, right=right)
        assert yields(residual_streams.residual_streams(case), expected)
        for changed in ({"stage": "extend"}, {"piece": None}, {"layers": []}, {"layers": [LayerWeights(
                NONE, None, NONE, None)] * 2}, {"component": "core"}):  # fmt: skip
            case = case_of(name, layer, rows, work, right=right)
            vars(case).update(changed)
            assert yields(residual_streams.residual_streams(case), ())
        case = case_of(name, layer, rows, work, right=right)
        case.config.streams = 1
        assert yields(residual_streams.residual_streams(case), ())
        case = case_of(name, layer, {}, None, right=right)
        assert yields(residual_streams.residual_streams(case), ())
    last = StreamWeights(weights.norm, NONE, NONE, None)
    case = case_of("post_strength" if post else "strength", LayerWeights(last, None, last, None), rows, work)
    assert yields(residual_streams.residual_streams(case), ()), "nothing is injected after the last layer"


@pytest.mark.parametrize("ple", [True, False])
@pytest.mark.parametrize("component", ["residual", "hidden"])
def test_results_are_added_with_other_strengths(component: str, ple: bool) -> None:
    x, made, strength, other = drawn(T, S * D), drawn(T, D), drawn(T, S), drawn(T, S) + 1
    mlp = component == "hidden"
    rows = {"mlp": made, "residual": x, "post_strength": strength, "strength": other} if mlp else {
        "mixer": made, "strength": strength} | ({"ple": x} if ple else {})  # fmt: skip
    work = LayerWork("trunk", 1, x + 1 if mlp or ple else x, 0)
    layer = LayerWeights(None, None, None, None)

    def added(by: torch.Tensor) -> torch.Tensor:
        return torch.cat([x[:, at * D : (at + 1) * D] + by[:, [at]] * made for at in range(S)], 1)

    due = [("has the result added to every stream as it is", added(torch.ones(T, S))),
           ("has the result added with the strength of the stream before", added(near(strength, 1)[0][1]))]
    if mlp:
        due += [("has the MLP's result added with the strengths of the mixer", added(other))]
    assert yields(residual_streams.residual_streams(case_of(component, layer, rows, work)), due)
    for name in rows:
        left = {one: value for one, value in rows.items() if one != name}
        expected = due[:2] if mlp and name == "strength" else ()
        if name != "ple":
            assert yields(residual_streams.residual_streams(case_of(component, layer, left, work)), expected)
    if not mlp and not ple:
        assert yields(residual_streams.residual_streams(case_of(component, layer, rows, None)), ())


# -- embeddings of n-grams -------------------------------------------------------------------------------------


def ple_weights(**given: torch.Tensor) -> LayerWeights:
    weights = PleWeights(**{name: NONE for name in PleWeights.__annotations__} | given)
    return LayerWeights(None, None, None, None, weights)


def embedded(grams: Sequence[Sequence[int]], by: Sequence[int] | None = None, apart: bool = True) -> torch.Tensor:
    """Numbers of the entries of n-grams, each own token first; apart: each head has its table after the one before."""
    rows, factors = [], multipliers(SHAPE) if by is None else by
    for a, b, c in grams:
        two = (a * factors[0]) ^ (b * factors[1])
        hashed = (two, two, two ^ (c * factors[2]), two ^ (c * factors[2]))
        rows.append([apart * sum(SHAPE.sizes[:head]) + hashed[head] % SHAPE.sizes[head] for head in range(4)])
    return torch.tensor(rows).double()


def grams_of(before: Sequence[int], tokens: Sequence[int], end: int = EOS, own: bool = False, cut: bool = True) -> Any:
    """Each token with the two before it, which begin again after the end of a text. own: also after an own one"""
    line, found = [*before, *tokens], []
    for at in range(len(before), len(line)):
        gram, over = [line[at]], own and line[at] == EOS
        for step in (1, 2):
            over = over or line[at - step] == EOS
            gram.append(end if over and cut else line[at - step])
        found.append(gram)
    return found


@pytest.mark.parametrize("tokens", [(3, EOS, 4, 5), (4, 3, EOS, 2)])
@pytest.mark.parametrize(("start", "kept", "before"), [
    (0, [6, 3], [EOS, EOS]), (2, [6, 3], [5, 2]), (1, [0, 3], [EOS, 2]), (1, None, [EOS, EOS])])  # fmt: skip
def test_n_grams_have_other_tokens_hashes_or_tables(tokens: Any, start: int, kept: Any, before: Any) -> None:
    """A memory keeps the last two tokens, each plus one; 0 is before the first one. Another request kept 7 and 1."""
    table = torch.arange(float(sum(SHAPE.sizes)), dtype=torch.float64)[:, None]
    memory: Any = None if kept is None else PleMemory(NONE, NONE, torch.tensor(kept), NONE)
    by, by_other = multipliers(SHAPE), multipliers(OTHER)
    grams, with_zero = grams_of(before, tokens), [0 if one == EOS else one for one in before]
    says = "is that of n-grams "
    due = [(says + "that reach beyond the end of a text", embedded(grams_of(before, tokens, cut=False))),
           (says + "that also begin again after their own token", embedded(grams_of(before, tokens, own=True))),
           (says + "with 0 in the place of the end of a text", embedded(grams_of(before, tokens, end=0))),
           (says + "read backwards", embedded([gram[::-1] for gram in grams])),
           (says + "without the tokens before this step", embedded(grams_of([EOS, EOS], tokens))),
           (says + "with token 0 before the first one", embedded(grams_of(with_zero, tokens))),
           (says + "one token late", embedded(grams_of([EOS, *before][:2], [before[-1], *tokens[:-1]]))),
           ("is hashed with the multipliers of layer 5", embedded(grams, by_other)),
           ("is hashed with the multipliers in the opposite order", embedded(grams, by[::-1])),
           ("is read from the first table by every head", embedded(grams, apart=False)),
           (says + 'that begin with the tokens of request "b"', embedded(grams_of([7, 1], tokens))),
           (says + 'that begin with the tokens of request "c"', embedded(grams_of([EOS, 1], tokens)))]  # fmt: skip
    theirs = {"a": {1: torch.tensor([3, 3])}, "b": {1: torch.tensor([8, 2])}, "c": {1: torch.tensor([0, 2])},
              "d": {0: torch.tensor([8, 2])}}  # fmt: skip
    for parents in (None, (-1, 0, 1, 2), (-1, 0, 0, 2)):
        work = LayerWork("trunk", 1, drawn(T, S * D), start, memory, parents, tokens)
        case = case_of("ngrams", ple_weights(table=table), {}, work)
        case.context.subject.before = {name: SimpleNamespace(ngram=its) for name, its in theirs.items()}
        found = [*residual_streams.residual_streams(case)]
        if parents == (-1, 0, 0, 2):
            assert not found, "rows of a tree have other tokens before them"
            continue
        assert yields(found, [(one, rows.view(T, 4)) for one, rows in due])


def test_embeddings_are_gated_otherwise() -> None:
    """A key of the second row is so short that its score counts as the least one."""
    key, hidden, value = drawn(T, S * D), drawn(T, S * D) + 1, drawn(T, D) + 2
    key[1] *= 1e-8
    k_norm, q_norm = drawn(6), drawn(6) + 1
    k, q = normed(key, k_norm), normed(hidden, q_norm)

    def gated(score: torch.Tensor) -> torch.Tensor:
        return torch.cat([sigmoid(score[:, [stream]]) * value for stream in range(S)], 1)

    def root(score: torch.Tensor) -> torch.Tensor:
        return torch.where(score < 0, -1.0, 1.0) * torch.where(score.abs() < 1e-6, 1e-6, score.abs()).sqrt()

    score = (k * q).sum(2) / 2**0.5
    plain = (key * hidden).view(T, S, D).sum(2) / 2**0.5
    due = [("is gated by a score without its sign", gated(root(score).abs())),
           ("is gated by the score itself, not by its root", gated(score)),
           ("is gated by a score that is not divided by the root of D", gated(root(score * 2**0.5))),
           ("is gated by the key of the stream before", gated(root((near(k, 1)[0][1] * q).sum(2) / 2**0.5))),
           ("is gated by rows that are not normed", gated(root(plain))),
           ("is gated by rows that are normed over all streams together",
            gated(root((together(key, k_norm) * together(hidden, q_norm)).sum(2) / 2**0.5))),
           ("is not gated", torch.cat([value] * S, 1))]  # fmt: skip
    rows, work = {"ple_key": key, "ple_value": value}, LayerWork("trunk", 1, hidden, 0)
    layer = ple_weights(key_norm=k_norm, query_norm=q_norm)
    assert yields(residual_streams.residual_streams(case_of("ple_written", layer, rows, work)), due)
    for name in rows:
        case = case_of("ple_written", layer, {name: rows[name]}, work)
        assert yields(residual_streams.residual_streams(case), ())
    written = drawn(T, S * D)
    layer = ple_weights(conv_norm=drawn(6), key_norm=k_norm, query_norm=q_norm)
    case = case_of("ple_normed", layer, {"ple_written": written}, work)
    assert yields(residual_streams.residual_streams(case), [
        ("is not normed", written), ("is normed over all streams together", together(written, drawn(6)).flatten(1)),
        ("is normed with the weight of the norm of keys", normed(written, k_norm).flatten(1)),
        ("is normed with the weight of the norm of streams", normed(written, q_norm).flatten(1))])  # fmt: skip
    for component, own in (("ple_normed", {}), ("core", {"ple_written": written})):
        assert yields(residual_streams.residual_streams(case_of(component, layer, own, work)), ())
    for case in (case_of("ple_normed", LayerWeights(None, None, None, None), {"ple_written": written}, work),
                 case_of("ple_normed", layer, {"ple_written": written}, None)):  # fmt: skip
        assert yields(residual_streams.residual_streams(case), ())


@pytest.mark.parametrize(("start", "kept"), [(0, True), (2, True), (2, False)])
def test_embeddings_are_convolved_with_other_taps_or_windows(start: int, kept: bool) -> None:
    """Taps 3 rows apart after a window of 6 rows; requests "b" and "d" have one of this layer or not."""
    x, window, conv = drawn(T, 5), drawn(5, 6), drawn(5, 3)
    used = window if start and kept else torch.zeros(5, 6).double()
    theirs = drawn(5, 6) + 1

    def convolved(window: torch.Tensor, taps: Sequence[int] = (0, 1, 2), apart: int = 3) -> torch.Tensor:
        line, found = [*window.T, *x], torch.zeros(T, 5).double()
        for row in range(T):
            for tap, number in enumerate(taps):
                found[row] += conv[:, number] * line[row + 6 - (2 - tap) * apart]
        return found

    due = [("passes no silu after its conv", convolved(used)),
           ("is convolved with neighbouring taps, without the distance", silu(convolved(used, apart=1))),
           ("is convolved with its taps in the opposite order", silu(convolved(used, (2, 1, 0)))),
           ("is convolved without the rows before this step", silu(convolved(used * 0))),
           ("is convolved with a window of one row later", silu(convolved(used[:, [1, 2, 3, 4, 5, 0]]))),
           ("is convolved with a window of one row earlier", silu(convolved(used[:, [5, 0, 1, 2, 3, 4]]))),
           ('is convolved with the window of request "b"', silu(convolved(theirs)))]  # fmt: skip
    memory: Any = PleMemory(NONE, NONE, torch.zeros(2), window) if kept else None
    for parents in (None, (-1, 0, 1, 2), (-1, 0, 1, 1)):
        work = LayerWork("trunk", 1, x, start, memory, parents)
        for rows in ({"ple_normed": x}, {}):
            case = case_of("ple_mixed", ple_weights(conv=conv), rows, work)
            case.context.subject.before = {name: SimpleNamespace(ple_conv=its) for name, its in (
                ("a", {1: theirs}), ("b", {1: theirs}), ("d", {0: theirs}))}  # fmt: skip
            expected = due if rows and parents != (-1, 0, 1, 1) else ()
            assert yields(residual_streams.residual_streams(case), expected)


def test_sums_of_embeddings_lack_a_part() -> None:
    one, other, hidden = drawn(T, 6), drawn(T, 6) + 1, drawn(T, 6) + 2
    work = LayerWork("trunk", 1, hidden, 0)
    for component, rows, due in (
        ("ple_made", {"ple_written": one, "ple_mixed": other},
         [("lacks what the conv adds", one), ("is what the conv adds alone", other)]),
        ("ple_made", {"ple_written": one}, []), ("ple_made", {"ple_mixed": one}, []), ("ple", {}, []),
        ("ple", {"ple_made": one, "ple_written": one, "ple_mixed": other},
         [("lacks the streams themselves", one), ("lacks the embedding of n-grams", hidden)]),
    ):  # fmt: skip
        assert yields(residual_streams.residual_streams(case_of(component, ple_weights(), rows, work)), due)
