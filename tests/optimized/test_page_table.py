"""The page table: read where it stands, and as wide as the longest request needs it.

Leaves out: who owns a page (`test_memory_owners.py`) and attention itself (`test_ops_plain_paged.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from instep_optimized import OptimizedEngine, Options, load
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.engine import Admit, Capacity, Commit, Draft, Event, Forward, Row
from support.checkpoints import write

PAGES = 997  # no other size of a small model is as large, or a multiple of it
ROOM = Capacity(slots=(4, 1), pages=tuple(range(PAGES, 0, -1)), page_size=4, max_tokens=64)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint.open(write(tmp_path_factory.mktemp("model"), num_hidden_layers=2, full_attention_interval=2))


def engine(checkpoint: Checkpoint, capacity: Capacity, ops: str = "plain", **options: Any) -> OptimizedEngine:
    return OptimizedEngine(checkpoint, load(ops), Options(**options), capacity, num_steps=3)


def course() -> Iterator[Event]:
    """A mixed forward, a forward of each kind alone, a draft and a commit."""
    yield Admit("a", tuple(range(1, 10)))
    yield Admit("b", (3, 4))
    yield Forward((Row("a", "prefill", 9),))
    yield Forward((Row("b", "prefill", 2), Row("a", "decode")))
    yield Forward((Row("a", "decode"), Row("b", "decode")))
    yield Draft(("a", "b"))
    yield Forward((Row("b", "verify"), Row("a", "verify")))
    yield Commit(("a", "b"))


class _Made(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes every tensor that an operator gives, with the operator's name."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[tuple[str, torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.found += [(str(func), leaf) for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        return result


@contextmanager
def made(subject: OptimizedEngine) -> Iterator[list[str]]:
    """Names the operators that make a tensor, no view of a pool, with an axis as long as the pool has pages."""
    pools = {region.units.untyped_storage().data_ptr() for region in subject.regions()}
    names: list[str] = []
    with _Made() as watch:
        yield names
    names += [
        name for name, tensor in watch.found
        if any(size >= PAGES for size in tensor.shape) and tensor.untyped_storage().data_ptr() not in pools
    ]


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("ops", ["plain", "ledger"])
def test_no_launch_makes_a_copy_as_wide_as_the_pool(checkpoint: Checkpoint, ops: str, graphs: bool) -> None:
    subject = engine(checkpoint, ROOM, ops, graphs=graphs)
    for event in course():
        with made(subject) as wide:
            event.on(subject)
        assert not wide, f"{type(event).__name__}: {wide}"
    with made(subject) as wide:  # the watch would see one
        next(region for region in subject.regions() if region.name == "table").units.clone()
    assert wide == ["aten.clone.default"]
