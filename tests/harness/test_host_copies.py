"""Copies to the host: bits and structure are kept, index tensors are copied once, and the subject's reads are counted.

Leaves out: a device. Here every tensor counts as one of a device, and tests issue torch's warnings of reads themselves.
On a CPU a trap replaces these (`test_instrumentation.py`).
"""

import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import pytest
import torch

from instep.watch import batched_host_copies
from instep.watch import op_calls as calls_file
from instep.watch.host_reads import Reads
from instep.watch.op_calls import Calls, HostIndexCache
from instep_optimized.memory_addresses import Address
from instep_optimized.ops.check_op_calls import before

DTYPES = (torch.float32, torch.bool, torch.int64, torch.float8_e4m3fn, torch.bfloat16, torch.float64)


@dataclass(frozen=True)
class Held:
    layers: dict[int, torch.Tensor]
    length: int
    final: torch.Tensor | None = None


@pytest.fixture(autouse=True)
def away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batched_host_copies, "is_away", lambda tensor: True)


def same(found: torch.Tensor, right: torch.Tensor) -> bool:
    alike = (found.dtype, found.shape) == (right.dtype, right.shape)
    equal = torch.equal(batched_host_copies.bits(found), batched_host_copies.bits(right))
    return alike and equal and found.data_ptr() != right.data_ptr()


def test_batched_copies_to_the_host_keep_every_bit() -> None:
    numbers = torch.arange(24.0).reshape(2, 3, 4) - 7
    tensors = [view.to(dtype) for dtype in DTYPES
               for view in (numbers, numbers.mT, numbers[:, 1:, ::2], numbers[0, 0, 0], numbers[:0])]  # fmt: skip
    tensors.append(torch.full((2,), torch.nan))
    for found, right in zip(batched_host_copies.brought(tensors), tensors, strict=True):
        assert same(found, right) or not right.numel()


def test_states_keep_their_structure_and_share_no_mapping() -> None:
    layers, final = {0: torch.ones(2, 3).T, 3: torch.zeros(4, dtype=torch.int64)}, torch.arange(3.0)
    states = {"a": Held(layers, 3, final), "b": Held(layers, 4)}
    found = batched_host_copies.on_host(states)
    layers[0] = torch.zeros(0)  # what an engine does with its own afterwards changes nothing
    assert found["a"].length == 3 and found["b"].final is None and same(found["a"].final, final)
    assert found["a"].layers.keys() == {0, 3} and torch.equal(found["b"].layers[0], torch.ones(3, 2))


def test_only_indices_of_an_op_call_are_copied_to_the_host() -> None:
    pool, units = torch.zeros(4, 2, dtype=torch.int64), torch.tensor([1, -1])
    address = Address(pool, units, column=torch.tensor([0, 1]))
    given = {"target": address, "pool": pool, "x": (x := torch.ones(2)), "parts": (address,)}
    told = batched_host_copies.indices_on_host(given)
    assert told["target"].pool is told["pool"] is told["parts"][0].pool is pool and told["x"] is x
    assert same(told["target"].units, units) and told["target"].units is told["parts"][0].units


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of tensors of each copy from the device."""
    times, real = list[int](), batched_host_copies.brought

    def brought(tensors: Any) -> Any:
        times.extend([len(tensors)] if tensors else [])
        return real(tensors)

    monkeypatch.setattr(batched_host_copies, "is_away", lambda tensor: True)
    monkeypatch.setattr(calls_file, "brought", brought)
    return times


def given(index: torch.Tensor, rows: torch.Tensor, **more: torch.Tensor) -> dict[str, Any]:
    return {"x": rows, "index": index, **more}


def test_index_is_copied_once(asked: list[int]) -> None:
    calls, index, rows = HostIndexCache(), torch.tensor([2, 0]), torch.ones(3, 4)
    first = calls.of(0, given(index, rows))
    second = calls.of(1, given(index, rows))
    assert first["x"] is second["x"] is rows and first["index"] is second["index"] is not index
    assert first["index"].tolist() == [2, 0] and asked == [1]
    calls.of(2, given(index[:1], rows, further=torch.tensor([5], dtype=torch.int32)))
    assert asked == [1, 2], "another view is another index"
    assert calls.changed() == {}


@pytest.mark.parametrize("strided", [False, True])
def test_index_written_between_calls_is_reported_after_the_event(strided: bool) -> None:
    pool = torch.arange(6).reshape(3, 2)
    index = pool[:, 0] if strided else pool[0]
    calls, rows, flag = HostIndexCache(), torch.ones(3, 4), torch.tensor([True, False])
    right = index.tolist()
    calls.of(0, given(index, rows, flag=flag))
    index[0] = 7
    flag[1] = True
    late = torch.tensor([9])
    told_then = calls.of(1, given(index, rows, flag=flag, late=late))
    assert told_then["index"].tolist() == right and told_then["late"].tolist() == [9]
    index[0], late[0] = 8, 1
    calls.of(2, given(index, rows))
    (one, first), (two, second) = sorted(calls.changed().items())
    assert (one, two) == (1, 2) and first["index"].tolist() == [7, *right[1:]]
    assert first["flag"].tolist() == [True, True] and first["late"].tolist() == [9]
    assert first["x"].is_meta and first["x"].shape == rows.shape and second["index"].tolist() == [8, *right[1:]]


class NoTrap:
    """Replaces a device's trap: it traps nothing."""

    cuda = True

    def paused(self) -> AbstractContextManager[None]:
        return nullcontext()

    def inside(self, op: str) -> AbstractContextManager[None]:
        return nullcontext()


