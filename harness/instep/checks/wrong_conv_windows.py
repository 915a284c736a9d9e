"""Wrong conv windows that known mistakes leave, and the recognition of one from rounded rows.

Leaves out: windows of rows that the subject shows, which `unchanged_bytes.py` compares bit by bit with the same wrong
windows.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch

from instep_reference.contract.engine import Commit, RequestState
from instep_reference.contract.place_names import Place

from ..finding_problem import NamedMistake, WrongContent
from ..oracle.miscounted_states import FROM_ZERO
from ..tier_allowances import NEAR
from ..watch.event_context import EventContext, LastForward, branching
from ..watch.facts_for_later_events import last_forward
from ..watch.rows_by_request import row_spans, rows
from .check_interface import counted, held
from .wrong_state_bank import ZERO, beside

# Component of memory that is the last inputs of an op -> its rows that are these inputs; "": the tokens, each plus one.
INPUTS = {"conv": "qkv", "ple_conv": "ple_normed", "ngram": ""}
NEWEST_FIRST = NamedMistake("newest-input-first", "has the newest input first")
SHIFTED = NamedMistake("window-shifted", "is shifted by one to {} inputs")
OF_ANOTHER = NamedMistake("window-of-another-request", 'holds the window of request "{}" {}')


def named_windows(
    context: EventContext, layer: int, request: str, found: torch.Tensor, truth: torch.Tensor
) -> list[WrongContent]:
    """The known mistakes that leave the nearest wrong window, made of the truth's own rows.

    They leave equal bits. The list is empty if no wrong window is near.

    Shapes:  found, truth [C, W-1]
    """
    forward = last_forward(context)
    if forward is None or request not in forward.spans:
        return []
    place, stage = Place("trunk", layer, "qkv"), "extend" if isinstance(context.event, Commit) else "trunk"
    span = next((span for span in row_spans(context, stage) if span.request == request), None)
    fed, before = rows(forward.truth, place, forward.spans[request]), forward.truth.before[request].conv[layer]
    if span is None or fed is None:
        return []
    nodes, verb = (list(span.nodes), "accepted") if span.nodes else (list(range(span.count)), "given")
    others = [
        (name, forward.truth.before[name].conv[layer], theirs) for name, its in forward.spans.items()
        if name != request and (theirs := rows(forward.truth, place, its)) is not None
    ]
    right, x = shifted(before, fed[nodes]), found.to(truth)
    tree = branching(forward.parents.get(request, ())) if span.nodes else None
    wrongs = [*wrong_windows(before, fed, nodes, verb, others, tree), (NEWEST_FIRST.known(), right.flip(1)),
              *((SHIFTED.known(side), right.roll(step, 1)) for step, side in ((1, "newer"), (-1, "older")))]
    wrongs = [(known, wrong) for known, wrong in wrongs if not torch.equal(wrong, right)]
    distances = [float((x - wrong).norm() / (wrong - truth).norm()) for _, wrong in wrongs]
    if not min(distances, default=1.0) <= NEAR:  # also if they are not finite
        return []
    nearest = wrongs[distances.index(min(distances))][1]
    return [known for known, wrong in wrongs if torch.equal(wrong, nearest)]


def wrong_windows(
    before: torch.Tensor, fed: torch.Tensor, nodes: Sequence[int], verb: str,
    others: Iterable[tuple[str, torch.Tensor, torch.Tensor]], parents: Sequence[int] | None = None,
) -> Iterator[tuple[WrongContent, torch.Tensor]]:
    """Known mistakes, and the conv window [C, W-1] that each leaves.

    nodes: the right rows of fed [n, C]. parents: the parents of all rows, if they are a tree.
    """
    line = fed if parents is None else fed[list(nodes)]
    for count in range(len(line) + 1):
        yield held("window", count, len(nodes), verb), shifted(before, line[:count])
    for known, rows_taken in () if parents is None else beside("window", parents, nodes):
        yield known, shifted(before, fed[list(rows_taken)])
    begun = shifted(torch.zeros_like(before), fed[list(nodes)])
    yield FROM_ZERO.known(), begun
    yield ZERO.known(), torch.zeros_like(before)
    for name, window, theirs in others:
        for count in range(len(theirs) + 1):
            after = f"after {counted(count)}" if count else "from before the step"
            yield OF_ANOTHER.known(name, after), shifted(window, theirs[:count])


def remembered(state: RequestState) -> Iterator[tuple[Place, torch.Tensor]]:
    """The memory of a request that is the last inputs of an op [C, inputs], oldest first; tokens are one channel."""
    for component in INPUTS:
        for layer, window in getattr(state, component).items():
            yield Place("trunk", layer, component), in_channels(window)


def in_channels(window: torch.Tensor) -> torch.Tensor:
    return window if window.dim() > 1 else window[None]


def inputs_of(forward: LastForward, place: Place, request: str) -> torch.Tensor | None:
    """The inputs of the op that keeps this memory, in the subject's rows of a forward: [rows, C]."""
    if not INPUTS[place.component]:
        return torch.tensor(forward.tokens[request])[:, None] + 1
    return rows(forward.subject, place._replace(component=INPUTS[place.component]), forward.spans[request])


def shifted(window: torch.Tensor, fed: torch.Tensor) -> torch.Tensor:
    """The last W-1 inputs of a conv: window [C, W-1], oldest first, after rows fed [n, C] -> [C, W-1]."""
    width = window.shape[1]
    return torch.cat((window, fed.to(window.dtype).T), 1)[:, fed.shape[0] : fed.shape[0] + width]
