"""Forwards with prompts in graphs: padding, what a capture keeps, memory of graphs, and the order of segments.

Leaves out: graphs of rounds (`graph.py`).
"""

from instep.setting import Setting

from .fault import Edit, Fault, Wrap, of_family

PROMPTS, RUNNER = (f"instep_optimized/graphs/{name}.py" for name in ("prompt_segments", "capture_and_replay"))
SAVED, MOVE = "instep_optimized/memory/saved_states.py", "instep_optimized/ops/plain/copy_units.py"
LABELS = Setting(ops="ledger", graphs=True, prompt_graphs="16,64")
NUMBERS = Setting(ops="plain", graphs=True, prompt_graphs="16,64")

# A tracked prefix keeps the given row itself, as if it were a copy already.
NO_COPY = Edit.of(SAVED, "final={None if final is None else final.clone() => final}")
RUN = "TargetRows(*self.runner.run((kind, 0), self._ops, self._body(kind), inputs, IDLE, see))"


def frozen(field: str) -> Wrap:
    """Let the graphs read a copy of one field of the slot table, made when they are captured."""
    return Wrap(
        PROMPTS, "PromptGraphs.__init__",
        "from copy import copy\n"
        "from dataclasses import replace\n"
        "memory, table = copy(model.memory), model.memory.slot_table\n"
        f"memory.slot_table = replace(table, {field}=table.{field}.clone())\n"
        "model = replace(model, memory=memory)",
    )


_fault = of_family("prompts", LABELS, ("graphs",), blind=())

FAULTS: tuple[Fault, ...] = (
    _fault("prompt-padding-stays", "prompt-padding",
           "Padding rows are not refreshed: requests of an earlier forward are still in them.",
           Edit(RUNNER, "    own[len(given) :].fill_(value)\n", "")),
    _fault("prompt-padding-of-the-last", "prompt-padding", "The last request takes four padding rows for its own.",
           Edit.of(PROMPTS, "[span.count{ => + 4 * (span is spans[-1])} for span in spans]"),
           seen=("graphs", "bytes", "contracts")),
    _fault("prompt-padding-on-page-zero", "prompt-padding",
           "Rows without a place are stored in the first one, on page 0.",
           Wrap(MOVE, "store_rows", "locations = locations.clamp(min=0)"), how=NUMBERS, seen=("poison",),
           origin="vllm-ascend 7506"),
    _fault("prompt-inputs-held-weakly", "prompt-memory",
           "The buffers of inputs are freed after the capture, and made again elsewhere.",
           Wrap(RUNNER, "Runner._capture",
                result=("from dataclasses import replace\n"
                        "fresh = StaticInputs(list(static.staging), self._device)\n"
                        "result = replace(result, static=fresh, inputs=_like(inputs, fresh.tensors))")),
           origin="sglang weak_ref_tensor"),
    _fault("prompt-prefix-in-an-output", "prompt-memory",
           "A tracked prefix keeps a row of the graph's own output, which the next replay overwrites.", NO_COPY,
           Edit.of(RUNNER, "return { => [one[:rows] for one in captured.outputs] if self._breaks else "
                   "}_copied(captured.outputs, bucket, rows, join)"), how=NUMBERS, seen=("graphs", "copies")),
    _fault("prompt-prefix-in-the-room", "prompt-memory",
           "A tracked prefix is a copy, but in memory of the graphs that eager calls write.", NO_COPY,
           Edit(PROMPTS, f"return {RUN}",
                f"found = {RUN}\n"
                "return TargetRows(self.runner.record.rooms.of(found.final).copy_(found.final))"), how=NUMBERS,
           seen=("graphs", "copies")),
    _fault("prompt-result-left-outside", "prompt-memory",
           "The result of an eager call stays in memory of its own; the next segment reads what was captured for it.",
           Edit(PROMPTS, "room[: now.rows].copy_(mixer(now.ops, now.bound, *(x[: now.rows] for x in rows)))",
                "room = mixer(now.ops, now.bound, *(x[: now.rows] for x in rows))"), how=NUMBERS,
           seen=("derived", "directed", "poison"), origin="sglang breakable_cuda_graph"),
    _fault("prompt-addresses-frozen", "prompt-frozen",
           "The eager calls have the addresses of the first forward with a prompt.",
           Edit.of(PROMPTS, "Replaying(ops, {bound => self.__dict__.setdefault('first', bound)}, rows)"),
           seen=("contracts", "serves", "labels")),
    _fault("prompt-pages-frozen", "prompt-frozen", "The graphs read the page table of their capture.", frozen("table"),
           seen=("contracts", "labels"), origin="vllm 44868"),
    _fault("prompt-lengths-frozen", "prompt-frozen", "The graphs read the lengths of their capture, which are 0.",
           frozen("length"), seen=("contracts", "labels"), origin="sglang MetadataGlueGraph"),
    _fault("prompt-most-frozen", "prompt-frozen",
           "The largest number of rows of a request is a number of the host, and that of the narrowest graph.",
           Edit.of(PROMPTS, "most={bucket => self.of.runner.buckets[0]}"), seen=("contracts",),
           origin="sglang MetadataGlueGraph"),
    _fault("prompt-eager-call-first", "prompt-order", "A mixer runs before the segment that computes its inputs.",
           Edit.of(RUNNER, "            {segment()\n"
                   "            if number < len(self._eager):\n"
                   "                self._eager[number]() => if number < len(self._eager):\n"
                   "                self._eager[number]()\n"
                   "            segment()}"), how=NUMBERS, seen=("graphs", "derived", "directed", "bytes", "poison")),
    _fault("prompt-segments-swapped", "prompt-order", "The second and the third segment change places.",
           Edit.of(RUNNER, "enumerate({self._segments => [self._segments[n] for n in (0, 2, 1, *range(3, "
                   "len(self._segments)))]})"), how=NUMBERS, seen=("graphs", "derived", "directed")),
    _fault("prompt-other-bucket", "prompt-order", "The segments of the widest graph run, on inputs of their own.",
           Edit.of(RUNNER, "{captured => (self._of(key, self.buckets[-1], ops, body, inputs, idle, see is not unseen) "
                   "if self._breaks else captured)}.recording.replay()"), how=NUMBERS, origin="LightLLM 1338"),
    _fault("prompt-never-replayed", "prompt-order", "The graphs are captured, but forwards with prompts run eagerly.",
           Edit(PROMPTS, "rows > self.runner.buckets[-1]", "rows")),
    _fault("prompt-begins-again", "prompt-rows", "A later chunk has the tokens at the begin of its prompt.",
           Edit.of(PROMPTS, "p.request.prompt[{p.begin => 0} : {p.begin + count => count}]"),
           seen=("graphs", "identity", "labels")),
    _fault("prompt-windows-packed", "prompt-rows",
           "The columns of windows are counted by rows of the forward, not by columns of the slot table.",
           Edit.of(PROMPTS, "range(number * {wide => count}, number * {wide => count} + count)"),
           seen=("labels", "identity")),
)
