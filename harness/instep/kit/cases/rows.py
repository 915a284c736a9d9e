"""Cases of the ops that need only rows: embedding, linear, norms, GDN and attention inputs, MLP, pick, accept.

Leaves out: everything with memory (`conv_and_gdn.py`, `paged_kv.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from instep_optimized.ops.op_protocols import ExpertWeights

from .case import BF16, FP32, Call, Case, Draw, Inputs, at

Make = Callable[[Draw, torch.dtype], Inputs]


def row_case(op: str, name: str, make: Make, dtype: torch.dtype, seed: int, exact: bool = False) -> Case:
    """A case without memory."""
    return Case(op, f"{name}-{str(dtype)[6:]}", lambda device: Call(make(Draw(seed, device), dtype), {}), exact)


def embed(draw: Draw, dtype: torch.dtype) -> Inputs:
    return {"tokens": draw.ints((3, 0, 16, 3)), "table": draw.normal(17, 32, dtype=dtype), "to": at("embedding")}


def small(x: torch.Tensor) -> torch.Tensor:
    """The rows, of which the second one is so small that the eps of a norm matters."""
    x[1] *= 1e-3
    return x


def norm(draw: Draw, dtype: torch.dtype) -> Inputs:
    x = small(draw.normal(5, 32, dtype=dtype))
    return {"x": x, "weight": draw.normal(32, dtype=dtype, scale=0.2), "eps": 1e-6, "to": at("normed")}


def norm_of_latents(draw: Draw, dtype: torch.dtype) -> Inputs:
    inputs = norm(draw, dtype)
    wider = small(draw.normal(5, 1, 40, dtype=dtype))  # as `linears` gives them: a view on something wider
    return {**inputs, "x": wider[..., :32], "to": at("value")}


def linear(draw: Draw, dtype: torch.dtype) -> Inputs:
    weight = draw.normal(24, 32, dtype=dtype, scale=0.2)
    return {"x": draw.normal(5, 32, dtype=dtype), "weight": weight, "shape": (3, 8), "to": at("z")}


def linear_blocks(draw: Draw, dtype: torch.dtype) -> Inputs:
    weight = draw.normal(16, 32, dtype=dtype, scale=0.2)
    return {"x": draw.normal(3, 4, 8, dtype=dtype), "weight": weight, "shape": (16,), "to": at("mixer")}


def pair(draw: Draw, dtype: torch.dtype) -> Inputs:
    return {"x": draw.normal(3, 32, dtype=dtype), "y": draw.normal(3, 32, dtype=dtype), "to": at("residual")}


def scaled_pair(draw: Draw, dtype: torch.dtype) -> Inputs:
    return {**pair(draw, dtype), "alpha": 3.5565, "beta": -0.75}


def gdn_inputs(H: int, HV: int, K: int, V: int, *channels: int, **bounds: float) -> Make:
    """channels: key channels, if each has its decay. bounds: of beta, or of a safe gate."""

    def make(draw: Draw, dtype: torch.dtype) -> Inputs:
        N = 5
        return {
            "mixed": small(draw.normal(N, 2 * H * K + HV * V, dtype=dtype)),
            "a": draw.normal(N, HV, *channels, dtype=dtype, scale=8.0),
            "b": draw.normal(N, HV, dtype=dtype, scale=3.0),
            "A_log": draw.uniform(HV, low=-3.0, high=2.5),
            "dt_bias": draw.normal(HV, *channels, dtype=dtype),
            "key_heads": H,
            "key_dim": K,
            "to": tuple(at(c) for c in ("q", "k", "v", "log_decay", "beta")),
            **bounds,
        }

    return make


def selective_inputs(H: int, HV: int, K: int, V: int) -> Make:
    def make(draw: Draw, dtype: torch.dtype) -> Inputs:
        given = gdn_inputs(H, HV, K, V)(draw, dtype)
        del given["b"]
        return {**given, "to": tuple(at(c) for c in ("q", "k", "v", "log_decay", "write"))}

    return make


def lightning_inputs(draw: Draw, dtype: torch.dtype) -> Inputs:
    return {"qkv": draw.normal(5, 4, 2 * 16 + 24, dtype=dtype), "log_decay": draw.uniform(4, low=-0.6, high=-0.01),
            "key_dim": 16, "to": tuple(at(c) for c in ("q", "k", "v", "log_decay", "write"))}  # fmt: skip


def add_skip(draw: Draw, dtype: torch.dtype) -> Inputs:
    core, v = draw.normal(5, 4, 32, dtype=dtype), draw.normal(5, 4, 32)
    return {"core": core, "v": v, "weight": draw.normal(4), "to": at("skip")}


def gated_group_norm(draw: Draw, dtype: torch.dtype) -> Inputs:
    core, z = small(draw.normal(5, 6, 16, dtype=dtype)), draw.normal(5, 6, 16, dtype=dtype)
    core[:, :3] *= 8  # groups of three heads, with unequal norms
    weight = 1 + draw.normal(6 * 16, scale=0.2)
    return {"core": core, "z": z, "weight": weight, "eps": 1e-5, "groups": 2, "to": at("gated")}


def gated_norm(gate: str) -> Make:
    def make(draw: Draw, dtype: torch.dtype) -> Inputs:
        core, z = small(draw.normal(5, 4, 32, dtype=dtype)), draw.normal(5, 4, 32, dtype=dtype)
        weight = 1 + draw.normal(32, scale=0.2)
        return {"core": core, "z": z, "weight": weight, "eps": 1e-6, "gate": gate, "to": at("gated")}

    return make


def attention_inputs(draw: Draw, dtype: torch.dtype) -> Inputs:
    return {
        "projected": small(draw.normal(4, 4, 2, 16, dtype=dtype)),
        "key_raw": small(draw.normal(4, 2, 16, dtype=dtype)),
        "positions": draw.ints((0, 1, 63, 400)),
        "q_norm": draw.normal(16, dtype=dtype, scale=0.2),
        "k_norm": draw.normal(16, dtype=dtype, scale=0.2),
        "eps": 1e-6,
        "rotary_dim": 8,
        "theta": 1e4,
        "to": (at("query"), at("key")),
    }


def key_inputs(draw: Draw, dtype: torch.dtype) -> Inputs:
    names = ("key_raw", "positions", "k_norm", "eps", "rotary_dim", "theta")
    return {**{name: x for name, x in attention_inputs(draw, dtype).items() if name in names}, "to": at("key")}


def latent_inputs(draw: Draw, dtype: torch.dtype) -> Inputs:
    wider = small(draw.normal(4, 5 * 13 + 20 + 8, dtype=dtype))  # as `linears` gives them: views on something wider
    return {
        "projected": wider[:, : 5 * 13].view(4, 5, 13),  # a gate follows the 12 channels of each head
        "key_raw": wider[:, None, 5 * 13 :],
        "positions": draw.ints((0, 1, 63, 400)),
        "norm": draw.normal(20, dtype=dtype, scale=0.2),
        "eps": 1e-6,
        "rotary_dim": 8,
        "theta": 1e4,
        "to": (at("query"), at("key"), at("value")),
    }


def output_gate(*gate: int) -> Make:
    """gate: axes of a head's query and gate."""

    def make(draw: Draw, dtype: torch.dtype) -> Inputs:
        attended, projected = draw.normal(3, 4, 16, dtype=dtype), draw.normal(3, 4, *gate, dtype=dtype)
        return {"attended": attended, "projected": projected, "to": at("opened")}

    return make


