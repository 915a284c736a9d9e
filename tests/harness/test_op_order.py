"""The order of findings: the data flow, so that a cause is named before what follows from it; and who makes what.

Leaves out: finding anything.
"""

from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest

from instep.diagnose.ops_by_place import (
    NOT_OF_MINIMAX,
    NOT_OF_STREAMS,
    OF_GATES,
    OF_HEADS,
    OF_MINIMAX,
    OF_ROTATED,
    OF_SHORT_CONV,
    OF_STREAMS,
    RESULTS,
    WRITERS,
    also_writes,
    memory_name,
    ops_of,
    siblings,
    unused_by,
)
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
    ("forward", ("trunk", AFTER_LAYERS, "length"), ("trunk", STAGE_LEVEL, "embedding")),
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
    assert [memory_name(Place(stage, 0, name)) for stage in ("trunk", "extend") for name in ("conv", "keys")] == [
        "conv windows", "keys", "draft conv windows", "draft keys"]  # fmt: skip


@pytest.mark.parametrize(("unused", "made"), [
    (OF_ROTATED, ("latent_inputs", "linears", "linear")), (OF_HEADS, ("norm",)), (OF_GATES, ("linears", "linear")),
    (OF_ROTATED - {"attend"}, ("latent_inputs",)), (OF_HEADS | {"linears"}, ("norm",)),
])  # fmt: skip
def test_queries_are_made_by_the_ops_that_a_model_uses(unused: frozenset[str], made: tuple[str, ...]) -> None:
    assert ops_of(Place("trunk", 0, "query"), unused) == made
    assert ops_of(Place("trunk", 0, "query")) == ("attention_inputs", "latent_inputs")


def test_attention_over_latents_has_positions_and_gates_or_neither() -> None:
    """The ops of attention that a model lacks: those of heads, or those of rotated keys. Mamba2 has no gates."""
    for latent, rotary, rows, lacks, has in (
        (8, 4, False, OF_ROTATED, {"output_gate", "latent_inputs", "attend_latents"}),
        (8, 0, False, OF_ROTATED | {"output_gate", "latent_inputs"}, {"attend_latents"}),
        (0, 4, False, {"attend_latents", "latent_inputs"}, {"attention_inputs", "attend", "output_gate"}),
        (0, 4, True, OF_HEADS, {"attend"}),
    ):  # fmt: skip
        others = OF_SHORT_CONV | OF_MINIMAX | OF_STREAMS
        for inputs, also in (("normed", others), ("selective", others | OF_GATES)):
            config: Any = SimpleNamespace(latent=latent, rotary_dim=rotary, row_norms=rows, streams=1,
                                          residual_factors=None, recurrence=SimpleNamespace(
                                              has_state=True, inputs=inputs, name="gdn"))  # fmt: skip
            unused = unused_by(config)
            assert also | {"kda", "mamba2"} <= unused and "gdn" not in unused
            assert inputs == "selective" or (lacks <= unused and not has & unused)


@pytest.mark.parametrize(("streams", "residual_factors", "lacks", "has"), [
    (1, None, OF_STREAMS | OF_MINIMAX, NOT_OF_STREAMS - OF_STREAMS),
    (4, None, NOT_OF_STREAMS, OF_STREAMS - NOT_OF_STREAMS),
    (1, (1.0, 1.0), NOT_OF_MINIMAX, OF_MINIMAX - NOT_OF_MINIMAX)])  # fmt: skip
def test_a_model_lacks_the_ops_of_other_families(streams: int, residual_factors: Any, lacks: Any, has: Any) -> None:
    recurrence = SimpleNamespace(has_state=True, inputs="normed", name="gdn")
    config: Any = SimpleNamespace(latent=0, row_norms=False, recurrence=recurrence, streams=streams,
                             residual_factors=residual_factors)  # fmt: skip
    unused = unused_by(config)
    assert lacks <= unused and not has & unused and "gdn" not in unused and {"mamba2", "kda"} <= unused
    recurrence.inputs, recurrence.name = "selective", "mamba2"
    assert OF_MINIMAX | OF_STREAMS | {"gdn"} <= unused_by(config)
