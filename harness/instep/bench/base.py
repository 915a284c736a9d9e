"""What the benchmark is made of: kinds of work, their cells, the arms of a cell, and the ground they run on.

Leaves out: every particular kind (`kinds/`), and time (`clock.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from instep_optimized.ops.base import Ops
from instep_reference.contract.config import LayerKind, ModelConfig
from instep_reference.contract.place import Place

from ..shapes import shape
from .clock import Rates
from .right import Judged

At = Mapping[str, Any]  # a cell of a grid, by its axes: {"batch": 8, "window": 4, ..}
Size = Literal["tiny", "default", "full"]
TO = Place("trunk", 0, "core")  # nobody watches what is timed
REAL, TINY = (16, 128, 128), (2, 16, 16)  # key heads, K, V: of Qwen3-Next and Qwen3.5; and so that nobody waits
SEED = 0
TOO = ", norms and gates too"  # ends the name of an arm of ours that does all that a peer's kernel does inside


@dataclass(frozen=True)
class Ground:
    """Where and with what a grid is measured.

    sets   the op sets, by the name under which they were asked for
    rates  what this machine moves and multiplies, measured before anything else
    past   bytes that one sample walks through at least: more than the last cache holds
    """

    device: torch.device
    dtype: torch.dtype
    sets: Mapping[str, Ops]
    rates: Rates
    past: int
    peers: bool = True

    @property
    def card(self) -> bool:
        return self.device.type == "cuda"

    @property
    def tiny(self) -> bool:
        """Whether shapes are as small as they can be: nobody waits for a CPU."""
        return not self.card

    def config(self, value_heads: int, layers: int) -> ModelConfig:
        """A model of so many GDN layers and nothing else."""
        heads, key_dim, value_dim = TINY if self.tiny else REAL
        kinds: tuple[LayerKind, ...] = tuple("gdn" for _ in range(layers))
        return replace(
            shape("qwen3.5-9b"), layer_kinds=kinds, value_heads=value_heads, mtp_layers=0, hidden=64, key_heads=heads,
            key_dim=key_dim, value_dim=value_dim,
        )

    def layers(self, bytes_each: float, least: int = 2, most: int = 48) -> int:
        """How many layers a sample walks through, so that none of their memory is still in the cache."""
        return least if self.tiny else max(least, min(most, int(-(-self.past // max(1, bytes_each)))))

    def drawn(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.randn(shape, device=self.device, dtype=torch.float32).to(dtype or self.dtype)

    def ints(self, values: Any) -> torch.Tensor:
        return torch.tensor(list(values), dtype=torch.int64, device=self.device)


@dataclass
class Arm:
    """One contender of a cell.

    work    what is timed: `units` times the same work -> its answers, if it shows them.  less: what is subtracted,
            sample by sample; not part of it
    check   what is wrong with its answers, in words; empty: they are right. It is called before anything is timed, and
            behind `anew` once more when all is timed
    period  turns of `work` after which it repeats what it does: it stores something only so often
    anew    makes the memory that `work` and `check` change, and no other arm has, as it was, or alike each time
    peer    somebody else's, as "package version": its time is told beside what is wrong with it. Ours then has no time
    samples  an arm that keeps time itself: seconds of each of its units.  more: what else it tells, once it was timed
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
        """What its check says; a check that measures no errors gives words alone."""
        said = self.check()
        return said if isinstance(said, Judged) else Judged(said)


@dataclass
class Cell:
    """The arms of a cell, and the least that one unit of its work must move and multiply.

    read, written  bytes;  flops: of products.  absent: arm -> why it is not there
    anew  as that of an arm, of the memory that arms share
    """

    arms: list[Arm]
    read: float = 0.0
    written: float = 0.0
    flops: float = 0.0
    absent: dict[str, str] = field(default_factory=dict)
    anew: Callable[[], object] = lambda: None


@dataclass(frozen=True)
class Kind:
    """A kind of work.

    unit   what a time is of, as the head of its table says it
    cells  the grid, what matters most first; it never depends on what is measured
    make   builds a cell. It raises `Unsupported` for one that does not exist
    x      the axis of its plot
    bar    the peer's arm whose errors ours may not exceed; where it is there and one does, the table says so
    """

    unit: str
    cells: Callable[[Ground, Size], Iterator[At]]
    make: Callable[[Ground, At], Cell]
    x: str = "batch"
    bar: str = ""


def key(at: At) -> str:
    """A cell in words: batch 8, window 4"""
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in at.items())
