"""Engines of several pipeline stages: micro-batches, relays, and commits of earlier stages.

Every run has 3 stages and 2 micro-batches: with 2 stages (i - 1) mod 2 = (i + 1) mod 2 hides a wrong micro-batch.
"""

from instep.setting import Setting

from .fault import Edit, Fault, of_family

STAGE, OVER = "instep_optimized/pipeline/stage_engine.py", "instep_optimized/pipeline/ops_of_stage.py"
SCHEDULE, SHARDS = "instep_optimized/pipeline/__init__.py", "instep_reference/contract/shards.py"
ENGINE, LOCKSTEP = "instep_optimized/engine.py", "instep_optimized/ranks/lockstep.py"

LABELS = Setting(ops="ledger", stages=3, micro_batches=2)
NUMBERS = Setting(stages=3, micro_batches=2)
GRAPHS = Setting(ops="ledger", graphs=True, stages=3, micro_batches=2)
COPIES = Setting(ops="ledger", strategy="snapshot", stages=3, micro_batches=2)
COMMITTED = ("{self.strategy.commit => %s}(ops, AcceptedWindows(inputs.rows, inputs.slots, last, lens, before, "
             "None if table.parents is None else path))")  # fmt: skip
VERIFIED = "verified = [self._requests[%s.requests[one.place]] for one in received]"
SCRATCH = "scratch = [%s.rows[one.place] for one in received]"
DROPPED = ("        {serve(asked._replace(requests=verified, forced=given, rows=scratch)) "
           "=> for who, one, row in zip(verified, given, scratch):\n"
           "            if who.name not in getattr(self, '_again', ()):\n"
           "                serve(asked._replace(requests=[who], forced=[one], rows=[row]))}")
SENT = ("self._send(%s, [one.flight[1] for one in members], "
        "torch.cat([torch.stack(values, 1), acceptance.accept_index], 1))")  # fmt: skip

_fault = of_family("short", LABELS, ("labels",), blind=())

