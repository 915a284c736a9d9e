"""T0: while an event runs the host reads nothing from the device, but for what a list allows by kind of event.

Leaves out: how reads are caught (`observe/reads.py`). Inside the ops of a set that does not declare `captures` a
read is expected; between ops, and inside the launchers of an op set that captures, it stalls a round.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from instep_reference.contract.engine import Event
from instep_reference.contract.event_facts import kind_of, tracks

from ..observe.context import EventContext
from ..verdict import Comparison, Skipped, Tier
from .base import NOWHERE, counted, said_of

# Not the subject's: the harness itself, and what a watched engine cuts off for its watcher.
WATCHING = ("instep.", "instep_optimized.ops.padding_aware")
# The one transfer that a round declares: accepted counts on their way to the host.
DECLARED = "instep_optimized.transfer.to_host"
# Kind of event -> module -> how often it may read. What is kept aside is read out, and its places are sent: there the
# host may wait.
ASIDE = {DECLARED: 1, "instep_optimized.commit.": 4, "instep_optimized.memory.saved": 2}
ALLOWED: Mapping[str, Mapping[str, int]] = {
    "draft": {DECLARED: 1}, "forward": {DECLARED: 1}, "commit": {DECLARED: 1}, "set_num_steps": {DECLARED: 1},
    "save": ASIDE, "load": ASIDE, "preempt": ASIDE, "resume": ASIDE,
}  # fmt: skip


def allowed_at(event: Event) -> Counter[str]:
    """Module -> how often it may read. Every prefix that the event tracks is read out, as a state that is saved."""
    allowed = Counter(ALLOWED.get(kind_of(event), {}))
    for _ in tracks(event):
        allowed.update(ASIDE)
    return allowed


class HostReads:
    """Every host read of an event against the list."""

    name = "hostreads"
    tier = Tier.IDENTITY

    def __init__(self) -> None:
        self.said = False

    def __call__(self, context: EventContext) -> Iterator[Comparison | Skipped]:
        log = context.log
        if not (log.trapped and log.ops):
            if not self.said:
                yield Skipped(self.name, context.index, "what somebody else's engine reads on the host is not watched")
            self.said = True
            return
        allowed = allowed_at(context.event)
        reads = Counter(read for read in log.reads if not read.reader.startswith(WATCHING))
        of_module: Counter[str] = Counter()
        said = []
        for read, times in reads.items():
            module = next((prefix for prefix in allowed if read.reader.startswith(prefix)), "")
            of_module[module] += times
            if of_module[module] > allowed.get(module, 0):
                where = f"op {read.op}" if read.op else "between ops"
                limit = f", {allowed[module]} allowed" if module else ""
                said.append(f"the host reads the device {counted(times, 'time')} ({where}; {read.reader}{limit})")
        yield said_of(self, context, NOWHERE, log.calls + 1, said)
