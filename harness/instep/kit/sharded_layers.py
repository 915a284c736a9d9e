"""Compare a sharded kernel or layer with the unsharded truth: `over_ranks(layer, truth, given, split) == []`.

The layer runs once per rank, on the rank's parts of the inputs. All ranks are in this process and take turns, so a
collective that a rank does not join is reported at once. Leaves out: the speed and the transport of collectives.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from instep_optimized.ranks import Comm
from instep_optimized.ranks.lockstep import Lockstep
from instep_reference.contract.shards import Segment, Shard

from ..watch.digests import bits
from .argument_checks import must_be, must_be_several, wrong

TIMES, ULPS = 3, 4  # of the error of the truth in the dtype of the inputs; and ulp of the largest number
Layer = Callable[..., torch.Tensor]
Wrong = tuple[str, torch.Tensor]


class Recorded:
    """A rank's `Comm` that keeps what the rank gives to its sums."""

    def __init__(self, comm: Comm) -> None:
        self._comm, self.given = comm, list[torch.Tensor]()

    def all_reduce(self, x: torch.Tensor, *args: Any) -> torch.Tensor:
        self.given.append(x.clone())
        return self._comm.all_reduce(x, *args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)


def over_ranks(
    layer: Layer, truth: Layer, given: Mapping[str, torch.Tensor], split: Mapping[str, Shard], *,
    result: Shard | None = None, ranks: Sequence[int] = (2, 4),
) -> list[str]:
    """List what is wrong with a layer over ranks; nothing if it computes the unsharded truth.

    layer   `layer(comm, **parts)` -> the result of one rank. comm: the rank, the size and the collectives
    truth   `truth(**given)` -> the whole result, in the width of its inputs
    given   the whole inputs, by name;  split: how the ranks share an input. Others are whole on every rank
    result  how the ranks share the result; None: every rank has all of it, with the same bits
    ranks   numbers of ranks to run with

    A number may err by 3 times the error of the truth in the dtype of its inputs, 4 ulp of the largest number, and half
    an ulp of each rank's part of a sum that is stored in 16 bits: it is rounded once more.
    """
    _must_fit(given, split, result, ranks)
    widened = {name: x.double() if x.is_floating_point() else x for name, x in given.items()}
    exact, rounded = truth(**widened), truth(**given)
    for x in (exact, rounded):
        must_be("truth", x, torch.Tensor, "a function that returns a tensor")
        if not x.is_floating_point() or not x.isfinite().all():
            raise wrong("truth", x, "finite numbers, in fp64 and in the dtype of the inputs")
    if not exact.numel():
        raise wrong("truth", tuple(exact.shape), "a result with numbers: nothing can be compared")
    if result is not None:
        _must_have_axis("result", exact, result)
    if result is not None and exact.shape[result.axis] != result.length:
        raise wrong("result", result.length, f"{exact.shape[result.axis]} entries, as the truth has on that axis")
    eps = torch.finfo(rounded.dtype).eps
    allowed = TIMES * float((rounded.double() - exact).abs().max()) + ULPS * eps * float(exact.abs().max())
    found = list[str]()
    for size in ranks:
        found += [f"{size} ranks: {says}" for says in _with(layer, truth, widened, given, split, result, size,
                                                            exact, allowed)]  # fmt: skip
    return found


def _with(
    layer: Layer, truth: Layer, widened: Mapping[str, torch.Tensor], given: Mapping[str, torch.Tensor],
    split: Mapping[str, Shard], result: Shard | None, size: int, exact: torch.Tensor, allowed: float,
) -> Iterator[str]:
    """Yield the differences with this number of ranks."""
    group = Lockstep(size)
    comms = [Recorded(comm) for comm in group.comms]
    calls = [partial(layer, comm, **{name: _part(x, split.get(name), rank, size).clone() for name, x in given.items()})
             for rank, comm in enumerate(comms)]  # fmt: skip
    try:
        results = group.run(calls)
    except Exception as error:
        yield f"{type(error).__name__}: {error}"
        return
    for rank, mine in enumerate(results):
        due = _part(exact, result, rank, size)
        if not isinstance(mine, torch.Tensor) or mine.shape != due.shape:
            has = tuple(mine.shape) if isinstance(mine, torch.Tensor) else type(mine).__name__
            yield f"rank {rank} returns {has}; expected {tuple(due.shape)}"
            return
    stored = sum(0.5 * torch.finfo(x.dtype).eps * float(x.double().abs().max())
                 for comm in comms for x in comm.given if x.is_floating_point() and x.element_size() == 2)  # fmt: skip
    limit = allowed + stored
    added = torch.stack([mine.double() for mine in results]).sum(0) if result is None else None
    unsummed = added is not None and bool(((added - exact).abs() <= limit).all())
    whole = {says: x for says, x in _miscut(truth, widened, split, size) if x.shape == exact.shape}
    for rank, mine in enumerate(results):
        due = _part(exact, result, rank, size)
        off = (mine.double() - due).abs()
        if not bool((off <= limit).all()):
            wrongs = [*_wrongs(rank, due, exact, result, comms), *((f"is computed with {says}", _part(
                x, result, rank, size)) for says, x in whole.items())]
            known = ["is its own part: a sum over ranks is missing"] * unsummed
            known += [says for says, x in wrongs if _is(mine, x, due, limit)]
            at = tuple((~(off <= limit)).nonzero()[0].tolist())
            yield (f"rank {rank} {' or '.join(known) or 'is wrong'}: {int((~(off <= limit)).sum())} of {off.numel()} "
                   f"numbers, the first at {at}; off by {float(off.max()):.2e}, allowed {limit:.2e}")
        elif result is None and not torch.equal(bits(mine), bits(results[0])):
            yield f"rank {rank} has other bits than rank 0 in a result that every rank has"


