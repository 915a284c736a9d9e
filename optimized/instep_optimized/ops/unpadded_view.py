"""A watcher's view of a padded launch: only the rows that a request covers, packed in batch order.

It reads the device, so only watched runs use it. Leaves out: the watcher itself.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from instep_reference.contract.place_names import Place, See, unseen

from .op_protocols import Ops
from .watch_op_calls import Op, around

Covers = Callable[[Place, int], torch.Tensor | None]  # at a place, whether each of N rows counts; None: all do


def watched(ops: Ops, see: See) -> Ops:
    """Return `ops` with every named result passed through `see`, without padding rows. With `unseen`: `ops` itself."""
    if see is unseen:
        return ops
    covered = _Covered(see)
    return around(ops, covered.see, covered.note)


def noting(see: See, seen: list[tuple[Place, torch.Tensor]]) -> See:
    """Make a hook that keeps what a replay shows until the covered rows are known. With `unseen`: no hook."""

    def note(place: Place, tensor: torch.Tensor) -> torch.Tensor:
        seen.append((place, tensor))
        return tensor

    return unseen if see is unseen else note


def show(see: See, seen: Sequence[tuple[Place, torch.Tensor]], covers: Covers) -> None:
    """Pass on what a replay showed."""
    for place, tensor in seen:
        covered = covers(place, len(tensor))
        if covered is None or len(tensor) != len(covered):
            see(place, tensor)
        elif bool(covered.any()):
            see(place, tensor[covered])


def covers(
    kind: str, lens: torch.Tensor | Sequence[int] | None, width: int, trees: Sequence[Sequence[int]],
    kinds: Sequence[str],
) -> Covers:
    """Determine the rows that count in what the replay of a body shows.

    lens   number of rows that count among each request's `width` packed rows; None: all;  trees: the shapes in a draft
    kinds  of the requests, if windows and decodes share a batch: the draft head runs for the decodes alone
    """
    if kind == "shaped draft":
        return lambda place, rows: node_runs(place, trees)
    covered = None if lens is None else first_of(lens, width)
    if not kinds:
        return lambda place, rows: covered
    decoded = [int(kind == "decode") for kind in kinds]  # for these the head also has one row each: what it picks
    return lambda place, rows: (
        first_of(decoded, rows // len(kinds)) if place.stage.partition(".")[0] == "extend" else covered
    )


def first_of(lens: torch.Tensor | Sequence[int], width: int) -> torch.Tensor:
    """[B * width]: mask of the first `lens` of each request's `width` packed rows."""
    counts = torch.as_tensor(lens)
    return (torch.arange(width, device=counts.device) < counts[:, None]).flatten()


def node_runs(place: Place, trees: Sequence[Sequence[int]]) -> torch.Tensor:
    """[B]: mask of the requests for which the draft head runs in stage chain.n, because node n has a child."""
    node = int(place.stage.removeprefix("chain."))
    return torch.tensor([node in parents for parents in trees])


class _Covered:
    """Remembers which rows the last launch covered, and which requests, for which a head has one row each.

    A result with as many rows as the launch is cut to the covered rows.
    """

    def __init__(self, see: See) -> None:
        self._see = see
        self._masks: tuple[torch.Tensor, ...] = ()
        self._counts: list[int] | None = None  # how many of each are covered; read only once, because it waits

    def note(self, name: str, op: Op) -> Op:
        if name != "place_rows":
            return op

        def call(**given: Any) -> Any:
            row = torch.arange(given["rows"], device=given["begin"].device)[:, None]
            count = torch.where(given["slots"] >= 0, given["count"], 0)
            rows = ((row >= given["begin"]) & (row < given["begin"] + count)).any(dim=1)
            self._masks, self._counts = (rows, given["slots"] >= 0), None
            return op(**given)

        return call

    def see(self, place: Place, tensor: torch.Tensor) -> torch.Tensor:
        # No row is launched after the root, so the previous launch does not describe these rows.
        fits = [] if place.stage == "chain.0" else [n for n, mask in enumerate(self._masks) if len(mask) == len(tensor)]
        if not fits or self._covered(fits[0]) == len(tensor):
            return self._see(place, tensor)
        if not self._covered(fits[0]):  # in a shaped draft: no request has a child after this node
            return tensor
        # The result of `see` goes back among the padding rows, because the next op expects all rows of the launch.
        mask = self._masks[fits[0]]
        shown, whole = self._see(place, tensor[mask]), tensor.clone()
        whole[mask] = shown
        return whole

    def _covered(self, number: int) -> int:
        if self._counts is None:
            self._counts = [int(mask.sum()) for mask in self._masks]
        return self._counts[number]
