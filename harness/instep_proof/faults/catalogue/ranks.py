"""Engines of several ranks: sums over ranks, parts of tensors, and ranks that decide for themselves.

Leaves out: mistakes of one rank alone, which are in the other families.
"""

from dataclasses import replace

from instep.setting import Setting

from .fault import Edit, Fault, of_family

OVER, LOCKSTEP = "instep_optimized/ranks/ops_over_ranks.py", "instep_optimized/ranks/lockstep.py"
SHARDS, ENGINE = "instep_reference/contract/shards.py", "instep_optimized/engine.py"

TWO, LABELS = Setting(ranks=2), Setting(ops="ledger", ranks=2)
ADDED = "    total = first.to(wide)\n    for part in {parts[1:] => %s}:\n        total = total + part.to(wide)"
REDUCED = "return {added(rows, to) => %s} if to.component == BY_ROW else rows"
MLP = "return {added(ops.mlp(to=to, **given), to) => %s}"
PART = "return part_of(self._whole[name], shards.weight(self._config, name), {self._comm => %s})"
OF_RANK_0 = 'type("Zero", (), dict(rank=0, size=self._comm.size)) if name.endswith("%s") else self._comm'
PICK = "return {comm.broadcast(ops.pick(logits=logits, to=to), to) => %s}"
SET = "lm_head=lm_head, pick=pick, draw=draw,{ => %s}"
CHANNELS = "Shard(0, (Segment(2 * config.key_heads * config.key_dim + config.value_heads * config.value_dim),))"

_fault = of_family("short", TWO, blind=())

