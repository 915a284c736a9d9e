"""Caps of acceptance that only the device knows, and the pages that a commit gives back.

Leaves out: acceptance without caps (`rollback.py`), and windows with own widths (`widths.py`).
"""

from instep.setting import Setting

from .fault import Edit, Fault, Wrap, of_family

ENGINE, ROUND = "instep_optimized/engine.py", "instep_optimized/round_for_step_count.py"
ACCEPT = "instep_optimized/ops/plain/argmax_and_acceptance.py"
PATHS, PAGES = "instep_optimized/commit/verified_windows.py", "instep_optimized/memory/pages.py"
RUNNER = "instep_optimized/graphs/capture_and_replay.py"
TRITON = "instep_optimized/kernels/decisions/argmax_and_acceptance.py"

TREES = "instep_optimized/kernels/decisions/tree_shapes_and_acceptance.py"

LABELS, NUMBERS = Setting(ops="ledger"), Setting()
GRAPHS = Setting(ops="ledger", graphs=True)
COLUMN = 'given["caps"] = {inputs.forced[:, 2] => %s}'
LIMIT = "most = torch.where(caps >= 0, {torch.minimum(caps, most) => %s}, most)"
COUNT = "    lens = torch.where(busy, {correct + 1 => %s}, 0)"
TRIM = "self._memory.trim([(request.name, {request.length.most => %s}) for request in requests])"
STATE = "self.strategy.commit(ops, AcceptedWindows(\n    inputs.rows, inputs.slots, " \
        "{acceptance.last_correct_step_indices => %s}, acceptance.accept_lens, before,\n" \
        "    None if parents is None else path,\n))"
COUNTS = ("identity", "bytes", "labels")

_fault = of_family("caps", LABELS, COUNTS, blind=())

