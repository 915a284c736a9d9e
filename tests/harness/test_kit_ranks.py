"""`kit.over_ranks`: sharded layers that are right agree, and mistakes of ranks are found and named."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from instep import kit
from instep_reference.contract.errors import BadInput

Tensor = torch.Tensor
HEADS = kit.Segment(4, 8)
QKV = kit.Shard(0, (kit.Segment(2, 8), kit.Segment(2, 8), HEADS))
SPLIT = {"qkv": QKV, "conv": QKV, "out": kit.Shard(1, (HEADS,))}


def drawn(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(1)
    shapes = {"x": (5, 16), "qkv": (64, 16), "conv": (64,), "out": (16, 32)}
    return {name: torch.randn(shape, generator=draw).to(dtype) for name, shape in shapes.items()}


def mixed(x: Tensor, qkv: Tensor, conv: Tensor, heads: int) -> Tensor:
    """v of each value head, weighted by the product of q and k of its key head."""
    q, k, v = ((x @ qkv.T) * conv).split((heads * 8 // 2, heads * 8 // 2, heads * 8), -1)
    rows = (q * k).view(len(x), -1, 8).sum(-1).tanh()
    return (v.view(len(x), -1, 8) * rows.repeat_interleave(2, -1)[..., None]).flatten(1)


def truth(x: Tensor, qkv: Tensor, conv: Tensor, out: Tensor) -> Tensor:
    return mixed(x, qkv, conv, 4) @ out.T


def right(comm: Any, x: Tensor, qkv: Tensor, conv: Tensor, out: Tensor) -> Tensor:
    summed: Tensor = comm.all_reduce(mixed(x, qkv, conv, 4 // comm.size) @ out.T)
    return summed


def changed(change: Callable[[Any, dict[str, Tensor]], Any]) -> Callable[..., Any]:
    return lambda comm, **given: right(comm, **{**given, **change(comm, given)})


def in_one_block(comm: Any, given: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"conv": drawn()["conv"].chunk(comm.size)[comm.rank]}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_right_layer_agrees(dtype: torch.dtype) -> None:
    assert kit.over_ranks(right, truth, drawn(dtype), SPLIT, ranks=[2]) == []
    gathered = kit.over_ranks(lambda comm, x, qkv: x @ qkv.T, lambda x, qkv: x @ qkv.T, {
        name: drawn(dtype)[name] for name in ("x", "qkv")}, {"qkv": QKV}, result=kit.Shard(1, QKV.segments), ranks=[2])
    assert gathered == []
    copied = kit.Shard(0, (kit.Segment(2, 8, copied=True),))
    assert kit.over_ranks(lambda comm, x: x, lambda x: x, {"x": torch.randn(16)}, {"x": copied}, result=copied) == []


@pytest.mark.parametrize(("layer", "says"), [
    (lambda comm, **given: mixed(given["x"], given["qkv"], given["conv"], 2) @ given["out"].T,
     "rank 0 is its own part: a sum over ranks is missing"),
    (lambda comm, **given: comm.all_reduce(right(comm, **given)),
     "is 2 times the right result, as after a sum too many"),
    (lambda comm, **given: right(comm, **given) / comm.size, "the right result divided by 2, as a mean"),
    (lambda comm, **given: right(comm, **given) if comm.rank else given["x"] @ given["x"].T @ given["x"],
     "RankWaits: rank 0 has served the event; rank 1 waits in all_reduce"),
    (changed(in_one_block), "computed with a part that is cut as one block, not per segment of `conv`"),
    (changed(lambda comm, given: {"out": drawn()["out"][:, :16]}), "the part of rank 0 on every rank of `out`"),
    (lambda comm, **given: right(comm, **given) + (comm.rank == 1) * 1e-7, "rank 1 has other bits than rank 0"),
    (lambda comm, **given: right(comm, **given)[:2], "rank 0 returns (2, 16); expected (5, 16)"),
    (lambda comm, **given: right(comm, **given) * float("nan"), "rank 0 is wrong: 80 of 80 numbers"),
    (lambda comm, **given: right(comm, **given) if comm.rank else 1 / 0, "ZeroDivisionError"),
    (lambda comm, **given: right(comm, **given).bfloat16().float(), "rank 0 is wrong"),
    (lambda comm, **given: right(comm, **given) + mixed(given["x"], given["qkv"], given["conv"], 2) @ given["out"].T,
     "rank 1 has the part of rank 1 twice in the sum"),
], ids=["no-sum", "sum-twice", "mean", "waits", "one-block", "rank-0", "bits", "shape", "nan", "raises", "narrow",
        "twice"])  # fmt: skip
def test_a_wrong_layer_is_found_and_named(layer: Callable[..., Any], says: str) -> None:
    found = "\n".join(kit.over_ranks(layer, truth, drawn(), SPLIT, ranks=[2]))
    assert found.startswith("2 ranks: "), found
    assert says in found, found


def test_the_part_of_another_rank_is_named() -> None:
    given = {name: drawn()[name] for name in ("x", "qkv")}
    shard = kit.Shard(0, (kit.Segment(8, 8),))
    found = kit.over_ranks(lambda comm, x, qkv: x @ given["qkv"].chunk(comm.size)[0].T, lambda x, qkv: x @ qkv.T, given,
                           {"qkv": shard}, result=kit.Shard(1, shard.segments), ranks=[4])  # fmt: skip
    assert len(found) == 3 and "4 ranks: rank 1 has the part of rank 0" in found[0]


@pytest.mark.parametrize(("change", "says"), [
    ({"ranks": [1]}, "ranks: found"), ({"ranks": []}, "ranks"), ({"ranks": [3]}, "that divide the 2 heads"),
    ({"split": {}}, "a shard of at least one input"), ({"split": {"y": QKV}}, "names of inputs: x, qkv, conv, out"),
    ({"split": {"x": QKV}}, "5 entries on axis 0"), ({"split": {"qkv": (1, 2)}}, "a Shard"),
    ({"result": QKV}, "5 entries, as the truth has on that axis"), ({"given": {"x": 1}}, "a tensor"),
    ({"split": {"conv": kit.Shard(1, (HEADS,))}}, "one of 1 axes"),
    ({"result": kit.Shard(2, (HEADS,))}, "one of 2 axes"),
])  # fmt: skip
def test_inputs_that_cannot_be_split_are_refused(change: dict[str, Any], says: str) -> None:
    asked: dict[str, Any] = {"given": drawn(), "split": SPLIT, "ranks": [2], **change}
    with pytest.raises(BadInput, match=says):
        kit.over_ranks(right, truth, asked.pop("given"), asked.pop("split"), **asked)


@pytest.mark.parametrize(("of", "says"), [
    (lambda x: x[:0], "nothing can be compared"), (lambda x: x.abs() * 1e39, "expected finite numbers"),
    (lambda x: x.argmax(1), "expected finite numbers"), (lambda x: None, "expected a function that returns a tensor"),
])  # fmt: skip
def test_a_truth_without_numbers_is_refused(of: Callable[[Tensor], Tensor], says: str) -> None:
    """An infinite number of the truth in the dtype of its inputs would allow every result."""
    with pytest.raises(BadInput, match=says):
        kit.over_ranks(right, lambda **given: of(given["x"]), drawn(), SPLIT, ranks=[2])
