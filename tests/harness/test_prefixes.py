"""Tracked prefixes in a replay: right ones agree in every form, and whatever is wrong in one is seen where it is kept.

Leaves out: the two engines against each other (`tests/optimized/test_prefixes.py`), and the catalogue's faults.
"""

from typing import Any

import msgspec
import pytest
import torch

from instep.campaign.relations import held, relations
from instep.campaign.relations.case import Case
from instep.campaign.relations.request_timelines import alone, timelines_of
from instep.campaign.streams.stamped_trace import relabelled
from instep.checks.prefix_findings import misrounded, nearest_misrounding, with_last, wrong_slots, wrong_step
from instep.diagnose import diagnose
from instep.finding_problem import Problem
from instep.oracle.storage_rounding import kept_states
from instep.run.replay import Replay
from instep.setting import Setting
from instep.subject.engines.engine_from_verbs import DerivedEngine
from instep.trace.event_rules import verified
from instep.trace.event_scheduler import drive
from instep.trace.file import Trace, read
from instep.trace.policy import Arrival
from instep.verdict import Comparison, Exit, Tier
from instep.watch.event_context import EventContext
from instep_proof.faults.catalogue import TRACES, by_id
from instep_proof.faults.catalogue.fault import Edit, Wrap
from instep_reference.contract.declared_rounding import Blocked
from instep_reference.contract.engine import Admit, Capacity, Commit, Forward, Load
from instep_reference.contract.errors import BadInput, Unsupported
from instep_reference.contract.event_facts import tracks
from instep_reference.contract.place_names import Place
from instep_reference.label_ledger import LedgerEngine
from support.inputs.few_channels import same_events
from support.inputs.rounds import config
from support.inputs.traces import PROMPTS, ROOM, header, policy, recorded, recording
from support.running.covering import WHOLE, few
from support.running.planting import planted_here
from support.running.verdicts import agreed

pytestmark = pytest.mark.slow  # runs with and without a shared prefix

SAVED, UNITS = "instep_optimized/memory/saved_states.py", "instep_optimized/memory/tiled_units.py"
ENGINE, PREFIXES = "instep_optimized/engine.py", "instep_optimized/tracked_prefixes.py"
COLUMNS, MIXED = "instep_optimized/commit/columns.py", "instep_optimized/forwards.py"
BEGIN = "request.length.exact - len(final)"
TOLD = policy(
    capacity=msgspec.structs.replace(ROOM, track_interval=4, pages=tuple(range(12, 0, -1))),
    num_steps=3, steps=(), deeds=(), accept=(3, 1, 0), rounds=7,
    arrivals=(
        Arrival("a", "few", max_new=7), Arrival("b", "more", chunks=(8,), max_new=2),
        Arrival("c", "one", arrive=4, behind="a", max_new=3),
    ),
)  # fmt: skip


trace = recording(TOLD)


def test_policy_interval_tracks_and_shares_the_longest_prefix(trace: Trace) -> None:
    rows = [row for event in trace.events if isinstance(event, Forward) for row in event.rows]
    chunks = [row for row in rows if row.kind == "prefill"]
    assert {row.tokens for row in chunks if row.track} == {4} and all(row.tokens <= 4 for row in chunks)
    (entered, loaded) = (next(i for i, e in enumerate(trace.events) if isinstance(e, kind) and e.request == "c")
                         for kind in (Admit, Load))  # fmt: skip
    assert loaded == entered + 1
    made = {under for event in trace.events[:entered] if isinstance(event, Commit) for under in tracks(event)}
    assert trace.events[loaded].name in made, "the longest is one with accepted tokens"  # type: ignore[union-attr]
    nobody = msgspec.structs.replace(TOLD, arrivals=(Arrival("a", "few", behind="nobody"),))
    with pytest.raises(BadInput, match="behind"):
        engine = LedgerEngine(config(), num_steps=3, room=TOLD.capacity.capacity())
        list(drive(nobody, PROMPTS, header(capacity=TOLD.capacity), engine))


@few(1)
@pytest.mark.parametrize("how", [
    Setting("ledger", strategy="columns", conv="widened"),
    pytest.param(Setting("ledger", strategy="lazy_rerun", graphs=True), marks=WHOLE),
    pytest.param(Setting("plain", state_dtype="bfloat16"), marks=WHOLE),
    Setting("plain", strategy="snapshot", kv_dtype="float8_e4m3fn"),
], ids=str)  # fmt: skip
def test_right_prefixes_agree(trace: Trace, how: Setting) -> None:
    agreed(Replay(trace, how).run())


