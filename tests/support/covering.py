"""Of products that take long, the part that `make test` runs: few rows, in which all stands that stands in the whole.

`make whole` runs the rest. Here: every recorded trace moves labels; through `plain` go the traces in which every
condition is met, and every pair of events that follow each other, that any trace has.
Leaves out: options of the engine (`combinations.py`).
"""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path

from instep.fuzz.coverage import Coverage
from instep.plugin import TraceItem
from instep.trace.event_rules import EventRules
from instep.trace.file import read

TRACES = Path(__file__).resolve().parents[2] / "fixtures" / "traces"
MAIN = "adaptive"  # `make replay` runs it through `plain`
THROUGH_PLAIN = (
    "lifecycle/leaving", "lifecycle/overlapped", "lifecycle/refused", "trees",
    *(f"faults/{name}" for name in (
        "drawn", "grown", "handed", "several", "shared", "tiers")),
)  # fmt: skip


def left_to_the_whole(item: object) -> bool:
    """Whether a trace is to go through `plain` and is none of the few."""
    if not isinstance(item, TraceItem) or item.name != "plain" or not item.path.is_relative_to(TRACES):
        return False
    return str(item.path.relative_to(TRACES).with_suffix("")) not in THROUGH_PLAIN


def every_trace() -> list[str]:
    return sorted(str(path.relative_to(TRACES).with_suffix("")) for path in TRACES.rglob("*.jsonl"))


def met(name: str) -> set[Hashable]:
    """All that a trace meets: conditions, kinds of events by pairs, and what its header says of the run."""
    trace, coverage = read(TRACES / f"{name}.jsonl"), Coverage()
    header, rules = trace.header, EventRules(trace.header)
    coverage.begin(overlap=header.recording.overlap, heads=header.heads)
    for index, event in enumerate(trace.events):
        before = rules.table.as_it_stands()
        rules.apply(event, trace.where(index))
        coverage.note(before, event, rules.table)
    room = header.room()
    told = {
        "model": Path(header.checkpoint.near).name, "recording": header.recording, "MTP layers": header.heads,
        "adaptive": header.adaptive is not None, "topk": room.topk, "tracked": room.track_interval is not None,
    }
    return {*(one for one, count in coverage.counts().items() if count), *coverage.pairs, *told.items()}
