"""Rings that keep what a token does to a state: entries of other tokens, and rings too full for the window that comes.

Leaves out: other wrong counts of tokens that are run again (`rollback.py`), and rings of other slots (`slots.py`).
"""

from instep.setting import Setting

from .fault import Edit, Fault, of_family

LAZY_RERUN, PLAN = "instep_optimized/commit/lazy_rerun.py", "instep_optimized/ops/plain/rerun_ring.py"
RING, GDN = "instep_optimized/ops/plain/rerun_ring.py", "instep_optimized/ops/plain/gdn.py"
KERNEL, LEDGER = "instep_optimized/kernels/gdn_windows/token_by_token.py", "instep_optimized/ops/ledger_label_ops.py"

STORE = "        pool[units[wanted], entries % pool.shape[1]] = x[wanted].to(pool.dtype)\n"
RECALL = "    kept = type(ring.kept)(*(pool[units, entries % pool.shape[1]] for pool in ring.kept))\n"
AGAIN = "            _again(S, recalled(part.ring, who.which[owing], age), recalls)\n"

MARGIN = Edit(LAZY_RERUN, "return size - width - widest", "return size - width - width")

_fault = of_family("ragged", blind=("identity", "bytes"))

FAULTS: tuple[Fault, ...] = (
    _fault("update-of-another-row", "ring-update",
           "Keys and decays are kept by slot, updates by batch row: one request's meet another's keys.",
           Edit(RING, STORE, STORE.replace("x[wanted]", "(x[wanted].flip(0) if pool is ring.own else x[wanted])")),
           blind=("identity",), mistake="update-of-another-request"),
    _fault("update-stored-narrow", "ring-update",
           "An update is rounded to 16 bits before it is stored, in a ring that is wide.",
           Edit(RING, STORE, STORE.replace("x[wanted]", "(x.bfloat16() if pool is ring.own else x)[wanted]")),
           trace="accepted", blind=("identity", "bytes", "contracts")),
    _fault("update-before-the-decay", "ring-update",
           "The update that is kept was made before the state decayed; the one that is written was made after it.",
           Edit(GDN, "        update = _absorb(S, write, recalls)\n",
                "        update = write.beta[..., None] * (write.v - _sum_by_halves(S * write.key))\n"
                "        _absorb(S, write, recalls)\n"), trace="accepted", mistake="update-before-the-decay"),
    _fault("rerun-next-decay", "ring-rerun",
           "A token is run again with its own key and update, and with the decay of the next token.",
           Edit(GDN, AGAIN, "            kept, behind = (recalled(part.ring, who.which[owing], age + by) for by in (0, "
                "1))\n"
                "            _again(S, kept._replace(decay=behind.decay), recalls)\n"), seen=("directed", "derived"),
           mistake="run-again-with-other-decays"),
    _fault("rerun-rejected-update", "ring-rerun",
           "Updates are read one entry too far: the last one is that of the first rejected token.",
           Edit(RING, RECALL, RECALL.replace("pool[units, entries % pool.shape[1]]",
                                             "pool[units, (entries + (pool is ring.own)) % pool.shape[1]]")),
           seen=("directed", "derived"), mistake="run-again-with-other-updates"),
    _fault("update-of-a-stale-state", "ring-update",
           "The kept update is computed from the stored state, without the pending tokens.",
           Edit(LEDGER, "    after(part.settled, who, expand(chain, *block))\n",
                "    stale = read(memory)\n    after(part.settled, who, expand(chain, *block))\n"),
           Edit(LEDGER, "        keep(part.ring, who.which[:alive], row, token, did)\n",
                "        keep(part.ring, who.which[:alive], row, token, _update(stale[:alive], token, own))\n"
                "        stale[:alive] = _absorbed(stale[:alive], _update(stale[:alive], token, own))\n"),
           how=Setting(ops="ledger"), seen=("labels",), blind=("bytes",)),
    _fault("update-kernel-keeps-the-value", "ring-update",
           "The kernel of the recurrence keeps a token's value where its update belongs, as rings of inputs do.",
           Edit.of(KERNEL, "kept_u + (entry % ring_u_size) * ring.update_per_entry, {update => value}, in_v, WHOLE"),
           trace="short", how=Setting(ops="triton"), mistake="value-for-the-update"),
    _fault("flush-margin-of-the-window-that-was", "flush-margin",
           "A ring is folded if it has no room for a window as wide as this one; the next one is wider.", MARGIN,
           trace="rising", how=Setting(strategy="lazy_rerun"), seen=("derived", "contracts"), blind=("bytes",)),
    _fault("flush-round-masked-with-the-old-cursor", "flush-store",
           "The round that folds a ring stores only the rows that would fit after the tokens that it folds.", MARGIN,
           Edit.of(PLAN, "torch.where(busy, before - settled[slot], 0).clamp(0, size{ - most => })"),
           Edit.of(RING, "(units >= 0) & (first >= 0){ =>  & (ring.pending[requests] + row < ring.size)}"),
           trace="rising", how=Setting(strategy="lazy_rerun"), seen=("derived", "contracts"), blind=("bytes",)),
)