@WHOLE
@pytest.mark.parametrize("how", [
    Setting("plain", strategy="snapshot", kept_dtype="int8", chunk_dtype="bfloat16", graphs=True),
    Setting("plain", kept_dtype="int8", state_dtype="bfloat16", overlap=True),
    Setting("plain", strategy="columns", conv="widened", chunk_dtype="float16", kv_dtype="float8_e4m3fn"),
    Setting("plain", strategy="lazy_rerun", kept_dtype="int8", layout="KV"),
    Setting("ledger", kept_dtype="int8"),
], ids=str)  # fmt: skip
def test_right_narrow_prefixes_agree(trace: Trace, how: Setting) -> None:
    outcome = Replay(trace, how).run()
    agreed(outcome)
    assert ("keeps states of prefixes" in outcome.declared.said(torch.float32)) == (how.ops != "ledger")


class Dtypes:
    """The dtypes of the kept states, and the states of prefixes next to those of their requests."""

    name, tier = "dtypes", Tier.IDENTITY

    def __init__(self) -> None:
        self.kept, self.loaded = dict[str, set[torch.dtype]](), list[tuple[torch.Tensor, torch.Tensor]]()

    def __call__(self, context: EventContext) -> tuple[()]:
        for under, prefix in context.subject.tracked.items():
            self.kept.setdefault(context.kind, set()).update(state.dtype for state in prefix.state.values())
            assert under in context.expected.prefixes
        if isinstance(context.event, Load):
            kept = context.earlier.saved[context.event.name].state
            after = context.subject.after[context.event.request]
            self.loaded += [(kept.state[layer], after.state[layer]) for layer in kept.state]
        return ()


@few(1)
@pytest.mark.parametrize(("how", "forward", "commit"), [
    (Setting("plain", strategy="snapshot", chunk_dtype="bfloat16"), torch.bfloat16, torch.float32),
    (Setting("plain", strategy="snapshot", kept_dtype="int8", state_dtype="bfloat16"), torch.float32, torch.float32),
    (Setting("plain", strategy="snapshot"), torch.float32, torch.float32),
], ids=str)  # fmt: skip
def test_hit_continues_from_what_the_prefix_shows(
    trace: Trace, how: Setting, forward: torch.dtype, commit: torch.dtype
) -> None:
    seen = Dtypes()
    agreed(Replay(trace, how).run(also=[seen]))
    assert seen.kept == {"forward": {forward}, "commit": {commit}} and seen.loaded
    assert all(torch.equal(kept.to(after), after) for kept, after in seen.loaded)


@few(1)
@pytest.mark.parametrize("edits", [(), by_id()["kept-scale-of-another-head"].edits], ids=["right", "wrong"])
def test_hit_on_a_narrow_prefix_is_a_hit_on_a_plain_copy_of_its_numbers(trace: Trace, edits: tuple[Edit, ...]) -> None:
    how = Setting("plain", kept_dtype="int8", chunk_dtype="bfloat16")
    with planted_here(*edits):
        (one,) = held(Case.of(trace, Replay(trace, how).plan), relations(("kept_once",)))
    assert one.verdict.exit is (Exit.DIVERGED if edits else Exit.AGREED), one.verdict.findings[:1]
    (plain,) = held(Case.of(trace, Replay(trace, Setting("plain")).plan), relations(("kept_once",)))
    assert plain.lacks == "no request continues from a prefix that is kept narrower"


MORE_KV = "            self.memory.units(name, layer).put((self.at[0][:count], self.at[1][:count]), rows)\n"
KEPT = "                self._keep(p.row.track, p.request, count, peeked, final[end - 1], forward=True)\n"


