"""Memory of another request or another round: the memory itself, and ops that read it.

Leaves out: states that follow from a wrong step (`wrong_states.py`), windows and caches that moved wrongly
(`wrong_rows.py`).
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from instep_reference import trunk
from instep_reference.attention import AttentionMemory
from instep_reference.contract.engine import RequestState
from instep_reference.short_conv import ConvMemory
from instep_reference.trunk import LayerMemory, WithState

from ...checks.check_interface import listed
from ...checks.poison import poisoned
from ...finding_problem import Explained
from ...oracle.miscounted_states import lacking_oldest
from ...oracle.single_layer_run import LayerWork
from ...tier_allowances import NEAR
from ...watch.rows_by_request import field_of
from .explanation_fit import agrees
from .finding_case import STANDS, Case, Explanation

# Component -> the field of memory that its op reads, which may be that of another request.
READ_FROM = {"mixed": "conv", "core": "state", "update": "state"}
MOST_BEGINS = 8  # rows of a chunk at which memory may begin again


def known_rows(case: Case) -> Iterator[Explanation]:
    """Mistakes that the recomputation knows: other rows that it could have read, other states before it."""
    place = case.finding.place
    for known, work in () if case.piece is None else case.piece.wrongs:
        assert case.piece is not None and case.oracle is not None, "there is a piece"
        for run in (case.oracle.runner.true(work).places.get(place),
                    replace(case, piece=replace(case.piece, work=work)).again()):  # fmt: skip
            if run is not None:
                yield Explanation.of(known, run)


def memory(case: Case) -> Iterator[Explanation]:
    if case.component in STANDS and case.finding.request is not None:
        yield from _standing(case)
    if case.piece is not None:
        work = case.piece.work
        if isinstance(work, LayerWork) and case.component in READ_FROM:
            yield from _begun_again(case)
            if isinstance(work.memory, WithState | ConvMemory):
                yield from _read(case, work, work.memory)
            if isinstance(work.memory, WithState):
                yield from _without_oldest(case, work.memory)
        if isinstance(work, LayerWork) and case.component == "attended" and isinstance(work.memory, AttentionMemory):
            yield from _stale_cache(case, work.memory)


def unwritten(case: Case) -> Explained | None:
    """The explanation of NaN from memory that nothing wrote, which holds poison; None: it does not account for all NaN.

    The op is run again on the subject's own rows, with NaN in each memory that it reads. NaN must be at the found
    places, and all other numbers must be right. If no memory gives that, all that is due to the op is finite. Then NaN
    with the bits of the poison is a copy of it, or was computed from it, as arithmetic keeps these bits. NaN with other
    bits may be from poison, too, or from arithmetic alone.
    """
    lost, poison = ~case.found.cpu().isfinite(), case.context.log.poison
    if case.piece is None or not case.right.isfinite().all() or not _right_elsewhere(case, lost):
        return None
    whole = case.component in STANDS and bool(lost.all())  # as with NaN in any input
    for says, memory in () if whole else _with_nan(case):
        for one in case.made(says, memory=memory):
            if torch.equal(~one.wrong.cpu().isfinite(), lost):
                return Explained("bank", one.sentence)
    if poison is None or not bool(poisoned(case.found.cpu(), poison)[lost].all()):
        return Explained("bank", "leaves NaN, although all that is due to its op is finite") if whole else None
    rows = [] if whole or lost.dim() < 2 else lost.flatten(1).any(1).nonzero().flatten().tolist()
    at = f", in {listed('row', rows)}" if 0 < len(rows) < len(lost) else ""
    return Explained("bank", f"is, or is made from, memory that nothing wrote (poison); all that is due to its op is "
                     f"finite{at}", vague=True)  # fmt: skip


def _right_elsewhere(case: Case, lost: torch.Tensor) -> bool:
    found = torch.where(lost, case.right.to(case.found).cpu(), case.found.cpu())
    return bool(lost.any()) and agrees(replace(case, found=found))


def _with_nan(case: Case) -> Iterator[tuple[str, LayerMemory]]:
    """The memory before the layer, with NaN in what its op reads."""
    work = None if case.piece is None else case.piece.work
    if not isinstance(work, LayerWork):
        return
    kept = work.memory
    if kept is None and case.component in READ_FROM and case.finding.place.stage == "trunk":
        mixer = case.weights.config.mixers[case.finding.place.layer]
        kept = trunk.empty_memory(case.weights.config, mixer, case.right.dtype, case.right.device)
    instead = "" if work.start else ", although the request has no tokens yet"
    if isinstance(kept, WithState | ConvMemory):
        state = "a state, or a token kept for it," if work.start else "a state"
        for field, says in (("window", "a conv window"), ("state", state)):
            if not hasattr(kept, field):
                continue
            lost: dict[str, Any] = {field: torch.full_like(getattr(kept, field), torch.nan)}
            yield f"reads {says} that nothing wrote (poison){instead}", replace(kept, **lost)
    elif isinstance(kept, AttentionMemory):
        keys, values = (torch.full_like(x, torch.nan) for x in (kept.keys, kept.values))
        yield "reads keys or values that nothing wrote (poison)", AttentionMemory(keys, values)


def _standing(case: Case) -> Iterator[Explanation]:
    """Memory of another request, and the request's own memory of another round."""
    for says, state in _remembered(case):
        if (held := _part(case, state)) is not None:
            yield Explanation(f"holds what {says}", held)
    copies = case.context.earlier
    for says, kept in (*((f'under "{name}"', kept) for name, kept in copies.saved.items()),
                       *((f'of request "{name}"', kept) for name, kept in copies.preempted.items())):  # fmt: skip
        if (held := _part(case, kept.state)) is not None:
            yield Explanation(f"holds what was kept {says}", held)
    for name, state in case.context.subject.after.items():
        if name != case.finding.request and (held := _part(case, state)) is not None and _is_theirs(case, name, held):
            yield Explanation(f'holds what belongs to request "{name}"', held)


