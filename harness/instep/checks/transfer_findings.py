"""Known wrong contents of memory that moved to another engine.

Leaves out: the comparisons, which are those of memory that comes back (`unchanged_bytes.py`), and mistakes that copies
on the host may have, too (`prefix_findings.py`).
"""

from collections.abc import Iterator, Sequence

import torch

from instep_reference.contract.event_facts import restores
from instep_reference.contract.place_names import Place

from ..finding_problem import NamedMistake, WrongContent
from ..watch.event_context import EventContext, KeptCopy
from .check_interface import counted
from .prefix_findings import others_kept

OF_RANKS = NamedMistake("parts-of-another-rank", "has the parts of the ranks {} further")
OF_FIRST = NamedMistake("part-of-the-first-rank", "has the part of rank 0 for every rank")
ONE_BLOCK = NamedMistake("channels-as-one-block", "has its channels cut over {} ranks as one block, not per segment")
PAIRED = NamedMistake("paired-with-another-part", "holds the {} of the copy")
CAST = NamedMistake("cast-on-the-way", "was cast to {} on the way")
BEFORE = NamedMistake("copy-of-before", 'holds what was kept as "{}" before')
SHIFTED = NamedMistake("rows-shifted", "has its rows {} {}")
TURNED = NamedMistake("turned-on-the-way", "has the numbers of {} in the order of the turned matrix")
KNOWN = (OF_RANKS, OF_FIRST, ONE_BLOCK, PAIRED, CAST, BEFORE, SHIFTED, TURNED)
MOST_ROWS = 64
FULL = {"keys": "each row", "values": "each row", "state": "each head", "conv": "the window"}


def wrong_transfers(
    context: EventContext, name: str, kept: KeptCopy, place: Place, right: torch.Tensor
) -> Iterator[tuple[WrongContent, torch.Tensor]]:
    """List wrong contents of a part of the copy `name`. right: the part as this engine stores it."""
    yield from others_kept(context, name, place, right, kept.state.length, but=restores(context.event))
    for before in context.earlier.dropped.get(name, ()):
        if (held := dict(before.state.parts()).get(place)) is not None:
            yield BEFORE.known(name), held.to(right)[: len(right)]
    for other, part in kept.state.parts():
        if other != place and part.shape == right.shape and part.dtype == right.dtype:
            yield PAIRED.known(f"{other.component} ({other})"), part
    facts = context.ranks or kept.ranks
    shard = None if facts is None else facts.memory.get(place.component)
    if facts is not None and shard is not None:
        spans = [[entry for span in shard.spans(rank, facts.size) for entry in span] for rank in range(facts.size)]
        for far in range(1, facts.size):
            yield OF_RANKS.known(far), _placed(right, shard.axis, spans, spans[far:] + spans[:far])
        yield OF_FIRST.known(), _placed(right, shard.axis, spans, spans[:1] * facts.size)
        block = [part.tolist() for part in torch.arange(shard.length).chunk(facts.size)]
        if block != spans:
            yield ONE_BLOCK.known(facts.size), _placed(right, shard.axis, spans, block)
    paged = place.component in ("keys", "values")
    for far in range(1, min(len(right), MOST_ROWS)) if paged else ():
        for way, by, empty in (("further", far, slice(far)), ("earlier", -far, slice(-far, None))):
            moved = right.roll(by, 0)
            yield SHIFTED.known(counted(far, "position"), way), moved
            yield SHIFTED.known(counted(far, "position"), way), moved.index_fill(0, torch.arange(len(right))[empty], 0)
    if place.component in FULL and right.dim() > 1:
        yield TURNED.known(FULL[place.component]), right.mT.reshape(right.shape)
    sent = dict(kept.sent.parts()).get(place) if kept.sent is not None else None
    if sent is not None and sent.is_floating_point():
        for dtype in (torch.bfloat16, torch.float16):
            yield CAST.known(str(dtype).removeprefix("torch.")), sent.to(dtype).to(right)


def is_copy_of_before(context: EventContext, request: str) -> bool:
    """Whether a request came back with all that an earlier copy of the same name held."""
    found = context.subject.after.get(request)
    if restores(context.event) != request or found is None:
        return False
    mine = dict(found.parts())
    for before in context.earlier.dropped.get(getattr(context.event, "name", ""), ()):
        theirs = dict(before.state.parts())
        if before.state.length == found.length and mine.keys() == theirs.keys() and all(
            x.shape == theirs[place].shape and torch.equal(x.cpu(), theirs[place].cpu()) for place, x in mine.items()
        ):
            return True
    return False


def _placed(
    right: torch.Tensor, axis: int, held: Sequence[Sequence[int]], taken: Sequence[Sequence[int]]
) -> torch.Tensor:
    """The merged part if each rank has taken these entries of the axis and not those that it holds."""
    wrong = right.clone()
    for mine, other in zip(held, taken, strict=True):
        wrong.index_copy_(axis, torch.tensor(mine), right.index_select(axis, torch.tensor(other)))
    return wrong
