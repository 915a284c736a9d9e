"""The gated delta rule in chunks, written independently of the recurrence, so that each can be checked by the other.

It is slow: decays are formed for every pair of tokens, so that no exponent is ever positive. Leaves out: the layer
around the rule.
"""

from collections.abc import Callable
from functools import partial

import torch

At = Callable[[str, torch.Tensor], torch.Tensor]
Inverse = Callable[[torch.Tensor], torch.Tensor]
NEAR = 40.0  # log of the largest factor that scales an operand; a sum of squares of such numbers fits into fp32
SOLVED = 16  # maximum rows of a triangular block that is inverted by substitution; a larger one is merged from two


def merged(lower: torch.Tensor) -> torch.Tensor:
    """Invert I + lower, strictly lower triangular (B, HV, T, T): halves are inverted, and merged by products."""
    tokens = lower.shape[-1]
    if tokens <= SOLVED:
        return substituted(lower)
    half = -(-tokens // (2 * SOLVED)) * SOLVED
    first, last = merged(lower[..., :half, :half]), merged(lower[..., half:, half:])
    below = -(last @ lower[..., half:, :half]) @ first
    above = torch.zeros_like(lower[..., :half, half:])
    return torch.cat((torch.cat((first, above), -1), torch.cat((below, last), -1)), -2)


def substituted(lower: torch.Tensor) -> torch.Tensor:
    """Compute the same inverse by substitution alone, row after row: no operand of a product is rounded on the way."""
    eye = torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device).expand(lower.shape)
    solved: torch.Tensor = torch.linalg.solve_triangular(lower, eye, upper=False, unitriangular=True)
    return solved


