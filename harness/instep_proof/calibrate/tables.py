"""The two tables: how often a correct engine is called wrong, and how small an error is still found.

Blocks are taken as independent. Those of one engine share its order of sums, so a rate's bound is a guide, no proof.
Leaves out: running (`allowance_use.py`, `graded_errors.py`), and showing them (`report` of the command).
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import msgspec

from instep.verdict import Comparison, Exit, Verdict

from .allowance_use import Variant, alarm, described
from .graded_errors import STORAGES, Limit, judged_as, names
from .long_runs import LongRuns

# No event in n trials: the rate is under 3 / n with 95% confidence (0.95 = 1 - exp(-3)); with k events the bound is
# that of a Poisson count, from tables.
POISSON_95 = (3.0, 4.74, 6.30, 7.75, 9.15)
COUNTS = ("comparisons", "blocks", "elements", "alarms", "undecided")


@dataclass(frozen=True)
class Rate:
    """The results of a tier, or of a part of it, on correct engines.

    alarms     blocks' comparisons that failed; a run ends at its first
    worst      the largest used share of an allowance; by: the form of the engine that used it
    undecided  blocks and wrong states for which T2d could not decide; choices that T4 took for ties
    """

    tier: str
    storage: str
    comparisons: int = 0
    blocks: int = 0
    elements: int = 0
    alarms: int = 0
    undecided: int = 0
    worst: float = 0.0
    by: str = ""

    def plus(self, other: "Rate") -> "Rate":
        larger = not other.worst <= self.worst
        counts = {name: getattr(self, name) + getattr(other, name) for name in COUNTS}
        return replace(self, **counts, worst=(other if larger else self).worst, by=(other if larger else self).by)

    def with_one(self, one: Comparison, form: str) -> "Rate":
        return self.plus(Rate(self.tier, self.storage, 1, one.blocks, one.elements, int(not one.agrees), one.undecided,
                              one.used, form))  # fmt: skip

    @property
    def bound(self) -> float:
        """The rate of false alarms per block lies under this at 95%, if blocks are independent."""
        if not self.blocks:
            return 1.0
        events = POISSON_95[self.alarms] if self.alarms < len(POISSON_95) else self.alarms + 3 * self.alarms**0.5 + 3
        return min(1.0, events / self.blocks)


@dataclass
class Calibration:
    """Both tables and the data from which they are made."""

    device: str
    pairs: int = 0  # of a block and a wrong state: what T2d decided or could not
    rates: dict[tuple[str, str], Rate] = field(default_factory=dict)
    ran: list[Mapping[str, object]] = field(default_factory=list)
    alarms: list[Mapping[str, object]] = field(default_factory=list)
    limits: list[Limit] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    long: LongRuns | None = None

    def add(self, variant: Variant, verdict: Verdict) -> None:
        storage = variant.storage[0] if variant.storage[1] == "float32" else ", states ".join(variant.storage)
        for one in verdict.compared:
            key = judged_as(one), storage
            self.rates[key] = self.rates.get(key, Rate(*key)).with_one(one, variant.form)
        self.alarms += [alarm(variant, one) for one in verdict.findings]
        self.ran.append({**described(variant), "events": verdict.events, "elements": verdict.elements,
                         "alarms": len(verdict.findings)})

    @property
    def exit(self) -> Exit:
        if self.alarms or (self.long is not None and self.long.alarms):
            return Exit.DIVERGED
        return Exit.AGREED if self.ran or self.limits or (self.long and self.long.looks) else Exit.INCONCLUSIVE

    def table(self) -> list[Rate]:
        """By tier, then by storage."""
        return [self.rates[key] for key in sorted(self.rates)]

    def as_data(self) -> dict[str, object]:
        return {
            "device": self.device, "variants": len(self.ran), "pairs": self.pairs, "seconds": self.seconds,
            "false_alarms": [{**asdict(rate), "rate_under": rate.bound} for rate in self.table()],
            "alarms": self.alarms, "limits": self.limits, "ran": self.ran,
            **({} if self.long is None else {"long": self.long.as_data()}),
        }  # fmt: skip


def joined(device: str, parts: Iterable[Mapping[str, Any]]) -> Calibration:
    """The calibration whose parts are these result files."""
    whole = Calibration(device)
    for one in parts:
        whole.pairs += one["pairs"]
        for told in one["false_alarms"]:
            rate = msgspec.convert(told, Rate, strict=False)  # NaN is a text there
            key = rate.tier, rate.storage
            whole.rates[key] = whole.rates.get(key, Rate(*key)).plus(rate)
        whole.ran += one["ran"]
        whole.alarms += one["alarms"]
        if "long" in one:
            whole.long = whole.long or LongRuns()
            whole.long.add(one["long"])
        whole.limits += msgspec.convert(one["limits"], list[Limit])
        for name, seconds in one["seconds"].items():
            whole.seconds[name] = whole.seconds.get(name, 0.0) + seconds
    for listed in (whole.ran, whole.alarms, *((whole.long.ran, whole.long.alarms) if whole.long else ())):
        listed.sort(key=lambda variant: int(str(variant["number"])))
    places = list(names())
    whole.limits.sort(key=lambda one: (STORAGES.index(one.storage), places.index(one.place)))
    return whole


def by_tier(rates: Iterable[Rate]) -> list[Rate]:
    """The same over all storages."""
    found: dict[str, Rate] = {}
    for rate in rates:
        own = replace(rate, by=f"{rate.by}, {rate.storage}")
        found[rate.tier] = found.get(rate.tier, Rate(rate.tier, "all")).plus(own)
    return list(found.values())
