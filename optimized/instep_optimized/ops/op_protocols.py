"""The seam: every operation of the optimized engine, with its contract.

An op set is a frozen value of keyword-only functions, swapped by `dataclasses.replace`. Leaves out: all arithmetic.

Rules for every op:
  - results are new tensors; only memory (a pool) is written in place, and at most one component of it
    (a fusion: what its parts write)
  - strides, counts and pitches are read from the tensors that are given, never computed from sizes
  - rows that no part covers, and requests whose unit is -1, give zeros; an empty batch returns at once

Alphabet: N packed rows of the event, B requests of a part, D hidden, H/HV key/value heads, K/V their widths,
C = 2HK + HV*V conv channels, W conv width, M rows that need logits. `to` names the result.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from types import ModuleType
from typing import Any, Literal, NamedTuple, Protocol

import torch

from instep_reference.contract.config import ModelConfig
from instep_reference.contract.declared_rounding import Product, Storage
from instep_reference.contract.place_names import Place
from instep_reference.contract.recurrences import RECURRENCES, Recurrence

from ..memory_addresses import Keeps, Pages, Part
from .attention_protocols import Attend, AttendLatents, MakeLatentInputs, OutputGate
from .family_op_protocols import (
    AddSkip,
    AddStreams,
    BiasedConv,
    DilatedConv,
    EmbedStreams,
    GatedGroupNorm,
    GateStreams,
    Multiply,
    Ngrams,
    NormStreams,
    ReadStreams,
    ScaledAdd,
    ShortConv,
    SquaredMlp,
)
from .integer_op_protocols import (
    Accept,
    Advance,
    BuildTree,
    Choose,
    Draw,
    MakeTopkTokens,
    Move,
    MoveRows,
    Moves,
    PlaceRows,
    PlanPath,
    PlanRing,
    PlanTree,
    SelectBeams,
    Shift,
)


class Types(NamedTuple):
    """Storage dtypes of hidden rows, conv windows, recurrent states, and KV.

    `consumed` is the dtype of a ring of inputs, `recurrence` that of a ring of updates: the dtype in which the
    recurrence computes, so that no bit is lost. The options choose `kept` and `chunk`, the roundings of tracked
    prefixes, and `ring`, the dtype of both parts of a split ring's numbers (None: it is not split).
    """

    hidden: torch.dtype
    conv: torch.dtype
    state: Storage
    kv: Storage
    consumed: torch.dtype = torch.float32
    recurrence: torch.dtype = torch.float32
    kept: Storage | None = None
    chunk: torch.dtype | None = None
    ring: torch.dtype | None = None


class GdnInputs(NamedTuple):
    """q, k [N, H, K] l2-normalised (q also times K ** -0.5); v [N, HV, V]; log_decay, beta [N, HV]; all fp32.

    With a decay per channel log_decay is [N, HV, K]. Without the delta rule q and k may have any norm, and beta is the
    write gate, of any size.
    Inside a `PrefillGdn`, where no watcher sees them, q, k and v may be narrower.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    log_decay: torch.Tensor
    beta: torch.Tensor


class AttentionInputs(NamedTuple):
    """query [N, heads, head_dim], key [N, kv_heads, head_dim]: normed per head, then rotated."""

    query: torch.Tensor
    key: torch.Tensor


@dataclass(frozen=True)
class ExpertWeights:
    """Weights of an expert layer: router [E, D]; gate_up [E, 2I, D], gate half first; down [E, D, I].

    The shared expert has the same form; its gate is [1, D]. None: it is added as it is.
    router_bias [E]  given for a sigmoid router, which chooses by sigmoid(score) + bias among the experts of the
                     `groups_per_token` best of `groups` groups: those with the largest sums of two. A share is
                     sigmoid(score), renormalised if `norm_topk`, times `scale`
    gated            whether experts are SwiGLUs. If not, gate_up is up alone [E, I, D], for sets with `squared_mlp`
    to_latent [L, D], from_latent [D, L]  of x before routed experts, and of their weighted sum; L is their width, not D
    limit, shared_limit  of routed experts and of the shared one: silu(gate x) and |up x| are clamped to at most this
    """

    router: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    shared_gate_up: torch.Tensor | None
    shared_down: torch.Tensor | None
    shared_gate: torch.Tensor | None
    router_bias: torch.Tensor | None = None
    groups: int = 1
    groups_per_token: int = 1
    scale: float = 1.0
    gated: bool = True
    limit: float | None = None
    shared_limit: float | None = None
    to_latent: torch.Tensor | None = None
    from_latent: torch.Tensor | None = None


