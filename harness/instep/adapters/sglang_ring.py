"""SGLang's ring of a GDN verify, called as the released engine calls it: a commit strategy, and the op that fills it.

With `--enable-linear-replayssm-spec` (0.5.16: `--enable-gdn-replayssm-spec`) SGLang stores no state after every row of
a window. A verify keeps what it needs of every token in a ring, and a fold makes the accepted tokens part of the state.
The installed release decides which ring it is:

    0.5.16            by slot; `gdn_replayssm_spec_decode` of the next verify folds a row that has no room for two more
                      windows (`is_flush`)
    0.5.17 to 0.5.19  by slot; one window; `commit_gdn_replayssm_fold_all_layers` folds at every commit
    0.5.20 to 0.5.23  by request row; `commit_gdn_replayssm_circular` folds rows without room at the commit

Each call has the arguments of `gdn_backend.py` (verify) and `spec_utils.commit_mamba_states_after_verify` (commit). A
decode is a verify and a commit of one token, as SGLang serves a round of 0 steps. The margin of the flush is that of
the round in force: `max_spec_len` is its number of draft tokens. Leaves out: conv windows, radix cache, trees.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from inspect import signature
from itertools import pairwise
from typing import Any, Literal

import torch

from instep_optimized.commit.base import AcceptedWindows, BoundStrategy, StrategySpec, Table, Which
from instep_optimized.commit.slot_marks import Marks
from instep_optimized.memory import Memory
from instep_optimized.memory.budget import Sizes, mark, units
from instep_optimized.memory.pool import Demand
from instep_optimized.memory.tiled_units import Copied, taken
from instep_optimized.memory_addresses import Part
from instep_optimized.ops.op_protocols import Ops
from instep_optimized.ops.plain.gdn import gdn as plain_gdn
from instep_optimized.ops.plain.gdn import gdn_inputs as plain_inputs
from instep_optimized.packed_batch import Batch, Group
from instep_reference.contract.config import ModelConfig
from instep_reference.contract.errors import Unsupported
from instep_reference.contract.place_names import Place
from instep_reference.contract.pool_meaning import Meaning
from instep_reference.contract.recurrences import GDN

from ..watch.kernel_calls import adapts, called
from .sglang import BASE, GATED, NOW, take

ENTRIES = 16  # of a circular ring: the default of `linear_replayssm_cache_len`
NULL = -1  # `null_block_id`: the index of a row that pads a batch
NAME = "sglang ring"
ROW = "ring_request_row"  # pool of marks: the request row of every slot
CURSORS = ("write_pos", "cache_base", "is_flush")
CURSOR_TYPES = (torch.int32, torch.int32, torch.int8)
PLACES = (f"{NOW}.attention.linear", f"{NOW}.attention.fla")  # since 0.5.23, and before
Pools = Mapping[str, torch.Tensor]


@cache
def _take(name: str, module: str) -> Any:
    return take(name, *(f"{place}.{module}" for place in PLACES))


@dataclass(frozen=True)
class Cursors:
    """Dense copies of the cursors of a ring, which SGLang keeps in vectors. `back` stores what a kernel has changed.

    units  the engine's pools [units, 1], in the order of `CURSORS`
    """

    units: tuple[torch.Tensor, ...]

    def dense(self) -> dict[str, torch.Tensor]:
        found = zip(CURSORS, self.units, CURSOR_TYPES, strict=True)
        return {name: pool[:, 0].to(kind) for name, pool, kind in found}

    def back(self, before: Pools, after: Pools) -> None:
        for name, pool in zip(CURSORS, self.units, strict=True):
            pool[:, 0] = torch.where(after[name] != before[name], after[name].to(pool.dtype), pool[:, 0])


@dataclass(frozen=True)
class RingPart(Part):
    """A part of a `gdn` call whose rows also go to the ring.

    kind     the release's ring;  width: the draft tokens of the round in force
    rings    the layer's pools of the ring, by SGLang's names
    rows     request row of each request; of an idle one any number
    """

    kind: "Ring | None" = None
    width: int = 1
    rings: Pools = field(default_factory=dict)
    cursors: Cursors | None = None
    rows: torch.Tensor | None = None


@dataclass(frozen=True)
class Rows:
    """The packed rows of a verify as SGLang has them: split, after the conv, before norms and gates."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    A_log: torch.Tensor
    dt_bias: torch.Tensor
    starts: torch.Tensor
    bound: float | None = None