def _wrongs(
    rank: int, due: torch.Tensor, exact: torch.Tensor, result: Shard | None, comms: Sequence[Recorded]
) -> Iterator[Wrong]:
    """Known wrong results of one rank."""
    size = len(comms)
    for other in range(size) if result is not None else ():
        if other != rank:
            yield f"has the part of rank {other}", _part(exact, result, other, size)
    for times in {2, size}:
        yield f"is {times} times the right result, as after a sum too many", due * times
        yield f"is the right result divided by {times}, as a mean", due / times
    sums = [comm.given[-1].double() for comm in comms if comm.given]
    if len(sums) == size and all(x.shape == due.shape for x in sums):
        for other, part in enumerate(sums):
            yield f"lacks the part of rank {other} in the sum", due - part
            yield f"has the part of rank {other} twice in the sum", due + part


def _miscut(
    truth: Layer, given: Mapping[str, torch.Tensor], split: Mapping[str, Shard], size: int
) -> Iterator[Wrong]:
    """The truth on inputs of which the ranks take other parts than those that they are given."""
    for name, shard in split.items():
        held = [[entry for span in shard.spans(rank, size) for entry in span] for rank in range(size)]
        block = torch.arange(shard.length).chunk(size)
        ways = [("the part of rank 0 on every rank", held[:1] * size),
                ("the part of the next rank", held[1:] + held[:1])]  # fmt: skip
        if len(shard.segments) > 1 and len(block) == size and all(
                len(part) == len(mine) for part, mine in zip(block, held, strict=True)):
            ways.append(("a part that is cut as one block, not per segment", [part.tolist() for part in block]))
        for says, taken in ways:
            x = given[name].clone()
            for mine, other in zip(held, taken, strict=True):
                into, taken_from = (torch.tensor(entries, device=x.device) for entries in (mine, other))
                x.index_copy_(shard.axis, into, given[name].index_select(shard.axis, taken_from))
            yield f"{says} of `{name}`", truth(**{**given, name: x})


def _is(mine: torch.Tensor, wrong: torch.Tensor, due: torch.Tensor, limit: float) -> bool:
    """Whether a result is a wrong one, which differs from the right one by more than errors may."""
    same = bool(((mine.double() - wrong.double()).abs() <= limit).all())
    return same and not bool(((wrong.double() - due).abs() <= limit).all())


def _part(x: torch.Tensor, shard: Shard | None, rank: int, size: int) -> torch.Tensor:
    if shard is None:
        return x
    return torch.cat([x.narrow(shard.axis, span.start, len(span)) for span in shard.spans(rank, size)], shard.axis)


def _must_fit(
    given: Mapping[str, torch.Tensor], split: Mapping[str, Shard], result: Shard | None, ranks: Sequence[int]
) -> None:
    """Refuse inputs that cannot be split like this."""
    must_be_several("ranks", ranks, int, "numbers of ranks")
    if not ranks or min(ranks) < 2:
        raise wrong("ranks", tuple(ranks), "numbers of ranks of at least 2")
    must_be("given", given, Mapping, "tensors by name")
    for name, x in given.items():
        must_be(f"given[{name!r}]", x, torch.Tensor, "a tensor")
    if not split:
        raise wrong("split", {}, "a shard of at least one input: else every rank has everything")
    for name, shard in {**split, **({} if result is None else {"result": result})}.items():
        must_be(f"split[{name!r}]" if name in split else "result", shard, Shard, "a Shard(axis, segments)")
        if name in split and name not in given:
            raise wrong("split", name, f"names of inputs: {', '.join(given)}")
        if name in split:
            _must_have_axis(f"split[{name!r}]", given[name], shard)
        if name in split and given[name].shape[shard.axis] != shard.length:
            due = f"{given[name].shape[shard.axis]} entries on axis {shard.axis}"
            raise wrong(f"split[{name!r}]", shard.length, due)
        for size in ranks:
            unfit = next((segment for segment in shard.segments if not segment.fits(size)), None)
            if unfit is not None:
                raise wrong("ranks", size, f"numbers that divide the {unfit.heads} heads of a segment of {name!r}")


def _must_have_axis(name: str, x: torch.Tensor, shard: Shard) -> None:
    if not -x.dim() <= shard.axis < x.dim():
        raise wrong(name, shard.axis, f"one of {x.dim()} axes")


__all__ = ["Segment", "Shard", "over_ranks"]
