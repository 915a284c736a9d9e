"""A mixture of experts that routes rows wrongly, weighs them differently, or leaves some out.

Faults of rows grouped by expert are in the kernel of 16-bit activations. If a block must be full, blocks have 2 rows
there, because a small trace has no expert with 16. Leaves out: reads past a block that a later block overwrites, which
are a race on a card, and correct in Triton's interpreter.
"""

from instep.setting import Setting

from .fault import Edit, Fault, of_family

MLP, KERNEL = "instep_optimized/ops/plain/mlp.py", "instep_optimized/kernels/products/moe.py"
CHOSEN = "    share, chosen = ranked.values[:, :top_k], ranked.indices[:, :top_k]\n"
PAIRS = "        row, rank = torch.where(chosen == expert)\n"
ANSWER = "_expert(weights)(given[row], weights.gate_up[expert], weights.down[expert])"
GROUPED, GROUPS = "instep_optimized/kernels/products/grouped_experts.py", Setting(ops="triton", dtype="bfloat16")

_fault = of_family("experts", blind=("identity", "bytes", "directed"))

FAULTS: tuple[Fault, ...] = (
    _fault("experts-of-the-row-before", "expert-of-another", "A row goes to the experts of the row before it.",
           Edit(MLP, CHOSEN, f"{CHOSEN}    chosen = torch.cat([chosen[:1], chosen[:-1]])\n")),
    _fault("shares-of-the-row-before", "expert-of-another", "A row weighs its experts by the shares of the row before.",
           Edit(MLP, CHOSEN, f"{CHOSEN}    share = torch.cat([share[:1], share[:-1]])\n")),
    _fault("shares-by-the-wrong-rank", "expert-of-another", "The largest share of a row meets its last expert.",
           Edit(MLP, "share[row, rank, None]", "share.flip(-1)[row, rank, None]")),
    _fault("experts-shifted-by-one", "expert-of-another", "An expert reads gate and up of the one before it.",
           Edit(MLP, ANSWER, "_expert(weights)(given[row], weights.gate_up[expert - 1], weights.down[expert])")),
    _fault("token-dropped-at-capacity", "expert-left-out",
           "An expert serves no more rows than its part of a batch; the others go without it.",
           Edit(MLP, PAIRS, f"{PAIRS}        room = -(-len(rows) * top_k // len(weights.router))\n"
                "        row, rank = row[:room], rank[:room]\n")),
    _fault("last-expert-left-out", "expert-left-out", "The loop over experts ends before the last one.",
           Edit(MLP, "range(weights.router.shape[0])", "range(weights.router.shape[0] - 1)")),
    _fault("shared-expert-left-out", "expert-left-out", "The shared expert is not added.",
           Edit(MLP, "(out + _shared(rows, weights)).to(x.dtype)", "out.to(x.dtype)")),
    _fault("head-with-one-expert-fewer", "expert-left-out", "The draft head takes one expert fewer than the target.",
           Edit.of("instep_optimized/model/mlp.py", "top_k=config.experts_per_token{ =>  - (to.stage != 'trunk')}")),
    _fault("shares-not-normalised", "share-numerics", "The shares of the chosen experts are left as they are.",
           Edit(MLP, "    if norm_topk:\n        share = share / share.sum(dim=-1, keepdim=True)\n", "")),
    _fault("shared-gate-skipped", "share-numerics", "The shared expert is added as it is, without its gate.",
           Edit.of(MLP, "{opened *  => }_expert(weights)(x, weights.shared_gate_up, weights.shared_down)")),
    _fault("router-in-16-bits", "share-numerics", "The router's product runs in bfloat16.",
           Edit(MLP, "torch.stack(scores, dim=1)",
                "linear(rows.bfloat16(), weights.router.bfloat16()).to(rows.dtype)")),
    _fault("gate-and-up-of-one-expert", "share-numerics", "One expert has up before gate.",
           Edit(MLP, ANSWER, "_expert(weights)(given[row], weights.gate_up[expert].roll(weights.down.shape[-1] * "
                "(expert == 2), 0), weights.down[expert])")),
    _fault("grouped-border-one-late", "expert-of-another",
           "Rows are grouped by expert; an expert's rows begin one place late, so its first goes to the one before.",
           Edit(GROUPED, "tl.store(blocks + block, tl.minimum(alike - sooner, RT), mask=begins)",
                "tl.store(blocks + block, tl.minimum(alike - sooner, RT) + (at == 0) "
                "- (at + alike - sooner == pairs), mask=begins)"),
           Edit.of(GROUPED, "tl.store(blocks + room + block, at{ =>  + (at > 0)}, mask=begins)"), how=GROUPS),
    _fault("grouped-shares-by-place", "expert-of-another",
           "Rows are grouped by expert; their answers are mixed with the shares in that order, not in the rows'.",
           Edit.of(GROUPED, "answer, share{ => .view(-1)[order.long()]}, out, wide, EACH=each, DT=columns"),
           how=GROUPS),
    _fault("grouped-last-block-dropped", "expert-left-out",
           "Rows are grouped by expert and cut into blocks; a partial block after a full one is skipped.",
           Edit(GROUPED, "FEW, MANY, MANY_FROM = 16, 64, 512", "FEW, MANY, MANY_FROM = 2, 2, 512"),
           Edit.of(GROUPED, "(p < pairs) & (sooner % RT == 0){ =>  & ((sooner == 0) | (alike - sooner >= RT))}"),
           Edit(GROUPED, "x.new_empty(pairs, most), torch.empty(pairs, wide, dtype=torch.float32, device=x.device)",
                "x.new_empty(pairs, most), torch.zeros(pairs, wide, dtype=torch.float32, device=x.device)"),
           how=GROUPS),
    _fault("grouped-counts-of-the-launch-before", "expert-of-another",
           "Rows are grouped by expert; counts of blocks stay from the launch before, whose blocks are served again.",
           Edit(GROUPED, "    tl.store(blocks + block, 0, mask=block < room)\n", ""),
           Edit(GROUPED, "out = x.new_empty(rows, wide)",
                "blocks = _COUNTS.setdefault((room, x.device), torch.zeros_like(blocks))\n"
                "out = x.new_empty(rows, wide)"),
           Edit(GROUPED, "SMALLEST_DOT = 16", "SMALLEST_DOT = 16\n_COUNTS: dict[object, torch.Tensor] = {}"),
           how=GROUPS),
    _fault("grouped-shares-not-normalised", "share-numerics",
           "Rows are grouped by expert; the shares of the chosen experts are left as they are.",
           Edit(GROUPED, "experts, groups = weights.router.shape[0], weights.groups",
                "experts, groups, norm_topk = weights.router.shape[0], weights.groups, False"), how=GROUPS),
    _fault("experts-summed-by-arrival", "expert-order",
           "The order of a row's experts in the sum depends on the number of rows, as if each were added when done.",
           *(Edit(KERNEL, old, old.replace("TOP + n", "TOP + (n + tl.num_programs(1)) % TOP")) for old in (
               "down + tl.load(chosen + row * TOP + n) * expert_step", "middle + (row * TOP + n) * inner + i",
               "tl.load(share + row * TOP + n) * answer")),
           how=Setting(ops="invariant"), seen=("alone",), blind=("identity", "bytes", "derived", "propagated"),
           relation="alone"),
)