class Ring:
    """A ring of one release: its pools, and the calls of a verify, a commit and a fold.

    op: the recurrence whose verify fills it
    """

    op = GDN.name
    by: Literal["slot", "request"] = "slot"
    circular = True
    verify_writes: tuple[str, ...] = ()  # in addition to the rings
    commit_writes: tuple[str, ...] = ("state",)

    def pools(self, config: ModelConfig, sizes: Sizes) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Name -> shape of a unit, and dtype. `MambaPool` allocates them so."""
        heads, keys, kept = config.value_heads, config.key_heads, self.entries(sizes)
        narrow, wide = sizes.types.conv, torch.float32
        d, k, g = (heads, kept, config.value_dim), (keys, kept, config.key_dim), (heads, kept)
        raw = {"rawv": (d, narrow), "rawk": (k, narrow), "beta": (g, wide)}
        return {"d": (d, narrow), "k": (k, narrow), "g": (g, wide)} | raw

    def entries(self, sizes: Sizes) -> int:
        """Entries of a ring. 0.5.16 refuses a ring without room for two of the widest windows."""
        if 2 * sizes.widest > ENTRIES:
            raise Unsupported(f"a ring of {ENTRIES} entries and windows of {sizes.widest} tokens: SGLang 0.5.16 "
                              f"requires room for two windows")  # fmt: skip
        return ENTRIES

    def verify(self, rows: Rows, state: torch.Tensor, part: RingPart) -> torch.Tensor:
        """Compute the read-outs of the windows, and keep their tokens. state: [units, HV, V, K]."""
        raise NotImplementedError

    def commit(self, state: torch.Tensor, rings: Pools, cursors: Pools, who: "AcceptedRows", width: int) -> None:
        """Commit accepted tokens in every layer. state, rings: [layers, units, ..]."""
        raise NotImplementedError

    def fold(self, state: torch.Tensor, rings: Pools, cursors: Pools) -> None:
        """Fold all pending tokens of unit 0 into copies of its memory, by the release's own fold."""
        raise NotImplementedError


@dataclass(frozen=True)
class AcceptedRows:
    """Requests of a commit, [B]: slots and request rows (-1: idle), and how many tokens each has accepted."""

    slots: torch.Tensor
    rows: torch.Tensor
    lens: torch.Tensor


class FoldedNextVerify(Ring):
    """0.5.16: circular and by slot; the next verify folds a flagged row."""

    verify_writes = ("state",)
    commit_writes = ()

    def verify(self, rows: Rows, state: torch.Tensor, part: RingPart) -> torch.Tensor:
        assert part.cursors is not None
        return _decode(rows, state, part, ssm_state_indices=part.read.units.int(), **part.cursors.dense())

    def commit(self, state: torch.Tensor, rings: Pools, cursors: Pools, who: AcceptedRows, width: int) -> None:
        _take("commit_gdn_replayssm_spec", "gdn_replayssm_spec_decode")(
            **cursors, num_accepted=who.lens.int(), state_batch_indices=who.slots, max_cache_len=rings["d"].shape[-2],
            max_spec_len=width, null_block_id=NULL,
        )  # fmt: skip

    def fold(self, state: torch.Tensor, rings: Pools, cursors: Pools) -> None:
        launch = _take("_launch_gdn_exact_fold", "gdn_replayssm_spec_decode")
        zero = torch.zeros(1, dtype=torch.int32, device=state.device)
        for layer in range(len(state)):
            raw = {f"{name}_cache": rings[name][layer] for name in ("rawv", "rawk", "g", "beta")}
            launch(
                checkpoint_state=state[layer], **raw, query_start_loc=zero.repeat(2), ssm_state_indices=zero,
                write_pos=cursors["write_pos"], cache_base=cursors["cache_base"],
                is_flush=torch.ones_like(cursors["is_flush"]), max_cache_len=ENTRIES, use_qk_l2norm_in_kernel=True,
                null_block_id=NULL, num_k_heads=rings["rawk"].shape[2],
            )  # fmt: skip


