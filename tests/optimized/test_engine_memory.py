"""The pools of a whole engine: strides are read, red zones detect writes, columns beyond a window stay; and copies.

Leaves out: pools by themselves (`test_memory_pools.py`) and their values (`test_engine_reference.py`).
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from functools import partial
from typing import Any

import pytest
import torch

from instep_optimized import OptimizedEngine, load
from instep_optimized.memory.slot_table import NAMES
from instep_optimized.memory_addresses import Address, Part, StateLayout
from instep_optimized.ops.plain import PLAIN
from instep_reference.contract import engine as e
from instep_reference.contract.adaptive_controller_file import AdaptiveFile, Bracket
from instep_reference.contract.checkpoint import Checkpoint
from support.worlds import engine_and_reference as sides
from support.worlds.engine_and_reference import snapshot, untouched

engine = partial(sides.engine, adaptive=AdaptiveFile(flat=Bracket(candidate_steps=(1, 3, 7))))


def story() -> Iterator[e.Event]:
    """Two requests through two chunks, a round and a decode."""
    yield e.Admit("a", (1, 2, 3, 4, 5, 6))
    yield e.Admit("b", (7, 8))
    yield e.Forward((e.Row("a", "prefill", 4), e.Row("b", "prefill", 2)))
    yield e.Forward((e.Row("a", "prefill", 2),))
    yield e.Draft(("a", "b"))
    yield e.Forward((e.Row("b", "verify"), e.Row("a", "verify")))
    yield e.Commit(("a", "b"))
    yield e.Forward((e.Row("b", "decode"), e.Row("a", "decode")))


# ---- strides and red zones


@pytest.mark.parametrize(("strategy", "conv", "beside"), [
    ("snapshot", "windows", {"snapshot_conv", "snapshot_state"}), ("columns", "widened", {"column", "offset"}),
    ("rerun", "windows", {"snapshot_conv", "settled", "ring_k", "ring_decay", "ring_update"}),
])
@pytest.mark.parametrize("layout", ["VK", "KV"])
@pytest.mark.parametrize(("ops", "activation"), [("plain", torch.float32), ("plain", torch.bfloat16),
                                                 ("ledger", torch.float32)])
def test_no_pool_of_a_guarded_engine_is_packed(
    checkpoint: Checkpoint, ops: str, activation: torch.dtype, layout: StateLayout, strategy: str, conv: str,
    beside: set[str],
) -> None:
    subject = engine(checkpoint, load(ops), layout=layout, activation=activation, strategy=strategy, conv=conv)
    pools = [region for region in subject.regions() if region.gaps is not None]
    assert {pool.name for pool in pools} == {
        "conv", "state", *beside, "keys", "values", "draft_keys", "draft_values", *NAMES,
    }
    for pool in pools:
        assert pool.units.stride(0) > math.prod(pool.units.shape[1:]), pool.name
        assert pool.units.stride(0) % 16 == 0 and pool.units[1].data_ptr() % 16 == 0


def packed(pool: torch.Tensor) -> torch.Tensor:
    """The pool as somebody sees it who computes the first stride instead of reading it."""
    return pool.as_strided(pool.shape, (math.prod(pool.shape[1:]), *pool.stride()[1:]))


def blind(part: Part) -> Part:
    def seen(address: Address | None) -> Address | None:
        return None if address is None else replace(address, pool=packed(address.pool))

    return replace(part, store=seen(part.store), per_row=seen(part.per_row))


STRIDE_BLIND: dict[str, Callable[..., Any]] = {
    "conv": lambda **given: PLAIN.conv(**given | {"parts": tuple(map(blind, given["parts"]))}),
    "gdn": lambda **given: PLAIN.gdn(**given | {"parts": tuple(map(blind, given["parts"]))}),
    "store_rows": lambda **given: PLAIN.store_rows(**given | {"pool": packed(given["pool"])}),
    "move": lambda *, source, target: PLAIN.move(source=source, target=replace(target, pool=packed(target.pool))),
}


@pytest.mark.parametrize("layout", ["VK", "KV"])
@pytest.mark.parametrize("op", STRIDE_BLIND)
def test_an_op_that_computes_a_stride_is_caught_in_a_guarded_engine(
    checkpoint: Checkpoint, op: str, layout: StateLayout
) -> None:
    wrong: dict[str, Any] = {op: STRIDE_BLIND[op]}
    # A token that is read where none was written names no row of the embedding.
    with pytest.raises((AssertionError, IndexError), match=r"conv|state|keys|out of bounds"):
        run_guarded(engine(checkpoint, replace(PLAIN, **wrong), layout=layout, strategy="snapshot"))
    assert run_guarded(engine(checkpoint, layout=layout, strategy="snapshot")) > 10_000


def run_guarded(subject: OptimizedEngine) -> int:
    """The story, with every byte that an event may not write compared after it."""
    compared = 0
    for event in story():
        may, before = subject.may_change(event), snapshot(subject)
        event.on(subject)
        compared += untouched(subject, before, may)
    return compared


@pytest.mark.parametrize(("strategy", "name"), [
    *(("snapshot", name) for name in (
        "conv", "state", "snapshot_conv", "snapshot_state", "keys", "values", "draft_keys", "draft_values",
    )),
    *(("rerun", name) for name in ("settled", "ring_k", "ring_decay", "ring_update")),
])
def test_element_after_a_unit_is_in_a_red_zone(checkpoint: Checkpoint, strategy: str, name: str) -> None:
    subject = engine(checkpoint, poison=7.5, strategy=strategy)
    before = snapshot(subject)
    region = next(r for r in subject.regions() if r.name == name)
    size = math.prod(region.units.shape[1:])
    stray = region.units.as_strided((1,), (1,), region.units[1].storage_offset() + size)
    stray.copy_(torch.tensor([1]))
    everything = {r.name: set(range(len(r.units))) for r in subject.regions()}
    with pytest.raises(AssertionError, match=name):
        untouched(subject, before, everything)


@pytest.mark.parametrize("num_steps", [1, 3])
@pytest.mark.parametrize("ops", ["plain", "ledger"])
def test_columns_beyond_the_window_are_not_written(checkpoint: Checkpoint, ops: str, num_steps: int) -> None:
    subject = engine(checkpoint, load(ops), strategy="snapshot")
    subject.set_num_steps(num_steps)
    for event in story():
        before = columns(subject)
        event.on(subject)
        for (name, now), was in zip(columns(subject).items(), before.values(), strict=True):
            assert now.shape[1] == 8
            assert torch.equal(now[:, num_steps + 1 :], was[:, num_steps + 1 :]), name
            if isinstance(event, e.Forward) and event.rows[0].kind == "verify":
                assert not torch.equal(now[:2, num_steps], was[:2, num_steps]), name


def columns(subject: OptimizedEngine) -> dict[str, torch.Tensor]:
    """[rows, columns, bytes] of the snapshot pools."""
    return {
        region.name: region.units.clone(memory_format=torch.contiguous_format).view(torch.uint8).flatten(2)
        for region in subject.regions() if region.name.startswith("snapshot") and region.gaps is not None
    }


# ---- answers and states are copies


def test_caller_may_change_answers_and_states(checkpoint: Checkpoint) -> None:
    left, spoiled = engine(checkpoint, poison=7.5), engine(checkpoint, poison=7.5)
    for event in story():
        one, other = event.on(left), event.on(spoiled)
        assert type(one) is type(other)
        for tensor in tensors(other):
            tensor.fill_(63)
        for name in spoiled.slots():
            for tensor in tensors(spoiled.state(name)):
                tensor.fill_(63)
    for subject in (left, spoiled):
        subject.preempt("a")
    for tensor in tensors(spoiled.state("a")):
        tensor.fill_(63)
    for subject in (left, spoiled):
        subject.resume("a")
    for name in ("a", "b"):
        one_state, other_state = left.state(name), spoiled.state(name)
        assert (one_state.root, one_state.proposal) == (other_state.root, other_state.proposal)
        pairs = list(zip(tensors(one_state), tensors(other_state), strict=True))
        assert len(pairs) == 7 and all(torch.equal(x, y) for x, y in pairs)


def tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from tensors(inner)
    elif isinstance(value, e.Drafted | e.Forwarded | e.Committed | e.RequestState):
        for field in fields(value):
            yield from tensors(getattr(value, field.name))
