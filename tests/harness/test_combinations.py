"""Every supported pair of options agrees in some row, in all tiers; every unsupported one is refused at once.

A row of `few` ends after its second round. Only the rows of `to_the_end` continue to a plain step. The few traces that
`make test` replays meet what all of them meet. Leaves out: the whole product (`tests/perf/combinations.py`).
"""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from documentation.tables import RESULTS
from instep.run.replay import Replay
from instep.setting import Setting
from instep.trace.file import Trace
from instep.verdict import Exit, Tier
from instep.watch.event_context import EventContext
from instep_optimized import load
from instep_optimized.options import check
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.config import ModelConfig
from instep_reference.contract.engine import Commit, Draft, Forward, Load
from instep_reference.contract.errors import InstepError
from support.inputs.checkpoints import config_of, write, write_block
from support.inputs.option_combinations import (
    BY_CHANCE,
    CONSTRAINED,
    FACTORS,
    NODES,
    POLICY,
    REFUSED,
    Row,
    cells,
    mtp_layers,
    name_of,
    pairwise,
    refusals,
    setting,
    trace,
    whole,
    words,
)
from support.running.covering import BY_REPLAY, COVERING, THROUGH_PLAIN, WHOLE, begun, every_trace, few, met

pytestmark = pytest.mark.slow  # whole replays or commands


@pytest.fixture(scope="module")
def trace_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Row], Trace]:
    folder, made = tmp_path_factory.mktemp("combinations"), dict[str, Trace]()
    return lambda row: made.get(name_of(row)) or made.setdefault(name_of(row), trace(folder, row))


@WHOLE
def test_the_rows_contain_every_supported_pair() -> None:
    every = {pair for one, other in combinations(FACTORS, 2) for pair in map(tuple, map(cells, whole((one, other))))}
    possible = {pair for row in whole(CONSTRAINED) if not refusals(row) for pair in cells(row)}
    free = {pair for (pair,) in every if {name for name, _ in pair} - set(CONSTRAINED)}
    assert {pair for row in pairwise() for pair in cells(row)} == possible | free
    assert not any(map(refusals, pairwise())) and len(pairwise()) <= 26


@cache
def to_the_end() -> tuple[Row, ...]:
    """A few rows that together contain every value of every factor: these continue to a plain step."""
    due, rows = {(name, value) for name, values in FACTORS.items() for value in values}, list[Row]()
    while due:
        rows.append(max(pairwise(), key=lambda row: len(due & row.items())))
        due -= rows[-1].items()
    return tuple(rows)


def played(row: Row, entire: Trace) -> Trace:
    """The events of a row's trace that it is replayed with."""
    if row in to_the_end():
        return entire
    second = [index for index, event in enumerate(entire.events) if isinstance(event, Commit)][1]
    return replace(entire, events=entire.events[: second + 1])


def test_every_value_is_in_a_row_that_ends_with_a_plain_step() -> None:
    rows = to_the_end()
    assert {cell for row in rows for cell in row.items()} == {
        (name, value) for name, values in FACTORS.items() for value in values
    }
    assert all(row in pairwise() for row in rows)


USUAL: Row = {
    "state_dtype": None, "state_rounding": None, "dtype": "float32", "snapshot_layout": None, "trees": False,
    "conv": "windows", "tracked": False, "drafter": "eagle", "ring_dtype": None, "strategy": "rerun",
}
APART = ("tracked", "ring_dtype")  # in rows in which no other factor is refused


class Looking:
    """Notes how many graphs were replayed, and the dtypes of pools."""

    name, tier = "looking", Tier.IDENTITY

    def __init__(self) -> None:
        self.replays, self.dtypes = 0, dict[str, str]()

    def __call__(self, context: EventContext) -> tuple[()]:
        self.replays += len(context.log.replays)
        self.dtypes |= {region.name: str(region.units.dtype).removeprefix("torch.") for region in context.regions}
        return ()