FAULTS: tuple[Fault, ...] = (
    _fault("stage-commits-on-the-last-one", "stage-commit", "Only the last stage commits; others keep old states.",
           Edit.of(STAGE, COMMITTED % "(lambda *given: None)"), how=COPIES, seen=("directed", "labels", "bytes")),
    _fault("stage-slots-of-the-micro-batch-before", "stage-commit", "A commit has the slots of the micro-batch before.",
           Edit.of(STAGE, VERIFIED % "self._flights[{one.number => max(min(self._flights), one.number - 1)}]"),
           how=COPIES, seen=("stages", "labels", "bytes")),
    _fault("stage-rows-of-stages-ago", "stage-commit",
           "Snapshots are those of the batch that ran as many micro-batches ago as there are stages.",
           Edit.of(STAGE, SCRATCH % "{self._flights[one.number] => self._flights.get(one.number - self.stage.count, "
                   "self._flights[one.number])}"),
           Edit.of(STAGE, "{self._flights = {number: flight for number, flight in self._flights.items() if number in "
                   "waiting} => pass}"), trace="kept", how=COPIES, seen=("labels", "contracts")),
    _fault("stage-scratch-of-the-batch-row", "stage-commit", "Snapshots are indexed by the row in the micro-batch.",
           Edit.of(ENGINE, "return number if self._options.scratch == 'row' else "
                   "{self._memory.request_rows.of(request.name) => 1}"), how=COPIES, seen=("bytes", "labels")),
    _fault("stage-commits-the-next-node", "stage-commit",
           "An earlier stage commits the state of the node after the path.",
           Edit.of(STAGE, "self.strategy.commit(ops, AcceptedWindows(inputs.rows, inputs.slots, {last => "
                   "torch.minimum(lens, inputs.width - 1)}, lens, before, None if table.parents is None else path))"),
           how=COPIES, seen=("labels", "bytes"), mistake="another-count"),
    _fault("stage-keeps-the-old-root", "stage-commit", "An earlier stage does not write the bonus of a relay.",
           Edit.of(STAGE, "self._note(ops, {bonus => last}, inputs.slots, 0)"), seen=("agreement",)),
    _fault("stage-relay-of-another-micro-batch", "stage-relay", "A relay has the number of another micro-batch.",
           Edit.of(STAGE, SENT % "{members[0].flight[0] => min(self._flights)}"), seen=("stages",)),
    _fault("stage-length-of-the-last-round", "stage-relay", "Stage 0 commits the accepted lengths of the relay before.",
           Edit.of(STAGE, "        accepted = [Accepted.of(one.values) for one in received]{ => \n"
                   "        if self.stage.first:\n"
                   "            was, self._was = getattr(self, '_was', accepted), accepted\n"
                   "            accepted = [one._replace(accept_len=old.accept_len) for one, old in zip(accepted, (was "
                   "* 9)[: len(accepted)])]}"), seen=("agreement", "labels")),
    _fault("stage-drops-a-resumed-request", "stage-relay",
           "A relay is dropped for requests that were preempted before.",
           Edit.of(ENGINE, "        self._refusals.resume(request){ => \n"
                   "        self._again = (*getattr(self, '_again', ()), request)}"), Edit.of(STAGE, DROPPED),
           trace="kept", seen=("agreement", "labels")),
    _fault("stage-caps-are-not-relayed", "stage-relay", "A relay has no caps.",
           Edit.of(STAGE, "caps = ints({[one[2] if len(one) > 2 else -1 for one in asked.forced] => [-1] * "
                   "len(members)}, self._memory.device)"), trace="caps", seen=("stages",)),
    _fault("stage-relays-own-acceptance", "stage-relay",
           "A relay has the accepted counts of the engine itself, not those of the event.",
           Edit.of(STAGE, "values = ({acceptance.accept_lens => acceptance.own_num_correct_drafts + 1}, "
                   "acceptance.last_correct_step_indices, acceptance.bonus, caps)"), trace="accepted",
           seen=("stages", "agreement")),
    _fault("stage-relay-is-not-passed-on", "stage-relay", "Stage 0 does not send a relay on to stage 1.",
           Edit.of(STAGE, "        if {at + 1 < self.stage.count - 1 => False}:\n            comm.send(found, at + 1)"),
           seen=("serves",)),
    _fault("stage-roots-exchanged", "stage-relay",
           "An earlier stage writes the roots after a forward in reversed order.",
           Edit.of(STAGE, "members = {[rooted[one.place] for one in received] => [rooted[one.place] for one in "
                   "received][::-1]}"), trace="mixed", seen=("stages", "agreement")),
    _fault("stage-drafts-are-not-relayed", "stage-relay", "An earlier stage writes no relayed drafts into its windows.",
           Edit.of(STAGE, "part = part._replace(forced={[relay.values for relay in received] => [[0] * "
                   "len(relay.values) for relay in received]})")),
    _fault("stage-hidden-of-another-micro-batch", "stage-rows", "The rows of the forward before go to the next stage.",
           Edit.of(OVER, "comm.send({x => getattr(norm, 'was', x) if getattr(norm, 'was', x).shape == x.shape else x}, "
                   "stage.number + 1, FINAL)"),
           Edit.of(OVER, "        {return x.clone() => norm.was = x.clone()\n        return x.clone()}")),
    _fault("stage-rows-in-16-bits", "stage-rows", "Rows are rounded to bf16 between two stages.",
           Edit.of(OVER, "comm.send({x => x.bfloat16().to(x)}, stage.number + 1, FINAL)"), how=NUMBERS,
           seen=("derived",)),
    _fault("stage-layers-of-the-next-one", "stage-rows", "Each stage has the layers of the next stage.",
           Edit.of(SHARDS, "own = layers_of(layers, stages)[{stage => (stage + 1) % stages}]")),
    _fault("stage-order-of-micro-batches", "stage-schedule", "Stage 1 runs the last micro-batch first.",
           Edit.of(STAGE, "result, names, relayed = run({step.micro_batch => count - 1 - step.micro_batch if "
                   "self.stage.number == 1 else step.micro_batch})"), seen=("serves",)),
    _fault("stage-one-micro-batch-at-a-time", "stage-schedule", "A micro-batch begins when the one before is done.",
           Edit.of(SCHEDULE, "steps.append(Step({stage + number => stage + number * stages}, stage, number, 'run'))"),
           Edit.of(SCHEDULE, "steps.append(Step({stages + number + stage => stages + number * stages + stage}, stage, "
                   "number, 'relay'))"), seen=("stages",)),
    _fault("stage-graph-sends-before-its-replay", "stage-graph", "A stage sends the rows that its graph left before.",
           Edit.of(STAGE, "        {found = serve(asked) => pass}\n        if not stage.last:\n            "
                   "stage.comm.send(self._passed.left.of(rows), stage.number + 1, FINAL){ => \n"
                   "        found = serve(asked)}"), how=GRAPHS),
    _fault("stage-graph-reads-the-rows-before", "stage-graph",
           "Rows arrive in memory after the replay that reads them.",
           Edit.of(STAGE, "        if not stage.first:\n            {self._passed.received.of(rows).copy_(stage.comm."
                   "recv(rows, stage.number - 1, FINAL)) => came = stage.comm.recv(rows, stage.number - 1, FINAL)}\n   "
                   "     found = serve(asked){ => \n        if not stage.first:\n            "
                   "self._passed.received.of(rows).copy_(came)}"), how=GRAPHS),
    _fault("stage-graph-overwrites-what-it-sends", "stage-graph",
           "Rows are sent from the memory of the graph, which the next micro-batch overwrites.",
           Edit.of(LOCKSTEP, "self._mail[rank, to].append((call, caller(), {x.clone() => x}))"), how=GRAPHS),
    _fault("stage-graph-of-the-other-bucket", "stage-graph", "Rows are placed for the widest bucket, from its end.",
           Edit.of(STAGE, "{self._passed.received.of(rows) => self._passed.received.of(self._passed.rows(self._graphs."
                   "buckets[-1] * body.width, self._memory.device))[-len(rows):]}.copy_(stage.comm.recv(rows, "
                   "stage.number - 1, FINAL))"), how=GRAPHS),
)
