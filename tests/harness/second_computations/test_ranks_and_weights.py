"""Results of wrong ranks and of weights in wrong places, each computed again by hand from a few numbers.

Leaves out: engines of several ranks (`test_ranks.py`).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, make_dataclass, replace
from functools import partial
from itertools import combinations, pairwise, permutations
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from instep.diagnose.mistakes import wrong_ranks, wrong_weights
from instep.diagnose.mistakes.experts import Mixture
from instep_reference.contract.place_names import Place
from instep_reference.contract.shards import Segment, Shard
from instep_reference.weights import LatentWeights, MlpWeights, MoeWeights

Tensor = torch.Tensor
MIXER, GENERATOR = Place("trunk", 1, "mixer"), torch.Generator().manual_seed(1)


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=GENERATOR, dtype=torch.float64)


def value(**given: Any) -> Any:
    """A frozen value of these fields, for code that replaces some of them."""
    return make_dataclass("Value", given)(**given)


def agree(found: Iterable[Any], due: Iterable[tuple[str, Tensor]]) -> bool:
    """Whether explanations have these sentences and tensors, in this order."""
    one, other = [(each.sentence, each.wrong) for each in found], [*due]
    assert [says for says, _ in one] == [says for says, _ in other]
    return all(x.shape == y.shape and torch.allclose(x, y) for (_, x), (_, y) in zip(one, other, strict=True))


# -- partial sums ----------------------------------------------------------------------------------------


def mlp_of(width: int, limit: float | None = None) -> MlpWeights:
    return MlpWeights(drawn(width, 3), drawn(width, 3), drawn(3, width), limit)


def by_columns(mlp: MlpWeights, x: Tensor, size: int, rank: int, other: int) -> Tensor:
    """The channels that a rank computes, and the columns of another one for them."""
    assert mlp.gate is not None
    made, width = torch.zeros(len(x), 3, dtype=torch.float64), len(mlp.up) // size
    for at in range(width):
        gate, up = (x @ part[rank * width + at] for part in (mlp.gate, mlp.up))
        opened = gate / (1 + (-gate).exp())
        if mlp.limit is not None:
            opened, up = opened.clamp(max=mlp.limit), up.clamp(-mlp.limit, mlp.limit)
        made += torch.outer(opened * up, mlp.down[:, other * width + at])
    return made


def mixture_of(x: Tensor) -> Mixture:
    """6 experts, the first 2 of each ranking, whose weights are normalised."""
    mlp = MoeWeights(drawn(6, 3), tuple(mlp_of(12, 0.5) for _ in range(6)), mlp_of(12), drawn(1, 3))
    config: Any = SimpleNamespace(experts_per_token=2, norm_topk=True, routed_scale=1.0)
    scores = x @ mlp.router.T
    return Mixture(config, mlp, x, scores, scores.sort(descending=True).indices)


def shares(mix: Mixture) -> Iterator[tuple[int, list[float]]]:
    """An expert, and its part of each row."""
    chances = mix.scores.exp()
    first = [row.topk(2).indices.tolist() for row in chances]
    for expert in range(6):
        yield expert, [float(row[expert] / row[taken].sum()) if expert in taken else 0.0
                       for row, taken in zip(chances, first, strict=True)]  # fmt: skip


def case_of(component: str, **given: Any) -> Any:
    place = Place("trunk", 1, component)
    shown = given.pop("shown", {})
    return SimpleNamespace(component=component, finding=SimpleNamespace(place=place), right=drawn(2, 3),
                           own=shown.get, piece=object(), **given)  # fmt: skip


def sums(right: Tensor, size: int, unlike: int, part: Any) -> Iterator[tuple[str, Tensor]]:
    """The wrong sums, if some ranks differ from rank 0. part: rank whose rows, rank whose columns -> its partial sum"""
    own, unsummed = [part(rank, rank) for rank in range(size)], unlike == size - 1
    if unsummed:
        yield "lacks the sum over the ranks: it is the partial sum of rank 0", own[0]
    for rank in range(size):
        yield f"has the partial sum of rank {rank} twice", right + own[rank]
        if not (size == 2 and unsummed):
            yield f"lacks the partial sum of rank {rank}", right - own[rank]
        if size > 2 and not (unsummed and rank == 0):
            yield f"is the partial sum of rank {rank} alone", own[rank]
    for rank, other in permutations(range(size), 2):
        yield f"has the partial sum of rank {rank} in place of that of rank {other}", right - own[other] + own[rank]
        yield f"the rows of rank {rank} meet the columns of rank {other}", right - own[rank] + part(rank, other)
    for rank, other in combinations(range(size), 2):
        wrong = right - own[rank] - own[other] + part(rank, other) + part(other, rank)
        yield f"ranks {rank} and {other} have the columns of each other", wrong
    yield "has every partial sum twice", right + right
    yield "is the mean over the ranks, not the sum", right / size
    for dtype in (torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        yield (f"its partial sums are rounded to {name} before they are added",
               torch.stack([each.to(dtype).double() for each in own]).sum(0))  # fmt: skip


@pytest.mark.parametrize(("size", "unlike"), [(2, 0), (2, 1), (3, 1), (3, 2)])
def test_every_wrong_partial_sum_of_ranks_is_tried(
    size: int, unlike: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sums are of a mixer with heads, a dense MLP, and experts. Replicas of other places are not counted."""
    x, rows = drawn(2, 3), drawn(2, 3, 4)
    mix, dense, out = mixture_of(x), mlp_of(6), drawn(3, 12)

    def of_mixer(rank: int, other: int) -> Tensor:
        width = 12 // size
        return sum((torch.outer(rows.reshape(2, 12)[:, rank * width + at], out[:, other * width + at])
                    for at in range(width)), torch.zeros(2, 3))  # fmt: skip

    def of_experts(rank: int, other: int) -> Tensor:
        gate = (1 / (1 + (-x @ mix.mlp.shared_gate[0]).exp()))[:, None]
        made = gate * by_columns(mix.mlp.shared, x, size, rank, other)
        for expert, share in shares(mix):
            made += torch.tensor(share)[:, None] * by_columns(mix.mlp.experts[expert], x, size, rank, other)
        return made

    monkeypatch.setattr(wrong_ranks, "mixture", lambda case: mix)
    for component, mlp, shown, part in (
        *(("mixer", None, shown, of_mixer) for shown in (
            {"gated": rows, "attended": drawn(2, 2)}, {"opened": rows}, {"attended": rows})),
        ("mlp", mix.mlp, {"post_normed": x}, of_experts),
        ("mlp", dense, {"post_normed": x}, partial(by_columns, dense, x, size)),
    ):  # fmt: skip
        case = case_of(component, shown=shown)
        place = case.finding.place
        layer = SimpleNamespace(mixer=SimpleNamespace(out=out), mlp=mlp)
        monkeypatch.setattr(wrong_ranks, "layer_of", lambda case, layer=layer: layer)
        replicas = [value(rank=rank, place=place, differing=3 * (rank <= unlike)) for rank in range(1, size)]
        replicas += [value(rank=size - 1, place=place._replace(layer=0), differing=1)]
        facts: Any = SimpleNamespace(size=size, replicas=replicas)
        assert agree(wrong_ranks._sums(case, facts), sums(case.right, size, unlike, part))
        assert not [*wrong_ranks._sums(case_of(component), facts)], "rows that are not shown"
        assert not [*wrong_ranks._sums(case_of("core", shown=shown), facts)]
    for nothing in ("mixture", "layer_of"):
        monkeypatch.setattr(wrong_ranks, "layer_of", lambda case: SimpleNamespace(mlp=mix.mlp))
        monkeypatch.setattr(wrong_ranks, nothing, lambda case: None)
        assert not [*wrong_ranks._sums(case_of("mlp", shown={"post_normed": x}), facts)]


