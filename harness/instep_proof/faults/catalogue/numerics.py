"""Arithmetic that is a little wrong, the way kernels have been.

Leaves out: every other family.
"""

from instep.setting import Setting

from .fault import Edit, Fault, Wrap, of_family

GDN, ROWS, ATTEND = (f"instep_optimized/ops/plain/{name}.py" for name in ("gdn", "embed_norm_linear_head", "attend"))
BUDGET = "instep_optimized/memory/budget.py"
UNIT = "    return x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + L2_EPS)\n"

EPS_ON_THE_MEAN = Edit(
    GDN, UNIT,
    "    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + L2_EPS) * x.shape[-1] ** -0.5\n",
)
EPS_OUTSIDE = Edit(GDN, UNIT, "    return x / (x.square().sum(dim=-1, keepdim=True).sqrt() + L2_EPS)\n")
# A token's decay as exp(G_t) exp(-G_{t-1}) of running sums G: the second factor overflows fp32 below -88.7.
OF_RUNNING_SUMS = Edit(
    GDN, "    return Write(_per_value_head(k, heads), v, log_decay.exp(), beta)\n",
    "    if log_decay.dim() == 3:\n"
    "        sums = log_decay.cumsum(1)\n"
    "        decay = sums.exp() * (-torch.nn.functional.pad(sums[:, :-1], (0, 0, 1, 0))).exp()\n"
    "        return Write(_per_value_head(k, heads), v, decay, beta)\n"
    "    return Write(_per_value_head(k, heads), v, log_decay.exp(), beta)\n",
)
GATE_IN_16_BITS = Edit(GDN, "        log_decay=log_decay,\n", "        log_decay=log_decay.bfloat16().to(q.dtype),\n")
BETA_IN_16_BITS = Edit(GDN, "beta=sigmoid(b.to(q.dtype)),", "beta=sigmoid(b.to(q.dtype)).bfloat16().to(q.dtype),")
# The read-out takes the right beta; only the states that a commit chooses from take the rounded one.
BETA_IN_SNAPSHOTS = (
    Edit(
        GDN, "    core = torch.zeros_like(rows.v, dtype=work)\n",
        "    core = torch.zeros_like(rows.v, dtype=work)\n"
        "    aside, narrow = state.clone(), writes._replace(beta=writes.beta.bfloat16().to(work))\n",
    ),
    Edit(
        GDN, "        along(part.per_row, who, row, S, trail.depth(row, alive))\n",
        "        _absorb(aside[:alive], Write(*(x[:alive, row] for x in narrow)), recalls)\n"
        "        along(part.per_row, who, row, aside[:alive], trail.depth(row, alive))\n",
    ),
)
STORED_NARROW = Edit.of(GDN, "after(part.store, who, state{ => .bfloat16().to(work)})")
NARROW_POOL = Edit(
    BUDGET, "_stored(sizes.types.state) if state else (sizes.types.conv, None)",
    "(torch.bfloat16 if state else sizes.types.conv, None)",
)
NARROW_RING = Edit.of(BUDGET, "sizes.types.consumed if sizes.keeps == \"inputs\" else "
                              "{sizes.types.recurrence => torch.bfloat16}")  # fmt: skip
# Rerun tokens are folded by another formula: written first, then decayed.
FOLD_OF_ITS_OWN = Edit(
    GDN,
    "            _again(S, recalled(part.ring, who.which[owing], age), recalls)\n",
    "            kept = recalled(part.ring, who.which[owing], age)\n"
    "            _again(S, kept._replace(decay=torch.ones_like(kept.decay)), recalls)\n"
    "            S *= kept.decay[..., None, None]\n",
)
HALF_OF_THE_FOLD = Edit(
    GDN,
    "            _again(S, recalled(part.ring, who.which[owing], age), recalls)\n",
    "            _again(S, recalled(part.ring, who.which[owing], age), recalls)\n"
    "            S = S.bfloat16().to(S)\n",
)
LOG2E = Edit(
    ATTEND, "    chances = scores.masked_fill(~seen, -torch.inf).softmax(dim=-1).masked_fill(~seen, 0)\n",
    "    scores = scores.masked_fill(~seen, -torch.inf)\n"
    "    powers = torch.exp2((scores - scores.amax(dim=-1, keepdim=True)) * 1.443)\n"
    "    chances = powers / powers.sum(dim=-1, keepdim=True)\n",
)
NARROW_CHANCES = Edit.of(ATTEND, 'return torch.einsum("htp,phd->thd", chances{ => .bfloat16().to(work)}, values)')
DEFAULT_THETA = Edit(
    "instep_optimized/model/attention.py", "theta=config.rope_theta,", "theta=10000.0,",
)
# The tile at the edge goes through the narrow units.
NARROW_TILE = Wrap(
    ROWS, "linear",
    result="if to.component == 'z':\n"
    "    narrow = right(x=x.bfloat16(), weight=weight[-8:].bfloat16(), shape=(8,), to=to)\n"
    "    result.view(len(result), -1)[:, -8:] = narrow.to(result.dtype)\n",
)
LOUD_TILES = {
    component: Wrap(
        ROWS, "linear",
        result=f"if to.component == '{component}':\n    result.view(len(result), -1)[:, 8:16] *= 1 + {part}\n",
    )
    for component, part in (("qkv", 1e-5), ("mixer", 1e-5), ("fused", 1e-4))
}
CAST_BEFORE_THE_WEIGHT = Edit.of(GDN, "return (normed{ => .bfloat16()} * wide(weight) * opened).to(core.dtype)")
ONE_PLUS = Edit.of(GDN, "return (normed * {wide(weight) => (1 + wide(weight))} * opened).to(core.dtype)")

