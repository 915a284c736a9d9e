"""Mixed steps under every check: rows of all kinds in any order, and prompts split anywhere, within the declared tiers.

Leaves out: speed, labels, and what must be the same bits (`tests/optimized/test_mixed_steps.py`).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from instep.diagnose import diagnose
from instep.diagnose.confirm_cause import locate
from instep.run.replay import Outcome, Replay
from instep.setting import Setting
from instep.trace.event_rules import EventRules
from instep.trace.file import Trace
from instep.trace.header import Model, Part, Room
from instep.verdict import Tier
from instep_optimized import engine, forwards, round_for_step_count
from instep_optimized.commit import STRATEGIES
from instep_optimized.graphs import Runner
from instep_optimized.memory_addresses import StateLayout
from instep_optimized.packed_batch import Group
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.engine import Capacity, Event, Forward
from instep_reference.contract.sampling import Sampling
from support.inputs.checkpoints import TWO_LAYERS, write
from support.inputs.mixed_steps import (
    CANDIDATES,
    LONG_ROOM,
    ROOM,
    WHERE,
    beside_windows,
    crowd,
    in_turns,
    prompts_in_chunks,
    split_everywhere,
    trio,
)
from support.inputs.traces import header
from support.running.covering import WHOLE, few
from support.running.verdicts import agreed, related

pytestmark = pytest.mark.slow

ON_GPU = torch.cuda.is_available()
NUMBERS = {Tier.BITWISE, Tier.DERIVED, Tier.DIRECTED, Tier.PROPAGATED, Tier.DECISIONS}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stored in bf16, as real ones are: a wider file would be rounded by a bf16 engine, and nothing declares that."""
    return write(tmp_path_factory.mktemp("model"), dtype=torch.bfloat16, **TWO_LAYERS)


def trace(
    model: Path, events: Iterable[Event], room: Capacity = ROOM, steps: tuple[int, ...] = CANDIDATES, **more: Any
) -> Trace:
    """The events as a hand-made trace with these step counts, 3 in force at first; more: of its room."""
    made = header(
        name="mixed", claim="Rows of every kind stand in one step.", candidates=steps,
        checkpoint=Model.of(Checkpoint.open(model), model, "."),
        capacity=Room(room.slots, room.pages, room.page_size, room.max_tokens, **more),
        adaptive={"candidate_steps": list(steps)} if len(steps) > 1 else None, replay=(Part("ledger"),), created={},
    )
    return Trace(model / "mixed.jsonl", made, tuple(events), {}, "")


def agrees(outcome: Outcome) -> None:
    """Every event was served and compared, and nothing disagrees."""
    verdict = agreed(outcome)
    assert verdict.events == outcome.of == len({compared.event for compared in verdict.compared})
    if outcome.plan.setting.ops != "ledger":
        assert {compared.tier for compared in verdict.compared} >= NUMBERS


# ---- all kinds of rows in one step


@WHOLE
@pytest.mark.parametrize(("num_steps", "order", "dtype", "layout"), [
    (3, (3, 0, 5, 1, 4, 2), "bfloat16", "KV"),
    pytest.param(7, (4, 1, 3, 5, 0, 2), "float32", "VK", marks=WHOLE),
])  # fmt: skip
def test_numbers_agree_in_any_order(
    model: Path, num_steps: int, order: Sequence[int], dtype: str, layout: StateLayout
) -> None:
    setting = Setting("plain", dtype=dtype, layout=layout)
    agrees(Replay(trace(model, crowd(num_steps, order)), setting, checkpoint=model).run())


@pytest.mark.skipif(ON_GPU, reason="native kernels serve the whole crowd (below)")
def test_interpreted_kernels_agree_on_mixed_rows(model: Path) -> None:
    agrees(Replay(trace(model, trio(1, (1, 0, 2))), Setting("triton", layout="KV"), checkpoint=model).run())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("num_steps", CANDIDATES)
def test_native_kernels_agree_on_the_crowd(model: Path, num_steps: int, dtype: str) -> None:
    for order in ((0, 1, 2, 3, 4, 5), (3, 0, 5, 1, 4, 2)):
        setting = Setting("triton", device="cuda", dtype=dtype)
        agrees(Replay(trace(model, crowd(num_steps, order)), setting, checkpoint=model).run())


@few(2)
@pytest.mark.parametrize(("num_steps", "where"), list(zip(CANDIDATES, WHERE, strict=True)))
def test_a_chunk_as_wide_as_a_window_agrees_as_the_prefill_that_it_is(model: Path, num_steps: int, where: str) -> None:
    told = trace(model, beside_windows(num_steps, where, small=False))
    given = Setting("plain", drafter="external")  # the draft head's rows of mixed steps are compared above and below
    outcome = Replay(told, given, checkpoint=model).run()
    agrees(outcome)
    mixed = max(number for number, event in enumerate(told.events) if isinstance(event, Forward))
    tiers = {c.tier for c in outcome.verdict.compared if c.request == "chunk" and c.event == mixed}
    assert tiers >= {Tier.IDENTITY, Tier.DERIVED, Tier.DIRECTED}