def mlp(draw: Draw, dtype: torch.dtype) -> Inputs:
    gate_up, down = draw.normal(48, 32, dtype=dtype, scale=0.2), draw.normal(32, 24, dtype=dtype, scale=0.2)
    return {"x": draw.normal(5, 32, dtype=dtype), "gate_up": gate_up, "down": down, "to": at("mlp")}


def squared_mlp(draw: Draw, dtype: torch.dtype) -> Inputs:
    given = mlp(draw, dtype)
    up = given.pop("gate_up")[:24]
    return {**given, "up": up}


def moe(norm_topk: bool, shared: bool, experts: int = 5) -> Make:
    def make(draw: Draw, dtype: torch.dtype) -> Inputs:
        E, D, width = experts, 32, 16

        def weight(*shape: int) -> torch.Tensor:
            return draw.normal(*shape, dtype=dtype, scale=0.3)

        weights = ExpertWeights(
            router=weight(E, D),
            gate_up=weight(E, 2 * width, D),
            down=weight(E, D, width),
            shared_gate_up=weight(2 * width, D) if shared else None,
            shared_down=weight(D, width) if shared else None,
            shared_gate=weight(1, D) if shared else None,
        )
        return {"x": draw.normal(4, D, dtype=dtype), "weights": weights, "top_k": 2, "norm_topk": norm_topk,
                "to": at("mlp")}

    return make


