"""Pairs of facts about one request: what counts as one, what the committed traces meet, and what fuzz draws towards.

Leaves out: conditions of single events (`test_fuzz.py`).
"""

from collections import Counter
from pathlib import Path
from typing import cast

import pytest

from instep.campaign.fuzz.drawn_run import Example
from instep.campaign.fuzz.request_histories import Pair
from instep.campaign.soak.soak import Seeded, Turns
from instep.run.replay import Replay
from instep.setting import Setting
from instep.trace.file import read
from instep.trace.header import SCHEMA, Header, Model, Part, Room
from instep.verdict import Exit
from instep_proof.faults.catalogue.fault import Edit
from instep_reference.contract import engine as e
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.sampling import Sampling
from support.inputs.drawn_histories import NODES, Rules, header, met, reached
from support.inputs.recordings import TINY
from support.running.covering import WHOLE
from support.running.planting import planted_here

pytestmark = pytest.mark.slow  # whole replays

TRACES = Path("fixtures/traces")
HEADER = Header(
    schema=SCHEMA, name="by hand", claim="", checkpoint=Model(".", "", "", 256, 1),
    capacity=Room((1, 2, 3), tuple(range(1, 41)), 4, 64, track_interval=4, trim=True), num_steps=2, candidates=(2,),
    adaptive=None, lag=0, seed=0, stop=None, replay=(Part("ledger"),), created={},
)
GREEDY, SAMPLES = e.Admit("a", (1, 2, 3)), e.Admit("b", (1, 2, 3), Sampling(2.0, top_k=2))
PROMPT, SAVE, LOAD = e.Forward((e.Row("a", "prefill", 3, 4),)), e.Save("a", "kept"), e.Load("b", "kept")
SAVED = (GREEDY, PROMPT, SAVE, SAMPLES)


def round_of(name: str, accepted: int, cap: int = 2, under: str = "") -> tuple[e.Event, ...]:
    path = e.Path(tuple(range(1, accepted + 1)), 9)
    return (e.Draft((name,), ((5, 6),)), e.Forward((e.Row(name, "verify"),)),
            e.Commit((name,), (path,), (under,) if under else (), (cap,)))  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return Checkpoint.open(TINY)


@pytest.mark.parametrize(("events", "pairs"), [
    ((*SAVED, LOAD), {("samples", "loads a save")}),
    ((GREEDY, PROMPT, SAVE), set()),
    ((GREEDY, PROMPT, SAVE, *round_of("a", 1)), {("was saved", "accepts some")}),
    ((GREEDY, PROMPT, *round_of("a", 2, 1)), {("accepts some", "is cut by a cap")}),
    ((GREEDY, PROMPT, *round_of("a", 2, under="first")),
     {("accepts all", "is tracked"), ("accepts all", "is tracked inside a path"),
      ("is tracked", "is tracked inside a path")}),
    ((*SAVED, LOAD, *round_of("a", 2), *round_of("b", 0)[:1]),
     {("samples", "drafts"), ("loaded a save", "drafts")}),
    ((GREEDY, PROMPT, *round_of("a", 1), e.Preempt("a"), e.Resume("a")),
     {("accepts some last", "resumes")}),
    ((GREEDY, PROMPT, e.Preempt("a"), SAMPLES, e.Resume("a"), e.Finish("a")),
     {("was preempted", "finishes"), ("is in another slot", "finishes")}),
    ((GREEDY, PROMPT, SAVE, e.Finish("a"), GREEDY, PROMPT), {("runs a first chunk", "runs its last chunk")}),
], ids=lambda value: "" if isinstance(value, set) else type(value[-1]).__name__)  # fmt: skip
def test_pairs_of_an_event(checkpoint: Checkpoint, events: tuple[e.AnyEvent, ...], pairs: set[Pair]) -> None:
    host = Rules(checkpoint, HEADER)
    for event in events[:-1]:
        host.note(event)
    before = Counter(host.histories.met)
    host.note(events[-1])
    assert (host.histories.met - before).keys() == pairs


def test_absent_request_is_one_whose_accepted_drafts_wait(checkpoint: Checkpoint) -> None:
    """Until its next draft, and only while another request is committed without it."""
    host = Rules(checkpoint, HEADER)
    for event in (GREEDY, PROMPT, *round_of("a", 1), SAMPLES, e.Forward((e.Row("b", "prefill", 3, 4, (0.5,)),))):
        host.note(event)
    for absent in (False, True):
        before = Counter(host.histories.met)
        host.note(e.Save("a", f"kept {absent}"))
        found = host.histories.met - before
        assert (("was absent with tokens pending", "is saved") in found) is absent
        if not absent:
            draft, _, commit = round_of("b", 1)
            for event in (draft, e.Forward((e.Row("b", "verify", uniforms=(0.5,) * 4),)), commit):
                host.note(event)


@WHOLE
def test_fuzz_draws_towards_pairs_that_earlier_runs_did_not_meet(checkpoint: Checkpoint) -> None:
    def met_by(runs: int, *, towards: bool) -> int:
        found = Counter[Pair]()
        for number in range(runs):
            data = Seeded(f"towards {number}")
            host = Rules(checkpoint, header(checkpoint, data, trees=NODES * (number % 2)))
            host.known = dict(found) if towards else {}
            turns = Turns(host, cast(Example, host.drawn), data)
            turns.enter_some()
            while len(host.drawn.events) < 30:
                turns.turn()
            found += host.histories.met
        return len(found)

    assert met_by(6, towards=True) > 1.05 * met_by(6, towards=False)


@WHOLE
def test_committed_traces_meet_every_pair_that_drawn_runs_meet(checkpoint: Checkpoint) -> None:
    """A pair that is reached so easily must not be left to chance: `support.inputs.drawn_histories` records it."""
    left = reached(checkpoint, 10) - met(checkpoint, TRACES.rglob("*.jsonl"))
    assert not left


def test_fault_of_a_pair_is_found_by_the_histories_alone(checkpoint: Checkpoint) -> None:
    """A request that samples loads what a greedy one saved, and is greedy from then on."""
    others = [path for path in TRACES.rglob("*.jsonl") if not path.stem.startswith("histories")]
    assert ("samples", "loads a save") not in met(checkpoint, others)
    donor = Edit.of("instep_optimized/request_record.py", "sampling={live => self}.sampling")
    with planted_here(donor):
        verdict = Replay(read(TRACES / "lifecycle" / "histories-chains.jsonl"), Setting("ledger")).run().verdict
    assert verdict.exit is Exit.DIVERGED
