"""Wrong draws: with another uniform, from another remainder, with the parameters of another request.

Leaves out: sums over several children, which only a tree has, and every other family.
"""

from instep.setting import Setting

from .fault import Edit, Fault, Wrap, of_family

DRAW, UNITS = "instep_optimized/ops/plain/top_k_top_p_sampling.py", "instep_optimized/sampling_inputs.py"
ENGINE, RUNNER = "instep_optimized/engine.py", "instep_optimized/graphs/capture_and_replay.py"
PLAIN = Setting()

_fault = of_family("drawn", PLAIN, ("draws",), blind=())

FAULTS: tuple[Fault, ...] = (
    _fault("draw-uniform-row", "draw-uniform", "Uniforms are looked up one batch row further on.",
           Wrap(DRAW, "draw", "uniforms, final = uniforms.roll(1, 0), final.roll(1, 0)"),
           mistake="uniforms-of-another-request"),
    _fault("draw-uniform-node", "draw-uniform", "A node compares its children with the uniform of the next node.",
           Wrap(DRAW, "draw", "uniforms = uniforms.roll(-1, 1)"), mistake="uniform-of-the-node-after"),
    _fault("draw-uniform-final", "draw-uniform", "The bonus is drawn with the uniform of its node, not the final one.",
           Edit(DRAW, "last * along[:, -1]", "first * along[:, -1]"), mistake="final-uniform-of-the-node"),
    _fault("draw-uniform-packed", "draw-uniform",
           "The final uniform of a short row is not at the end of its row: next to windows it is read as 0.",
           Edit(UNITS, "*row.uniforms[:-1], *[0.0] * (width + 1 - len(row.uniforms)), *row.uniforms[-1:]",
                "*row.uniforms, *[0.0] * (width + 1 - len(row.uniforms))"), mistake="uniforms-of-zero"),
    _fault("draw-uniform-stale", "draw-uniform", "A graph's uniforms are copied in once, and stay.",
           Wrap(RUNNER, "_fill",
                "if name.endswith(\"uniforms\"):\n"
                "    given = torch.where(own.any(), own[: len(given)], given)"), how=Setting(ops="ledger", graphs=True),
           seen=("graphs", "labels")),
    _fault("draw-rest-children", "draw-rest", "A refused draft may be drawn again as the bonus.",
           Edit(DRAW, "along = rest.cumsum(dim=1)", "along = weights.cumsum(dim=1)"), mistake="children-stay"),
    _fault("draw-numbers-row", "draw-numbers", "A request is drawn by the temperature of the batch row before it.",
           Wrap(DRAW, "draw", "sampling = sampling.roll(1, 0)"), mistake="sampling-of-another-request"),
    _fault("draw-numbers-top-p", "draw-numbers", "Top-p cuts before the temperature is applied.",
           Edit.of(DRAW, "{weights => torch.where(weights > 0, (logits - logits.amax(dim=1, keepdim=True)).exp(), "
                   "0)}.gather(1, order).cumsum(dim=1)"), mistake="top-p-first"),
    _fault("draw-numbers-inverse", "draw-numbers", "Logits are multiplied by the temperature.",
           Edit.of(DRAW, "(logits - logits.amax(dim=1, keepdim=True)) {/ => *} heat[:, None]"),
           mistake="temperature-inverted"),
    _fault("draw-numbers-resumed", "draw-numbers", "A request that is resumed has lost how it samples.",
           Edit.of(ENGINE, "self._claim(request, kept.length.exact, {kept.sampling => None})"), mistake="argmax"),
)
