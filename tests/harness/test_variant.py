"""This trace again, but ...: an op from another set, the reference's tensor in a place or in memory, no graphs.

Leaves out: which variant is tried when (`test_ladder.py`).
"""

from dataclasses import replace

import pytest

from instep.run.build_compared_engines import participants_of
from instep.run.lockstep import Lockstep
from instep.run.patched_tensors import Patching
from instep.run.replay import Replay
from instep.run.run_variants import AS_IS, Patch, Variant, patch_of, place_of, spelled, swapped, swaps_of
from instep.setting import Setting
from instep.trace.file import Trace
from instep.verdict import Comparison, Exit, Tier
from instep_optimized import load
from instep_reference.contract import engine as e
from instep_reference.contract.errors import BadInput
from instep_reference.contract.place_names import AFTER_LAYERS, STAGE_LEVEL, Place
from support.running.verdicts import agreed

LOUDER = "support.wrong.subjects:LOUDER"


def first(trace: Trace, kind: type[e.Event]) -> int:
    return next(number for number, event in enumerate(trace.events) if isinstance(event, kind))


PLACES = {
    "trunk.2.core": Place("trunk", 2, "core"), "trunk.embedding": Place("trunk", STAGE_LEVEL, "embedding"),
    "trunk.logits": Place("trunk", AFTER_LAYERS, "logits"), "extend.post_normed": Place("extend", -1, "post_normed"),
    "extend.0.key": Place("extend", 0, "key"), "extend.1.1.key": Place("extend.1", 1, "key"),
    "extend.2.joined": Place("extend.2", STAGE_LEVEL, "joined"), "chain.1.0.query": Place("chain.1", 0, "query"),
    "chain.3.pick": Place("chain.3", AFTER_LAYERS, "pick"), "trunk.0.state": Place("trunk", 0, "state"),
}


def test_a_place_is_read_as_it_is_spelled() -> None:
    for text, place in PLACES.items():
        assert place_of(text) == place and spelled(place) == text
    assert patch_of("trunk.2.core@17") == Patch(PLACES["trunk.2.core"], 17)
    assert str(patch_of("chain.3.pick@4")) == "chain.3.pick@4"
    assert swaps_of(["gdn=plain", "conv=support.wrong.subjects:LOUDER"]) == {"gdn": "plain", "conv": LOUDER}


# Words as they are typed; the run (its op set and last event), and the refusal.
REFUSED = [
    *((text, "plain", 2, "--graft") for text in (
        "trunk.2.core", "trunk.2.core@", "trunk.2.core@x", "@3", "core@3", "trunk.2.cores@3", "stem.2.core@3",
        "trunk.two.core@3", "trunk.1.2.core@3", "chain.core@3", "chain.1.2.3.core@3", "trunk.length@3",
        "trunk..core@3")),
    *((text, "plain", 2, "OP=SET") for text in ("gdn", "gdn=", "=plain", "")),
    ("gnd=plain", "plain", 2, "one of the ops"), ("gdn=nobody", "plain", 2, "no such name"),
    ("gdn=support.wrong.subjects:refusing", "plain", 2, "has no single ops"),
    ("gdn=plain conv=plain gdn=triton", "plain", 2, "--swap: found gdn=plain and gdn=triton, expected each op once"),
    *((f"gdn={other}", ops, 2, r"--swap: found gdn=.*which moves") for ops, other in (
        ("ledger", "plain"), ("plain", "ledger"))),
    ("trunk.0.core@0", "plain", 1, r"trunk\.0\.core@0, where the event, admit, has no such place"),
    *((typed, "plain", 6, rf"--graft: found {typed}, expected {says}") for typed, says in (
        ("trunk.0.core@7", "an event from 0 to 6; no other event is run"), ("trunk.0.state@6", "an event before 6"),
        ("trunk.99.state@3", "one of trunk.0.state"), ("trunk.1.state@3", "one of trunk.0.state"),
        ("trunk.0.keys@3", "one of trunk.1.keys, extend.0.keys"), ("extend.0.state@3", "one of trunk.0.state"),
        ("chain.1.0.conv@3", "one of trunk.0.conv"), ("chain.1.0.keys@3", "one of trunk.1.keys"),
        ("trunk.state@3", "one of trunk.0.state"))),
    *((f"trunk.0.{typed}", "plain", None, "--graft") for typed in ("core@{end}", "state@{last}", "core@99999")),
    *((typed, "support.wrong.subjects:refusing", 4, "refusing") for typed in ("gdn=plain", "trunk.0.state@3")),
]


@pytest.mark.parametrize(("typed", "ops", "until", "says"), REFUSED)
def test_impossible_swap_or_graft_is_refused(trace: Trace, typed: str, ops: str, until: int | None, says: str) -> None:
    """Without `until` the last event of the trace is the end."""
    words = [word.format(end=len(trace.events), last=len(trace.events) - 1) for word in typed.split(" ")]
    grafts = [word for word in words if "=" not in word and says != "OP=SET"]
    with pytest.raises(BadInput, match=says):
        variant = Variant(swaps_of([word for word in words if word not in grafts]), tuple(map(patch_of, grafts)))
        Replay(trace, Setting(ops)).run(until=until, variant=variant)


def test_a_swapped_op_serves(trace: Trace) -> None:
    wrong = Replay(trace, Setting("plain")).run(until=2, variant=Variant(swap={"gated_norm": LOUDER})).verdict
    right = Replay(trace, Setting(LOUDER)).run(until=2, variant=Variant(swap={"gated_norm": "plain"})).verdict
    assert wrong.findings[0].place == Place("trunk", 0, "gated") and right.exit is Exit.AGREED


