"""Addresses: which unit of which pool an op reads or writes.

A pool's physical layout is nothing but its strides: every op sees a state as [HV, K, V], and a `VK` pool is the
transposed view of memory that is [HV, V, K]. Leaves out: allocation (`memory/pool.py`).
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

StateLayout = Literal["VK", "KV"]


class Chance(NamedTuple):
    """Stochastic rounding (`Blocked.seed`): the counters of one layer, in addition to tokens and elements.

    first: number of a state's first element in the state of the whole model, of which a rank has some heads
    """

    seed: int
    layer: int
    first: int = 0


@dataclass(frozen=True)
class Address:
    """Units of a pool, one per request of a part.

    pool    [units, ...] or, with positions, [units, positions, ...]; strides are the pool's own
    units   [B] int64; -1: skip this request, read zeros, write nothing
    column  [B] int64, the position within the unit, or None: the unit has no positions, or
            (for `per_row`) position t of the window goes to column t
    scales  of a pool that is stored in tiles (`Blocked`): their scales, with the leading axes of the pool
    chance  stochastic rounding of the pool, with scales or without; None: rounding to nearest
    """

    pool: torch.Tensor
    units: torch.Tensor
    column: torch.Tensor | None = None
    scales: torch.Tensor | None = None
    chance: Chance | None = None


class Updates(NamedTuple):
    """A kept token, as its effect on a state: S <- decay S + k update^T. Running it again reads nothing from S.

    k [..., H, K] as the delta rule consumed it;  decay [..., HV] = exp(log_decay)
    update [..., HV, V] = beta (v - S^T k), with S after the decay
    """

    k: torch.Tensor
    decay: torch.Tensor
    update: torch.Tensor


class Inputs(NamedTuple):
    """A kept token, as the inputs of the delta rule: for kernels that do not return updates.

    k [..., H, K];  v [..., HV, V];  log_decay, beta [..., HV]
    """

    k: torch.Tensor
    v: torch.Tensor
    log_decay: torch.Tensor
    beta: torch.Tensor


class SplitUpdates(NamedTuple):
    """A kept token as in `Updates`, with k and update as a high and a low part of the same 16-bit dtype.

    high = x to nearest;  low = x - high to nearest, a difference that fp32 has exactly;  read: high + low, in fp32
    The decay has one part, in the dtype in which the recurrence computes. Both parts of a number have the same address
    in their pools.
    """

    k: torch.Tensor
    decay: torch.Tensor
    update: torch.Tensor
    k_low: torch.Tensor
    update_low: torch.Tensor


Keeps = Literal["update", "inputs", "split"]  # what the rings of an op set keep of a token
KEPT: dict[Keeps, type[Updates] | type[Inputs] | type[SplitUpdates]] = {
    "update": Updates, "inputs": Inputs, "split": SplitUpdates,
}
# Only the program that wrote these reads them. So their pools may have fewer entries than the ring (see `Ring`).
OWN = ("update", "v", "update_low")


@dataclass(frozen=True)
class Ring:
    """Tokens that are kept, per request and by position, so that they can be run again with the same bits.

    kept         the pools [units, size, ...]; strides the pools' own. Updates have the dtype in which the recurrence
                 computes, inputs that in which they are consumed, split updates 16 bits per part
    units        [B] int64, the unit of each request; -1: nothing is run again, nothing is kept
    begin        [B] int64, the entry (0 .. size-1) of the first token to run again
    pending      [B] int64, how many to run again, taken as 0 .. size; the j-th is in entry (begin + j) % size
    keep         [B] int64, the entry of row 0 of this launch; row t goes to (keep + t) % size; -1: rows are not kept

    A token is in entry position % size. So rows of a new window never fall on pending entries as long as
    pending + window <= size. They must not: programs of other heads may still read pending entries while one writes.

    The pool `own` (of updates, or of v) is different. Only the program that wrote an entry reads it, and it reads all
    pending tokens before it writes. So this pool may have fewer entries: a divisor of the size that holds a window. The
    entry is taken modulo their number. Example: size 8, own 4: the token at position 13 has its k and decay in entry 5
    and its update in entry 1.
    """

    kept: Updates | Inputs | SplitUpdates
    units: torch.Tensor
    begin: torch.Tensor
    pending: torch.Tensor
    keep: torch.Tensor

    @property
    def size(self) -> int:
        """Number of entries per unit."""
        return self.kept.k.shape[1]

    @property
    def own(self) -> torch.Tensor:
        """Return the pool that may have fewer entries: of updates, or of values."""
        return self.kept.v if isinstance(self.kept, Inputs) else self.kept.update


@dataclass(frozen=True)
class Part:
    """Some requests of a packed batch whose memory moves the same way.

    form    "chunk": a prefill chunk, chunked products; "window": token by token (verify and decode)
    begin   [B] int64, first packed row of each request
    count   [B] int64, its number of rows (0: none)
    most    the largest count, on the host
    read    the memory before the first row
    fresh   [B] bool; True: the request has no tokens yet. `read` must not be read, the memory is zeros
    store   target of the memory after the last row; None: not stored
    per_row target of the memory after every row t (column t); None: not stored
    ring    only for "window" parts of the delta rule: the kept tokens to run again first, and the target of the rows
    settled target of the memory after the kept tokens were run again, before row 0; None: not stored
    parents [N] int64, for windows that are trees: of each packed row the node whose memory it continues, as a number
            within its request's window; -1: the memory before the window. A parent comes before its children. Rows
            that no request covers may hold anything. None: every row continues the row before it. In a tree
            `store` is None: the memory after the last row belongs to no request
    before  [B] int64: committed tokens before the first row. Used only for stochastic rounding

    A request with pending tokens but no rows is a fold: its pending tokens run again, and the result is stored. A
    request with neither does nothing.
    """

    form: Literal["chunk", "window"]
    begin: torch.Tensor
    count: torch.Tensor
    most: int
    read: Address
    fresh: torch.Tensor
    store: Address | None = None
    per_row: Address | None = None
    ring: Ring | None = None
    settled: Address | None = None
    parents: torch.Tensor | None = None
    before: torch.Tensor | None = None

    def __post_init__(self) -> None:
        assert self.form == "window" or (self.ring is None and self.settled is None), "a prefill chunk has no ring"
        assert self.parents is None or (self.form == "window" and self.store is None), "a tree has no store"


@dataclass(frozen=True)
class Pages:
    """Paged KV of one layer, and the place of each request's positions in it.

    keys, values  [pages, page_size, kv_heads, head_dim], strides the pool's own
    table         [slots, width] int64, a view on the pool: every slot's page ids in order, -1 padded. No two requests
                  of one launch share a page
    slots         [B] int64: the request's line of the table; -1: it reads nothing, its rows are zeros
    begin, count  [B] int64: the packed query rows of each request
    before        [B] int64: positions in memory before the first of these rows;
                  row j of request b sees positions 0 .. before[b] + j
    most          the largest count, on the host; if only the device knows counts, the largest possible one
    ancestors     [N] int64, for windows that are trees: what each packed row sees after `before`. Bit n means
                  position before[b] + n, which holds node n; so a row sees positions 0 .. before[b] - 1 and those of
                  its bits, itself included. The value at a position that a row does not see is not used, not even
                  times zero: it may be NaN. The maximum is 63 nodes. A row with no bit at all is a row of a chain (or
                  of a prefill in the same batch), and so are all rows of its request: it sees positions as under
                  `before`. None: all rows are such rows
    nodes         maximum number of nodes of a window, on the host: no bit from there on is set. 0 without `ancestors`
    key_scales, value_scales  of pools that are stored in tiles: [pages, page_size, kv_heads, 1]
    full          whether every packed row belongs to a request, if the host knows; False: it does not know
    """

    keys: torch.Tensor
    values: torch.Tensor
    table: torch.Tensor
    slots: torch.Tensor
    begin: torch.Tensor
    count: torch.Tensor
    before: torch.Tensor
    most: int
    ancestors: torch.Tensor | None = None
    nodes: int = 0
    key_scales: torch.Tensor | None = None
    value_scales: torch.Tensor | None = None
    full: bool = False

    def expanded(self, query: torch.Tensor, up: torch.Tensor) -> tuple[int, int, int]:
        """Return the shape of what queries [N, heads, head_dim] read from latents that `up` expands: [N, heads, V]."""
        rows, heads, head_dim = query.shape
        return rows, heads, up.shape[0] // heads - head_dim + self.keys.shape[-1]
