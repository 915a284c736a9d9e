"""A trail: the same for the same run, another one as soon as a single byte of a pool differs.

Leaves out: what it serves for, whether a planted fault fired (`test_faults.py`).
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from instep.run.replay import Replay
from instep.setting import Setting
from instep.trace.file import Trace
from instep.verdict import Comparison, Exit, Tier
from instep.watch.event_context import EventContext
from instep.watch.event_digests import EventDigests
from instep.watch.memory_changes import bits
from support.running.command import Runner

pytestmark = pytest.mark.slow  # whole replays


class Spoiler:
    """Flips one bit of a pool after the last event, before the trail is written."""

    name, tier = "spoiler", Tier.BITWISE

    def __init__(self, last: int) -> None:
        self.last = last

    def __call__(self, context: EventContext) -> Iterator[Comparison]:
        if context.index == self.last:
            units = bits(context.regions[0].units)
            units[(0,) * units.dim()] ^= 1
        yield from ()


def test_digests_repeat_and_differ_for_one_bit(trace: Trace) -> None:
    first, again, spoiled = EventDigests(), EventDigests(), EventDigests()
    replay = Replay(trace, Setting("ledger"), checks=lambda plan: ())  # whether anything is right is not asked
    for also in ([first], [again], [Spoiler(len(trace.events) - 1), spoiled]):
        replay.run(also=also)
    assert first.lines == again.lines and len(first.lines) == len(trace.events)
    assert first.lines[:-1] == spoiled.lines[:-1] and first.lines[-1] != spoiled.lines[-1]


def test_replay_writes_it(trace: Trace, instep: Runner, tmp_path: Path) -> None:
    out = tmp_path / "a.trail"
    assert instep("replay", trace.path, "--ops", "ledger", "--until", 2, "--trail", out).code == Exit.AGREED
    written = out.read_text().splitlines()
    assert [line.split()[:3] for line in written[:2]] == [["ledger", "0", "admit"], ["ledger", "1", "admit"]]
    assert len(written) == 3 and len({line.split()[3] for line in written}) == 3
