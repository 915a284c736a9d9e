"""Data-parallel groups: idle replicas, padded rows, and results that the replicas exchange."""

from instep.setting import Setting

from .fault import Edit, Fault, of_family

REPLICA = "instep_optimized/data_parallel/replica_engine.py"
OVER, ROUND = "instep_optimized/data_parallel/ops_of_group.py", "instep_optimized/round_for_step_count.py"

LABELS, NUMBERS, GRAPHS = Setting(ops="ledger", dp=2), Setting(dp=2), Setting(ops="ledger", dp=2, graphs=True)
ON_A_REQUEST = Edit.of(REPLICA, "inputs = inputs_of({[-1] => [min(self._memory.slots.owned().values())]}, [-1], "
                                "body.width, [[-1] * body.choices], self._device if self._graphs is None else HOST, "
                                "{[0] => [1]}, [[0] * len(one) for one in uniforms[:1]], [[-1] * body.tree], "
                                "asked.kinds[:1])")  # fmt: skip

_fault = of_family("kept", LABELS, ("serves",), blind=())

FAULTS: tuple[Fault, ...] = (
    _fault("group-idle-skips-a-collective", "group-collective", "An idle replica does not join the exchange of logits.",
           Edit.of(REPLICA, "        if {asked => False}:\n            model.trunk.head.pick(ops, rows.final, STAGE)"),
           trace="short"),
    _fault("group-counts-of-the-last-launch", "group-collective", "An idle replica joins with rows of its last launch.",
           Edit.of(REPLICA, "        {self.replica.launch = Launch(max(1, len(mine)), most) if self._graphs is None "
                   "else Launch(1, 1) => if mine:\n"
                   "            self.replica.launch = Launch(max(1, len(mine)), most)}")),
    _fault("group-own-vocabulary-alone", "group-collective", "A replica keeps the logits of its own tokens alone.",
           Edit.of(OVER, "return {comm.all_gather(part.contiguous(), 1, to) => torch.cat([part] * comm.size, "
                   "1)}[own].contiguous()"), trace="short", how=NUMBERS, seen=("derived",)),
    _fault("group-padding-not-cleared", "group-padding", "Padded rows hold what was in their memory.",
           Edit.of(OVER, "padding = {x.new_zeros(width - len(x), *x.shape[1:]) => x.new_full((width - len(x), "
                   "*x.shape[1:]), 7)}"), trace="ragged", seen=("group",)),
    _fault("group-idle-forward-on-a-request", "group-idle", "An idle forward runs on the slot of a request.",
           Edit.of(REPLICA, "none, zero = {ints([-1], memory.device) => ints([min(memory.slots.owned().values())], "
                   "memory.device)}, ints([0], memory.device)"),
           Edit.of(REPLICA, "who, tokens = Who(none, none, zero, {zero => zero + 1}), zero"), trace="short",
           seen=("bytes",)),
    _fault("group-idle-body-on-a-request", "group-idle", "The idle row of a round is a row of a request.", ON_A_REQUEST,
           seen=("bytes",)),
    _fault("group-answer-of-another-replica", "group-answers",
           "The results of a request are those of the other replica.",
           Edit.of(REPLICA, "places.append({owner * most + seen[owner] => (owner + 1) % self.replica.comm.size * most "
                   "+ seen[owner]})"), trace="short", seen=("labels", "identity", "agreement")),
    _fault("group-roots-of-replica-0", "group-answers", "After a prompt every replica has the results of replica 0.",
           Edit.of(REPLICA, "return self.replica.comm.all_gather(x[None], 0)[{owner => 0}] if len(x) else x"),
           trace="short", seen=("identity", "agreement")),
    _fault("group-rows-of-replica-0", "group-answers",
           "Every replica continues with the embeddings of replica 0's rows.",
           Edit.of(OVER, "begin = {comm.rank * width => 0}"), trace="short", seen=("labels",)),
    _fault("group-nodes-of-the-whole-batch", "group-answers", "The nodes of a tree are counted over the whole batch.",
           Edit.of(ROUND, "lines = [renumbered(self.tree[n], {n - at => 0}, width) for at, n in enumerate(numbers)] if "
                   "self.tree else ()"), trace="branching", seen=("labels", "serves", "contracts")),
    _fault("group-resumed-without-memory", "group-idle", "A request that is resumed gets no memory on its own replica.",
           Edit.of(REPLICA, "        if {self._mine(kept.name) => False}:\n            super()._restore(kept, memory)\n"
                   "            return"), seen=("bytes", "labels")),
    _fault("group-graph-of-own-bucket", "group-graph",
           "A replica replays the graph for the number of its own requests.",
           Edit.of(REPLICA, "asked = asked._replace(most={most => 0})"), how=GRAPHS),
    _fault("group-graph-of-the-last-batch", "group-graph",
           "An idle replica replays a graph on a request of its last batch.", ON_A_REQUEST, how=GRAPHS,
           seen=("graphs", "bytes")),
    _fault("group-graph-not-replayed", "group-graph", "An idle replica replays no graph.",
           Edit.of(REPLICA, "found = super()._serve(asked.part(mine, self._round.width)) if mine else "
                   "{self._idle(asked) => torch.zeros(1, self._round.num_steps, dtype=torch.int64)}"), how=GRAPHS),
    _fault("group-graph-counts-of-the-batch", "group-graph",
           "The collectives in a graph have the rows of the batch that ran, not those of the bucket.",
           Edit.of(REPLICA, "self.replica.launch = Launch(max(1, len(mine)), most) if self._graphs is None else "
                   "{Launch(1, 1) => Launch(max(1, len(mine)), most)}"), how=GRAPHS, seen=("serves", "labels")),
)
