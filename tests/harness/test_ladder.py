"""The ladder distinguishes graphs, ops, places and memory at fault, with wrong ops and engines planted in-process.

Leaves out: faults in the source, which the catalogue plants (`instep faults`).
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from instep.diagnose import locate
from instep.run.replay import Outcome, Replay
from instep.setting import Setting
from instep.trace.file import Trace
from instep.trace.policy import Arrival
from instep.verdict import Exit, Located
from instep_optimized import load
from instep_optimized.graphs import capture_and_replay
from instep_optimized.model import gdn
from instep_optimized.ops import plain
from instep_optimized.ops.op_protocols import Ops
from instep_proof.faults.catalogue.fault import Wrap
from instep_reference.contract.engine import Commit
from instep_reference.contract.place_names import Place
from support.inputs.traces import policy, recorded, recording
from support.running.command import Runner
from support.running.covering import few

pytestmark = pytest.mark.slow  # whole replays

# A commit takes the node before the accepted one.
EARLY = Wrap(
    "instep_optimized/commit/snapshot.py", "Snapshot.commit",
    "from dataclasses import replace\naccepted = replace(accepted, nodes=(accepted.nodes - 1).clamp(min=0))",
)


# Two requests, round after round.
rounds = recording(policy(num_steps=3, adaptive=None, steps=(), deeds=(), accept=(2, 3), rounds=4, arrivals=(
    Arrival("a", "few", max_new=12), Arrival("b", "one", max_new=12),
)))


def located(trace: Trace, **how: Any) -> tuple[Outcome, Located]:
    replay = Replay(trace, Setting(**how))
    outcome = replay.run()
    assert outcome.verdict.exit is Exit.DIVERGED
    return outcome, locate(replay, outcome)


# -- an op --------------------------------------------------------------------------------------------


@few(3)
@pytest.mark.parametrize(("ops", "how", "op", "components", "option"), [
    ("subjects:LOUDER", {}, "gated_norm", "gated", "--swap gated_norm=plain"),
    ("small_errors:EPS_ON_THE_MEAN", {}, "gdn_inputs", "q", "--swap gdn_inputs=plain"),
    ("small_errors:LOUD_TILE_OF_FUSED", {}, "linear", "fused", "--swap linear=plain"),
    ("ops:SWAPPED", {}, "store_rows", "keys", "--swap store_rows=plain"),
    ("ops:UNMOVED", {"strategy": "snapshot"}, "move", "conv", "--swap move=plain"),
    # `shift` and `place_rows` return no place, so the error shows in later ops: the op is found by halving.
    ("ops:ONE_ON", {}, "place_rows", "query keys", None), ("ops:LOUDER_TWICE", {}, "gated_norm, output_gate", "", None),
    ("ops:LABELS_SWAPPED", {}, "store_rows", "", "--swap store_rows=ledger"),
    ("ops:LABELS_SWAPPED", {"graphs": True}, "store_rows", "", None),  # located eagerly
])  # fmt: skip
def test_a_wrong_op_is_named(
    trace: Trace, ops: str, how: dict[str, Any], op: str, components: str, option: str | None
) -> None:
    outcome, found = located(trace, ops=f"support.wrong.{ops}", **how)
    assert (found.cause, found.op) == ("op", op)
    assert not components or found.finding.place.component in components.split()
    if option is not None:
        assert found.finding is outcome.verdict.findings[0] and found.replays <= 2 and found.options == (option,)
        assert f"events 0 to {found.finding.event} agree" in found.says


def test_an_engine_that_raises_is_not_confirmed(trace: Trace) -> None:
    _, found = located(trace, ops="support.wrong.subjects:refusing")
    assert found.cause == "unconfirmed" and found.replays == 0


def test_an_index_outside_of_its_memory_ends_the_event_and_not_the_process(trace: Trace) -> None:
    """Triton's interpreter would follow it."""
    outcome = Replay(trace, Setting(ops="support.wrong.ops:FAR_OFF")).run()
    first, last, *_ = outcome.verdict.findings
    assert outcome.verdict.exit is Exit.DIVERGED and first.check == "contracts" and last.check == "serves"
    assert "locations run from" in first.diagnosis and first.place.component == "keys"
    assert "raised NotRun (not run: an index leads outside of its memory)" in last.diagnosis


# -- a place ------------------------------------------------------------------------------------------


