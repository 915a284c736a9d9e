"""A recording of a tensor-parallel engine: a directory per rank, merged into one recording, and their differences.

    recording/rank-0, recording/rank-1, ..   a recording each (`recording.py`), which names its rank and their number
    states, conv windows   the rank's parts, merged by segment: as `shards` of recording.json says, or the contract
    events                 those of rank 0; every other rank must have the same ones
    logits, final rows     those of rank 0; another rank that has them must have the same bits
Leaves out: judging the merged recording, which is that of one engine (`audit.py`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import torch

from instep_optimized.memory.budget import conv_window, state_block
from instep_reference.contract import shards
from instep_reference.contract.config import ModelConfig
from instep_reference.contract.engine import AnyEvent
from instep_reference.contract.errors import BadInput
from instep_reference.contract.event_facts import kind_of
from instep_reference.contract.shards import Segment, Shard

from ..checks.check_interface import NOWHERE, counted
from ..finding_problem import Explained, Problem, WrongContent
from ..verdict import Comparison, Tier
from ..watch.digests import bits
from ..watch.event_context import EventContext
from .recording import EVENTS, META, SLOT, TENSORS, Ranks, Recorded, Stated, read, stated_of

RANK = "rank-"
MEMORY = ("conv", "state")
SAME = ("run", "engine", "weights", "model", "dtype", "state", "layout", "rounds", "products", "controller",
        "num_steps", "overlap", "shards")  # fields of recording.json that all ranks have in common
LONGEST = 80  # characters of a value that are printed
APART, NEAR = 4.0, 0.1  # a part is another one if its error is this many times smaller than that of its own, and small


def is_of_ranks(path: Path) -> bool:
    """Whether a directory has a recording per rank."""
    return any(path.glob(f"{RANK}*/{META}"))


def read_ranks(path: Path, config: ModelConfig) -> Recorded:
    """Read the recordings of all ranks and merge them. Raises `BadInput` if one is missing, or of another run."""
    first = stated_of(path / f"{RANK}0")
    size = first.ranks or 0
    if size < 1:
        raise BadInput(f"{RANK}0/{META}: ranks", found=first.ranks, expected="the number of ranks")
    there = {folder.name for folder in path.glob(f"{RANK}*")}
    every = list[Recorded]()
    for rank in range(size):
        folder = path / f"{RANK}{rank}"
        if not (folder / META).is_file():
            raise BadInput(str(path), found=f"no {folder.name}/{META}", expected=f"the recordings of {size} ranks")
        stated, field = stated_of(folder), f"{folder.name}/{META}"
        for name, found, due in (("rank", stated.rank, rank), ("ranks", stated.ranks, size), *(
                (name, getattr(stated, name), getattr(first, name)) for name in SAME)):
            if found != due:
                hint = "the directories of two ranks are exchanged" if name == "rank" else "it is of another run"
                raise BadInput(f"{field}: {name}", found=_short(found), expected=f"{_short(due)}, as in rank 0"
                               if name != "rank" else str(due), hint=hint)  # fmt: skip
        try:
            every.append(read(folder))
        except BadInput as error:
            raise BadInput(f"{folder.name}/{error.field}", found=error.found, expected=error.expected) from None
    if more := sorted(there - {f"{RANK}{rank}" for rank in range(size)}):
        raise BadInput(str(path), found=more[0], expected=f"the recordings of {size} ranks alone")
    ranks = Ranks(tuple(every), _shards(first, config, size))
    events, differences = _same_events(ranks)
    notes = (*(f"rank {rank}: {note}" for rank, one in enumerate(every) for note in one.notes),
             *_not_compared(ranks, len(events)))  # fmt: skip
    return replace(every[0], path=path, events=events, tensors=_merging(ranks), notes=notes, ranks=ranks,
                   differences=(*differences, *_same_rows(ranks, len(events))))  # fmt: skip


def _short(value: object) -> str:
    said = str(value)
    return said if len(said) <= LONGEST else said[:LONGEST] + "..."


def _shards(stated: Stated, config: ModelConfig, size: int) -> dict[str, Shard]:
    """The declaration of the recording, or else that of the contract."""
    lengths = {"conv": conv_window(config)[0], "state": state_block(config)[0]}
    known = {name: shards.memory(config)[name] for name in MEMORY}
    for name, segments in stated.shards.items():
        if name not in MEMORY:
            raise BadInput(f"{META}: shards", found=repr(name), expected=" and ".join(MEMORY))
        known[name] = Shard(0, tuple(Segment(heads, width) for heads, width in segments))
        if known[name].length != lengths[name]:
            raise BadInput(f"{META}: shards.{name}", found=f"{known[name].length} entries",
                           expected=f"{lengths[name]}, as the model has")
    for name, shard in known.items():
        if not all(segment.heads > 0 and segment.fits(size) for segment in shard.segments):
            raise BadInput(f"{META}: ranks", found=size, expected=f"a divisor of the heads of `{name}`")
    return known


# Decisions and rows that all ranks have in common


def _same_events(ranks: Ranks) -> tuple[tuple[AnyEvent, ...], list[Comparison]]:
    """The events up to the first one that a rank has differently, and the comparisons of all ranks with rank 0."""
    first, found, end = ranks.every[0].events, list[Comparison](), len(ranks.every[0].events)
    for rank, other in enumerate(ranks.every[1:], 1):
        same = next((index for index, (mine, its) in enumerate(zip(first, other.events, strict=False))
                     if mine != its), min(len(first), len(other.events)))  # fmt: skip
        if same < max(len(first), len(other.events)) and (
                same < min(len(first), len(other.events)) or not (ranks.every[0].notes or other.notes)):
            mine, its = (one[same] if same < len(one) else None for one in (first, other.events))
            of = mine if mine is not None else its
            assert of is not None
            found.append(_of_rank("agreement", Tier.IDENTITY, same, of, rank, _differing(mine, its, rank)))
        elif same:
            found.append(Comparison("agreement", Tier.IDENTITY, same - 1, kind_of(first[same - 1]), NOWHERE,
                                    elements=same, worst=0.0, allowed=0.0))  # fmt: skip
        end = min(end, same)
    if not end:
        raise BadInput(f"{RANK}0/{EVENTS}", found="no event that all ranks have", expected="the same events",
                       hint="the ranks are of different runs")
    return first[:end], found


def _of_rank(check: str, tier: Tier, index: int, event: AnyEvent, rank: int, says: str) -> Comparison:
    return Comparison(check, tier, index, kind_of(event), NOWHERE, elements=1, worst=1.0, allowed=0.0, rank=rank,
                      problem=Problem("differs", says))  # fmt: skip


def _differing(mine: AnyEvent | None, its: AnyEvent | None, rank: int) -> str:
    if mine is None or its is None:
        has, lacks = (rank, 0) if mine is None else (0, rank)
        return f"rank {has} has this event; rank {lacks} ends before it"
    if type(mine) is not type(its):
        return f"rank {rank} has {kind_of(its)} here; rank 0 has {kind_of(mine)}"
    fields = [name for name in mine.__struct_fields__ if getattr(mine, name) != getattr(its, name)]
    right, found = (_short(msgspec.to_builtins(getattr(one, fields[0]))) for one in (mine, its))
    return f"{fields[0]} of rank {rank}: {found}; rank 0 has {right}"


def _same_rows(ranks: Ranks, count: int) -> Iterator[Comparison]:
    """Compare rows and slots that other ranks recorded with those of rank 0, bit by bit."""
    first = ranks.every[0]
    for index in range(count):
        right = first.tensors(index)
        for rank, other in enumerate(ranks.every[1:], 1):
            for name, mine in other.tensors(index).items():
                kind, due = name.partition(".")[0], right.get(name)
                if kind in MEMORY or due is None:
                    continue
                same = mine.shape == due.shape and torch.equal(bits(mine), bits(due))
                check, tier = ("agreement", Tier.IDENTITY) if kind == SLOT else ("replicas", Tier.BITWISE)
                event, request = first.events[index], name.partition(".")[2]
                if not same:
                    yield replace(_of_rank(check, tier, index, event, rank,
                                           f"{kind} of rank {rank} differs from that of rank 0"), request=request)
                else:
                    yield Comparison(check, tier, index, kind_of(event), NOWHERE, elements=mine.numel(), worst=0.0,
                                     allowed=0.0, request=request)  # fmt: skip


def _not_compared(ranks: Ranks, count: int) -> Iterator[str]:
    """Count rows and slots that rank 0 did not record, so that there is nothing to compare them with."""
    for rank, other in enumerate(ranks.every[1:], 1):
        where = [(index, name) for index in range(count)
                 for name in other.tensors(index).keys() - ranks.every[0].tensors(index).keys()
                 if name.partition(".")[0] not in MEMORY]  # fmt: skip
        if where:
            index, name = min(where)
            yield (f"rank {rank}: not compared: {counted(len(where), 'tensor')} that rank 0 did not record, the first "
                   f"{name} at event {index}")  # fmt: skip


# Parts


def _merging(ranks: Ranks) -> Callable[[int], Mapping[str, torch.Tensor]]:
    """The function that returns the merged tensors of an event."""
    last: dict[int, dict[str, torch.Tensor]] = {}

    def merged(event: int) -> Mapping[str, torch.Tensor]:
        if event not in last:
            last.clear()
            every = [one.tensors(event) for one in ranks.every]
            last[event] = {name: _merged(ranks, event, name, every) if name.partition(".")[0] in MEMORY else x
                           for name, x in every[0].items()}
            for rank, other in enumerate(every[1:], 1):
                for name in other:
                    if name.partition(".")[0] in MEMORY and name not in every[0]:
                        raise BadInput(_file(0, event), found=f"no {name}", expected=f"its part, as rank {rank} has")
        return last[event]

    return merged


def _merged(ranks: Ranks, event: int, name: str, every: Sequence[Mapping[str, torch.Tensor]]) -> torch.Tensor:
    shard = ranks.shards[name.partition(".")[0]]
    part, whole = shard.part(ranks.size), None
    for rank, shown in enumerate(every):
        if name not in shown:
            raise BadInput(_file(rank, event), found=f"no {name}", expected="its part, as rank 0 has")
        mine = shown[name]
        if not mine.dim() or len(mine) != part:
            raise BadInput(f"{_file(rank, event)}: {name}", found=f"shape {list(mine.shape)}",
                           expected=f"{part} of {shard.length} entries on axis 0, the part of a rank")
        if whole is None:
            whole = mine.new_empty((shard.length, *mine.shape[1:]))
        if mine.shape[1:] != whole.shape[1:] or mine.dtype != whole.dtype:
            raise BadInput(f"{_file(rank, event)}: {name}", found=f"shape {list(mine.shape)}, {mine.dtype}",
                           expected=f"shape {[part, *whole.shape[1:]]}, {whole.dtype}, as in rank 0")
        whole[_entries(shard, rank, ranks.size)] = mine
    assert whole is not None
    return whole


def _file(rank: int, event: int) -> str:
    return f"{RANK}{rank}/{TENSORS}/{event:06d}.safetensors"


def _entries(shard: Shard, rank: int, size: int) -> torch.Tensor:
    return torch.tensor([entry for span in shard.spans(rank, size) for entry in span])


def named(recorded: Recorded, context: EventContext, finding: Comparison) -> Comparison:
    """Return the finding about a state or conv window with its rank, and with the wrong part that the rank has.

    The parts are compared with the reference's own run.
    """
    ranks, place = recorded.ranks, finding.place
    right = (context.truth if context.rounded is None else context.rounded).after.get(finding.request or "")
    due = None if right is None else dict(right.parts()).get(place)
    found = context.subject.after.get(finding.request or "")
    whole = None if found is None else dict(found.parts()).get(place)
    if ranks is None or due is None or whole is None or place.component not in MEMORY or whole.shape != due.shape:
        return finding
    shard, size = ranks.shards[place.component], ranks.size
    held = [_entries(shard, rank, size) for rank in range(size)]
    block = torch.arange(shard.length).chunk(size)
    for rank, own in enumerate(held):
        mine, error = whole[own], _error(whole[own], due[own])
        others = [(f"the part of rank {other}", due[entries]) for other, entries in enumerate(held) if other != rank]
        if len(shard.segments) > 1 and len(block) == size:
            others.append(("a part that is cut as one block, not per segment", due[block[rank]]))
        for says, part in others:
            if part.shape == mine.shape and _error(mine, part) < min(NEAR, error / APART):
                mistake = Explained.one_of([WrongContent(f"is of rank {rank}, which has {says}")])
                problem = replace(finding.problem or Problem("differs"), mistake=mistake, unexplained=None)
                return replace(finding, rank=rank, problem=problem)
    return finding


def _error(found: torch.Tensor, right: torch.Tensor) -> float:
    """The relative error by norm; infinite if a number is not finite."""
    off = float((found.double() - right.double()).norm() / right.double().norm().clamp_min(1e-300))
    return off if off == off else float("inf")
