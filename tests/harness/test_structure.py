"""Structural checks: silent on right engines, a sentence that names the thing on wrong ones.

Leaves out: faults planted in the source (`instep faults`), and what a contract's clauses are (`test_around_contracts`).
Every wrong engine here is a right one with an edit that is planted in this process while the test runs.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from instep.checks import structure
from instep.run.build_compared_engines import participants_of
from instep.run.lockstep import Lockstep
from instep.run.replay import Replay
from instep.setting import Setting
from instep.trace.file import Trace
from instep.trace.policy import Arrival, Policy, Steps
from instep.verdict import Comparison, Exit, Verdict
from instep.watch import op_calls
from instep_optimized import engine
from instep_optimized.commit import rerun
from instep_optimized.graphs import Emulator, capture_and_replay
from instep_proof.faults.catalogue import by_id
from instep_proof.faults.catalogue.fault import Wrap
from instep_reference.contract.engine import Drafted
from support.inputs.traces import ROOM, recorded, recording
from support.running.covering import few
from support.running.verdicts import agreed

BATCH, BUDGET, ENGINE = (f"instep_optimized/{name}.py" for name in ("packed_batch", "memory/budget", "engine"))
MEMORY, RUNNER = "instep_optimized/memory/__init__.py", "instep_optimized/graphs/capture_and_replay.py"
REPLACE = "from dataclasses import replace"
NAMES = {check.name for check in structure()}
FAR = 12  # an event after a narrow window and a wide one
EXACT = {check.tier for check in structure()}  # `test_lockstep.py` judges the arithmetic of a correct engine


# Two requests over prompts, a narrow and a wide window, a plain step, and both leave.
trace = recording(Policy(
    name="small", claim="Two requests, side by side.", capacity=ROOM, num_steps=1,
    adaptive={"candidate_steps": [1, 3]}, arrivals=(
        Arrival("a", "few", chunks=(2,), max_new=4), Arrival("b", "one", max_new=6),
    ),
    steps=(Steps(2, 3), Steps(4, 0), Steps(5, 1)), accept=(0, 1, 2),
))


def replayed(trace: Trace, ops: str = "ledger", **how: Any) -> Verdict:
    return Replay(trace, Setting(ops, **how)).run().verdict


def found(trace: Trace, check: str, ops: str = "ledger", **how: Any) -> list[Comparison]:
    """The findings of one check at the event at which a run stops."""
    verdict = replayed(trace, ops, **how)
    assert verdict.exit is Exit.DIVERGED
    mine = [finding for finding in verdict.findings if finding.check == check]
    assert mine, [(finding.check, finding.diagnosis) for finding in verdict.findings]
    return mine


@few(2)
@pytest.mark.slow
@pytest.mark.parametrize("how", [
    {"ops": "plain"}, {"ops": "ledger", "graphs": True}, {"ops": "plain", "strategy": "columns", "conv": "widened"},
    {"ops": "ledger", "strategy": "snapshot"}, {"ops": "ledger", "strategy": "columns", "graphs": True},
    {"ops": "ledger", "strategy": "lazy_rerun", "layout": "KV"},
], ids=lambda how: " ".join(map(str, how.values())))  # fmt: skip
def test_correct_engine_passes_every_structural_check(trace: Trace, how: dict[str, Any]) -> None:
    verdict = agreed(Replay(trace, Setting(**how)).run(tiers=EXACT))
    asked = {name: [one for one in verdict.compared if one.check == name] for name in NAMES}
    assert all(asked.values()) and all(one.elements > 0 for mine in asked.values() for one in mine)
    assert not [skipped for skipped in verdict.skipped if skipped.check in NAMES]


@pytest.fixture(scope="module")
def whole(trace: Trace) -> Callable[[str], Verdict]:
    """Somebody's right engine, run once: ours in the whole trace, those that say less of themselves as far as `FAR`."""
    def run(ops: str) -> Verdict:
        until = None if ops == "support.wrong.subjects:right" else FAR
        return Replay(trace, Setting(ops)).run(until=until).verdict

    return cache(run)


@pytest.mark.slow
def test_external_engine_skips_are_reported(whole: Callable[..., Any]) -> None:
    verdict = agreed(whole("support.wrong.subjects:right"))
    assert {one.check for one in verdict.compared} >= {"capacity", "aliasing", "graphs", "leaks"}
    reasons = {skipped.check: skipped.reason for skipped in verdict.skipped}
    assert reasons.keys() >= {"contracts", "hostreads", "poison", "graphs", "leaks"}


