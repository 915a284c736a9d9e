"""Faults of LFM2: windows that are another one's, gates left out or mixed up, taps in another order, other attention.

The conv window is the only memory of a layer with a short convolution. Many of these change no shape: B, C and x are
equally wide. Leaves out: what windows suffer in layers that also have a state (`rollback.py`, `neighbours`).
"""

from instep.setting import Setting

from .fault import Edit, Fault, of_family

CONV, ATTEND, HEAD, MLP = (
    f"instep_optimized/ops/plain/{name}.py" for name in ("causal_conv", "attend", "embed_norm_linear_head", "mlp"))
WEIGHTS, LAYER, ATTENTION, TRUNK = (
    f"instep_optimized/{name}.py" for name in ("weights", "model/short_conv", "model/attention", "model/trunk"))
SNAPSHOT, COLUMNS, PAIR, BUDGET = (
    f"instep_optimized/{name}.py" for name in (
        "commit/snapshot", "commit/columns", "commit/strategy_pair", "memory/budget"))
GIVEN = 'ops.multiply(x=in_gate, y=x, to=at("qkv"))'
GATED = 'ops.multiply(x=out_gate, y=mixed, to=at("gated"))'
RETURNED = "return ShortConvWeights(inputs, conv.squeeze(1), out)"
ACCEPTED = "source=pair.snapshots.at(accepted.rows, accepted.nodes),"
NORMS = 'return AttentionWeights(inputs, q_norm, k_norm, stored.take(f"{at}.o_proj.weight"))'
HEAD_NORM = 'stored.norm(f"{at}.{name}.weight", config) if config.head_norms else inputs.new_empty(0)'

_fault = of_family("lfm2")

