"""Contracts of integer ops: one rule per op, and the clauses that all rules are made of.

Leaves out: ops on floating-point numbers, and reporting (`check_op_calls.py`).
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from instep_reference.contract.capacity import MOST_NODES
from instep_reference.contract.sampling import UNIFORM


class Outside(str):
    """A clause about an index outside its memory. An interpreter that follows the index may end the process."""


def _place_rows(given: dict[str, Any]) -> Iterator[str]:
    """Slots have one owner each, rows of requests do not overlap, and no row is before position 0."""
    slots, length, table = given["slots"], given["length"], given["table"]
    yield from owned("slots", slots, min(length.shape[0], table.shape[0]))
    yield from whole(given, "begin", "count", "length", "table")
    busy = slots >= 0
    begin, count = given["begin"][busy], given["count"][busy]
    yield from spans(begin, count, int(count.max()) if len(count) else 0, given["rows"])
    depth, at = given.get("depth"), length[slots[busy].clamp(0, length.shape[0] - 1)]
    at = at + given["shift"] if depth is None else at + min(given["shift"], -given["lead"])
    if bool(((at < 0) & (count > 0)).any()):
        yield f"a row would be at position {int(at.min())}"
    if depth is not None:
        # In a batch with trees, the depth of a chunk's row is its number. The draft head runs one node of each at a
        # time.
        yield from within("depth", depth, max(given["rows"], MOST_NODES), lowest=0)


def _advance(given: dict[str, Any]) -> Iterator[str]:
    """Slots have one owner each, and no length shrinks."""
    yield from owned("slots", given["slots"], given["length"].shape[0])
    yield from whole(given, "length", "by")
    if bool(((given["by"] < 0) & (given["slots"] >= 0)).any()):
        yield f"a length would shrink by {-int(given['by'].min())}"


def _accept(given: dict[str, Any]) -> Iterator[str]:
    """No window is wider than the tensor, and no forced path and no cap longer than its window."""
    width, count, forced = given["window"].shape[1], given["count"], given["forced_last"]
    yield from within("count", count, width + 1, lowest=0)
    yield from whole(given, "window", "picks", "forced_last", "forced_bonus")
    if bool((forced >= count.clamp(min=1)).any()):
        yield "a node is forced that the window does not have"
    if (caps := given.get("caps")) is not None:
        yield from whole(given, "caps")
        if bool((caps >= count.clamp(min=1)).any()):
            yield "a cap is above the number of drafts of its window"
    if given.get("parents") is not None:
        yield from _parents(given["parents"], count)


def _parents(parents: torch.Tensor, count: torch.Tensor) -> Iterator[str]:
    """parents [B, T]: int64; every node after the root continues an earlier node."""
    node = torch.arange(parents.shape[1], device=parents.device)
    if parents.dtype is not torch.int64:
        yield f"parents are {parents.dtype}, not int64"
    if len(node) > MOST_NODES:
        yield f"a window has {len(node)} nodes, at most {MOST_NODES} have a bit"
    wrong = (node > 0) & (node < count[:, None]) & ((parents < 0) | (parents >= node))
    if bool(wrong.any()):
        at = int(wrong.any(dim=0).nonzero()[0])
        yield f"node {at} continues {int(parents[wrong[:, at], at][0])}, which is no node before it"


def _behind(slots: torch.Tensor) -> int:
    """The number after the last slot, if no pool limits the number of slots."""
    return 1 + max(slots.tolist(), default=0)


def _plan_tree(given: dict[str, Any]) -> Iterator[str]:
    yield from owned("slots", given["slots"], _behind(given["slots"]))
    count = given["count"].where(given["slots"] >= 0, 0)  # without a request it may be anything
    yield from within("count", count, given["parents"].shape[1] + 1, lowest=0)
    yield from _parents(given["parents"], count)


def _plan_path(given: dict[str, Any]) -> Iterator[str]:
    """Slots have one owner each; a path begins at the root, and its numbers rise."""
    index, slots = given["accept_index"], given["slots"]
    table = given.get("table")
    yield from owned("slots", slots, _behind(slots) if table is None else table.shape[0])
    yield from whole(given, "accept_index", "before")
    busy = slots >= 0
    path, first = index[busy], index[busy, :1]
    falls = (path[:, 1:] >= 0) & (path[:, 1:] <= path[:, :-1])
    if bool((first != 0).any()) or bool(falls.any()):
        yield "a path does not rise from the root"


def _move_rows(given: dict[str, Any]) -> Iterator[str]:
    """Every entry is read before it is written over, no entry of unit 0 is written, and no two are one."""
    pool, source, target = given["pool"], given["source"], given["target"]
    for name in ("source", "target"):
        yield from within(name, given[name], pool.shape[0] * pool.shape[1])
        yield from distinct(name, given[name].flatten())
    if bool(((target >= 0) & (target < pool.shape[1])).any()):
        yield "a target lies in unit 0, which is reserved"
    if bool(((source < 0) != (target < 0)).any()):
        yield "an entry has one end alone"
    for step in range(1, target.shape[1] if len(target) else 0):
        if bool(((target[:, :step, None] == source[:, None, step:]) & (target[:, :step, None] >= 0)).any()):
            yield "an entry is written over before it is read"
            break


def _draw(given: dict[str, Any]) -> Iterator[str]:
    """Rows of requests do not overlap, a window is at least as wide as its rows, and uniforms lie in [0, 1)."""
    window, count, vocab = given["window"], given["count"], given["logits"].shape[1]
    yield from whole(given, "window", "begin", "count", "uniforms", "final")
    yield from spans(given["begin"], count, window.shape[1], len(given["logits"]))
    drafts = torch.arange(1, window.shape[1], device=window.device) < count[:, None]
    yield from within("drafts", window[:, 1:][drafts], vocab, lowest=0)
    for name in ("uniforms", "final"):
        yield from within(name, given[name], round(1 / UNIFORM), lowest=0)
    if given["sampling"].dtype is not torch.float32:
        yield f"sampling is {given['sampling'].dtype}, not float32"
    if given["parents"] is not None:
        yield from _parents(given["parents"], count)


def _topk_tokens(given: dict[str, Any]) -> Iterator[str]:
    if not 1 <= given["topk"] <= given["logits"].shape[1]:
        yield f"topk is {given['topk']}, there are {given['logits'].shape[1]} tokens"


def _select_beams(given: dict[str, Any]) -> Iterator[str]:
    """Every beam of the previous step has a row; a parent is a candidate of that step; every row has a bit."""
    step, topk, before = given["step"], given["tokens"].shape[1], given["before"]
    yield from whole(given, "tokens")
    if not 1 <= step <= given["num_steps"] or (before is None) != (step == 1):
        yield f"step {step} of {given['num_steps']}" + (" without the step before" if before is None else "")
    elif before is not None:
        if len(given["tokens"]) != len(before.beams):
            yield f"{len(given['tokens'])} rows for {len(before.beams)} beams"
        last = topk + (step - 2) * topk**2
        yield from within("beams", before.beams, last, lowest=max(0, last - topk**2))
    if 1 + (given["num_steps"] - 1) * topk > MOST_NODES:
        yield f"{(given['num_steps'] - 1) * topk} rows of beams, at most {MOST_NODES - 1} have a bit"


def _build_tree(given: dict[str, Any]) -> Iterator[str]:
    """A candidate's parent comes before it; there is room for the root and a draft."""
    parents = given["parents"]
    yield from whole(given, "tokens", "parents")
    yield from within("nodes", parents.new_tensor([given["nodes"]]), MOST_NODES + 1, lowest=2)
    number = torch.arange(parents.shape[1], device=parents.device)
    if bool(((parents < -1) | (parents >= number)).any()):
        yield "a candidate continues one that does not come before it"


