"""Windows of one round with own widths: a width of another request, of the round, or none.

Leaves out: trees (`trees.py`), and acceptance in windows that are equally wide (`rollback.py`).
"""

from instep.setting import Setting

from .fault import USUAL, Edit, Fault, of_family

ENGINE, ROUND = "instep_optimized/engine.py", "instep_optimized/round_for_step_count.py"
TO_HOST = "instep_optimized/transfer/to_host.py"
ACCEPT = "instep_optimized/ops/plain/argmax_and_acceptance.py"

LABELS, CAPTURED = Setting(ops="ledger"), Setting(ops="ledger", graphs=True)
STORED = "self._ops.store_rows(rows=%s, pool=table.nodes, locations=%s)"
COUNTS = "counts = {[1 + request.drafts for request in requests] => %s} if body.ragged else None"
RUNS = "runs = [column(ops, inputs.tree, {step => %s}) for step in range(self.num_steps)]"

_fault = of_family("widths", LABELS, ("identity",), blind=())

FAULTS: tuple[Fault, ...] = (
    _fault("width-of-the-round", "window-width", "Every window has the width of the round, whatever its own.",
           Edit.of(ENGINE, COUNTS % "None"), seen=("bytes", "labels", "identity", "tails")),
    _fault("width-of-the-widest", "window-width", "Every window is as wide as the widest of its batch.",
           Edit.of(ENGINE, COUNTS % "[1 + max(one.drafts for one in requests)] * len(requests)"),
           seen=("bytes", "labels", "identity", "tails")),
    _fault("width-of-another", "window-width", "The widths of a batch meet its requests in the reverse order.",
           Edit.of(ENGINE, COUNTS % "[1 + one.drafts for one in reversed(requests)]"),
           seen=("bytes", "labels", "identity", "tails")),
    _fault("width-of-the-narrowest", "window-width",
           "No request has more drafts accepted than the narrowest window has.",
           Edit.of(ROUND, "            count={inputs.width => inputs.width.min().expand_as(inputs.width)}, "
                   "forced_last=inputs.forced[:, 0]"), how=USUAL, seen=("identity", "derived", "directed", "bytes")),
    _fault("width-packed-rows", "window-rows",
           "The first row of a window is computed from the widths of those before it.",
           Edit.of(ROUND, "[{n * width => sum(widths[:n])} for n in number]"),
           seen=("labels", "bytes", "identity", "contracts", "serves")),
    _fault("width-bonus-at-the-last-column", "window-rows", "The bonus is the pick at the last column of the round.",
           Edit.of(ACCEPT, "    said = torch.where(forced_bonus >= 0, forced_bonus, {picks.gather(1, correct[:, "
                   "None])[:, 0] => picks[:, -1]})"),
           Edit.of(ACCEPT, "picks.gather(1, {own[:, None] => torch.full_like(own, picks.shape[1] - 1)[:, None]})"),
           seen=("labels", "identity")),
    _fault("width-accepts-behind-the-end", "window-width", "Acceptance does not end where a request's own drafts end.",
           Edit.of(ACCEPT, "right = {(window[:, 1:] == picks[:, :-1]) & (node[1:] < count[:, None]) => (window[:, 1:] "
                   "== picks[:, :-1]) | (node[1:] >= count[:, None])}"),
           Edit.of(ACCEPT, "own = {torch.minimum(right.long().cumprod(dim=1).sum(dim=1), most) => "
                   "right.long().cumprod(dim=1).sum(dim=1)}"),
           seen=("identity", "labels", "contracts", "serves")),
    _fault("width-drafts-at-the-end", "window-drafts", "Drafts fewer than the step count are put at the window's end.",
           Edit.of(ENGINE, "forced = [{[*given, *[0] * (width - 1 - len(given))] => [*[0] * (width - 1 - len(given)), "
                   "*given]}\n"
                   "for given in ([[-1] * len(tree) for tree in trees] if picks is None else picks)]"),
           seen=("identity", "labels")),
    _fault("width-head-goes-on", "window-drafts",
           "The draft head runs in all steps of a round, also after a chain's end.",
           Edit.of(ROUND, "{runs = [column(ops, inputs.tree, step) for step in range(self.num_steps)] => runs: "
                   "list[torch.Tensor] = []}"), seen=("bytes", "tails", "identity", "labels", "serves")),
    _fault("width-head-stops-early", "window-drafts", "The draft head does not run for the last draft of a chain.",
           Edit.of(ROUND, RUNS % "min(step + 1, self.num_steps - 1)"), how=USUAL,
           seen=("identity", "choices", "derived", "steps", "states", "bytes")),
    _fault("width-answer-of-the-round", "window-drafts", "The answer of a draft has all drafts of the head.",
           Edit.of(ENGINE, "        if {shaped => shaped and nodes}:\n"
                   "            said, steps = cut_to_trees(said, trees, width), max(map(len, trees))")),
    _fault("device-width-of-the-neighbour", "device-width",
           "A draft writes the width of a request for the one before it.",
           Edit.of(ENGINE, STORED % ("nodes", "{slots => slots.roll(1)}")), trace="unread",
           seen=("bytes", "labels", "identity", "tails", "contracts")),
    _fault("device-width-of-the-last-round", "device-width", "The widths of a round arrive after its commit.",
           Edit.of(ENGINE, "{self._ops.store_rows(rows=nodes, pool=table.nodes, locations=slots) => self._later, later "
                   "= (slots, nodes), getattr(self, '_later', (slots, nodes))\n"
                   "self._ops.store_rows(rows=later[1], pool=table.nodes, locations=later[0])}"), trace="unread",
           seen=("bytes", "labels", "identity", "tails", "contracts")),
    _fault("device-width-of-the-capture", "device-width", "A draft writes widths into new memory; graphs read the old.",
           Edit(ENGINE, "self._ops.store_rows(rows=nodes, pool=table.nodes, locations=slots)",
                'object.__setattr__(table, "nodes", table.nodes.clone())\n'
                "self._ops.store_rows(rows=nodes, pool=table.nodes, locations=slots)"), trace="unread", how=CAPTURED,
           seen=("bytes", "labels", "identity", "tails", "contracts", "graphs")),
    _fault("device-width-ignored-by-the-verify", "device-width",
           "A verify writes states and KV of rows past the width.",
           Edit.of(ROUND, "{inputs = self._counted(ops, inputs) => inputs = inputs._replace(width=torch.where(inputs."
                   "width < 0, self.width, inputs.width))}\n"
                   "slot_table, (count, width) = self.model.memory.slot_table, (len(inputs.slots), self.width)\n"
                   "tokens = ops.select(x=slot_table.window[:, :width], index=inputs.slots).view(count * width)"),
           trace="unread", seen=("bytes", "tails", "identity")),
    _fault("device-width-read-by-the-host", "device-width",
           "The host reads the widths, to skip a draft of roots alone.",
           Edit.of(ENGINE, "request.parents = {tuple(range(steps)) => tuple(range(steps if nodes.max() > 0 else 0))}"),
           trace="unread", how=USUAL, seen=("hostreads",)),
    _fault("device-width-not-trimmed", "device-width", "A commit keeps the pages of the longest window.",
           Edit.of(ENGINE, "if {self._capacity.trim => self._capacity.trim and not self._capacity.device_widths}:\n"
                   "    self._trim(verified)"), trace="unread"),
    _fault("device-width-without-its-bound", "device-width", "A draft reserves the pages of the true widths.",
           Edit(ENGINE, "wanted = {one.name: self._capacity.drafted(steps, steps) for one in drafted}",
                "wanted = {one.name: self._capacity.drafted(0, width) for one, width in zip(drafted, widths)}"),
           trace="unread"),
    _fault("device-width-cut-by-the-next-row", "device-width",
           "The choices of a window are cut to the next one's width.",
           Edit.of(TO_HOST,
                   "self._counts.list()[{self._places[name] => (self._places[name] + 1) % len(self._places)}]"),
           trace="unread"),
)