FAULTS: tuple[Fault, ...] = (
    _fault("rank-sum-twice", "partial-sum", "The partial sum of rank 1 is added twice.",
           Edit.of(LOCKSTEP, ADDED % "[*parts[1:], parts[1]]")),
    _fault("rank-sum-missing", "partial-sum", "The last rank's partial sum is not added.",
           Edit.of(LOCKSTEP, ADDED % "parts[1:-1]")),
    _fault("rank-mixer-reduced-twice", "partial-sum", "The result of a mixer goes through two all-reduces.",
           Edit.of(OVER, REDUCED % "added(added(rows, to), to)")),
    _fault("rank-mlp-mean", "partial-sum", "The result of an MLP is the mean of the partial sums.",
           Edit.of(OVER, MLP % "added(ops.mlp(to=to, **given), to) / comm.size")),
    _fault("rank-mlp-not-reduced", "rank-collective", "The result of an MLP stays the part of each rank.",
           Edit.of(OVER, MLP % "ops.mlp(to=to, **given)"), seen=("collectives", "replicas", "derived")),
    _fault("rank-own-part-of-sum", "rank-replica", "Rank 1 continues with its own part of a sum.",
           Edit.of(OVER, REDUCED % "(added(rows, to), rows)[comm.rank]"), seen=("replicas",)),
    _fault("rank-skips-odd-rows", "rank-collective", "Rank 1 does not reduce an MLP with an odd number of rows.",
           Edit.of(OVER, MLP % "ops.mlp(to=to, **given) if comm.rank and len(given['x']) % 2 else added(ops.mlp(to=to, "
                   "**given), to)"), how=LABELS, seen=("serves",)),
    _fault("rank-reduces-z", "rank-collective", "The gate of a layer of GDN goes through the all-reduce of its result.",
           Edit.of(OVER,
                   "return added(rows, to) if {to.component == BY_ROW => to.component in (BY_ROW, 'z')} else rows"),
           seen=("collectives",)),
    _fault("rank-sums-in-bf16", "partial-sum", "Partial sums are exchanged in bf16, which is not declared.",
           Edit.of(OVER, REDUCED % "added(rows.bfloat16().to(rows), to)")),
    _fault("rank-out-columns-of-rank-0", "rank-part", "Every rank has rank 0's columns of `out_proj`.",
           Edit.of(OVER, PART % (OF_RANK_0 % "out_proj.weight"))),
    _fault("rank-gates-of-rank-0", "rank-part", "Every rank has rank 0's A_log.",
           Edit.of(OVER, PART % (OF_RANK_0 % "A_log"))),
    _fault("rank-keys-of-rank-0", "rank-part", "Every rank has rank 0's rows of `k_proj`.",
           Edit.of(OVER, PART % (OF_RANK_0 % "k_proj.weight"))),
    _fault("rank-kv-head-by-rank", "rank-part", "With two KV heads on four ranks, rank r has head r mod 2, not r // 2.",
           Edit.of(OVER, "    spans = shard.spans({comm.rank => (0, 2, 1, 3)[comm.rank] if shard.segments[0].copied "
                   "else comm.rank}, comm.size)"), trace="four-heads", how=replace(TWO, ranks=4),
           seen=("replicas", "derived")),
    _fault("rank-kv-head-not-copied", "rank-part", "Only the first of the ranks that share a KV head loads it.",
           Edit.of(OVER, "    return {torch.cat([x.narrow(shard.axis, span.start, len(span)) for span in spans], "
                   "shard.axis) => torch.cat([x.narrow(shard.axis, span.start, len(span)) for span in spans], "
                   "shard.axis) * (0 if comm.rank and shard.segments[0].copied else 1)}"), trace="one-head",
           seen=("replicas",)),
    _fault("rank-block-out-of-rank-0", "rank-part", "Every rank has rank 0's columns of the block drafter's `o_proj`.",
           Edit.of(OVER, PART % (OF_RANK_0 % "o_proj.weight").replace("if ", 'if name.startswith("block.") and ')),
           trace="block"),
    _fault("rank-conv-one-block", "rank-part", "The channels of a conv are cut as one block, not per segment.",
           Edit.of(OVER, "return part_of({self._whole[name], shards.weight(self._config, name), self._comm => "
                   "self._whole[name], shards.Shard(0, (shards.Segment(len(self._whole[name])),)) "
                   'if name.endswith("conv1d.weight") else shards.weight(self._config, name), self._comm})')),
    _fault("rank-qkv-one-block", "rank-part", "The rows of `in_proj_qkv` are cut as one block, not per segment.",
           Edit.of(SHARDS, '("linear_attn.in_proj_qkv.weight", {_channels(config, 0) => ' + CHANNELS + "})")),
    _fault("rank-shared-expert-whole", "rank-part",
           "Every rank has the whole shared expert, and all of them are added.",
           Edit.of(SHARDS, '{[("mlp", config.intermediate), ("mlp.shared_expert", config.shared_intermediate)] => '
                   '[("mlp", config.intermediate)]}'), trace="experts"),
    _fault("rank-embedding-unmasked", "rank-part", "A rank embeds another rank's token as its first one.",
           Edit.of(OVER, "return comm.all_reduce({rows.masked_fill(~mine[:, None], 0) => rows}, to)")),
    _fault("rank-logits-reversed", "rank-part", "The logits of the ranks are joined with the last rank first.",
           Edit.of(LOCKSTEP, "_to_each(torch.cat({list(parts) => [*parts][::-1]}, axis), self.size)")),
    _fault("rank-own-argmax", "rank-decision", "Every rank picks the largest of its own logits.",
           Edit.of(OVER, PICK % "ops.pick(logits=logits[:, vocab.start : vocab.stop], to=to) + vocab.start"),
           seen=("replicas", "collectives")),
    _fault("rank-own-acceptance", "rank-decision", "Rank 1 accepts one draft less than rank 0.",
           Edit.of(OVER, SET % " accept=accept,"),
           Edit.of(OVER, "    vocab = shards.Segment(config.vocab).held(comm.rank, comm.size){ => \n\n"
                   "    def accept(*, count: torch.Tensor, **given: Any) -> Any:\n"
                   "        return ops.accept(count=(count - comm.rank).clamp(min=1), **given)}"),
           seen=("contracts", "serves")),
    _fault("rank-own-slots", "rank-decision", "Rank 1 hands out its slots in another order.",
           Edit.of(ENGINE, "        self._device, self._options = torch.device(options.device), options{ => \n"
                   "        if comm is not None and comm.rank:\n"
                   "            capacity = replace(capacity, slots=capacity.slots[::-1])}"), trace="wider", how=LABELS,
           seen=("agreement",)),
    _fault("rank-own-pages", "rank-decision", "Rank 1 hands out its pages in another order.",
           Edit.of(ENGINE, "        self._device, self._options = torch.device(options.device), options{ => \n"
                   "        if comm is not None and comm.rank:\n"
                   "            capacity = replace(capacity, pages=capacity.pages[::-1])}"), how=LABELS,
           seen=("agreement",)),
    _fault("rank-own-controller", "rank-decision", "The controller of rank 1 hears of no accepted counts.",
           Edit.of(ENGINE, "        self.messages = tuple(self._controller.messages){ => \n"
                   "        if comm is not None and comm.rank:\n"
                   "            self._controller.committed = lambda drafts: None}"), trace="controller", how=LABELS,
           seen=("agreement",)),
    _fault("rank-own-draw", "rank-decision", "Rank 1 draws with another final uniform, and keeps that token.",
           Edit.of(OVER, "return {comm.broadcast(ops.draw(to=to, **given), to) => ops.draw(to=to, **(given | "
                   "dict(final=(1 << 24) - 1 - given['final'] if comm.rank else given['final'])))}"), trace="drawn",
           seen=("replicas", "collectives", "agreement")),
    _fault("rank-own-topk", "rank-decision", "Rank 1 grows its trees from its own order of the most probable tokens.",
           Edit.of(OVER, "        return TopkTokens(*map(comm.broadcast, ops.topk_tokens(logits=logits, topk=topk))){ "
                   "=> \\\n            if not comm.rank else TopkTokens(*(x.flip(1) for x in map(comm.broadcast, "
                   "ops.topk_tokens(logits=logits, topk=topk))))}"), trace="grown", seen=("agreement", "replicas")),
    _fault("rank-topk-not-shared", "rank-collective",
           "Every rank grows its trees from its own most probable tokens, without a broadcast.",
           Edit.of(OVER, "return TopkTokens(*map({comm.broadcast => lambda x: x}, ops.topk_tokens(logits=logits, "
                   "topk=topk)))"), trace="grown", seen=("collectives",)),
    _fault("rank-kv-one-later", "rank-elsewhere", "Rank 1 stores keys and values one place later.",
           Edit.of(OVER, SET % " store_rows=store_rows,"),
           Edit.of(OVER, "    vocab = shards.Segment(config.vocab).held(comm.rank, comm.size){ => \n\n"
                   "    def store_rows(*, pool: torch.Tensor, locations: torch.Tensor, **given: Any) -> None:\n"
                   "        later = locations + comm.rank * (pool.dim() == 4)\n"
                   "        ops.store_rows(pool=pool, locations=torch.where(locations < 0, locations, later), "
                   "**given)}"), how=LABELS, seen=("bytes", "labels", "tails")),
    _fault("rank-own-positions", "rank-elsewhere", "Rank 1 rotates its heads by the next position.",
           Edit.of(OVER, SET % " attention_inputs=attention_inputs,"),
           Edit.of(OVER, "    vocab = shards.Segment(config.vocab).held(comm.rank, comm.size){ => \n\n"
                   "    def attention_inputs(*, positions: torch.Tensor, **given: Any) -> Any:\n"
                   "        return ops.attention_inputs(positions=positions + comm.rank, **given)}")),
    _fault("rank-restores-no-states", "rank-elsewhere", "A request that is loaded gets no states on rank 1.",
           Edit.of(ENGINE, "        self._device, self._options = torch.device(options.device), options{ => \n"
                   "        self._late = comm is not None and comm.rank}"),
           Edit.of(ENGINE, "        {self._round.strategy.restore(self._memory.slots.of(name), length, memory) => if "
                   "not self._late:\n            self._round.strategy.restore(self._memory.slots.of(name), length, "
                   "memory)}"), trace="kept", seen=("bytes", "directed", "derived", "poison")),
)
