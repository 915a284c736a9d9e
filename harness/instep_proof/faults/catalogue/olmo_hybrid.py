"""Faults of OLMo-Hybrid: another bound of beta, norms at another place or over other axes, weights mixed up.

Leaves out: what a state suffers whatever its beta is (`rollback.py`, `rings`).
"""

from instep.setting import Setting

from .fault import Edit, Fault, of_family

GDN, ROWS = (f"instep_optimized/ops/plain/{name}.py" for name in ("gdn", "embed_norm_linear_head"))
WEIGHTS, ATTENTION, HALF, VERIFY, KERNEL = (
    f"instep_optimized/{name}.py" for name in (
        "weights", "model/attention", "model/mlp", "ops/fused", "kernels/rowwise/gdn_inputs"))
BOUND = "found if beta_bound == 1.0 else found._replace(beta=beta_bound * found.beta)"
PROJECTIONS = 'torch.cat([stored.take(f"{at}.{name}_proj.weight") for name in "qkvgba"])'
NORMED = "ops.norm(x=mixer, weight=self.norm, eps=config.eps, to=at(\"mixer_normed\"))"
FIRST = 'norm = stored.read(f"{prefix}.{layer_norms(config, layer)[NUMBER]}", config)'
HEADS = "x.view(-1, config.head_dim)"
ATTENDED = 'ops.attend(query=query, pages=pages, to=at("attended"))'

_fault = of_family("olmo")

