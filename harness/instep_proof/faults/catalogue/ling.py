"""Faults of Ling: a gate without its bound, latents that turn wrongly, gates of heads, another MTP layer, clamps.

Leaves out: what Kimi-Linear has, too (`kimi_linear.py`): the channels of a decay, the expansion of latents, the router.
"""

from instep.setting import Setting

from .fault import Edit, Fault, Wrap, of_family

GDN, ATTEND, MLP = (f"instep_optimized/ops/plain/{name}.py" for name in ("gdn", "attend", "mlp"))
EXPERTS, GROUPED = (f"instep_optimized/kernels/products/{name}.py" for name in ("moe", "grouped_experts"))
WEIGHTS, LATENT, MTP = (
    f"instep_optimized/{name}.py" for name in ("weights", "model/latent_attention", "draft/mtp"))
GATES, OPENED, TURNS = (
    f"instep_optimized/kernels/rowwise/{name}.py" for name in ("gdn_inputs", "pointwise", "qk_norm_and_rotary"))
SAFE = "log_decay = decay_bound * sigmoid(rate[:, None] * (a.to(q.dtype) + dt_bias.to(q.dtype)))"
TURNED = "    query, key = torch.cat([own, _turn(turning, angle)], dim=-1), _turn(shared, angle)\n"
NORMS = 'norms = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")'

LIMITS = "limit, shared_limit = config.limits(layer)"
CLAMPED = "gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)"
PRODUCT = "linear(gate * up, down.to(x.dtype))"
SHARED = "x=x, gate_up=gate_up, down=down, to=to"
NAN = "propagate_nan=tl.PropagateNan.ALL"
KERNEL = f"up = tl.minimum(tl.maximum(up, -limit, {NAN}), limit, {NAN})"

_fault, _clamp = of_family("ling"), of_family("ling-clamped")

