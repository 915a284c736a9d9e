"""The order of findings: the data flow, so that a cause is named before what follows from it; and who makes what.

Leaves out: finding anything.
"""

from dataclasses import fields

import pytest

from instep.diagnose.ops_by_place import RESULTS, WRITERS, also_writes, ops_of, siblings
from instep.run.run_variants import in_memory
from instep.verdict import Comparison, Tier, Verdict
from instep_optimized.ops.op_protocols import Ops
from instep_optimized.ops.watch_op_calls import OPS
from instep_reference.contract.place_names import AFTER_LAYERS, COMPONENTS, STAGE_LEVEL, Place


def wrong(kind: str, stage: str, layer: int, component: str, event: int = 4) -> Comparison:
    place = Place(stage, layer, component)
    return Comparison("derived", Tier.DERIVED, event, kind, place, elements=1, worst=1.0, allowed=0.0)


@pytest.mark.parametrize(("kind", "cause", "effect"), [
    ("forward", ("trunk", 3, "keys"), ("trunk", 3, "attended")),
    ("forward", ("trunk", 3, "key"), ("trunk", 3, "keys")),
    ("forward", ("trunk", 0, "qkv"), ("trunk", 0, "conv")),
    ("forward", ("trunk", 0, "core"), ("trunk", 0, "state")),
    ("forward", ("trunk", 0, "state"), ("trunk", 1, "normed")),
    ("forward", ("trunk", AFTER_LAYERS, "length"), ("trunk", 3, "keys")),
    ("forward", ("trunk", AFTER_LAYERS, "pick"), ("trunk", AFTER_LAYERS, "root")),
    ("forward", ("trunk", AFTER_LAYERS, "root"), ("extend", STAGE_LEVEL, "embedding")),
    ("forward", ("extend", AFTER_LAYERS, "pick"), ("extend.1", STAGE_LEVEL, "embedding")),
    ("forward", ("extend.1", 1, "key"), ("extend.1", 1, "keys")),
    ("commit", ("trunk", AFTER_LAYERS, "pick"), ("trunk", AFTER_LAYERS, "length")),
    ("commit", ("trunk", AFTER_LAYERS, "length"), ("trunk", 0, "conv")),
    ("commit", ("trunk", 0, "conv"), ("trunk", 0, "state")),
    ("commit", ("trunk", 2, "state"), ("extend", STAGE_LEVEL, "post_normed")),
    ("draft", ("extend", AFTER_LAYERS, "pick"), ("chain.1", STAGE_LEVEL, "embedding")),
    ("draft", ("chain.1", 0, "query"), ("extend", 0, "keys")),
    ("draft", ("chain.1", AFTER_LAYERS, "pick"), ("chain.2", STAGE_LEVEL, "embedding")),
    ("draft", ("chain.2", STAGE_LEVEL, "post_normed"), ("chain.2", STAGE_LEVEL, "joined")),
], ids=lambda value: value if isinstance(value, str) else f"{value[0]}.{value[2]}")  # fmt: skip
def test_a_cause_is_named_before_what_follows_from_it(
    kind: str, cause: tuple[str, int, str], effect: tuple[str, int, str]
) -> None:
    late, early = wrong(kind, *effect), wrong(kind, *cause)
    assert Verdict([late, early]).findings == [early, late]


def test_an_earlier_event_comes_first_whatever_its_place() -> None:
    one, other = wrong("draft", "chain.3", AFTER_LAYERS, "pick", event=3), wrong("forward", "trunk", 0, "normed")
    assert Verdict([other, one]).findings[0] is one


def test_every_component_has_its_ops() -> None:
    for component in COMPONENTS:
        makers = ops_of(Place("trunk", 0, component))
        assert makers and set(makers) <= set(OPS), component
    assert set(RESULTS) <= set(OPS) <= {field.name for field in fields(Ops)}
    assert all(in_memory(Place("trunk", 0, name)) for name in WRITERS if name not in ("length", "root", "tail"))


def test_outputs_of_one_call_are_patched_together() -> None:
    assert {place.component for place in siblings(Place("trunk", 2, "k"))} == {"q", "k", "v", "log_decay", "beta"}
    assert siblings(Place("trunk", 2, "z")) == (Place("trunk", 2, "z"),)
    assert also_writes(Place("trunk", 2, "core"), Place("trunk", 2, "state"))
    assert not also_writes(Place("trunk", 2, "core"), Place("trunk", 1, "state"))
    assert not also_writes(Place("trunk", 2, "core"), Place("trunk", 2, "conv"))