def in_layer(layer: int, changed: str) -> Wrap:
    """GDN layers from this one on hand their gated norm another z: no op is at fault."""
    return Wrap(
        "instep_optimized/model/gdn.py", "GdnLayer.__call__",
        "from dataclasses import replace\n"
        "norm = ops.gated_norm\n"
        f"if self.layer >= {layer}:\n"
        f"    ops = replace(ops, gated_norm=lambda *, z, **others: norm(z={changed}, **others))",
    )


@few(1)
@pytest.mark.parametrize("ops", ["plain", "ledger"])
def test_a_place_is_at_fault_when_all_that_follows_agrees_with_the_references_there(
    trace: Trace, ops: str, plant: Callable[..., None]
) -> None:
    plant(in_layer(0, "z.flip(1)"))
    _, found = located(trace, ops=ops)
    assert (found.cause, found.op, found.finding.place) == ("place", "gated_norm", Place("trunk", 0, "gated"))
    assert found.says.startswith("cause: this place ")
    assert found.options == (f"--graft trunk.0.gated@{found.finding.event}",)


def test_places_alike_in_several_layers_are_at_fault_together(tmp_path: Path, plant: Callable[..., None]) -> None:
    several = recorded(tmp_path, num_hidden_layers=4, full_attention_interval=4)
    plant(in_layer(1, "1.01 * z"))
    _, found = located(several, ops="plain")
    assert found.cause == "place" and "cause: 2 places" in found.says
    assert [option.partition("@")[0] for option in found.options] == ["--graft trunk.1.gated", "--graft trunk.2.gated"]


