"""The part of long products of tests that `make test` runs: few rows that cover all of them.

`make whole` runs the rest. A row that is a part of another one has the marker `part`, and runs in `make test` alone.
The traces here contain every condition and every pair of successive events that any trace contains: `make test` replays
them, with few channels in the place of larger models, and `make whole` replays all recorded traces.
Leaves out: options of the engine (`option_combinations.py`).
"""

from collections.abc import Callable, Hashable, Iterable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from instep.campaign.covering_array import CoveringArray
from instep.campaign.fuzz.coverage import Coverage
from instep.plugin import TraceItem
from instep.trace.event_rules import EventRules
from instep.trace.file import Trace, read
from support.inputs.few_channels import few_channels, same_events

TRACES = Path(__file__).resolve().parents[3] / "fixtures" / "traces"
BY_REPLAY = ("adaptive", "slots", "slots-overlapped")  # `make replay` runs them through `ledger` and `plain`
WHOLE = pytest.mark.whole  # of a test, or of a row, that `make test` leaves out
PART = pytest.mark.part  # of a row of `make test` that another row, of `make whole`, contains
THROUGH_PLAIN = ("faults/shared",)
# Long drawn traces that only labels run through.
BY_LABELS = (("lifecycle/histories-chains", "plain"), ("lifecycle/histories-trees", "plain"))
# Traces that tests replay -> the number of events that they need to cover all conditions. `test_engines.py`
# replays `handed`. Traces of a larger model are recorded again on one with two layers.
BEGUN = {"handed": 36, "block": 19, "transfer": 62, "unread": 17, "four-heads": 5, "one-head": 5, "next": 12,
         "kimi": 12, "olmo": 12, "lfm2": 12, "minimax": 12, "ling": 12, "ling-clamped": 3, "nemotron": 12,
         "nemotron-mtp": 4, "qwen4": 12}  # fmt: skip
ON_FEW_CHANNELS = {"leaving": 34, "overlapped": 13, "refused": 49, "trees": 30, "drawn": 9, "grown": 11}
SAME_EVENTS = {"tiers": 45, "crossing": 32, "prompts": 34, "inner": 8, "caps": 11}  # with their recorded choices

COVERING = (*BEGUN, *ON_FEW_CHANNELS, *SAME_EVENTS)


def begun(name: str) -> Trace:
    """The events of a trace that are among the few; all events of another one."""
    if name in ON_FEW_CHANNELS or name in SAME_EVENTS:
        counts = {**ON_FEW_CHANNELS, **SAME_EVENTS}
        whole = (same_events if name in SAME_EVENTS else few_channels)(name, 2)
        return replace(whole, events=whole.events[: counts[name]])
    if name in BEGUN:
        whole = read(TRACES / "faults" / f"{name}.jsonl")
        return replace(whole, events=whole.events[: BEGUN[name]])
    return read(TRACES / f"{name}.jsonl")


def each_value(*values: Iterable[Any]) -> list[Any]:
    """A product as parameters of a test: few rows contain every value, and `make whole` runs the other rows."""
    factors = [tuple(each) for each in values]
    few = {tuple(index % len(factor) for factor in factors) for index in range(max(map(len, factors)))}
    rows = product(*(range(len(factor)) for factor in factors))
    return [
        pytest.param(*(factor[at] for factor, at in zip(factors, row, strict=True)), marks=() if row in few else WHOLE)
        for row in rows
    ]


def each_pair(*values: Iterable[Hashable], refused: Callable[..., bool] = lambda *row: False) -> list[tuple[Any, ...]]:
    """Few rows of a product that contain every pair of values, as parameters of a test. refused: rows that cannot be"""
    array = CoveringArray({str(at): tuple(each) for at, each in enumerate(values)},
                          lambda row: "refused" * refused(*row.values()))  # fmt: skip
    rows = list[tuple[Any, ...]]()
    for row in array:
        rows.append(tuple(row[name] for name in array.factors))
        array.met(row)
    assert rows, "the first values are refused together, so there would be no test"
    return rows


def few(rows: int) -> pytest.MarkDecorator:
    """Let `make test` run this number of evenly spaced rows of a test, and `make whole` the others."""
    return pytest.mark.few(rows)


def mark_the_others(items: Iterable[pytest.Item]) -> None:
    """Mark the rows `whole` that are not among the few of their test. All rows of a GPU stay: `on_gpu.sh` runs them."""
    tests: dict[tuple[Path, str], list[pytest.Function]] = {}
    for item in items:
        chosen = isinstance(item, pytest.Function) and item.get_closest_marker("gpu") is None
        if chosen and item.get_closest_marker("few") is not None:
            tests.setdefault((item.path, item.originalname), []).append(item)
    for rows in tests.values():
        (count,) = next(rows[0].iter_markers("few")).args
        kept = {index * len(rows) // count for index in range(count)}
        for index, row in enumerate(rows):
            if index not in kept:
                row.add_marker(WHOLE)


def left_out(item: pytest.Item, *, whole: bool) -> bool:
    """A row of a product, or a recorded trace, that `make test` does not run; whole: that `make whole` does not run."""
    if not isinstance(item, TraceItem) or not item.path.is_relative_to(TRACES):
        return item.get_closest_marker((PART if whole else WHOLE).name) is not None
    name = str(item.path.relative_to(TRACES).with_suffix(""))
    return name in BY_REPLAY or (name, item.name) in BY_LABELS if whole else name not in THROUGH_PLAIN


def every_trace() -> dict[str, Trace]:
    return {str(path.relative_to(TRACES).with_suffix("")): read(path) for path in sorted(TRACES.rglob("*.jsonl"))}


def met(trace: Trace) -> set[Hashable]:
    """Everything that a trace covers: conditions, pairs of kinds of events, and the fields of its header."""
    coverage = Coverage()
    header, rules = trace.header, EventRules(trace.header)
    coverage.begin(overlap=header.recording.overlap, heads=header.heads, block=header.drafter is not None,
                   transfers=header.receiver is not None)  # fmt: skip
    for index, event in enumerate(trace.events):
        at = rules.serving(event)
        before = at.table.as_it_stands()
        at.apply(event, trace.where(index))
        coverage.note(before, event, at.table)
    room = header.room()
    told = {
        "model": Path(header.checkpoint.near).name, "recording": header.recording, "MTP layers": header.heads,
        "adaptive": header.adaptive is not None, "topk": room.topk, "tracked": room.track_interval is not None,
        "controller": None if header.controller is None else (header.controller.dialect, header.lag),
    }
    return {*(one for one, count in coverage.counts().items() if count), *coverage.pairs, *told.items()}