@few(2)
@pytest.mark.parametrize(("edit", "how", "kind", "says"), [
    (Edit(PREFIXES, KEPT, KEPT.replace("end - 1", "end - 2")), Setting("plain"), "forward",
     "is the final row of token 2"),
    (Edit(SAVED, MORE_KV, MORE_KV.replace("rows)", "rows) if 'keys' in name else None")), Setting("ledger"), "load",
     "comes back different from what was saved"),
    (Edit(COLUMNS, "columns.taken(slot, node)", "columns.taken(slot, 0)"), Setting("plain", strategy="columns"),
     "commit", "holds the state after 1 token; 3 tokens were tracked"),
    (Wrap(ENGINE, "OptimizedEngine.prefix", result="result = None"), Setting("ledger"), "forward",
     "prefix returned None; the contract expects a `RequestState`"),
    (Wrap(PREFIXES, "Prefixes.of_chunks", result="result = dict.fromkeys(result, '4')"), Setting("ledger"), "forward",
     "forward: tracked returned a dict"),
    (Wrap(PREFIXES, "Prefixes.of_chunks", result="result = dict.fromkeys(result, 8)"), Setting("ledger"), "forward",
     "answers a prefix of 8 tokens; expected 4"),
], ids=lambda value: value if isinstance(value, str) else "")  # fmt: skip
def test_fault_in_a_prefix_is_named(trace: Trace, edit: Edit | Wrap, how: Setting, kind: str, says: str) -> None:
    with planted_here(edit):
        found = diagnose(Replay(trace, how)).verdict.findings
    assert found and found[0].kind == kind
    assert any(says in one.diagnosis for one in found if one.event == found[0].event), [one.diagnosis for one in found]


@pytest.mark.parametrize(("found", "right", "says"), [
    (-1, 3, "no multiple is seen, although the path reaches one"),
    (1, 3, "it is the depth 1, not the node that accept_index has there"),
    (0, 3, "it is the accepted node one before the one that reaches the multiple"),
    (4, 3, "it is the accepted node one after the one that reaches the multiple"),
    (6, 3, "it is the last accepted node, or the multiple is one that only the whole window reaches"),
    (5, -1, "the multiple is one that only the whole window reaches"),
    (2, 3, ""),
])  # fmt: skip
def test_a_wrong_tracked_step_is_recognised(found: int, right: int, says: str) -> None:
    """6 tokens, then a window of 8 nodes: of the path 0, 3, 4, 6 node 3 reaches 8 tokens; 12 only the whole window."""
    path, before = ((0, 3, 4, 6) if right >= 0 else (0,)), 6
    known = wrong_step(found, right, path, before, 8, 4)
    assert ("" if known is None else known.says) == says


@pytest.mark.parametrize(("found", "says"), [
    ({"x": 2, "y": 1, "z": 3}, 'the slot of "z" is kept, although nothing was tracked under the name'),
    ({"x": 1, "y": 1}, "no slot is taken for a window that may reach a multiple, and does not"),
    ({"x": 3, "y": 1}, "a slot is taken for a window that can reach no multiple"), ({"x": 2}, ""),
])  # fmt: skip
def test_wrong_track_slots_are_recognised(found: dict[str, int], says: str) -> None:
    known = wrong_slots(found, {"x": 2, "y": 1})
    assert ("" if known is None else known.says) == says


@pytest.mark.parametrize(("stage", "layer", "due", "says"), [
    ("draft", 0, 2, "keeps the draft head's last row, which depends on the token after the prefix"),
    ("draft", 1, 1, "keeps 2 rows of MTP layer 1, which depend on tokens after the prefix"),
    ("draft", 1, 4, "lacks 1 row of MTP layer 1, which depends on no token after the prefix"),
    ("draft", 1, 3, "differs"), ("trunk", 1, 4, "differs"),
])  # fmt: skip
def test_wrong_counts_of_rows_that_a_prefix_keeps_are_recognised(stage: str, layer: int, due: int, says: str) -> None:
    """3 rows are kept."""
    result = Comparison("bytes", Tier.BITWISE, 0, "save", Place(stage, layer, "keys"), 1, 1.0, 0.0,
                        problem=Problem("differs", "differs"))  # fmt: skip
    for found, said in ((torch.zeros(3, 2, 2), says), (torch.zeros(3, 2), "differs"), (None, "differs")):
        assert with_last(result, found, due).diagnosis == said


def test_a_state_that_is_rounded_wrongly_is_named_by_its_rounding() -> None:
    """8 key channels, each rounded with its scale. A few bytes differ by the order of a sum."""
    state = torch.randn(3, 8, 40, generator=torch.Generator().manual_seed(4))
    rounds = {"kept": Blocked(torch.int8, (1, None))}
    right, named = kept_states(state, rounds, forward=False), []
    for known, wrong in misrounded(state, None, rounds, forward=False, kept={}):
        few, found = wrong.clone(), nearest_misrounding(wrong, state, rounds, forward=False)
        few[0, 0, :9] += 1
        assert found == known == nearest_misrounding(few, state, rounds, forward=False), (found, known)
        assert nearest_misrounding((wrong + right) / 2, state, rounds, forward=False) is None, known
        named.append(known.name)
    assert len(named) > 7 and nearest_misrounding(right, state, rounds, forward=False) is None
    for storage in (torch.bfloat16, Blocked(torch.float8_e4m3fn, (1, None))):
        every = misrounded(state, None, {"kept": storage}, forward=False, kept={})
        assert [known.name for known, _ in every] == ["prefix-not-rounded"], "only integers have further mistakes"


