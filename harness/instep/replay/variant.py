"""This trace again, but ...: an op from another set, a place with the reference's tensor in it, no graphs.

Leaves out: running it (`replay.py`), and when which variant says what (`instep.localise`). On the command line a place
is spelled stage.layer.component: trunk.2.core, chain.1.0.query; without a layer where none has it: extend.fused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from instep_optimized.ops.around import OPS, with_ops
from instep_optimized.ops.base import ALONG_TREES, Ops
from instep_optimized.ops.fused import wholes
from instep_reference.contract.errors import BadInput
from instep_reference.contract.place import AFTER_LAYERS, COMPONENTS, STAGE_LEVEL, STAGES, Place

from ..adapters import find

MEMORY = ("conv", "state", "keys", "values")  # replaced once the event is over
BEHIND = ("final", "logits", "pick")  # what stands after the last layer
FORMS = ("plain", "ledger")  # sets of ours: of an op that a keeper brings they have the form that the keeper has


@dataclass(frozen=True)
class Patch:
    """In that place, during that event, the tensor of the rounded reference (for labels: the ledger's) goes on.

    A place in memory (trunk.3.state) is replaced after the event, for every request that is not within a round.
    """

    place: Place
    event: int

    @property
    def until(self) -> int:
        """How far a trace must be run for it."""
        return self.event + in_memory(self.place)

    def __str__(self) -> str:
        return f"{spelled(self.place)}@{self.event}"


@dataclass(frozen=True)
class Variant:
    """What is otherwise than in the plain run; the default changes nothing.

    swap     op -> the op set, or module:attribute, whose op serves instead: {"gdn": "plain"}
    patch    places that get the reference's tensor; a place inside a captured graph cannot, so this runs eagerly
    eager    no graphs
    options  further fields of the engine's `Options`
    """

    swap: Mapping[str, str] = field(default_factory=dict)
    patch: tuple[Patch, ...] = ()
    eager: bool = False
    options: Mapping[str, object] = field(default_factory=dict)

    @property
    def without_graphs(self) -> bool:
        return self.eager or bool(self.patch)


AS_IS = Variant()


def swapped(ops: Ops, swap: Mapping[str, str]) -> Ops:
    """`ops` with some of its ops from other sets; what it declares about itself stays.

    Two things do not: how these ops multiply, and whether all of them serve trees.
    """
    others, products, trees = dict[str, Any](), dict(ops.products), ops.trees
    for name, source in swap.items():
        if name not in (*OPS, *ops.own):
            raise BadInput("--swap", found=name, expected=f"one of the ops {', '.join((*OPS, *ops.own))}")
        found = find(source)
        if not isinstance(found, Ops):
            raise BadInput("--swap", found=source, expected="an op set; an engine has no single ops")
        if _labels(found) != _labels(ops):
            kinds = {True: "labels", False: "numbers"}
            raise BadInput("--swap", found=f"{name}={source}, which moves {kinds[_labels(found)]}",
                           expected=f"an op of a set that moves {kinds[_labels(ops)]}, as {ops.name} does")  # fmt: skip
        own = replace(found, keepers=ops.keepers).own if source in FORMS else found.own
        if name not in OPS and name not in own:
            raise BadInput("--swap", found=f"{name}={source}, which has no such op", expected=f"{name}=plain, or a set "
                           f"that defines {name}")  # fmt: skip
        others[name], form_of = own[name] if name in own else getattr(found, name), name.removeprefix("fused_")
        for whole in wholes(name):
            others.setdefault(whole, None)
        trees = trees and (found.trees or name not in ALONG_TREES)
        products = {form: product for form, product in products.items() if form.partition(".")[0] != form_of}
        products |= {form: product for form, product in found.products.items() if form.partition(".")[0] == form_of}
    return replace(with_ops(ops, others), products=products, trees=trees)


def _labels(ops: Ops) -> bool:
    return not ops.types(torch.float32, torch.float32).hidden.is_floating_point


def patch_of(text: str) -> Patch:
    """From PLACE@EVENT as it is typed."""
    place, at, event = text.partition("@")
    if not at or not event.isdecimal():
        raise BadInput("--graft", found=text, expected="PLACE@EVENT, for example trunk.2.core@17")
    return Patch(place_of(place), int(event))


def swaps_of(texts: Iterable[str]) -> dict[str, str]:
    """From OP=SET, as often as it was typed."""
    found = dict[str, str]()
    for text in texts:
        op, equals, source = text.partition("=")
        if not (op and equals and source):
            raise BadInput("--swap", found=text, expected="OP=SET, for example gdn=plain")
        if op in found:
            raise BadInput("--swap", found=f"{op}={found[op]} and {text}", expected="each op once")
        found[op] = source
    return found


def place_of(text: str) -> Place:
    """A place as `spelled` writes it."""
    stage, *numbers, component = text.split(".") if "." in text else (text, "")
    known = stage in STAGES and component in COMPONENTS and all(number.isdecimal() for number in numbers)
    step = stage == "chain" or (stage == "extend" and (len(numbers) == 2 or numbers[:1] not in ([], ["0"])))
    if not known or len(numbers) > 1 + step or (stage == "chain" and not numbers):
        raise BadInput("--graft", found=text, expected=f"stage.layer.component: a stage of {', '.join(STAGES)} (chain "
                       f"with its step, chain.1), a layer where there is one, a component of {', '.join(COMPONENTS)}")
    if component in ("length", "root"):
        raise BadInput("--graft", found=text, expected="a tensor; a length or a root is a number")
    if step:
        stage, numbers = f"{stage}.{numbers[0]}", numbers[1:]
    return Place(stage, int(numbers[0]) if numbers else AFTER_LAYERS if component in BEHIND else STAGE_LEVEL, component)


def in_memory(place: Place) -> bool:
    """Whether no op hands it on: it is read in a later event."""
    return place.component in MEMORY


def spelled(place: Place) -> str:
    """trunk.2.core, extend.fused, chain.1.0.query, trunk.logits"""
    layer = () if place.layer in (STAGE_LEVEL, AFTER_LAYERS) else (str(place.layer),)
    return ".".join((place.stage, *layer, place.component))