@pytest.mark.parametrize("size", [2, 4])
def test_experts_of_ranks_are_whole_or_cut_as_one_block(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """6 experts, which 2 ranks may share and 4 may not. A block of gate and up has 24 rows."""
    x = drawn(2, 3)
    mix, case = mixture_of(x), case_of("mlp")
    monkeypatch.setattr(wrong_ranks, "mixture", lambda case: mix)
    whole, blocks = list[Tensor](), torch.zeros(2, 3, dtype=torch.float64)
    for expert, share in shares(mix):
        mlp, part = mix.mlp.experts[expert], torch.tensor(share)[:, None]
        whole.append(part * by_columns(mlp, x, 1, 0, 0))
        rows, each = torch.cat([mlp.gate, mlp.up]), 24 // size
        for rank in range(size):
            begin, half = rank * each, each // 2
            cut = MlpWeights(rows[begin : begin + half], rows[begin + half : begin + each],
                             mlp.down[:, rank * half : (rank + 1) * half], mlp.limit)  # fmt: skip
            blocks += part * by_columns(cut, x, 1, 0, 0)
    due = list[tuple[str, Tensor]]()
    for rank in range(size if size == 2 else 0):
        own = sum(whole[3 * rank : 3 * rank + 3])
        due += [(f"has the experts of rank {rank} twice", case.right + own),
                (f"lacks the experts of rank {rank}", case.right - own)]  # fmt: skip
    says = "the ranks have gate and up of the experts as one block, not of each half"
    assert agree(wrong_ranks._experts(case, size), [*due, (says, case.right - sum(whole) + blocks)])
    case.context = SimpleNamespace(ranks=SimpleNamespace(size=size))
    gate = (1 / (1 + (-x @ mix.mlp.shared_gate[0]).exp()))[:, None]
    more = (size - 1) * gate * by_columns(mix.mlp.shared, x, 1, 0, 0)
    says = f"has the shared expert {size} times: it is whole on every rank"
    assert agree(wrong_ranks.every_shared_expert(case), [(says, case.right + more)])
    case.context.ranks = None
    assert not [*wrong_ranks.every_shared_expert(case)]
    monkeypatch.setattr(wrong_ranks, "mixture", lambda case: None)
    case.context.ranks = SimpleNamespace(size=size)
    assert not [*wrong_ranks.every_shared_expert(case)] and not [*wrong_ranks._experts(case, size)]


# -- parts of a vocabulary, and of weights ---------------------------------------------------------------


def test_embeddings_of_a_rank_are_missing_or_added() -> None:
    """6 tokens over 2 or 3 ranks. A rank has some, all or none of the tokens of two rows."""
    table = drawn(6, 3)
    for size, tokens in ((2, (0, 4)), (2, (1, 2)), (3, (2, 3)), (3, (5, 0))):
        case = case_of("embedding", weights=SimpleNamespace(embedding=table, config=SimpleNamespace(vocab=6)))
        case.right, due, many = table[list(tokens)], list[tuple[str, Tensor]](), 6 // size
        for rank in range(size):
            own = [token // many == rank for token in tokens]
            if own != [True, True]:
                says = f"has the embedding of token {rank * many}, rank {rank}'s first one, added"
                due.append((says, torch.stack([row if mine else row + table[rank * many]
                                               for row, mine in zip(case.right, own, strict=True)])))  # fmt: skip
            if own != [False, False]:
                due.append((f"lacks the embedding of rank {rank}'s tokens",
                            torch.stack([0 * row if mine else row for row, mine in zip(case.right, own, strict=True)])))
        assert agree(wrong_ranks._tokens(case, size), due)


def test_logits_of_ranks_are_in_another_order() -> None:
    """Parts of unequal length are not in the place of others. More than 4 ranks have too many orders."""
    for vocab, size in ((4, 2), (6, 3), (7, 3), (4, 4), (5, 5)):
        case = case_of("logits", weights=SimpleNamespace(config=SimpleNamespace(vocab=vocab)))
        case.right, due = drawn(2, vocab), list[tuple[str, Tensor]]()
        ends = [0, 3, 5, 7] if vocab == 7 else [*range(0, vocab + 1, vocab // size)]
        parts = [[*range(begin, end)] for begin, end in pairwise(ends)]
        for rank in range(size if vocab != 7 else 0):
            due.append((f"has the logits of rank {rank} in the place of those of every rank",
                        case.right[:, parts[rank] * size]))  # fmt: skip
        for order in [*permutations(range(size))][1:]:
            columns = [at for rank in order for at in parts[rank]]
            said = ", ".join(map(str, order))
            due.append((f"has the logits of the ranks in the order {said}", case.right[:, columns]))
        assert agree(wrong_ranks._tokens(case, size), due if size < 5 else [])
    assert not [*wrong_ranks._tokens(case_of("mixer", weights=case.weights), 2)]


def test_weights_of_other_ranks_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight of one segment on 2 ranks, and of two or three on 3. Layers have other names of the same weights.

    The rows of channels are declared, too. That declaration may be right where the one of the weight is not.
    """
    made = list[tuple[str, dict[str, list[int]]]]()
    monkeypatch.setattr(wrong_ranks, "with_mixer", lambda case, says, **changed: made.append(
        (says, {name: x.tolist() for name, x in changed.items()})) or ())  # fmt: skip
    one, two, three = (Shard(0, segments) for segments in (
        (Segment(4, 2),), (Segment(3), Segment(6, 2)), (Segment(3), Segment(6), Segment(3, 2))))  # fmt: skip
    latents = object.__new__(LatentWeights)
    plain = SimpleNamespace(**{name: torch.arange(8) for name in ("z", "a", "b", "A_log", "dt_bias", "key", "value")},
                            qkv=torch.arange(15), conv=torch.arange(15))  # fmt: skip
    for name in ("query", "up"):
        object.__setattr__(latents, name, torch.arange(8))
    for mixer, low_rank, component, stored in (
        (plain, False, "z", {"z": "linear_attn.in_proj_z.weight"}), (plain, True, "mixer", {}),
        (plain, True, "z", {"z": "self_attn.g_b_proj.weight"}), (plain, True, "a", {"a": "self_attn.f_b_proj.weight"}),
        (plain, False, "b", {"b": "linear_attn.in_proj_b.weight"}), (None, False, "z", {}),
        (plain, False, "log_decay", {"A_log": "linear_attn.A_log", "dt_bias": "linear_attn.dt_bias"}),
        (plain, True, "value", {"value": "self_attn.v_proj.weight"}),
        (plain, False, "qkv", {"qkv": "linear_attn.in_proj_qkv.weight"}),
        (plain, True, "mixed", {"conv": "linear_attn.conv1d.weight"}),
        (latents, True, "query", {"query": "self_attn.q_proj.weight"}), (latents, True, "z", {}),
        (latents, True, "attended", {"up": "self_attn.kv_b_proj.weight"}),
    ):  # fmt: skip
        asked, channels = list[str](), component in ("qkv", "mixed")
        monkeypatch.setattr(wrong_ranks, "mixer_of", lambda case, mixer=mixer: mixer)
        monkeypatch.setattr(wrong_ranks.shards, "weight", lambda config, name, asked=asked, right=(
            three if component == "qkv" else one): asked.append(name) or right)  # fmt: skip
        rows = {"mixed": replace(two, axis=1), "z": three}
        facts = SimpleNamespace(size=3 if channels else 2, row=lambda place, rows=rows: rows.get(place.component))
        made.clear()
        case = case_of(component, weights=SimpleNamespace(config=SimpleNamespace(low_rank=low_rank)))
        assert not [*wrong_ranks._weights(case, facts)]
        assert asked == [f"model.layers.1.{name}" for name in stored.values()]
        due = list[tuple[str, dict[str, list[int]]]]()
        for field, name in stored.items():
            short = name.split(".")[1]
            if not channels:
                first, last = [0, 1, 2, 3], [4, 5, 6, 7]
                due += [(f"rank 0 has {short} of rank 1", {field: last + last}),
                        (f"rank 1 has {short} of rank 0", {field: first + first}),
                        (f"ranks 0 and 1 have {short} of each other", {field: last + first})]  # fmt: skip
                continue
            own = [[0, 3, 4, 9, 10], [1, 5, 6, 11, 12], [2, 7, 8, 13, 14]]
            if component == "mixed":
                own = [[0, 3, 4, 5, 6], [1, 7, 8, 9, 10], [2, 11, 12, 13, 14]]
            for rank, other in (*permutations(range(3), 2), *combinations(range(3), 2)):
                both = len(due) >= 6
                rows = [*range(15)]
                for a, b in zip(own[rank], own[other], strict=True):
                    rows[a], rows[b] = b, a if both else b
                due.append((f"ranks {rank} and {other} have {short} of each other" if both else
                            f"rank {rank} has {short} of rank {other}", {field: rows}))  # fmt: skip
            rows = [0] * 15
            for rank in range(3):
                for at, row in enumerate(own[rank]):
                    rows[row] = 5 * rank + at
            due.append((f"the ranks have parts of {short} as one block, not of each segment", {field: rows}))
        assert made == due


def test_ranks_and_replicas_are_tried_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("sums", "experts", "weights", "tokens"):
        monkeypatch.setattr(wrong_ranks, f"_{name}", lambda case, given, name=name: [
            (name, given if isinstance(given, int) else given.size)])  # fmt: skip
    ranks, group = (SimpleNamespace(size=size) for size in (2, 3))
    of_ranks = [("sums", 2), ("experts", 2), ("weights", 2), ("tokens", 2)]
    for mine, other, due in ((ranks, None, of_ranks), (None, group, [("tokens", 3)]), (None, None, []),
                             (ranks, group, [("tokens", 3), *of_ranks])):  # fmt: skip
        for piece in (object(), None):
            case: Any = SimpleNamespace(piece=piece, context=SimpleNamespace(ranks=mine, group=other))
            assert [*wrong_ranks.ranks(case)] == (due if piece else [])


# -- weights of other places -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Layer:
    """A layer with two parts; the model and its drafters have layers."""

    mixer: Any
    norm: Any = None


def test_a_layer_is_that_of_the_stage_and_takes_its_place() -> None:
    """The draft head comes before a block drafter. A place of no layer, or after all layers, has none."""
    model, head, block = ([Layer(f"{name}{n}") for n in range(2)] for name in ("trunk", "head", "block"))
    for draft, blocks in ((head, block), (None, block), (head, None), (None, None)):
        weights = value(layers=tuple(model), draft=draft and value(layers=tuple(draft)),
                        block=blocks and value(layers=tuple(blocks)))  # fmt: skip
        for stage, own in (("trunk", model), ("extend", draft or blocks), ("block", draft or blocks)):
            for at in (-1, 0, 1, 2):
                made = list[Any]()
                case: Any = SimpleNamespace(
                    weights=weights, finding=SimpleNamespace(place=Place(stage, at, "x")),
                    made=lambda says, weights, made=made: made.append((says, weights)) or ())  # fmt: skip
                due = own[at] if own and at in (0, 1) else None
                assert wrong_weights.layer_of(case) is due
                assert not [*wrong_weights.with_layer(case, "says", norm=3)] and len(made) == (due is not None)
                if due is None:
                    continue
                ((says, changed),) = made
                parts = {"trunk": changed, "head": changed.draft, "block": changed.block}
                for name, right in (("trunk", model), ("head", draft), ("block", blocks)):
                    new = [replace(one, norm=3) if one is due else one for one in right or []]
                    assert [*(parts[name].layers if right else [])] == new
                assert says == "says"
        assert wrong_weights.in_place(weights, case, model[0]) == replace(weights)


def test_weights_of_every_other_layer_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three layers, of which the last has a norm of another type, and a draft head of one. A piece has 64 tokens."""
    model, head = (Layer(1, 1.5), Layer(2, 2.5), Layer(3, "a norm")), (Layer(4, 4.5),)
    monkeypatch.setattr(wrong_weights, "_made", lambda case, says, layer: [(says, layer)])
    monkeypatch.setattr(wrong_weights, "_of_the_layer", lambda case, layer: [("of the layer", layer)])
    made, drafter = "is made with the weights of {}", ("the drafter's layer 0", head[0])
    for stage, at, own, due in (
        ("trunk", 1, model[1], [("layer 0", model[0]), ("layer 2", Layer(3, 2.5)), drafter]),
        ("trunk", 2, model[2], [("layer 0", Layer(1, "a norm")), ("layer 1", Layer(2, "a norm")),
                                (drafter[0], Layer(4, "a norm"))]),
        ("extend", 0, head[0], [(f"the target's layer {n}", Layer(n + 1, (1.5, 2.5, 4.5)[n])) for n in range(3)]),
    ):  # fmt: skip
        weights = value(layers=model, draft=value(layers=head), block=None)
        for piece in (*(SimpleNamespace(span=SimpleNamespace(count=count)) for count in (64, 65)), None):
            case: Any = SimpleNamespace(weights=weights, piece=piece)
            case.finding = SimpleNamespace(place=Place(stage, at, "x"))
            tried = piece is not None and piece.span.count == 64
            found: Any = [*wrong_weights.other_weights(case)]
            expected = [*((made.format(says), layer) for says, layer in due), ("of the layer", own)]
            assert found == (expected if tried else [])
    case = SimpleNamespace(weights=weights, piece=SimpleNamespace(span=SimpleNamespace(count=1)),
                           finding=SimpleNamespace(place=Place("trunk", 3, "x")))  # fmt: skip
    assert not [*wrong_weights.other_weights(case)]


@pytest.mark.parametrize("reads_wide", [True, False])
def test_a_weight_takes_the_place_of_one_that_the_op_reads(reads_wide: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The op reads `mixer.one`, `mixer.two` and perhaps `mixer.wide`. It raises if `mixer.three` is NaN.

    Weights of another form make no result.
    """
    mixer = value(one=drawn(2), two=drawn(2), three=drawn(2), wide=drawn(3), none=None, empty=drawn(0))
    layer = Layer(mixer, value(weight=drawn(2), eps=None))
    monkeypatch.setattr(wrong_weights, "in_place", lambda weights, case, layer: layer)

    def result(one: Tensor, two: Tensor, wide: Tensor) -> Tensor:
        return torch.cat([one, two, wide[: 3 * reads_wide]])

    def made(says: str, weights: Layer) -> Iterator[Any]:
        if weights.mixer.wide.shape != (3,) or weights.mixer.three.isnan().any():
            raise RuntimeError("another form")
        mine = weights.mixer
        yield SimpleNamespace(sentence=says, wrong=result(mine.one, mine.two, mine.wide))

    case: Any = SimpleNamespace(weights=None, made=made)
    small = {f"mixer.{name}": getattr(mixer, name) for name in ("one", "two", "three")}
    small["norm.weight"] = layer.norm.weight
    due = list[tuple[str, Tensor]]()
    for name, at in (("mixer.one", 0), ("mixer.two", 1)):
        for other, theirs in small.items():
            if other != name:
                parts = [mixer.one, mixer.two, mixer.wide]
                parts[at] = theirs
                due.append((f"is made with `{other}` in the place of `{name}`", result(*parts)))
    due.append(("is made with `mixer.one` and `mixer.two` exchanged", result(mixer.two, mixer.one, mixer.wide)))
    assert agree(wrong_weights._of_the_layer(case, layer), due)


@dataclass(frozen=True)
class Part:
    """Weights of a test."""

    one: Any = None
    other: Any = None
    last_norm: Any = None


def test_blocks_of_weights_are_norms_or_inside_other_blocks() -> None:
    layer = Part(torch.ones(2), Part(torch.ones(1), Part(torch.ones(3))), Part(torch.zeros(0), torch.ones(2)))
    names = [name for name, _ in wrong_weights._parts(layer)]
    assert names == ["one", "other.one", "other.other", "other.other.one", "last_norm", "last_norm.other"]