FAULTS: tuple[Fault, ...] = (
    _fault("cap-ignored", "cap-value", "Acceptance does not stop at the cap.",
           Edit.of(ROUND, '{given["caps"] = inputs.forced[:, 2] => pass}')),
    _fault("cap-of-the-row-before", "cap-value", "Each request has the cap of the row before.",
           Edit.of(ROUND, COLUMN % "inputs.forced[:, 2].roll(1)"), how=NUMBERS),
    _fault("cap-in-reverse-order", "cap-value", "The host sends the caps of a batch in the reverse order.",
           Edit.of(PATHS, "[[*path, cap] for path, cap in zip(forced, {caps => caps[::-1]}, strict=True)]")),
    _fault("cap-of-the-capture", "cap-value", "A graph keeps the caps that it was captured with.",
           Wrap(RUNNER, "Runner.run", "if key[0] == 'capped commit':\n"
                "    first = self.__dict__.setdefault('first', {})\n"
                "    inputs.forced[:, 2] = first.setdefault(len(inputs.slots), inputs.forced[:, 2].clone())"),
           how=GRAPHS, seen=(*COUNTS, "graphs")),
    _fault("cap-counts-the-bonus", "cap-value", "A cap counts the bonus as one of its drafts.",
           Edit.of(ACCEPT, LIMIT % "torch.minimum((caps - 1).clamp(min=0), most)")),
    _fault("cap-one-too-high", "cap-value", "The kernel accepts one draft after the cap.",
           Edit.of(TRITON, "most = tl.where(cap >= 0, tl.minimum({cap => cap + 1}, most), most)"),
           how=Setting(ops="triton")),
    _fault("cap-zero-is-none", "cap-value", "A cap of 0 is taken for no cap.",
           Edit.of(ACCEPT, "most = torch.where({caps >= 0 => caps > 0}, torch.minimum(caps, most), most)")),
    _fault("cap-of-the-batch", "cap-value", "All requests of a batch have its highest cap.",
           Edit.of(ROUND, COLUMN % "inputs.forced[:, 2].max().expand(len(inputs.slots))"), seen=(*COUNTS, "contracts")),
    _fault("cap-of-the-round-before", "cap-value", "Each row has the cap that it had in the commit before.",
           Edit.of(ENGINE, "forced, kind = forced_paths(accepted, len(requests), {caps => stale}), "
                   'CAPPED if caps else "commit"'),
           Edit.of(ENGINE, "{self._tiers.must_have_room(len(second)) => self._tiers.must_have_room(len(second))\n"
                   "stale = (*getattr(self, '_stale', ()), *caps[len(getattr(self, '_stale', ())):])[: "
                   "len(caps)]\nself._stale = caps}"), how=NUMBERS, seen=(*COUNTS, "contracts")),
    _fault("cap-for-own-paths-alone", "cap-value", "A path that the caller gives is not cut at the cap.",
           Edit.of(ACCEPT, "correct = torch.where(forced_last >= 0, torch.minimum(forced_last, {most => (count - "
                   "1).clamp(min=0)}), own)")),
    _fault("cap-for-given-paths-alone", "cap-value", "The engine's own acceptance does not stop at the cap.",
           Edit.of(ACCEPT, "    own = {torch.minimum(right.long().cumprod(dim=1).sum(dim=1), most) => "
                   "right.long().cumprod(dim=1).sum(dim=1)}"), how=NUMBERS, seen=("identity", "labels")),
    _fault("cap-bonus-without-it", "cap-node", "The bonus is the choice at the node that is right without the cap.",
           Edit.of(ACCEPT, "bonus, own_bonus = (torch.where(busy, x, 0) for x in (said, picks.gather(1, {own[:, None] "
                   "=> right.long().cumprod(dim=1).sum(dim=1)[:, None]})[:, 0]))"), how=NUMBERS,
           seen=("identity", "labels")),
    _fault("cap-state-without-it", "cap-node", "The committed state is that of the last node of the uncut path.",
           Edit.of(ROUND, STATE % "inputs.forced[:, 0]"), how=Setting(strategy="snapshot"),
           seen=("directed", "derived", "states", "labels"), mistake="another-count"),
    _fault("cap-tokens-without-it", "cap-node", "The draft head takes in the draft after the cap, not the bonus.",
           Edit.of(ACCEPT, "    tokens = torch.where(node < {correct => torch.maximum(correct, forced_last)}[:, None], "
                   "window.roll(-1, dims=1), 0)\n"
                   "    tokens = torch.where((node == {correct => torch.maximum(correct, forced_last)}[:, None]) & "
                   "busy[:, None], bonus[:, None], tokens)"), seen=("labels", "identity", "bytes")),
    _fault("cap-of-node-numbers", "cap-node", "A path through a tree ends before a node whose number is above the cap.",
           Edit.of(ACCEPT, "beyond = ({node => path} > caps[:, None]) & (caps >= 0)[:, None]"), trace="capped"),
    _fault("cap-node-of-the-whole-path", "cap-node", "A path through a tree is cut, and its last node stays as it was.",
           Edit.of(ACCEPT, "{last, at = (x.max(dim=1).values.clamp(min=0) for x in (path, own)) => pass}"),
           trace="capped", how=NUMBERS, seen=("identity", "directed", "derived", "bytes")),
    _fault("cap-one-node-too-deep", "cap-node", "The kernel of trees cuts a path one node after its cap.",
           Edit.of(TREES, "above = busy & {(deep > most) => (deep > most + 1)}"), trace="capped",
           how=Setting(ops="triton")),
    _fault("cap-length-without-it", "cap-counts", "The length grows by the uncut path.",
           Edit.of(ROUND, "ops.advance(length=slot_table.length, slots=inputs.slots, by={acceptance.accept_lens => "
                   "torch.maximum(acceptance.accept_lens, inputs.forced[:, 0] + 1)})"),
           seen=("identity", "bytes", "labels")),
    _fault("cap-controller-without-it", "cap-counts", "The controller gets the drafts that are right without caps.",
           Edit.of(ENGINE, "            self._unreported.append({counts => counts if accepted is None else "
                   "[len(path.nodes) for path in accepted]})"),
           Edit(ENGINE, "isinstance(served, HostCopy)", "not isinstance(served, int)"),
           Edit(ENGINE, "Drafts(served)", "served if isinstance(served, list) else Drafts(served)"), seen=("identity",),
           mistake="controller-uncapped"),
    _fault("pages-of-the-window-kept", "cap-pages", "A commit gives no pages back.",
           Edit.of(ENGINE, "if {self._capacity.trim => False}:\n    self._trim(verified)"), seen=("identity",)),
    _fault("pages-given-back-with-the-verify", "cap-pages", "A verify gives back the pages after the committed length.",
           Edit(ENGINE, "for p in plan:\n    p.ran()", "for p in plan:\n    p.ran()\n"
                "self._trim([p.request for p in plan if p.row.kind == 'verify' and self._capacity.trim])"),
           seen=("identity", "bytes", "tails", "poison", "contracts")),
    _fault("pages-of-the-capped-window", "cap-pages", "A commit keeps the pages of the length and of the next window.",
           Edit.of(ENGINE, TRIM % "request.length.most + 1 + request.drafts"), seen=("identity",)),
    _fault("pages-of-the-exact-length", "cap-pages",
           "Overlapping rounds wait for the length, and keep its pages alone.",
           Edit.of(ENGINE, TRIM % "request.length.exact"), how=Setting(ops="ledger", overlap=True), seen=("identity",)),
    _fault("page-of-the-last-token-given-back", "cap-pages", "A commit also gives back the page of its last token.",
           Edit.of(PAGES, "    owned, kept = self._owned[request], {-(-positions // self.size) => (positions - 1) // "
                   "self.size}"), seen=("identity", "poison", "bytes", "interface")),
    _fault("pages-of-another-given-back", "cap-pages", "All pages that a commit gives back are its first request's.",
           Edit.of("instep_optimized/memory/__init__.py", "gone = [(self.slots.of(request), *place) for request, most "
                   "in positions\n"
                   "for place in self.pages.trim({request => positions[0][0]}, most)]"),
           seen=("identity", "interface")),
    _fault("pages-still-in-the-table", "cap-pages", "The slot's line keeps the pages that were given back.",
           Edit.of("instep_optimized/memory/__init__.py",
                   "self.slot_table.map([(slot, number, -1) for slot, number, _ in {gone => gone[:0]}])"), how=NUMBERS,
           seen=("contracts",)),
)