class FoldedEveryCommit(Ring):
    """0.5.17 to 0.5.19: one window by slot, folded at every commit. It has no cursors."""

    circular = False

    def pools(self, config: ModelConfig, sizes: Sizes) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {name: one for name, one in super().pools(config, sizes).items() if name not in ("d", "k")}

    def entries(self, sizes: Sizes) -> int:
        return sizes.widest

    def verify(self, rows: Rows, state: torch.Tensor, part: RingPart) -> torch.Tensor:
        core: torch.Tensor = GATED(
            A_log=rows.A_log, dt_bias=rows.dt_bias, q=rows.q[None], k=rows.k[None], v=rows.v[None], a=rows.a, b=rows.b,
            initial_state_source=state, initial_state_indices=part.read.units.int(), cu_seqlens=rows.starts,
            use_qk_l2norm_in_kernel=True, softplus_beta=1.0, softplus_threshold=20.0, is_kda=False,
            disable_state_update=True, cache_ring=True,
            **{f"replayssm_{name}": part.rings[name] for name in ("rawv", "rawk", "g", "beta")},
        )  # fmt: skip
        return core[0]

    def commit(self, state: torch.Tensor, rings: Pools, cursors: Pools, who: AcceptedRows, width: int) -> None:
        _take("commit_gdn_replayssm_fold_all_layers", "gdn_replayssm_spec_fold")(
            checkpoint_state=state, **{f"{name}_cache": rings[name] for name in ("rawv", "rawk", "g", "beta")},
            ssm_state_indices=who.slots, accept_lens=who.lens.int(), max_cache_len=rings["rawv"].shape[-2],
            num_k_heads=rings["rawk"].shape[2], mamba_track_indices=None, mamba_steps_to_track=None,
            null_block_id=NULL,
        )  # fmt: skip


