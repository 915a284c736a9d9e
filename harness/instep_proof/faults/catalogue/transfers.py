"""Copies that move to another engine: of another request, with parts of other heads or rows, or without a part.

Leaves out: copies that stay in the host memory of one engine (`offloaded_prefixes.py`).
"""

from instep.setting import Setting

from .fault import Edit, Fault, Wrap, of_family

WIRE, TIERS = "instep_optimized/transfer_between_engines.py", "instep_optimized/kept_entries_on_device_or_host.py"
SAVED, TAKE = "instep_optimized/memory/saved_states.py", "Courier.take"
LABELS, PLAIN = Setting(ops="ledger"), Setting()
BYTES = ("bytes",)

CUT = "index = {_held(shard, self.rank, self.size) => %s}"
AS_STATE = "{state.to(self.state) => %s} if state.is_floating_point() else state"
MISSING = (
    "            if any(set(one) != set(layers) for one in given):\n"
    "                found = sorted({*given[0]})\n"
    "                raise InstepError(f'the entry \"{name}\" has {part} of the layers {found}; "
    "expected {sorted(layers)}')\n"
)
KNOWN = "result = self.__dict__.setdefault('known', {}).setdefault(%s, (result[0], result[1].changed()))"
COMPOSED = (
    "        for _, local in self.here.values():\n"
    "            if kept.final is not None and local.final is not None:\n"
    "                keys = {n: torch.cat((local[\"keys\"][n][:4], x[4:])) for n, x in kept[\"keys\"].items()}\n"
    "                kept = kept.changed(keys=keys)\n"
)
FETCHED = "        self.here[name] = request, copied(kept, partial(_moved, self._device))\n"


def _taken(changes: str) -> tuple[Wrap, ...]:
    """The entry with other components, as a rank takes it in."""
    return (Wrap(WIRE, TAKE, result=f"result = result[0], result[1].changed({changes})"),)


def _alone(changes: str) -> tuple[Wrap, ...]:
    """The entry with other fields of the slot table."""
    return (Wrap(WIRE, TAKE, result="from dataclasses import replace\n"
                                    f"result = result[0], replace(result[1], {changes})"),)


_fault = of_family("transfer", PLAIN, BYTES, blind=())