# ---- where a prompt is split


@WHOLE
@pytest.mark.parametrize(("dtype", "layout"), [
    ("float32", "KV"), pytest.param("bfloat16", "VK", marks=WHOLE),  # which a crowd is served in, above
])  # fmt: skip
def test_a_prompt_split_at_any_edge_stays_within_its_tier(model: Path, dtype: str, layout: StateLayout) -> None:
    told = trace(model, split_everywhere(rounds=False), LONG_ROOM)
    outcome = Replay(told, Setting("plain", dtype=dtype, layout=layout), checkpoint=model).run()
    agrees(outcome)
    states = [c for c in outcome.verdict.compared if c.tier is Tier.DIRECTED]
    assert {c.request for c in states} >= {"split at 1", "split at 63", "split at 64", "split at 65", "split at 67"}
    head = {c.place.component for c in outcome.verdict.compared if c.place.stage == "extend"}
    assert {"key", "value", "final"} <= head, "the draft head's rows are compared too"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_native_kernels_agree_on_a_prompt_split_at_any_edge(model: Path, dtype: str) -> None:
    told = trace(model, split_everywhere(), LONG_ROOM)
    agrees(Replay(told, Setting("triton", device="cuda", dtype=dtype), checkpoint=model).run())


# ---- the sequences


def test_every_sequence_is_legal(model: Path) -> None:
    """Both test files use only sequences that the event rules allow."""
    stories = [(prompts_in_chunks(small=False), ROOM), (split_everywhere(), LONG_ROOM), (trio(3, (2, 0, 1)), ROOM),
               *((beside_windows(n, where, False), ROOM) for n in CANDIDATES for where in WHERE)]
    for events, room in stories:
        told = trace(model, events, room)
        rules = EventRules(told.header)
        for event in told.events:
            rules.apply(event)
        assert rules.table.live


# ---- windows next to decodes in graphs: one replay serves both, and every check knows the kind of each row


def replay(
    model: Path, num_steps: int = 3, order: str = "abcd", sampling: Sampling | None = None, tree: tuple[int, ...] = (),
    candidates: tuple[int, ...] = CANDIDATES, tracked: bool = False, **setting: Any,
) -> Replay:
    """In graphs, under every check. A window has room for a node more than a tree has.

    tracked: prefixes might be kept, so the last rows of every request are
    """
    more = {"num_draft_tokens": 2 + len(tree)} if tree else {"track_interval": 4, "tracked": 1} if tracked else {}
    told = trace(model, in_turns(num_steps, order, sampling, tree), steps=(3,) if tree else candidates, **more)
    return Replay(told, Setting(**{"ops": "plain", "graphs": True} | setting), checkpoint=model)


def replayed(model: Path, **more: Any) -> Outcome:
    return diagnose(replay(model, **more))


@few(1)
@pytest.mark.parametrize("more", [
    {"strategy": "columns", "conv": "widened"}, {"strategy": "lazy_rerun", "sampling": Sampling(0.8, top_k=9)},
    {"ops": "ledger", "num_steps": 7}, {"drafter": "external", "overlap": True, "strategy": "snapshot"},
    {"tree": (0, 0), "sampling": Sampling(0.8, top_k=9)},
    *(pytest.param(more, marks=WHOLE) for more in (  # interpreted kernels serve such a forward in `test_mixed_steps.py`
        {"ops": "triton", "num_steps": 1, "order": "dcba"}, {"strategy": "snapshot", "order": "dbca"},
        {"dtype": "bfloat16"}, {"tree": (0, 0, 1, 2)},
    )),
], ids=str)  # fmt: skip
def test_every_check_agrees(model: Path, more: dict[str, Any]) -> None:
    """That one graph was replayed, for all requests and each as its own kind, is among them."""
    outcome = replayed(model, **more)
    agreed(outcome, events=outcome.of)


@WHOLE
def test_every_check_agrees_with_several_mtp_layers(tmp_path: Path) -> None:
    """Decodes keep their last rows, too, for a prefix that might be kept."""
    three = write(tmp_path, dtype=torch.bfloat16, mtp_num_hidden_layers=3, **TWO_LAYERS)
    agreed(replayed(three, drafter="vanilla", candidates=(1, 3), tracked=True))


@WHOLE
def test_answers_are_the_same_without_observers(model: Path) -> None:
    """Without observers: an observed replay captures other graphs."""
    agreed(related("unseen", replay(model, order="dbca")))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_replays_on_a_card_agree(model: Path, strategy: str, dtype: str) -> None:
    """There graphs share memory."""
    outcome = replayed(model, order="dbca", ops="triton", device="cuda", strategy=strategy, dtype=dtype, overlap=True)
    agreed(outcome, events=outcome.of)


