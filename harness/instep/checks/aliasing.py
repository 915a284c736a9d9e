"""T0: no two owners share memory: configurations, pools, answers.

A draft head that writes into the target's configuration changes the reference, too. So configurations are compared
around every constructor, not between sides. Leaves out: results of ops that share memory, which a contract forbids
(`op_call_contracts.py`), and buffers of graphs (`graph_replays.py`).
"""

from collections.abc import Iterator

from ..verdict import Comparison, Skipped, Tier
from ..watch.event_context import EventContext
from ..watch.pool_addresses import Pools
from .check_interface import NOWHERE, TellsOnce, said_of

LONGEST = 100  # characters of a value that are printed


class Aliasing(TellsOnce):
    """Configurations do not change, no two pools share a byte, and answers share memory with nothing."""

    name = "aliasing"
    tier = Tier.IDENTITY

    def __init__(self) -> None:
        super().__init__()
        self.known: tuple[object, ...] = ()

    def __call__(self, context: EventContext) -> Iterator[Comparison | Skipped]:
        configs = context.log.configs
        changed = [_sentence(c.what, c.while_, field, *pair) for c in configs for field, pair in c.changed.items()]
        if configs:
            yield said_of(self, context, NOWHERE, sum(config.fields for config in configs), changed)
        yield from self._pools(context)
        answered = context.log.answered
        if answered is not None and answered.tensors:
            said = [f"the answer is a view of {region}, which the next event overwrites" for region in answered.pooled]
            yield said_of(self, context, NOWHERE, answered.tensors, said)
        if answered is not None and answered.changed:
            names = ", ".join(answered.changed)
            said = [f"earlier answers changed while this event ran: {names}"]
            yield said_of(self, context, NOWHERE, 1, said)
        if answered is not None and answered.let_go:
            yield from self.once(context, "kept answers take so much memory that the oldest are dropped, so later "
                                 "changes of these are not seen")  # fmt: skip

    def _pools(self, context: EventContext) -> Iterator[Comparison | Skipped]:
        regions = [region for region in context.regions if region.units.numel()]
        if not regions and not self.known:
            yield from self.once(context, "this engine shows no memory, so overlapping pools cannot be found")
        addresses = tuple((region.units.data_ptr(), region.units.shape, region.units.stride()) for region in regions)
        if regions and addresses != self.known:
            self.known = addresses
            units = sum(len(region.units) for region in regions)
            yield said_of(self, context, NOWHERE, units, Pools(regions).overlaps())


def _sentence(what: str, while_: str, field: str, was: str, now: str) -> str:
    named = f"{what}, {field}," if field else what
    return f"{named} changed while {while_}: it was {was[:LONGEST]} and is {now[:LONGEST]}"
