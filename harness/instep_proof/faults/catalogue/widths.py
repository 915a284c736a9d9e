"""Windows of one round with own widths: a width of another request, of the round, or none.

Leaves out: trees (`trees.py`), and acceptance in windows that are equally wide (`rollback.py`).
"""

from __future__ import annotations

from instep.setting import Setting

from .fault import Edit, Fault

ENGINE, ROUND = "instep_optimized/engine.py", "instep_optimized/round_for_step_count.py"
ACCEPT = "instep_optimized/ops/plain/argmax_and_acceptance.py"

LABELS = Setting(ops="ledger")
COUNTS = "counts = {[1 + request.drafts for request in requests] => %s} if body.ragged else None"
RUNS = "runs = [column(ops, inputs.tree, {step => %s}) for step in range(self.num_steps)]"

FAULTS: tuple[Fault, ...] = (
    Fault(
        "width-of-the-round", "window-width", "Every window has the width of the round, whatever its own.",
        (Edit.of(ENGINE, COUNTS % "None"),), "widths", LABELS, ("bytes", "labels", "identity", "tails"),
    ),
    Fault(
        "width-of-the-widest", "window-width", "Every window is as wide as the widest of its batch.",
        (Edit.of(ENGINE, COUNTS % "[1 + max(one.drafts for one in requests)] * len(requests)"),),
        "widths", LABELS, ("bytes", "labels", "identity", "tails"),
    ),
    Fault(
        "width-of-another", "window-width", "The widths of a batch meet its requests in the reverse order.",
        (Edit.of(ENGINE, COUNTS % "[1 + one.drafts for one in reversed(requests)]"),),
        "widths", LABELS, ("bytes", "labels", "identity", "tails"),
    ),
    Fault(
        "width-of-the-narrowest", "window-width", "No request has more drafts accepted than the narrowest window has.",
        (Edit.of(ROUND, "            count={inputs.width => inputs.width.min().expand_as(inputs.width)}, "
                        "forced_last=inputs.forced[:, 0]"),),
        "widths", Setting(), ("identity", "derived", "directed", "bytes"),
    ),
    Fault(
        "width-packed-rows", "window-rows", "The first row of a window is computed from the widths of those before it.",
        (Edit.of(ROUND, "[{n * width => sum(widths[:n])} for n in number]"),),
        "widths", LABELS, ("labels", "bytes", "identity", "contracts", "serves"),
    ),
    Fault(
        "width-bonus-at-the-last-column", "window-rows", "The bonus is the pick at the last column of the round.",
        (Edit.of(ACCEPT, "    said = torch.where(forced_bonus >= 0, forced_bonus, "
                         "{picks.gather(1, correct[:, None])[:, 0] => picks[:, -1]})"),
         Edit.of(ACCEPT, "picks.gather(1, {own[:, None] => torch.full_like(own, picks.shape[1] - 1)[:, None]})"),
         ), "widths", LABELS, ("labels", "identity"),
    ),
    Fault(
        "width-accepts-behind-the-end", "window-width", "Acceptance does not end where a request's own drafts end.",
        (Edit.of(ACCEPT, "right = {(window[:, 1:] == picks[:, :-1]) & (node[1:] < count[:, None]) => "
                         "(window[:, 1:] == picks[:, :-1]) | (node[1:] >= count[:, None])}"),),
        "widths", LABELS, ("identity", "labels", "contracts", "serves"),
    ),
    Fault(
        "width-drafts-at-the-end", "window-drafts", "Drafts fewer than the step count are put at the window's end.",
        (Edit.of(ENGINE, "forced = [{[*given, *[0] * (width - 1 - len(given))] => "
                         "[*[0] * (width - 1 - len(given)), *given]}\n"
                         "for given in ([[-1] * len(tree) for tree in trees] if picks is None else picks)]"),),
        "widths", LABELS, ("identity", "labels"),
    ),
    Fault(
        "width-head-goes-on", "window-drafts", "The draft head runs in all steps of a round, also after a chain's end.",
        (Edit.of(ROUND, "{runs = [column(ops, inputs.tree, step) for step in range(self.num_steps)] => "
                        "runs: list[torch.Tensor] = []}"),),
        "widths", LABELS, ("bytes", "tails", "identity", "labels", "serves"),
    ),
    Fault(
        "width-head-stops-early", "window-drafts", "The draft head does not run for the last draft of a chain.",
        (Edit.of(ROUND, RUNS % "min(step + 1, self.num_steps - 1)"),),
        "widths", Setting(), ("identity", "choices", "derived", "steps", "states", "bytes"),
    ),
    Fault(
        "width-answer-of-the-round", "window-drafts", "The answer of a draft has all drafts of the head.",
        (Edit.of(ENGINE, "        if {shaped => shaped and nodes}:\n"
                         "            said, steps = cut_to_trees(said, trees, width), max(map(len, trees))"),),
        "widths", LABELS, ("identity",),
    ),
)
