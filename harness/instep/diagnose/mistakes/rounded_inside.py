"""Ops that round inside to 16 bits: operands and results of products, scores, attention weights, keys or values.

Latents of other tokens are here, too. Leaves out: rounded inputs of other ops (`wrong_inputs.py`), other positions and
other caches (`rotary_and_visible_positions.py`), and constants of the softmax (`constants.py`).
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch

from instep_reference import mla
from instep_reference.attention import AttentionMemory
from instep_reference.weights import LatentWeights, Weights

from ...oracle.single_layer_run import LayerWork
from ...watch.batched_host_copies import with_others
from .finding_case import NARROW, Case, Explanation, rounded
from .wrong_weights import in_place, layer_of


def shares(case: Case) -> Iterator[Explanation]:
    work = None if case.piece is None else case.piece.work
    if case.component != "attended" or not isinstance(work, LayerWork):
        return
    query, key, value = (case.own(name) for name in ("query", "key", "value"))
    if query is None or key is None or value is None:
        return
    keys, values = key, value
    if isinstance(work.memory, AttentionMemory):
        keys, values = (torch.cat((kept.to(new), new)) for kept, new in (
            (work.memory.keys, key), (work.memory.values, value)))  # fmt: skip
    layer = layer_of(case)
    if layer is not None and isinstance(layer.mixer, LatentWeights):
        keys, values = mla.expand(case.weights.config, layer.mixer.up, AttentionMemory(keys, values))
        yield Explanation("values are those of the token before", _attend(query, keys, values.roll(1, 0)))
        yield Explanation("keys are those of the token before", _attend(query, keys.roll(1, 0), values))
    for said, dtype in NARROW.items():
        narrow = partial(rounded, dtype=dtype)
        yield Explanation(f"its scores are rounded to {said}", _attend(query, keys, values, scores=narrow))
        yield Explanation(f"its attention weights are rounded to {said}", _attend(query, keys, values, chances=narrow))
        yield Explanation(f"its keys are rounded to {said}", _attend(query, narrow(keys), values))
        yield Explanation(f"its values are rounded to {said}", _attend(query, keys, narrow(values)))
    yield Explanation("sees the rows after its own, too", _attend(query, keys, values, causal=False))


def _attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *,
    scores: Callable[[torch.Tensor], torch.Tensor] = lambda x: x,
    chances: Callable[[torch.Tensor], torch.Tensor] = lambda x: x, causal: bool = True,
) -> torch.Tensor:
    """The reference's attention with hooks on the scores and on the attention weights."""
    (tokens, heads, width), (length, groups, _) = query.shape, keys.shape
    keys, values = (x.repeat_interleave(heads // groups, dim=1) for x in (keys, values))
    weighed = scores(torch.einsum("thd,lhd->htl", query, keys) * width**-0.5)
    if causal:
        later = torch.ones(tokens, length, dtype=torch.bool).triu(length - tokens + 1)
        weighed = weighed.masked_fill(later, float("-inf"))
    return torch.einsum("htl,lhd->thd", chances(weighed.softmax(-1)), values)


# Component -> the rows that are multiplied
PRODUCTS = {
    **dict.fromkeys(("qkv", "z", "b", "a", "projected", "key_raw", "value"), ("normed",)),
    "mixer": ("gated", "opened", "attended"), "mlp": ("post_normed", "residual"), "fused": ("joined",),
}  # fmt: skip


def products(case: Case) -> Iterator[Explanation]:
    """Rounded weights, alone and with rounded rows, and a rounded result."""
    for name in PRODUCTS.get(case.component, ()) if case.piece is not None else ():
        rows = case.own(name)
        if rows is None:
            continue
        for said, narrow in NARROW.items():
            weights = _narrowed(case.weights, case, narrow)
            for what, changes in (("its weight", {}), ("both operands", {name: rounded(rows, narrow)})):
                wrong = case.again(changes, weights=weights)
                if wrong is not None:
                    yield Explanation(f"is multiplied with {what} rounded to {said}", wrong)
                    yield Explanation(f"is multiplied with {what} rounded to {said}, and so is the result",
                                      wrong.to(case.found.dtype).to(narrow).to(wrong))  # fmt: skip


def _narrowed(weights: Weights, case: Case, narrow: torch.dtype) -> Weights:
    """All weights, with those of the place's layer or head rounded."""

    every = partial(with_others, moved=partial(rounded, dtype=narrow))
    layer, draft = layer_of(case), weights.draft
    if layer is not None:
        return in_place(weights, case, every(layer))
    return weights if draft is None else replace(weights, draft=replace(draft, fc=every(draft.fc)))