def sigmoid_moe(groups: int, best: int, norm_topk: bool) -> Make:
    """Sigmoid shares, a bias that chooses, the `best` groups of `groups`, and a shared expert without a gate."""

    def make(draw: Draw, dtype: torch.dtype) -> Inputs:
        inputs = moe(norm_topk, True, experts=12)(draw, dtype)
        weights = replace(inputs["weights"], shared_gate=None, router_bias=draw.normal(12, scale=0.5), groups=groups,
                          groups_per_token=best, scale=2.446)  # fmt: skip
        return {**inputs, "weights": weights, "top_k": 3}

    return make


def clamped_moe(draw: Draw, dtype: torch.dtype) -> Inputs:
    """A sigmoid router and experts with a clamped SwiGLU: of the shared one alone, silu cannot be below -limit."""
    inputs = sigmoid_moe(1, 1, True)(draw, dtype)
    return {**inputs, "weights": replace(inputs["weights"], limit=0.1, shared_limit=0.75)}


def squared_moe(latent: int) -> Make:
    """A sigmoid router and experts without gates, over latents of this width. latent 0: over rows"""

    def make(draw: Draw, dtype: torch.dtype) -> Inputs:
        inputs = sigmoid_moe(1, 1, True)(draw, dtype)
        given, E, D, width = inputs["weights"], 12, 32, 16

        def weight(*shape: int) -> torch.Tensor:
            return draw.normal(*shape, dtype=dtype, scale=0.3)

        around = {"to_latent": weight(latent, D), "from_latent": weight(D, latent)} if latent else {}
        weights = replace(given, gate_up=weight(E, width, latent or D), down=weight(E, latent or D, width),
                          shared_gate_up=weight(width, D), gated=False, **around)  # fmt: skip
        return {**inputs, "weights": weights}

    return make


def lm_head(draw: Draw, dtype: torch.dtype) -> Inputs:
    return {"x": draw.normal(3, 32, dtype=dtype), "weight": draw.normal(17, 32, dtype=dtype), "to": at("logits")}


def pick(draw: Draw, dtype: torch.dtype) -> Inputs:
    logits = draw.normal(4, 17, dtype=dtype)
    logits[1, 3] = logits[1, 11] = 9.0  # a tie: the lowest index
    logits[2] = 0.0
    return {"logits": logits, "to": at("pick")}


def pick_in_blocks(draw: Draw, dtype: torch.dtype) -> Inputs:
    """A vocabulary that several programs share: ties between blocks, the maximum in the last block, no maximum."""
    logits = draw.normal(4, 33_000, dtype=dtype)
    logits[0, 5] = logits[0, 20_000] = logits[0, 32_999] = 9.0
    logits[1, 32_999], logits[2] = 9.0, float("-inf")
    return {"logits": logits, "to": at("pick")}


def accept(draw: Draw, dtype: torch.dtype) -> Inputs:
    """All accepted, none, some, the root alone, idle, and padding that would match if the op read it."""
    window = [[9, 1, 2, 3], [9, 1, 2, 3], [9, 1, 2, 3], [9, 0, 0, 0], [9, 1, 2, 3], [9, 1, 2, 3]]
    picks = [[1, 2, 3, 4], [5, 2, 3, 4], [1, 2, 7, 4], [6, 0, 0, 0], [1, 2, 3, 4], [1, 2, 3, 4]]
    count = (4, 4, 4, 1, 0, 2)
    flat = [draw.ints([x for row in rows for x in row]).view(-1, 4) for rows in (window, picks)]
    own = draw.ints([-1] * len(count))
    return {"window": flat[0], "picks": flat[1], "count": draw.ints(count), "forced_last": own, "forced_bonus": own}


def accept_forced(draw: Draw, dtype: torch.dtype) -> Inputs:
    """Forced counts below and above the op's own, beyond the window, for an idle request; only a bonus; and none."""
    correct, bonus = draw.ints((0, 3, 1, 5, 2, -1)), draw.ints((-1, 77, 0, 8, 5, 6))
    return {**accept(draw, dtype), "forced_last": correct, "forced_bonus": bonus}


def accept_capped(draw: Draw, dtype: torch.dtype) -> Inputs:
    """Caps below, at and above the accepted drafts, own ones and forced ones; for a root alone; and none."""
    return {**accept_forced(draw, dtype), "forced_last": draw.ints((-1, 3, -1, -1, -1, 1)),
            "caps": draw.ints((1, 2, 3, 0, -1, -1))}  # fmt: skip


def accept_none(draw: Draw, dtype: torch.dtype) -> Inputs:
    empty, none = draw.ints(()).view(0, 4), draw.ints(())
    return {"window": empty, "picks": empty, "count": none, "forced_last": none, "forced_bonus": none}