class Embed(Protocol):
    """tokens [N] int64, table [vocab, D] -> [N, D]."""

    def __call__(self, *, tokens: torch.Tensor, table: torch.Tensor, to: Place) -> torch.Tensor: ...


class Norm(Protocol):
    """x [N, D], of latents [N, 1, D] -> x / rms(x) * (1 + weight), fp32 inside, cast back.

    If the weight has two axes, x is [N, heads, head_dim], and the heads of a row are normed together.
    """

    def __call__(self, *, x: torch.Tensor, weight: torch.Tensor, eps: float, to: Place) -> torch.Tensor: ...


Shapes = tuple[tuple[int, ...], ...]


class Linear(Protocol):
    """x [N, in], or [N, a, b] with a*b = in; weight [out, in] -> [N, *shape] with prod(shape) = out."""

    def __call__(self, *, x: torch.Tensor, weight: torch.Tensor, shape: tuple[int, ...], to: Place) -> torch.Tensor: ...


class Add(Protocol):
    """x, y [N, D] -> x + y."""

    def __call__(self, *, x: torch.Tensor, y: torch.Tensor, to: Place) -> torch.Tensor: ...


class Concat(Protocol):
    """x [N, D], y [N, E] -> [N, D + E], x first."""

    def __call__(self, *, x: torch.Tensor, y: torch.Tensor, to: Place) -> torch.Tensor: ...