def _plan_ring(given: dict[str, Any]) -> Iterator[str]:
    """The ring has room for the pending tokens and the rows of the launch; slots have one owner each."""
    yield from owned("slots", given["slots"], given["settled"].shape[0])
    size, most = given["size"], given["most"]
    if most > size:
        yield f"{most} rows do not fit in {size} entries"
        return
    busy = given["slots"] >= 0
    settled = given["settled"][given["slots"][busy].clamp(0, given["settled"].shape[0] - 1)]
    pending = given["before"][busy] - settled
    room = size - most
    if bool((pending > room).any()):
        yield f"{int(pending.max())} tokens are pending; with {most} rows a ring of {size} entries has room for {room}"
    if bool((pending < 0).any()):
        yield f"{-int(pending.min())} tokens more are in the state than the request has"


def _choose(given: dict[str, Any]) -> Iterator[str]:
    own, forced = given["own"], given["forced"]
    if own.shape != forced.shape:
        yield f"own is {tuple(own.shape)}, forced is {tuple(forced.shape)}"
    yield from whole(given, "own", "forced")


def _shift(given: dict[str, Any]) -> Iterator[str]:
    """Rows of requests do not overlap, and one token follows the rows of each request."""
    begin, count, behind = given["begin"], given["count"], given["behind"]
    yield from spans(begin, count, int(count.max()) if len(count) else 0, len(given["tokens"]))
    yield from whole(given, "tokens", "begin", "count", "behind")
    if behind.shape != begin.shape:
        yield f"{behind.numel()} tokens follow {len(begin)} requests"