FAULTS: tuple[Fault, ...] = (
    _fault("beta-up-to-1", "beta-bound", "Beta is the sigmoid alone.", Edit(GDN, BOUND, "found")),
    _fault("beta-bound-twice", "beta-bound", "The bound of beta is applied twice.",
           Edit(GDN, BOUND, "found._replace(beta=beta_bound**2 * found.beta)")),
    _fault("beta-clamped-to-1", "beta-bound", "Beta is cut off at 1.",
           Edit(GDN, BOUND, "found._replace(beta=(beta_bound * found.beta).clamp(max=1.0))")),
    _fault("beta-bound-inside-the-sigmoid", "beta-bound", "The bound multiplies b, and not its sigmoid.",
           Edit(GDN, BOUND, "found._replace(beta=sigmoid(beta_bound * b.to(q.dtype)))")),
    _fault("beta-bound-in-prompts-alone", "beta-bound", "Windows are computed without the bound.",
           Edit(VERIFY, "to=to[:-1], bounds=bounds",
                "to=to[:-1], bounds=bounds if parts[0].form == 'chunk' else NONE")),
    _fault("beta-bound-missing-in-a-kernel", "beta-bound", "The kernel of the inputs ignores the bound.",
           Edit.of(KERNEL, "beta = {bound * beta => beta}"), how=Setting("triton")),
    _fault("recall-of-a-beta-up-to-1", "beta-bound", "A token erases by at most 1, and writes by up to 2.",
           Edit(GDN,
                "update = write.beta[..., None] * (write.v - _sum_by_halves(S * write.key) if recalls else write.v)",
                "update = write.beta[..., None] * write.v - "
                "write.beta.clamp(max=1.0)[..., None] * _sum_by_halves(S * write.key)"),
           mistake="erases-at-most-once"),
    _fault("attention-not-normed", "norm-after", "The result of attention is added as it is.",
           Edit.of(ATTENTION, "return self.half(ops, x if config.residual_factors else rows, {mixer => raw}, stage)"),
           Edit(ATTENTION, NORMED, NORMED.replace("x=mixer", "x=(raw := mixer)"))),
    _fault("mlp-not-normed", "norm-after", "The result of the MLP is added as it is.",
           Edit.of(HALF, "x={self._mlp(ops, residual, at(\"mlp\")) => (raw := self._mlp(ops, residual, at(\"mlp\")))}"),
           Edit.of(HALF, "Residual(residual, {made => raw}, at(\"hidden\"))")),
    _fault("attention-normed-as-the-mlp", "norm-after",
           "The norm after attention has the weight of that after the MLP.",
           Edit(ATTENTION, NORMED, NORMED.replace("self.norm", "self.half.norm"))),
    _fault("attention-on-normed-rows", "norm-after", "Attention reads normed rows, as in layers that norm before.",
           Edit(ATTENTION, "rows = x = hidden.summed(ops).x", "rows = hidden.summed(ops).x\nx = ops.norm(x=rows, "
                "weight=self.norm, eps=config.eps, to=at('normed'))")),
    _fault("mlp-on-the-rows-before-attention", "norm-after", "The MLP reads the rows before attention.",
           Edit.of(HALF, "x=self._mlp(ops, {residual => hidden}, at(\"mlp\"))")),
    _fault("attention-on-half-of-a-sum", "norm-after", "Attention reads the residual without the last layer's MLP.",
           Edit.of(ATTENTION, "rows = x = {hidden.summed(ops).x => hidden.summed(ops).x * 0 + hidden.x}")),
    _fault("heads-normed-one-by-one", "row-norm", "Each head of a query and of a key is normed alone.",
           Edit.of(ROWS, "axes = {tuple(range(-weight.dim(), 0)) => (-1,)}")),
    _fault("weights-of-the-first-head", "row-norm", "All heads are scaled with the weights of the first.",
           Edit(WEIGHTS, HEADS,
                "x.view(-1, config.head_dim)[:1].expand(x.numel() // config.head_dim, -1).contiguous()")),
    _fault("norm-weights-transposed", "row-norm", "Weights of norms are read as [head_dim, heads].",
           Edit(WEIGHTS, HEADS, "x.view(config.head_dim, -1).T.contiguous()")),
    _fault("row-norm-as-an-offset", "row-norm", "The stored factor w of queries and keys is taken for 1 + w.",
           Edit(WEIGHTS, 'stored.norm(f"{at}.{name}.weight", config)', 'stored.take(f"{at}.{name}.weight")')),
    _fault("keys-stored-before-their-norm", "row-norm", "The KV pool gets keys without their norm.",
           Edit.of(ATTENTION, "(({key => key_raw}, self.keys), (value, self.values))")),
    _fault("keys-normed-as-many-as-queries", "row-norm",
           "The mean of a key's squares counts as many channels as a query.",
           Edit(ATTENTION, "(projected[:, :, 0], self.weights.q_norm), (key_raw, self.weights.k_norm)",
                "(projected[:, :, 0], self.weights.q_norm), (key_raw, self.weights.k_norm + (self.weights.k_norm + 1) "
                "* ((self.config.heads / self.config.kv_heads)**0.5 - 1))")),
    _fault("values-normed-too", "row-norm", "Values are normed as keys are, before they are stored.",
           Edit.of(ATTENTION, "((key, self.keys), ({value => value / value.square().mean((1, 2), "
                   "keepdim=True).sqrt()}, self.values))")),
    _fault("gated-norm-with-the-eps-of-the-model", "ungated", "The gated norm has the eps of the other norms.",
           Edit.of("instep_optimized/model/gdn.py", "eps={config.core_eps => config.eps}")),
    _fault("normed-attention-gated-by-its-query", "ungated", "The output of attention is gated by its queries.",
           Edit(ATTENTION, ATTENDED, f"{ATTENDED} * projected[:, :, 0].sigmoid()")),
    _fault("b-and-a-swapped", "weights-mixed-up", "Beta has the projection of the decay, and the decay that of beta.",
           Edit(WEIGHTS, PROJECTIONS, PROJECTIONS.replace("qkvgba", "qkvgab"))),
    _fault("gate-by-the-values", "weights-mixed-up", "The output gate has the projection of the values.",
           Edit(WEIGHTS, PROJECTIONS, PROJECTIONS.replace("qkvgba", "qkvvba"))),
    _fault("queries-for-keys", "weights-mixed-up", "The projections of queries and keys are swapped.",
           Edit(WEIGHTS, PROJECTIONS, PROJECTIONS.replace("qkvgba", "kqvgba"))),
    _fault("convs-of-queries-for-keys", "weights-mixed-up", "The convs of queries and keys are swapped.",
           Edit.of(WEIGHTS, '({"q", "k" => "k", "q"}, "v")')),
    _fault("gdn-normed-as-its-mlp", "weights-mixed-up",
           "The norm before a GDN layer has the weight of that of its MLP.",
           Edit("instep_optimized/model/layer.py", FIRST.replace("NUMBER", "0"),
                FIRST.replace("NUMBER", "int(config.mixers[layer] == 'gdn')"))),
)
