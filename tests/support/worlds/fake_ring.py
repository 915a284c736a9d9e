"""Functions with the arguments of SGLang's rings of a GDN verify, in torch, for the adapter of these rings.

`modules(release)` returns module -> functions, as the releases have them. The rings have the released rules: which
entries a verify stores, when a row is flagged, when it is folded. Leaves out: the released kernels (`make peers`).
"""

from functools import wraps
from typing import Any

import torch

DECODE, FOLD = "gdn_replayssm_spec_decode", "gdn_replayssm_spec_fold"
FLA, LINEAR = "sglang.kernels.ops.attention.fla", "sglang.kernels.ops.attention.linear"


def _token(S: torch.Tensor, k: Any, v: Any, g: Any, beta: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The delta rule for one token and head: state [V, K] -> (the state after it, the update that it adds)."""
    S = S * g.exp()
    d = beta * (v - S @ k)
    return S + torch.outer(d, k), d


def _normed(k: torch.Tensor) -> torch.Tensor:
    return k / (k.square().sum() + 1e-6).sqrt()


def _gates(given: dict[str, Any], row: int, head: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = given["a"][row, head].float() + given["dt_bias"][head]
    return -given["A_log"][head].exp() * torch.nn.functional.softplus(x), given["b"][row, head].float().sigmoid()


def verify(by_request: bool, **given: Any) -> torch.Tensor:
    """`gdn_replayssm_spec_decode`. A flagged row is folded first, if this release folds at the next verify."""
    q, k, v, state, L = given["q"], given["k"], given["v"], given["checkpoint_state"], given["max_cache_len"]
    slots = given["ssm_state_indices"].tolist()
    rows = given["replay_indices"].tolist() if by_request else slots
    starts = given["query_start_loc"].tolist()
    for slot, row, begin, end in zip(slots, rows, starts, starts[1:], strict=False):
        if slot <= given["null_block_id"]:
            given["out"][begin:end] = 0
            continue
        cursor, base = int(given["write_pos"][row]), int(given["cache_base"][row])
        flushed = not by_request and bool(given["is_flush"][row])
        for head in range(v.shape[1]):
            key_head = head // (v.shape[1] // k.shape[1])
            S = state[slot, head].float()
            for t in range(cursor):
                S = _kept(given, row, head, key_head, (base + t) % L, S, raw=not by_request)
            if flushed:
                state[slot, head] = S
            for t, at in enumerate(range(begin, end)):
                g, beta = _gates(given, at, head)
                S, d = _token(S, _normed(k[at, key_head]), v[at, head], g, beta)
                given["out"][at, head] = S @ _normed(q[at, key_head]) * given["scale"]
                if cursor + t < L:  # with the cursor of before the flush
                    at_entry = (base + cursor + t) % L
                    given["g_cache"][row, head, at_entry] = g
                    given["d_cache"][row, head, at_entry] = d
                    given["k_cache"][row, key_head, at_entry] = _normed(k[at, key_head])
                    if not by_request:
                        given["rawv_cache"][row, head, at_entry] = v[at, head]
                        given["rawk_cache"][row, key_head, at_entry] = k[at, key_head]
                        given["beta_cache"][row, head, at_entry] = beta
    return given["out"]  # type: ignore[no-any-return]


def _kept(given: Any, row: int, head: int, key_head: int, entry: int, S: torch.Tensor, *, raw: bool) -> torch.Tensor:
    """Run one kept token again: from its raw inputs, or from its update."""
    g = given["g_cache"][row, head, entry]
    if not raw:
        return S * g.exp() + torch.outer(given["d_cache"][row, head, entry], given["k_cache"][row, key_head, entry])
    k, v = given["rawk_cache"][row, key_head, entry], given["rawv_cache"][row, head, entry]
    return _token(S, _normed(k), v, g, given["beta_cache"][row, head, entry])[0]


def advance(margin: int | None, **given: Any) -> None:
    """`commit_gdn_replayssm_spec`. margin: None for that of the round, which the releases use."""
    index = "replay_indices" if "replay_indices" in given else "state_batch_indices"
    L, width = given["max_cache_len"], given["max_spec_len"] if margin is None else margin
    for row, count in zip(given[index].tolist(), given["num_accepted"].tolist(), strict=True):
        if row <= given["null_block_id"]:
            continue
        cursor, base, flagged = (given[name][row] for name in ("write_pos", "cache_base", "is_flush"))
        if flagged:
            base.copy_((base + cursor) % L)
            cursor.zero_()
        cursor += count
        flagged.fill_(int(cursor) + 2 * width > L)


def fold_flagged(**given: Any) -> None:
    """`commit_gdn_replayssm_circular`: entries beyond the ring are not there to be folded."""
    state, L = given["checkpoint_state"], given["d_cache"].shape[-2]
    for slot, row in zip(given["state_batch_indices"].tolist(), given["replay_indices"].tolist(), strict=True):
        if slot <= given["null_block_id"] or not given["is_flush"][row]:
            continue
        cursor, base = int(given["write_pos"][row]), int(given["cache_base"][row])
        for layer in range(len(state)):
            own = {name: given[name][layer] for name in ("g_cache", "d_cache", "k_cache")}
            for head in range(state.shape[2]):
                S = state[layer, slot, head]
                for t in range(min(cursor, L)):
                    S = _kept(own, row, head, head // (state.shape[2] // own["k_cache"].shape[1]), (base + t) % L, S,
                              raw=False)  # fmt: skip
                state[layer, slot, head] = S
        given["cache_base"][row] = (base + cursor) % L
        given["write_pos"][row] = 0
        given["is_flush"][row] = 0


def exact_fold(**given: Any) -> None:
    """`_launch_gdn_exact_fold`, for a single layer and its flagged rows."""
    state, L = given["checkpoint_state"], given["max_cache_len"]
    for slot in given["ssm_state_indices"].tolist():
        for head in range(state.shape[1]):
            S = state[slot, head]
            for t in range(int(given["write_pos"][slot])):
                S = _kept(given, slot, head, head // (state.shape[1] // given["num_k_heads"]),
                          (int(given["cache_base"][slot]) + t) % L, S, raw=True)  # fmt: skip
            state[slot, head] = S


def keep_raw(**given: Any) -> torch.Tensor:
    """`fused_sigmoid_gating_delta_rule_update` with `cache_ring`: a window begins in entry 0."""
    q, k, v = (given[name][0] for name in "qkv")
    out, starts = torch.zeros_like(v), given["cu_seqlens"].tolist()
    for slot, begin, end in zip(given["initial_state_indices"].tolist(), starts, starts[1:], strict=False):
        for head in range(v.shape[1] if slot >= 0 else 0):
            key_head, S = head // (v.shape[1] // k.shape[1]), given["initial_state_source"][slot, head].float()
            for t, at in enumerate(range(begin, end)):
                g, beta = _gates(given, at, head)
                S, _ = _token(S, _normed(k[at, key_head]), v[at, head], g, beta)
                out[at, head] = S @ _normed(q[at, key_head]) * k.shape[-1] ** -0.5
                given["replayssm_rawv"][slot, head, t] = v[at, head]
                given["replayssm_rawk"][slot, key_head, t] = k[at, key_head]
                given["replayssm_g"][slot, head, t], given["replayssm_beta"][slot, head, t] = g, beta
    return out[None]


def fold_accepted(**given: Any) -> None:
    """`commit_gdn_replayssm_fold_all_layers`."""
    state = given["checkpoint_state"]
    for slot, count in zip(given["ssm_state_indices"].tolist(), given["accept_lens"].tolist(), strict=True):
        for layer in range(len(state) if slot > given["null_block_id"] else 0):
            own = {name: given[name][layer] for name in ("rawv_cache", "rawk_cache", "g_cache", "beta_cache")}
            for head in range(state.shape[2]):
                S = state[layer, slot, head]
                for t in range(count):
                    S = _kept(own, slot, head, head // (state.shape[2] // given["num_k_heads"]), t, S, raw=True)
                state[layer, slot, head] = S


def modules(release: str, margin: int | None = None) -> dict[str, dict[str, Any]]:
    """Module -> its functions in a release. margin: tokens of the widest window, of a ring that is right."""

    def by_slot(**given: Any) -> torch.Tensor:
        return verify(False, **given)

    def by_request(**given: Any) -> torch.Tensor:
        return verify(True, **given)

    def circular(*, replay_indices: Any, **given: Any) -> None:
        fold_flagged(replay_indices=replay_indices, **given)

    def moved(**given: Any) -> None:
        advance(margin, **given)

    for made, module in ((by_slot, f"{FLA}.{DECODE}"), (by_request, f"{LINEAR}.{DECODE}")):
        made.__module__ = module
    place = LINEAR if release == "0.5.23" else FLA
    recurrent = ("fused_recurrent_gated_delta_rule_update", "fused_recurrent_gated_delta_rule_packed_decode")
    found: dict[str, dict[str, Any]] = {
        f"{FLA}.fused_recurrent": dict.fromkeys(recurrent),
        f"{place}.fused_sigmoid_gating_recurrent": {"fused_sigmoid_gating_delta_rule_update": keep_raw},
    }
    ring = {DECODE: by_slot, "commit_gdn_replayssm_spec": moved, "_launch_gdn_exact_fold": exact_fold}
    if release == "0.5.18":
        found[f"{place}.{FOLD}"] = {"commit_gdn_replayssm_fold_all_layers": fold_accepted}
    if release == "0.5.23":
        ring = {DECODE: by_request, "commit_gdn_replayssm_spec": moved, "commit_gdn_replayssm_circular": circular}
    found[f"{place}.{DECODE}"] = ring
    return {module: {name: _kernel(one) if one else one for name, one in functions.items()}
            for module, functions in found.items()}  # fmt: skip


def _kernel(function: Any) -> Any:
    """On a GPU the numbers that it reads stay on the device, so they are no host reads."""

    @wraps(function)
    def call(**given: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return function(**given)

    return call