@pytest.mark.slow
@pytest.mark.parametrize("ops", ["ledger", "plain"])
def test_correct_engine_agrees_with_any_place_patched(trace: Trace, ops: str) -> None:
    """Every place of two events, and all memory after them: what follows is held to the very bits that were put."""
    forward, draft = first(trace, e.Forward), first(trace, e.Draft)
    seen = Replay(trace, Setting(ops)).run(until=draft).last
    places = [place for place in seen.truth.places if place.component not in ("logits", "pick")]
    memory = [Place("trunk", 0, "conv"), Place("trunk", 0, "state"), Place("trunk", 1, "keys"),
              Place("extend", 0, "values")]  # fmt: skip
    patches = [*(Patch(place, draft) for place in places), *(Patch(place, forward) for place in memory)]
    patches += [Patch(Place("trunk", 0, name), forward) for name in ("z", "k", "core", "hidden")]
    agreed(Replay(trace, Setting(ops)).run(until=draft + 3, variant=Variant(patch=tuple(patches))))


@pytest.mark.slow
def test_wrong_ring_update_is_found_and_patched_in_the_ring(trace: Trace) -> None:
    """A step before the state is: at the window that keeps it. The state that is made of it is right again, too."""
    replay, update = Replay(trace, Setting("support.wrong.ops:UPDATES_LOUDER")), Place("trunk", 0, "update")
    first = replay.run().verdict.findings[0]
    assert (first.place, first.tier) == (update, Tier.DERIVED)
    assert isinstance(trace.events[first.event + 1], e.Commit)
    agreed(replay.run(until=first.event + 1, variant=Variant(patch=(Patch(update, first.event),))))


@pytest.mark.slow
def test_a_patch_heals_its_event_and_no_other(trace: Trace) -> None:
    replay = Replay(trace, Setting(LOUDER))
    at = replay.run().verdict.findings[0]
    healed = replay.run(variant=Variant(patch=(Patch(at.place, at.event),))).verdict.findings[0]
    assert healed.place == at.place and healed.event > at.event


@pytest.mark.slow
def test_patch_replaces_memory_after_the_event(trace: Trace) -> None:
    """The commit of a move that moves nothing: with the reference's memory the next events agree."""
    replay = Replay(trace, Setting("support.wrong.ops:UNMOVED", strategy="snapshot"))
    found = replay.run().verdict.findings
    patches = tuple(Patch(place, found[0].event) for place in dict.fromkeys(f.place for f in found))
    assert {patch.place.component for patch in patches} == {"conv", "state"} and found[0].kind == "commit"
    assert replay.run(until=found[0].event + 2, variant=Variant(patch=patches)).verdict.exit is Exit.AGREED
    assert replay.run(until=found[0].event + 2, variant=Variant(patch=patches[:1])).verdict.exit is Exit.DIVERGED


@pytest.mark.slow
def test_read_only_memory_is_bad_input(trace: Trace) -> None:
    """While every request is within its round."""
    for verify in (number for number, event in enumerate(trace.events) if isinstance(event, e.Forward)
                   and any(row.kind == "verify" for row in event.rows)):  # fmt: skip
        variant = Variant(patch=(patch_of(f"trunk.0.state@{verify}"),))
        lockstep = Lockstep(trace, participants_of(Replay(trace, Setting("ledger")).plan, variant))
        for _ in range(verify + 1):
            lockstep.step()
        if not lockstep.patched():
            with pytest.raises(BadInput, match=rf"trunk\.0\.state@{verify}, when every request is within a round"):
                lockstep.step()
            return
    raise AssertionError("no event of this trace has every request within a round")


def test_a_finding_is_dropped_only_where_its_memory_is_patched() -> None:
    place = Place("trunk", 0, "state")
    patching = Patching([Patch(place, 5)])
    found = Comparison("bytes", Tier.BITWISE, 5, "forward", place, elements=1, worst=1.0, allowed=0.0, request="a")
    assert patching.replaces(found, ["b", "a"])
    assert not patching.replaces(found, ["b"]), "within a round, or preempted"
    assert not patching.replaces(replace(found, request=None), ["a"]), "memory without an owner"
    assert not patching.replaces(replace(found, event=6), ["a"])


@pytest.mark.parametrize(("swap", "trees"), [
    ({"gdn": "ledger"}, True), ({"gdn": "chains"}, False), ({"attend": "chains", "gdn": "plain"}, False),
    ({"norm": "chains"}, True),
])  # fmt: skip
def test_op_set_serves_trees_if_each_of_its_tree_ops_does(
    swap: dict[str, str], trees: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sets = {"plain": load("plain"), "ledger": load("plain"), "chains": replace(load("plain"), trees=False)}
    monkeypatch.setattr("instep.run.run_variants.find", sets.__getitem__)
    assert swapped(load("plain"), swap).trees is trees
    assert not swapped(replace(load("plain"), trees=False), {"gdn": "plain"}).trees


def test_eager_variant_passes_options_and_uses_no_graph(trace: Trace) -> None:
    replay, only_plain = Replay(trace, Setting("ledger", graphs=True)), Variant(eager=True, options={"guarded": False})
    held, eager = replay.run(until=2), replay.run(until=2, variant=only_plain)
    assert sum(held.calls.values()) > sum(eager.calls.values()), "capturing runs every body once more"
    assert held.last is not None and any(region.gaps is not None for region in held.last.regions)
    assert eager.last is not None and all(region.gaps is None for region in eager.last.regions)


def test_the_default_changes_nothing() -> None:
    assert Variant() == AS_IS and not AS_IS.without_graphs
    assert replace(AS_IS, eager=True).without_graphs and Variant(patch=(patch_of("trunk.0.z@1"),)).without_graphs
