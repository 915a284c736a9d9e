"""Runs of `instep bench` on a CPU whose rates are given, and peers that a test makes up.

Leaves out: what a run must find.
"""

import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import pytest
import torch

from instep_optimized.ops.op_protocols import Ops
from instep_speed.bench import kernels_of_peers
from instep_speed.bench.bench_types import Ground
from instep_speed.bench.interleaved_timing import Rates
from instep_speed.bench.run import Asked, Bench, bench
from support.inputs.outcomes import shown

CPU, FP32, MACHINE = torch.device("cpu"), torch.float32, Rates(1e10, 2e10, 1e11)


def ground(dtype: torch.dtype = FP32, peers: bool = True, **sets: Ops) -> Ground:
    return Ground(CPU, dtype, sets, MACHINE, 0, peers)


def measured_cells(ops: Ops | Mapping[str, Ops], *kinds: str, dtype: torch.dtype = FP32, **more: Any) -> Bench:
    """All cells of these kinds in the tiny grid; one op set is called `it`."""
    sets = {"it": ops} if isinstance(ops, Ops) else dict(ops)
    return bench(Asked(sets, "cpu", dtype, kinds, **{"size": "tiny", "peers": False} | more))


def text(found: Bench) -> str:
    return shown(found.result(), 250)


def make_up_peer(monkeypatch: pytest.MonkeyPatch, kind: str, maker: Callable[..., Any], name: str = "made up") -> None:
    """The only peer of a kind."""
    module: Any = ModuleType("made_up_peer")
    module.maker = maker
    monkeypatch.setitem(sys.modules, "made_up_peer", module)
    monkeypatch.setitem(kernels_of_peers.PEERS, kind, {name: "made_up_peer:maker"})
