"""Rings of keys and updates in two parts of 16 bits: a part is lost, stale, wrongly rounded, or of another number.

Leaves out: other mistakes of rings (`rings.py`).
"""

from instep.setting import Setting

from .fault import Edit, Fault, of_family

RERUN, KERNEL = "instep_optimized/commit/rerun.py", "instep_optimized/kernels/gdn_windows/token_by_token.py"
RING, GDN = "instep_optimized/ops/plain/rerun_ring.py", "instep_optimized/ops/plain/gdn.py"

SPLIT = Setting(ring_dtype="bfloat16")
LAZY = Setting(ring_dtype="bfloat16", strategy="lazy_rerun")
HALF = Setting(ring_dtype="float16")
NATIVE = Setting(ops="triton", ring_dtype="bfloat16")

STORE = "        pool[units[wanted], entries % pool.shape[1]] = x[wanted].to(pool.dtype)\n"
PARTS = "    return high, (x - high.to(x)).to(dtype)\n"
JOIN = "kept.k.to(wide) + kept.k_low.to(wide), kept.decay, kept.update.to(wide) + kept.update_low.to(wide)"
OF_POOL = "(pool[units, entries % pool.shape[1]] for pool in ring.kept)"
# The pools of low parts come last.
LOW = "any(pool is low for low in ring.kept[3:])"

_fault = of_family("accepted", SPLIT, blind=("identity", "bytes"))

FAULTS: tuple[Fault, ...] = (
    _fault("split-low-not-stored", "ring-part-store", "The low parts of a window's tokens are stored as zeros.",
           Edit(RING, PARTS, "    return high, torch.zeros_like(high)\n"), mistake="low-parts-left-out"),
    _fault("split-low-of-another-row", "ring-part-store",
           "High parts are kept by slot, low parts by batch row: those of one request meet those of another.",
           Edit(RING, STORE, STORE.replace("x[wanted]", f"(x[wanted].flip(0) if {LOW} else x[wanted])")),
           trace="ragged", mistake="low-parts-of-another-request"),
    _fault("split-low-stays-stale", "ring-part-store",
           "A window stores low parts only of its drafts: that of its root is what the entry had before.",
           Edit(RING, STORE, STORE.replace("x[wanted].to",
                                           f"(pool[units[wanted], entries % pool.shape[1]].nan_to_num() "
                                           f"if row == 0 and {LOW} else x[wanted]).to")), mistake="low-parts-left-out"),
    _fault("split-high-cut-off", "ring-part-store",
           "High parts are cut off towards zero, and low parts are what rounded high parts lack.",
           Edit(RING, PARTS, "    most = (x.view(torch.int32) & -65536).view(torch.float32).to(dtype)\n"
                "    return most, (x - high.to(x)).to(dtype)\n"), mistake="high-parts-cut-off"),
    _fault("split-low-of-another-head", "ring-part-store", "A head's low parts are stored for the next head.",
           Edit(RING, PARTS, "    return high, (x - high.to(x)).to(dtype).roll(1, 1)\n"),
           mistake="low-parts-of-another-head"),
    _fault("split-decays-too", "ring-part-store", "Decays are rounded to the dtype of the parts, and have no low part.",
           Edit.of(RING, "        token = SplitUpdates(k, token.decay{ => .to(ring.own.dtype).to(token.decay)}, "
                   "update, k_low, update_low)\n"), mistake="run-again-with-narrow-decays"),
    _fault("split-key-low-not-read", "ring-part-read", "Tokens are run again along the high parts of their keys.",
           Edit(RING, JOIN, JOIN.replace(" + kept.k_low.to(wide)", "")), mistake="low-parts-left-out"),
    _fault("split-update-low-not-read", "ring-part-read", "Tokens are run again with the high parts of their updates.",
           Edit(RING, JOIN, JOIN.replace(" + kept.update_low.to(wide)", "")), how=LAZY, mistake="low-parts-left-out"),
    _fault("split-low-subtracted", "ring-part-read", "Low parts have the opposite sign, and are added.",
           Edit(RING, JOIN, JOIN.replace(" + ", " - ")), mistake="low-parts-subtracted"),
    _fault("split-low-subtracted-fp16", "ring-part-read", "Low parts in fp16 have the opposite sign, and are added.",
           Edit(RING, JOIN, JOIN.replace(" + ", " - ")), how=HALF, mistake="low-parts-subtracted"),
    _fault("split-low-of-the-token-after", "ring-part-read", "Low parts are read one entry too far.",
           Edit(RING, OF_POOL, OF_POOL.replace("entries % ", f"(entries + int({LOW})) % ")),
           mistake="low-parts-of-another-token"),
    _fault("split-key-low-for-the-update", "ring-part-read", "The low part of a key is added to the update.",
           Edit(RING, JOIN, JOIN.replace(
               "kept.update_low.to(wide)",
               "kept.k_low.to(wide)"
               ".repeat_interleave(kept.update.numel() // kept.k.numel(), -1).view_as(kept.update)"))),
    _fault("split-low-lost-on-a-fork", "ring-part-copy",
           "A fold into a copy, for a save or a fork, reads the high parts alone; the next window reads both.",
           Edit.of(RING, "    return joined({kept => kept if bool((ring.keep >= 0).any()) else kept._replace(k_low=0 * "
                   "kept.k_low, update_low=0 * kept.update_low)}) if isinstance(kept, SplitUpdates) else kept\n"),
           trace="prefix", mistake="low-parts-left-out"),
    _fault("split-low-stays-at-its-node", "ring-part-copy", "A commit moves the high parts of an accepted path alone.",
           Edit(RERUN, "pools = [pool for ring in self._rings.values() for pool in ring]",
                "pools = [pool for ring in self._rings.values() for pool in ring[:3]]"), trace="branching"),
    _fault("split-window-runs-on-high-parts", "ring-part-wide",
           "The tokens of a window run along the high parts of keys.",
           Edit(GDN, "    writes = _writes(rows, work, heads)\n",
                "    narrow = part.ring is not None and part.ring.kept.k.dtype.itemsize == 2\n"
                "    if narrow:\n        rows = rows._replace(k=rows.k.to(part.ring.kept.k.dtype).to(rows.k))\n"
                "    writes = _writes(rows, work, heads)\n"), mistake="key-rounded"),
    _fault("split-checkpoint-too", "ring-part-wide",
           "The state before a window is rounded as the parts are, without low.",
           Edit.of(GDN, "        state = as_stored(part.read, {state => state.to(part.ring.kept.k.dtype).to(state)}, "
                   "who.tokens)\n"), mistake="first-state-rounded"),
    _fault("split-kernel-low-not-read", "ring-part-read", "The kernel runs tokens again along the high parts of keys.",
           Edit(KERNEL, "joined(fetch(kept_k + place_k, in_k, WHOLE), fetch(low_k + place_k, in_k, WHOLE))",
                "fetch(kept_k + place_k, in_k, WHOLE).to(tl.float32)"), trace="short", how=NATIVE,
           mistake="low-parts-left-out"),
    _fault("split-kernel-low-of-the-high", "ring-part-store",
           "The kernel stores the high part of an update a second time, where its low part belongs.",
           Edit(KERNEL, "rest = low_part(update, ring.update.dtype.element_ty)",
                "rest = update.to(ring.update.dtype.element_ty)"), trace="short", how=NATIVE,
           mistake="high-parts-twice"),
)
