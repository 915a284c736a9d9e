"""Numbers that are right if they are read at once, and wrong if they are read late or never.

A replay reads everything after every event, so only the relation `read_late` finds these faults. Leaves out: answers
whose tensors are written again, which a replay remembers (`changed_answers.py`).
"""

from instep.setting import Setting

from .fault import Edit, Fault, Wrap, of_family

ENGINE, TO_HOST = "instep_optimized/engine.py", "instep_optimized/transfer/to_host.py"
LABELS = Setting(ops="ledger")

CATCH_UP = "        self._catch_up()\n"
COMMIT = "        *fields, lens = self._run(kind, verified, forced, [request.row for request in verified])\n"
ANSWER = "        return replace(answered(acceptance, widest), tracked=tracked, steps_to_track=steps)\n"
NUMBERS = "torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=numbers.is_cuda)"
ROOTS = "        chosen = Roots([p.request.name for p in plan if p.rooted], roots)\n"

_fault = of_family("ragged", LABELS, ("read_late",), blind=("identity", "bytes", "labels", "aliasing"))

FAULTS: tuple[Fault, ...] = (
    _fault("host-copies-of-one-size", "written-before-read",
           "Copies to the host of one size share their memory: the next copy overwrites one that was not read.",
           Edit(TO_HOST, f"        self._numbers = {NUMBERS}\n", "        staging = HostCopy.list.__dict__.setdefault("
                "\"staging\", {})\n"
                f"        self._numbers = staging.setdefault(numbers.shape, {NUMBERS})\n"), relation="read_late"),
    _fault("root-looked-up-in-the-slot", "written-before-read",
           "An answer's root is looked up in the slot table: after the next commit it is the root of that commit.",
           Edit(TO_HOST, "self._copy = None if roots is None else HostCopy(roots, immutable=True)",
                "self._roots = roots"),
           Edit(TO_HOST, "        assert self._copy is not None, \"a named request has a root\"\n"
                "        return self._copy.list()[place]\n", "        return self._roots()[place]\n"),
           Edit(ENGINE, ROOTS, "        lines = [self._memory.slots.of(p.request.name) for p in plan if p.rooted]\n"
                "        windows = self._memory.slot_table.window\n"
                "        chosen = Roots([p.request.name for p in plan if p.rooted],\n"
                "                       lambda: windows[lines, 0].tolist())\n"), relation="read_late"),
    _fault("wish-of-the-latest-counts", "lost-unless-read", "The controller receives accepted counts only if its wish "
           "is read, and then those of the latest round alone.", Edit(ENGINE, CATCH_UP + COMMIT, COMMIT),
           Edit(ENGINE, "        self._unreported.append(counts)\n" + ANSWER,
                "        self._unreported = [counts]\n" + ANSWER), trace="late", blind=("identity", "bytes", "labels"),
           relation="read_late"),
    _fault("count-resolved-by-reading", "lost-unless-read",
           "A length keeps the counts of one commit, and adds them only if it is read: an unread commit is lost.",
           Edit(TO_HOST, "        self.most += most\n        self._owed.append((counts, number))\n",
                "        self.most += most\n        self._owed = [(counts, number)]\n"),
           Edit(TO_HOST, "return self._known + sum(counts.list()[number] for counts, number in self._owed)",
                "self._known += sum(counts.list()[number] for counts, number in self._owed)\n"
                "self._owed.clear()\n"
                "return self._known\n"),
           Edit(ENGINE, "            request.length.settle()\n"
                "            request.length.owe(counts, number, 1 + request.drafts)\n",
                "            request.length.owe(counts, number, 1 + request.drafts)\n"), trace="kept",
           how=Setting(ops="ledger", overlap=True), blind=("identity", "bytes", "labels"), relation="read_late"),
    _fault("preempted-as-last-read", "lost-unless-read",
           "A preemption keeps the state that was folded last, for a save or for a reader, and not the state of now.",
           Edit(ENGINE, "        self._preempted[request] = self._kept(request)\n",
                "        folded = self.__dict__.setdefault(\"_folded\", {}).get(request)\n"
                "        kept, memory = folded or self._kept(request)\n"
                "        self._preempted[request] = kept, copied(memory)\n"),
           Wrap(ENGINE, "OptimizedEngine._kept", result="self.__dict__.setdefault(\"_folded\", {})[name] = result"),
           trace="kept", blind=("identity", "bytes", "labels", "copies"), relation="read_late"),
)
