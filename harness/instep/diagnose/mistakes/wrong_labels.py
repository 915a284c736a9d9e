"""Labels that were computed from something else: another token, window or chain of tokens.

`contract/label_algebra.py` has the rules. Labels are exact, so a found label is either such a label or not. A mixture
can be undone, so the rows that a wrong result was made from are looked up. Leaves out: rows and heads in the wrong
place (`wrong_rows.py`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from typing import NamedTuple
from zlib import crc32

import torch

from instep_reference.contract.engine import RequestState
from instep_reference.contract.label_algebra import MIX_A, MIX_B, MIX_C, MIX_D, SPREAD
from instep_reference.contract.place_names import AFTER_LAYERS, STAGE_LEVEL, Place
from instep_reference.label_mixing import MASK, mix

from ...checks.check_interface import counted, verb
from ...checks.exact_labels import folded, states_of_window
from ...checks.wrong_state_bank import BANK
from ...oracle.miscounted_states import FROM_ZERO
from ...watch.event_context import RowSpan
from ...watch.memory_changes import pattern
from ...watch.rows_by_request import row_spans, rows
from .finding_case import STANDS, Case, Explanation

Family = Callable[[Case, RowSpan], Iterator[Explanation]]
NAMES = {mistake.name: mistake for mistake in BANK}
FOLDED = ("k", "v", "log_decay")  # components of a token that enter a chain, and its write gate
SHOWN, MOST = 2, 64  # wrong rows that are printed, and those that are searched at most
UNDO_A, UNDO_D = (pow(factor, -1, MASK + 1) for factor in (MIX_A, MIX_D))


def labels(case: Case) -> Iterator[Explanation]:
    family = FAMILIES.get(case.component)
    spans = row_spans(case.context, case.finding.place.stage)
    span = next((span for span in spans if span.request == case.finding.request), None)
    if case.granted is None and case.finding.check == "labels" and family is not None and span is not None:
        yield from family(case, span)


def embedded(case: Case, vocab: int) -> dict[int, int]:
    """Label of an embedding -> its token."""
    own = code(case.finding.place)
    return {mix(token, own): token for token in range(vocab)}


def vocab_of(case: Case) -> int:
    """The vocabulary of a run of labels, from logits of any event, or else from the largest known token."""
    logits = [made.shape[-1] for place, made in case.context.truth.places.items() if place.component == "logits"]
    return max(logits, default=1 << 16)


def code(place: Place) -> int:
    family = "trunk" if place.stage == "trunk" else "draft"
    return crc32(f"{family}.{place.layer}.{place.component}".encode("ascii"))


def heads(tensor: torch.Tensor) -> list[int]:
    """The label of every row."""
    return [int(label) & MASK for label in tensor.flatten(1)[:, 0].tolist()] if len(tensor) else []


def _expanded(made: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    first = torch.tensor([_signed(label) for label in made], dtype=torch.int64)
    row = torch.arange(like.numel() // len(like), dtype=torch.int64) * _signed(SPREAD)
    return (first[:, None] + row).reshape(like.shape)


def _signed(label: int) -> int:
    return label - (1 << 64) if label >> 63 else label


def _chain(state: RequestState, layer: int) -> int:
    """The label of a recurrent state."""
    (chain,) = heads(state.state[layer][None])
    return chain


def _mixed(case: Case, span: RowSpan) -> Iterator[Explanation]:
    """A conv's rows after another window."""
    layer, own = case.finding.place.layer, code(case.finding.place)
    fed = rows(case.context.truth, case.finding.place._replace(component="qkv"), span)
    now = case.context.truth.before[span.request].conv.get(layer)
    if fed is None or now is None:
        return
    width = now.shape[1] + 1

    def behind(window: Sequence[int]) -> torch.Tensor:
        taps = (*window, *heads(fed))
        return _expanded([reduce(mix, taps[t : t + width], own) for t in range(len(fed))], case.right)

    if span.start:
        yield Explanation(FROM_ZERO.sentence, behind([0] * (width - 1)))
    for says, state in _states(case, span):
        yield Explanation(f"reads the window {says}", behind(heads(state.conv[layer].T)))


