"""Prefixes that are offloaded, reloaded and evicted wrongly: without a part, at another time, or not at all.

Leaves out: how prefixes are made and shared (`prefixes.py`).
"""

from instep.setting import Setting

from .fault import Edit, Fault, of_family

TIERS, ENGINE = "instep_optimized/kept_entries_on_device_or_host.py", "instep_optimized/engine.py"
LABELS, PLAIN = Setting(ops="ledger"), Setting()

ASIDE = "memory = {part: move(kept[part], _to_host) for part, move in OFFLOADS.items()}"
POP = "request, kept = self.here.pop(name)"
FORGET = "        if self.here.pop(name, None) is None:\n            del self.aside[name]\n"
OFFLOAD, EVICT = "        self._tiers.offload(name)\n", "        self._tiers.evict(name)\n"
GIVEN = "        self._restore(kept.given_to(live), self._prefixes.narrow.give(memory))\n"
# An engine that still has the donor reads out the state again.
NEWER = (
    "        kept, memory = self._saved[name]\n"
    "        if kept.name in self._requests:\n"
    "            slot, length = self._memory.slots.of(kept.name), self._requests[kept.name].length.exact\n"
    "            state = self._round.strategy.of[\"state\"].peek(self._base, slot, length)\n"
    "            self._saved[name] = kept, memory.changed(state=state)\n"
)
# The next prefix overwrites the host copy, as far as its parts reach.
OVER = (
    "        for other in self.aside.values():\n"
    "            for (_, old), (_, new) in zip(other.kept.parts(), kept.parts()):\n"
    "                few = min(old.numel(), new.numel())\n"
    "                old.view(-1)[:few] = new.reshape(-1)[:few]\n"
)
# An engine whose prefixes share their donors' pages, and that does not count the users of a page.
UNSHARED = (
    "        kept, _ = self._tiers.shown(name)\n"
    "        if kept.name in self._requests:\n"
    "            first = self._memory.pages.of(kept.name)[:1]\n"
    "            for pool in self._memory.pools.values():\n"
    "                pool.scrub({\"slot\": [], \"page\": first, \"row\": []}[pool.demand.by])\n"
)
TWICE = (
    "        if kept.name in self._requests:\n"
    "            donor = self._memory.slots.of(kept.name)\n"
    "            self._round.strategy.of[\"state\"].restore(donor, kept.length.exact, memory[\"state\"])\n"
)


def _without(part: str, emptied: str) -> Edit:
    return Edit(TIERS, ASIDE, f"kept = kept.changed({part}={emptied})\n{ASIDE}")


_fault = of_family("tiers", LABELS, ("bytes",))

FAULTS: tuple[Fault, ...] = (
    _fault("offload-without-conv", "tier-component", "A prefix goes to the host without its conv windows.",
           _without("conv", "{}")),
    _fault("offload-without-state", "tier-component", "A prefix goes to the host with uninitialised states.",
           _without("state", "{layer: torch.zeros_like(x) for layer, x in kept[\"state\"].items()}"), how=PLAIN),
    _fault("offload-without-scales", "tier-component",
           "States that are stored in tiles go to the host, without their scales.",
           _without("state", "{n: x._replace(scales=torch.ones_like(x.scales)) for n, x in kept[\"state\"].items()}"),
           how=Setting(state_dtype="float8_e4m3fn")),
    _fault("offload-without-draft-kv", "tier-component", "A prefix goes to the host without the KV of the draft head.",
           _without("draft_values", "{}")),
    _fault("offload-without-final-row", "tier-component",
           "A prefix goes to the host without the target's final row, and an empty one comes back.",
           Edit(TIERS, ASIDE, "from dataclasses import replace\n"
                f"kept = kept if kept.final is None else replace(kept, final=torch.zeros_like(kept.final))\n{ASIDE}")),
    _fault("offload-newer-than-its-key", "tier-other",
           "A prefix whose donor is there goes to the host with the state that the donor has by then.",
           Edit(ENGINE, OFFLOAD, NEWER + OFFLOAD), how=Setting(strategy="snapshot"), mistake="content-of-now"),
    _fault("offload-through-one-buffer", "tier-other",
           "All that goes to the host goes into the same buffers: the next prefix is written over the last one.",
           Edit(TIERS, POP, f"        {POP}\n{OVER}"), seen=("copies",)),
    _fault("fetch-of-another", "tier-other",
           "The prefix that was put on the host first comes back, whichever is wanted.",
           Edit(TIERS, "self.aside[name][:2]", "next(iter(self.aside.values()))[:2]"), seen=("identity",), blind=()),
    _fault("hit-into-the-donor-s-ring", "tier-other",
           "A request that continues from a prefix settles its donor's ring and state, too.",
           Edit(ENGINE, GIVEN, GIVEN + TWICE), how=PLAIN),
    _fault("offload-frees-nothing", "tier-evicted",
           "An offloaded prefix is still held on the device, so nothing is freed.",
           Edit(TIERS, POP, f"        {POP}\n        self.__dict__.setdefault(\"_held\", []).append(kept)\n"),
           seen=("copies",), blind=("identity", "bytes")),
    _fault("evicted-and-still-there", "tier-evicted", "An eviction forgets the device, and not the host.",
           Edit(TIERS, FORGET, "        self.here.pop(name, None)\n"), seen=("copies",), blind=("identity", "bytes")),
    _fault("evicted-and-served-again", "tier-evicted",
           "A copy on the host outlives its eviction: whatever is put there under that name later is taken for it.",
           Edit(TIERS, FORGET, "        if self.here.pop(name, None) is None:\n"
                "            self.__dict__.setdefault(\"_old\", {})[name] = self.aside.pop(name)\n"),
           Edit(TIERS, "Aside(request, copied_alone(kept, memory, _to_host), Arrival(self._device))",
                "self.__dict__.get('_old', {}).get(name) or "
                "Aside(request, copied_alone(kept, memory, _to_host), Arrival(self._device))"),
           seen=("copies",), blind=("identity", "bytes")),
    _fault("evicted-with-a-shared-page", "tier-evicted",
           "An eviction frees the page on which the prefix began, while its donor still uses it.",
           Edit(ENGINE, EVICT, UNSHARED + EVICT), how=PLAIN),
)
