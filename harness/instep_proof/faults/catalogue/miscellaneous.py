"""Faults of no other family: empty batches, host waits, controllers, tiles that depend on the batch.

Leaves out: every other family.
"""

from instep.setting import Setting

from .fault import USUAL, Edit, Fault, Wrap, of_family

ENGINE, ROUND = "instep_optimized/engine.py", "instep_optimized/round_for_step_count.py"
FLAT = "instep_optimized/controllers/sglang_0_5_12.py"
IDLE = "OptimizedEngine.idle"

# A rank without requests takes part in the step, and a launcher divides rows among them.
EMPTY_DIVISION = (
    Wrap(ENGINE, IDLE, "self._run(\"decode\", [])"),
    Edit(ROUND, "max(1, len(slots))", "len(slots)"),
)
IDLE_COUNTS = Wrap(ENGINE, IDLE, "self._catch_up()\nself._controller._count(0, None)")
ASSERTED = Edit(
    ROUND, "        self._note(ops, acceptance.bonus, inputs.slots, 0)\n",
    "        assert int(acceptance.accept_lens.max()) <= width\n"
    "        self._note(ops, acceptance.bonus, inputs.slots, 0)\n",
)
IN_A_LAUNCHER = Edit.of("instep_optimized/kernels/gdn_prefill/chunk16_fp32.py",
                        "blocks = ceil_div({part.most => int(part.count.max())}, TOKENS)")
LAST_ONE_UNTOLD = Edit(
    ENGINE,
    "        for served in self._unreported:\n"
    "            if isinstance(served, HostCopy):\n"
    "                self._controller.committed(Drafts(served))\n"
    "            else:\n"
    "                self._controller.forwarded(served)\n"
    "        self._unreported.clear()\n",
    "        for served in self._unreported[:-1]:\n"
    "            if isinstance(served, HostCopy):\n"
    "                self._controller.committed(Drafts(served))\n"
    "            else:\n"
    "                self._controller.forwarded(served)\n"
    "        del self._unreported[:-1]\n",
)
WITH_THE_BONUS = Edit(ENGINE, "Drafts(served)", "served.list()")
MID_ROUND = Edit(
    ENGINE, "        self._unreported.append(counts)\n",
    "        self._unreported.append(counts)\n"
    "        self._catch_up()\n"
    "        self._round = self._rounds[self._controller.next_num_steps(0, 0)]\n",
)
NO_WARM_UP = Edit(FLAT, "past = self.batches - rules.warmup_batches", "past = self.batches")
# One row is a product of a matrix and a vector, and such have deeper steps.
STEPS_BY_ROWS = Edit(
    "instep_optimized/kernels/invariant/linear.py", "    tile = tile_of(columns, x.element_size())\n",
    "    tile = tile_of(columns, x.element_size())\n"
    "    if rows < 2:\n"
    "        tile = tile._replace(inner=2 * tile.inner)\n",
)

_fault = of_family("controller", Setting(ops="ledger"), ("identity",), blind=("labels", "bytes"))

FAULTS: tuple[Fault, ...] = (
    _fault("empty-batch-division", "empty-batch", "An idle step is a round without requests, and divides by zero.",
           *EMPTY_DIVISION, seen=("serves",), blind=(), origin="LightLLM 1338"),
    _fault("empty-batch-counts", "empty-batch", "An idle step counts as a batch of the controller's.", IDLE_COUNTS,
           mistake="controller-counts-idle-steps"),
    _fault("hot-sync-assertion", "hot-sync",
           "A commit asserts that its counts are within the window, and waits for them.", ASSERTED, trace="accepted",
           how=USUAL, seen=("hostreads",), blind=("identity", "bytes", "directed", "derived"), origin="LightLLM 1338"),
    _fault("hot-sync-launcher", "hot-sync", "A launcher reads the largest count off the device to size its grid.",
           IN_A_LAUNCHER, trace="accepted", how=Setting(ops="triton"), seen=("hostreads",),
           blind=("identity", "bytes", "directed", "derived"), origin="LightLLM 1338"),
    _fault("controller-one-batch-late", "controller", "The controller's mean of accepted drafts lacks the last batch.",
           LAST_ONE_UNTOLD, mistake="controller-one-batch-late"),
    _fault("controller-counts-the-bonus", "controller", "The controller's mean counts the bonus among accepted drafts.",
           WITH_THE_BONUS, mistake="controller-counts-the-bonus"),
    _fault("controller-no-warm-up", "controller", "The first batches, which are to warm up, already decide.",
           NO_WARM_UP, mistake="controller-no-warm-up"),
    _fault("controller-mid-round", "controller",
           "A wish switches the round at once, where the driver has not yet put it in force.", MID_ROUND, trace="late",
           seen=("serves",), blind=()),
    _fault("batch-dependent-tile", "batch-dependent-tile",
           "A single row is multiplied in deeper steps than several, so its bits depend on the batch.", STEPS_BY_ROWS,
           trace="pair", how=Setting(ops="invariant"), seen=("alone",),
           blind=("identity", "bytes", "derived", "propagated"), relation="alone", origin="vllm 42960"),
)
