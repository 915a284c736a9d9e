"""Batched copies to the host keep bits, shapes and dtypes, and leave other tensors on the device.

Leaves out: a device. Here every tensor counts as a device tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from instep.watch import batched_host_copies
from instep_optimized.memory_addresses import Address

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
