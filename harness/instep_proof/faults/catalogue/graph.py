"""Stale contents of graphs: inputs, padding, metadata, and graphs that are mistaken for one another.

Leaves out: every other family.
"""

from instep.setting import Setting

from .fault import USUAL, Edit, Fault, Wrap, of_family

RUNNER, ENGINE = "instep_optimized/graphs/capture_and_replay.py", "instep_optimized/engine.py"
ROUND, MOVE = "instep_optimized/round_for_step_count.py", "instep_optimized/ops/plain/copy_units.py"
# Requests' metadata on the device and inputs of graphs belong to no layer.
KEY = "(kind, self._round.num_steps)"
LABELS = Setting(ops="ledger", graphs=True)

_fault = of_family("graphs", LABELS, ("bytes",), blind=())

FAULTS: tuple[Fault, ...] = (
    _fault("stale-pad-row", "stale-pad-row", "Padding rows are not refreshed: their last request is served again, "
           "although another one owns the slot now.", Edit(RUNNER, "    own[len(given) :].fill_(value)\n", ""),
           origin="rtp-llm 1181"),
    _fault("pad-sentinel-slot-zero", "pad-sentinel", "Padding rows name slot 0 instead of no slot.",
           Edit(ROUND, "Inputs(0, 0, 0, 0, -1, 0, 0, -1, -1)._replace(**_ADDRESSES)",
                "Inputs(0, 0, 0, 0, -1, 0, 0, -1, -1)._replace(**{**_ADDRESSES, \"slots\": 0})"),
           seen=("poison", "bytes"), origin="vllm-ascend 7506"),
    _fault("pad-sentinel-last-slot", "pad-sentinel",
           "The commit's copy does not skip -1: padding rows move the last snapshot into the last slot.",
           Edit(MOVE, "wanted = (source.units >= 0) & (target.units >= 0)",
                "wanted = torch.ones_like(source.units, dtype=torch.bool)"),
           how=Setting(ops="ledger", strategy="snapshot", graphs=True), seen=("bytes", "labels"),
           origin="vllm-ascend 7506"),
    _fault("pad-sentinel-page-zero", "pad-sentinel", "Rows without a place are stored in the first one, on page 0.",
           Wrap(MOVE, "store_rows", "locations = locations.clamp(min=0)"), trace="ragged", how=USUAL,
           origin="vllm-ascend 7506"),
    _fault("pad-sentinel-unguarded", "pad-sentinel",
           "Rows without a place are stored all the same: -1 is the last one.",
           Wrap(MOVE, "store_rows", "locations = locations % (pool.shape[0] * pool.shape[1])"), trace="ragged",
           how=USUAL, origin="vllm-ascend 7506"),
    _fault("frozen-capture-table", "frozen-capture",
           "The page table is reallocated when it grows, but a graph keeps the one of its capture.",
           Wrap("instep_optimized/memory/__init__.py", "Memory.grow", "from dataclasses import replace\n"
                "self.slot_table = replace(self.slot_table, table=self.slot_table.table.clone())"),
           seen=("graphs", "labels", "contracts"), origin="vllm 44868"),
    _fault("frozen-capture-forced", "frozen-capture",
           "Inputs with two axes are not copied in: a graph keeps the choices of its capture.",
           Edit.of(RUNNER, "return own[: len(given)], given{ =>  if given.dim() == 1 else own[: len(given)]}"),
           seen=("graphs", "labels", "identity"), origin="vllm 44868"),
    _fault("stale-hidden", "stale-hidden", "A forward that no graph holds keeps its hidden rows in a new buffer; the "
           "commit's graph reads the one before.",
           Wrap("instep_optimized/forwards.py", "_keep",
                "if any(p.span.kind == \"verify\" for p in plan):\n"
                "    memory.slot_table = replace(memory.slot_table, final=memory.slot_table.final.clone())"),
           seen=("contracts", "labels"), origin="sglang 22041"),
    _fault("graph-key-kind", "graph-key-collision", "Graphs are kept by kind alone, whatever the step count.",
           Edit(ENGINE, KEY, "(kind, 0)"), seen=("graphs", "serves"), origin="LightLLM 1338"),
    _fault("graph-key-width", "graph-key-collision",
           "Verify graphs are kept by kind alone: a narrow window is replayed in a wide one's layout.",
           Edit(ENGINE, KEY, "(kind, self._round.num_steps * (kind != \"verify\"))"),
           seen=("graphs", "identity", "labels"), origin="LightLLM 1338"),
    _fault("graph-key-layout", "graph-key-collision",
           "Graphs are kept by the layout of their inputs: a decode is served by the graph of a draft.",
           Edit(ENGINE, KEY, "(body.width, body.choices)"), seen=("graphs", "identity", "labels"),
           origin="LightLLM 1338"),
)
