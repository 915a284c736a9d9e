"""Products with weights at the widths of a 9B and a 35B-A3B model: linear layers, MLP, experts, the head.

With `--ops triton --ops invariant` it shows the cost of bits that do not depend on other rows. Leaves out: the ops in
between.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from instep.oracle.reordered_arithmetic import Reordered
from instep.subject.declared_rounding import declared
from instep_optimized.ops.op_protocols import ExpertWeights, Ops
from instep_optimized.ops.plain import PLAIN
from instep_optimized.ops.watch_op_calls import tensors_of

from ..answer_check import off
from ..bench_types import SEED, TO, Arm, At, Cell, Ground, Kind, Size
from ..drawn_rows import WIDE, alone
from ..kernels_of_peers import arms as peers

Sizes = tuple[int, int, int, int, int, int]  # hidden, MLP, vocabulary, hidden of the experts, their number and width
LARGE: Sizes = (4096, 12288, 151_936, 2048, 128, 768)
TINY: Sizes = (32, 64, 100, 32, 4, 16)
TOP = 2
ROWS: dict[Size, tuple[int, ...]] = {"tiny": (1, 3), "default": (4, 32, 1, 128, 2048),
                                     "full": (1, 2, 4, 8, 16, 32, 64, 128, 512, 2048)}  # fmt: skip
Inputs = dict[str, Any]
Run = Callable[..., torch.Tensor]  # called like an op


def _cases(ground: Ground) -> dict[str, tuple[str, int, Callable[[], Inputs]]]:
    """Map a name to its op, the width of its rows, and how its weights are drawn."""
    hidden, inner, vocab, narrow, experts, each = TINY if ground.tiny else LARGE

    def weight(*shape: int) -> torch.Tensor:
        return ground.drawn(*shape).mul_(shape[-1] ** -0.5)

    def linear(columns: int) -> Inputs:
        return {"weight": weight(columns, hidden), "shape": (columns,)}

    def moe() -> Inputs:
        weights = ExpertWeights(weight(experts, narrow), weight(experts, 2 * each, narrow),
                                weight(experts, narrow, each), weight(2 * each, narrow), weight(narrow, each),
                                weight(1, narrow))  # fmt: skip
        return {"weights": weights, "top_k": min(8, TOP if ground.tiny else 8), "norm_topk": True}

    return {
        "qkv": ("linear", hidden, lambda: linear(2 * hidden)), "out": ("linear", hidden, lambda: linear(hidden)),
        "gates": ("linear", hidden, lambda: linear(32)),
        "mlp": ("mlp", hidden, lambda: {"gate_up": weight(2 * inner, hidden), "down": weight(hidden, inner)}),
        "lm_head": ("lm_head", hidden, lambda: {"weight": weight(vocab, hidden)}), "moe": ("moe", narrow, moe),
    }  # fmt: skip


def cells(ground: Ground, size: Size) -> Iterator[At]:
    for rows in ROWS[size]:
        for name in _cases(ground):
            if not (rows > 512 and name in ("moe", "lm_head")):  # logits of a whole prompt are never needed
                yield {"op": name, "rows": rows}


def _widened(given: Inputs, dtype: torch.dtype) -> Inputs:
    def wide(value: Any) -> Any:
        if isinstance(value, ExpertWeights):
            parts: dict[str, Any] = {name: part.to(dtype) for name, part in vars(value).items()
                                     if isinstance(part, torch.Tensor)}  # fmt: skip
            return replace(value, **parts)
        return value.to(dtype) if isinstance(value, torch.Tensor) else value

    return {name: wide(value) for name, value in given.items()}


def _drawn(op: str, x: torch.Tensor, given: Inputs, ground: Ground, ops: Ops) -> torch.Tensor:
    """The yardstick: plain. Logits are not rounded after their sum, so they are summed as `ops` declares."""
    if op != "lm_head":
        found: torch.Tensor = getattr(PLAIN, op)(x=x, **given, to=TO)
        return found
    operands = alone(op, declared(ops, ground.dtype, torch.float32).products)
    with Reordered(torch.Generator(ground.device).manual_seed(SEED), operands):
        return torch.matmul(x.float(), given["weight"].float().T)


def _idle(x: torch.Tensor, given: Inputs) -> float:
    """Bytes of the experts that no row chooses."""
    weights: ExpertWeights = given["weights"]
    scores = x.float() @ weights.router.float().T
    chosen = torch.zeros(len(weights.router), dtype=torch.bool, device=x.device)
    chosen[scores.topk(given["top_k"]).indices.flatten()] = True
    idle = int((~chosen).sum())
    return float(idle * sum(one[0].numel() * one.element_size() for one in (weights.gate_up, weights.down)))


def make(ground: Ground, at: At) -> Cell:
    op, width, drawn = _cases(ground)[at["op"]]
    first = drawn()
    size = float(sum(x.numel() * x.element_size() for x in tensors_of(first)))
    x = ground.drawn(at["rows"], width)
    chosen = size - _idle(x, first) if op == "moe" else size
    every = [first, *(drawn() for _ in range(ground.layers(size, least=1, most=16) - 1))]
    truth = getattr(PLAIN, op)(x=x.to(WIDE), **_widened(first, WIDE), to=TO)

    def arm(name: str, run: Run, ops: Ops, peer: str = "") -> Arm:
        plain = _drawn(op, x, first, ground, ops)
        return Arm(name, lambda: [run(x=x, **given, to=TO) for given in every],
                   lambda: off(at["op"], run(x=x, **first, to=TO), truth, plain), len(every), peer=peer)  # fmt: skip

    flops = 2.0 * at["rows"] * size / ground.dtype.itemsize * (1 if op != "moe" else 0.0)  # rows choose few experts
    cell = Cell([arm(name, getattr(ops, op), ops) for name, ops in ground.sets.items()],
                read=chosen + x.numel() * x.element_size(),
                written=truth.numel() * (4.0 if op == "lm_head" else ground.dtype.itemsize), flops=flops)  # fmt: skip
    return peers("products", ground, at, cell, op=op, arm=arm)


KIND = Kind("a call", cells, make, x="rows")
