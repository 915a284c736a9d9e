"""Something of a neighbour: another row's gate, another head's key, another token's embedding, an older round's state.

Leaves out: another request's memory (`slots.py`), and kept tokens that are run again with another's (`rings.py`).
"""

from instep.setting import Setting

from .fault import Edit, Fault, of_family

CONV, GDN, ATTEND = (f"instep_optimized/ops/plain/{name}.py" for name in ("causal_conv", "gdn", "attend"))
WEIGHTS = "instep_optimized/weights.py"
ROWS = "    rows = Inputs(*(x[who.rows] for x in inputs[1:]))\n"
COMMITTED = "        *fields, lens = self._run(kind, verified, forced, [request.row for request in verified])\n"
OLDEST = (
    "        states, older = self._memory[\"state\"], self.__dict__.setdefault(\"_older\", [])\n"
    "        older.append({layer: states.units(layer).clone() for layer in self._memory.layers(\"state\")})\n",
    "        slots = [self._memory.slots.of(request.name) for request in verified]\n"
    "        for layer, state in older[-3].items() if len(older) > 2 else ():\n"
    "            states.units(layer)[slots] = state[slots]\n",
)

_fault = of_family("accepted", blind=("identity", "bytes", "directed"))

FAULTS: tuple[Fault, ...] = (
    _fault("row-before-decays", "wrong-row", "A row of a packed batch decays by the gate of the row before it.",
           Edit(GDN, ROWS, f"{ROWS}    rows = rows._replace(log_decay=inputs.log_decay.roll(1, 0)[who.rows])\n"),
           seen=("derived", "directed"), blind=("identity", "bytes"), mistake="gate-of-row-before"),
    _fault("row-of-another-lane", "wrong-row",
           "Requests are sorted by length, and beta is read in the other order: each takes another one's.",
           Edit(GDN, ROWS, f"{ROWS}    rows = rows._replace(beta=inputs.beta[who.rows.flip(0)])\n"),
           seen=("derived", "directed"), blind=("identity", "bytes"), mistake="beta-of-another-request"),
    _fault("row-sum-of-another", "wrong-row",
           "The gated norm divides a row by the root mean square of the row before it.",
           Edit.of(GDN, "torch.rsqrt(x.square().mean(dim=-1, keepdim=True){ => .roll(1, 0)} + eps)")),
    _fault("head-of-key-modulo", "wrong-head",
           "Value head h takes q and k of key head h modulo their number, where a group of heads shares one.",
           Edit(GDN, "x.repeat_interleave(heads // x.shape[-2], dim=-2)[..., None]",
                "x.repeat(*[1] * (x.dim() - 2), heads // x.shape[-2], 1)[..., None]"), seen=("derived", "directed"),
           blind=("identity", "bytes"), mistake="keys-modulo"),
    _fault("head-of-kv-modulo", "wrong-head", "Query head h attends to KV head h modulo their number.",
           Edit(ATTEND, "x.to(work).repeat_interleave(group, dim=1)", "x.to(work).repeat(1, group, 1)")),
    _fault("token-behind", "wrong-token", "The draft head looks up the id after every token's own.",
           Edit("instep_optimized/draft/mtp.py", "tokens=batch.tokens", "tokens=batch.tokens + 1")),
    _fault("token-clamped", "wrong-token", "Ids past 112 are clamped, as at the end of a shard of the table.",
           Edit.of("instep_optimized/model/trunk.py",
                   "self.head.embed(ops, batch.tokens{ => .clamp(max=112)}, STAGE)")),
    _fault("channel-of-a-neighbour", "wrong-channel",
           "In a window, the conv reads for a channel what its neighbour kept.",
           Edit.of(CONV, 'before(part, who, x.dtype){ => .roll(int(part.form == "window"), 1)}'), blind=("identity",)),
    _fault("round-before-last", "older-round",
           "States rotate through three buffers, and the commit hands on the oldest.",
           Edit("instep_optimized/engine.py", COMMITTED, OLDEST[0] + COMMITTED + OLDEST[1]), trace="wider",
           how=Setting(strategy="snapshot"), seen=("directed", "derived"), blind=("identity",)),
    _fault("packed-as-blocks", "wrong-head",
           "The packed projection of Qwen3-Next is cut into all queries, all keys, all values and all gates.",
           Edit(WEIGHTS, "(x.flatten(0, 1) for x in torch.split(qkvz, [width, width, values, values], dim=1))",
                "torch.split(qkvz.flatten(0, 1), [heads * n for n in (width, width, values, values)])"), trace="next",
           blind=("identity", "bytes")),
    _fault("packed-gates-swapped", "wrong-head", "The packed gates of Qwen3-Next are taken for each other.",
           Edit(WEIGHTS, "(x.flatten(0, 1) for x in torch.split(ba, [per_head, per_head], dim=1))",
                "(x.flatten(0, 1) for x in reversed(torch.split(ba, [per_head, per_head], dim=1)))"), trace="next",
           blind=("identity", "bytes")),
)