@few(2)
@pytest.mark.slow
@pytest.mark.parametrize("ops", [
    "support.wrong.subjects:right", "support.wrong.declared_regions:EMPTY", "support.wrong.declared_regions:NO_UNITS",
    "support.wrong.declared_regions:UNDECLARED",
])  # fmt: skip
def test_checks_of_an_engine_without_ops_compare_or_skip(whole: Callable[..., Any], ops: str) -> None:
    verdict = agreed(whole(ops))
    skipped = {one.check: one.reason for one in verdict.skipped}
    compared = {one.check for one in verdict.compared}
    for check in (*NAMES, "bytes", "identity", "directed", "derived", "propagated", "decisions"):
        assert check in compared or skipped.get(check), check
    if ops.endswith(("EMPTY", "NO_UNITS")):
        assert skipped.keys() >= {"bytes", "bounds", "capacity", "aliasing", "tails"}
    assert all(one.elements for one in verdict.compared)


def test_units_of_a_region_that_is_not_shown_are_named(trace: Trace) -> None:
    verdict = replayed(trace, "support.wrong.declared_regions:UNKNOWN")
    (said,) = [finding.diagnosis for finding in verdict.findings if finding.check == "interface"]
    assert said.startswith("may_change names units of states; `regions` shows no such region, only conv, ")


# Contracts


def view(pool: str) -> Wrap:
    """The state that a re-run reads, through this view of its pool."""
    return Wrap("instep_optimized/commit/rerun.py", "Rerun._part", result=(
        f"{REPLACE}\npool = result.read.pool\nresult = replace(result, read=replace(result.read, pool={pool}))"))


