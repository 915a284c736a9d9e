"""T0: during an event the host reads nothing from the device, except the reads in a list by kind of event.

A read is expected inside the ops of a set that does not declare `captures`. Between ops, and inside the launchers of an
op set that declares it, a read stalls the round. Leaves out: how reads are caught (`watch/host_reads.py`).
"""

from collections import Counter
from collections.abc import Iterator, Mapping

from instep_reference.contract.engine import Event
from instep_reference.contract.event_facts import FACTS, kind_of, tracks

from ..verdict import Comparison, Skipped, Tier
from ..watch.event_context import EventContext
from .check_interface import NOWHERE, TellsOnce, counted, said_of

# Modules that read for the harness, not for the subject.
WATCHING = ("instep.", "instep_optimized.ops.unpadded_view", "instep_optimized.ranks.processes")
# The only transfer that a round declares: accepted counts to the host.
DECLARED = "instep_optimized.transfer.to_host"
# Kind of event -> module -> how often it may read. The host may wait when a copy is made or restored.
ASIDE = {DECLARED: 1, "instep_optimized.commit.": 4, "instep_optimized.memory.saved_states": 2}
ALLOWED: Mapping[str, Mapping[str, int]] = {
    "draft": {DECLARED: 1}, "forward": {DECLARED: 1}, "commit": {DECLARED: 1}, "set_num_steps": {DECLARED: 1},
    **{kind_of(event): ASIDE for event, said in FACTS.items() if said.copy in ("keep", "restore")},
}


def allowed_at(event: Event) -> Counter[str]:
    """Module -> how often it may read. A prefix that the event tracks is copied like a state that is saved."""
    allowed = Counter(ALLOWED.get(kind_of(event), {}))
    for _ in tracks(event):
        allowed.update(ASIDE)
    return allowed


class HostReads(TellsOnce):
    """Compare the host reads of an event with the list."""

    name = "hostreads"
    tier = Tier.IDENTITY

    def __call__(self, context: EventContext) -> Iterator[Comparison | Skipped]:
        log = context.log
        if not (log.trapped and log.ops):
            yield from self.once(context, "host reads of this engine are not watched")
            return
        allowed = allowed_at(context.event)
        if context.stages is not None and context.stages.parts:  # each stage reads one relay per micro-batch
            allowed[DECLARED] += len(context.stages.parts)
        reads = Counter(read for read in log.reads if not read.reader.startswith(WATCHING))
        of_module: Counter[str] = Counter()
        said = []
        for read, times in reads.items():
            module = next((prefix for prefix in allowed if read.reader.startswith(prefix)), "")
            of_module[module] += times
            if of_module[module] > allowed[module]:
                where = f"op {read.op}" if read.op else "between ops"
                limit = f", {allowed[module]} allowed" if module else ""
                said.append(f"the host reads the device {counted(times, 'time')} ({where}; {read.reader}{limit})")
        yield said_of(self, context, NOWHERE, log.calls + 1, said)