def whole(given: dict[str, Any], *names: str) -> Iterator[str]:
    for name in names:
        if given[name].dtype is not torch.int64:
            yield f"{name} are {given[name].dtype}, not int64"


def owned(name: str, index: torch.Tensor, size: int) -> Iterator[str]:
    """Slots are in range, none occurs twice, and none is the reserved slot 0."""
    yield from within(name, index, size)
    yield from distinct(name, index)
    if bool((index == 0).any()):
        yield f"{name} name slot 0, which is reserved"


# Integer ops have rules by name; the other ops are judged by the kinds of their arguments.
RULES: dict[str, Callable[[dict[str, Any]], Iterator[str]]] = {
    "place_rows": _place_rows, "advance": _advance, "accept": _accept, "choose": _choose,
    "plan_ring": _plan_ring, "shift": _shift, "draw": _draw,
    "topk_tokens": _topk_tokens, "select_beams": _select_beams, "build_tree": _build_tree,
    "plan_tree": _plan_tree, "plan_path": _plan_path, "move_rows": _move_rows,
}


def spans(begin: torch.Tensor, count: torch.Tensor, most: int, rows: int) -> Iterator[str]:
    """Rows of requests lie within the batch and do not overlap."""
    if not len(begin):
        return
    if int(count.max()) > most:
        yield f"most is {most}, the largest count is {int(count.max())}"
    covered = [row for b, c in zip(begin.tolist(), count.tolist(), strict=True) for row in range(b, b + c)]
    if covered and (min(covered) < 0 or max(covered) >= rows):
        yield Outside(f"rows {min(covered)} to {max(covered)} of {rows} are named")
    if len(set(covered)) < len(covered):
        yield "two requests share a row"


def within(name: str, index: torch.Tensor, size: int, lowest: int = -1) -> Iterator[str]:
    """The index is int64 and lies between `lowest` (-1 means none) and size - 1."""
    if index.dtype is not torch.int64:
        yield f"{name} are {index.dtype}, not int64"
    if index.numel() and not (int(index.min()) >= lowest and int(index.max()) < size):
        yield Outside(f"{name} run from {int(index.min())} to {int(index.max())}, there are {size}")


def distinct(name: str, index: torch.Tensor) -> Iterator[str]:
    used = [number for number in index.tolist() if number >= 0]
    if len(set(used)) < len(used):
        yield f"{name}: two requests would write the same place"
