"""The `kda` op with SGLang's kernels of Kimi Delta Attention, called as its KDA backend calls them.

The files are those of sglang 0.5.23: `kda_backend.py`, `kernels/kda_triton.py` in `srt/layers/attention/linear`.

    VERIFY    `fused_sigmoid_gating_delta_rule_update` with is_kda: verify (kda_backend.py:1427, kda_triton.py:178), and
              the decode of a model with a safe gate (kda_backend.py:1016, kda_triton.py:132)
    DECODE    the same, and `fused_recurrent_kda_packed_decode` if each request has one row and the gate has no bound
              (kda_backend.py:979, kda_triton.py:103)
    CHUNKED   `chunk_kda` for prefill, with raw gates (kda_backend.py:1143, kda_triton.py:257)
    RING      VERIFY with a ring of raw rows (cache_ring) instead of snapshots, and the strategy `kda_ring`, which
              commits by `commit_kda_replayssm_after_verify` (spec_utils.py:1214)

Leaves out: what runs natively alone: `kda_packed_decode` (CUDA; K = V = 128, fused_recurrent.py:643), CuTe, Helion,
FlashInfer and PTX backends, and the fused verify, which SGLANG_OPT_FUSED_KDA_VERIFY turns on.
"""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from instep.adapters.pooled import GIVEN, Launch, pooled
from instep.adapters.stubbed_imports import sglang
from instep.watch.kernel_calls import adapts
from instep_optimized.commit.base import StrategySpec
from instep_optimized.memory.budget import Sizes
from instep_optimized.memory_addresses import Part
from instep_optimized.ops.op_protocols import GdnInputs
from instep_optimized.ops.plain.gdn import kda as plain_kda
from instep_reference.contract.config import ModelConfig
from instep_reference.contract.declared_rounding import Product
from instep_reference.contract.errors import Unsupported
from instep_reference.contract.place_names import Place

sglang()

from instep.adapters import sglang_ring as rings  # noqa: E402
from instep.adapters.sglang import BASE, GATED, NOW, take  # noqa: E402

from .padded_launch import mixed, padded, split  # noqa: E402

IDLE = -1  # slot of a request that pads a batch
PACKED = take("fused_recurrent_kda_packed_decode", f"{NOW}.attention.fla.fused_recurrent")


def verify(x: Launch) -> torch.Tensor:
    count, x = len(x.v), padded(x, IDLE)
    snapshots = {} if x.stores else {
        "disable_state_update": True, "intermediate_states_buffer": x.snapshots,
        "intermediate_state_indices": x.rows.int(), "cache_steps": x.window, "retrieve_parent_token": None,
    }  # fmt: skip
    rows = {name: view[None] for name, view in split(x).items()}
    return _gated(x, x.pool, x.index, x.cu_seqlens, **rows, **snapshots)[:count]


def _gated(
    x: Launch | rings.Rows, pool: torch.Tensor, index: torch.Tensor, starts: torch.Tensor, **given: Any
) -> torch.Tensor:
    """The arguments that decode and verify have in common."""
    core: torch.Tensor = GATED(
        A_log=x.A_log, a=x.a.flatten(1)[None], dt_bias=x.dt_bias.flatten(), b=x.b[None], initial_state_source=pool,
        initial_state_indices=index.int(), cu_seqlens=starts.int(), use_qk_l2norm_in_kernel=True, softplus_beta=1.0,
        softplus_threshold=20.0, is_kda=True, lower_bound=x.bound, **given,
    )  # fmt: skip
    return core[0]


def decode(x: Launch) -> torch.Tensor:
    if not x.stores or x.bound is not None or len(x.v) != len(x.index):
        return verify(x)
    count, x = len(x.v), padded(x, IDLE)
    out = torch.empty_like(x.v)[:, None]
    PACKED(
        mixed_qkv=mixed(x), a=x.a.flatten(1), b=x.b, A_log=x.A_log, dt_bias=x.dt_bias.flatten(),
        scale=x.k.shape[-1] ** -0.5, initial_state=x.pool, out=out, ssm_state_indices=x.index.int(),
        use_qk_l2norm_in_kernel=True, lower_bound=x.bound,
    )  # fmt: skip
    return out[:count, 0]


