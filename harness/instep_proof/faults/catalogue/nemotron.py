"""Faults of Nemotron-H: groups of B and C, steps, outer products, the skip of values, norms of groups, single blocks.

Leaves out: what a state suffers whatever its rule is (`rollback.py`, `rings`), and routers (`kimi_linear.py`).
"""

from instep.setting import Setting

from .fault import Edit, Fault, of_family

GDN, CONV, MLP = (f"instep_optimized/ops/plain/{name}.py" for name in ("gdn", "causal_conv", "mlp"))
WEIGHTS, LAYER, BLOCKS = (f"instep_optimized/{name}.py" for name in ("weights", "model/gdn", "model/mlp"))
DECAY = "log_decay=-wide(A_log).to(x.dtype).exp() * dt"
STACKED = (
    'inputs = torch.cat([stored.take(f"{at}.{name}_proj.weight") for name in "NAMES"])\n'
    'return ProjectedWeights(inputs, stored.take(f"{at}.o_proj.weight"))'
)
STEP = "dt = softplus(a.to(x.dtype) + dt_bias.to(x.dtype))"
ABSORBED = "    S += write.key * update[..., None, :]\n"
SKIP = "return (x + weight.to(x.dtype)[:, None] * v.to(x.dtype)).to(core.dtype)"
GROUPS = "    y = opened.reshape(len(core), groups, len(weight) // groups)\n"

STEPS, NORM, EXPERTS, GROUPED, RULE, TAPS = (f"instep_optimized/kernels/{name}.py" for name in (
    "rowwise/gdn_inputs", "rowwise/norms", "products/moe", "products/grouped_experts", "gdn_windows/one_token_update",
    "convs/causal_conv"))
DRAFT = "instep_optimized/ops/fused.py"
OF_MLP = "_ungated(stored, prefix_of_block(config, prefix, layer, config.layers[layer][-1])%s, layer, config)"
LATENT = 'stored.take(f"{at}.{name}_latent_proj.weight")'
OF_TRUNK = 'at.replace("mtp.layers.0.mlp", "model.layers.2")'
GIVEN = "linear(rows, weights.to_latent.to(rows.dtype))"
AGAIN = f"linear({GIVEN}, weights.from_latent.to(rows.dtype))"
OF_HEAD = 'stored.norm(f"mtp.{name}.weight"%s, config)'

_fault, _of_two_blocks = of_family("nemotron"), of_family("nemotron-mtp")