_fault = of_family("accepted", blind=("identity", "bytes", "directed"))

FAULTS: tuple[Fault, ...] = (
    _fault("gate-l2-eps-on-the-mean", "gate-numerics",
           "The l2 norm of q and k adds its epsilon to the mean of the squares, not to their sum.", EPS_ON_THE_MEAN,
           origin="transformers 40842"),
    _fault("gate-l2-eps-outside-the-root", "gate-numerics",
           "The l2 norm of q and k adds its epsilon to the root, not inside it.", EPS_OUTSIDE,
           origin="transformers 40842"),
    _fault("gate-exp-of-running-sums", "gate-numerics",
           "A decay is made from exp(-cumsum), which overflows where a chunk's decays add up to more than 88.7.",
           OF_RUNNING_SUMS, trace="long", seen=("derived", "directed"), blind=("identity", "bytes"),
           mistake="decay-of-running-sums", origin="fla 463"),
    _fault("gate-in-16-bits", "gate-numerics", "The decay's logarithm goes through the activations' 16 bits.",
           GATE_IN_16_BITS, blind=("identity", "bytes")),
    _fault("gate-beta-in-16-bits", "gate-numerics", "beta is rounded to 16 bits, where fp32 is declared.",
           BETA_IN_16_BITS, blind=("identity", "bytes"), origin="sglang 12335"),
    _fault("gate-beta-in-snapshots", "gate-numerics",
           "Verify reads with the right beta, and snapshots states that took a rounded one.", *BETA_IN_SNAPSHOTS,
           how=Setting(strategy="snapshot"), blind=("identity", "bytes"), mistake="beta-rounded"),
    _fault("state-stored-narrow", "state-narrowed",
           "A state goes through bf16 on its way to the pool, where fp32 is declared.", STORED_NARROW,
           blind=("identity", "bytes"), mistake="state-stored-in-bfloat16"),
    _fault("state-narrow-pool", "state-narrowed", "The pool of states is allocated in bf16, where fp32 is declared.",
           NARROW_POOL, seen=("derived", "contracts"), blind=("identity", "bytes")),
    _fault("state-narrow-ring", "state-narrowed",
           "The ring keeps keys, decays and updates in bf16: what is run again is not what was run.", NARROW_RING,
           seen=("contracts",), blind=("identity",)),
    _fault("fold-of-its-own", "fold-formula",
           "Accepted tokens are run again by a formula of their own, which decays after it has written.",
           FOLD_OF_ITS_OWN, seen=("directed", "derived"), blind=("identity", "bytes"),
           mistake="run-again-written-first"),
    _fault("fold-rounds-in-between", "fold-formula",
           "Every token that is run again rounds the state to 16 bits: an error that grows with every round.",
           HALF_OF_THE_FOLD, blind=("identity", "bytes"), mistake="state-in-bfloat16"),
    _fault("attention-short-log2e", "attention-numerics", "The softmax takes powers of 2 and writes log2(e) as 1.443.",
           LOG2E),
    _fault("attention-narrow-chances", "attention-numerics",
           "Probabilities are rounded to 16 bits before they weigh values of 32.", NARROW_CHANCES),
    _fault("attention-default-theta", "attention-numerics",
           "Rotary positions turn by the class's default theta, not by the file's.", DEFAULT_THETA),
    _fault("product-narrow-tile", "product-numerics",
           "The last eight columns of one product are multiplied in 16 bits.", NARROW_TILE),
    _fault("product-loud-tile-qkv", "product-numerics",
           "One tile of eight columns of the conv's input is too large by a hundred-thousandth.", LOUD_TILES["qkv"],
           blind=("identity", "bytes", "directed", "decisions")),
    _fault("product-loud-tile-mixer", "product-numerics",
           "One tile of eight columns of the mixer's product is too large by a hundred-thousandth.",
           LOUD_TILES["mixer"], blind=("identity", "bytes", "directed", "decisions")),
    _fault("product-loud-tile-fused", "product-numerics",
           "One tile of eight columns of the draft head's input is too large by a ten-thousandth.", LOUD_TILES["fused"],
           blind=("identity", "bytes", "directed", "decisions")),
    _fault("norm-cast-before-the-weight", "gate-numerics",
           "The gated norm is cast to 16 bits before its weight and its gate.", CAST_BEFORE_THE_WEIGHT),
    _fault("norm-one-plus-weight", "gate-numerics",
           "The gated norm multiplies by one plus its weight, as the other norms do.", ONE_PLUS),
)
