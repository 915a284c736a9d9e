"""Products whose operands or results are rounded to 16 bits, as tensor cores multiply them.

Leaves out: rounded inputs of other ops (`wrong_inputs.py`).
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from instep_reference.weights import Weights

from ...watch.batched_host_copies import with_others
from .finding_case import NARROW, Case, Explanation, rounded
from .wrong_weights import in_place, layer_of

# Component -> the rows that are multiplied
PRODUCTS = {
    **dict.fromkeys(("qkv", "z", "b", "a", "projected", "key_raw", "value"), ("normed",)),
    "mixer": ("gated", "opened", "attended"), "mlp": ("post_normed", "residual"), "fused": ("joined",),
}  # fmt: skip


def products(case: Case) -> Iterator[Explanation]:
    """Rounded weights, alone and with rounded rows, and a rounded result."""
    for name in PRODUCTS.get(case.component, ()) if case.piece is not None else ():
        rows = case.own(name)
        for said, narrow in NARROW.items() if rows is not None else ():
            assert rows is not None
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
