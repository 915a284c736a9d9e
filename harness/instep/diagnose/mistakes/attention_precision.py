"""Attention that rounds internally: scores, attention weights, keys or values in 16 bits. Latents of other tokens.

Leaves out: other positions and other caches (`rotary_and_visible_positions.py`), and constants of the softmax
(`constants.py`).
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from instep_reference import mla
from instep_reference.attention import AttentionMemory
from instep_reference.weights import LatentWeights

from ...oracle.single_layer_run import LayerWork
from .finding_case import NARROW, Case, Explanation, rounded
from .wrong_weights import layer_of


def shares(case: Case) -> Iterator[Explanation]:
    work = None if case.piece is None else case.piece.work
    own = [case.own(name) for name in ("query", "key", "value")] if case.component == "attended" else []
    query, key, value = own or (None, None, None)
    if not isinstance(work, LayerWork) or query is None or key is None or value is None:
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
