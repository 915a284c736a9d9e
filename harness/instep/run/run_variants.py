"""Variants of a run: an op from another set, the reference's tensor at a place or in memory, or no graphs.

On the command line a place is stage.layer.component: trunk.2.core, chain.1.0.query; without a layer if it has none:
extend.fused. Leaves out: running it (`replay.py`), how tensors are replaced (`patched_tensors.py`), which places are
patched, and the conclusions (`instep.diagnose`).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from instep_optimized.ops.fused import wholes
from instep_optimized.ops.op_protocols import ALONG_TREES, Ops
from instep_optimized.ops.watch_op_calls import OPS, with_ops
from instep_reference.contract.answers import BLOCKS
from instep_reference.contract.errors import BadInput
from instep_reference.contract.place_names import AFTER_LAYERS, COMPONENTS, STAGE_LEVEL, STAGES, Place

from ..adapters import find
from ..subject.declared_rounding import rounded_once

MEMORY = (*BLOCKS, "keys", "values")  # replaced after the event
BEHIND = ("final", "logits", "pick")  # components after the last layer
FORMS = ("plain", "ledger")  # our sets, which take an op of a commit strategy in the form of the strategy


@dataclass(frozen=True)
class Patch:
    """Replaces the tensor at a place during an event with the rounded reference's (for labels: the ledger's).

    A place in memory (trunk.3.state) is replaced after the event, for every request that is not within a round.
    """

    place: Place
    event: int

    @property
    def until(self) -> int:
        """The last event that the replacement needs."""
        return self.event + in_memory(self.place)

    def __str__(self) -> str:
        return f"{spelled(self.place)}@{self.event}"


@dataclass(frozen=True)
class Variant:
    """The changes of a run; the default changes nothing.

    swap     op -> the op set, or module:attribute, whose op serves instead: {"gdn": "plain"}
    patch    places that get the reference's tensor; the run is then eager, as captured graphs cannot be changed
    eager    no graphs
    calm     no stress
    options  further fields of the engine's `Options`
    """

    swap: Mapping[str, str] = field(default_factory=dict)
    patch: tuple[Patch, ...] = ()
    eager: bool = False
    calm: bool = False
    options: Mapping[str, object] = field(default_factory=dict)

    @property
    def without_graphs(self) -> bool:
        return self.eager or bool(self.patch)


AS_IS = Variant()


def swapped(ops: Ops, swap: Mapping[str, str]) -> Ops:
    """`ops` with some of its ops from other sets, and with its own declarations.

    The products of these ops, and whether all ops serve trees, come from the other sets.
    """
    others, products, trees, once = dict[str, Any](), dict(ops.products), ops.trees, rounded_once(ops.once)
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
        once = once if source == "plain" else once & rounded_once(found.once)  # plain rounds nothing on the way
        trees = trees and (found.trees or name not in ALONG_TREES)
        products = {form: product for form, product in products.items() if form.partition(".")[0] != form_of}
        products |= {form: product for form, product in found.products.items() if form.partition(".")[0] == form_of}
    return replace(with_ops(ops, others), products=products, trees=trees, once=once)


def _labels(ops: Ops) -> bool:
    return not ops.types(torch.float32, torch.float32).hidden.is_floating_point


def patch_of(text: str) -> Patch:
    """Parse PLACE@EVENT."""
    place, at, event = text.partition("@")
    if not at or not event.isdecimal():
        raise BadInput("--graft", found=text, expected="PLACE@EVENT, for example trunk.2.core@17")
    return Patch(place_of(place), int(event))


def swaps_of(texts: Iterable[str]) -> dict[str, str]:
    """Parse all OP=SET."""
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
    """Parse a place that `spelled` wrote."""
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
    """Whether a place is memory, which a later event reads, and no result of an op."""
    return place.component in MEMORY


def spelled(place: Place) -> str:
    """trunk.2.core, extend.fused, chain.1.0.query, trunk.logits"""
    layer = () if place.layer in (STAGE_LEVEL, AFTER_LAYERS) else (str(place.layer),)
    return ".".join((place.stage, *layer, place.component))