class Select(Protocol):
    """x [N, ...], index [M] int64 -> [M, ...]: rows by number; -1 gives zeros. Bits are copied, nothing is computed."""

    def __call__(self, *, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor: ...


class Conv(Protocol):
    """Depthwise causal conv over channels, then silu: out[t] = silu(sum_j weight[:, j] * input[t - (W-1) + j]).

    x [N, C]; weight [C, W]; addresses point at windows [C, W-1], oldest first -> mixed [N, C]. Inputs before row 0 come
    from `read`, or are zeros. The bits of a row depend on these inputs alone, not on the window or on other requests.
    In a tree the inputs before a row are those of its ancestors, then `read`; `per_row` gets the last W-1 of them.
    """

    def __call__(
        self, *, x: torch.Tensor, weight: torch.Tensor, parts: tuple[Part, ...], to: Place
    ) -> torch.Tensor: ...


class MakeGdnInputs(Protocol):
    """mixed [N, C] = [q (H*K) | k (H*K) | v (HV*V)], a, b [N, HV] -> `GdnInputs`.

    q, k: x * rsqrt(sum x^2 + 1e-6); beta = sigmoid(b); log_decay = -exp(A_log) * softplus(a + dt_bias); fp32.
    A_log, dt_bias [HV]. With a decay per channel a is [N, HV, K], and dt_bias [HV, K].
    `Ops.bounds_beta`: also beta_bound, which is given if it is not 1. Then beta = beta_bound * sigmoid(b).
    `Ops.bounds_decay`: also decay_bound, in nats, which is given for a safe gate alone. Its log_decay is
    decay_bound * sigmoid(exp(A_log) * (a + dt_bias)).
    `to`: places of q, k, v, log_decay, beta.
    """

    def __call__(
        self, *, mixed: torch.Tensor, a: torch.Tensor, b: torch.Tensor, A_log: torch.Tensor,
        dt_bias: torch.Tensor, key_heads: int, key_dim: int, to: tuple[Place, ...],
    ) -> GdnInputs: ...


class LightningInputs(Protocol):
    """qkv [N, HV, 2K + V] = per head [q | k | v], each through a silu; log_decay [HV] for every row -> `GdnInputs`.

    beta, the write gate, is 1. fp32. `to`: places of q, k, v, log_decay, write.
    """

    def __call__(
        self, *, qkv: torch.Tensor, log_decay: torch.Tensor, key_dim: int, to: tuple[Place, ...]
    ) -> GdnInputs: ...


class MakeSelectiveInputs(Protocol):
    """`MakeGdnInputs` of Mamba2: mixed [N, C] = [x (HV*V) | B (H*K) | C (H*K)], a [N, HV] -> q = C, k = B, v = x.

    dt = softplus(a + dt_bias); beta = dt; log_decay = -exp(A_log) * dt; all fp32, q and k as they are.
    `to`: places of q, k, v, log_decay, write.
    """

    def __call__(
        self, *, mixed: torch.Tensor, a: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor, key_heads: int,
        key_dim: int, to: tuple[Place, ...],
    ) -> GdnInputs: ...


class Recur(Protocol):
    """A recurrence over packed rows; addresses point at states seen as [HV, K, V].

    Value head h reads key head h // (HV / H).  -> core [N, HV, V] in `dtype`. Per request, in this order:
      1. read the state (zeros if fresh); 2. run the ring's pending tokens again (none if fresh, even if some pend)
      3. round to the dtype of `read`'s pool, as a store and a load would; store to `settled`
      4. row by row: compute core, keep the token in the ring, store to `per_row`; 5. store to `store`
    Without the delta rule (`Recurrence.update`) a token's update is write v, whatever the state.
    To run tokens again gives the bits that their rows gave. With updates this is S <- decay S + k update^T; with inputs
    it is the whole rule. No bit of a request depends on another request. In windows the bits of a row, and of the state
    after it, depend on its inputs and the state before it alone, whatever the width. In a tree a row continues the
    unrounded state of its parent, so the rows of a path have the bits of that chain. A fold (count 0, pending tokens)
    does steps 1 to 3 and 5. Without rows and pending tokens nothing is read or written. Chunks have no ring.
    """

    def __call__(
        self, *, inputs: GdnInputs, parts: tuple[Part, ...], dtype: torch.dtype, to: Place
    ) -> torch.Tensor: ...


class KeptUpdates(Protocol):
    """The updates [N, HV, V] that the rings of `parts` have kept of a launch's rows; zeros for rows that are not kept.

    N = `rows`, on the host. Only a watcher calls it, after `gdn`; a timed run does not. It waits for nothing.
    """

    def __call__(self, *, parts: tuple[Part, ...], rows: int, to: Place) -> torch.Tensor: ...


class GatedNorm(Protocol):
    """core, z [N, HV, V] -> norm over V in fp32, times weight [V], times silu(z) or sigmoid(z), one cast."""

    def __call__(
        self, *, core: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float,
        gate: Literal["silu", "sigmoid"], to: Place,
    ) -> torch.Tensor: ...


class MakeAttentionInputs(Protocol):
    """projected [N, heads, 2 or 1, head_dim] (query, gate), key_raw [N, kv_heads, head_dim], positions [N] int64.

    Norm per head times (1 + weight), unless it is empty; then rotary on the first rotary_dim channels (halves rotated).
    """

    def __call__(
        self, *, projected: torch.Tensor, key_raw: torch.Tensor, positions: torch.Tensor, q_norm: torch.Tensor,
        k_norm: torch.Tensor, eps: float, rotary_dim: int, theta: float, to: tuple[Place, Place],
    ) -> AttentionInputs: ...


class MakeKeyInputs(Protocol):
    """The keys of `MakeAttentionInputs` alone: key_raw [N, kv_heads, head_dim], positions [N] int64  ->  as key_raw."""

    def __call__(
        self, *, key_raw: torch.Tensor, positions: torch.Tensor, k_norm: torch.Tensor, eps: float, rotary_dim: int,
        theta: float, to: Place,
    ) -> torch.Tensor: ...


class StoreRows(Protocol):
    """rows [N, ...] into pool [pages, page_size, ...]; locations [N] are page * page_size + offset; -1 skips.

    scales: given where the pool is stored in tiles (`Blocked`): the rows are rounded here, and their scales stored.
    A pool by slot is given as [slots, 1, ...]: one page of one entry per slot, so the location is the slot.
    """

    def __call__(
        self, *, rows: torch.Tensor, pool: torch.Tensor, locations: torch.Tensor, scales: torch.Tensor | None = None
    ) -> None: ...


class Mlp(Protocol):
    """x [N, D], gate_up [2I, D] (gate half first), down [D, I] -> down(silu(gate) * up)."""

    def __call__(self, *, x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, to: Place) -> torch.Tensor: ...


class Moe(Protocol):
    """x [N, D] -> sum of top-k experts by fp32 softmax (renormalised if `norm_topk`), plus the gated shared expert.

    `Ops.sigmoid`: also by sigmoid, if the weights have a `router_bias`.
    """

    def __call__(
        self, *, x: torch.Tensor, weights: ExpertWeights, top_k: int, norm_topk: bool, to: Place
    ) -> torch.Tensor: ...


class LmHead(Protocol):
    """x [M, D], weight [vocab, D] -> logits [M, vocab] fp32."""

    def __call__(self, *, x: torch.Tensor, weight: torch.Tensor, to: Place) -> torch.Tensor: ...


class Pick(Protocol):
    """logits [M, vocab] -> argmax [M] int64, the lowest index on a tie."""

    def __call__(self, *, logits: torch.Tensor, to: Place) -> torch.Tensor: ...


class AddNorm(NamedTuple):
    """total [N, D] = x + y, as it is stored; normed [N, D], computed from the stored sum."""

    total: torch.Tensor
    normed: torch.Tensor


class MakeAddNorm(Protocol):
    """`add`, then `norm`. `to`: places of the sum and of the normed rows."""

    def __call__(
        self, *, x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor, eps: float, to: tuple[Place, Place]
    ) -> AddNorm: ...


class ConvInputs(Protocol):
    """`conv`, then `gdn_inputs`, with the arguments of both. `to`: places of mixed, q, k, v, log_decay, beta.

    The rows of `mixed` are rounded as if they were stored, but they stay inside.
    """

    def __call__(
        self, *, x: torch.Tensor, weight: torch.Tensor, parts: tuple[Part, ...], a: torch.Tensor, b: torch.Tensor,
        A_log: torch.Tensor, dt_bias: torch.Tensor, key_heads: int, key_dim: int, to: tuple[Place, ...],
    ) -> GdnInputs: ...


class DraftInputs(Protocol):
    """`embed`, the `norm` of the embedding and of `hidden` [N, D], then `concat`  ->  [N, 2 D].

    weights: of the two norms. `to`: places of the embedding, both norms and the result. All but the last stay inside.
    """

    def __call__(
        self, *, tokens: torch.Tensor, table: torch.Tensor, hidden: torch.Tensor,
        weights: tuple[torch.Tensor, torch.Tensor], eps: float, to: tuple[Place, Place, Place, Place],
    ) -> torch.Tensor: ...


class GatedAttend(Protocol):
    """`attend`, then `output_gate`  ->  opened [N, heads, head_dim]. `to`: places of attended and of opened rows."""

    def __call__(
        self, *, query: torch.Tensor, pages: Pages, projected: torch.Tensor, to: tuple[Place, Place]
    ) -> torch.Tensor: ...


class HeadPick(Protocol):
    """`lm_head`, then `pick`  ->  argmax [M] int64. `to`: places of logits and pick; the logits stay inside."""

    def __call__(self, *, x: torch.Tensor, weight: torch.Tensor, to: tuple[Place, Place]) -> torch.Tensor: ...


class KvInputs(Protocol):
    """`attention_inputs`, then `store_rows` of its keys and of `value` [N, kv_heads, head_dim]  ->  query.

    pools: of keys and of values, stored without scales. `to`: places of query and key; the keys stay inside.
    """

    def __call__(
        self, *, projected: torch.Tensor, key_raw: torch.Tensor, positions: torch.Tensor, q_norm: torch.Tensor,
        k_norm: torch.Tensor, eps: float, rotary_dim: int, theta: float, value: torch.Tensor,
        pools: tuple[torch.Tensor, torch.Tensor], locations: torch.Tensor, to: tuple[Place, Place],
    ) -> torch.Tensor: ...


class Linears(Protocol):
    """`linear` for each of `shapes`. The weights [out_i, in] are stacked in `weight`. `to`: their places.

    The results may be views on one tensor. A column is a separate sum, but its order may depend on the other columns.
    """

    def __call__(
        self, *, x: torch.Tensor, weight: torch.Tensor, shapes: Shapes, to: tuple[Place, ...]
    ) -> tuple[torch.Tensor, ...]: ...


class WindowGdn(Protocol):
    """`gdn_inputs`, then `gdn`, with the arguments of both  ->  core [N, HV, V].

    parts: windows, none of them a tree. mixed: of 16 bits. Rings keep the same entries as with the parts.
    `to`: places of q, k, v, log_decay, beta and core. All but core stay inside.
    """

    def __call__(
        self, *, mixed: torch.Tensor, a: torch.Tensor, b: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor,
        key_heads: int, key_dim: int, parts: tuple[Part, ...], dtype: torch.dtype, to: tuple[Place, ...],
    ) -> torch.Tensor: ...


class VerifyGdn(Protocol):
    """`conv`, `gdn_inputs`, then `gdn`, with the arguments of all three  ->  core [N, HV, V].

    windows, parts: of the conv and of the states, none of them a tree. Windows are kept after every row, in other
    memory than they are read from, because several programs may read the same one. x: of 16 bits.
    `to`: places of mixed, q, k, v, log_decay, beta and core. All but core stay inside.
    """

    def __call__(
        self, *, x: torch.Tensor, weight: torch.Tensor, windows: tuple[Part, ...], a: torch.Tensor, b: torch.Tensor,
        A_log: torch.Tensor, dt_bias: torch.Tensor, key_heads: int, key_dim: int, parts: tuple[Part, ...],
        dtype: torch.dtype, to: tuple[Place, ...],
    ) -> torch.Tensor: ...


class PrefillGdn(VerifyGdn, Protocol):
    """`VerifyGdn` for prompts: windows and parts are chunks, and no memory is kept after every row.

    dtype: of 16 bits. All but core stay inside here, too.
    """


class FusedGdn(Protocol):
    """`gdn_inputs`, then `gdn`, with the arguments of both. -> core [N, HV, V].

    No part has a ring: what a ring keeps of a token stays inside the call.
    """

    def __call__(
        self, *, mixed: torch.Tensor, a: torch.Tensor, b: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor,
        key_heads: int, key_dim: int, parts: tuple[Part, ...], dtype: torch.dtype, to: Place,
    ) -> torch.Tensor: ...


# The ops that receive the shapes of trees: see `Ops.trees`.
ALONG_TREES = (
    "conv", "biased_conv", "short_conv", "dilated_conv", "ngrams", "conv_inputs", *RECURRENCES, "fused_gdn", "attend",
    "attend_latents")


@dataclass(frozen=True)
class Ops:
    """An op set: its ops, and fields that describe it.

    types          (activation, state) -> its storage dtypes
    rounds         (activation, state) -> the dtype in which each named component is stored: its rounding points
    keeps          what its rings keep of a token (`Ring`)
    captures       its ops never wait for the host, so a CUDA graph can hold them
    products       form of an op -> how its products round operands, {"gdn.chunk": Product("tf32", block=64)}; else fp32
    add_norm, conv_inputs, draft_inputs, gated_attend, head_pick, kv_inputs, linears, moves, prefill_gdn, verify_gdn,
    window_gdn, fused_gdn: its fusions (`fused.FUSIONS`). Replacing a part means dropping them
    kda, mamba2, lightning: the other rows of RECURRENCES, if it serves them (`recurrence`); the fusions are of `gdn`
    short_conv, multiply: ops for LFM2 alone, `conv` without silu and x * y; lightning_inputs, scaled_add: for MiniMax
    biased_conv, selective_inputs, add_skip, gated_group_norm, squared_mlp: ops for Nemotron-H alone, if it serves them
    embed_streams, read_streams, add_streams: of models with residual streams; ngrams, gate_streams, norm_streams,
    dilated_conv: of their embeddings of n-grams, if it serves them
    tiled          its ops read and write the scales of pools that are stored in tiles (`Blocked`)
    chances        its ops support stochastic rounding of what they store (`Blocked.seed`)
    split          its windows serve rings of updates in two parts (`SplitUpdates`)
    packed         its kernels take no strides: pools have neither red zones nor padding
    once           components that it computes in at least fp32 and rounds only once, as stored; ("*",): all of them
    row_invariant  the ops of `BY_ROW` for which the bits of a row depend on no other row. With all of them a request
                   gets the same bits in a batch as alone. `conv`, and `gdn` in windows, promise it by their contract
    sigmoid, clamps  its `moe` supports a sigmoid router (`ExpertWeights.router_bias`); a clamped SwiGLU (`limit`)
    bounds_beta, bounds_decay  its `gdn_inputs` supports a beta above 1; a safe gate (`MakeGdnInputs`). No fusion does
    trees          the ops of `ALONG_TREES` that support windows that are trees (`Part.parents`, `Pages.ancestors`)
    scratch        (model, bytes of an activation, requests, positions of each, page size, most nodes of a window) ->
                   bytes that its ops take in addition to pools and results, while they run
    keepers, own   by name: commit strategies that it brings, and the ops that only these call (`StrategySpec.ops`)
    """

    name: str
    types: Callable[[torch.dtype, Storage], Types]
    rounds: Callable[[torch.dtype, Storage], Mapping[str, Storage]]
    embed: Embed
    norm: Norm
    linear: Linear
    add: Add
    concat: Concat
    select: Select
    conv: Conv
    gdn_inputs: MakeGdnInputs
    gdn: Recur
    kept_updates: KeptUpdates
    gated_norm: GatedNorm
    attention_inputs: MakeAttentionInputs
    key_inputs: MakeKeyInputs
    store_rows: StoreRows
    attend: Attend
    output_gate: OutputGate
    mlp: Mlp
    moe: Moe
    lm_head: LmHead
    pick: Pick
    draw: Draw
    accept: Accept
    place_rows: PlaceRows
    choose: Choose
    advance: Advance
    shift: Shift
    plan_ring: PlanRing
    plan_tree: PlanTree
    plan_path: PlanPath
    topk_tokens: MakeTopkTokens
    select_beams: SelectBeams
    build_tree: BuildTree
    move: Move
    move_rows: MoveRows
    keeps: Keeps
    captures: bool = False
    products: Mapping[str, Product] = field(default_factory=dict, hash=False)
    once: Collection[str] = field(default=(), hash=False)
    row_invariant: frozenset[str] = frozenset()
    add_norm: MakeAddNorm | None = None
    conv_inputs: ConvInputs | None = None
    draft_inputs: DraftInputs | None = None
    gated_attend: GatedAttend | None = None
    head_pick: HeadPick | None = None
    kv_inputs: KvInputs | None = None
    linears: Linears | None = None
    moves: Moves | None = None
    prefill_gdn: PrefillGdn | None = None
    verify_gdn: VerifyGdn | None = None
    window_gdn: WindowGdn | None = None
    fused_gdn: FusedGdn | None = None
    attend_latents: AttendLatents | None = None
    latent_inputs: MakeLatentInputs | None = None
    kda: Recur | None = None
    mamba2: Recur | None = None
    lightning: Recur | None = None
    short_conv: ShortConv | None = None
    multiply: Multiply | None = None
    lightning_inputs: LightningInputs | None = None
    scaled_add: ScaledAdd | None = None
    biased_conv: BiasedConv | None = None
    selective_inputs: MakeSelectiveInputs | None = None
    add_skip: AddSkip | None = None
    gated_group_norm: GatedGroupNorm | None = None
    squared_mlp: SquaredMlp | None = None
    embed_streams: EmbedStreams | None = None
    read_streams: ReadStreams | None = None
    add_streams: AddStreams | None = None
    ngrams: Ngrams | None = None
    gate_streams: GateStreams | None = None
    norm_streams: NormStreams | None = None
    dilated_conv: DilatedConv | None = None
    tiled: bool = False
    chances: bool = False
    split: bool = False
    bounds_beta: bool = False
    sigmoid: bool = False
    clamps: bool = False
    bounds_decay: bool = False
    packed: bool = False
    trees: bool = False
    scratch: Callable[[ModelConfig, int, int, int, int, int], int] | None = None
    keepers: Mapping[str, Any] = field(default_factory=dict, hash=False)
    own: Mapping[str, Callable[..., Any]] = field(default_factory=dict, hash=False)

    def recurrence(self, row: Recurrence) -> Recur:
        """Return the op of a kind of recurrence. `options.check` has refused a model without one."""
        op: Recur = getattr(self, row.name)
        return op

    def __post_init__(self) -> None:
        forms = {name: op for keeper in self.keepers.values() for name, op in keeper.ops.items()}
        object.__setattr__(self, "own", {**forms, **self.own})
        for name in (one.name for one in fields(self)):
            op, parts = getattr(getattr(self, name), "fuses", (None, {}))  # a wrapper may have copied the attribute
            if op is getattr(self, name) and any(getattr(self, part) is not mine for part, mine in parts.items()):
                object.__setattr__(self, name, None)  # made of other parts than the set has


def ops_of(*modules: ModuleType) -> dict[str, Any]:
    """Return the functions of these modules that have the name of a field of `Ops`, by name."""
    names = {one.name for one in fields(Ops)}
    return {name: value for module in modules for name, value in vars(module).items()
            if name in names and getattr(value, "__module__", None) == module.__name__}  # fmt: skip