SNAPSHOT, GRAPHS, SLOW = {"strategy": "snapshot"}, {"graphs": True}, pytest.mark.slow
# What is planted or wrong, in an engine with these options; the check, and parts of the message of its first finding.
WRONG: dict[str, tuple[Any, ...]] = {
    "a prompt served as a window": (
        Wrap(BATCH, "Group.part", result=f"{REPLACE}\nresult = replace(result, form='window')"), SNAPSHOT, "contracts",
        'op conv (trunk.0.mixed): the 2 rows of request "a" (prefill) are served as a window; '
        "prefill rows are a chunk"),
    "rows in another request's slot": (
        Wrap(BATCH, "Group.part", f"{REPLACE}\nread = replace(read, units=read.units.flip(0))"), SNAPSHOT, "contracts",
        'of request "', "are served with slot"),
    "a copy of a pool": (
        Wrap("instep_optimized/commit/snapshot.py", "_Pair.part", result=f"{REPLACE}\nif result.store is not None:\n"
             "    result = replace(result, store=replace(result.store, pool=self.slots.pool.clone()))"), SNAPSHOT,
        "contracts", "op conv (trunk.0.mixed): store is not a pool of this engine, so writes to it are lost"),
    "another pitch": (view("pool.as_strided(pool.shape, (pool.shape[1:].numel(), *pool.stride()[1:]))"), {},
                      "contracts", "op gdn (trunk.0.core): read", "the pitch of state is"),
    "another layout": (view("pool.as_strided(pool.shape, (*pool.stride()[:-2], *pool.stride()[:-3:-1]))"), {},
                       "contracts", "op gdn (trunk.0.core): read", "inner strides"),
    "another offset": (view("pool[1:]"), {}, "contracts", "op gdn (trunk.0.core): read", "after its first slot"),
    "a result of another dtype": (
        "support.wrong.ops:DOUBLED", {}, "contracts",
        "op gated_norm (trunk.0.gated): gated came back as torch.float64, torch.float32"),
    "a pool for the step count at the start": (
        Wrap(BUDGET, "positions", f"{REPLACE}\nsizes = replace(sizes, widest=2)"), SNAPSHOT, "capacity",
        "snapshot_conv has 2 columns; 4 are needed for the widest window, of 4 tokens"),
    "one slot too few": (Wrap(BUDGET, "units", result="result = replace(result, units=3)"), SNAPSHOT, "capacity",
                         "conv has 3 units; 4 are needed, one per slot that the trace assigns and slot 0"),
    "a drafter that writes into the target's configuration": (
        Wrap("instep_optimized/draft/eagle.py", "Eagle.of", 'object.__setattr__(config, "rope_theta", 7.0)'), {},
        "aliasing", "the model's configuration, rope_theta, changed while the optimized engine was made: it was "
        "10000000.0 and is 7.0"),
    "two layers on one memory": (
        # Under another name, because the wrapped function is inside this one and also uses `replace`.
        Wrap(MEMORY, "Memory.regions", result="from dataclasses import replace as changed\nresult = list(result)\n"
             "keys, *others = [region for region in result if region.name in ('keys', 'values')]\n"
             "result = [*result, changed(others[0], units=keys.units[1:])]"), {},
        "aliasing", "units of keys (layer 1)", "share memory"),
    "an input that is not copied": ("frozen-capture-forced", GRAPHS, "graphs", "forced of row 0 is", "this event has"),
    "a bucket that is too wide": (Wrap(RUNNER, "Runner.bucket", result="result = self.buckets[-1]"), GRAPHS, "graphs",
                                  "the bucket is for 2 requests; for 1 it is the one for 1"),
    "a reallocated pool": (
        Wrap(ENGINE, "OptimizedEngine.set_num_steps", result="from .memory.pool import Pool\n"
             "old = self._memory.pools['picks']\nself._memory.pools['picks'] = "
             "Pool(old.demand, guarded=True, poison=float('nan'), device=self._device)"), {},
        "graphs", "picks (layer 0) moved; picks_ends (layer 0) moved"),
    "a read between ops": (  # of accept_lens
        Wrap("instep_optimized/round_for_step_count.py", "Round.commit",
             result="assert int(result[-1].max()) <= self.width"), {},
        "hostreads", "the host reads the device 1 time (between ops; ",
        "instep_optimized.round_for_step_count.Round.commit line"),
    "a column after a narrow window": (
        "support.wrong.ops:ONE_COLUMN_MORE", SNAPSHOT, "tails",
        "snapshot_state row 0 changed at position 2; this event writes only positions 0 to 1 there"),
    "a new unit that is not poison": (
        Wrap("instep_optimized/memory/pool.py", "Pool.scrub", "units = list(units)[: max(len(units) - 1, 2)]"), {},
        "poison", "conv slot 3 is new and not poison"),
    "poison that is read": ("support.wrong.ops:POISONED", {}, "poison",
                            "elements are poison (nan), the first in row 1"),
    "a slot that is given back as it was": (
        Wrap(MEMORY, "Memory.release", "slot = self.slots.of(request)\n"
             "kept = {layer: self['conv'].units(layer)[slot].clone() for layer in self.layers('conv')}",
             "for layer, window in kept.items():\n    self['conv'].units(layer)[slot] = window"), {},
        "leaks", 'data of request "{0.request}" is still in conv slot {0.slot}'),
    "pages that stay owned": ("lifecycle-loss-pages", {}, "leaks", "page ", 'is owned by "'),
}
AT = {  # the place of the first finding: its kind, component, request, slot
    "a prompt served as a window": ("forward", "mixed", "a", 3), "poison that is read": ("forward", "gated", "a", 3),
    "a read between ops": ("commit", "length", None, None),
}
LATER = ("another pitch", "another layout", "another offset", "pages that stay owned",
         "a new unit that is not poison")  # after other findings of the check
SLOWER = ("an input", "a bucket", "a column", "a slot", "pages")


@pytest.mark.parametrize("name", [pytest.param(one, marks=SLOW if one.startswith(SLOWER) else ()) for one in WRONG])
def test_mistake_is_named_by_its_check(trace: Trace, plant: Callable[..., None], name: str) -> None:
    wrong, how, check, *says = WRONG[name]
    if isinstance(wrong, Wrap):
        plant(wrong)
    elif ":" not in wrong:
        plant(*by_id()[wrong].edits)
    mine = found(trace, check, wrong if isinstance(wrong, str) and ":" in wrong else "ledger", **how)
    first = mine[0] if name not in LATER else next(one for one in mine if says[-1] in one.diagnosis)
    assert all(part.format(first) in first.diagnosis for part in says), [one.diagnosis for one in mine]
    assert name not in AT or AT[name] == (first.kind, first.place.component, first.request, first.slot)


def test_broken_contract_is_reported_with_a_later_exception(trace: Trace) -> None:
    verdict = replayed(trace, "support.wrong.ops:SHORT")
    assert {finding.check for finding in verdict.findings} == {"contracts", "serves"}
    assert verdict.findings[0].diagnosis == "op gated_norm (trunk.0.gated): rows that came back: 0; due: 3"


