"""The types of the benchmark: kinds of work, their cells, the arms of a cell, and the machine that they run on.

Leaves out: the kinds themselves (`kinds/`), and timing (`interleaved_timing.py`).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, Literal

import torch

from instep.campaign.shapes import shape
from instep_optimized.ops.op_protocols import Ops
from instep_reference.contract.config import ModelConfig
from instep_reference.contract.errors import BadInput
from instep_reference.contract.place_names import Place

from .answer_check import Judged
from .interleaved_timing import Rates

At = Mapping[str, Any]  # a cell of a grid, by its axes: {"batch": 8, "window": 4, ..}
Size = Literal["tiny", "default", "full"]
TO = Place("trunk", 0, "core")  # timed work has no observer
REAL, TINY = (16, 128, 128), (2, 16, 16)  # key heads, K, V: those of Qwen3-Next and Qwen3.5, and small ones for a CPU
SEED = 0
TOO = ", norms and gates too"  # suffix of our arms that include the norms and gates of a peer's kernel


@dataclass(frozen=True)
class Ground:
    """The machine and the settings with which a grid is measured.

    sets   the op sets, by the name that the user typed
    rates  bandwidth and product rate of this machine, measured first
    past   minimum bytes that one sample walks through: more than the last-level cache holds
    ranks  over which whole rounds are measured, next to one rank; 1: no ranks are measured
    """

    device: torch.device
    dtype: torch.dtype
    sets: Mapping[str, Ops]
    rates: Rates
    past: int
    peers: bool = True
    ranks: int = 1

    @property
    def card(self) -> bool:
        return self.device.type == "cuda"

    @property
    def tiny(self) -> bool:
        """Whether to use the smallest shapes, because a CPU is slow."""
        return not self.card

    def config(self, value_heads: int, layers: int) -> ModelConfig:
        """A model that consists of this many GDN layers."""
        heads, key_dim, value_dim = TINY if self.tiny else REAL
        whole = shape("qwen3.5-9b")
        return replace(
            whole, layers=(whole.layers[whole.recurrent[0]],) * layers, value_heads=value_heads, mtp_layers=0,
            hidden=64, key_heads=heads, key_dim=key_dim, value_dim=value_dim,
        )

    def layers(self, bytes_each: float, least: int = 2, most: int = 48) -> int:
        """The number of layers that a sample walks through, so that the cache holds none of their memory."""
        return least if self.tiny else max(least, min(most, int(-(-self.past // max(1, bytes_each)))))

    def drawn(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.randn(shape, device=self.device, dtype=torch.float32).to(dtype or self.dtype)

    def ints(self, values: Any) -> torch.Tensor:
        return torch.tensor(list(values), dtype=torch.int64, device=self.device)


@dataclass
class Arm:
    """One contender of a cell.

    work    the timed function: does the same work `units` times and returns the answers, if it shows them
    less    a function whose time is subtracted, sample by sample
    check   returns what is wrong with the answers, in words; empty: they are right. It runs before the timing, and
            again after it, following `anew`
    period  number of calls of `work` after which its behaviour repeats: some work stores only every few calls
    anew    resets the memory that `work` and `check` change and that no other arm shares
    peer    "package version" of another project. Its time is printed even if it is wrong; ours then has no time
    samples  for an arm that times itself: returns seconds of each of its units
    more    returns further fields of the result, after timing
    """

    name: str
    work: Callable[[], object] | None
    check: Callable[[], str | Judged]
    units: int = 1
    less: Callable[[], object] | None = None
    period: int = 1
    anew: Callable[[], object] = lambda: None
    peer: str = ""
    samples: Callable[[int], list[float]] | None = None
    more: Callable[[], dict[str, Any]] = dict

    def judged(self) -> Judged:
        """The result of the check; a check that measures no errors returns words alone."""
        said = self.check()
        return said if isinstance(said, Judged) else Judged(said)


@dataclass
class Cell:
    """The arms of a cell, and the minimum that one unit of its work must move and multiply.

    read, written  bytes
    flops          operations of products
    absent         arm -> why it is missing
    anew           resets memory that arms share, as `Arm.anew` does
    waits          returns seconds that the floor has in addition, known after the timing: of collectives
    """

    arms: list[Arm]
    read: float = 0.0
    written: float = 0.0
    flops: float = 0.0
    absent: dict[str, str] = field(default_factory=dict)
    anew: Callable[[], object] = lambda: None
    waits: Callable[[], float] = lambda: 0.0


@dataclass(frozen=True)
class Kind:
    """A kind of work.

    unit   the unit of a time, as the head of its table prints it
    cells  the grid, most important cells first; it never depends on a measurement
    make   builds a cell; raises `Unsupported` for one that does not exist
    x      the axis of its plot
    bar    the peer's arm whose errors ours may not exceed; the table reports a larger error
    """

    unit: str
    cells: Callable[[Ground, Size], Iterator[At]]
    make: Callable[[Ground, At], Cell]
    x: str = "batch"
    bar: str = ""


def key(at: At) -> str:
    """Format a cell: batch 8, window 4"""
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in at.items())


# ---- the axes of the grids: batches, windows, heads, and how states are stored

BATCHES = {"tiny": (1, 2), "default": (1, 8, 32, 64, 128), "full": (1, 2, 4, 8, 16, 32, 64, 128)}
WINDOWS = {"tiny": (3,), "default": (4, 8, 2), "full": (1, 2, 3, 4, 5, 6, 7, 8)}
HEADS = {"tiny": (4,), "default": (32, 64, 16), "full": (16, 24, 32, 48, 64)}
STATES = {"tiny": ("float32",), "default": ("float32", "bfloat16"), "full": ("float32", "bfloat16")}


def batches_and_heads(
    ground: Ground, size: Size, few: tuple[int, ...] = (), **more: tuple[Any, ...]
) -> Iterator[At]:
    """Yield cells of batch, the axes of `more`, heads and state.

    The default grid varies one axis at a time in addition to the batch.
    few: the batches for which the default grid varies the other axes; by default all
    """
    axes: dict[str, tuple[Any, ...]] = {**more, "heads": HEADS[size], "state": STATES[size]}
    rest = list(product(*axes.values()))
    if size == "default":
        first = rest[0]
        rest = [one for one in rest if sum(x != y for x, y in zip(one, first, strict=True)) <= 1]
    for values in rest:
        for batch in few if few and size == "default" and values != rest[0] else BATCHES[size]:
            yield {"batch": batch, **dict(zip(axes, values, strict=True))}


def state_dtype(at: At) -> torch.dtype:
    found = getattr(torch, at["state"])
    if not isinstance(found, torch.dtype):
        raise BadInput("state", found=at["state"], expected="a dtype")
    return found
