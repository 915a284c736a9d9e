"""Mistakes in mixtures of experts: other experts, other routing weights, a missing expert, a missing gate.

All of them are sums of the same experts' rows, computed once. Leaves out: rows and heads of the result
(`wrong_rows.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch.nn import functional as F

from instep_reference.contract.config import ModelConfig
from instep_reference.mlp import dense, in_best_groups
from instep_reference.mlp import mixture as mixture_of
from instep_reference.weights import MlpWeights, MoeWeights, given

from ...checks.check_interface import listed
from ...oracle.expert_routes import scores_of
from .finding_case import NARROW, Case, Explanation
from .wrong_weights import layer_of

MOST = 4  # experts per row up to which every subset is tried
SHOWN = 4  # rows that are printed
ANY = 1 << 12  # choices of a row's experts that are tried at most; for more, only one expert is replaced
ROOM = 1 << 26  # numbers that all experts may compute together; beyond that a finding remains unexplained


@dataclass(frozen=True)
class Mixture:
    """A layer's experts on rows x [T, D]. scores [T, E]: the router's; ranking [T, E]: chosen experts first."""

    config: ModelConfig
    mlp: MoeWeights
    x: torch.Tensor
    scores: torch.Tensor
    ranking: torch.Tensor

    @property
    def top(self) -> int:
        return self.config.experts_per_token

    @property
    def read(self) -> torch.Tensor:
        """[T, D], or [T, L] of experts over latents: the rows that routed experts read."""
        return self.x if self.mlp.to_latent is None else self.x @ self.mlp.to_latent.T

    def back(self, made: torch.Tensor) -> torch.Tensor:
        """[.., D]: results of routed experts, from latents if they have them."""
        return made if self.mlp.from_latent is None else made @ self.mlp.from_latent.T

    def made(self, experts: tuple[MlpWeights, ...], read: torch.Tensor | None = None) -> torch.Tensor:
        """[E, T, D]: the result of each routed expert for every row. read: rows in place of `read`"""
        return self.back(torch.stack([dense(expert, self.read if read is None else read) for expert in experts]))

    def shared(self, opened: torch.Tensor | float | None = None) -> torch.Tensor:
        return (self.opened if opened is None else opened) * dense(self.mlp.shared, self.x)

    @property
    def opened(self) -> torch.Tensor:
        """[T, 1]: the factor of the shared expert; 1 without a gate."""
        gate = self.mlp.shared_gate
        return torch.ones_like(self.x[:, :1]) if gate is None else torch.sigmoid(self.x @ gate.T)

    def shares(self, top: int, normed: bool, scores: torch.Tensor | None = None) -> torch.Tensor:
        """Routing weights [T, top] by rank; for other scores, in the ranking of these."""
        ranking = self.ranking if scores is None else self.ranked(scores)
        share = self.chances(scores).gather(-1, ranking[:, :top])
        return self.config.routed_scale * (share / share.sum(-1, keepdim=True) if normed else share)

    def chances(self, scores: torch.Tensor | None = None) -> torch.Tensor:
        """[T, E]: what shares are made of. scores: those of the router, if they are other ones"""
        own = scores_of(self.x, self.mlp.router) if scores is None else scores
        return own.softmax(-1) if self.mlp.bias is None else torch.sigmoid(own)

    def ranked(self, scores: torch.Tensor) -> torch.Tensor:
        """[T, E]: the ranking by other scores of the router."""
        chances = self.chances(scores)
        ranks = chances if self.mlp.bias is None else in_best_groups(self.config, chances + self.mlp.bias)
        return ranks.sort(dim=-1, descending=True, stable=True).indices

    def weighed(self, share: torch.Tensor, ranking: torch.Tensor | None = None) -> torch.Tensor:
        """Routing weights [T, E] by expert."""
        at = (self.ranking if ranking is None else ranking)[:, : share.shape[1]]
        return torch.zeros_like(self.scores).scatter(-1, at, share)


def experts(case: Case) -> Iterator[Explanation]:
    mix = mixture(case)
    if mix is None:
        return
    made, shared = mix.made(mix.mlp.experts), mix.shared()
    for says, weights in _weights(mix):
        yield Explanation(says, _sum(weights, made) + shared)
    right = mix.weighed(mix.shares(mix.top, mix.config.norm_topk))
    yield Explanation("lacks the shared expert", _sum(right, made))
    if (gate := mix.mlp.shared_gate) is not None:
        yield Explanation("the shared expert is not gated", _sum(right, made) + mix.shared(1.0))
        yield Explanation("the shared expert is gated by the gate itself, not by a sigmoid of it",
                          _sum(right, made) + mix.shared(mix.x @ gate.T))  # fmt: skip
    for says, others in _experts(mix.mlp.experts):
        yield Explanation(says, _sum(right, mix.made(others)) + shared)
    yield from _over_latents(mix, right, made, shared)
    yield from _clamped(mix, right, made, shared)
    yield from _not_squared(mix, right, made, shared)
    yield from _of_other_layers(case, mix)
    yield from _left_out(case, mix, right, made, shared)
    yield from _grouped(case)


def mixture(case: Case) -> Mixture | None:
    """The experts of the finding's rows."""
    piece = case.piece
    if case.component != "mlp" or piece is None:
        return None
    layer, x = layer_of(case), case.own("post_normed")
    if layer is None or not isinstance(layer.mlp, MoeWeights) or x is None:
        return None
    route = (piece.from_own_inputs or piece).truth.route
    if route is None or len(route.scores) != len(x) or x.numel() * len(layer.mlp.experts) > ROOM:
        return None
    return Mixture(case.weights.config, layer.mlp, x, route.scores, route.ranking)