FAULTS: tuple[Fault, ...] = (
    _fault("safe-gate-as-a-softplus", "safe-gate", "The gate is a softplus, without the bound.",
           Edit(GDN, SAFE, "pass")),
    _fault("safe-gate-cut-off", "safe-gate", "The gate is a softplus that is cut off at the bound.",
           Edit(GDN, SAFE, "log_decay = log_decay.clamp(min=decay_bound)")),
    _fault("safe-gate-without-the-factor", "safe-gate", "The sigmoid is not multiplied by the bound.",
           Edit(GDN, SAFE, SAFE.replace("decay_bound *", "-", 1))),
    _fault("safe-gate-with-the-rate-outside", "safe-gate",
           "The rate of a head multiplies the sigmoid, not its argument.",
           Edit(GDN, SAFE, "log_decay = decay_bound * rate[:, None] * sigmoid(a.to(q.dtype) + dt_bias.to(q.dtype))")),
    _fault("safe-gate-with-a-negative-rate", "safe-gate", "The rate has the sign that a softplus gate gives it.",
           Edit(GDN, SAFE, SAFE.replace("rate[", "-rate[", 1))),
    _fault("safe-gate-without-its-bias", "safe-gate", "The gate lacks its bias.",
           Edit(GDN, SAFE, SAFE.replace("(a.to(q.dtype) + dt_bias.to(q.dtype))", "a.to(q.dtype)"))),
    _fault("safe-gate-with-the-bias-after-the-rate", "safe-gate", "The rate multiplies the input alone, not the bias.",
           Edit(GDN, SAFE, "log_decay = decay_bound * sigmoid(rate[:, None] * a.to(q.dtype) + dt_bias.to(q.dtype))")),
    _fault("safe-gate-without-the-rate", "safe-gate", "The gate lacks the rate of its head.",
           Edit(GDN, SAFE, SAFE.replace("rate[:, None] * ", ""))),
    _fault("safe-gate-in-powers-of-two", "safe-gate", "The gate is made for powers of two, and taken for powers of e.",
           Edit(GDN, SAFE, SAFE.replace("decay_bound *", "1.4426950408889634 * decay_bound *", 1))),
    _fault("safe-gate-of-the-channel-before", "safe-gate", "A key channel has the gate of the channel before it.",
           Edit(GDN, SAFE, SAFE + ".roll(1, -1)")),
    _fault("ring-decays-without-the-bound", "safe-gate", "A ring keeps decays whose gates lack the bound as a factor.",
           Edit.of(GDN, "Updates(token.k, {write.decay => write.decay ** 0.2}, update)"), how=Setting(strategy="rerun"),
           mistake="bound-left-out"),
    _fault("gates-of-full-rank-swapped", "safe-gate", "The matrices of the output gate and of the decay are swapped.",
           Edit(WEIGHTS, '("g_proj", "b_proj", "f_proj")', '("f_proj", "b_proj", "g_proj")')),
    _fault("stored-pairs-turned-as-halves", "turned-latents", "Channels are turned in halves, in their stored order.",
           Edit(WEIGHTS, "halves = [*range(0, config.rotary_dim, 2), *range(1, config.rotary_dim, 2)]",
                "halves = [*range(config.rotary_dim)]")),
    _fault("shared-key-not-turned", "turned-latents", "The shared part of keys is stored as it is projected.",
           Edit(ATTEND, TURNED, TURNED.replace(", _turn(shared, angle)", ", shared.clone()"))),
    _fault("query-turned-at-its-first-channels", "turned-latents", "The first channels of a query turn, not the last.",
           Edit(ATTEND, TURNED, "    query, key = _turn(projected.to(work)[..., :-1], angle), _turn(shared, angle)\n")),
    _fault("latents-turned-a-position-late", "turned-latents", "Queries and keys turn by the position after their own.",
           Wrap(ATTEND, "latent_inputs", arguments="positions = positions + 1")),
    _fault("latents-turned-backwards", "turned-latents", "Queries and keys turn against their position.",
           Wrap(ATTEND, "latent_inputs", arguments="positions = -positions")),
    _fault("latents-with-another-theta", "turned-latents", "Queries and keys turn with the theta of another model.",
           Edit.of(LATENT, "theta={config.rope_theta => 10000.0}")),
    _fault("latent-normed-with-the-shared-key", "turned-latents", "The norm of a latent takes in the shared key.",
           Edit(ATTEND, "rms_norm(latent, norm, eps)", "(latent * torch.rsqrt(key_raw.to(work).square().mean(-1, "
                "keepdim=True) + eps) * (1 + norm.to(work)))")),
    _fault("turned-query-in-pairs-again", "turned-latents", "Turned queries go back to the stored order, keys do not.",
           Edit(ATTEND, TURNED, TURNED + "    half = rotary_dim // 2\n"
                "    there = query[..., -rotary_dim:].unflatten(-1, (2, half)).transpose(-1, -2).flatten(-2)\n"
                "    query = torch.cat([query[..., :-rotary_dim], there], dim=-1)\n")),
    _fault("head-gate-of-the-head-before", "head-gate", "A head is opened by the gate of the head before it.",
           Edit.of(ATTEND, "projected[..., -1:]{ => .roll(1, 1)}")),
    _fault("head-gate-without-its-sigmoid", "head-gate", "A head is multiplied by its gate as it is projected.",
           Edit.of(ATTEND, "{sigmoid(wide(gate)) => wide(gate)}")),
    _fault("head-gate-left-out", "head-gate", "Heads are not gated.",
           Edit(LATENT, 'attended = ops.output_gate(attended=attended, projected=projected, to=at("opened"))',
                'attended = ops.output_gate(attended=attended, projected=projected + 60, to=at("opened"))')),
    _fault("mtp-norms-as-offsets", "mtp-latents", "The stored factors of the MTP norms are taken for 1 + w.",
           Edit(WEIGHTS, 'stored.norm(f"mtp.{name}.weight", config)', 'stored.take(f"mtp.{name}.weight")')),
    _fault("mtp-norms-swapped", "mtp-latents", "The norms of the embedding and of the hidden row are swapped.",
           Edit(WEIGHTS, NORMS, 'norms = ("pre_fc_norm_hidden", "pre_fc_norm_embedding", "norm")')),
    _fault("mtp-with-the-layer-of-the-trunk", "mtp-latents", "The MTP layer has the weights of a layer of the trunk.",
           Edit(MTP, 'f"mtp.layers.{number}"', '"model.layers.1"')),
    _fault("safe-gate-kernel-with-a-negative-rate", "safe-gate", "The kernel's rate has the sign of a softplus gate.",
           Edit.of(GATES, "bound / (1.0 + tl.exp({-rate => rate}[:, None] * drive))"), how=Setting("triton")),
    _fault("latent-kernel-turns-backwards", "turned-latents", "The kernel has the signs of the opposite turn.",
           Edit.of(TURNS, "sign = tl.where(few < half, {-1.0, 1.0 => 1.0, -1.0})[None, None, :]\n"
                   "turned = own * cosine[:, None, :] + sign * partner * sine[:, None, :]\n"
                   "tl.store(goal + few[None, None, :], turned.to(goal.dtype.element_ty), mask=inside)"),
           how=Setting("triton")),
    _fault("latent-kernel-norms-the-tile", "turned-latents", "The kernel divides by the width of the tile.",
           Edit.of(TURNS, "tl.sum(value * value, axis=1) / {latent => LT} + eps"), how=Setting("triton")),
    _fault("head-gate-kernel-of-the-head-before", "head-gate", "The kernel reads the gate of the head before.",
           Edit.of(OPENED, "gate + row * gate_row + {head => (head + heads - 1) % heads} * gate_head"),
           how=Setting("triton")),
    _clamp("clamps-left-out", "clamps", "No expert is clamped.", Edit(WEIGHTS, LIMITS, "limit = shared_limit = None")),
    _clamp("clamps-of-shared-and-routed-swapped", "clamps", "Routed experts have the limit of the shared one.",
           Edit(WEIGHTS, LIMITS, "shared_limit, limit = config.limits(layer)")),
    _clamp("clamps-of-the-next-layer", "clamps", "A layer has the limits of the layer after it.",
           Edit.of(WEIGHTS, "config.limits({layer => layer + 1})")),
    _clamp("clamp-of-the-shared-expert-ignored", "clamps", "The shared expert is not clamped.",
           Edit.of(MLP, "replace(weights, limit={weights.shared_limit => None})")),
    _clamp("clamp-of-the-product", "clamps", "The product of gate and up is clamped, not its factors.",
           Edit(MLP, CLAMPED, "pass"),
           Edit(MLP, PRODUCT, PRODUCT.replace(
               "gate * up", "gate * up if limit is None else (gate * up).clamp(-limit, limit)"))),
    _clamp("clamp-before-silu", "clamps", "Gate is clamped before silu.",
           Edit(MLP, "gate = silu(gate)", "gate = silu(gate if limit is None else gate.clamp(max=limit))")),
    _clamp("clamps-of-gate-and-up-swapped", "clamps", "Gate is clamped on both sides, and up from above alone.",
           Edit(MLP, CLAMPED, "gate, up = gate.clamp(min=-limit, max=limit), up.clamp(max=limit)")),
    _clamp("clamp-kernel-from-above-alone", "clamps", "The kernel does not clamp up from below.",
           Edit(OPENED, KERNEL, f"up = tl.minimum(up, limit, {NAN})"), how=Setting("triton")),
    _clamp("clamp-kernel-of-the-shared-expert", "clamps", "The kernel of the shared expert is given no limit.",
           Edit.of(EXPERTS, f"dense.clamped_mlp({SHARED}, limit={{weights.shared_limit => None}})"),
           how=Setting("precise")),
    _clamp("clamp-kernel-swaps-the-limits", "clamps", "Blocks of the shared expert have the limit of the routed ones.",
           Edit.of(GROUPED, "tl.where(expert {== => !=} experts, "
                   'float("inf") if SHARED_LIMIT is None else SHARED_LIMIT, routed)'),
           how=Setting("triton", dtype="bfloat16")),
)