@pytest.mark.parametrize("how", [
    Setting("ledger", graphs=True),
    pytest.param(Setting("plain", strategy="columns", conv="widened", state_dtype="bfloat16"), marks=WHOLE),
    pytest.param(Setting("plain", state_dtype="float8_e4m3fn", strategy="snapshot"), marks=WHOLE),
    pytest.param(Setting("triton", strategy="lazy_rerun"), marks=WHOLE),
    pytest.param(Setting("plain", kept_dtype="int8", chunk_dtype="bfloat16"), marks=WHOLE),
    pytest.param(Setting("plain", kept_dtype="int8", state_dtype="bfloat16", strategy="snapshot"), marks=WHOLE),
    pytest.param(Setting("invariant", kept_dtype="int8", strategy="columns"), marks=WHOLE),
], ids=str)  # fmt: skip
def test_prefixes_inside_chunks_agree(how: Setting) -> None:
    agreed(Replay(same_events("inner", 2), how).run(until=9))


@pytest.mark.whole
def test_a_hit_inside_a_chunk_equals_the_same_parts_of_a_prompt() -> None:
    """A request that loads a prefix inside a chunk has the bits of one that prefills the donor's parts."""
    trace = same_events("inner", 2)
    told = {timeline.request: timeline for timeline in timelines_of(trace)}
    assert [(step.tokens, step.anew) for step in told["c"].steps[:3]] == [(12, False), (12, False), (12, False)]
    (one,) = held(Case.of(trace, Replay(trace, Setting("invariant")).plan), relations(("alone",)))
    assert agreed(one).elements > 0


def test_request_alone_prefills_a_shared_prefix_in_donor_chunks() -> None:
    trace = read(TRACES / "prefix.jsonl")
    told = {timeline.request: timeline for timeline in timelines_of(trace)}
    assert [(step.tokens, step.anew) for step in told["c"].steps[:3]] == [(4, False), (4, False), (2, False)]
    assert [(step.tokens, step.anew) for step in told["d"].steps[:2]] == [(16, True), (4, False)]
    assert not any(isinstance(event, Load) or tracks(event) for event in alone(trace).events)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """The smallest case: a second request continues from the one chunk that the first one has tracked."""
    few = (Arrival("a", "few", max_new=2), Arrival("c", "few", arrive=1, max_new=2))
    told = msgspec.structs.replace(TOLD, arrivals=few, adaptive={"candidate_steps": [1]}, num_steps=1, accept=(1,))
    small = {"hidden_size": 16, "intermediate_size": 16, "linear_num_value_heads": 2, "num_attention_heads": 2}
    return recorded(tmp_path_factory.mktemp("shared"), told, **small)


@pytest.mark.parametrize("edits", [(), (Edit(MIXED, BEGIN, f"{BEGIN} - 1"),)])
def test_shared_prefix_has_the_bits_of_a_prefill_alone(shared: Trace, edits: tuple[Edit, ...]) -> None:
    """Every row is computed alone here, so bits do not depend on the number of rows."""
    with planted_here(*edits):
        (one,) = held(Case.of(shared, Replay(shared, Setting("plain")).plan), relations(("alone",)))
    assert one.verdict.exit is (Exit.DIVERGED if edits else Exit.AGREED), one.verdict.findings[:1]
    assert edits or Tier.BITWISE in {compared.tier for compared in one.verdict.compared}


def test_stamps_of_a_shared_prefix_are_the_donor_s() -> None:
    stamped = relabelled(read(TRACES / "prefix.jsonl")).trace
    verified(stamped)
    prompts = {event.request: event.prompt for event in stamped.events if isinstance(event, Admit)}
    assert prompts["c"][:8] == prompts["a"][:8] == prompts["d"][:8] and prompts["c"][8:] != prompts["a"][8:]


def test_callback_engine_refuses_an_interval_at_once() -> None:
    nobody: Any = None
    checkpoint: Any = type("Opened", (), {"config": config()})
    with pytest.raises(Unsupported, match="tracked prefixes"):
        DerivedEngine(nobody, checkpoint, Capacity((1,), (1,), 4, 8, track_interval=4), num_steps=1, adaptive=None)
