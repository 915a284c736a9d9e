"""One path of several that is a little otherwise: what verify, run-again or decode alone computes in 16 bits.

The runs are in bfloat16, where a layer's own rounding is as large. Leaves out: every other family.
"""

from instep.setting import Setting

from .fault import USUAL, Edit, Fault, of_family

ROUND, GDN = "instep_optimized/round_for_step_count.py", "instep_optimized/ops/plain/gdn.py"
VERIFY = "        batch = windows(ops, self.model.memory, inputs.who(), tokens, \"verify\", width, nodes=nodes)\n"
NARROW = Setting(dtype="bfloat16")

WRITES = "    writes = _writes(rows, work, heads)\n"
DECODE = "part.form == \"window\" and part.settled is None and part.most == 1"


def _writes(path: str, name: str) -> Edit:
    """One operand of the delta rule goes through bf16 on one path."""
    return Edit(GDN, WRITES, f"{WRITES}    if {path}:\n"
                             f"        writes = writes._replace({name}=writes.{name}.bfloat16().to(work))\n")


_fault = of_family("accepted", NARROW, ("own_inputs",),
                   blind=("identity", "bytes", "derived", "directed", "propagated"))

FAULTS: tuple[Fault, ...] = (
    _fault("narrow-beta-in-windows", "narrow-path", "beta goes through bf16 in verified windows, and nowhere else.",
           _writes("part.settled is not None", "beta"), mistake="beta-rounded"),
    _fault("narrow-update-when-run-again", "narrow-path",
           "An update goes through bf16 when its token is run again; the ring has it in fp32.",
           Edit(GDN, "            _again(S, recalled(part.ring, who.which[owing], age), recalls)\n",
                "            kept = recalled(part.ring, who.which[owing], age)\n"
                "            _again(S, kept._replace(update=kept.update.bfloat16()), recalls)\n")),
    _fault("narrow-key-in-decode", "narrow-path", "k goes through bf16 in a step without drafts, and nowhere else.",
           _writes(DECODE, "key"), trace="steps", mistake="key-rounded"),
    _fault("narrow-state-read-in-decode", "narrow-path",
           "A step without drafts reads a state that was rounded to bf16, and stores the right one.",
           Edit(GDN, "S * q[:alive, row]", f"(S.bfloat16().to(work) if {DECODE} else S) * q[:alive, row]"),
           trace="steps", blind=("identity", "bytes", "derived", "directed"), mistake="read-in-bfloat16"),
    _fault("other-order-in-decode", "path-order",
           "A step without drafts sums the read-out in another order than a window of one token.",
           Edit(GDN, "_sum_by_halves(S * q[:alive, row])",
                f"(torch.sum if {DECODE} else lambda x, dim: _sum_by_halves(x))(S * q[:alive, row], dim=-2)"),
           trace="steps", how=USUAL, seen=("decode_is_verify_1",),
           blind=("identity", "bytes", "derived", "directed", "own_inputs"), relation="decode_is_verify_1"),
    _fault("position-in-windows", "path-position",
           "Rows of a window are rotated by the position after their own; they are stored and read at the right place.",
           Edit(ROUND, VERIFY, VERIFY + "        batch = replace(batch, positions=batch.positions + 1)\n"), how=USUAL,
           seen=("derived",), blind=("identity", "bytes")),
)