def test_memory_that_the_same_op_writes_may_stay_wrong(trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    """A delta rule that forgets what it read: its read-out is wrong, and so is the state that it leaves."""
    def forgetful(**given: Any) -> torch.Tensor:
        parts = tuple(replace(part, fresh=torch.ones_like(part.fresh)) for part in given.pop("parts"))
        return right.gdn(parts=parts, **given)

    right = load("plain")
    monkeypatch.setattr(plain, "PLAIN", replace(right, gdn=forgetful))
    _, found = located(trace, ops="plain", strategy="snapshot")
    assert (found.cause, found.op, found.finding.place.component) == ("place", "gdn", "core")
    assert "the same op writes trunk.0.state" in found.says


def test_two_places_of_one_layer_stay_unconfirmed(trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference's tensor at the first place fixes only the first place."""
    def both(self: Any, ops: Ops, *given: Any) -> torch.Tensor:
        wrong = replace(ops, gated_norm=lambda *, z, **more: ops.gated_norm(z=1.01 * z, **more),
                        mlp=lambda *, x, **more: ops.mlp(x=1.01 * x, **more))  # fmt: skip
        return right(self, wrong, *given)

    right = gdn.GdnLayer.__call__
    monkeypatch.setattr(gdn.GdnLayer, "__call__", both)
    _, found = located(trace, ops="plain")
    assert found.cause == "unconfirmed"
    assert "trunk.0.mlp" in found.says and "still disagrees" in found.says


# -- memory -------------------------------------------------------------------------------------------


@few(1)
@pytest.mark.parametrize("ops", ["plain", "ledger"])
def test_wrong_memory_from_a_commit_is_distinguished_from_an_op(
    rounds: Trace, ops: str, plant: Callable[..., None]
) -> None:
    """One node too few, whichever op moves it: with the reference's memory the next events agree."""
    plant(EARLY)
    _, found = located(rounds, ops=ops, strategy="snapshot", conv="widened")
    assert found.cause == "memory" and found.op is None
    assert (found.finding.kind, found.finding.place.component) == ("commit", "state")
    event = found.finding.event
    assert found.says.startswith(
        f"cause: event {event} writes wrong memory (with the reference's memory restored, events {event + 1} to "
        f"{event + 2} agree; event {event + 3} corrupts it again)")  # fmt: skip
    assert any("with --strategy rerun it agrees" in hint for hint in found.hints)


def test_memory_that_no_later_event_reads_is_reported(rounds: Trace, plant: Callable[..., None]) -> None:
    """The same commit as the last event of a trace, so that no later event can be replaced."""
    plant(EARLY)
    first = next(number for number, event in enumerate(rounds.events) if isinstance(event, Commit))
    _, found = located(replace(rounds, events=rounds.events[: first + 1]), ops="plain", strategy="snapshot")
    assert (found.cause, found.options) == ("memory", ())
    assert found.says == f"event {first} writes wrong memory; nothing reads it later in this trace"


def test_wrong_reads_are_distinguished_from_the_ops_that_read(trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second chunk that starts from zero, in the conv and in the delta rule."""
    def anew(self: Any, ops: Ops, hidden: torch.Tensor, bound: Any, stage: str) -> torch.Tensor:
        def fresh(parts: Any) -> Any:
            return tuple(replace(part, fresh=torch.ones_like(part.fresh)) for part in parts)

        wrong = replace(ops, conv=lambda *, parts, **more: ops.conv(parts=fresh(parts), **more),
                        gdn=lambda *, parts, **more: ops.gdn(parts=fresh(parts), **more))  # fmt: skip
        return right(self, wrong, hidden, bound, stage)

    right = gdn.GdnLayer.__call__
    monkeypatch.setattr(gdn.GdnLayer, "__call__", anew)
    _, found = located(trace, ops="plain")
    assert found.cause == "memory" and found.finding.place == Place("trunk", 0, "mixed")
    assert found.says.startswith("cause: the reads from memory (with the reference's mixed and core")


def test_unowned_bytes_are_memory_too(trace: Trace, plant: Callable[..., None]) -> None:
    scribble = "next(region for region in self.regions() if region.name == 'state').units[0].fill_(1.0)"
    plant(Wrap("instep_optimized/engine.py", "OptimizedEngine.idle", scribble))
    outcome, found = located(trace, ops="ledger", strategy="snapshot")
    assert outcome.verdict.findings[0].kind == "idle"
    assert found.cause == "memory" and "writes memory that belongs to no request" in found.says


# -- graphs, and what cannot be confirmed -------------------------------------------------------------


def test_a_finding_that_vanishes_eagerly_is_a_graph_fault(rounds: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs are not copied into the graph's buffers, so every replay has the idle rows of the capture."""
    monkeypatch.setattr(capture_and_replay, "_fill", lambda *given: None)
    _, found = located(rounds, ops="ledger", graphs=True)
    assert found.cause == "graph" and found.replays == 1
    assert found.says.startswith("cause: the CUDA graph (run eagerly, ")


# -- from the command line ----------------------------------------------------------------------------


def test_replay_prints_the_cause(trace: Trace, instep: Runner, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    told = instep("replay", trace.path, "--ops", "support.wrong.subjects:LOUDER", "--json", file)
    assert told.code == Exit.DIVERGED
    assert "cause: op `gated_norm` (with the op of `plain`, events 0 to 2 agree)  [--swap gated" in told.out
    kept = json.loads(file.read_text())["runs"][0]["located"]
    assert (kept["cause"], kept["op"], kept["options"]) == ("op", "gated_norm", ["--swap gated_norm=plain"])


def test_without_the_ladder_nothing_is_run_again(trace: Trace, instep: Runner, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    told = instep("replay", trace.path, "--ops", "support.wrong.subjects:LOUDER", "--no-ladder", "--json", file)
    assert told.code == Exit.DIVERGED and "cause: " not in told.out
    assert json.loads(file.read_text())["runs"][0]["located"] is None


@pytest.mark.parametrize(("words", "code"), [
    (("--swap", "gated_norm=plain"), Exit.AGREED), (("--graft", "trunk.0.gated@2"), Exit.AGREED),
    (("--graft", "trunk.0.mixer@2"), Exit.DIVERGED), ((), Exit.DIVERGED),
])
def test_by_hand_one_thing_is_otherwise(trace: Trace, instep: Runner, words: tuple[str, ...], code: Exit) -> None:
    told = instep("replay", trace.path, "--ops", "support.wrong.subjects:LOUDER", "--until", 4, "--no-ladder", *words)
    assert told.code == code, told.out


@pytest.mark.parametrize(("words", "says"), [
    (("--swap", "gated_norm"), "OP=SET"), (("--swap", "gated=plain"), "one of the ops"),
    (("--graft", "trunk.gated"), "PLACE@EVENT"), (("--graft", "trunk.0.gates@2"), "stage.layer.component"),
    (("--graft", "trunk.9.gated@2"), "trunk.9.gated@2"),
    (("--drafter", "medusa"), "eagle, vanilla, external, block, ngram"),
    (("--graft", "extend.0.state@2"), "one of trunk.0.state"),
    (("--graft", "trunk.0.core@999"), "no other event is run"),
    (("--swap", "gdn=plain", "--swap", "gdn=plain"), "each op once"),
])
def test_wrong_spelling_is_bad_input(trace: Trace, instep: Runner, words: tuple[str, ...], says: str) -> None:
    told = instep("replay", trace.path, "--ops", "plain", *words)
    assert told.code == Exit.BAD_INPUT and says in told.err and "Traceback" not in told.err