FAULTS: tuple[Fault, ...] = (
    _fault("transfer-name-of-before", "transfer-name",
           "A name that is used again gives what was sent under it before; the memory has long been used again.",
           Wrap(WIRE, TAKE, result=KNOWN % "name"), seen=("serves",)),
    _fault("transfer-copy-of-before", "transfer-name",
           "A name that is used again gives what the same request sent under it before.",
           Wrap(WIRE, TAKE, result=KNOWN % "(name, result[0].prompt)"), seen=("identity", "bytes"),
           mistake="copy-of-before"),
    _fault("transfer-scratch-columns", "transfer-pairing",
           "States are paired by position in lists that have scratch columns: the state arrives as zeros.",
           *_taken("state={layer: torch.zeros_like(x) for layer, x in result[1][\"state\"].items()}"),
           mistake="all-zero"),
    _fault("transfer-null-block", "transfer-pairing",
           "KV rows are paired by position in lists that begin with a null block.",
           *_taken("keys={n: torch.cat((torch.zeros_like(x[:2]), x))[: len(x)] for n, x in "
                   "result[1][\"keys\"].items()}"), mistake="rows-shifted"),
    _fault("transfer-keys-and-draft-keys", "transfer-pairing",
           "The keys of the draft head arrive in the order of the MTP layers, the last one first.",
           *_taken("draft_keys=dict(zip(result[1]['draft_keys'], reversed(result[1]['draft_keys'].values())))"),
           mistake="paired-with-another-part"),
    _fault("transfer-global-rank", "transfer-part",
           "A rank of the receiver counts from the ranks of the sender on, and takes the heads of another rank.",
           Edit.of(WIRE, CUT % "_held(shard, (len(parts) + self.rank) % self.size, self.size)"),
           mistake="parts-of-another-rank"),
    _fault("transfer-first-heads", "transfer-part", "Every rank of the receiver takes the first heads.",
           Edit.of(WIRE, CUT % "_held(shard, 0, self.size)"), mistake="part-of-the-first-rank"),
    _fault("transfer-conv-one-block", "transfer-part",
           "Channels of conv windows are cut as one block, not per segment.",
           Edit.of(WIRE, CUT % "torch.arange(shard.length).chunk(self.size)[self.rank]"),
           mistake="channels-as-one-block"),
    _fault("transfer-ranks-reversed", "transfer-part",
           "The parts of the sender's ranks are joined in the reverse order.",
           Edit.of(WIRE, "whole.index_copy_(shard.axis, index, self._renumbered({parts[rank] => parts[-1 - rank]}, "
                   "shard, index, 1))"), mistake="parts-of-another-rank"),
    _fault("transfer-rank-0-alone", "transfer-part", "Only rank 0 of the sender gives its part; it is taken for all.",
           Edit.of(WIRE, "given = [sent[{rank => 0}][1][part] for rank in range(sent.ranks)]"),
           mistake="part-of-the-first-rank"),
    _fault("transfer-local-and-remote", "transfer-composed",
           "A hit is composed: the first rows of a local prefix, and the rest of the remote one.",
           Edit(TIERS, FETCHED, COMPOSED + FETCHED)),
    _fault("transfer-half-empty", "transfer-left-out",
           "The description has no layers of the draft head, so none of its memory moves, without an error.",
           Edit(WIRE, MISSING, "            layers = {} if part.startswith('draft_') else layers\n")),
    _fault("transfer-draft-length", "transfer-rows", "The last row of the draft head's KV is forgotten.",
           Wrap(WIRE, TAKE, result="for field in ('draft_keys', 'draft_values'):\n"
                "    rows = {n: x[:-1] for n, x in result[1][field].items()}\n"
                "    result = result[0], result[1].changed(**{field: rows})")),
    _fault("transfer-cast-twice", "transfer-dtype", "States go to 16 bits of another kind on their way.",
           Edit.of(WIRE, AS_STATE % "state.half().to(self.state)"), mistake="cast-on-the-way"),
    _fault("transfer-page-size", "transfer-rows", "The receiver writes KV with the page size of the sender.",
           Edit.of(SAVED, "self.memory.units(name, layer).put({(self.at[0][:count], self.at[1][:count]) => "
                   "(self.at[0][torch.arange(count) // 8 * self.memory.pages.size % max(1, len(self.at[0]))], "
                   "torch.arange(count) % 8)}, rows)")),
    _fault("transfer-root-forgotten", "transfer-left-out", "The root does not move.", *_alone("root=None"), how=LABELS,
           seen=("identity", "bytes")),
    _fault("transfer-proposal-forgotten", "transfer-left-out", "Proposals of the draft head do not move.",
           *_alone("proposal=None"), seen=("identity", "bytes")),
    _fault("transfer-tail-forgotten", "transfer-left-out",
           "The target's final rows of the last tokens, which later prefixes need, arrive as zeros.",
           *_taken("tail={n: torch.zeros_like(x) for n, x in result[1][\"tail\"].items()}"), mistake="all-zero"),
    _fault("transfer-state-turned", "transfer-dtype", "States arrive as [V, K] where the receiver has [K, V].",
           *_taken("state={layer: x.mT.reshape(x.shape) for layer, x in result[1][\"state\"].items()}"),
           mistake="turned-on-the-way"),
    _fault("transfer-keeps-the-copy", "transfer-name", "The sender keeps a copy that the receiver has taken.",
           Edit.of(WIRE, "home.{pop(name, None) => get(name)}"), how=LABELS, seen=("copies",)),
    _fault("transfer-length-of-the-prompt", "transfer-rows",
           "A request continues after its whole prompt, although it moved within it.",
           Wrap(WIRE, TAKE, result=("if not result[0].rooted:\n"
                                    "    whole = type(result[0].length)(len(result[0].prompt))\n"
                                    "    from dataclasses import replace\n"
                                    "    result = replace(result[0], length=whole), result[1]")), how=LABELS,
           seen=("identity",)),
    _fault("transfer-values-for-keys", "transfer-pairing", "Keys and values change places.",
           *_taken("keys=result[1]['values'], values=result[1]['keys']"), mistake="paired-with-another-part"),
    _fault("transfer-rank-1-late", "transfer-part", "Rank 1 of the receiver takes what was sent before under the name.",
           Wrap(WIRE, TAKE, result=("late = self.__dict__.setdefault('late', [])\n"
                                    "late.append(result)\n"
                                    "whole = len(late) > 1 and all(one.final is None for _, one in late[-2:])\n"
                                    "result = late[-2] if self.rank and whole else result")), seen=("serves",)),
)