def _sum(weights: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
    return torch.einsum("te,etd->td", weights, made)


def _weights(mix: Mixture) -> Iterator[tuple[str, torch.Tensor]]:
    """Wrong routing weights, of the same experts or of others."""
    config, top = mix.config, mix.top
    share = mix.shares(top, config.norm_topk)
    for other, says in ((top - 1, "too few"), (top + 1, "too many")):
        if 0 < other <= config.experts:
            yield f"takes one expert {says}", mix.weighed(mix.shares(other, config.norm_topk))
    says = "are not renormalised" if config.norm_topk else "are renormalised, but must not be"
    yield f"the routing weights of its experts {says}", mix.weighed(mix.shares(top, not config.norm_topk))
    yield "all its experts have the same routing weight", mix.weighed(torch.full_like(share, 1 / top))
    yield "the routing weights of its experts are swapped", mix.weighed(share.flip(-1))
    for step, word in ((1, "before"), (-1, "after")):
        ranking = mix.ranking.roll(step, 0)
        yield f"goes to the experts of the row {word}, with its own routing weights", mix.weighed(share, ranking)
        yield f"goes to the experts of the row {word}, with the routing weights of that row", mix.weighed(
            share.roll(step, 0), ranking)  # fmt: skip
        yield f"has the routing weights of the row {word}", mix.weighed(share.roll(step, 0))
    if mix.mlp.bias is not None:
        yield from _by_sigmoid(mix, mix.mlp.bias)
    for name, dtype in NARROW.items():
        x, router = (y.to(dtype).double() for y in (mix.x, mix.mlp.router))
        scores = (x @ router.T).to(dtype).double()
        yield f"the router's scores are rounded to {name}", mix.weighed(
            mix.shares(top, config.norm_topk, scores), mix.ranked(scores))  # fmt: skip
        yield f"the routing weights of its experts are rounded to {name}", mix.weighed(share.to(dtype).double())


def _by_sigmoid(mix: Mixture, bias: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Wrong routing weights of a router with sigmoid, bias and groups."""
    config, top = mix.config, mix.top
    own = scores_of(mix.x, mix.mlp.router)
    shares = torch.sigmoid(own)

    def weighed(chances: torch.Tensor, ranks: torch.Tensor, groups: ModelConfig = config, scale: float | None = None
                ) -> torch.Tensor:  # fmt: skip
        ranking = in_best_groups(groups, ranks).sort(dim=-1, descending=True, stable=True).indices[:, :top]
        share = chances.gather(-1, ranking)
        share = share / share.sum(-1, keepdim=True) if config.norm_topk else share
        return mix.weighed((config.routed_scale if scale is None else scale) * share, ranking)

    yield "experts are chosen without the router's bias", weighed(shares, shares)
    yield "the routing weights contain the router's bias", weighed(shares + bias, shares + bias)
    yield "the router uses a softmax, not a sigmoid", weighed(own.softmax(-1), own.softmax(-1) + bias)
    ranks, everywhere = shares + bias, replace(config, expert_groups=1, groups_per_token=1)
    for power, says in ((0, "lack the scale of the configuration"), (2, "have the scale of the configuration twice")):
        yield f"the routing weights {says}", weighed(shares, ranks, scale=config.routed_scale**power)
    grouped = ranks.reshape(len(ranks), config.expert_groups, -1)

    def of_group(rank: torch.Tensor) -> torch.Tensor:
        return rank[..., None].expand_as(grouped).flatten(-2)  # every expert with the rank of its group

    for says, by in (("by its best expert alone", of_group(grouped.amax(-1))),
                     ("by all of its experts", of_group(grouped.sum(-1))), ("without the router's bias", shares)):
        inside = torch.isfinite(in_best_groups(config, by))
        yield f"a group is ranked {says}", weighed(shares, ranks.masked_fill(~inside, -torch.inf), everywhere)
    yield "experts of all groups are chosen", weighed(shares, ranks, everywhere)
    outside = ~torch.isfinite(in_best_groups(config, ranks))
    yield "experts of other groups rank as 0", weighed(shares, ranks.masked_fill(outside, 0.0), everywhere)


def _experts(right: tuple[MlpWeights, ...]) -> Iterator[tuple[str, tuple[MlpWeights, ...]]]:
    """Experts with the weights of another expert, or with swapped weights."""
    for step, word in ((1, "before"), (-1, "after")):
        at = [(number - step) % len(right) for number in range(len(right))]
        yield f"each expert has the weights of the expert {word} it", tuple(right[number] for number in at)
        yield f"each expert takes gate and up from the expert {word} it", tuple(
            replace(right[number], down=own.down) for number, own in zip(at, right, strict=True))
    if any(one.gate is None for one in right):
        return
    swapped = tuple(replace(one, gate=one.up, up=given(one.gate)) for one in right)
    yield "gate and up of its experts are swapped", swapped
    for number, one in enumerate(swapped):
        yield f"gate and up of expert {number} are swapped", (*right[:number], one, *right[number + 1 :])


def _over_latents(
    mix: Mixture, right: torch.Tensor, made: torch.Tensor, shared: torch.Tensor
) -> Iterator[Explanation]:
    """Mistakes around experts over latents: in what reads latents, in what they are, in the way back."""
    if mix.mlp.to_latent is None:
        return
    latents, scale, experts = mix.read, mix.config.routed_scale, mix.mlp.experts
    again = mix.back(latents)
    yield Explanation("the shared expert reads the rows after both projections of latents",
                      _sum(right, made) + mix.opened * dense(mix.mlp.shared, again))  # fmt: skip
    scores = scores_of(again, mix.mlp.router)
    share = mix.shares(mix.top, mix.config.norm_topk, scores)
    yield Explanation("the router reads the rows after both projections of latents",
                      _sum(mix.weighed(share, mix.ranked(scores)), made) + shared)  # fmt: skip
    weighed = torch.stack([dense(expert, right[:, number, None] * latents) for number, expert in enumerate(experts)])
    yield Explanation("the routing weights multiply the latents, not what the experts make of them",
                      mix.back(weighed.sum(0)) + shared)  # fmt: skip
    sum_of = torch.stack([dense(expert, latents) for expert in experts])
    total = _sum(right, sum_of)
    reads = [("its experts read latents times the scale of the configuration", right / scale, latents * scale),
             ("its latents pass a squared ReLU", right, torch.relu(latents).square())]
    for step, word in ((1, "before"), (-1, "after")):
        reads.append((f"its experts read the latents of the row {word}", right, latents.roll(step, 0)))
    for name, dtype in NARROW.items():
        reads.append((f"its latents are rounded to {name}", right, latents.to(dtype).double()))
        yield Explanation(f"the sum of its experts is rounded to {name} before it leaves the latents",
                          mix.back(total.to(dtype).double()) + shared)  # fmt: skip
    for says, weights, read in reads:
        yield Explanation(says, _sum(weights, mix.made(experts, read)) + shared)


def _clamped(
    mix: Mixture, right: torch.Tensor, made: torch.Tensor, shared: torch.Tensor
) -> Iterator[Explanation]:
    """Mistakes around the limits of a clamped SwiGLU: none, another one, or a clamp of something else."""
    experts, own = mix.mlp.experts, mix.mlp.shared
    limits = experts[0].limit, own.limit
    if limits == (None, None):
        return

    def with_limits(says: str, routed: float | None, alone: float | None) -> Iterator[Explanation]:
        yield Explanation(says, _sum(right, mix.made(tuple(replace(one, limit=routed) for one in experts)))
                          + mix.opened * dense(replace(own, limit=alone), mix.x))  # fmt: skip

    yield from with_limits("its experts are not clamped, nor is the shared one", None, None)
    yield from with_limits("its experts are not clamped", None, limits[1])
    yield from with_limits("the shared expert is not clamped", *(limits[0], None))
    yield from with_limits("the limits of routed experts and of the shared one are swapped", *limits[::-1])
    yield from with_limits("the shared expert has the limit of the routed ones", *(limits[0], limits[0]))
    yield from with_limits("the routed experts have the limit of the shared one", *(limits[1], limits[1]))
    for says, clamp in CLAMPS:
        routed = _sum(right, torch.stack([_with(clamp, one, mix.x) for one in experts]))
        alone = mix.opened * _with(clamp, own, mix.x)
        yield Explanation(says, routed + alone)
        yield Explanation(f"{says}, in routed experts alone", routed + shared)
        yield Explanation(f"of the shared expert, {says}", _sum(right, made) + alone)


NOT_SQUARED: tuple[tuple[str, Callable[[torch.Tensor], torch.Tensor]], ...] = (
    ("has a ReLU that is not squared", torch.relu), ("is squared before its ReLU", torch.square),
    ("has a silu, not a squared ReLU", F.silu),
)  # fmt: skip
Clamp = Callable[[torch.Tensor, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]]
# Other clamps: (gate, up, limit) -> the two factors.
CLAMPS: tuple[tuple[str, Clamp], ...] = (
    ("gate is clamped before silu", lambda gate, up, most: (F.silu(gate.clamp(max=most)), up.clamp(-most, most))),
    ("gate is not clamped", lambda gate, up, most: (F.silu(gate), up.clamp(-most, most))),
    ("up is not clamped", lambda gate, up, most: (F.silu(gate).clamp(max=most), up)),
    ("up is not clamped from below", lambda gate, up, most: (F.silu(gate).clamp(max=most), up.clamp(max=most))),
    ("gate is also clamped from below",
     lambda gate, up, most: (F.silu(gate).clamp(-most, most), up.clamp(-most, most))),
    ("gate has the clamp of up, and up that of gate",
     lambda gate, up, most: (F.silu(gate).clamp(-most, most), up.clamp(max=most))),
    ("the product is clamped, not its factors",
     lambda gate, up, most: ((F.silu(gate) * up).clamp(-most, most), torch.ones_like(up))),
    ("one is added to up", lambda gate, up, most: (F.silu(gate).clamp(max=most), up.clamp(-most, most) + 1)),
)


def _with(clamp: Clamp, one: MlpWeights, x: torch.Tensor) -> torch.Tensor:
    """The result of an expert with a limit, clamped otherwise."""
    if one.limit is None or one.gate is None:
        return dense(one, x)
    gate, up = clamp(x @ one.gate.T, x @ one.up.T, one.limit)
    return (gate * up) @ one.down.T


def _not_squared(
    mix: Mixture, right: torch.Tensor, made: torch.Tensor, shared: torch.Tensor
) -> Iterator[Explanation]:
    """Other functions in the place of the squared ReLU of experts without gates."""
    experts, own = mix.mlp.experts, mix.mlp.shared
    for says, opened in NOT_SQUARED if own.gate is None else ():
        routed = mix.back(torch.stack([opened(mix.read @ one.up.T) @ one.down.T for one in experts]))
        alone = mix.opened * (opened(mix.x @ own.up.T) @ own.down.T)
        yield Explanation(says, _sum(right, routed) + alone)
        yield Explanation(f"{says}, in routed experts alone", _sum(right, routed) + shared)
        yield Explanation(f"{says}, in the shared expert alone", _sum(right, made) + alone)


def _of_other_layers(case: Case, mix: Mixture) -> Iterator[Explanation]:
    """The experts, or what is around them, of another layer."""
    weights, own = case.weights, mix.mlp
    draft = weights.draft.layers if weights.draft else ()
    if mix.x.numel() * len(own.experts) * len((*weights.layers, *draft)) > ROOM:
        return
    for stage, layers in (("trunk", weights.layers), ("MTP", draft)):
        for number, layer in enumerate(layers):
            other, at = layer.mlp, f"{stage} layer {number}"
            if not isinstance(other, MoeWeights) or other is own:
                continue
            for says, changed in (
                ("all weights", other), ("the experts", replace(own, experts=other.experts)),
                ("the limits", replace(own, shared=replace(own.shared, limit=other.shared.limit), experts=tuple(
                    replace(one, limit=other.experts[0].limit) for one in own.experts))),
                ("the projections of latents", replace(own, to_latent=other.to_latent, from_latent=other.from_latent)),
                ("the projection to latents", replace(own, to_latent=other.to_latent)),
                ("the projection from latents", replace(own, from_latent=other.from_latent)),
            ):
                if own.to_latent is not None or "latents" not in says:
                    yield Explanation(f"has {says} of {at}", mixture_of(mix.config, changed, mix.x))


def _left_out(
    case: Case, mix: Mixture, right: torch.Tensor, made: torch.Tensor, shared: torch.Tensor
) -> Iterator[Explanation]:
    """For each row, the missing experts that bring it closest to the found row, if it gets much closer."""
    if mix.top > MOST:
        return
    keeps = torch.tensor([kept for kept in product((1.0, 0.0), repeat=mix.top)], dtype=right.dtype)  # [subsets, top]
    share = right.gather(-1, mix.ranking[:, : mix.top])
    parts = made[mix.ranking[:, : mix.top].T, torch.arange(len(share))]  # [top, T, D]
    tried = torch.einsum("sn,tn,ntd->std", keeps, share, parts) + shared
    off = (tried - case.found.to("cpu", torch.float64)).norm(dim=-1)  # [subsets, T]
    best = off.argmin(0).where(off.amin(0) < off[0] / 4, 0)
    lost = {row: sorted(int(mix.ranking[row, n]) for n in range(mix.top) if not keeps[one, n])
            for row, one in enumerate(best.tolist()) if one}  # fmt: skip
    if not lost:
        return
    wrong = tried[best, torch.arange(len(best))]
    gone = sorted({number for numbers in lost.values() for number in numbers})
    everywhere = right[:, gone].count_nonzero(1).tolist() == [row in lost for row in range(len(right))]
    if len(gone) == 1 and everywhere:
        says = f"lacks expert {gone[0]} wherever it was chosen"
    else:
        told = [f"{listed('expert', numbers)} in row {row}" for row, numbers in lost.items()]
        says = f"lacks {', '.join(told[:SHOWN])}" + (f", and in {len(told) - SHOWN} more" if len(told) > SHOWN else "")
    yield Explanation(says, wrong, len(keeps) ** len(lost))


def _grouped(case: Case) -> Iterator[Explanation]:
    """Mistakes in grouping rows by expert: pairs of a row and an expert, sorted by expert, then by row.

    The rows are those of all requests of the launch.
    """
    place, own = case.finding.place, case.piece
    pieces = [one for one in case.pieces if place in one.truth.places]
    pieces.sort(key=lambda one: one.span.begin)
    parts = [mix for one in pieces if (mix := mixture(replace(case, piece=one))) is not None]
    if own is None or len(parts) < len(pieces):
        return
    x, scores, ranking = (torch.cat([getattr(one, name) for one in parts]) for name in ("x", "scores", "ranking"))
    mix, begin = replace(parts.pop(), x=x, scores=scores, ranking=ranking), own.span.begin - pieces[0].span.begin
    mine, (made, share, chosen) = slice(begin, begin + len(case.found)), _pairs(mix)
    order = chosen.flatten().argsort(stable=True)
    yield Explanation("has routing weights in the order of experts, not of rows",
                      _mixed(made, share.flatten()[order].view_as(share), chosen)[mine])  # fmt: skip
    before = chosen.flatten()[order].roll(1)
    before[0] = before[1]
    late = before[order.argsort()].view_as(chosen)
    yield Explanation("the first row of every expert goes to the expert before it", _mixed(made, share, late)[mine])


def other_experts(case: Case) -> Iterator[Explanation]:
    """For each row, other experts with the same routing weights, if these bring it much closer."""
    mix = mixture(case)
    if mix is None:
        return
    made, share, chosen = _pairs(mix)
    count, each = len(made), chosen.shape[1]
    every = count**each <= ANY
    tries = count**each if every else count * each
    if tries * chosen.numel() * made.shape[-1] > ROOM:
        return
    ways = torch.tensor(list(product(range(count), repeat=each))) if every else None
    right = _mixed(made, share, chosen)
    found, wrong, told = case.found.to("cpu", torch.float64), chosen.clone(), []
    for row, own in enumerate(chosen):
        tried = ways if ways is not None else own.repeat(tries, 1).scatter(
            1, torch.arange(tries)[:, None] // count, torch.arange(tries)[:, None] % count)
        off = (torch.einsum("n,wnd->wd", share[row], made[tried, row]) - found[row]).norm(dim=-1)
        best = tried[off.argmin()]
        if off.min() < (right[row] - found[row]).norm() / 4:
            wrong[row] = best
            there, lost = (sorted({int(n) for n in one[best != own]}) for one in (best, own))
            told.append(f"row {row} goes to {_named(there, count)} instead of {_named(lost, count)}")
    if told:
        more = f", and {len(told) - SHOWN} more go elsewhere" if len(told) > SHOWN else ""
        yield Explanation(", ".join(told[:SHOWN]) + more, _mixed(made, share, wrong), tries ** len(told))


def _pairs(mix: Mixture) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """made [E + 1, T, D]; share, chosen [T, top + 1]; the shared expert is the last of a row, weighted by its gate."""
    made, opened = torch.cat([mix.made(mix.mlp.experts), dense(mix.mlp.shared, mix.x)[None]]), mix.opened
    chosen = torch.cat([mix.ranking[:, : mix.top], torch.full_like(mix.ranking[:, :1], len(made) - 1)], 1)
    return made, torch.cat([mix.shares(mix.top, mix.config.norm_topk), opened], 1), chosen


def _mixed(made: torch.Tensor, share: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Results made [E, T, D], chosen experts [T, n] and their routing weights -> [T, D]"""
    return torch.einsum("tn,tnd->td", share, made[chosen, torch.arange(len(chosen))[:, None]])


def _named(numbers: list[int], count: int) -> str:
    """expert 2 and the shared expert"""
    routed = [number for number in numbers if number < count - 1]
    words = ([listed("expert", routed)] if routed else []) + ["the shared expert"] * (len(routed) < len(numbers))
    return " and ".join(words)