def _of_chain(make: Callable[[int, Sequence[int], int], int], what: str) -> Family:
    """Rows that depend on all earlier tokens, after another chain."""

    def family(case: Case, span: RowSpan) -> Iterator[Explanation]:
        place, own = case.finding.place, code(case.finding.place)
        recalls = place._replace(component="beta") in case.context.truth.places
        gate = "beta" if recalls else "write"
        parts = [rows(case.context.truth, place._replace(component=name), span) for name in (*FOLDED, gate, "q")]
        shown = [heads(part) for part in parts if part is not None]
        if len(shown) < len(parts):
            return

        def behind(chain: int, recalls: bool = recalls) -> torch.Tensor:
            made = []
            for token in zip(*shown, strict=True):
                k, v, log_decay, write, _ = token
                after = folded(place.layer, chain, k, v, log_decay, write, recalls)
                made.append(make(after if what == "read-out" else chain * recalls, token, own))
                chain = after
            return _expanded(made, case.right)

        if span.start:
            yield Explanation(FROM_ZERO.sentence, behind(0))
        for says, state in _states(case, span):
            yield Explanation(f"depends on the state {says}", behind(_chain(state, place.layer)))
        forward, now = case.context.earlier.forward, case.context.truth.before.get(span.request)
        began = 0 if now is None or not span.start else _chain(now, place.layer)
        rule = NAMES["nothing-recalled" if recalls else "recalled"]
        yield Explanation(rule.sentence, behind(began, not recalls), name=rule.name)
        nodes = states_of_window(forward, span.request, place.layer)
        held = None if now is None or not nodes else _chain(now, place.layer)
        for count, chain in enumerate(nodes):
            if held in nodes and chain != held:
                taken = nodes.index(held)
                yield Explanation(f"depends on the state after {counted(count)} of the last window; {taken} "
                                  f"{verb(taken, 'was', 'were')} accepted", behind(chain))  # fmt: skip

    return family


def _states(case: Case, span: RowSpan) -> Iterator[tuple[str, RequestState]]:
    for says, state in case.history.of(span.request, case.context.index):
        yield f"as it was {says}", state
    for name, state in case.context.truth.before.items():
        if name != span.request and state.length:
            yield f'of request "{name}"', state


def _core(chain: int, token: Sequence[int], own: int) -> int:
    return mix(mix(chain, token[4]), own)


def _update(chain: int, token: Sequence[int], own: int) -> int:
    return reduce(mix, (chain, *token[:4], own))


FAMILIES: dict[str, Family] = {
    "mixed": _mixed, "core": _of_chain(_core, "read-out"), "update": _of_chain(_update, "update"),
}  # fmt: skip


class Source(NamedTuple):
    """A row that has a certain label. when: " in the forward before" if it is not of this event."""

    place: Place
    request: str
    row: int
    when: str = ""

    def told(self, own: Place, mine: str) -> str:
        """own, mine: the place and the request of the finding, whose names need no mention"""
        same = (self.place.stage, self.place.layer) == (own.stage, own.layer)
        at = {STAGE_LEVEL: "", AFTER_LAYERS: ""}.get(self.place.layer, f" of layer {self.place.layer}")
        stage = "" if self.place.stage == own.stage else f" of stage {self.place.stage}"
        whose = "" if self.request == mine else f' of request "{self.request}"'
        return f"`{self.place.component}`{'' if same else at + stage}, row {self.row}{whose}{self.when}"


Known = Mapping[int, list[Source | str]]


def made_from(case: Case) -> Iterator[Explanation]:
    """Rows that were made from other rows, or by another layer: each mixture is undone, and its parts are looked up."""
    place, mine = case.finding.place, case.finding.request or ""
    if case.granted is not None or case.finding.check != "labels" or case.component in STANDS or case.right.dim() < 2:
        return
    wrong = (case.found.cpu() != case.right).flatten(1).any(1).nonzero().flatten().tolist()
    ours, due = heads(case.found.cpu()), heads(case.right)
    intact = _expanded(ours, case.right)
    if not wrong or len(wrong) > MOST or not torch.equal(intact[wrong], case.found.cpu()[wrong]):
        return
    known, told = _known(case), list[str]()
    for row in wrong:
        if not (says := _told(ours[row], due[row], place, mine, known)):
            return
        told.append(f"row {row} {says}")
    if len(told) > 1 and len({one.partition(" is made")[2] for one in told}) == 1:
        told = [f"rows {', '.join(map(str, wrong[:SHOWN]))}{'' if len(wrong) <= SHOWN else ', ..'} are made"
                + told[0].partition(" is made")[2]]  # fmt: skip
    more = f", and {counted(len(told) - SHOWN, 'more row')}" if len(told) > SHOWN else ""
    yield Explanation("; ".join(told[:SHOWN]) + more, case.found)