def recur_in_chunks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, log_decay: torch.Tensor, erase: torch.Tensor,
    write: torch.Tensor, state: torch.Tensor, chunk: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `gdn.recur`, `chunk` tokens at a time.

    Let G_i be the sum of log_decay from the chunk's first token to token i. Let S be the state before the chunk, and
    u_i the update of token i: S_i = exp(log_decay_i) S_{i-1} + k_i u_i^T. With S_{i-1} unrolled this gives

        u_i + sum_{j<i} <erase_i k_i, exp(G_i - G_j) k_j> u_j  =  write_i v_i - S^T (exp(G_i) erase_i k_i)

    which is a unit lower triangular system in u. Then

        o_i = S^T (exp(G_i) q_i) + sum_{j<=i} <q_i, exp(G_i - G_j) k_j> u_j
        S after the chunk = exp(G_end) S + sum_j (exp(G_end - G_j) k_j) u_j^T

    Shapes:  as `gdn.recur`; gates scalar (last axis 1) or one per channel.
    Mirrors: the UT transform of DeltaNet (arXiv:2406.06484), solved instead of inverted.
    """
    out = []
    for begin in range(0, q.shape[1], chunk):
        part = [x[:, begin : begin + chunk].transpose(1, 2) for x in (q, k, v, log_decay, erase, write)]
        read, state = _one_chunk(part[0], part[1], part[2], part[3], part[4], part[5], state)
        out.append(read.transpose(1, 2))
    return torch.cat(out, dim=1) if out else v, state


def recur_by_products(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, log_decay: torch.Tensor, erase: torch.Tensor,
    write: torch.Tensor, state: torch.Tensor, chunk: int, at: At, residual: bool = False, inverse: Inverse = merged,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `recur_in_chunks` as published kernels do: everything but the gates is a product of two matrices.

    With A = strictly lower part of (erase k) k^T exp(G_i - G_j) and T = (I + A)^-1, per chunk:

        w = T (exp(G) erase k)      u = T (write v)      v_new = u - w S
        o = (exp(G) q) S + (tril(q k^T) exp(G_i - G_j)) v_new
        S <- exp(G_end) S + (exp(G_end - G) k)^T v_new

    Such kernels store w, u and v_new between launches. So each goes through `at`, which may round it, and the
    computation continues with the result of `at`.

    residual: T is applied to what is left to learn, and gates to the results of products instead of to their operands:

        v_new = T (write v - erase exp(G) (k S))        S <- exp(G_end) S + k^T (exp(G_end - G) v_new)
        o = exp(G) (q S) + (tril(q k^T) exp(G_i - G_j)) v_new

    Only T and the decayed q k^T are kept between launches. `at` is shown the updates as "update".

    inverse: how T is formed, `merged` or `substituted`. Without rounding both are the same T.

    If log_decay has one number per channel, exp(G_i - G_j) is between the keys of a product, so decays go to the
    operands of products: as `_pairs` does, or with a residual as `_pairs_by_products`. A residual's erase stays a gate
    of results.

    Shapes:  as `gdn.recur`; gates scalar (last axis 1), or log_decay one per channel.
    Mirrors: fla-core 0.6.0 `chunk_gated_delta_rule`, and SGLang's copy of it: the inverse is formed in blocks of 16
             that are merged by products (`merged`); decays are differences of running sums. Differs: q arrives
             already scaled.
    """
    out = []
    for begin in range(0, q.shape[1], chunk):
        part = [x[:, begin : begin + chunk].transpose(1, 2) for x in (q, k, v, log_decay, erase, write)]
        one = partial(_one_residual_chunk, middle=(chunk - 1) // 2) if residual else _one_product_chunk
        read, state = one(part[0], part[1], part[2], part[3], part[4], part[5], state, at, inverse)
        out.append(read.transpose(1, 2))
    return torch.cat(out, dim=1) if out else v, state


def _one_product_chunk(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, log_decay: torch.Tensor, erase: torch.Tensor,
    write: torch.Tensor, state: torch.Tensor, at: At, inverse: Inverse,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Shapes: q, k (B, HV, T, K), v (B, HV, T, V), gates (B, HV, T, 1) -> o (B, HV, T, V), state (B, HV, K, V)."""
    total, keys = log_decay.cumsum(2), erase * k  # (B, HV, T, 1 or K), G;  (B, HV, T, K)
    T = inverse(_pairs(keys, k, total).tril(-1))
    w, u = at("w", T @ (total.exp() * keys)), at("u", T @ (write * v))
    added = at("v_new", u - w @ state)
    out = (total.exp() * q) @ state + _pairs(q, k, total) @ added
    leaving = (total[:, :, -1:] - total).exp() * k
    return out, total[:, :, -1, :, None].exp() * state + leaving.transpose(-1, -2) @ added


def _one_residual_chunk(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, log_decay: torch.Tensor, erase: torch.Tensor,
    write: torch.Tensor, state: torch.Tensor, at: At, inverse: Inverse, middle: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Shapes: q, k (B, HV, T, K), v (B, HV, T, V), gates (B, HV, T, 1) -> o (B, HV, T, V), state (B, HV, K, V).

    middle: number of the block's middle token, also of a block that is not full
    """
    total = log_decay.cumsum(2)  # (B, HV, T, 1 or K), G
    if total.shape[-1] > 1:
        T = inverse((erase * _pairs_by_products(k, k, total, middle)).tril(-1))
        added = at("update", T @ (write * v - erase * ((total.exp() * k) @ state)))
        leaving = (total[:, :, -1:] - total).exp() * k
        out = (total.exp() * q) @ state + _pairs_by_products(q, k, total, middle) @ added
        return out, total[:, :, -1, :, None].exp() * state + leaving.transpose(-1, -2) @ added
    between, turned = _between(total)[..., 0], k.transpose(-1, -2)  # (B, HV, T, T), (B, HV, K, T)
    T = inverse((erase * (k @ turned) * between).tril(-1))
    added = at("update", T @ (write * v - erase * total.exp() * (k @ state)))
    out = total.exp() * (q @ state) + ((q @ turned) * between) @ added
    return out, total[:, :, -1, :, None].exp() * state + turned @ ((total[:, :, -1:] - total).exp() * added)


def _pairs(x: torch.Tensor, k: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """Compute <x_i, exp(G_i - G_j) k_j> for j <= i, 0 for j > i, from x, k (B, HV, T, K) and G -> (B, HV, T, T).

    With G per channel, SOLVED rows at a time: M is the G of the first of them. Earlier tokens are multiplied as exp(G_i
    - M) x_i and exp(M - G_j) k_j, exponents that are at most 0. Pairs among the rows are summed one by one.
    Mirrors: fla-core 0.6.0 `chunk_kda` (`chunk_intra.py`).
    """
    if total.shape[-1] == 1:
        return (x @ k.transpose(-1, -2)) * _between(total)[..., 0]
    found = []
    for begin in range(0, x.shape[2], SOLVED):
        rows, here = x[:, :, begin : begin + SOLVED], total[:, :, begin : begin + SOLVED]
        first, last = here[:, :, :1], begin + rows.shape[2]
        early = (first - total[:, :, :begin]).exp() * k[:, :, :begin]
        among = (rows[:, :, :, None] * _between(here) * k[:, :, None, begin:last]).sum(-1)
        parts = ((here - first).exp() * rows) @ early.transpose(-1, -2), among
        found.append(torch.nn.functional.pad(torch.cat(parts, -1), (0, x.shape[2] - last)))
    return torch.cat(found, -2)


def _pairs_by_products(x: torch.Tensor, k: torch.Tensor, total: torch.Tensor, middle: int) -> torch.Tensor:
    """Compute what `_pairs` does for G per channel, with all pairs j < i by products of exp(G_i - M) x_i and
    exp(M - G_j) k_j.

    M is the G of the block's middle token, or of its last token if that is earlier. A head in which some exponent
    exceeds NEAR, or a format's range, takes an M between i and j (`_by_halves`). Pairs i = j do not decay: they are
    sums.
    """
    about = total - total[:, :, min(middle, total.shape[2] - 1), None]
    found = ((about.exp() * x) @ ((-about).exp() * k).transpose(-1, -2)).tril(-1)
    near = (about.abs() <= NEAR).all(-1).all(-1) & found.isfinite().all(-1).all(-1)  # (B, HV)
    return torch.where(near[..., None, None], found, _by_halves(x, k, total)) + torch.diag_embed((x * k).sum(-1))


def _by_halves(x: torch.Tensor, k: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """Compute the pairs j < i: M is the G of the last token of a first half of tokens, so that no exponent exceeds 0.

    Pairs within a half are halved again. Shapes: as `_pairs`
    """
    tokens = x.shape[2]
    if tokens == 1:
        return torch.zeros_like(x[..., :1])
    half = 1 << (tokens - 1).bit_length() - 1  # a power of two
    first, last = slice(half), slice(half, None)
    M = total[:, :, half - 1 : half]
    across = ((total[:, :, last] - M).exp() * x[:, :, last]) @ ((M - total[:, :, first]).exp() * k[:, :, first]).mT
    early, late = (_by_halves(x[:, :, part], k[:, :, part], total[:, :, part]) for part in (first, last))
    return torch.cat((torch.nn.functional.pad(early, (0, tokens - half)), torch.cat((across, late), -1)), -2)


def _one_chunk(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, log_decay: torch.Tensor, erase: torch.Tensor,
    write: torch.Tensor, state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Shapes: q, k (B, HV, T, K), v (B, HV, T, V), gates alike -> o (B, HV, T, V), state (B, HV, K, V)."""
    total = log_decay.cumsum(2)  # (B, HV, T, 1 or K), G
    between = _between(total)  # (B, HV, T, T, 1 or K)
    keys = erase * k  # (B, HV, T, K)
    recall = torch.einsum("bhik,bhijk,bhjk->bhij", keys, between.expand(*between.shape[:-1], k.shape[-1]), k)
    wanted = write * v - (total.exp() * keys) @ state  # (B, HV, T, V), the right side of the system
    # (B, HV, T, V), the updates u
    added = torch.linalg.solve_triangular(recall.tril(-1), wanted, upper=False, unitriangular=True)
    attention = torch.einsum("bhik,bhijk,bhjk->bhij", q, between.expand(*between.shape[:-1], k.shape[-1]), k)
    out = (total.exp() * q) @ state + attention @ added
    leaving = (total[:, :, -1:] - total).exp() * k
    return out, total[:, :, -1, :, None].exp() * state + leaving.transpose(-1, -2) @ added


def _between(total: torch.Tensor) -> torch.Tensor:
    """Compute exp(G_i - G_j) for j <= i, 0 for j > i: (B, HV, T, 1 or K) -> (B, HV, T, T, 1 or K)."""
    tokens = total.shape[2]
    later = torch.ones(tokens, tokens, dtype=torch.bool, device=total.device).triu(1)
    return (total[:, :, :, None] - total[:, :, None]).masked_fill(later[..., None], float("-inf")).exp()
