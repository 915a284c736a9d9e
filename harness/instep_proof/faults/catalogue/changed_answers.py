"""Answers and saved copies that are changed afterwards.

Leaves out: copies that were wrong when they were made (`scheduling.py`, `chunks.py`).
"""

from instep.setting import Setting

from .fault import Edit, Fault, of_family

ENGINE = "instep_optimized/engine.py"
LABELS = Setting(ops="ledger")

SAVE = "        self._saved[name] = self._kept(request)\n"
PREEMPT = "        self._preempted[request] = self._kept(request)\n"
SAID = "        said = self._run(kind, drafted, forced, tree=shapes, join=partial(torch.stack, dim=1))\n"
# Two buffers of the largest answer, used in turn: an answer is a view of one of them.
IN_TURN = (
    "        self._turn = 1 - getattr(self, \"_turn\", 0)\n"
    "        outputs = self.__dict__.setdefault(\"_outputs\", said.new_empty(2, 1024))\n"
    "        said = outputs[self._turn, : said.numel()].view(said.shape).copy_(said)\n"
)
STAGED = (
    "        kept, memory = self._kept(request)\n"
    "        staging = self.__dict__.setdefault(\"_staging\", {})\n"
    "        state = {n: staging.setdefault(n, torch.empty_like(x)).copy_(x) for n, x in memory[\"state\"].items()}\n"
    "        kept_aside = (kept, memory.changed(state=state))\n"
)

_fault = of_family("kept", LABELS, ("copies",), blind=("identity", "bytes"))

FAULTS: tuple[Fault, ...] = (
    _fault("answer-of-two-rounds-ago", "answer-overwritten",
           "Drafts are answered from two buffers in turn: after two rounds an answer that was given is another one.",
           Edit(ENGINE, SAID, SAID + IN_TURN),
           Edit("instep_optimized/draft_answers.py", "said.view(len(said), 2, steps).transpose(0, 1).contiguous()",
                "said.view(len(said), 2, steps).transpose(0, 1)"), trace="wider", seen=("aliasing",)),
    _fault("kept-in-one-buffer", "kept-copy-changed",
           "Saves and preemptions share one staging buffer, so the second copy overwrites the first.",
           Edit(ENGINE, SAVE, f"{STAGED}        self._saved[name] = kept_aside\n"),
           Edit(ENGINE, PREEMPT, f"{STAGED}        self._preempted[request] = kept_aside\n")),
    _fault("kept-by-reference", "kept-copy-changed",
           "A save keeps a view of the slot's state: it keeps changing with the request.",
           Edit(ENGINE, SAVE, "        kept, memory = self._kept(request)\n"
                "        slot, states = self._memory.slots.of(request), self._memory[\"state\"]\n"
                "        views = {layer: states.units(layer)[slot] for layer in memory[\"state\"]}\n"
                "        self._saved[name] = (kept, memory.changed(state=views))\n")),
)
