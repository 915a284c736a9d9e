"""SGLang: the ring of a GDN verify loses accepted tokens when the number of draft tokens rises.

    python sglang_ring_steps.py      needs sglang, torch, triton; no GPU (the kernels are interpreted)

Run: one request, one head, K = V = 32, a ring of 16 entries; windows of several widths, all or some tokens accepted;
verify and commit as gdn_backend.py and spec_utils.commit_mamba_states_after_verify call them. Expected: the folded
state is that of the recurrence in fp64. Got: off by its own norm after 14 windows of 1 token and one of 4 (steps
0 -> 3), and after 6 windows of 2 and one of 8 (steps 1 -> 7). `is_flush` leaves room for two windows of the round
before, so a wider window ends beyond the ring: its last tokens are not stored. 0.5.16 also loses tokens after 6 windows
of 2 and two of 4, because a flush round masks its stores with the old `write_pos`. 0.5.17 to 0.5.19 fold at every
commit, and are right. 0.5.16, and 0.5.20 to 0.5.23.
"""
# Longer than 30 lines: it drives three kinds of ring, and computes the states that they should have.

import os

os.environ.setdefault("TRITON_INTERPRET", "1")
import torch

try:
    from sglang.kernels.ops.attention.linear import fused_sigmoid_gating_recurrent as update
    from sglang.kernels.ops.attention.linear import gdn_replayssm_spec_decode as ring
    from sglang.kernels.ops.attention.linear import gdn_replayssm_spec_fold as fold
except ImportError:
    from sglang.kernels.ops.attention.fla import fused_sigmoid_gating_recurrent as update
    from sglang.kernels.ops.attention.fla import gdn_replayssm_spec_decode as ring
    try:
        from sglang.kernels.ops.attention.fla import gdn_replayssm_spec_fold as fold
    except ImportError:
        fold = None
L, K, ONE = 16, 32, torch.ones(1).int()  # of slot 1 and request row 1
AT_COMMIT = hasattr(ring, "commit_gdn_replayssm_circular")
WINDOWS = {
    "8 x 4": [(4, 4)] * 8, "18 x 1": [(1, 1)] * 18, "6 x 2, 4": [(2, 2)] * 6 + [(4, 4)] * 2,
    "14 x 1, 4": [(1, 1)] * 14 + [(4, 4)], "6 x 2, 8": [(2, 2)] * 6 + [(8, 8)],
    "6 x 2, 8 of which 3": [(2, 2)] * 6 + [(8, 3)],
}  # fmt: skip


def off(windows):
    """The relative error of the state after these windows of (tokens, accepted tokens)."""
    torch.manual_seed(0)
    state, right, A_log, bias = torch.zeros(1, 2, 1, K, K), torch.zeros(K, K).double(), torch.zeros(1), torch.zeros(1)
    d, k, g = torch.zeros(1, 2, 1, L, K), torch.zeros(1, 2, 1, L, K), torch.zeros(1, 2, 1, L)
    v_raw, k_raw, beta = d.clone(), k.clone(), g.clone()
    cursors = {"write_pos": torch.zeros(2).int(), "cache_base": torch.zeros(2).int(),
               "is_flush": torch.zeros(2).to(torch.int8)}  # fmt: skip
    for window, accepted in windows:
        q, key, value, (a, b) = *torch.randn(3, window, 1, K), torch.randn(2, window, 1)
        starts, count = torch.tensor([0, window]).int(), torch.tensor([accepted]).int()
        raw = {"rawv_cache": v_raw[0], "rawk_cache": k_raw[0], "beta_cache": beta[0]}
        rows = {"q": q, "k": key, "v": value, "a": a, "b": b, "A_log": A_log, "dt_bias": bias}
        if fold and not AT_COMMIT:
            rings = {"rawv": v_raw, "rawk": k_raw, "g": g, "beta": beta}
            kept = {f"replayssm_{name}": one[0] for name, one in rings.items()}
            rows |= {"q": q[None], "k": key[None], "v": value[None]}
            update.fused_sigmoid_gating_delta_rule_update(
                **rows, softplus_beta=1.0, softplus_threshold=20.0, initial_state_source=state[0],
                initial_state_indices=ONE, cu_seqlens=starts, use_qk_l2norm_in_kernel=True, disable_state_update=True,
                cache_ring=True, **kept)  # fmt: skip
            fold.commit_gdn_replayssm_fold_all_layers(state, v_raw, k_raw, g, beta, ONE, count, L, 1)
        else:
            rows |= {"checkpoint_state": state[0], "d_cache": d[0], "k_cache": k[0], "g_cache": g[0], **cursors}
            rows |= {"rawv_cache": None, "rawk_cache": None, "beta_cache": None, "replay_indices": ONE,
                     "launch_mode": "verify"} if AT_COMMIT else raw  # fmt: skip
            ring.gdn_replayssm_spec_decode(
                **rows, out=torch.empty(window, 1, K), query_start_loc=starts, ssm_state_indices=ONE, max_cache_len=L,
                max_spec_len=window, null_block_id=-1)  # fmt: skip
            index = {"replay_indices": ONE} if AT_COMMIT else {"state_batch_indices": ONE}
            ring.commit_gdn_replayssm_spec(
                **cursors, num_accepted=count, **index, max_cache_len=L, max_spec_len=window, null_block_id=-1)
            if AT_COMMIT:
                folded(state, d, k, g, cursors, count)
        for t in range(accepted):
            x, v = key[t, 0].double(), value[t, 0].double()
            x, decay = x / (x.square().sum() + 1e-6).sqrt(), -torch.nn.functional.softplus(a[t, 0].double())
            right *= decay.exp()
            right += torch.outer(b[t, 0].double().sigmoid() * (v - right @ x), x)
    cursors["is_flush"].fill_(1)  # what is in the ring still belongs to the state
    if AT_COMMIT:
        folded(state, d, k, g, cursors, 0 * ONE)
    elif not fold:
        ring._launch_gdn_exact_fold(state[0], v_raw[0], k_raw[0], g[0], beta[0], torch.zeros(2).int(), ONE,
                                    *cursors.values(), L, True, -1, 1)  # fmt: skip
    return float((state[0, 1, 0] - right).norm() / right.norm())


def folded(state, d, k, g, cursors, count):
    ring.commit_gdn_replayssm_circular(
        checkpoint_state=state, d_cache=d, k_cache=k, g_cache=g, d_residual_cache=None, k_residual_cache=None,
        state_batch_indices=ONE, replay_indices=ONE, **cursors, accept_lens=count)  # fmt: skip


errors = {name: off(windows) for name, windows in WINDOWS.items()}
wrong = [name for name, error in errors.items() if not error <= 1e-4]
print("\n".join(f"{name}: {error:.1e}" for name, error in errors.items()))
print(f"windows after which the state is off: {'; '.join(f'{name} ({errors[name]:.2g})' for name in wrong) or 'none'}")
raise SystemExit(bool(wrong))
