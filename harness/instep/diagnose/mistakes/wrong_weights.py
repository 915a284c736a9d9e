"""Run the reference's op with other weights or another configuration at the place of the finding.

`other_weights` tries all weights of the right shape: those of other layers, and others of the same layer. Leaves out:
weights that are known mistakes (`norms.py`, `rounded_inside.py`, `constants.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from itertools import combinations, permutations
from typing import Any

import torch

from instep_reference.weights import LayerWeights, MixerWeights, Weights

from .finding_case import Case, Explanation


def layer_of(case: Case) -> LayerWeights | None:
    place, layers = case.finding.place, _layers(case.weights, case.finding.place.stage)
    return layers[place.layer] if 0 <= place.layer < len(layers) else None


def _layers(weights: Weights, stage: str) -> tuple[LayerWeights, ...]:
    if stage == "trunk":
        return weights.layers
    drafter = weights.draft or weights.block
    return () if drafter is None else drafter.layers


def mixer_of(case: Case) -> MixerWeights | None:
    layer = layer_of(case)
    return None if layer is None else layer.mixer


def with_mixer(case: Case, says: str, **changed: Any) -> Iterator[Explanation]:
    mixer = mixer_of(case)
    assert mixer is not None, "the finding is about a mixer"
    yield from with_layer(case, says, mixer=replace(mixer, **changed))


def with_layer(case: Case, says: str, **changed: Any) -> Iterator[Explanation]:
    layer = layer_of(case)
    if layer is not None:
        yield from case.made(says, weights=in_place(case.weights, case, replace(layer, **changed)))


def in_place(weights: Weights, case: Case, layer: LayerWeights) -> Weights:
    """The weights with another layer at the place of the finding."""
    draft, block, place = weights.draft, weights.block, case.finding.place

    def put(layers: tuple[LayerWeights, ...]) -> tuple[LayerWeights, ...]:
        return tuple(layer if at == place.layer else one for at, one in enumerate(layers))

    if place.stage == "trunk":
        return replace(weights, layers=put(weights.layers))
    if draft is not None:
        return replace(weights, draft=replace(draft, layers=put(draft.layers)))
    return weights if block is None else replace(weights, block=replace(block, layers=put(block.layers)))


MOST_TOKENS = 64  # of a piece that is run again so often


def other_weights(case: Case) -> Iterator[Explanation]:
    """The op with the weights of another layer, or with one weight of the layer in the place of another one."""
    if case.piece is None or case.piece.span.count > MOST_TOKENS:
        return
    layer, place = layer_of(case), case.finding.place
    if layer is None:
        return
    trunk, own = _layers(case.weights, "trunk"), _layers(case.weights, place.stage)
    sources = [(f"the target's layer {n}", one) for n, one in enumerate(trunk)]
    if place.stage == "trunk":
        sources = [(f"layer {n}", one) for n, one in enumerate(trunk) if n != place.layer]
        own = _layers(case.weights, "")
    sources += [(f"the drafter's layer {n}", one) for n, one in enumerate(own) if one is not layer]
    for name, other in sources:
        theirs = {part.name: getattr(other, part.name) for part in fields(layer)
                  if type(getattr(other, part.name)) is type(getattr(layer, part.name))}  # fmt: skip
        yield from _made(case, f"is made with the weights of {name}", replace(layer, **theirs))
    yield from _of_the_layer(case, layer)


def _of_the_layer(case: Case, layer: LayerWeights) -> Iterator[Explanation]:
    """One weight in the place of another one of its form, and both exchanged. Only weights that the op reads count."""
    found = dict(_parts(layer))
    lost = {path: _with(layer, {path: _lost(part)}) for path, part in found.items()}
    read = {path for path, without in lost.items()
            if any(not one.wrong.isfinite().all() for one in _made(case, "", without))}  # fmt: skip
    forms = {path: _form(part) for path, part in found.items()}
    for one, other in permutations(found, 2):
        if one in read and forms[one] == forms[other]:
            yield from _made(case, f"is made with `{other}` in the place of `{one}`", _with(layer, {one: found[other]}))
    for one, other in combinations(found, 2):
        if {one, other} <= read and forms[one] == forms[other]:
            exchanged = _with(layer, {one: found[other], other: found[one]})
            yield from _made(case, f"is made with `{one}` and `{other}` exchanged", exchanged)


def _made(case: Case, says: str, layer: LayerWeights) -> Iterator[Explanation]:
    try:
        yield from case.made(says, weights=in_place(case.weights, case, layer))
    except (RuntimeError, IndexError):  # weights of another form
        return


def _parts(part: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The weights of a layer by their path, as in `mixer.query_norm`, and those of a block; not of single experts."""
    for field in fields(part):
        value, name = getattr(part, field.name), f"{path}{field.name}"
        if isinstance(value, torch.Tensor) and value.numel():
            yield name, value
        elif is_dataclass(value):
            if path or field.name.endswith("norm"):
                yield name, value
            yield from _parts(value, f"{name}.")


def _lost(part: Any) -> Any:
    if isinstance(part, torch.Tensor):
        return torch.full_like(part, torch.nan)
    return replace(part, **{field.name: _lost(value) for field in fields(part)
                            if (value := getattr(part, field.name)) is not None})  # fmt: skip


def _form(part: Any) -> Any:
    if isinstance(part, torch.Tensor):
        return part.shape
    return (type(part), *(_form(getattr(part, field.name)) for field in fields(part))) if is_dataclass(part) else None


def _with(part: Any, changed: dict[str, torch.Tensor]) -> Any:
    """Replace the tensors of a part at these paths."""
    here: dict[str, Any] = {}
    for path, tensor in changed.items():
        first, _, rest = path.partition(".")
        here[first] = _with(here.get(first, getattr(part, first)), {rest: tensor}) if rest else tensor
    return replace(part, **here)