def _is_theirs(case: Case, other: str, held: torch.Tensor) -> bool:
    """Whether the other request must hold this and this one must not.

    Otherwise both may have the same fault, and the owner is unknown.
    """
    mine, theirs = (None if state is None else _part(case, state) for state in (
        case.context.truth.after.get(name) for name in (case.finding.request or "", other)))  # fmt: skip
    if mine is None or theirs is None or torch.allclose(mine.double(), theirs.double(), rtol=1e-3, atol=1e-6):
        return False
    off, apart = (torch.linalg.vector_norm(x.double() - theirs.double()) for x in (held, mine))
    return bool(off <= NEAR * apart)


def _remembered(case: Case) -> Iterator[tuple[str, RequestState]]:
    name = case.finding.request
    assert name is not None, "asked before"
    if name in case.context.subject.before:
        yield "it held before the event", case.context.subject.before[name]
    for says, state in case.history.of(name, case.context.index):
        yield f"it held {says}", state


def _part(case: Case, state: RequestState) -> torch.Tensor | None:
    """The same part of another state, cut to the length of the found one: for a cache its first positions."""
    held = dict(state.parts()).get(case.finding.place)
    if held is None or held.dim() != case.found.dim():
        return None
    if case.component in ("keys", "values"):
        held = held[: len(case.found)]
    return held if held.shape == case.found.shape else None


def _read(case: Case, work: LayerWork, kept: WithState | ConvMemory) -> Iterator[Explanation]:
    """An op that continues from another window or state."""
    field = READ_FROM[case.component]
    part = "window" if field == "conv" else "state"
    mine: torch.Tensor = getattr(kept, part)
    what = f"the {part}"

    def reading(says: str, other: torch.Tensor) -> Iterator[Explanation]:
        if other.shape == mine.shape and not torch.equal(other.to(mine), mine):
            changed: Any = {part: other}
            yield from case.made(f"reads {what} {says}", memory=replace(kept, **changed))

    layer = work.layer
    for name, state in case.context.subject.before.items():
        theirs = getattr(state, field).get(layer)
        if name != case.finding.request and theirs is not None:
            yield from reading(f'of request "{name}"', theirs)
    for says, state in case.history.of(case.finding.request or "", case.context.index):
        yield from reading(f"as it was {says}", getattr(state, field)[layer])
    if field == "conv":
        yield from reading("as all zero", torch.zeros_like(mine))
        yield from reading("with the newest input first", mine.flip(1))
        for step, says in ((1, "before"), (-1, "after")):
            yield from reading(f"of the channel {says}", mine.roll(step, 0))
            yield from reading(f"one column {'too late' if step > 0 else 'too early'}", mine.roll(step, 1))


def _begun_again(case: Case) -> Iterator[Explanation]:
    """An op that begins with zeros again at a later row than the first, and perhaps at further rows."""
    own = {name: rows for name in ("qkv", "k", "v") if (rows := case.own(name)) is not None}
    wrong, begins = case.right.to("cpu", torch.float64), list[int]()
    while len(begins) < MOST_BEGINS and (row := _first_wrong(case, wrong)) > max(begins, default=0):
        begins.append(row)
        late = {name: torch.where(torch.arange(len(rows)).reshape(-1, *(1,) * (rows.dim() - 1)) < row, 0, rows)
                for name, rows in own.items()}  # fmt: skip
        made = case.again(late, memory=None)
        if made is None:
            return
        wrong = torch.cat((wrong[:row], made[row:]))
    if begins:
        says = f"begins with zeros again at {listed('row', begins)}"
        yield Explanation(says, wrong, len(wrong) ** len(begins))


def _first_wrong(case: Case, other: torch.Tensor) -> int:
    """The first row with a number that is further from the other tensor than the allowance; 0: none is."""
    assert case.granted is not None, "there is a piece"
    away = (case.found.to("cpu", torch.float64) - other).abs().flatten(1).amax(1)
    return int((~(away <= case.granted[1].max() * case.right.abs().amax())).double().argmax())


def _without_oldest(case: Case, kept: WithState) -> Iterator[Explanation]:
    """An op that continues from a state without the oldest tokens of a ring."""
    folding = None if case.piece is None else case.piece.folding
    if folding is None or folding.previous is None or case.component == "mixed":
        return
    for known, state in lacking_oldest(folding.base, folding.previous.recent):
        yield from case.made(f"continues from a state that {known.says}", memory=replace(kept, state=state))


def _stale_cache(case: Case, kept: AttentionMemory) -> Iterator[Explanation]:
    for says, state in case.history.of(case.finding.request or "", case.context.index):
        place = case.finding.place
        keys, values = (getattr(state, field_of(place._replace(component=name), state)).get(place.layer)
                        for name in ("keys", "values"))  # fmt: skip
        if keys is not None and values is not None and 0 < len(keys) < len(kept.keys):
            yield from case.made(f"sees the cache as it was {says}", memory=AttentionMemory(keys, values))
