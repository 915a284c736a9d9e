"""Run the reference's op with other weights or another configuration at the place of the finding.

Leaves out: which weights (`norms.py`, `product_rounding.py`, `constants.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from instep_reference.weights import LayerWeights, Weights

from .finding_case import Case, Explanation


def layer_of(case: Case) -> LayerWeights | None:
    weights, place = case.weights, case.finding.place
    layers = weights.layers if place.stage == "trunk" else weights.draft.layers if weights.draft else ()
    return layers[place.layer] if 0 <= place.layer < len(layers) else None


def with_mixer(case: Case, says: str, layer: LayerWeights, **changed: Any) -> Iterator[Explanation]:
    assert layer.mixer is not None, "the finding is about a mixer"
    yield from with_layer(case, says, mixer=replace(layer.mixer, **changed))


def with_layer(case: Case, says: str, **changed: Any) -> Iterator[Explanation]:
    layer = layer_of(case)
    if layer is not None:
        yield from case.made(says, weights=in_place(case.weights, case, replace(layer, **changed)))


def in_place(weights: Weights, case: Case, layer: LayerWeights) -> Weights:
    """The weights with another layer at the place of the finding."""
    draft, place = weights.draft, case.finding.place

    def put(layers: tuple[LayerWeights, ...]) -> tuple[LayerWeights, ...]:
        return tuple(layer if at == place.layer else one for at, one in enumerate(layers))

    if place.stage == "trunk" or draft is None:
        return replace(weights, layers=put(weights.layers))
    return replace(weights, draft=replace(draft, layers=put(draft.layers)))
