"""As a program: draw traces as the kit does, and print how many have what goes wrong in engines.

It runs in a separate process, so that every run draws the same. Hypothesis also draws numbers from the source of
imported modules, which depend on the tests that have run before. Leaves out: how many are enough (`test_kit.py`).
"""

import json
from collections import Counter
from typing import Any

from hypothesis import HealthCheck, given, settings

from instep import kit
from instep_reference.contract import engine as e

TRACES = 50


def reached(prefixes: bool) -> Counter[str]:
    """Condition -> how many of the drawn traces meet it."""
    seen = Counter[str]()

    @settings(max_examples=TRACES, deadline=None, database=None, derandomize=True,
              suppress_health_check=[*HealthCheck])  # fmt: skip
    @given(work=kit.traces(prefixes=prefixes))
    def look(work: Any) -> None:
        events, drafts, said = work.trace.events, dict[str, int](), set[str]()
        for event in events:
            if isinstance(event, e.Draft):
                drafts |= {name: len(picks) for name, picks in zip(event.requests, event.picks, strict=True)}
            elif isinstance(event, e.Commit):
                counts = [len(path.nodes) for path in event.accepted]
                less = any(count < drafts[name] for name, count in zip(event.requests, counts, strict=True))
                what = {"commits": True, "of two": len(counts) > 1, "ragged": len({*counts}) > 1, "rejects": less}
                said |= {name for name, holds in what.items() if holds}
            elif isinstance(event, e.Offload | e.Fetch | e.Evict):
                said.add("moves")
        seen.update(said)

    look()
    return seen


if __name__ == "__main__":
    print(json.dumps([reached(prefixes) for prefixes in (False, True)]))