def _told(found: int, due: int, place: Place, mine: str, known: Known) -> str:
    """A sentence about the source of one wrong row; "" if it is unknown."""
    rights = list(_parts(undone(due, code(place)), known))
    for own in _layers(place, known):
        for parts in _parts(undone(found, code(own)), known):
            for right in rights:
                off = [n for n, pair in enumerate(zip(parts, right, strict=False)) if pair[0] != pair[1]]
                if len(parts) != len(right) or (len(off) > 1 if own == place else off):
                    continue
                if own != place:
                    return f"is made with the weights of layer {own.layer}, not of layer {place.layer}"
                (at,) = off
                both = parts[at], right[at]
                one, other = (_source(label, both, known, mine) for label in both)
                if one is not None and other is not None and one != other:
                    says = [each if isinstance(each, str) else each.told(place, mine) for each in (one, other)]
                    return f"is made from {says[0]}, not from {says[1]}"
    return ""


def _layers(place: Place, known: Known) -> Iterator[Place]:
    """The place, and then the same one in other layers."""
    yield place
    if place.layer not in (STAGE_LEVEL, AFTER_LAYERS):
        found = {each.place.layer for sources in known.values() for each in sources if isinstance(each, Source)
                 and (each.place.stage, each.place.component) == (place.stage, place.component)}  # fmt: skip
        yield from (place._replace(layer=layer) for layer in sorted(found - {place.layer}))


def _parts(mixture: int, known: Known) -> Iterator[tuple[int, ...]]:
    """The known labels, one or two, that were mixed."""
    if mixture in known:
        yield (mixture,)
    for other in known:
        if (one := undone(mixture, other)) in known:
            yield one, other


def _source(label: int, both: tuple[int, int], known: Known, mine: str) -> Source | str | None:
    """The row that a label is of: of the same place as the right row if possible; None if several may be meant.

    both: the found label and the right one
    """
    sources = known[label]
    if not label and any(known[each][0] == f"position {each}" for each in both):
        return "position 0"
    places = {each.place for each in known[both[1]] if isinstance(each, Source)}
    alike: Sequence[Source | str] = [each for each in sources if isinstance(each, Source) and each.place in places]
    alike = [each for each in alike if isinstance(each, Source) and not each.when] or alike or sources
    own = [each for each in alike if isinstance(each, str) or each.request == mine] or alike
    return own[0] if len(own) == 1 else None


def _known(case: Case) -> Known:
    """Label -> the rows that have it, of this event and of the last forward; tokens or positions, zeros and poison.

    Rows of the subject count if no right row has their label.
    """
    found: dict[int, list[Source | str]] = {0: ["zeros"]}
    context, last, poison = case.context, case.context.earlier.forward, case.context.log.poison
    sides = [(context.truth, False), (context.subject, False)]
    if last is not None and last.truth is not context.truth:
        sides = [sides[0], (last.truth, True), sides[1], (last.subject, True)]
    widths, longest = set[int](), 1
    for side, before in sides:
        taken = set(found)
        for place, tensor in side.places.items():
            theirs = last.spans.values() if before and last is not None else row_spans(context, place.stage)
            labelled = tensor.dtype == torch.int64 and tensor.dim() > 1 and (place.stage == "trunk" or not before)
            for span in theirs if labelled else ():
                begin, count = span.at(place)
                longest = max(longest, span.start + 2 * span.count)
                widths.add(tensor[:1].numel())
                for row, label in enumerate(heads(tensor[begin : begin + count].cpu())):
                    if label not in taken:
                        when = " in the forward before" if before else ""
                        found.setdefault(label, []).append(Source(place, span.request, row, when))
    of_tokens = case.component == "embedding"
    for number in range(not of_tokens, vocab_of(case) if of_tokens else longest):
        found[number] = [f"{'token' if of_tokens else 'position'} {number}"]
    if poison is not None:
        element = int(pattern(poison, torch.int64))
        for label in (element & MASK,) if of_tokens else (_read(element, width) for width in widths):
            found.setdefault(label, ["poison (memory that was never written)"])
    return found


def _read(element: int, width: int) -> int:
    """The label that an op reads from a row whose elements are all this one."""
    return (element + sum(-at * SPREAD * (2 * at + 1) for at in range(width))) & MASK


def undone(mixture: int, second: int) -> int:
    """The first label of a mixture."""
    x = mixture ^ (mixture >> 32)
    x = x * UNDO_D & MASK
    x ^= (x >> 29) ^ (x >> 58)
    return (x - second * MIX_B - MIX_C) * UNDO_A & MASK
