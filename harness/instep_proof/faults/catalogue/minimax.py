"""Faults of MiniMax: decays of other heads or layers, inputs and norms of lightning attention, factors of residuals.

The heads of lightning attention have one width, and many of these faults change no shape. Leaves out: faults of states
that do not depend on the kind of decay (`rollback.py`, `rings.py`).
"""

from instep.setting import Setting

from .fault import Edit, Fault, Wrap, of_family

RULE, ATTEND, ROWS, MLP = (
    f"instep_optimized/ops/plain/{name}.py" for name in ("gdn", "attend", "embed_norm_linear_head", "mlp"))
WEIGHTS, LAYER, ATTENTION, HALF = (
    f"instep_optimized/{name}.py" for name in ("weights", "model/lightning", "model/attention", "model/mlp"))
DECAY = "log_decay=(-depth * torch.exp2(power)).to(norm)"
DEPTH = "depth = 1 + 1e-5 - layer / (len(config.layers) - 1 + 1e-5)"
SILU = "x = silu(wide(qkv))"
GATED = "core=core.flatten(1), z=z.flatten(1), weight=weights.norm"
ADDED = "(alpha * wide(x) + beta * wide(y)).to(x.dtype)"
SUM = "ops.scaled_add(x=x, y=y, alpha=factors[0], beta=factors[1], to=to)"
ANSWER = "self._sum(ops, self.config.layers[self.layer][-1], normed if factors else residual, made, at(\"hidden\"))"

_fault = of_family("minimax")

