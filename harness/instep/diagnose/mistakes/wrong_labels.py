"""Labels that were computed from something else: another token, window or chain of tokens.

`contract/label_algebra.py` has the rules. Labels are exact, so a found label is either such a label or not. Leaves out:
rows and heads in the wrong place (`wrong_rows.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from zlib import crc32

import torch

from instep_reference.contract.engine import RequestState
from instep_reference.contract.label_algebra import SPREAD
from instep_reference.contract.place_names import Place
from instep_reference.label_mixing import MASK, mix

from ...checks.exact_labels import folded, states_of_window
from ...oracle.miscounted_states import FROM_ZERO
from ...watch.event_context import RowSpan
from ...watch.rows_by_request import row_spans, rows
from .finding_case import Case, Explanation

Family = Callable[[Case, RowSpan], Iterator[Explanation]]
FOLDED = ("k", "v", "log_decay")  # components of a token that enter a chain, and its write gate


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


def code(place: Place) -> int:
    family = "trunk" if place.stage == "trunk" else "draft"
    return crc32(f"{family}.{place.layer}.{place.component}".encode("ascii"))


def heads(tensor: torch.Tensor) -> list[int]:
    """The label of every row."""
    return [int(label) & MASK for label in tensor.flatten(1)[:, 0].tolist()] if len(tensor) else []


def _expanded(made: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    first = torch.tensor([_signed(label) for label in made], dtype=torch.int64)
    row = torch.arange(like[0].numel(), dtype=torch.int64) * _signed(SPREAD)
    return (first[:, None] + row).reshape(like.shape)


def _signed(label: int) -> int:
    return label - (1 << 64) if label >> 63 else label


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

        def behind(chain: int) -> torch.Tensor:
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
            yield Explanation(f"depends on the state {says}", behind(heads(state.state[place.layer][None])[0]))
        forward, now = case.context.earlier.forward, case.context.truth.before.get(span.request)
        nodes = states_of_window(forward, span.request, place.layer)
        held = None if now is None or not nodes else heads(now.state[place.layer][None])[0]
        for count, chain in enumerate(nodes):
            if held in nodes and chain != held:
                yield Explanation(f"depends on the state after {count} tokens of the last window; "
                                  f"{nodes.index(held)} were accepted", behind(chain))  # fmt: skip

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