def empty_rows(make: Make, *names: str) -> Make:
    """The same call with no rows."""

    def emptied(draw: Draw, dtype: torch.dtype) -> Inputs:
        inputs = make(draw, dtype)
        return {**inputs, **{name: inputs[name][:0] for name in names}}

    return emptied


ROWS = [
    row_case(op, name, make, dtype, seed)
    for seed, (op, name, make) in enumerate([
        ("norm", "rows", norm),
        ("norm", "empty", empty_rows(norm, "x")),
        ("linear", "shaped", linear),
        ("linear", "blocks", linear_blocks),
        ("linear", "empty", empty_rows(linear, "x")),
        ("add", "rows", pair),
        ("gdn_inputs", "r1", gdn_inputs(2, 2, 16, 16)),
        ("gdn_inputs", "r2", gdn_inputs(2, 4, 16, 32)),
        ("gdn_inputs", "r3", gdn_inputs(1, 3, 32, 16)),
        ("gdn_inputs", "empty", empty_rows(gdn_inputs(2, 4, 16, 32), "mixed", "a", "b")),
        ("gated_norm", "silu", gated_norm("silu")),
        ("gated_norm", "sigmoid", gated_norm("sigmoid")),
        ("gated_norm", "empty", empty_rows(gated_norm("silu"), "core", "z")),
        ("attention_inputs", "rows", attention_inputs),
        ("attention_inputs", "empty", empty_rows(attention_inputs, "projected", "key_raw", "positions")),
        ("output_gate", "rows", output_gate(2, 16)),
        ("mlp", "rows", mlp),
        ("mlp", "empty", empty_rows(mlp, "x")),
        ("moe", "shared", moe(True, True)),
        ("moe", "unnormalised", moe(False, False)),
        ("moe", "empty", empty_rows(moe(True, True), "x")),
        ("lm_head", "rows", lm_head),
        ("lm_head", "empty", empty_rows(lm_head, "x")),
        ("key_inputs", "rows", key_inputs),
        ("key_inputs", "empty", empty_rows(key_inputs, "key_raw", "positions")),
        ("gdn_inputs", "channels", gdn_inputs(2, 2, 16, 16, 16)),
        ("norm", "latents", norm_of_latents),
        ("moe", "sigmoid-in-groups", sigmoid_moe(4, 2, True)),
        ("moe", "sigmoid", sigmoid_moe(1, 1, False)),
        ("gdn_inputs", "safe-gate", gdn_inputs(2, 3, 16, 32, 16, decay_bound=-5.0)),
        ("gdn_inputs", "wide-beta", gdn_inputs(2, 4, 16, 32, beta_bound=2.0)),
        ("latent_inputs", "rows", latent_inputs),
        ("latent_inputs", "empty", empty_rows(latent_inputs, "projected", "key_raw", "positions")),
        ("output_gate", "heads", output_gate(13)),
        ("multiply", "rows", pair),
        ("scaled_add", "rows", scaled_pair),
        ("lightning_inputs", "rows", lightning_inputs),
        ("lightning_inputs", "empty", empty_rows(lightning_inputs, "qkv")),
        ("selective_inputs", "rows", selective_inputs(2, 4, 16, 32)),
        ("selective_inputs", "empty", empty_rows(selective_inputs(2, 4, 16, 32), "mixed", "a")),
        ("add_skip", "rows", add_skip),
        ("gated_group_norm", "rows", gated_group_norm),
        ("gated_group_norm", "empty", empty_rows(gated_group_norm, "core", "z")),
        ("squared_mlp", "rows", squared_mlp),
        ("moe", "squared", squared_moe(0)),
        ("moe", "squared-latents", squared_moe(12)),
        ("moe", "clamped", clamped_moe),
    ], start=500)
    for dtype in (FP32, BF16)
]

EXACT_ROWS = [
    row_case("embed", "rows", embed, BF16, 600, exact=True),
    row_case("embed", "empty", empty_rows(embed, "tokens"), FP32, 601, exact=True),
    row_case("concat", "rows", pair, BF16, 602, exact=True),
    row_case("concat", "empty", empty_rows(pair, "x", "y"), FP32, 603, exact=True),
    row_case("pick", "ties", pick, FP32, 604, exact=True),
    row_case("pick", "blocks", pick_in_blocks, FP32, 608, exact=True),
    row_case("pick", "empty", empty_rows(pick, "logits"), FP32, 605, exact=True),
    row_case("accept", "ragged", accept, FP32, 606, exact=True),
    row_case("accept", "empty", accept_none, FP32, 607, exact=True),
    row_case("accept", "forced", accept_forced, FP32, 608, exact=True),
    row_case("accept", "capped", accept_capped, FP32, 609, exact=True),
]
