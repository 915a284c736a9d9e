"""Results at the wrong row, head, channel or position: a gather, a write or a move to the wrong place.

For an op that makes one row from one row, a result at the wrong row and an input from the wrong row look the same. Head
maps, where value head h reads key head h % H instead of h // r, are here, too. Bits show other moves: conv windows with
another column or channel order, shifted positions of a cache, and entries at another place of the right pool.
Leaves out: ops with several inputs (`wrong_inputs.py`), and other contents of memory (`wrong_memory.py`).
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import starmap

import torch

from instep_reference.contract.engine import Region
from instep_reference.contract.place_names import AFTER_LAYERS, Place

from ...checks.check_interface import counted
from ...checks.error_measurement import HEAD_AXIS
from ...checks.unchanged_bytes import PROPOSED
from ...oracle.single_layer_run import LayerWork
from ...tier_allowances import NEAR
from ...watch.memory_changes import bits
from ...watch.rows_by_request import field_of, row_spans, rows
from .explanation_fit import PER_HEAD, off
from .finding_case import STANDS, Case, Explanation

SHOWN = 4  # pairs of rows that are printed
MOST = 256  # rows that are compared with each other at most, if each has as many numbers


def result_rows(case: Case) -> Iterator[Explanation]:
    """Rows, heads and columns of a place, and heads of a state."""
    if case.component not in STANDS and case.right.dim() > 1:
        others = [*case.rights(), *_of_forward_before(case)]
        if case.granted is None:
            others += _elsewhere(case)
        yield from permuted(case, 0, "row", others)
    axis = HEAD_AXIS.get(case.component, 1 if case.component in PER_HEAD else None)
    if axis is not None and case.right.dim() > axis:
        yield from permuted(case, axis, "head", [])
    if case.component not in STANDS and case.right.dim() > 1 and axis != case.right.dim() - 1:
        yield from permuted(case, case.right.dim() - 1, "column", [])


def _of_forward_before(case: Case) -> Iterator[tuple[str, torch.Tensor]]:
    """Rows of the same place in the last forward, which memory of a launch, a graph or a transfer may still have."""
    forward = case.context.earlier.forward
    if forward is None:
        return
    side = forward.truth if case.granted is None else forward.subject
    for name, span in forward.spans.items():
        theirs = rows(side, case.finding.place, span)
        if theirs is not None and len(theirs):
            yield f'of request "{name}" in the forward before', theirs


def _elsewhere(case: Case) -> Iterator[tuple[str, torch.Tensor]]:
    """Labels of the same place at another stage, such as an earlier step of a chain."""
    at = case.finding.place
    for place, made in case.context.truth.places.items():
        span = next((s for s in row_spans(case.context, place.stage) if s.request == case.finding.request), None)
        if (place.layer, place.component) == (at.layer, at.component) and place.stage != at.stage and span is not None:
            begin, count = span.at(place)
            family, _, step = place.stage.partition(".")
            says = f"draft step {int(step) + 1}" if family == "chain" else f"stage {place.stage}"
            yield f"of {says}", made[begin : begin + count]


def read_rows(case: Case) -> Iterator[Explanation]:
    """Logits of the wrong final rows: every row of the event through the head."""
    if case.component != "logits" or case.piece is None:
        return
    stage, head = case.finding.place.stage, case.weights.head
    final = Place(stage, AFTER_LAYERS, "final")
    kept = [
        (f'{row} of request "{name}"', each.to(head) @ head.T)
        for name, theirs in case.everybody(final) for row, each in enumerate(theirs)
    ]
    for number in range(len(case.right)):
        for whose, scores in kept if len(kept) <= MOST else ():
            wrong = case.right.clone()
            wrong[number] = scores
            yield Explanation(f"is read from the final row {whose}", wrong)


def permuted(case: Case, axis: int, what: str, others: Sequence[tuple[str, torch.Tensor]]) -> Iterator[Explanation]:
    """Find each wrong row among all right rows; it must be exactly one of them."""
    found, right = (x.to("cpu").movedim(axis, 0) for x in (case.found, case.right))
    kept = [(row, "", right[row]) for row in range(len(right))]
    for whose, theirs in others:
        if theirs.shape[1:] == case.right.shape[1:]:
            kept += [(row, f" {whose}", each.to(right)) for row, each in enumerate(theirs.movedim(axis, 0))]
    sources = torch.stack([each for _, _, each in kept]).flatten(1)
    sources, ours = (x if case.granted is None else x.double() for x in (sources, found.flatten(1).to(right)))
    if len(ours) * sources.numel() > MOST**3:
        return
    away = distance if case.granted is not None else _differing
    apart = away(ours, sources)
    at = torch.arange(len(right))
    own = apart[at, at] if case.granted is None else off(case, case.right).movedim(axis, 0).flatten(1).norm(dim=1)
    nearest = apart.argmin(1)
    moved = (nearest != at) & (apart[at, nearest] < own / 4)
    if not moved.any():
        return
    pairs = [(row, *kept[int(nearest[row])][:2]) for row in moved.nonzero().flatten().tolist()]
    ruled = len(pairs) > 2 and len({((row - other) % len(right), whose) for row, other, whose in pairs}) == 1
    if not ruled and ((away(sources[nearest[moved]], sources) == 0).sum(1) > 1).any():
        return  # it equals several rows
    wrong = right.clone()
    wrong[moved] = sources[nearest[moved]].reshape(wrong[moved].shape).to(wrong)
    tries = len(sources) ** (1 if ruled else len(pairs))
    yield Explanation(_sentence(what, pairs, len(right)), wrong.movedim(0, axis), tries)


def distance(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return torch.cdist(one, other, compute_mode="donot_use_mm_for_euclid_dist")


def _differing(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return (other[None] != one[:, None]).sum(-1).double()


def _sentence(what: str, pairs: Sequence[tuple[int, int, str]], count: int) -> str:
    """Pairs of rows as one rule, or the first few of them."""
    steps = {(row - other) % count for row, other, _ in pairs}
    mine = not any(whose for _, _, whose in pairs)
    for step, word in ((1, "before"), (count - 1, "after")) if mine and count > 2 and len(pairs) >= count - 1 else ():
        if steps == {step}:
            return f"each {what} is that of the {what} {word} it"
    if mine and len(pairs) == count > 2 and len(steps) == 1:
        return f"{what} n is that of {what} (n - {min(steps)}) mod {count}"
    if len(pairs) > 1 and len({(other, whose) for _, other, whose in pairs}) == 1:
        _, other, whose = pairs[0]
        return f"{what}s {', '.join(str(row) for row, _, _ in pairs[:SHOWN])} are all that of {what} {other}{whose}"
    if len(pairs) > 1 and steps == {0} and len({whose for _, _, whose in pairs}) == 1:
        return f"each {what} is that{pairs[0][2]}"
    told = [f"{what} {row} is that of {what} {other}{whose}" for row, other, whose in pairs[:SHOWN]]
    more = f", and {len(pairs) - SHOWN} more" if len(pairs) > SHOWN else ""
    return ", ".join(told) + more


def mixing(case: Case) -> Iterator[Explanation]:
    """Permute the value heads so that h reads group h % H, and permute the result back."""
    work, config = case.piece and case.piece.work, None if case.oracle is None else case.weights.config
    if not isinstance(work, LayerWork) or config is None:
        return
    if case.component == "attended" and (query := case.own("query")) is not None:
        groups = config.kv_heads
        places = _places(config.heads, groups)
        wrong = case.again({"query": query[:, places]})
        if wrong is not None and 1 < groups < config.heads:
            yield Explanation(f"query head h reads KV head h % {groups}, not h // {config.heads // groups}",
                              _back(wrong, places, 1))  # fmt: skip


def _places(heads: int, groups: int) -> torch.Tensor:
    """The permutation: place p, of group p // r, takes a head h with h % groups = p // r."""
    return torch.tensor([i * groups + g for g in range(groups) for i in range(heads // groups)])


def _back(tensor: torch.Tensor, places: torch.Tensor, axis: int) -> torch.Tensor:
    back = torch.empty_like(tensor)
    back.index_copy_(axis, places.to(tensor.device), tensor)
    return back


COUNTED_IN = (32, 16)  # bits of an index that wraps around
MOST_MISSING = 64  # missing rows that are searched at most


def elsewhere(case: Case) -> Iterator[Explanation]:
    """Search each missing KV entry in the whole pool."""
    place, request = case.finding.place, case.finding.request or ""
    if case.granted is not None or place.component not in ("keys", "values") or not len(case.right):
        return
    region = next((region for region in case.context.regions if region.by == "page" and _is_of(region, case)), None)
    pages = case.context.expected.pages_after.get(request, ())
    if region is None or region.units.shape[2:] != case.right.shape[1:] or region.units.dtype != case.right.dtype:
        return
    size, right, found = region.units.shape[1], bits(case.right.cpu()), bits(case.found.cpu())
    missing = (right != found).flatten(1).any(1).nonzero().flatten().tolist()
    if len(missing) > MOST_MISSING or len(pages) * size < len(right):
        return
    twins = {page * size + of: at * size + of for name, owned in case.context.expected.pages_after.items()
             if name != request for at, page in enumerate(owned) for of in range(size)}  # fmt: skip
    pool, moved = bits(region.units.flatten(0, 1).cpu()).flatten(1), list[tuple[int, int]]()
    for position in missing:
        stands = (pool == right[position].flatten()).all(1).nonzero().flatten().tolist()
        stands = [at for at in stands if twins.get(at) != position]  # not an equal entry that belongs there
        if len(stands) != 1:
            return  # it is nowhere, or in several places
        moved.append((pages[position // size] * size + position % size, stands[0]))
    if moved and all(due == stands for due, stands in moved):
        yield Explanation("is right in the pool, and wrong in what the engine shows of it", case.found)
    elif moved and all(due != stands for due, stands in moved):
        own = {page * size + of: at * size + of for at, page in enumerate(pages) for of in range(size)}
        yield Explanation(_moves(moved, size, region, own), case.found)


def _is_of(region: Region, case: Case) -> bool:
    place, means = case.finding.place, region.means
    return means is not None and (means.component, region.layer, means.draft) == (
        place.component, place.layer, place.stage != "trunk")  # fmt: skip


def _moves(moved: list[tuple[int, int]], size: int, region: Region, own: Mapping[int, int]) -> str:
    """The right and the found places, as one rule if there is one.

    own: place in the pool -> position of the request, because its pages may be in any order
    """
    (due, found), apart = moved[0], {due - found for due, found in moved}
    by_position = {own[due] - own[found] if found in own else None for due, found in moved}
    where = (f"page {found // size}, position {found % size} of {region.name}, "
             f"not to page {due // size}, position {due % size}")  # fmt: skip
    if len(by_position) == 1 and (steps := by_position.pop()) is not None:
        return f"was written {counted(abs(steps), 'position')} too {'early' if steps > 0 else 'late'}, to {where}"
    if len(apart) > 1:
        return f"was written to {where}"
    off, whole = apart.pop(), len(region.units) * size
    wraps = [f", as if indices had {width} bits{says}" for width in COUNTED_IN
             for says, by in (("", off), (" and negative ones counted from the end of the pool", off + whole))
             if by % (1 << width) == 0]  # fmt: skip
    too = f"{counted(abs(off), 'position')} too {'early' if off > 0 else 'late'}"
    return f"was written {too}, to {where}{wraps[0] if wraps else ''}"


def known_windows(case: Case) -> Iterator[Explanation]:
    yield from starmap(Explanation.of, () if case.finding.sides is None else case.finding.sides.wrongs())


def windows(case: Case) -> Iterator[Explanation]:
    if case.finding.sides is None:
        return
    if case.component == "conv":
        yield Explanation("has the newest input first", case.right.flip(1))
        yield from permuted(case, 1, "column", [])
        yield from permuted(case, 0, "channel", [])
    elif case.component in ("keys", "values"):
        layer = case.finding.place.layer
        field = next((field_of(case.finding.place, state) for state in case.context.subject.after.values()), "")
        truth = case.context.truth.after
        theirs = [
            (f'of request "{name}"', cache) for name, state in case.context.subject.after.items()
            if name != case.finding.request and (cache := getattr(state, field).get(layer)) is not None and len(cache)
            and name in truth and _is_right(cache, getattr(truth[name], field).get(layer))
        ]  # fmt: skip
        yield from permuted(case, 0, "position", theirs)
        yield from permuted(case, 1, "head", [])
        other = "values" if case.component == "keys" else "keys"
        sides = case.context.truth, case.context.subject
        states = [side.after.get(case.finding.request or "") for side in sides]
        right, held = (None if state is None else getattr(state, field.replace(case.component, other)).get(layer)
                       for state in states)  # fmt: skip
        if held is not None and held.shape == case.found.shape and _is_right(case.found, right):
            yield Explanation(f"holds the {other}", held)
    elif case.finding.place == PROPOSED and case.found.dim() == 1:
        yield from _proposed(case)


def _is_right(cache: torch.Tensor, right: torch.Tensor | None) -> bool:
    """Whether entries are right for their owner; if they are wrong for both requests, their owner is unknown."""
    if right is None or right.shape != cache.shape:
        return False
    off, size = (torch.linalg.vector_norm(x.double()) for x in (cache.cpu() - right.cpu(), right))
    return bool(off <= NEAR * size)


def written_rows(case: Case) -> Iterator[Explanation]:
    """New entries of a cache that are other rows of the layer than its keys or values."""
    place, request = case.finding.place, case.finding.request
    if case.granted is not None or case.component not in ("keys", "values") or case.finding.sides is None:
        return
    due = case.component.removesuffix("s")
    span = next((span for span in row_spans(case.context, place.stage) if span.request == request), None)
    if span is None or span.start + span.count > len(case.right):
        return
    for other in case.context.subject.places:
        theirs = rows(case.context.subject, other, span)
        if other[:2] != place[:2] or other.component == due or theirs is None or theirs.dim() != case.right.dim():
            continue
        width = case.right.shape[-1]
        if theirs.shape[-1] >= width and theirs[..., :width].shape[1:] == case.right.shape[1:]:
            wrong = case.right.clone()
            wrong[span.start : span.start + span.count] = theirs[..., :width].to(wrong)
            yield Explanation(f"holds `{other.component}` in the place of `{due}`", wrong)


def _proposed(case: Case) -> Iterator[Explanation]:
    """The draft head's row after draft 1: another row of the event, or the previous content."""
    before = case.context.subject.before.get(case.finding.request or "")
    if before is not None and before.proposal_hidden is not None:
        yield Explanation("is the head's row of the round before", before.proposal_hidden)
    for name, theirs in case.everybody(PROPOSED):
        for row, each in enumerate(theirs):
            yield Explanation(f'is the head\'s row {row} of request "{name}", of {len(theirs)}', each)
