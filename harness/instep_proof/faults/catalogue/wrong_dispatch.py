"""Rows that are served as something else: prompts as windows, windows as prompts, a layer as another's.

Leaves out: every other family.
"""

from instep.setting import Setting

from .fault import USUAL, Edit, Fault, Wrap, of_family

BATCH = "instep_optimized/packed_batch.py"


def _served(*lines: str) -> tuple[Wrap, ...]:
    """Spans are given other kinds before they are sorted by kind."""
    return (Wrap(BATCH, "pack", arguments="\n".join(("from dataclasses import replace", *lines))),)


_fault = of_family("mixed", Setting(ops="ledger", strategy="snapshot"), ("contracts", "bytes"), blind=())

FAULTS: tuple[Fault, ...] = (
    _fault("prefill-as-verify", "prefill-as-verify", "A prompt of as many tokens as a window is served as a window.",
           *_served("window = memory.slot_table.window.shape[1]", "spans = [replace(s, kind=\"verify\") if (s.kind, "
                    "s.count) == (\"prefill\", window) else s for s in spans]"),
           how=Setting(strategy="columns", conv="widened"), seen=("contracts", "bytes", "directed"),
           origin="vllm 53051"),
    _fault("prefill-as-verify-snapshot", "prefill-as-verify",
           "The same where windows keep snapshots: the slot of such a prompt is never written.",
           *_served("window = memory.slot_table.window.shape[1]", "spans = [replace(s, kind=\"verify\") if (s.kind, "
                    "s.count) == (\"prefill\", window) else s for s in spans]"), seen=("contracts", "bytes", "labels"),
           origin="vllm 53051"),
    _fault("prefill-as-decode", "prefill-as-verify", "A prompt of one token is served as a decode, which takes the old "
           "contents of the slot as the request's own.",
           *_served("spans = [replace(s, kind=\"decode\", fresh=False) if (s.kind, s.count) == (\"prefill\", 1) else s "
                    "for s in spans]"), trace="ragged", how=USUAL, seen=("contracts", "poison", "derived"),
           origin="vllm 53051"),
    _fault("verify-as-prefill", "verify-as-prefill",
           "In a forward with a prompt in it, windows are served as prompts: every draft goes into the state.",
           *_served("if any(s.kind == \"prefill\" for s in spans):",
                    "    spans = [replace(s, kind=\"prefill\") if s.kind == \"verify\" else s for s in spans]"),
           origin="vllm 55894"),
    _fault("verify-as-prefill-marks", "verify-as-prefill",
           "The same where accepted tokens are run again: the rejected ones count as settled.",
           *_served("if any(s.kind == \"prefill\" for s in spans):",
                    "    spans = [replace(s, kind=\"prefill\") if s.kind == \"verify\" else s for s in spans]"),
           how=Setting(ops="ledger", conv="widened"), origin="vllm 55894"),
    _fault("layer-kind-polluted", "layer-kind", "The full-attention layer finds its KV by the draft head's layer ids.",
           Edit("instep_optimized/model/trunk.py",
                "    pools = memory.units(\"keys\", layer), memory.units(\"values\", layer)\n",
                "    layer_id = config.drafter().attending[0]\n"
                "    pools = memory.units(\"draft_keys\", layer_id), memory.units(\"draft_values\", layer_id)\n"),
           trace="ragged", how=USUAL, seen=("bytes", "poison", "contracts"), origin="sglang 23331"),
)