@few(3)
@pytest.mark.parametrize("row", pairwise(), ids=words)
def test_every_row_agrees(row: Row, trace_of: Callable[[Row], Trace]) -> None:
    seen, replayed = Looking(), played(row, trace_of(row))
    outcome = Replay(replayed, setting(row)).run(also=[seen])
    assert outcome.verdict.exit is Exit.AGREED, outcome.verdict.findings[:1]
    assert outcome.verdict.events == len(replayed.events)
    assert {one.tier for one in outcome.verdict.compared} == set(Tier)
    assert bool(seen.replays) == row["graphs"]
    width = "float64" if row["dtype"] == "float64" else "float32"
    assert seen.dtypes["state"] == (row["state_dtype"] or width)
    drafts = "block_keys" if row["drafter"] == "block" else "draft_keys"
    assert seen.dtypes.get("ring_k_low") == row["ring_dtype"]
    assert seen.dtypes["keys"] == seen.dtypes[drafts] == (row["kv_dtype"] or row["dtype"])
    shapes = {shape for event in replayed.events if isinstance(event, Draft) for shape in event.parents or ()}
    assert bool(shapes) == row["trees"]
    assert any(isinstance(event, Load) for event in replayed.events) == bool(row["tracked"])
    kinds = [{one.kind for one in event.rows} for event in replayed.events if isinstance(event, Forward)]
    assert {"verify", "prefill"} in kinds and {"verify"} in kinds
    assert ({"decode"} in kinds) == (row in to_the_end())
    setup = outcome.plan.setting
    assert (setup.drafter, setup.overlap, setup.graphs) == (row["drafter"], row["overlap"], row["graphs"])


def test_the_whole_product_is_refused_exactly_where_predicted(tmp_path: Path) -> None:
    ops, steps = load("plain"), POLICY.num_steps
    block = Checkpoint.open(write_block(write(tmp_path)), "block").config.block
    configs = {
        (kind, drafter): replace(
            ModelConfig.from_dict(config_of(kind, mtp_num_hidden_layers=mtp_layers(drafter))),
            block=block if drafter == "block" else None)
        for kind in FACTORS["kind"] for drafter in FACTORS["drafter"]
    }
    groups = [{one, *(name for told, _ in REFUSED if one in told for name in told)} for one in APART]
    rows = [{**pairwise()[0], **USUAL, **row} for names in groups for row in whole(tuple(names))]
    usual = {name: USUAL[name] for name in APART}
    for row in (*({**usual, **row} for row in whole(tuple(name for name in CONSTRAINED if name not in APART))), *rows):
        why, nodes = refusals(row), NODES if row["trees"] else None
        options = cache(lambda row=row: setting(row).options())  # which refuses some rows, whatever the model
        for kind in FACTORS["kind"]:
            said = ""
            try:
                check(options(), configs[kind, row["drafter"]], steps, ops, nodes)
            except InstepError as refused:
                said = str(refused)
            assert bool(said) == bool(why) and (not why or any(one in said for one in why)), (kind, words(row), said)


@pytest.mark.parametrize(("told", "why"), REFUSED, ids=lambda told: words(told) if isinstance(told, dict) else "")
def test_an_unsupported_row_is_refused_before_anything_runs(
    told: dict[str, tuple[Any, ...]], why: str, trace_of: Callable[[Row], Trace]
) -> None:
    row = {**pairwise()[0], **USUAL, **{name: values[-1] for name, values in told.items()}}
    if told.get("state_rounding") == (BY_CHANCE,) and "state_dtype" not in told:
        row["state_dtype"] = "bfloat16"  # that may be rounded so
    assert refusals(row) == [why]
    served = list[int]()
    with pytest.raises(InstepError, match=why):
        Replay(trace_of(row), setting(row)).run(progress=lambda index, event: served.append(index))
    assert not served


def test_the_result_has_every_pair_of_the_whole_product() -> None:
    found = json.loads((RESULTS / "combinations.json").read_text())
    run, of = found["met"]["pairs"]
    assert (found["exit"], found["found"]) == (0, []) and run == of > 500


def test_replayed_traces_cover_all_conditions_of_all_traces() -> None:
    """The drawn traces are left to `test_histories.py`: their pairs of events are random."""
    every = {name: trace for name, trace in every_trace().items() if "histories" not in name}
    found = {name: met(trace) for name, trace in every.items()}
    few = {name: found[name] for name in (*BY_REPLAY, *THROUGH_PLAIN)}
    few |= {name: met(begun(name)) for name in COVERING}
    assert set().union(*few.values()) == set().union(*found.values())
    for name in few.keys() - {*BY_REPLAY}:  # and none is there for nothing
        others = set().union(*(few[other] for other in few if other not in (name, *BY_REPLAY[1:])))
        assert few[name] - others, f"{name} meets nothing that another one of the few does not meet"


LONG = ("block", "crossing", "ling-clamped", "prompts", "transfer", "unread")  # whose numbers take long


@pytest.mark.part  # of the recorded traces: `make whole` replays all events of each with both op sets
@pytest.mark.parametrize("name", [name for name in COVERING if name != "handed"])  # in `test_engines.py`
def test_correct_engine_agrees_on_the_covering_traces(name: str) -> None:
    trace = begun(name)
    verdict = Replay(trace, Setting("ledger" if name in LONG else "plain")).run().verdict
    assert verdict.exit is Exit.AGREED and verdict.events == len(trace.events), verdict.findings[:1]
