"""Functions with the arguments of SGLang's rings of a GDN verify, in torch, for the adapter of these rings.

`modules(release)` returns module -> functions, as the releases have them. The rings have the released rules: which
entries a verify stores, when a row is flagged, when it is folded. Leaves out: the released kernels (`make peers`).
"""

from collections.abc import Iterable
from functools import wraps
from typing import Any

import torch

from support.worlds.fake_kernels import gates, normed

DECODE, FOLD = "gdn_replayssm_spec_decode", "gdn_replayssm_spec_fold"
FLA, LINEAR = "sglang.kernels.ops.attention.fla", "sglang.kernels.ops.attention.linear"


def _token(S: torch.Tensor, k: Any, v: Any, g: Any, beta: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The delta rule for one token: state [HV, V, K] -> (the state after it, the update that it adds)."""
    d = beta[:, None] * (v - g.exp()[:, None] * torch.einsum("hvk,hk->hv", S, _shared(k, S)))
    return _updated(S, k, d, g), d


def _updated(S: torch.Tensor, k: Any, d: Any, g: Any) -> torch.Tensor:
    return g.exp()[:, None, None] * S + d[:, :, None] * _shared(k, S)[:, None]


def _shared(x: torch.Tensor, S: torch.Tensor) -> torch.Tensor:
    """Rows of key heads, for every value head."""
    return x.repeat_interleave(len(S) // len(x), dim=0)


def _gates(given: dict[str, Any], row: int) -> tuple[torch.Tensor, torch.Tensor]:
    return gates(given["A_log"], given["a"][row].float(), given["dt_bias"], given["b"][row].float())


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
        S = _folded(given, row, [(base + t) % L for t in range(cursor)], state[slot].float(), raw=not by_request)
        if not by_request and bool(given["is_flush"][row]):
            state[slot] = S
        for t, at in enumerate(range(begin, end)):
            g, beta = _gates(given, at)
            S, d = _token(S, normed(k[at]), v[at], g, beta)
            given["out"][at] = torch.einsum("hvk,hk->hv", S, _shared(normed(q[at]), S)) * given["scale"]
            if cursor + t < L:  # with the cursor of before the flush
                kept = {"g_cache": g, "d_cache": d, "k_cache": normed(k[at])}
                if not by_request:
                    kept |= {"rawv_cache": v[at], "rawk_cache": k[at], "beta_cache": beta}
                for name, numbers in kept.items():
                    given[name][row, :, (base + cursor + t) % L] = numbers
    return given["out"]  # type: ignore[no-any-return]


def _folded(given: Any, row: int, entries: Iterable[int], S: torch.Tensor, *, raw: bool) -> torch.Tensor:
    """Run kept tokens again: from their raw inputs, or from their updates."""
    names = ("rawk_cache", "rawv_cache", "g_cache", "beta_cache") if raw else ("k_cache", "d_cache", "g_cache")
    for entry in entries:
        k, *rest = (given[name][row, :, entry] for name in names)
        S = _token(S, normed(k), *rest)[0] if raw else _updated(S, k, *rest)
    return S


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
            entries = [(base + t) % L for t in range(min(cursor, L))]
            state[layer, slot] = _folded(own, row, entries, state[layer, slot], raw=False)
        given["cache_base"][row] = (base + cursor) % L
        given["write_pos"][row] = 0
        given["is_flush"][row] = 0


def exact_fold(**given: Any) -> None:
    """`_launch_gdn_exact_fold`, for a single layer and its flagged rows."""
    state, L = given["checkpoint_state"], given["max_cache_len"]
    for slot in given["ssm_state_indices"].tolist():
        entries = [(int(given["cache_base"][slot]) + t) % L for t in range(int(given["write_pos"][slot]))]
        state[slot] = _folded(given, slot, entries, state[slot], raw=True)


def keep_raw(**given: Any) -> torch.Tensor:
    """`fused_sigmoid_gating_delta_rule_update` with `cache_ring`: a window begins in entry 0."""
    q, k, v = (given[name][0] for name in "qkv")
    out, starts = torch.zeros_like(v), given["cu_seqlens"].tolist()
    for slot, begin, end in zip(given["initial_state_indices"].tolist(), starts, starts[1:], strict=False):
        S = given["initial_state_source"][slot].float()
        for t, at in enumerate(range(begin, end) if slot >= 0 else ()):
            g, beta = _gates(given, at)
            S, _ = _token(S, normed(k[at]), v[at], g, beta)
            out[at] = torch.einsum("hvk,hk->hv", S, _shared(normed(q[at]), S)) * k.shape[-1] ** -0.5
            for name, numbers in {"rawv": v[at], "rawk": k[at], "g": g, "beta": beta}.items():
                given[f"replayssm_{name}"][slot, :, t] = numbers
    return out[None]


def fold_accepted(**given: Any) -> None:
    """`commit_gdn_replayssm_fold_all_layers`."""
    state = given["checkpoint_state"]
    for slot, count in zip(given["ssm_state_indices"].tolist(), given["accept_lens"].tolist(), strict=True):
        for layer in range(len(state) if slot > given["null_block_id"] else 0):
            own = {name: given[name][layer] for name in ("rawv_cache", "rawk_cache", "g_cache", "beta_cache")}
            state[layer, slot] = _folded(own, slot, range(count), state[layer, slot], raw=True)


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