FAULTS: tuple[Fault, ...] = (
    _fault("short-window-after-the-last-draft", "short-window",
           "The window is taken after the last draft, whatever was accepted.",
           Edit(SNAPSHOT, ACCEPTED,
                ACCEPTED.replace("accepted.nodes", "accepted.nodes * 0 + pair.snapshots.pool.shape[1] - 1")),
           seen=("bytes",), mistake="another-count"),
    _fault("short-window-one-draft-early", "short-window", "The window lacks the last accepted token.",
           Edit(SNAPSHOT, ACCEPTED, ACCEPTED.replace("accepted.nodes", "(accepted.nodes - 1).clamp(min=0)")),
           seen=("bytes",), mistake="another-count"),
    _fault("short-window-committed-with-states-alone", "short-window",
           "A commit moves nothing, as no layer of the model has a state.",
           Edit.of(PAIR, "move(self.of[name], ops, accepted){ =>  if name == 'state' else None}"), seen=("bytes",),
           mistake="another-count"),
    _fault("short-window-widened-by-the-count", "short-window",
           "The mark of a widened line is the number of accepted tokens, one further than the accepted window.",
           Edit.of(COLUMNS, "self._marks.write(ops, accepted.slots, accepted.{nodes => lens})"),
           how=Setting(conv="widened"), seen=("bytes",), mistake="another-count"),
    _fault("short-window-not-copied", "short-window", "A copy of a request has zeros for the windows of its layers.",
           Edit(PAIR, "found = {name: one.peek(ops, slot, length) for name, one in self.of.items()}",
                "found = {name: one.peek(ops, slot, length) for name, one in self.of.items()}\n"
                "found['conv'] = {layer: unit * 0 for layer, unit in found['conv'].items()}"), seen=("bytes",)),
    _fault("short-window-not-restored", "short-window", "A load restores windows only where a layer has a state, too.",
           Edit.of(PAIR, "one.restore(slot, length, kept[name]){ =>  if kept['state'] else None}"),
           seen=("poison", "identity", "bytes"), blind=()),
    _fault("short-window-newest-first", "short-window", "A window is stored with its newest input first.",
           Edit.of(CONV,
                   "after(part.store, who, line.gather(2, ends[:, None, :].expand(-1, x.shape[1], -1)){ => .flip(2)})"),
           seen=("bytes",)),
    _fault("short-window-lost-between-chunks", "short-window", "Every chunk of a prompt begins with an empty window.",
           Edit.of(CONV, "torch.cat([before(part, who, x.dtype){ =>  * (part.form != 'chunk')}, "
                   "x[who.rows].transpose(1, 2)], dim=2)")),
    _fault("short-window-of-ungated-inputs", "short-gate",
           "The gate B multiplies the conv's output, so the window keeps inputs without it.",
           Edit(LAYER, GIVEN, 'ops.multiply(x=torch.ones_like(in_gate), y=x, to=at("qkv"))'),
           Edit(LAYER, GATED, 'ops.multiply(x=out_gate, y=mixed * in_gate, to=at("gated"))')),
    _fault("short-gates-swapped", "short-gate", "B and C are read in the opposite order.",
           Edit(WEIGHTS, RETURNED, RETURNED.replace("inputs", "torch.cat([inputs.chunk(3)[n] for n in (1, 0, 2)])"))),
    _fault("short-gates-after-x", "short-gate", "The projection is read as x, B, C.",
           Edit(WEIGHTS, RETURNED, RETURNED.replace("inputs", "torch.cat([inputs.chunk(3)[n] for n in (1, 2, 0)])"))),
    _fault("short-gates-interleaved", "short-gate", "The projection is read as B, C and x of each channel in turn.",
           Edit(WEIGHTS, RETURNED, RETURNED.replace("inputs", "torch.cat([inputs[n::3] for n in range(3)])"))),
    _fault("short-gate-left-out-before-the-conv", "short-gate", "B is not applied.",
           Edit(LAYER, GIVEN, 'ops.multiply(x=torch.ones_like(in_gate), y=x, to=at("qkv"))')),
    _fault("short-gate-left-out-after-the-conv", "short-gate", "C is not applied.",
           Edit(LAYER, GATED, 'ops.multiply(x=torch.ones_like(out_gate), y=mixed, to=at("gated"))')),
    _fault("short-gate-through-a-sigmoid", "short-gate", "C passes a sigmoid, as gates of other families do.",
           Edit(LAYER, GATED, 'ops.multiply(x=out_gate.sigmoid(), y=mixed, to=at("gated"))')),
    _fault("short-gate-through-a-silu", "short-gate", "B passes a silu.",
           Edit(LAYER, GIVEN, 'ops.multiply(x=torch.nn.functional.silu(in_gate), y=x, to=at("qkv"))')),
    _fault("short-gate-of-the-row-before", "short-gate", "A row's C is that of the row before it in the batch.",
           Edit(LAYER, GATED, 'ops.multiply(x=out_gate.roll(1, 0), y=mixed, to=at("gated"))')),
    _fault("short-conv-with-silu", "short-taps", "A silu follows the conv, as in layers with a recurrence.",
           Edit(CONV, "return _over(x, weight, parts, lambda total: total)",
                "return _over(x, weight, parts, lambda total: total / (1 + (-total).exp()))")),
    _fault("short-conv-taps-reversed", "short-taps", "The taps are in the opposite order.",
           Edit(WEIGHTS, RETURNED, RETURNED.replace("squeeze(1)", "squeeze(1).flip(1)"))),
    _fault("short-conv-taps-of-the-channel-before", "short-taps", "A channel has the taps of the channel before it.",
           Edit(WEIGHTS, RETURNED, RETURNED.replace("squeeze(1)", "squeeze(1).roll(1, 0)"))),
    _fault("short-conv-without-the-oldest-tap", "short-taps", "The conv lacks its oldest tap.",
           Edit(WEIGHTS, RETURNED, "conv = conv.clone()\nconv[..., 0] = 0\n" + RETURNED)),
    _fault("attention-gated-by-its-query", "plain-attention",
           "Attention without a gate is gated by the sigmoid of its query.",
           Edit(ATTENTION, "ops.attend(query=query, pages=pages, to=at(\"attended\"))",
                "ops.attend(query=query, pages=pages, to=at(\"attended\")) * query.sigmoid()")),
    _fault("attention-norms-swapped", "plain-attention", "The norms of queries and keys are swapped.",
           Edit(WEIGHTS, NORMS, NORMS.replace("q_norm, k_norm", "k_norm, q_norm"))),
    _fault("attention-norm-factor-as-an-offset", "plain-attention",
           "The stored factor of a norm is taken for an offset.",
           Edit(WEIGHTS, HEAD_NORM, HEAD_NORM.replace("norm", "take", 1).replace(", config", "", 1))),
    _fault("attention-rotary-of-a-quarter", "plain-attention", "A quarter of the channels is rotated.",
           Edit.of(ATTENTION, "rotary_dim=config.rotary_dim{ =>  // 4}, theta=config.rope_theta")),
    _fault("mlp-gate-and-up-swapped", "renamed-weights", "w1 is taken for the matrix that no silu follows.",
           Edit(WEIGHTS, 'torch.cat([stored.take(f"{at}.gate_proj.weight"), stored.take(f"{at}.up_proj.weight")])',
                'torch.cat([stored.take(f"{at}.up_proj.weight"), stored.take(f"{at}.gate_proj.weight")])')),
    _fault("final-norm-before-the-layers", "renamed-weights",
           "The norm called embedding_norm is applied to the embedding, and nothing after the last layer.",
           Edit(TRUNK, "hidden, features = Residual(self.head.embed(ops, batch.tokens, STAGE)), None",
                "embedded = self.head.embed(ops, batch.tokens, STAGE)\n"
                "hidden, features = Residual(ops.norm(x=embedded, weight=self.norm, eps=self.eps, to=Place(STAGE, "
                "STAGE_LEVEL, 'embedding'))), None"), blind=()),
)
