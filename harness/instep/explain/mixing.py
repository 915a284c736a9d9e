"""Which head reads which: value head h with key head h % H, where it is h // r; the same of grouped attention.

Leaves out: heads that are rolled or exchanged as a whole (`inputs.py`, `rows.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from instep_reference.gdn import GdnMemory

from ..observe.layer_work import LayerWork
from .case import Case, Explanation


def mixing(case: Case) -> Iterator[Explanation]:
    """The value heads change places so that h reads group h % H, and what comes of it changes them back."""
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
    if case.component in ("core", "state", "update") and 1 < config.key_heads < config.value_heads:
        yield from _of_rule(case, work, config.key_heads, config.value_heads)


def _of_rule(case: Case, work: LayerWork, groups: int, heads: int) -> Iterator[Explanation]:
    places = _places(heads, groups)
    own = {name: case.own(name) for name in ("v", "log_decay", "beta", "update")}
    changes = {name: rows[:, places] for name, rows in own.items() if rows is not None}
    memory, piece = work.memory, case.piece
    assert piece is not None, "there is a work"
    if isinstance(memory, GdnMemory):
        work = replace(work, memory=GdnMemory(memory.window, memory.state[places]))
    folding = None if piece.folding is None else replace(piece.folding, base=piece.folding.base[places])
    wrong = replace(case, piece=replace(piece, work=work, folding=folding)).again(changes)
    if wrong is not None:
        said = f"value head h reads key head h % {groups}, not h // {heads // groups}"
        yield Explanation(said, _back(wrong, places, 0 if case.component == "state" else 1))


def _places(heads: int, groups: int) -> torch.Tensor:
    """Behind place p, which is of group p // r, the head h with h % groups = p // r."""
    return torch.tensor([i * groups + g for g in range(groups) for i in range(heads // groups)])


def _back(tensor: torch.Tensor, places: torch.Tensor, axis: int) -> torch.Tensor:
    back = torch.empty_like(tensor)
    back.index_copy_(axis, places.to(tensor.device), tensor)
    return back
