"""Op sets that multiply narrower than they store, found by the harness as `support.wrong.narrow_products:NAME`.

Each is right except for its roundings. They are implemented independently: by masks of bits, unlike in a yardstick.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from instep.adapters.dense import dense
from instep_optimized import load
from instep_optimized.ops.op_protocols import Ops
from instep_reference.contract.declared_rounding import Product

PLAIN = load("plain")
Round = Callable[[torch.Tensor], torch.Tensor]
BLOCK = 64


def cut(x: torch.Tensor) -> torch.Tensor:
    """fp32 as a tensor core reads it as tf32: without its lower 13 bits."""
    return (x.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)


def nearest(x: torch.Tensor) -> torch.Tensor:
    """fp32 to tf32 as `cvt.rna` does: to nearest, ties away from zero."""
    return ((x.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def bf16(x: torch.Tensor) -> torch.Tensor:
    return x.bfloat16().float()


def three(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return cut(x), cut(x - cut(x))


def product(rounded: Round, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if rounded is three:  # type: ignore[comparison-overlap]
        (a, b), (c, d) = three(x), three(y)
        return a @ c + a @ d + b @ c
    return rounded(x) @ rounded(y)


def by_substitution(rounded: Round, A: torch.Tensor) -> torch.Tensor:
    """(1 + A)^-1 by substitution."""
    eye = torch.eye(A.shape[-1]).expand(A.shape)
    return torch.linalg.solve_triangular(A, eye, upper=False, unitriangular=True)


def in_halves(rounded: Round, A: torch.Tensor) -> torch.Tensor:
    """(1 + A)^-1 of two halves of the rows, put together by products."""
    half = len(A[0]) // 2
    if half < 8:
        return by_substitution(rounded, A)
    T = torch.zeros_like(A)
    T[:, :half, :half], T[:, half:, half:] = (in_halves(rounded, A[:, s, s]) for s in (slice(half), slice(half, None)))
    T[:, half:, :half] = -product(rounded, product(rounded, T[:, half:, half:], A[:, half:, :half]), T[:, :half, :half])
    return T


def chunks(
    rounded: Round, block: int = BLOCK, *, slip: float = 0.0, lost: int = 0, inverse: Any = by_substitution,
) -> Callable[..., Any]:
    """A chunk kernel of one sequence after another; every product is rounded.

    slip: the read-out is so much too large. lost: how many tokens of a block are not written.
    """

    def sequence(q: Any, k: Any, v: Any, g: Any, beta: Any, S: Any) -> Any:
        out = torch.empty_like(v)
        for begin in range(0, len(q), block):
            now = slice(begin, begin + block)
            part = (x[now].transpose(0, 1) for x in (q, k, v))
            Q, K, V = part
            B, G = beta[now].T[..., None], g[now].cumsum(0).T[..., None]
            D = (G - G.mT).tril().exp().tril()
            A = (product(rounded, B * K, K.mT) * D).tril(-1)
            T = inverse(rounded, A)
            w, u = product(rounded, T, B * G.exp() * K), product(rounded, T, B * V)
            if rounded is bf16:
                w, u = bf16(w), bf16(u)
            new = u - product(rounded, w, S)
            read = product(rounded, Q, S) * G.exp()
            read += product(rounded, product(rounded, Q, K.mT) * D, new)
            out[now] = (1 + slip) * read.transpose(0, 1)
            leaves = (G[:, -1:] - G).exp()
            if lost:
                leaves[:, -lost:] = 0
            S = G[:, -1:].exp() * S + product(rounded, K.mT, new * leaves)
        return out, S

    def kernel(*, q: Any, k: Any, v: Any, log_decay: Any, beta: Any, lengths: Any, state: Any) -> Any:
        q, k = (x.repeat_interleave(v.shape[1] // k.shape[1], dim=1) for x in (q, k))
        core, states, row = torch.empty_like(v), state.clone(), 0
        for n, length in enumerate(lengths.tolist()):
            at = slice(row, row + length)
            core[at], states[n] = sequence(q[at], k[at], v[at], log_decay[at], beta[at], state[n])
            row += length
        return core, states

    return kernel


def rows(rounded: Round) -> Callable[..., Any]:
    """A kernel that goes token by token, products rounded."""

    def kernel(*, q: Any, k: Any, v: Any, log_decay: Any, beta: Any, lengths: Any, state: Any) -> Any:
        q, k = (x.repeat_interleave(v.shape[1] // k.shape[1], dim=1) for x in (q, k))
        core, states, row = torch.empty_like(v), state.clone(), 0
        for n, length in enumerate(lengths.tolist()):
            S = states[n]
            for _ in range(length):
                S = S * log_decay[row].exp()[:, None, None]
                new = beta[row][:, None] * (v[row] - product(rounded, k[row][:, None], S)[:, 0])
                S = S + product(rounded, k[row][..., None], new[:, None])
                core[row] = product(rounded, q[row][:, None], S)[:, 0]
                row += 1
            states[n] = S
        return core, states

    return kernel


def same(x: torch.Tensor) -> torch.Tensor:
    return x


def _ops(name: str, window: Callable[..., Any], chunk: Callable[..., Any], products: dict[str, Product]) -> Ops:
    return replace(PLAIN, name=name, gdn=dense(window=window, chunk=chunk), keeps="inputs", products=products)


def _linear(rounded: Round) -> Callable[..., Any]:
    def linear(*, x: Any, weight: Any, shape: Any, to: Any) -> Any:
        return product(rounded, x.flatten(1).float(), weight.float().T).to(x.dtype).view(len(x), *shape)

    return linear


def _mlp(*, x: Any, gate_up: Any, down: Any, to: Any) -> Any:
    gate, up = product(cut, x, gate_up.T).chunk(2, dim=-1)
    return product(cut, torch.nn.functional.silu(gate) * up, down.T)


def _lm_head(*, x: Any, weight: Any, to: Any) -> Any:
    return product(cut, x.float(), weight.float().T)


def _conv(**given: Any) -> Any:
    """Windows keep the rows as they came."""
    silent = tuple(replace(part, store=None, per_row=None) for part in given["parts"])
    out = PLAIN.conv(**{**given, "x": bf16(given["x"]), "parts": silent})
    PLAIN.conv(**given)
    return out


CHUNK = {"gdn.chunk": Product("tf32", block=BLOCK)}
UNDECLARED = _ops("undeclared", rows(same), chunks(cut), {})
SAME = _ops("same", rows(same), chunks(same), {})
CUT = _ops("cut", rows(same), chunks(cut), CHUNK)
MERGED = _ops("merged", rows(same), chunks(cut, inverse=in_halves), CHUNK)
NEAREST = _ops("nearest", rows(same), chunks(nearest), CHUNK)
BF16 = _ops("bf16", rows(same), chunks(bf16), {"gdn.chunk": Product("bf16", block=BLOCK)})
THREE = _ops("three", rows(same), chunks(three), {"gdn.chunk": Product("3xtf32", block=BLOCK)})  # type: ignore[arg-type]
UNDERSTATED = _ops("understated", rows(same), chunks(bf16), CHUNK)
SLIPPED = _ops("slipped", rows(same), chunks(cut, slip=0.02), CHUNK)
LOST = _ops("lost", rows(same), chunks(cut, lost=1), CHUNK)
WINDOW_CUT = _ops("window cut", rows(cut), chunks(cut), CHUNK)
WINDOW_DECLARED = _ops("window declared", rows(cut), chunks(cut), {**CHUNK, "gdn.window": Product("tf32")})

FORMS: dict[str, dict[str, Any]] = {
    "linear": {"linear": _linear(cut)}, "mlp": {"mlp": _mlp}, "lm_head": {"lm_head": _lm_head}, "conv": {"conv": _conv},
}
LINEAR, MLP, LM_HEAD, CONV = (replace(PLAIN, name=name, **ops) for name, ops in FORMS.items())
LINEAR_DECLARED, MLP_DECLARED, LM_HEAD_DECLARED, CONV_DECLARED = (
    replace(PLAIN, name=name, **ops, products={name: Product("bf16" if name == "conv" else "tf32")})
    for name, ops in FORMS.items()
)
NO_FORM = replace(PLAIN, name="no form", products={"gdn": Product("tf32")})