@pytest.mark.parametrize("spoiled", [None, 1, 2])
def test_a_later_call_is_judged_by_what_it_was_given(spoiled: int | None, asked: list[int]) -> None:
    """An index that is overwritten between two calls of an event, so that it points past the rows."""
    reads: Any = NoTrap()
    calls, index, rows = Calls(True, MappingProxyType({}), reads), torch.tensor([2, 0]), torch.ones(3, 4)

    def select(*, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return x[index.clamp(max=len(x) - 1)]

    select.__module__ = "instep_optimized.ops"
    op = calls.wrapper("select", select)
    calls.begin(())
    for number in range(3):
        if number == spoiled:
            index[1] = 3
        op(x=rows, index=index)
    calls.end()
    log = calls.take()
    wrong = 0 if spoiled is None else 3 - spoiled
    (clause,) = before("select", given(torch.tensor([2, 3]), rows))
    assert [broken.clause for broken in log["broken"]] == [clause] * wrong and log["calls"] == 3
    assert asked == [1], "after the event one more copy serves all calls together"


@pytest.mark.parametrize("works", [True, False])
def test_device_failure_falls_back_to_the_first_copy(works: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Anything else that fails there is no verdict."""
    reads: Any = NoTrap()
    calls = Calls(True, MappingProxyType({}), reads)
    op = calls.wrapper("select", lambda *, x, index: x[index])
    monkeypatch.setattr(calls_file, "alive", lambda device: works)

    def fell(self: HostIndexCache) -> Any:
        raise RuntimeError("CUDA error")

    monkeypatch.setattr(HostIndexCache, "changed", fell)
    calls.begin(())
    op(x=torch.ones(3, 4), index=torch.tensor([2, 0]))
    calls.end()
    if works:
        with pytest.raises(RuntimeError, match="CUDA error"):
            calls.take()
    else:
        log = calls.take()
        assert log["calls"] == 1 and log["broken"] == () and calls.tally.ops["select"].calls == 1


MODE = "Synchronization debug mode is a prototype feature and does not yet detect all synchronizing operations"


def wait() -> None:
    warnings.warn("called a synchronizing CUDA operation", UserWarning, stacklevel=1)


@pytest.fixture
def modes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The values that the mode was set to."""
    told = list[int]()

    def mode(number: int) -> None:
        told.append(number)
        warnings.warn(MODE, UserWarning, stacklevel=1)

    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", mode)
    return told


def test_harness_reads_are_not_counted_as_the_subjects(modes: list[int]) -> None:
    reads = Reads(torch.device("cuda"))
    shown = warnings.showwarning
    with pytest.warns(UserWarning, match="something else") as given, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode")
        with reads:
            wait()
            with reads.paused():
                wait()
                with reads.paused():
                    wait()
                wait()
            warnings.warn("something else", UserWarning, stacklevel=1)
            with reads.inside("pick"):
                wait()
    assert len(reads.found) == 2 and all("test_host_copies line" in read.reader for read in reads.found)
    assert len(given) == 1, "a warning about something else is issued again for the caller"
    assert modes == [1, 0], "torch warns whenever it is set"
    assert warnings.showwarning is shown
    with pytest.warns(UserWarning, match="synchronizing"):
        wait()
    assert len(reads.found) == 2
