"""The few traces that `make test` replays through `plain` meet what all of them meet.

Leaves out: replaying them (the plugin does, in `make test` and `make whole`).
"""

from __future__ import annotations

from support.covering import MAIN, THROUGH_PLAIN, every_trace, met


def test_the_traces_that_go_through_plain_meet_what_any_trace_meets() -> None:
    found = {name: met(name) for name in every_trace()}
    few = (MAIN, *THROUGH_PLAIN)
    assert {*few} < found.keys()
    assert set().union(*(found[name] for name in few)) == set().union(*found.values())
    for name in THROUGH_PLAIN:  # and none is there for nothing
        others = set().union(*(found[other] for other in few if other != name))
        assert found[name] - others, f"{name} meets nothing that another one of the few does not meet"