FAULTS: tuple[Fault, ...] = (
    _fault("keys-of-the-group-before", "group", "B of a group is that of the group before it.",
           Edit.of(GDN, "k=k.reshape(len(x), key_heads, key_dim){ => .roll(1, 1)}.clone()")),
    _fault("queries-of-the-group-before", "group", "C of a group is that of the group before it.",
           Edit.of(GDN, "q=q.reshape(len(x), key_heads, key_dim){ => .roll(1, 1)}.clone()")),
    _fault("b-and-c-swapped", "group", "B is taken for C, and C for B.",
           Edit.of(GDN, "{v, k, q => v, q, k} = torch.split(x, [x.shape[1] - 2 * keys, keys, keys], dim=1)")),
    _fault("b-and-c-before-x", "group", "The channels of B and C are taken to come before those of x.",
           Edit(GDN, "v, k, q = torch.split(x, [x.shape[1] - 2 * keys, keys, keys], dim=1)",
                "k, q, v = torch.split(x, [keys, keys, x.shape[1] - 2 * keys], dim=1)")),
    _fault("groups-in-turn", "group", "Head h reads group h % G, not h // (HV / G).",
           Edit(GDN, "x.repeat_interleave(heads // x.shape[-2], dim=-2)[..., None]",
                "x.repeat(*[1] * (x.dim() - 2), heads // x.shape[-2], 1)[..., None]"), mistake="keys-modulo"),
    _fault("keys-normalised", "group", "B is normed to length 1, as keys of the delta rule are.",
           Edit.of(GDN, "k={ => _unit(}k.reshape(len(x), key_heads, key_dim){ => )}.clone()")),
    _fault("queries-scaled", "group", "C is multiplied by K ** -0.5, as queries of the delta rule are.",
           Edit(GDN, "q=q.reshape(len(x), key_heads, key_dim).clone()",
                "q=q.reshape(len(x), key_heads, key_dim) * key_dim**-0.5")),
    _fault("step-without-its-bias", "step", "A step is softplus(a), without dt_bias.",
           Edit(GDN, STEP, "dt = softplus(a.to(x.dtype))")),
    _fault("step-as-a-sigmoid", "step", "A step is a sigmoid, as beta is.",
           Edit(GDN, STEP, STEP.replace("softplus", "sigmoid"))),
    _fault("step-of-the-head-before", "step", "A head has the step of the head before it.",
           Edit(GDN, STEP, STEP + ".roll(1, 1)")),
    _fault("step-of-at-least-a-thousandth", "step",
           "A step is clamped at time_step_min, as transformers does in prompts.",
           Edit(GDN, STEP, STEP + ".clamp(min=1e-3)")),
    _fault("decay-without-the-step", "step", "A head forgets at the rate exp(A_log), whatever the step.",
           Edit(GDN, DECAY, "log_decay=-wide(A_log).to(x.dtype).exp().expand_as(dt)")),
    _fault("decay-of-the-head-before", "step", "A head forgets at the rate of the head before it.",
           Edit(GDN, DECAY, DECAY.replace(" * dt", ".roll(1) * dt"))),
    _fault("decay-by-the-logarithm", "step", "The rate of a head is A_log, not its exponential.",
           Edit.of(GDN, "log_decay=-wide(A_log).to(x.dtype){.exp() => .abs()} * dt")),
    _fault("values-without-the-step", "step", "A token writes x, not dt x.",
           Edit(GDN, "beta=dt", "beta=torch.ones_like(dt)")),
    _fault("outer-product-by-the-delta-rule", "outer-product", "A token writes only what the state does not recall.",
           Edit.of(GDN, "_run(inputs, part, who, out, recalls={False => True})"), mistake="recall-added"),
    _fault("outer-product-decays-late", "outer-product", "The state decays after a token is written.",
           Edit(GDN, "    _forget(S, write.decay)\n", ""),
           Edit(GDN, ABSORBED, ABSORBED + "    _forget(S, write.decay)\n"), mistake="decay-after-update"),
    _fault("ring-keeps-x", "outer-product", "A ring keeps x of a token, not dt x.",
           Edit.of(GDN, "Updates(token.k, write.decay, {update => write.v})"), how=Setting(strategy="rerun"),
           mistake="value-for-the-update"),
    _fault("ring-keeps-keys-of-the-group-before", "outer-product", "A ring keeps B of the group before.",
           Edit.of(GDN, "Updates(token.k{ => .roll(1, -2)}, write.decay, update)"), how=Setting(strategy="rerun"),
           mistake="keys-of-another-group"),
    _fault("ring-keeps-decays-of-the-head-before", "outer-product", "A ring keeps the decay of the head before.",
           Edit.of(GDN, "Updates(token.k, write.decay{ => .roll(1, -1)}, update)"), how=Setting(strategy="rerun"),
           mistake="decays-of-another-head"),
    _fault("skip-left-out", "skip", "D v is not added to the read-out.", Edit(GDN, SKIP, "return core.clone()")),
    _fault("skip-of-the-head-before", "skip", "A head has the D of the head before it.",
           Edit(GDN, SKIP, SKIP.replace("(x.dtype)[:", "(x.dtype).roll(1)[:"))),
    _fault("skip-of-the-written-value", "skip", "D dt x is added, not D x.",
           Edit.of(LAYER, "ops.add_skip(core=core, v=inputs.v{ => * inputs.beta[..., None]}, weight=weights.skip, "
                   'to=at("skip"))')),
    _fault("skip-into-the-state", "skip", "D v is added to the state.",
           Edit.of(LAYER, "ops.recurrence(config.recurrence)(inputs=inputs{ => ._replace(beta=inputs.beta + "
                   "weights.skip)}, parts=bound.state(self.layer), dtype=dtype, " 'to=at("core"))'),
           mistake="skip-in-the-state"),
    _fault("norm-before-the-gate", "group-norm", "The read-out is normed, and then gated.",
           Edit(GDN, "opened = wide(core) * silu(wide(z))", "opened = wide(core)"),
           Edit(GDN, "return normed.reshape(core.shape).to(core.dtype)",
                "return (normed.reshape(core.shape) * silu(wide(z))).to(core.dtype)")),
    _fault("norm-of-all-groups-together", "group-norm", "All heads of a row have one rms.",
           Edit(GDN, GROUPS, GROUPS.replace("groups", "1"))),
    _fault("norm-of-each-head", "group-norm", "Each head is normed by its rms alone.",
           Edit(GDN, GROUPS, GROUPS.replace("groups", "core.shape[1]"))),
    _fault("group-norm-gated-by-a-sigmoid", "group-norm", "The gate is a sigmoid.",
           Edit.of(GDN, "opened = wide(core) * {silu => sigmoid}(wide(z))")),
    _fault("conv-without-its-bias", "conv-bias", "The conv lacks its bias.",
           Edit.of(CONV, "_silu(total{ + wide(bias)[:, None] => })")),
    _fault("conv-bias-of-the-channel-before", "conv-bias",
           "A channel of the conv has the bias of the channel before it.",
           Edit.of(CONV, "_silu(total + wide(bias){ => .roll(1)}[:, None])")),
    _fault("conv-bias-after-silu", "conv-bias", "The bias is added after silu.",
           Edit(CONV, "_silu(total + wide(bias)[:, None])", "_silu(total) + wide(bias)[:, None]")),
    _fault("projection-z-after-x", "one-block", "z is taken to come after x, B and C in the projection.",
           Edit(WEIGHTS, 'z, qkv, a = torch.split(stored.take(f"{at}.in_proj.weight"), [values, '
                '*config.lengths(("C",)), config.value_heads])', 'qkv, z, a = torch.split(stored.take(f"{at}.in_proj.'
                'weight"), [*config.lengths(("C",)), values, config.value_heads])')),
    _fault("keys-and-values-swapped", "one-block", "Attention takes keys for values, and values for keys.",
           Edit(WEIGHTS, *(STACKED.replace("NAMES", names) for names in ("qkv", "qvk")))),
    _fault("relu-not-squared", "one-block", "The ReLU of an MLP is not squared.",
           Edit.of(MLP, "relu(linear(x, up.to(x.dtype))){.square() => }")),
    _fault("squared-before-the-relu", "one-block", "An MLP squares before its ReLU, so negative numbers count, too.",
           Edit(MLP, "relu(linear(x, up.to(x.dtype))).square()", "relu(linear(x, up.to(x.dtype)).square())")),
    _fault("mlp-on-rows-without-norm", "one-block", "A layer that is an MLP alone reads rows without their norm.",
           Edit.of(BLOCKS, "Residual(rows, self._mlp(ops, {x => rows}, mlp), answer)")),
    _fault("mlp-added-to-the-norm", "one-block", "A layer that is an MLP alone adds its result to the normed rows.",
           Edit.of(BLOCKS, "Residual({rows => x}, self._mlp(ops, x, mlp), answer)")),
    _of_two_blocks("mtp-experts-of-the-trunk", "two-blocks", "The MTP layer has the experts of a layer of the trunk.",
                   Edit(WEIGHTS, OF_MLP % "", OF_MLP % '.replace("mtp.layers.0.mlp", "model.layers.2")')),
    _of_two_blocks("mtp-experts-with-the-norm-of-attention", "two-blocks",
                   "The norm before attention also precedes the experts.",
                   Edit.of(BLOCKS, "layer_norms(config, layer)[{-1 => 0}]")),
    _of_two_blocks("mtp-projection-not-added", "two-blocks",
                   "The residual stream begins with attention, not with the projection.",
                   Edit.of(BLOCKS,
                           'self._sum(ops, self.config.mixers[self.layer], hidden{ => * 0}, mixer, at("residual"))')),
    _of_two_blocks("mtp-hidden-before-embedding", "two-blocks",
                   "The projection reads the hidden row first, then the embedding.",
                   Edit.of(DRAFT, "ops.concat(x={left => right}, y={right => left}, to=to[3])")),
    _of_two_blocks("mtp-with-the-last-norm-of-the-trunk", "two-blocks",
                   "Rows of the MTP head pass the last norm of the trunk.",
                   Edit(WEIGHTS, OF_HEAD % "", OF_HEAD % '.replace("mtp.norm", "model.norm")')),
    _of_two_blocks("mtp-norms-of-its-inputs-swapped", "two-blocks",
                   "The norms of embedding and hidden row are swapped.",
                   Edit(WEIGHTS, 'norms = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")',
                        'norms = ("pre_fc_norm_hidden", "pre_fc_norm_embedding", "norm")')),
    _of_two_blocks("latents-read-by-the-shared-expert", "latents",
                   "The shared expert reads rows that went through latents.",
                   Edit.of(MLP, f"(out + _shared({{rows => {AGAIN}}}, weights)).to(x.dtype)")),
    _of_two_blocks("latents-read-by-the-router", "latents", "The router reads rows that went through latents.",
                   Edit.of(MLP, f"[{{rows => {AGAIN}}} @ expert for expert in weights.router.to(rows.dtype)]")),
    _of_two_blocks("latents-weighted-before-the-experts", "latents",
                   "Routing weights multiply latents, not an expert's result.",
                   Edit.of(MLP, "_expert(weights)(given[row]{ => * share[row, rank, None]}, weights.gate_up[expert], "
                           "weights.down[expert])"),
                   Edit.of(MLP, "out.index_add_(0, row, answer{ * share[row, rank, None] => })")),
    _of_two_blocks("latents-with-the-scale", "latents", "The scale of the routing weights multiplies the latents.",
                   Edit(MLP, "share = share * weights.scale", ""), Edit(MLP, GIVEN, f"{GIVEN} * weights.scale")),
    _of_two_blocks("latents-in-16-bits", "latents", "The latents are rounded to bfloat16, which is not declared.",
                   Edit(MLP, GIVEN, f"{GIVEN}.bfloat16().to(rows.dtype)")),
    _of_two_blocks("latents-summed-in-16-bits", "latents",
                   "The weighted sum of experts is rounded to bfloat16 on its way back.",
                   Edit.of(MLP, "linear(out{ => .bfloat16().to(rows.dtype)}, weights.from_latent.to(rows.dtype))")),
    _of_two_blocks("latents-after-an-activation", "latents",
                   "The projections of latents count as an MLP, with a squared ReLU.",
                   Edit(MLP, GIVEN, f"relu({GIVEN}).square()")),
    _of_two_blocks("latents-of-the-row-before", "latents",
                   "The experts of a row read the latents of the row before it.",
                   Edit.of(MLP, "_expert(weights)(given{ => .roll(1, 0)}[row], weights.gate_up[expert], "
                           "weights.down[expert])")),
    _of_two_blocks("latents-by-the-projections-of-the-trunk", "latents",
                   "The MTP layer has the trunk's projections of latents.",
                   Edit(WEIGHTS, LATENT, LATENT.replace("{at}", "{" + OF_TRUNK.replace('"', "'") + "}"))),
    _of_two_blocks("latents-left-by-the-trunk", "latents",
                   "The MTP layer leaves its latents by the projection of the trunk.",
                   Edit(WEIGHTS, LATENT,
                        LATENT.replace("{at}", "{" + OF_TRUNK.replace('"', "'") + " if name == 'fc2' else at}"))),
    _fault("outer-product-kernel-by-the-delta-rule", "outer-product", "The kernel obeys the delta rule.",
           Edit.of(RULE, "update, read = beta * {v => (v - decay * recall(state, k))}, recall(state, q)"),
           how=Setting("triton"), mistake="recall-added"),
    _fault("step-kernel-without-its-bias", "step", "The kernel's step is softplus(a), without dt_bias.",
           Edit.of(STEPS, "softplus(drive{ + tl.load(dt_bias + head, mask=live, other=0.0).to(tl.float32) => })"),
           how=Setting("triton")),
    _fault("group-norm-kernel-of-each-head", "group-norm", "The kernel divides by the channels of one head.",
           Edit.of(NORM, "tl.sum(value * value, axis=1) / {each => width} + eps"), how=Setting("triton")),
    _fault("conv-kernel-bias-after-silu", "conv-bias", "The kernel adds the bias after silu.",
           Edit(TAPS, "    if bias is not None:\n"
                "        total += tl.load(bias + c, mask=in_c, other=0.0).to(tl.float32)[None, :]\n"
                "    out = total / (1.0 + tl.exp(-total))\n",
                "    out = total / (1.0 + tl.exp(-total))\n"
                "    if bias is not None:\n"
                "        out += tl.load(bias + c, mask=in_c, other=0.0).to(tl.float32)[None, :]\n"),
           how=Setting("triton")),
    _of_two_blocks("latents-kernel-scaled-once-more", "latents", "The result of the latents is scaled once more.",
                   Edit.of(EXPERTS, "dense.lm_head(x=total{ => * weights.scale}, weight=from_latent, to=to)"),
                   how=Setting("invariant")),
    _of_two_blocks("latents-kernel-without-the-square", "latents", "The ReLU of grouped experts is not squared.",
                   Edit.of(GROUPED, "swiglu(gate, up, limit) if GATED else {squared(gate) => tl.maximum(gate, 0.0)}"),
                   how=Setting("triton", dtype="bfloat16")),
)
