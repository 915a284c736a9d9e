"""Norms whose epsilon or weight is another one's.

Leaves out: the l2 norm of q and k, and casts (`numerics.py`).
"""

from .fault import Edit, Fault, of_family

GDN, ATTEND = (f"instep_optimized/ops/plain/{name}.py" for name in ("gdn", "attend"))

_fault = of_family("accepted", blind=("identity", "bytes", "directed"))

FAULTS: tuple[Fault, ...] = (
    _fault("norm-eps-ten-times", "norm-eps", "The gated norm is given ten times the epsilon.",
           Edit.of("instep_optimized/model/gdn.py", "eps={ => 10 * }config.core_eps, gate=config.output_gate")),
    _fault("norm-eps-outside-the-root", "norm-eps", "The gated norm adds its epsilon to the root, not inside it.",
           Edit(GDN, "x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)",
                "x / (x.square().mean(dim=-1, keepdim=True).sqrt() + eps)")),
    _fault("norm-eps-of-another-class", "norm-eps",
           "The draft head's norm of embeddings has the 1e-5 of another class.",
           Edit.of("instep_optimized/ops/fused.py", "weight=weights[0], eps={eps => 1e-5}")),
    _fault("norm-weight-without-one", "norm-weight", "Keys are multiplied by their norm's weight, not by one plus it.",
           Edit(ATTEND, "rms_norm(key, k_norm, eps)", "rms_norm(key, k_norm - 1, eps)"),
           blind=("identity", "directed")),
)