FAULTS: tuple[Fault, ...] = (
    _fault("fixed-decay-of-the-head-before", "fixed-decay", "A head forgets at the rate of the head before it.",
           Edit(WEIGHTS, DECAY, DECAY.replace(".to(norm)", ".to(norm).roll(1, 0)"))),
    _fault("fixed-decay-from-the-last-head", "fixed-decay", "The rates of the heads are in the opposite order.",
           Edit(WEIGHTS, DECAY, DECAY.replace(".to(norm)", ".to(norm).flip(0)"))),
    _fault("fixed-decay-of-the-first-layer", "fixed-decay", "All layers forget at the rates of the first.",
           Edit(WEIGHTS, DEPTH, "depth = 1 + 1e-5 - 0 / (len(config.layers) - 1 + 1e-5)")),
    _fault("fixed-decay-of-the-layer-after", "fixed-decay", "A layer's number counts from 1.",
           Edit(WEIGHTS, DEPTH, DEPTH.replace("- layer", "- min(layer + 1, 2)"))),
    _fault("fixed-decay-by-the-number-of-layers", "fixed-decay", "The rates fall to zero one layer after the last one.",
           Edit(WEIGHTS, DEPTH, DEPTH.replace("len(config.layers) - 1", "len(config.layers)"))),
    _fault("fixed-decay-in-powers-of-two", "fixed-decay", "A state is multiplied by 2 to the rate, not by e to it.",
           Edit(RULE, "decays = log_decay.to(x.dtype).repeat(len(x), 1)",
                "decays = log_decay.to(x.dtype).repeat(len(x), 1) * 0.6931471805599453")),
    _fault("fixed-decay-not-a-logarithm", "fixed-decay", "The op gets the decay itself, and takes its exponential.",
           Edit(RULE, "decays = log_decay.to(x.dtype).repeat(len(x), 1)",
                "decays = log_decay.to(x.dtype).repeat(len(x), 1).exp()")),
    _fault("outer-update-as-a-delta", "outer-update",
           "A token writes only what the state lacks, as with the delta rule.",
           Edit(RULE, "lightning = mamba2", "lightning = gdn"), mistake="recall-added"),
    _fault("outer-update-decayed-with-the-state", "outer-update", "A token's own update decays before it is read.",
           Edit.of(RULE, "core[:alive, row] = _sum_by_halves(S * q[:alive, row]{ =>  * (1.0 if recalls else "
                   "write.decay[..., None, None])})"), mistake="decay-after-update"),
    _fault("outer-ring-without-decay", "outer-update", "A token from a ring is added to a state that has not decayed.",
           Edit.of(RULE, "keep(part.ring, who.which[:alive], row, token, Updates(token.k, write.decay{ =>  if recalls "
                   "else torch.ones_like(write.decay)}, update))"), how=Setting(strategy="rerun"),
           seen=("directed", "derived", "bytes"), mistake="run-again-without-decay"),
    _fault("lightning-without-silu", "lightning-inputs", "Queries, keys and values pass no silu.",
           Edit(RULE, SILU, "x = wide(qkv)")),
    _fault("lightning-queries-scaled", "lightning-inputs", "Queries are scaled by K^-1/2.",
           Edit(RULE, "return GdnInputs(q, k, v, decays, torch.ones_like(decays))",
                "return GdnInputs(q * key_dim ** -0.5, k, v, decays, torch.ones_like(decays))")),
    _fault("lightning-keys-for-queries", "lightning-inputs", "The parts of a head are read as k, q, v.",
           Edit(RULE, "return GdnInputs(q, k, v, decays, torch.ones_like(decays))",
                "return GdnInputs(k, q, v, decays, torch.ones_like(decays))")),
    _fault("lightning-heads-packed-by-part", "lightning-inputs",
           "All queries are read first, then all keys and values.",
           Edit(RULE, SILU, "x = silu(wide(qkv)).view(len(qkv), 3, qkv.shape[1], -1).transpose(1, 2).flatten(2)")),
    _fault("lightning-norm-per-head", "lightning-norm", "Each head's read-out is normed alone.",
           Wrap(RULE, "gated_norm", "core, z, weight = (x.unflatten(-1, (4, -1)) for x in (core, z, weight))",
                "result = result.flatten(1)")),
    _fault("lightning-norm-with-the-eps-of-the-model", "lightning-norm", "The norm has the eps of the other norms.",
           Edit.of(LAYER, "eps={config.core_eps => config.eps}, gate=config.output_gate")),
    _fault("lightning-gate-as-silu", "lightning-norm", "The output gate is a silu.",
           Edit.of(LAYER, "gate={config.output_gate => 'silu'}")),
    _fault("lightning-gate-of-the-next-head", "lightning-norm", "A head is gated by the gate of the head before it.",
           Edit(LAYER, GATED, GATED.replace("z=z.flatten(1)", "z=z.roll(1, 1).flatten(1)"))),
    _fault("residual-without-alpha", "residual-factors", "The residual stream is not scaled.",
           Edit(ROWS, ADDED, "(wide(x) + beta * wide(y)).to(x.dtype)")),
    _fault("residual-factors-swapped", "residual-factors", "alpha and beta are exchanged.",
           Edit(HALF, SUM, SUM.replace("alpha=factors[0], beta=factors[1]", "alpha=factors[1], beta=factors[0]"))),
    _fault("residual-before-the-norm", "residual-factors",
           "The MLP's residual continues from the rows before the norm.",
           Edit(HALF, ANSWER, ANSWER.replace("normed if factors else residual", "residual"))),
    _fault("residual-factors-of-the-other-mixer", "residual-factors",
           "Layers with softmax attention have the factors of lightning attention.",
           Edit.of(HALF, "self._sum(ops, {self.config.mixers[self.layer] => self.config.mixers[0]}, hidden, mixer, "
                   "at(\"residual\"))")),
    _fault("softmax-residual-before-the-norm", "residual-factors",
           "After softmax attention the residual continues from the rows before the norm.",
           Edit.of(ATTENTION, "self.half(ops, {x if config.residual_factors else rows => rows}, mixer, stage)")),
    _fault("softmax-queries-normed", "softmax-layer", "Queries of softmax attention are normed, as in other families.",
           Edit(ATTEND, "query, key = _turn(query, angle), _turn(key, angle)",
                "query, key = _turn(rms_norm(query, query.new_zeros(1), eps), angle), _turn(key, angle)")),
    _fault("experts-not-renormalised", "softmax-layer", "The shares of the chosen experts do not sum to 1.",
           Edit.of(HALF, "norm_topk={config.norm_topk => False}")),
)