def test_findings_of_a_check_are_kept_when_it_raises(trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    def falling(name: str, given: dict[str, Any]) -> Iterator[str]:
        yield "a clause that was broken"
        raise IndexError("row 3 of 2")

    monkeypatch.setattr(op_calls, "before", falling)
    participants = participants_of(Replay(trace, Setting("ledger")).plan)
    lockstep = Lockstep(trace, participants)
    broken = next(context.log.broken for context in (lockstep.step() for _ in trace.events) if context.log.broken)
    assert [one.clause for one in broken[:2]] == [
        "a clause that was broken", "was called in a way that cannot be judged (row 3 of 2)",
    ]


def test_a_pool_of_another_dtype_than_declared_is_named(trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    units = rerun.units
    monkeypatch.setattr(
        rerun, "units", lambda component, config, sizes: replace(
            units(component, config, sizes), dtype=torch.bfloat16 if component == "state" else sizes.types.conv
        ),
    )  # fmt: skip
    said = found(trace, "contracts", "plain")[0].diagnosis
    assert said.startswith("op gdn (trunk.0.core): units of read are torch.bfloat16, torch.float32 is declared")


# Capacity


# Aliasing


def test_an_answer_on_a_pool_is_named(trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.OptimizedEngine, "draft", _on_the_slot_table)
    said = [finding.diagnosis for finding in found(trace, "aliasing")]
    assert said[0].startswith("the answer is a view of window")


def _on_the_slot_table(self: Any, requests: Any, picks: Any = None, parents: Any = None) -> Any:
    drafts = torch.tensor(picks)
    windows = self._memory.slot_table.window
    for row, name in enumerate(requests):
        windows[self._memory.slots.of(name), 1 : drafts.shape[1] + 1] = drafts[row]
    return Drafted(windows[: len(requests), 1 : drafts.shape[1] + 1], drafts)


@pytest.mark.slow
def test_an_answer_that_the_next_replay_overwrites_is_named(trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    def kept(outputs: Any, bucket: int, rows: int, join: Any = None) -> Any:
        if isinstance(outputs, torch.Tensor):
            return capture_and_replay._cut(outputs, bucket, rows)
        parts = [kept(output, bucket, rows) for output in outputs]
        return capture_and_replay._like(outputs, parts) if join is None else join(parts)

    monkeypatch.setattr(capture_and_replay, "_copied", kept)
    said = [finding.diagnosis for finding in found(trace, "aliasing", graphs=True)]
    assert said[0].startswith("earlier answers changed while this event ran: ")


# Graphs


@pytest.mark.slow
def test_a_padding_row_that_is_not_refreshed_is_named(tmp_path: Path, plant: Callable[..., None]) -> None:
    told = Policy(
        name="small", claim="One of four leaves.", capacity=msgspec.structs.replace(ROOM, slots=(3, 1, 2, 5)),
        num_steps=1, adaptive=None, accept=(0,),
        arrivals=tuple(Arrival(name, "one", max_new=most) for name, most in (("a", 9), ("b", 9), ("c", 2), ("d", 9))),
    )
    plant(*by_id()["stale-pad-row"].edits)
    said = [finding.diagnosis for finding in found(recorded(tmp_path, told), "graphs", graphs=True)]
    assert "of padding row" in said[0] and "an idle row has" in said[0]


def test_the_graph_of_another_kind_is_named(
    trace: Trace, plant: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(Wrap(RUNNER, "Runner.run", "key = (key[0].replace('commit', 'verify'), key[1])"))
    monkeypatch.setattr(
        engine, "prepared", lambda ops, of, device, *_, **named: capture_and_replay.Runner(Emulator(), (1, 2), device)
    )
    said = [finding.diagnosis for finding in replayed(trace, graphs=True).findings]
    assert any("the graph ('verify', 1) was replayed; the event is one of ('commit', 1)" in one for one in said), said


# Host reads


@pytest.mark.slow
def test_host_read_inside_a_capturable_op_is_named(trace: Trace) -> None:
    first = found(trace, "hostreads", "support.wrong.ops:WAITING")[0]
    assert "(op gated_norm; support.wrong.ops._waiting line" in first.diagnosis
    agreed(Replay(trace, Setting("support.wrong.ops:CORRECT")).run(until=first.event))
    claims = found(trace, "hostreads", "support.wrong.ops:CLAIMS")[0]
    assert "instep_optimized.ops.plain" in claims.diagnosis, "the module of an op exempts no op"


# Tails


# Poison and leaks


def test_engine_without_observed_op_calls_does_not_pass(trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the wrapper no call is judged, and the verdict reports that."""
    monkeypatch.setattr(op_calls.Calls, "wrapper", lambda self, name, op: op)
    assert found(trace, "contracts")[0].diagnosis == "no op was called and no graph was replayed"