class FoldedAtCommit(Ring):
    """0.5.20 to 0.5.23: circular and by request row; a commit folds the rows that it has flagged."""

    by: Literal["slot", "request"] = "request"

    def pools(self, config: ModelConfig, sizes: Sizes) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Low parts of d and k, under the names of the raw rows, if the ring is narrower than fp32."""
        low = ("rawv", "rawk") if sizes.types.conv is not torch.float32 else ()
        return {name: one for name, one in super().pools(config, sizes).items() if name in ("d", "k", "g", *low)}

    def entries(self, sizes: Sizes) -> int:
        return ENTRIES  # whatever the widest window: the release asks for room for two windows only with KDA

    def verify(self, rows: Rows, state: torch.Tensor, part: RingPart) -> torch.Tensor:
        assert part.cursors is not None and part.rows is not None
        slots = part.read.units
        own = part.rows.where(slots >= 0, NULL)
        return _decode(rows, state, part, ssm_state_indices=slots.int(), replay_indices=own, launch_mode="verify",
                       **part.cursors.dense())  # fmt: skip

    def commit(self, state: torch.Tensor, rings: Pools, cursors: Pools, who: AcceptedRows, width: int) -> None:
        lens = who.lens.int()
        _take("commit_gdn_replayssm_spec", "gdn_replayssm_spec_decode")(
            **cursors, num_accepted=lens, replay_indices=who.rows, max_cache_len=rings["d"].shape[-2],
            max_spec_len=width, fold_every_commit=state.dtype != torch.float32, null_block_id=NULL,
        )  # fmt: skip
        self._fold(state, rings, cursors, who.slots, who.rows, lens)

    def fold(self, state: torch.Tensor, rings: Pools, cursors: Pools) -> None:
        zero = torch.zeros(1, dtype=torch.int64, device=state.device)
        self._fold(state, rings, {**cursors, "is_flush": torch.ones_like(cursors["is_flush"])}, zero, zero, zero.int())

    def _fold(
        self, state: torch.Tensor, rings: Pools, cursors: Pools, slots: torch.Tensor, rows: torch.Tensor,
        lens: torch.Tensor,
    ) -> None:
        _take("commit_gdn_replayssm_circular", "gdn_replayssm_spec_decode")(
            checkpoint_state=state, d_cache=rings["d"], k_cache=rings["k"], g_cache=rings["g"],
            d_residual_cache=rings.get("rawv"), k_residual_cache=rings.get("rawk"), state_batch_indices=slots,
            replay_indices=rows, **cursors, accept_lens=lens, mamba_track_indices=None, mamba_steps_to_track=None,
            null_block_id=NULL,
        )  # fmt: skip


def _decode(rows: Rows, state: torch.Tensor, part: RingPart, **given: Any) -> torch.Tensor:
    """Call `gdn_replayssm_spec_decode`, the verify of both circular rings."""
    out = rows.q.new_empty(rows.v.shape)
    caches = {f"{name}_cache": part.rings.get(name) for name in ("d", "k", "g", "rawv", "rawk", "beta")}
    _take("gdn_replayssm_spec_decode", "gdn_replayssm_spec_decode")(
        q=rows.q, k=rows.k, v=rows.v, a=rows.a, b=rows.b, A_log=rows.A_log, dt_bias=rows.dt_bias,
        checkpoint_state=state, **caches, out=out, query_start_loc=rows.starts, max_cache_len=ENTRIES,
        max_spec_len=part.width, scale=rows.k.shape[-1] ** -0.5, use_qk_l2norm_in_kernel=True, null_block_id=NULL,
        **given,
    )  # fmt: skip
    return out


def ring_of_release() -> Ring:
    """The ring of the release that is found, by the functions that it has."""
    try:
        decode = import_module(_take("gdn_replayssm_spec_decode", "gdn_replayssm_spec_decode").__module__)
    except ModuleNotFoundError:
        raise Unsupported("SGLang's ring of a GDN verify: this release has none (since 0.5.16)") from None
    if hasattr(decode, "commit_gdn_replayssm_circular"):
        found = signature(decode.commit_gdn_replayssm_circular).parameters
        if "replay_indices" not in found:
            raise Unsupported("a circular ring that is folded at the commit and kept by slot: no release has one")
        return FoldedAtCommit()
    try:
        _take("commit_gdn_replayssm_fold_all_layers", "gdn_replayssm_spec_fold")
    except ModuleNotFoundError:
        return FoldedNextVerify()
    return FoldedEveryCommit()


def gated(
    *, mixed: torch.Tensor, a: torch.Tensor, b: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor,
    key_heads: int, key_dim: int, parts: tuple[Part, ...], dtype: torch.dtype, to: Place,
) -> torch.Tensor:
    """The op `fused_gdn`: windows by SGLang's verify, which fills the ring; prompts by `plain`."""
    adapts(GDN.name, {"window": gated, "chunk": None})
    given: dict[str, Any] = {"mixed": mixed, "a": a, "b": b, "A_log": A_log, "dt_bias": dt_bias}
    left = tuple(part for part in parts if not isinstance(part, RingPart))
    heads, count = len(A_log), len(mixed)
    core = mixed.new_zeros(count, heads, (mixed.shape[1] - 2 * key_heads * key_dim) // heads, dtype=dtype)
    if left:
        inputs = plain_inputs(**given, key_heads=key_heads, key_dim=key_dim, to=(to,) * 5)
        core = plain_gdn(inputs=inputs, parts=left, dtype=dtype, to=to)
    for part in parts:
        if isinstance(part, RingPart) and len(part.begin):
            verified(part, core, key_heads, key_dim, **given)
    return core


def verified(
    part: RingPart, core: torch.Tensor, key_heads: int, key_dim: int, *, mixed: torch.Tensor, a: torch.Tensor,
    b: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor, decay_bound: float | None = None,
) -> None:
    """Serve the windows of a part, which all have `most` rows. Nothing is read on the host, so a graph may hold it."""
    assert part.kind is not None
    state = part.read.pool.mT
    if state.stride(-1) != 1:
        raise Unsupported("SGLang's states are [HV, V, K]: use --layout VK")
    idle, most, keys = part.read.units < 0, part.most, key_heads * key_dim
    index = (part.begin[:, None] + torch.arange(most, device=mixed.device)).clamp(max=len(mixed) - 1).flatten()
    packed = mixed[index]
    q, k = (x.reshape(-1, key_heads, key_dim).contiguous() for x in (packed[:, :keys], packed[:, keys : 2 * keys]))
    starts = torch.arange(0, len(index) + 1, most, device=mixed.device, dtype=torch.int32)
    rows = Rows(q, k, packed[:, 2 * keys :].reshape(-1, *core.shape[1:]).contiguous(), a[index], b[index], A_log,
                dt_bias, starts, decay_bound)  # fmt: skip
    called(f"{part.kind.op}.window", [most] * len(part.begin))
    out = part.kind.verify(rows, state, part).to(core.dtype)
    kept = core[index]
    core[index] = torch.where(idle.repeat_interleave(most)[:, None, None], kept, out)


def commit(
    *, pool: torch.Tensor, layers: tuple[torch.Tensor, ...], rings: Mapping[str, tuple[torch.Tensor, ...]],
    cursors: Cursors | None, kind: Ring, slots: torch.Tensor, rows: torch.Tensor, lens: torch.Tensor, width: int,
) -> None:
    """The commit of SGLang: cursors move, and what the release folds becomes part of the states.

    pool: states of the first layer, which names the written memory;  layers: those of every layer
    """
    who = AcceptedRows(slots, rows.where(slots >= 0, NULL), lens)
    before = {} if cursors is None else cursors.dense()
    after = {name: one.clone() for name, one in before.items()}
    states = stacked([layer.mT for layer in layers])
    kind.commit(states, {name: stacked(pools) for name, pools in rings.items()}, after, who, width)
    if cursors is not None:
        cursors.back(before, after)


def stacked(layers: tuple[torch.Tensor, ...] | list[torch.Tensor]) -> torch.Tensor:
    """One view [layers, units, ..] of pools of layers that are evenly spaced in one allocation."""
    first, size = layers[0], layers[0].element_size()
    steps = {(two.data_ptr() - one.data_ptr()) // size for one, two in pairwise(layers)}
    if len(steps) > 1:
        raise Unsupported("layers that are not evenly spaced in memory")
    return first.as_strided((len(layers), *first.shape), (*steps, *first.stride()) if steps else (0, *first.stride()))


def must_have_narrow_rows(kind: Ring, rows: torch.dtype, device: torch.device) -> None:
    """Refuse fp32 rows on a card if the commit folds: that fold multiplies them in tf32, and SGLang's are narrow.

    An error of tf32 in a state has the direction of no mistake, so T2d would call such a ring wrong.
    """
    if isinstance(kind, FoldedAtCommit) and rows is torch.float32 and device.type == "cuda":
        raise Unsupported("SGLang's ring of this release with fp32 rows on a card, which its fold rounds to tf32: use "
                          "--dtype bfloat16, as SGLang serves")  # fmt: skip


class RingKeeper:
    """The commit strategy: the slot has a checkpoint, and the ring has the tokens that follow it.

    release  returns the ring of the release that is found
    filled   the name of the op set that fills it
    """

    release: Callable[[], Ring] = staticmethod(ring_of_release)
    filled = NAME

    def __init__(self, config: ModelConfig, sizes: Sizes, memory: Memory, width: int) -> None:
        self.kind, self.width, self.memory = self.release(), width, memory
        must_have_narrow_rows(self.kind, sizes.types.conv, memory.device)
        names = [*self.kind.pools(config, sizes)]
        self.states = {layer: memory["state"].units(layer) for layer in memory.layers("state")}
        self.rings = {layer: {name: memory[f"ring_{name}"].units(layer) for name in names} for layer in self.states}
        cursors = tuple(memory[f"ring_{name}"].units(0) for name in CURSORS) if self.kind.circular else ()
        self.cursors = Cursors(cursors) if cursors else None
        self.rows = Marks(memory[ROW].units(0)) if self.kind.by == "request" else None
        self.may = _may(self.kind, names)

    @classmethod
    def demands(cls, config: ModelConfig, sizes: Sizes) -> tuple[Demand, ...]:
        kind, state = cls.release(), units("state", config, sizes)
        if sizes.types.state is not torch.float32 and not isinstance(kind, FoldedAtCommit):
            raise Unsupported("SGLang's ring of this release needs states in fp32")
        count = len(sizes.capacity.slots) + 1 if kind.by == "request" else state.units
        one = replace(state, by=kind.by, units=count, transposed=False, tiles=None, means=Meaning("state"))
        rings = [replace(one, name=f"ring_{name}", shape=shape, dtype=dtype)
                 for name, (shape, dtype) in kind.pools(config, sizes).items()]  # fmt: skip
        cell = replace(one, layers=(0,), shape=(1,), dtype=torch.int64, means=Meaning("length"))
        cursors = [replace(cell, name=f"ring_{name}") for name in CURSORS] if kind.circular else []
        return state, *rings, *cursors, *([mark(ROW, sizes)] if kind.by == "request" else [])

    def bind(self, ops: Ops, batch: Batch) -> BoundStrategy:
        if ops.name != self.filled:
            why = f"SGLang's ring with the op set {ops.name!r}, which does not fill it"
            raise Unsupported(f"{why}: use {self.filled!r}")
        rows = [self._rows(ops, group.slots) for group in batch.groups]

        def ran(ops: Ops) -> None:
            for group, own in zip(batch.groups, rows, strict=True):
                if group.kind == "decode":
                    self._commit(ops, group.slots, own, group.count)

        return BoundStrategy(
            lambda layer: tuple(self._part(layer, *one) for one in zip(batch.groups, rows, strict=True)), ran)

    def commit(self, ops: Ops, accepted: AcceptedWindows) -> None:
        self._commit(ops, accepted.slots, self._rows(ops, accepted.slots), accepted.lens)

    def peek(self, ops: Ops, slot: int, length: int) -> dict[int, Copied]:
        """Copies of the states, with the pending tokens folded into them by the release's fold."""
        found = {layer: taken(state[slot], length) for layer, state in self.states.items()}
        if self.cursors is None or not length:
            return dict(found)
        unit = self._unit(slot)
        cursors = {name: one[unit : unit + 1] for name, one in self.cursors.dense().items()}
        state = torch.stack([one.mT for one in found.values()])[:, None].contiguous()
        names = next(iter(self.rings.values()))
        rings = {name: torch.stack([ring[name][unit] for ring in self.rings.values()])[:, None] for name in names}
        self.kind.fold(state, rings, cursors)
        return {layer: one[0].mT.contiguous() for layer, one in zip(found, state, strict=True)}

    def restore(self, slot: int, length: int, units: Mapping[int, Copied]) -> None:
        self._empty(slot)
        for layer in self.states if length else ():
            self.memory.units("state", layer).put((slot,), units[layer])

    def claim(self, slot: int) -> None:
        """A request that gets a slot and a row begins with an empty ring. SGLang allocates its rings as zeros."""
        if self.rows is not None:
            self.rows.put(slot, self._unit(slot))
        self._empty(slot)
        for rings in self.rings.values():
            for ring in rings.values():
                ring[self._unit(slot)].zero_()

    def _empty(self, slot: int) -> None:
        for cursor in () if self.cursors is None else self.cursors.units:
            cursor[self._unit(slot)].zero_()

    def _unit(self, slot: int) -> int:
        """The unit of the ring of the request in a slot."""
        return slot if self.rows is None else self.memory.request_row_at(slot)

    def _rows(self, ops: Ops, slots: torch.Tensor) -> torch.Tensor:
        """Request rows of slots; of an idle one any number, since a graph holds ops and views only."""
        return slots if self.rows is None else self.rows.read(ops, slots)

    def _part(self, layer: int, group: Group, rows: torch.Tensor) -> Part:
        own = self.memory.units("state", layer).at(group.slots)
        if group.kind == "prefill":
            return group.part(own, store=own)
        part = group.part(own)
        return RingPart(**vars(part), kind=self.kind, width=self.width, rings=self.rings[layer], cursors=self.cursors,
                        rows=rows)  # fmt: skip

    def _commit(self, ops: Ops, slots: torch.Tensor, rows: torch.Tensor, lens: torch.Tensor) -> None:
        names = next(iter(self.rings.values()))
        states = tuple(self.states.values())
        ops.own["ring_commit"](
            pool=states[0], layers=states, rings={name: tuple(ring[name] for ring in self.rings.values())
                                                  for name in names},
            cursors=self.cursors, kind=self.kind, slots=slots, rows=rows, lens=lens, width=self.width,
        )  # fmt: skip


def _may(kind: Ring, names: list[str]) -> Table:
    """The table of writes of a release's ring."""
    rings: dict[str, Which] = dict.fromkeys([f"ring_{name}" for name in names], kind.by)
    cursors: dict[str, Which] = dict.fromkeys([f"ring_{name}" for name in CURSORS], kind.by) if kind.circular else {}
    row: dict[str, Which] = {ROW: "slot"} if kind.by == "request" else {}
    state: dict[str, Which] = {"state": "slot"}
    verify = rings | (state if "state" in kind.verify_writes else {})
    commit = cursors | (state if "state" in kind.commit_writes else {})
    return {
        "claim": rings | cursors | row, "prefill": state, "verify": verify, "decode": verify | commit | cursors,
        "commit": commit, "release": state | rings | cursors | row, "restore": state | cursors,
    }


OWN: dict[str, Callable[..., Any]] = {"ring_commit": commit}
KEEPER = StrategySpec(
    RingKeeper.demands, RingKeeper, "state", OWN,  # type: ignore[arg-type]  # no `peek_node`: no prefix is tracked
)
RING = replace(
    BASE, name=NAME, fused_gdn=gated, keeps="inputs", tiled=False, trees=False, keepers={"sglang_ring": KEEPER},
    products={form: product for form, product in BASE.products.items() if not form.startswith("gdn.")},
)
