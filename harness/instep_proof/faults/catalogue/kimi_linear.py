"""Faults of Kimi-Linear: a decay of another channel, another latent, a router that is no sigmoid, weights mixed up.

Key and value heads of KDA are equally wide, so many of these faults change no shape. Leaves out: faults of states that
do not depend on the kind of decay (`rollback.py`, `rings.py`).
"""

from instep.setting import Setting

from .fault import Edit, Fault, of_family
from .ranks import OF_RANK_0, OVER, PART, TWO

GDN, ATTEND, MLP = (f"instep_optimized/ops/plain/{name}.py" for name in ("gdn", "attend", "mlp"))
WEIGHTS, LAYER, LATENT = (
    f"instep_optimized/{name}.py" for name in ("weights", "model/gdn", "model/latent_attention"))
DECAY = "log_decay = -rate[(..., *[None] * (a.dim() - 2))] * softplus(a.to(q.dtype) + dt_bias.to(q.dtype))"
EXPANDED = '    each = torch.einsum("pr,hcr->phc", latents[:, 0], up.view(heads, -1, up.shape[1]))\n'

_fault = of_family("kimi")

FAULTS: tuple[Fault, ...] = (
    _fault("decay-of-the-next-channel", "channel-decay", "A key channel forgets at the rate of the channel before it.",
           Edit(GDN, DECAY, DECAY + ".roll(1, -1)")),
    _fault("decay-of-the-first-channel", "channel-decay", "All channels of a head forget at the rate of its first.",
           Edit(GDN, DECAY, DECAY.replace("= ", "= (", 1) + ")[..., :1].expand_as(a)")),
    _fault("decay-averaged-over-the-head", "channel-decay", "A head forgets at the mean rate of its channels.",
           Edit(GDN, DECAY, DECAY.replace("= ", "= (", 1) + ").mean(-1, keepdim=True).expand_as(a)")),
    _fault("decay-with-the-bound-of-another-model", "channel-decay",
           "A channel keeps e^-5 at least, as with a safe gate.",
           Edit(GDN, DECAY, DECAY.replace("= ", "= (", 1) + ").clamp(min=-5.0)")),
    _fault("decay-along-the-values", "channel-decay", "The decay of key channel i is applied to value channel i.",
           Edit(GDN, "S *= decay[(..., *[None] * (S.dim() - decay.dim()))]",
                "S *= decay[..., None, :] if S.dim() - decay.dim() == 1 else decay[..., None, None]"),
           mistake="decay-of-values"),
    _fault("decay-bias-of-the-first-channel", "channel-decay", "All channels of a head have the bias of its first.",
           Edit.of(GDN, "softplus(a.to(q.dtype) + dt_bias{ => [..., :1]}.to(q.dtype))")),
    _fault("decay-bias-transposed", "channel-decay", "The bias is stored head by head, and read channel by channel.",
           Edit(WEIGHTS, 'stored.wide(f"{at}.dt_bias").view(config.value_heads, config.key_dim)',
                'stored.wide(f"{at}.dt_bias").view(config.key_dim, config.value_heads).mT.contiguous()')),
    _fault("ring-keeps-one-decay-per-head", "channel-decay", "A ring keeps the mean decay of a head.",
           Edit.of(GDN, "Updates(token.k, write.decay{ => .mean(-1, keepdim=True).expand_as(write.decay)}, update)"),
           how=Setting(strategy="rerun"), mistake="one-decay-of-all-channels"),
    _fault("delta-term-dropped", "delta-rule", "A token writes its value, and not only what the state lacks.",
           Edit.of(GDN, "write.beta[..., None] * {(write.v - _sum_by_halves(S * write.key) if recalls else write.v) => "
                   "write.v}"), mistake="recall-missing"),
    _fault("gates-of-low-rank-swapped", "low-rank",
           "The first matrices of the output gate and of the decay are swapped.",
           Edit(WEIGHTS, '("g_a_proj", "b_proj", "f_a_proj")', '("f_a_proj", "b_proj", "g_a_proj")')),
    _fault("output-gate-by-the-decay", "low-rank", "The output gate has the second matrix of the decay.",
           Edit(WEIGHTS, 'stored.take(f"{at}.g_b_proj.weight")', 'stored.take(f"{at}.f_b_proj.weight")')),
    _fault("conv-of-queries-for-keys", "low-rank", "Queries pass the conv of the keys, and keys that of the queries.",
           Edit(WEIGHTS, 'conv=torch.cat([stored.take(f"{at}.{name}_conv1d.weight") for name in "qkv"]).squeeze(1)',
                'conv=torch.cat([stored.take(f"{at}.{name}_conv1d.weight") for name in "kqv"]).squeeze(1)')),
    _fault("output-gate-as-silu", "low-rank", "The output gate is a silu, as in GDN.",
           Edit.of(LAYER, "gate={config.output_gate => 'silu'}")),
    _fault("norm-factor-as-an-offset", "low-rank", "The stored factor w of a norm is taken for 1 + w.",
           Edit.of(WEIGHTS, "self.take(name) if config.centred_norms else self.wide(name){ - 1 => }")),
    _fault("latent-of-the-token-before", "latent", "Values are expanded from the latent of the token before.",
           Edit.of(ATTEND, "each[..., own:]{ => .roll(1, 0)}")),
    _fault("latent-without-its-norm", "latent", "The latent is stored without its norm.",
           Edit.of(LATENT, "((key, self.keys), ({value => raw}, self.values))")),
    _fault("latent-with-the-eps-of-the-model", "latent", "The norm of the latent has the eps of the other norms.",
           Edit.of(LATENT, "eps={LATENT_EPS => config.eps}, to=at(\"value\")")),
    _fault("shared-key-first", "latent", "The shared part of a key comes before the head's own.",
           Edit(ATTEND, "torch.cat([each[..., :own], shared.expand(-1, heads, -1)], dim=-1)",
                "torch.cat([shared.expand(-1, heads, -1), each[..., :own]], dim=-1)")),
    _fault("shared-key-left-out", "latent", "Scores lack the shared part of the keys.",
           Edit.of(ATTEND, "{ => 0 * }shared.expand(-1, heads, -1)")),
    _fault("latents-expanded-keys-first", "latent", "All keys are taken to come before all values in the expansion.",
           Edit(ATTEND, EXPANDED, "    half, rank = heads * own, up.shape[1]\n"
                "    parts = [part.view(heads, -1, rank) for part in (up[:half], up[half:])]\n"
                "    up = torch.cat(parts, dim=1).flatten(0, 1)\n" + EXPANDED)),
    _fault("scores-scaled-by-the-own-key", "latent", "Scores are scaled by the width of a head's own key.",
           Edit(ATTEND, "head_dim**-0.5", "(head_dim - pages.keys.shape[-1] * (up is not None)) ** -0.5")),
    _fault("router-without-its-bias", "sigmoid-router", "Experts are chosen without the bias.",
           Edit.of(MLP, "ranks = shares{ + bias => }")),
    _fault("shares-with-the-bias", "sigmoid-router", "The bias is part of the shares.",
           Edit.of(MLP, "return {shares => ranks}.gather(1, chosen), chosen")),
    _fault("shares-of-a-softmax", "sigmoid-router", "Shares are made by a softmax.",
           Edit.of(MLP, "shares = {sigmoid(scores) => scores.softmax(-1)}")),
    _fault("shares-without-the-scale", "sigmoid-router", "Shares lack the scale of the configuration.",
           Edit.of(MLP, "share = share{ * weights.scale => }")),
    _fault("experts-of-every-group", "sigmoid-router", "Experts are chosen among all groups.",
           Edit.of(MLP, "ranks.masked_fill({~inside => ~inside & False}, -torch.inf)")),
    _fault("other-groups-masked-with-zero", "sigmoid-router",
           "Experts of other groups rank as 0, above negative ranks.",
           Edit.of(MLP, "ranks.masked_fill(~inside, {-torch.inf => 0.0})")),
    _fault("router-bias-in-bf16", "sigmoid-router", "The bias of the router is rounded to bfloat16.",
           Edit(WEIGHTS, 'stored.wide(f"{at}.gate.e_score_correction_bias")',
                'stored.take(f"{at}.gate.e_score_correction_bias", torch.bfloat16)')),
    _fault("groups-by-their-best-expert", "sigmoid-router", "A group is as good as its best expert alone.",
           Edit.of(MLP, "ranks.view(rows, weights.groups, -1).sort(dim=-1, descending=True).values[..., :{2 => 1}]")),
    _fault("rank-decay-of-rank-0", "low-rank", "Every rank has rank 0's rows of the second matrix of the decay.",
           Edit.of(OVER, PART % (OF_RANK_0 % "f_b_proj.weight")), how=TWO),
    _fault("rank-expansion-of-rank-0", "latent", "Every rank expands latents with rank 0's rows of `kv_b_proj`.",
           Edit.of(OVER, PART % (OF_RANK_0 % "kv_b_proj.weight")), how=TWO),
)