@WHOLE
def test_op_wrong_in_mixed_launches_is_not_blamed_on_the_graph(model: Path) -> None:
    """Without graphs the launch is the same."""
    wrong = replay(model, ops="support.wrong.ops:LOUDER_BESIDE")
    found = locate(wrong, wrong.run())
    assert (found.cause, found.op) == ("op", "gdn"), found.says


Change = Callable[[Any], Any]


def described(change: Change) -> Change:
    """The host describes windows next to decodes differently."""
    return lambda right: lambda *given: change(one) if (one := right(*given)).kinds.numel() else one


def grouped(change: Callable[[Group, Group], tuple[Group, ...]]) -> Change:
    return lambda right: lambda *given: replace(batch := right(*given), groups=change(*batch.groups))


def twice(run: Any) -> Any:
    def run_twice(self: Any, key: Any, *given: Any) -> Any:
        if key == ("verify and decode", 3):
            *rest, _, join, most = given
            run(self, key, *rest, lambda place, rows: rows, join, most)
        return run(self, key, *given)

    return run_twice


BESIDE, DRAWN = (round_for_step_count, "windows_beside_decodes"), {"sampling": Sampling(0.8, top_k=9)}
OTHER_ROW = described(lambda inputs: inputs._replace(rows=(inputs.kinds[:, 0] >= 0).cumsum(0) - 1))
# What is replaced, by what; the options of the run; a part of the first message, or nothing where it agrees.
CHANGED: dict[str, tuple[tuple[Any, str], Change, dict[str, Any], str]] = {
    "a forward outside of graphs": ((engine, "BOTH"), lambda right: None, {},
                                    "0 graphs were replayed; the event is one replay of ('verify and decode', 3)"),
    "an extra replay": ((Runner, "run"), twice, {"drafter": "external"}, "2 graphs were replayed"),
    "swapped kinds of rows": (
        (engine, "inputs_of"), described(lambda inputs: inputs._replace(kinds=inputs.kinds.flip(1))), {},
        "op conv (trunk.0.mixed): most is 1, the largest count is 4"),
    "a decode as a window, too": ((engine, "inputs_of"), described(lambda inputs: inputs._replace(
        kinds=torch.stack((inputs.slots, inputs.kinds[:, 1]), 1))), {"strategy": "snapshot"},
        'for a verify of request "b"; the trace has -1'),
    # The columns of a window are unwritten until its request gets its first drafts.
    "tokens after a root": ((engine, "inputs_of"), described(lambda inputs: inputs._replace(
        used=torch.arange(inputs.used.numel()).view_as(inputs.used))), {},
        "op embed (trunk.embedding): tokens run from"),
    "uniforms of windows in decodes": (
        (engine, "inputs_of"), described(lambda inputs: inputs._replace(uniforms=inputs.uniforms.roll(1, 0))), DRAWN,
        "with the uniforms of request"),
    # Windows are counted separately, and a request keeps the row that it had in the batch.
    **{f"a window in another row, {strategy}": (
        (engine, "inputs_of"), OTHER_ROW, {"strategy": strategy, "order": "dcba"},
        "bytes changed in snapshot_conv row 0, which this event may not write")
       for strategy in ("snapshot", "columns")},
    "groups without decodes": (BESIDE, grouped(lambda windows, decodes: (windows,)), {},
                               "no call serves the 1 row of request"),
    "groups in the other order": (BESIDE, grouped(lambda windows, decodes: (decodes, windows)), {}, ""),
    "groups of a row each": (BESIDE, grouped(
        lambda windows, decodes: (windows, replace(decodes, begin=decodes.rows))), {}, "is all zero"),
    "windows in the decodes' draft extend": (
        (round_for_step_count, "replace"),
        lambda right: lambda who, **given: who if "slots" in given else right(who, **given), {},
        "changed in proposals slot 4, which this event may not write"),
    "rows cut as windows": (
        (forwards.Forwards, "_spots"),
        lambda right: lambda self, plan, device: torch.arange(sum(p.span.count for p in plan)), {}, "own choices are"),
}
LATER = ("an extra replay", "a decode as", "uniforms", "groups")  # other messages come first


@few(3)
@pytest.mark.parametrize("name", CHANGED)
def test_windows_next_to_decodes_in_another_way_are_reported(
    model: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (owner, attribute), change, options, says = CHANGED[name]
    monkeypatch.setattr(owner, attribute, change(getattr(owner, attribute)))
    ran = replayed(model, **options)
    if not says:
        agreed(ran)
    else:
        said = [one.diagnosis for one in ran.verdict.findings]
        assert any(says in one for one in said[: None if name.startswith(LATER) else 1]), said
