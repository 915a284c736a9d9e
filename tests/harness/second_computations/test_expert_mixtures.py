"""All explanations of mixtures of experts, each summed again row by row and expert by expert.

Leaves out: whole runs (`test_mistakes.py`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, make_dataclass, replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from instep.diagnose.mistakes import experts, formula_slips
from instep_reference.weights import LayerWeights, MlpWeights, MoeWeights
from support.inputs.small_cases import SmallCase, drawn, sigmoid, silu, yields

T, D, E, WIDE, LATENT = 5, 7, 4, 8, 6
NARROW = (("bfloat16", torch.bfloat16), ("float16", torch.float16))
AROUND = ((-1, "before"), (1, "after"))


@dataclass(frozen=True)
class Config:
    """experts_per_token of four experts; one group of them"""

    experts_per_token: int = 2
    norm_topk: bool = True
    routed_scale: float = 1.0
    experts: int = E
    expert_groups: int = 1
    groups_per_token: int = 1


Act = Callable[[MlpWeights, torch.Tensor], torch.Tensor]


def plain(one: MlpWeights, x: torch.Tensor) -> torch.Tensor:
    """One row of an expert."""
    up = one.up @ x
    if one.gate is None:
        return one.down @ torch.where(up > 0, up * up, 0.0)
    opened = silu(one.gate @ x)
    if one.limit is not None:
        opened, up = opened.clamp(max=one.limit), up.clamp(-one.limit, one.limit)
    return one.down @ (opened * up)


@dataclass(frozen=True)
class Layer:
    config: Config
    mlp: MoeWeights
    x: torch.Tensor

    def read(self) -> torch.Tensor:
        return self.x if self.mlp.to_latent is None else self.x @ self.mlp.to_latent.T

    def opened(self) -> torch.Tensor:
        """[T]"""
        gate = self.mlp.shared_gate
        return torch.ones(len(self.x)).double() if gate is None else sigmoid(self.x @ gate[0])

    def scores(self, x: torch.Tensor | None = None) -> torch.Tensor:
        return (self.x if x is None else x) @ self.mlp.router.T

    def ranked(self, scores: torch.Tensor | None = None) -> list[list[int]]:
        scores = self.scores() if scores is None else scores
        ranks = scores if self.mlp.bias is None else sigmoid(scores) + self.mlp.bias
        return [sorted(range(E), key=lambda e, row=row: -float(row[e])) for row in ranks]  # type: ignore[misc]

    def shares(
        self, count: int, normed: bool | None = None, scores: torch.Tensor | None = None
    ) -> list[list[float]]:  # fmt: skip
        """By rank."""
        scores, found = self.scores() if scores is None else scores, list[list[float]]()
        chances = sigmoid(scores) if self.mlp.bias is not None else scores.exp() / scores.exp().sum(1, keepdim=True)
        for row, chosen in zip(chances, self.ranked(scores), strict=True):
            its = [float(row[e]) for e in chosen[:count]]
            by = sum(its) if (self.config.norm_topk if normed is None else normed) else 1
            found.append([self.config.routed_scale * one / by for one in its])
        return found

    def weights(self, shares: Sequence[Sequence[float]], ranks: Sequence[Sequence[int]] | None = None) -> torch.Tensor:
        """[T, E]"""
        found = torch.zeros(len(self.x), E).double()
        for row, (its, chosen) in enumerate(zip(shares, ranks or self.ranked(), strict=True)):
            for share, number in zip(its, chosen, strict=False):
                found[row, number] = share
        return found

    def routed(self, weights: torch.Tensor, several: Any = None, read: Any = None, act: Act = plain) -> torch.Tensor:
        read, several = self.read() if read is None else read, several or self.mlp.experts
        rows = torch.stack([sum(weights[row, e] * act(one, x) for e, one in enumerate(several))
                            for row, x in enumerate(read)])  # type: ignore[arg-type]  # fmt: skip
        return rows if self.mlp.from_latent is None else rows @ self.mlp.from_latent.T

    def shared(self, opened: Any = None, one: Any = None, act: Act = plain, x: Any = None) -> torch.Tensor:
        opened, x = self.opened() if opened is None else opened, self.x if x is None else x
        return torch.stack([opened[row] * act(one or self.mlp.shared, x[row]) for row in range(len(self.x))])


def layer_of(
    config: Config, gated: bool = True, latents: bool = False, sigmoids: bool = False, limits: Any = (None, None)
) -> Layer:  # fmt: skip
    width, seeds = LATENT if latents else D, iter(range(99))

    def made(rows: int, columns: int) -> torch.Tensor:
        return drawn(rows, columns, 1 + next(seeds))[..., 0]

    def one(wide: int, width: int, limit: float | None) -> MlpWeights:
        return MlpWeights(made(wide, width) if gated else None, made(wide, width), made(width, wide), limit)

    routed = tuple(one(WIDE, width, limits[0]) for _ in range(E))
    mlp = MoeWeights(made(E, D), routed, one(3, D, limits[1]), None if sigmoids else made(1, D),
                     made(E, 1)[:, 0] if sigmoids else None, *((made(LATENT, D), made(D, LATENT)) if latents else ()))
    return Layer(config, mlp, drawn(T, D))


def case_of(layer: Layer, others: Sequence[Any] = (), draft: Any = None) -> SmallCase:
    whole = LayerWeights(None, None, None, layer.mlp)
    case = SmallCase("mlp", layer.config, [whole, *others], {"post_normed": layer.x}, draft=draft)
    route = SimpleNamespace(scores=layer.scores(), ranking=torch.tensor(layer.ranked()))
    span = SimpleNamespace(begin=0)
    case.piece = SimpleNamespace(truth=SimpleNamespace(route=route, places={case.finding.place}), span=span,
                                 from_own_inputs=None, work=None)  # fmt: skip
    case.pieces, case.found = [case.piece], layer.routed(layer.weights(layer.shares(2))) + layer.shared()
    return case


def of_weights(layer: Layer) -> list[tuple[str, torch.Tensor]]:
    """The sentences of wrong routing weights."""
    top, shares, ranks, norm = layer.config.experts_per_token, None, layer.ranked(), layer.config.norm_topk
    shares, due = layer.shares(top), list[tuple[str, torch.Tensor]]()
    for count, says in ((top - 1, "too few"), (top + 1, "too many")):
        if 0 < count <= E:
            due += [(f"takes one expert {says}", layer.weights(layer.shares(count)))]
    says = "are not renormalised" if norm else "are renormalised, but must not be"
    due += [(f"the routing weights of its experts {says}", layer.weights(layer.shares(top, not norm))),
            ("all its experts have the same routing weight", layer.weights([[1 / top] * top] * T)),
            ("the routing weights of its experts are swapped", layer.weights([one[::-1] for one in shares]))]
    for step, word in AROUND:
        at = [(row + step) % T for row in range(T)]
        theirs, their_shares = [ranks[row] for row in at], [shares[row] for row in at]
        due += [(f"goes to the experts of the row {word}, with its own routing weights", layer.weights(shares, theirs)),
                (f"goes to the experts of the row {word}, with the routing weights of that row",
                 layer.weights(their_shares, theirs)),
                (f"has the routing weights of the row {word}", layer.weights(their_shares))]  # fmt: skip
    for name, dtype in NARROW:
        scores = (layer.x.to(dtype).double() @ layer.mlp.router.to(dtype).double().T).to(dtype).double()
        narrow = [torch.tensor(one, dtype=torch.float64).to(dtype).double().tolist() for one in shares]
        due += [(f"the router's scores are rounded to {name}",
                 layer.weights(layer.shares(top, scores=scores), layer.ranked(scores))),
                (f"the routing weights of its experts are rounded to {name}", layer.weights(narrow))]  # fmt: skip
    return due


def of_experts(layer: Layer) -> list[tuple[str, Any]]:
    """The sentences of wrong experts, and these experts."""
    right, due = layer.mlp.experts, list[tuple[str, Any]]()
    for step, word in AROUND:
        at = [(number + step) % E for number in range(E)]
        due += [(f"each expert has the weights of the expert {word} it", [right[number] for number in at]),
                (f"each expert takes gate and up from the expert {word} it",
                 [MlpWeights(right[number].gate, right[number].up, own.down, right[number].limit)
                  for number, own in zip(at, right, strict=True)])]  # fmt: skip
    if right[0].gate is not None:
        swapped = [MlpWeights(one.up, one.gate, one.down, one.limit) for one in right]  # type: ignore[arg-type]
        due += [("gate and up of its experts are swapped", swapped)]
        due += [(f"gate and up of expert {number} are swapped", [*right[:number], one, *right[number + 1 :]])
                for number, one in enumerate(swapped)]  # fmt: skip
    return due


CLAMPS: dict[str, Callable[[Any, Any, float], torch.Tensor]] = {  # of gate x, up x and the limit
    "gate is clamped before silu": lambda g, u, most: silu(g.clamp(max=most)) * u.clamp(-most, most),
    "gate is not clamped": lambda g, u, most: silu(g) * u.clamp(-most, most),
    "up is not clamped": lambda g, u, most: silu(g).clamp(max=most) * u,
    "up is not clamped from below": lambda g, u, most: silu(g).clamp(max=most) * u.clamp(max=most),
    "gate is also clamped from below": lambda g, u, most: silu(g).clamp(-most, most) * u.clamp(-most, most),
    "gate has the clamp of up, and up that of gate": lambda g, u, most: silu(g).clamp(-most, most) * u.clamp(max=most),
    "the product is clamped, not its factors": lambda g, u, most: (silu(g) * u).clamp(-most, most),
    "one is added to up": lambda g, u, most: silu(g).clamp(max=most) * (u.clamp(-most, most) + 1),
}


def of_clamps(layer: Layer, right: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    own, several = layer.mlp.shared, layer.mlp.experts
    one, other = several[0].limit, own.limit
    if one is None and other is None:
        return []
    due = [(says, layer.routed(right, [replace(each, limit=a) for each in several]) + layer.shared(
        one=replace(own, limit=b))) for says, a, b in (
        ("its experts are not clamped, nor is the shared one", None, None),
        ("its experts are not clamped", None, other),
        ("the shared expert is not clamped", one, None),
        ("the limits of routed experts and of the shared one are swapped", other, one),
        ("the shared expert has the limit of the routed ones", one, one),
        ("the routed experts have the limit of the shared one", other, other))]  # fmt: skip
    for says, clamp in CLAMPS.items():
        def act(each: MlpWeights, x: torch.Tensor, clamp: Any = clamp) -> torch.Tensor:
            return plain(each, x) if each.limit is None else each.down @ clamp(each.gate @ x, each.up @ x, each.limit)

        due += [(says, layer.routed(right, act=act) + layer.shared(act=act)),
                (f"{says}, in routed experts alone", layer.routed(right, act=act) + layer.shared()),
                (f"of the shared expert, {says}", layer.routed(right) + layer.shared(act=act))]  # fmt: skip
    return due


def of_latents(layer: Layer, right: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    mlp, latents, scale = layer.mlp, layer.read(), layer.config.routed_scale
    if mlp.from_latent is None:
        return []
    again, shared, back = latents @ mlp.from_latent.T, layer.shared(), mlp.from_latent
    scores = layer.scores(again)
    other = layer.weights(layer.shares(2, scores=scores), layer.ranked(scores))
    inside = torch.stack([sum(plain(one, right[row, e] * latents[row]) for e, one in enumerate(mlp.experts))
                          for row in range(T)])  # type: ignore[arg-type]  # fmt: skip
    total = torch.stack([sum(right[row, e] * plain(one, latents[row]) for e, one in enumerate(mlp.experts))
                         for row in range(T)])  # type: ignore[arg-type]  # fmt: skip
    due = [("the shared expert reads the rows after both projections of latents",
            layer.routed(right) + layer.shared(x=again)),
           ("the router reads the rows after both projections of latents", layer.routed(other) + shared),
           ("the routing weights multiply the latents, not what the experts make of them", inside @ back.T + shared)]
    due += [(f"the sum of its experts is rounded to {name} before it leaves the latents",
             total.to(dtype).double() @ back.T + shared) for name, dtype in NARROW]  # fmt: skip
    due += [("its experts read latents times the scale of the configuration",
             layer.routed(right / scale, read=latents * scale) + shared),
            ("its latents pass a squared ReLU",
             layer.routed(right, read=torch.where(latents > 0, latents * latents, 0.0)) + shared)]  # fmt: skip
    due += [(f"its experts read the latents of the row {word}", layer.routed(
        right, read=latents[[(row + step) % T for row in range(T)]]) + shared) for step, word in AROUND]
    return due + [(f"its latents are rounded to {name}", layer.routed(right, read=latents.to(dtype).double()) + shared)
                  for name, dtype in NARROW]  # fmt: skip


def of_activations(layer: Layer, right: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    due = list[tuple[str, torch.Tensor]]()
    if layer.mlp.shared.gate is not None or layer.mlp.experts[0].gate is not None:
        return due
    for says, function in (("has a ReLU that is not squared", torch.relu), ("is squared before its ReLU", torch.square),
                           ("has a silu, not a squared ReLU", silu)):  # fmt: skip
        def act(each: MlpWeights, x: torch.Tensor, function: Any = function) -> torch.Tensor:
            return each.down @ function(each.up @ x)

        due += [(says, layer.routed(right, act=act) + layer.shared(act=act)),
                (f"{says}, in routed experts alone", layer.routed(right, act=act) + layer.shared()),
                (f"{says}, in the shared expert alone", layer.routed(right) + layer.shared(act=act))]  # fmt: skip
    return due


LAYERS = {
    "gated": layer_of(Config()), "not-renormalised": layer_of(Config(norm_topk=False, experts_per_token=1)),
    "all": layer_of(Config(experts_per_token=E)), "clamped": layer_of(Config(), limits=(0.5, 0.3)),
    "routed-clamped": layer_of(Config(), limits=(0.5, None)), "shared-clamped": layer_of(Config(), limits=(None, 0.3)),
    "latents": layer_of(Config(routed_scale=2.5), gated=False, latents=True, sigmoids=True),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
def test_a_mixture_sums_other_weights_or_experts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = LAYERS[name]
    for left in ("_by_sigmoid", "_left_out", "_grouped", "_of_other_layers"):
        monkeypatch.setattr(experts, left, lambda *given: ())
    right, shared = layer.weights(layer.shares(layer.config.experts_per_token)), layer.shared()
    due = [(says, layer.routed(weights) + shared) for says, weights in of_weights(layer)]
    due += [("lacks the shared expert", layer.routed(right))]
    if layer.mlp.shared_gate is not None:
        gate = (layer.x @ layer.mlp.shared_gate.T)[:, 0]
        due += [("the shared expert is not gated", layer.routed(right) + layer.shared(torch.ones(T))),
                ("the shared expert is gated by the gate itself, not by a sigmoid of it",
                 layer.routed(right) + layer.shared(gate))]  # fmt: skip
    due += [(says, layer.routed(right, several) + shared) for says, several in of_experts(layer)]
    due += of_latents(layer, right) + of_clamps(layer, right) + of_activations(layer, right)
    case = case_of(layer)
    assert yields(experts.experts(case), due)
    for changed in ({"component": "hidden"}, {"piece": None}, {"layers": []}, {"rows": {}},
                    {"layers": [LayerWeights(None, None, None, layer.mlp.shared)]},
                    {"rows": {"post_normed": layer.x[:2]}}):  # fmt: skip
        case = case_of(layer)
        vars(case).update(changed)
        assert yields(experts.experts(case), ()) and yields(experts.other_experts(case), ())
    case = case_of(layer)
    monkeypatch.setattr(experts, "ROOM", T * D * E)
    assert len([*experts.experts(case)]) == len(due)
    monkeypatch.setattr(experts, "ROOM", T * D * E - 1)
    assert yields(experts.experts(case), ())


@pytest.mark.parametrize("name", ["clamped", "latents"])
def test_parts_of_a_mixture_are_those_of_another_layer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer of the trunk, a dense one, and a layer of the draft head are the others."""
    layer, config = LAYERS[name], LAYERS[name].config
    latents = name == "latents"
    other, last = (replace(layer_of(config, not latents, latents, latents, limits).mlp, router=drawn(E, D) + number)
                   for number, limits in ((1, (0.1, 0.2)), (2, (0.2, 0.1))))  # fmt: skip
    others = [LayerWeights(None, None, None, other), LayerWeights(None, None, None, layer.mlp.shared)]
    draft = SimpleNamespace(layers=[LayerWeights(None, None, None, last)])
    case = case_of(layer, others, draft)
    mix, own, due = experts.mixture(case), layer.mlp, list[tuple[str, torch.Tensor]]()  # type: ignore[arg-type]
    assert mix is not None
    for at, theirs in (("trunk layer 1", other), ("MTP layer 0", last)):
        limited = replace(own, shared=replace(own.shared, limit=theirs.shared.limit), experts=tuple(
            replace(one, limit=theirs.experts[0].limit) for one in own.experts))  # fmt: skip
        mixtures = [("all weights", theirs), ("the experts", replace(own, experts=theirs.experts)),
                    ("the limits", limited)]  # fmt: skip
        if latents:
            both = {"to_latent": theirs.to_latent, "from_latent": theirs.from_latent}
            mixtures += [("the projections of latents", replace(own, **both)),  # type: ignore[arg-type]
                         ("the projection to latents", replace(own, to_latent=theirs.to_latent)),
                         ("the projection from latents", replace(own, from_latent=theirs.from_latent))]  # fmt: skip
        for says, changed in mixtures:
            made = Layer(config, changed, layer.x)
            weights = made.weights(made.shares(2))
            due += [(f"has {says} of {at}", made.routed(weights) + made.shared())]
    assert yields(experts._of_other_layers(case, mix), due)  # type: ignore[arg-type]
    monkeypatch.setattr(experts, "ROOM", T * D * E * 4)
    assert len([*experts._of_other_layers(case, mix)]) == len(due)  # type: ignore[arg-type]
    monkeypatch.setattr(experts, "ROOM", T * D * E * 4 - 1)
    assert yields(experts._of_other_layers(case, mix), ())  # type: ignore[arg-type]
    case.draft = None
    monkeypatch.setattr(experts, "ROOM", T * D * E * 3)
    assert yields(experts._of_other_layers(case, mix), due[: len(due) // 2])  # type: ignore[arg-type]


def pairs_of(layer: Layer) -> tuple[Any, Any, Any]:
    """Results of each expert and of the shared one, number 4, and the weights and numbers of those of each row."""
    made = [torch.stack([plain(one, row) for row in layer.x]) for one in (*layer.mlp.experts, layer.mlp.shared)]
    shares = [[*its, float(opened)] for its, opened in zip(layer.shares(2), layer.opened(), strict=True)]
    return made, shares, [[*ranks[:2], E] for ranks in layer.ranked()]


def summed(made: Any, shares: Any, chosen: Any) -> torch.Tensor:
    return torch.stack([sum(share * made[number][row] for share, number in zip(shares[row], chosen[row], strict=True))
                        for row in range(len(chosen))])  # fmt: skip


def test_rows_go_to_other_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row 1 goes to another second expert; row 2 has its first expert and the shared one exchanged for others."""
    layer = LAYERS["gated"]
    made, shares, chosen = pairs_of(layer)
    right, case = summed(made, shares, chosen), case_of(layer)
    other = [list(one) for one in chosen]
    new = max(number for number in range(E) if number not in chosen[1])
    other[1][1], other[2][0], other[2][2] = new, E, 0
    first = f"row 1 goes to expert {new} instead of expert {chosen[1][1]}"
    lost, shared = chosen[2][0], "and the shared expert"
    both = f"{first}, row 2 goes to expert 0 {shared} instead of expert {lost} {shared}"
    case.found = wrong = summed(made, shares, other)
    assert yields(experts.other_experts(case), [(both, wrong, 125.0**2)])  # type: ignore[arg-type]
    alone = torch.cat((wrong[:2], right[2:]))
    for most, tries, near in ((125, 125.0, 1.0), (124, 15.0, 0.81), (124, 0.0, 0.79)):  # a quarter is left, or more
        monkeypatch.setattr(experts, "ANY", most)
        case.found = right + near * (alone - right)
        assert yields(experts.other_experts(case), [(first, alone, tries)] if tries else [])  # type: ignore[arg-type]
    case.found, two = wrong, f"{first}, and 1 more go elsewhere"
    monkeypatch.setattr(experts, "ANY", 125)
    monkeypatch.setattr(experts, "SHOWN", 2)
    assert yields(experts.other_experts(case), [(both, wrong, 125.0**2)])  # type: ignore[arg-type]
    monkeypatch.setattr(experts, "SHOWN", 1)
    assert yields(experts.other_experts(case), [(two, wrong, 125.0**2)])  # type: ignore[arg-type]
    monkeypatch.setattr(experts, "ROOM", 125 * T * 3 * D)
    assert yields(experts.other_experts(case), [(two, wrong, 125.0**2)])  # type: ignore[arg-type]
    monkeypatch.setattr(experts, "ROOM", 125 * T * 3 * D - 1)
    assert yields(experts.other_experts(case), ())  # type: ignore[arg-type]
    assert experts._named([1, 2, 4], 5) == "experts 1, 2 and the shared expert"
    assert experts._named([4], 5) == "the shared expert" and experts._named([3], 5) == "expert 3"


def test_rows_lack_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row 0 lacks both of its experts, and row 1 its second one; or all rows lack the one that they have in common."""
    layer = LAYERS["gated"]
    made, shares, chosen = pairs_of(layer)
    right, case = summed(made, shares, chosen), case_of(layer)
    mix = experts.mixture(case)  # type: ignore[arg-type]
    assert mix is not None

    def found() -> Any:
        return experts._left_out(case, mix, mix.weighed(mix.shares(2, True)), mix.made(layer.mlp.experts),
                                 mix.shared())  # type: ignore[arg-type]  # fmt: skip

    def without(*gone: tuple[int, int]) -> torch.Tensor:
        """gone: row, rank"""
        less = [[0.0 if (row, rank) in gone else share for rank, share in enumerate(its)]
                for row, its in enumerate(shares)]  # fmt: skip
        return summed(made, less, chosen)

    a, b = sorted(chosen[0][:2])
    case.found = wrong = without((0, 0), (0, 1), (1, 1))
    row_0, row_1 = f"experts {a}, {b} in row 0", f"expert {chosen[1][1]} in row 1"
    assert yields(found(), [(f"lacks {row_0}, {row_1}", wrong, 16.0)])
    monkeypatch.setattr(experts, "SHOWN", 1)
    assert yields(found(), [(f"lacks {row_0}, and in 1 more", wrong, 16.0)])
    alone = without((1, 1))
    for near, lacks in ((0.79, False), (0.81, True)):
        case.found = right + near * (alone - right)
        says = f"lacks {row_1}" if sum(chosen[1][1] in one for one in chosen) > 1 else (
            f"lacks expert {chosen[1][1]} wherever it was chosen")  # fmt: skip
        assert yields(found(), [(says, alone, 4.0)] if lacks else [])
    for number in range(E):
        gone = [(row, rank) for row in range(T) for rank in range(2) if chosen[row][rank] == number]
        case.found = without(*gone)
        expected = [(f"lacks expert {number} wherever it was chosen", case.found, 4.0 ** len(gone))] if gone else []
        assert yields(found(), expected)
        if len(gone) > 1:
            case.found = without(gone[0])
            assert yields(found(), [(f"lacks expert {number} in row {gone[0][0]}", case.found, 4.0)])
    monkeypatch.setattr(experts, "MOST", 2)
    assert [*found()]
    monkeypatch.setattr(experts, "MOST", 1)
    assert not [*found()]


def test_tries_of_600_rows_are_counted_beyond_the_largest_float() -> None:
    """Every row has another second expert, or lacks it."""
    layer = replace(LAYERS["gated"], x=drawn(600, D))
    made, shares, chosen = pairs_of(layer)
    other = [[one[0], next(number for number in range(E) if number not in one), E] for one in chosen]
    case = case_of(layer)
    case.found = summed(made, shares, other)
    (moved,) = experts.other_experts(case)  # type: ignore[arg-type]
    assert moved.sentence.endswith(", and 596 more go elsewhere") and moved.tries == 125**600
    mix = experts.mixture(case)  # type: ignore[arg-type]
    assert mix is not None
    case.found = summed(made, [[first, 0.0, opened] for first, _, opened in shares], chosen)
    (lost,) = experts._left_out(case, mix, mix.weighed(mix.shares(2, True)), mix.made(layer.mlp.experts),
                                mix.shared())  # type: ignore[arg-type]  # fmt: skip
    assert lost.sentence.endswith(", and in 596 more") and lost.tries == 4**600


def test_rows_of_all_requests_are_grouped_by_expert() -> None:
    """The launch has 5 rows of one request, and then 2 of another one; their numbers in it begin at 5."""
    layer = LAYERS["gated"]
    other = replace(layer, x=drawn(2, D) + 1)
    whole = replace(layer, x=torch.cat((layer.x, other.x)))
    made, shares, chosen = pairs_of(whole)
    flat = [(number, at) for at, number in enumerate(number for one in chosen for number in one)]
    order = [at for _, at in sorted(flat)]
    all_shares = [share for one in shares for share in one]
    mixed = [[all_shares[order[3 * row + slot]] for slot in range(3)] for row in range(T + 2)]
    late = [list(one) for one in chosen]
    for before, at in pairwise(order):
        late[at // 3][at % 3] = chosen[before // 3][before % 3]
    due = [("has routing weights in the order of experts, not of rows", summed(made, mixed, chosen)),
           ("the first row of every expert goes to the expert before it", summed(made, shares, late))]  # fmt: skip
    cases = [case_of(layer), case_of(other)]
    for case, begin in zip(cases, (5, 5 + T), strict=True):
        case.piece.span.begin, case.piece.rows = begin, case.rows
    for case, rows in zip(cases, (slice(0, T), slice(T, T + 2)), strict=True):
        elsewhere = SimpleNamespace(truth=SimpleNamespace(places={}))
        case.pieces = [cases[1].piece, elsewhere, cases[0].piece]
        assert yields(experts._grouped(case), [(says, wrong[rows]) for says, wrong in due])  # type: ignore[arg-type]
        case.pieces = [*case.pieces, SimpleNamespace(**vars(cases[0].piece) | {"rows": {}})]
        assert yields(experts._grouped(case), ()), "the rows of a request are not known"  # type: ignore[arg-type]


@pytest.mark.parametrize(("count", "tried"), [(64, True), (65, False)])
def test_slips_are_tried_for_at_most_64_rows(count: int, tried: bool) -> None:
    case = SmallCase("value", right=torch.zeros(1), again=lambda: torch.zeros(1))
    case.piece = SimpleNamespace(span=SimpleNamespace(count=count))
    assert bool([*formula_slips.slips(case)]) is tried  # type: ignore[arg-type]


def test_experts_are_ranked_in_groups_by_their_scores_and_biases() -> None:
    """Two groups of three experts, of which a row takes two of one group; all biases are far below zero."""
    router, x = (torch.randn(n, 2, generator=torch.Generator().manual_seed(n), dtype=torch.float64) for n in (6, 3))
    bias = torch.tensor([-3.0, -9, -4, -3.2, -3.4, -8], dtype=torch.float64)
    fields = {"expert_groups": 2, "groups_per_token": 1, "experts": 6, "norm_topk": True, "routed_scale": 2.0}
    config: Any = make_dataclass("Config", fields)(**fields)
    scores = x @ router.T
    of: Any = SimpleNamespace(config=config, top=2, x=x, scores=scores, mlp=SimpleNamespace(router=router))
    of.weighed = lambda share, ranking: torch.zeros_like(scores).scatter(-1, ranking[:, :2], share)
    found, opened = dict(experts._by_sigmoid(of, bias)), 1 / (1 + (-scores).exp())

    def weights(chances: torch.Tensor, ranks: Any, pick: Any, scale: float = 2.0) -> torch.Tensor:
        """pick: the ranks of a group's experts -> the rank of the group"""
        out = torch.zeros_like(scores)
        for row in range(3):
            groups = [[n for n in range(6) if n // 3 == group] for group in range(2)] if pick else [[*range(6)]]
            best = max(groups, key=lambda group: pick([*map(float, ranks[row, group])], group, row) if pick else 0)
            two = sorted(best, key=lambda n: -float(ranks[row, n]))[:2]
            out[row, two] = scale * chances[row, two] / chances[row, two].sum()
        return out

    def usual(ranks: list[float], *more: Any) -> float:
        return sum(sorted(ranks)[-2:])

    both, soft = opened + bias, scores.softmax(-1)
    due = {
        "experts are chosen without the router's bias": weights(opened, opened, usual),
        "the routing weights contain the router's bias": weights(both, both, usual),
        "the router uses a softmax, not a sigmoid": weights(soft, soft + bias, usual),
        "the routing weights lack the scale of the configuration": weights(opened, both, usual, 1.0),
        "the routing weights have the scale of the configuration twice": weights(opened, both, usual, 4.0),
        "a group is ranked by its best expert alone": weights(opened, both, lambda ranks, *_: max(ranks)),
        "a group is ranked by all of its experts": weights(opened, both, lambda ranks, *_: sum(ranks)),
        "a group is ranked without the router's bias": weights(
            opened, both, lambda ranks, group, row: usual([*map(float, opened[row, group])])
        ),
        "experts of all groups are chosen": weights(opened, both, None),
    }
    last = found.pop("experts of other groups rank as 0")  # above all others, as their ranks are below zero
    assert found.keys() == due.keys() and all(torch.allclose(found[says], due[says]) for says in due)
    outside = (weights(opened, both, usual) == 0).view(3, 2, 3).all(-1, keepdim=True).expand(3, 2, 3).reshape(3, 6)
    assert torch.equal((last > 0).any(-1), torch.ones(3, dtype=torch.bool)) and not last[~outside].any()


def test_experts_that_rank_alike_are_chosen_in_their_order() -> None:
    fields = {"expert_groups": 1, "groups_per_token": 1, "experts": 40, "norm_topk": True, "routed_scale": 2.0}
    config: Any = make_dataclass("Config", fields)(**fields)
    of: Any = SimpleNamespace(config=config, top=2, x=torch.ones(1, 2), chances=lambda scores: scores,
                              mlp=SimpleNamespace(router=torch.zeros(40, 2), bias=None))  # fmt: skip
    assert experts.Mixture.ranked(of, torch.zeros(1, 40)).tolist() == [[*range(40)]]
    of.weighed = lambda share, ranking: ranking.tolist()
    assert next(experts._by_sigmoid(of, torch.zeros(40)))[1] == [[0, 1]]  # type: ignore[comparison-overlap]