def chunked(x: Launch) -> torch.Tensor:
    chunk = take("chunk_kda", f"{NOW}.attention.fla.kda")
    core: torch.Tensor = chunk(  # which writes its result over a contiguous v
        **{name: view[None] for name, view in split(x).items()}, g=x.a[None], beta=x.b[None], initial_state=x.pool,
        initial_state_indices=x.index.int(), use_qk_l2norm_in_kernel=True, cu_seqlens=x.cu_seqlens.int(),
        A_log=x.A_log, dt_bias=x.dt_bias.flatten(), lower_bound=x.bound, beta_is_raw=True,
        output_intermediate_states=False,
    )  # fmt: skip
    return core[0]


class KdaRing(rings.FoldedEveryCommit):
    """Raw rows of one window by slot, folded into the state at every commit; the gate has a rate per channel."""

    op = "kda"

    def pools(self, config: ModelConfig, sizes: Sizes) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        found = super().pools(config, sizes)
        return {**found, "g": ((*found["g"][0], config.key_dim), torch.float32)}

    def entries(self, sizes: Sizes) -> int:
        """The default of `linear_replayssm_cache_len`, which must have room for two windows (memory_pool.py:823)."""
        if 2 * sizes.widest > rings.ENTRIES:
            raise Unsupported(f"a ring of {rings.ENTRIES} entries and windows of {sizes.widest} tokens")
        return rings.ENTRIES

    def verify(self, rows: rings.Rows, state: torch.Tensor, part: rings.RingPart) -> torch.Tensor:
        kept = {f"replayssm_{name}": part.rings[name] for name in ("rawv", "rawk", "g", "beta")}
        return _gated(rows, state, part.read.units, rows.starts, q=rows.q[None], k=rows.k[None], v=rows.v[None],
                      disable_state_update=True, cache_steps=part.most, cache_ring=True, **kept)  # fmt: skip

    def commit(
        self, state: torch.Tensor, pools: rings.Pools, cursors: rings.Pools, who: rings.AcceptedRows, width: int
    ) -> None:
        commit = take("commit_kda_replayssm_after_verify", f"{NOW}.attention.linear.kda_replayssm_spec_decode")
        kept = {f"replayssm_{name}": pool for name, pool in pools.items()}
        commit(
            spec_state=SimpleNamespace(temporal=state, conv=[], intermediate_conv_window=[], **kept),
            state_batch_indices=who.slots, accept_lens=who.lens.int(), last_correct_step_indices=who.lens - 1,
            null_block_id=rings.NULL,
        )  # fmt: skip


class KdaKeeper(rings.RingKeeper):
    release, filled = KdaRing, "sglang kda ring"


def ring(*, inputs: GdnInputs, parts: tuple[Part, ...], dtype: torch.dtype, to: Place) -> torch.Tensor:
    """The op `kda`: windows by SGLang's verify, which fills the ring; prompts by `plain`."""
    adapts("kda", {"window": ring, "chunk": None})
    given = getattr(inputs.q, GIVEN)
    left = tuple(part for part in parts if not isinstance(part, rings.RingPart))
    core = plain_kda(inputs=inputs, parts=left, dtype=dtype, to=to)
    for part in parts:
        if isinstance(part, rings.RingPart) and len(part.begin):
            rings.verified(part, core, **given)
    return core


VERIFY = pooled(BASE, name="sglang kda verify", window=verify, raw=True, op="kda")
DECODE = pooled(BASE, name="sglang kda packed decode", window=decode, raw=True, op="kda")
CHUNKED = replace(
    pooled(BASE, name="sglang kda chunked", chunk=chunked, raw=True, op="kda"),
    products={"kda.chunk": Product("bf16", block=64)},  # between blocks of 16 rows: chunk_intra.py:197
)
RING = replace(
    VERIFY, name=KdaKeeper.filled, kda=ring,
    keepers={"kda_ring": StrategySpec(KdaKeeper.demands, KdaKeeper, "state", rings.OWN)},
)
